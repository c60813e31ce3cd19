"""Checkpoints are told apart without reading weights, and the right one is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from mlxcel.cluster import identity
from mlxcel.cluster.identity import Checkpoints, identify
from mlxcel.errors import CheckpointError, CheckpointMismatch

Tiny = Callable[..., Path]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def touch_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().rstrip() + " ")


def cut_weights(folder: Path) -> None:
    """Make the weights 4 bytes longer: the header stays valid, the size does not."""
    with next(folder.glob("*.safetensors")).open("ab") as file:
        file.write(b"\0\0\0\0")


def test_an_identity_is_config_and_sizes(folder: Path) -> None:
    """The digest of config.json, every weight file with its size, the number of layers."""
    found = identify(folder)
    config = (folder / "config.json").read_bytes()
    assert found.config == hashlib.sha256(config).hexdigest()
    assert found.layers == json.loads(config)["num_hidden_layers"]
    weights = sorted(folder.glob("*.safetensors"))
    assert found.files == tuple((file.name, file.stat().st_size) for file in weights)


def test_a_copy_is_the_same_checkpoint(folder: Path, tiny: Tiny) -> None:
    """Where a checkpoint lies does not matter."""
    assert identify(folder) == identify(tiny("llama"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (touch_config, r"config\.json differs"),
        (cut_weights, r"model\S*\.safetensors has \d+ bytes, not \d+"),
    ],
)
def test_what_differs_is_told(
    folder: Path, tiny: Tiny, change: Callable[[Path], None], told: str
) -> None:
    """One byte of config or weights makes another checkpoint, and the refusal names the file."""
    wanted = identify(tiny("llama"))
    checkpoints = Checkpoints([folder])
    assert checkpoints.find(wanted) == folder
    change(folder)
    with pytest.raises(CheckpointMismatch, match=told) as caught:
        checkpoints.find(wanted)
    assert caught.value.folder == folder
    assert "Copy the coordinator's folder to this peer" in str(caught.value)


def test_a_corrected_checkpoint_is_found_at_the_next_offer(folder: Path, tiny: Tiny) -> None:
    """What is known of a folder holds only until a file of it changes."""
    wanted = identify(tiny("llama"))
    touch_config(folder)
    checkpoints = Checkpoints([folder])
    with pytest.raises(CheckpointMismatch):
        checkpoints.find(wanted)
    shutil.copy(tiny("llama") / "config.json", folder / "config.json")
    assert checkpoints.find(wanted) == folder


def test_an_unchanged_checkpoint_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers of large checkpoints take time, so they are not read again for each offer."""
    reads: list[Path] = []

    def counted(path: Path) -> object:
        reads.append(path)
        return identify(path)

    monkeypatch.setattr(identity, "identify", counted)
    checkpoints = Checkpoints([folder])
    wanted = checkpoints.identity(folder)
    assert checkpoints.find(wanted) == checkpoints.find(wanted) == folder
    assert reads == [folder]


def test_a_folder_of_checkpoints_holds_all_of_them(tiny: Tiny, tmp_path: Path) -> None:
    """The one that matches is taken, whatever else is there."""
    for name in ("llama", "jamba"):
        shutil.copytree(tiny(name), tmp_path / name)
    (tmp_path / "notes").mkdir()
    checkpoints = Checkpoints([tmp_path])
    assert checkpoints.find(identify(tiny("llama"))) == tmp_path / "llama"
    assert checkpoints.find(identify(tiny("jamba"))) == tmp_path / "jamba"


def test_a_checkpoint_that_is_copied_to_a_waiting_peer_is_found(tiny: Tiny, tmp_path: Path) -> None:
    """The way out that a refusal names needs no restart."""
    shutil.copytree(tiny("jamba"), tmp_path / "jamba")
    checkpoints, wanted = Checkpoints([tmp_path]), identify(tiny("llama"))
    with pytest.raises(CheckpointMismatch):
        checkpoints.find(wanted)
    shutil.copytree(tiny("llama"), tmp_path / "llama")
    assert checkpoints.find(wanted) == tmp_path / "llama"


def test_a_checkpoint_that_is_gone_is_told(folder: Path) -> None:
    """A peer whose folder was removed while it waited refuses with that."""
    checkpoints, wanted = Checkpoints([folder]), identify(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoints.find(wanted)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("above", [False, True])
def test_a_checkpoint_that_cannot_be_looked_at_is_told(
    folder: Path, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that fails while a peer waits is a refusal with its cause, at its start too."""
    path = folder.parent if above else folder
    checkpoints, wanted = Checkpoints([path]), identify(folder)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "stat", fails)
    with pytest.raises(CheckpointMismatch, match=r"cannot be read \(Stale file handle\)"):
        checkpoints.find(wanted)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Stale file handle\)"):
        Checkpoints([path])
    with pytest.raises(CheckpointError, match=r"cannot be read \(Stale file handle\)"):
        identify(folder)


def test_the_closest_of_several_is_told(tiny: Tiny, tmp_path: Path) -> None:
    """A refusal speaks of the checkpoint that was probably meant; a damaged one is no obstacle."""
    for name in ("llama", "jamba"):
        shutil.copytree(tiny(name), tmp_path / name)
    wanted = attrs.evolve(identify(tiny("llama")), config="0" * 64)
    (tmp_path / "jamba" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointMismatch, match=r"closest of 2 checkpoints.*config\.json differs"):
        Checkpoints([tmp_path]).find(wanted)


def test_many_differences_are_cut_short() -> None:
    """A refusal stays one line that can be read."""
    text = str(CheckpointMismatch(Path("m"), ("a", "b", "c", "d", "e"), 0))
    assert "a; b; c; and 2 more." in text


@pytest.mark.parametrize("content", [{}, {"config.json": "{"}])
def test_what_is_no_checkpoint_is_refused_at_once(tmp_path: Path, content: dict[str, str]) -> None:
    """A peer does not start with a folder that it can do nothing with."""
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError):
        Checkpoints([tmp_path])
