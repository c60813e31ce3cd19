"""The cluster's secret: what proves to a node that another one belongs to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from mlxcel.errors import FileError, SecretError

SECRET_FILE = "MLXCEL_CLUSTER_SECRET_FILE"
SECRET = "MLXCEL_CLUSTER_SECRET"
FLAG = "--cluster-secret-file"

SHORTEST = 16
LONGEST = 4096
"""Bytes of a secret, without white space at its end."""


@attrs.frozen
class ClusterSecret:
    """A secret, and where it comes from.

    ``value`` has at least :data:`SHORTEST` bytes and never shows in logs. ``warning`` is a line
    for the operator, or empty.
    """

    value: bytes = attrs.field(repr=False)
    source: str = ""
    warning: str = ""


def find_secret(
    file: Path | None, environ: Mapping[str, str], toml: Path | None = None
) -> ClusterSecret:
    """The secret of the first source that is there.

    Args:
        file: The value of ``--cluster-secret-file``.
        environ: Where ``MLXCEL_CLUSTER_SECRET_FILE`` (a path) and then
            ``MLXCEL_CLUSTER_SECRET`` (the secret itself) are looked for.
        toml: The ``secret_file`` of the cluster's TOML.

    Raises:
        SecretError: There is none, or the first source has none that can be used: a source that
            was given and is wrong never makes way for the next.
    """
    if file is not None:
        return read_secret(file, FLAG)
    if (path := environ.get(SECRET_FILE)) is not None:
        return read_secret(Path(path), SECRET_FILE)
    if (text := environ.get(SECRET)) is not None:
        return ClusterSecret(_checked(os.fsencode(text), SECRET), SECRET)
    if toml is not None:
        return read_secret(toml, "secret_file")
    raise SecretError("", f"neither {FLAG}, {SECRET_FILE} nor {SECRET} says which.")


def read_secret(path: Path, name: str) -> ClusterSecret:
    """The secret in the file ``path``; ``name`` is the flag, variable or key that names it.

    Raises:
        SecretError: It cannot be read, or what it holds is too short or too long.
    """
    source = f"{name} {path}"
    try:
        with path.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            raw = opened.read(2 * LONGEST)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise SecretError(source, f"it cannot be read ({text}).") from error
    warning = ""
    if mode & 0o077:
        warning = (
            f"{path} is open to other users of this machine (mode {mode:04o}): "
            f"run `chmod 600 {shlex.quote(str(path))}`."
        )
    return ClusterSecret(_checked(raw, source), source, warning)


def create_secret(path: Path) -> None:
    """Write a new random secret of 256 bits to ``path``, for its owner only.

    Raises:
        FileError: There is such a file already, or it cannot be written.
    """
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.link(part, path)  # whole or not at all, and never over another file
    except OSError as error:
        if os.path.lexists(path):
            raise FileError(
                path,
                "exists already.",
                "Use it, or name another file; to replace it, delete it first and copy the new "
                "one to all nodes.",
            ) from error
        raise FileError(
            path,
            f"cannot be written ({error.strerror or error}).",
            "Name a file in a folder that is yours.",
        ) from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _checked(raw: bytes, source: str) -> bytes:
    value = raw.rstrip()
    if not value:
        raise SecretError(source, "it is empty.")
    if len(value) < SHORTEST:
        raise SecretError(source, f"it has {len(value)} bytes, at least {SHORTEST} are needed.")
    if len(value) > LONGEST:
        raise SecretError(source, f"it has more than {LONGEST} bytes.")
    return value
