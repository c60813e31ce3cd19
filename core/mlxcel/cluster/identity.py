"""What tells one checkpoint from another, and which of several folders holds the one that is meant.

No weights are read: a checkpoint is known by its config.json and the names and sizes of its weight
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlxcel.checkpoint.config import CONFIG_FILE, read_config
from mlxcel.checkpoint.index import weight_files
from mlxcel.cluster.messages import ModelIdentity
from mlxcel.errors import CheckpointError, CheckpointMismatch, MlxcelError

Signature = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of every file of a folder."""


def identify(folder: Path) -> ModelIdentity:
    """The identity of the checkpoint in ``folder``.

    Raises:
        CheckpointError: It is missing, incomplete or malformed.
    """
    try:
        config = read_config(folder)
        digest = hashlib.sha256(config.path.read_bytes()).hexdigest()
        files = tuple((file.name, file.stat().st_size) for file in weight_files(folder).files)
    except OSError as error:  # it changes at this moment
        raise _unreadable(folder, error) from error
    return ModelIdentity(digest, tuple(sorted(files)), config.num_layers)


class Checkpoints:
    """The checkpoints that a peer can take part with.

    Each is read once and again when a file of it has changed. Which there are is looked up for
    each offer, so that one may be copied to a peer that waits.

    Args:
        paths: Folders of checkpoints, or folders that hold such folders.

    Raises:
        CheckpointError: A path is neither, or the only checkpoint is damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._known: dict[Path, tuple[Signature, ModelIdentity]] = {}
        folders = {folder for path in self.paths for folder in _checkpoints_at(path)}
        if len(folders) == 1:
            self.identity(*folders)

    def identity(self, folder: Path) -> ModelIdentity:
        """The identity of the checkpoint in ``folder``, as it is now.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        signature = _signature(folder)
        known = self._known.get(folder)
        if known is None or known[0] != signature:
            known = self._known[folder] = (signature, identify(folder))
        return known[1]

    def find(self, wanted: ModelIdentity) -> Path:
        """The folder whose checkpoint is the ``wanted`` one.

        Raises:
            CheckpointMismatch: There is none; the text says how the closest one differs.
        """
        differences: dict[Path, tuple[str, ...]] = {}
        damaged: dict[Path, tuple[str, ...]] = {}
        for folder in self._folders():
            try:
                found = self.identity(folder)
            except MlxcelError as error:
                damaged[folder] = (str(error).rstrip("."),)
                continue
            if found == wanted:
                return folder
            differences[folder] = tuple(_differences(wanted, found))
        candidates = differences or damaged
        closest = min(candidates, key=lambda folder: len(candidates[folder]))
        others = len(differences) + len(damaged) - 1
        raise CheckpointMismatch(closest, candidates[closest], others)

    def _folders(self) -> Iterator[Path]:
        """The folders of checkpoints that are there now."""
        for path in self.paths:
            try:
                yield from _checkpoints_at(path)
            except CheckpointError:
                yield path  # it was one when this peer started; its error says what it is now


def _checkpoints_at(path: Path) -> list[Path]:
    """``path`` itself if it is a checkpoint, else those right below it.

    Raises:
        CheckpointError: It is neither, or cannot be looked at.
    """
    try:
        if path.is_dir() and not (path / CONFIG_FILE).is_file():
            below = sorted(file.parent for file in path.glob(f"*/{CONFIG_FILE}"))
            if below:
                return [folder.absolute() for folder in below]
        return [read_config(path).path.parent.absolute()]
    except OSError as error:  # such as a network file system whose server has gone
        raise _unreadable(path, error) from error


def _signature(folder: Path) -> Signature:
    try:
        found = [(file.name, file.stat()) for file in folder.iterdir()]
    except OSError as error:
        raise _unreadable(folder, error) from error
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def _unreadable(folder: Path, error: OSError) -> CheckpointError:
    problem = f"cannot be read ({error.strerror or error})."
    return CheckpointError(folder, problem, "Look at the folder.")


def _differences(wanted: ModelIdentity, found: ModelIdentity) -> Iterator[str]:
    if wanted.config != found.config:
        layers = f" ({found.layers} layers, not {wanted.layers})"
        yield f"{CONFIG_FILE} differs{layers if wanted.layers != found.layers else ''}"
    theirs, ours = dict(wanted.files), dict(found.files)
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours:
            yield f"{name} is missing"
        elif name not in theirs:
            yield f"{name} is one too many"
        elif ours[name] != theirs[name]:
            yield f"{name} has {ours[name]} bytes, not {theirs[name]}"
