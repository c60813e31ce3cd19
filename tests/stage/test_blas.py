"""Which BLAS a process runs, and which one worker processes get."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxcel.errors import UnsupportedError, UsageError
from mlxcel.stage import blas
from mlxcel.stage.blas import DEBIAN_PACKAGE, ONE_THREAD, choose_blas, find_openblas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can preload a BLAS")

OPENBLAS = find_openblas()
needs_openblas = pytest.mark.skipif(
    OPENBLAS is None, reason=f"no OpenBLAS is installed (Debian: {DEBIAN_PACKAGE})"
)
ASK = "import mlx.core; from mlxcel.stage.blas import running_blas as r; print(r().name, r().path)"
NO_PRELOAD = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def python(source: str, environment: Mapping[str, str], *args: str) -> str:
    """What a process with ``environment`` beyond this one's prints."""
    done = subprocess.run(
        [sys.executable, "-c", source, *args],
        env={**NO_PRELOAD, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)


# What runs.


def test_without_a_preload_it_is_the_wheels() -> None:
    """MLX multiplies with the library that its wheel brings."""
    name, path = python(ASK, {}).split()
    assert name == "wheel" and "mlx" in path


@needs_openblas
def test_a_preloaded_openblas_is_what_runs() -> None:
    """In the environment that auto chooses, MLX multiplies with that OpenBLAS."""
    choice = choose_blas("auto", workers="process")
    assert OPENBLAS is not None
    assert choice.fast and choice.environment["LD_PRELOAD"] == str(OPENBLAS)
    assert python(ASK, choice.environment).split() == ["openblas", str(OPENBLAS.resolve())]


@needs_openblas
def test_a_library_that_is_merely_loaded_does_not_count() -> None:
    """An OpenBLAS that some other package loads for itself is not what MLX uses."""
    assert python(f"import ctypes; ctypes.CDLL({str(OPENBLAS)!r}); {ASK}", {}).startswith("wheel")


@needs_openblas
def test_split_equals_whole_with_openblas(tiny: Callable[..., Path]) -> None:
    """Cut at every boundary, logits stay the same to the last bit under OpenBLAS too."""
    source = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlxcel.checkpoint.config import read_config\n"
        "from mlxcel.family.choose import choose_family\n"
        "from mlxcel.plugins import Plugins\n"
        "from mlxcel.stage.blas import running_blas\n"
        "from mlxcel.testing.split import check_split\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    family = choose_family(read_config(path), Plugins.discover())[1]\n"
        "    for dequantize in (False, True):\n"
        "        assert not check_split(path, family, dtype='float32', dequantize=dequantize)\n"
        "print(running_blas().name)\n"
    )
    paths = [tiny("llama", quantize="4:32"), tiny("gemma4_moe", quantize="4:32")]
    environment = choose_blas("auto", workers="process").environment
    assert python(source, environment, *map(str, paths)) == "openblas"


# What is found.


def test_files_for_another_processor_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that exists but is for another processor, or none at all, is not found."""
    head = bytearray(Path("/proc/self/exe").read_bytes()[:64])
    head[18] ^= 0xFF
    other, text, own = (tmp_path / name for name in ("other.so", "text.so", "own.so"))
    other.write_bytes(head)
    text.write_text("not a library")
    own.symlink_to("/proc/self/exe")
    files = iter([tmp_path / "missing.so", other, text, own])
    monkeypatch.setattr(blas, "_openblas_candidates", lambda: files)
    assert find_openblas() == own


# What is chosen.


def test_every_stage_has_one_thread() -> None:
    """Processes with a preloaded BLAS compute on one core each."""
    assert set(ONE_THREAD.values()) == {"1"}
    if OPENBLAS is not None:
        assert choose_blas("auto", workers="process").environment.items() >= ONE_THREAD.items()


def test_without_openblas_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no OpenBLAS is found, auto is the wheel's, and the notice says what to install."""
    monkeypatch.setattr(blas, "find_openblas", lambda: None)
    choice = choose_blas("auto", workers="process")
    assert (choice.environment, choice.fast) == ({}, False)
    assert DEBIAN_PACKAGE in choice.notice


def test_an_openblas_that_cannot_be_preloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is found but does not load is not used, and the notice says why."""
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.setattr(blas, "find_openblas", lambda: broken)
    choice = choose_blas("auto", workers="process")
    assert (choice.environment, choice.fast) == ({}, False)
    assert "cannot be preloaded" in choice.notice


@pytest.mark.parametrize("requested", ["auto", "wheel"])
def test_who_chooses_for_processes_has_no_mlx(requested: str) -> None:
    """A process that only starts workers learns what they will run with from another one."""
    source = (
        "import sys\n"
        "from mlxcel.stage.blas import choose_blas\n"
        f"notice = choose_blas({requested!r}, workers='process').notice\n"
        "assert 'mlx' not in sys.modules\n"
        "print(notice)\n"
    )
    assert python(source, {}) == choose_blas(requested, workers="process").notice != ""


@needs_openblas
def test_other_preloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user preloads stays, behind the BLAS."""
    monkeypatch.setenv("LD_PRELOAD", "/lib/libsomething.so")
    environment = choose_blas(str(OPENBLAS), workers="process").environment
    assert environment["LD_PRELOAD"] == f"{OPENBLAS}:/lib/libsomething.so"


@needs_openblas
def test_a_preloaded_blas_is_used_or_taken_away() -> None:
    """Preloaded by the user, OpenBLAS serves threads too; wheel takes it from processes only."""
    source = (
        "from mlxcel.errors import UnsupportedError\n"
        "from mlxcel.stage.blas import choose_blas\n"
        "assert choose_blas('auto', workers='thread').fast\n"
        "auto = choose_blas('auto', workers='process')\n"
        "assert auto.fast and 'LD_PRELOAD' not in auto.environment\n"
        "wheel = choose_blas('wheel', workers='process')\n"
        "assert not wheel.fast and wheel.environment == {'LD_PRELOAD': ''}\n"
        "try:\n"
        "    choose_blas('wheel', workers='thread')\n"
        "except UnsupportedError as error:\n"
        "    print(error)\n"
    )
    assert "--pp-workers process" in python(source, {"LD_PRELOAD": str(OPENBLAS)})


@pytest.mark.parametrize("requested", ["auto", "wheel"])
def test_threads_use_the_wheels(requested: str) -> None:
    """A running process cannot change its BLAS, so threads have no environment to set."""
    choice = choose_blas(requested, workers="thread")
    assert (choice.environment, choice.fast) == ({}, False)
    assert "the wheel's" in choice.notice and "\n" not in choice.notice


def test_a_path_needs_processes() -> None:
    """--blas PATH with threads is refused with the flag that makes it possible."""
    with pytest.raises(UnsupportedError, match="--pp-workers process"):
        choose_blas("/usr/lib/libopenblas.so.0", workers="thread")


@pytest.mark.parametrize("content", [None, "text", "libc"])
def test_a_path_that_is_no_blas(tmp_path: Path, content: str | None) -> None:
    """A path that does not exist, is no library or has no BLAS in it is refused by name."""
    path = tmp_path / "some.so"
    if content == "text":
        path.write_text(content)
    elif content is not None:
        libc = next(
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libc.so" in line or "libc-" in line or "ld-musl" in line
        )
        path.symlink_to(libc)
    with pytest.raises(UsageError, match=str(path)):
        choose_blas(str(path), workers="process")


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_off_on_macos(workers: str) -> None:
    """On macOS MLX has Apple's Accelerate, and a path is refused."""
    choice = choose_blas("auto", workers=workers, platform="darwin")  # type: ignore[arg-type]
    assert (choice.environment, choice.fast) == ({}, False)
    assert "Accelerate" in choice.notice
    with pytest.raises(UnsupportedError, match="Linux only"):
        choose_blas("/x.so", workers=workers, platform="darwin")  # type: ignore[arg-type]
