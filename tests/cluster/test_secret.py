"""The cluster's secret: where it comes from, what it must be, how one is made."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlxcel.cluster.secret import LONGEST, ClusterSecret, create_secret, find_secret, read_secret
from mlxcel.errors import FileError, SecretError

FLAG, PATH, VALUE, TOML = b"flag" * 5, b"path" * 5, b"value" * 5, b"toml" * 5


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_order_of_the_sources(tmp_path: Path) -> None:
    """Flag, file variable, variable, TOML: the first that is there counts."""
    flag, path, toml = (
        write(tmp_path / name, content)
        for name, content in (("flag", FLAG), ("path", PATH), ("toml", TOML))
    )
    both = {"MLXCEL_CLUSTER_SECRET_FILE": str(path), "MLXCEL_CLUSTER_SECRET": VALUE.decode()}
    one = {"MLXCEL_CLUSTER_SECRET": VALUE.decode()}
    found = [
        find_secret(flag, both, toml),
        find_secret(None, both, toml),
        find_secret(None, one, toml),
        find_secret(None, {}, toml),
    ]
    assert [secret.value for secret in found] == [FLAG, PATH, VALUE, TOML]
    assert [secret.source for secret in found] == [
        f"--cluster-secret-file {flag}",
        f"MLXCEL_CLUSTER_SECRET_FILE {path}",
        "MLXCEL_CLUSTER_SECRET",
        f"secret_file {toml}",
    ]


def test_white_space_at_the_end_does_not_count(tmp_path: Path) -> None:
    """What editors and shells append is left out; what stands before stays."""
    file = write(tmp_path / "secret", b" " + FLAG + b" \t\r\n\n")
    assert find_secret(file, {}).value == b" " + FLAG
    environ = {"MLXCEL_CLUSTER_SECRET": VALUE.decode() + "\n"}
    assert find_secret(None, environ).value == VALUE


def test_bytes_of_the_environment_stay_as_they_are() -> None:
    """A secret need not be text."""
    raw = b"\xff\xfe" * 8
    assert find_secret(None, {"MLXCEL_CLUSTER_SECRET": os.fsdecode(raw)}).value == raw


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is empty."),
        (b" \n", "it is empty."),
        (b"x" * 15 + b"\n", "it has 15 bytes, at least 16 are needed."),
        (b"x" * (LONGEST + 1), f"it has more than {LONGEST} bytes."),
    ],
)
def test_secrets_that_are_none(tmp_path: Path, content: bytes, problem: str) -> None:
    """Too short, empty or endless: the error names the source and the command that helps."""
    file = write(tmp_path / "secret", content)
    with pytest.raises(SecretError) as caught:
        find_secret(file, {})
    assert caught.value.problem == problem
    assert f"--cluster-secret-file {file}" in str(caught.value)
    assert "mlxcel cluster secret PATH" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["MLXCEL_CLUSTER_SECRET", "MLXCEL_CLUSTER_SECRET_FILE"])
def test_a_wrong_source_never_makes_way(tmp_path: Path, name: str) -> None:
    """A variable that is set and empty is an error, though the next source is right."""
    toml = write(tmp_path / "toml", TOML)
    with pytest.raises(SecretError, match=name):
        find_secret(None, {name: ""}, toml)


@pytest.mark.parametrize("name", [".", "missing"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """A folder, or nothing at all, is named."""
    with pytest.raises(SecretError, match="it cannot be read"):
        find_secret(tmp_path / name, {})


def test_no_source_at_all() -> None:
    """Without any secret the error names all ways to give one."""
    with pytest.raises(SecretError) as caught:
        find_secret(None, {})
    for name in ("--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET"):
        assert name in str(caught.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_files_that_others_can_read(tmp_path: Path, mode: int, warned: bool) -> None:
    """The warning says how to close the file; it works all the same."""
    file = write(tmp_path / "my secret", FLAG, mode)
    secret = read_secret(file, "flag")
    assert secret.value == FLAG
    assert bool(secret.warning) is warned
    if warned:
        assert f"(mode {mode:04o})" in secret.warning
        assert f"chmod 600 '{file}'" in secret.warning


def test_the_value_never_shows() -> None:
    """A secret in a log line or a traceback is not readable."""
    assert "hush" not in repr(ClusterSecret(b"hush" * 4, "a source"))


def test_a_new_secret(tmp_path: Path) -> None:
    """It is long, its own, for its owner only, and works; its folder is made."""
    first, second = tmp_path / "new folder" / "secret", tmp_path / "other"
    create_secret(first)
    create_secret(second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    secret = find_secret(first, {})
    assert len(secret.value) == 43  # 256 bits in base64
    assert secret.warning == ""
    assert secret.value != find_secret(second, {}).value
    assert list(first.parent.iterdir()) == [first]


def test_a_secret_is_never_overwritten(tmp_path: Path) -> None:
    """A second one under the same name is refused and changes nothing."""
    file = write(tmp_path / "secret", FLAG)
    with pytest.raises(FileError, match="exists already") as caught:
        create_secret(file)
    assert caught.value.path == file
    assert file.read_bytes() == FLAG
    assert list(tmp_path.iterdir()) == [file]


def test_a_secret_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where a folder should be is named with the cause."""
    write(tmp_path / "file", b"")
    with pytest.raises(FileError, match="cannot be written"):
        create_secret(tmp_path / "file" / "secret")
