"""Which BLAS multiplies the matrices of a process, and which one its workers can be given.

On Linux, MLX's CPU wheel brings the reference BLAS, whose float32 products are 10-30x slower
than OpenBLAS's. A library that is preloaded (``LD_PRELOAD``, see ld.so(8)) takes the place of
the wheel's; that must be said before a process starts, so only worker processes can get one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs

from mlxcel.errors import UnsupportedError, UsageError

DEBIAN_PACKAGE = "libopenblas0-pthread"
SYMBOL = "cblas_sgemm"

ONE_THREAD: Mapping[str, str] = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
}
"""Every stage computes on one core; more threads would take the cores of the other stages."""

_TITLES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "accelerate": "Accelerate"}
_PROBE = f"import ctypes; ctypes.CDLL(None).sgemm_; ctypes.CDLL(None).{SYMBOL}"
_ASK = (
    "import mlx.core; from mlxcel.stage import blas; "
    "print(*map(blas.encode_blas, (blas.running_blas(), blas.linked_blas())), sep='\\n')"
)
_PROBE_SECONDS = 30.0


@attrs.frozen
class Blas:
    """A matrix library.

    Attributes:
        name: ``wheel`` (what MLX's wheel brings), ``openblas``, ``mkl``, ``blis``,
            ``accelerate`` or ``unknown``.
        path: Its file, where there is one.
    """

    name: str
    path: Path | None = None

    @property
    def fast(self) -> bool:
        """Whether it is known to be faster than MLX's own products of packed weights."""
        return self.name in _TITLES

    def __str__(self) -> str:
        if self.name == "wheel":
            return "the wheel's reference BLAS"
        title = _TITLES.get(self.name, "an unknown library")
        return title if self.path is None else f"{title} ({self.path})"


@attrs.frozen
class BlasChoice:
    """What ``--blas`` came to.

    Attributes:
        environment: What worker processes have in their environment beyond this one's.
        notice: One line for the user.
        fast: Whether the stages multiply with a fast BLAS.
    """

    environment: Mapping[str, str]
    notice: str
    fast: bool = False


def running_blas() -> Blas:
    """The BLAS that MLX uses in this process; MLX must be imported.

    It is asked of the dynamic linker, not of the list of loaded files: a symbol is looked up
    among the global libraries, preloaded ones first, and then in what libmlx itself links.
    """
    linked = linked_blas()
    # A libmlx that has its BLAS inside cannot be given another one.
    return linked if linked.path is None else _preloaded_blas() or linked


def linked_blas() -> Blas:
    """The BLAS that the loaded libmlx links by itself."""
    if sys.platform == "darwin":
        return Blas("accelerate")
    library = _loaded_mlx() if sys.platform == "linux" else None
    if library is None:
        return Blas("unknown")
    path = _owner(ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    return Blas("unknown") if path is None else _classify(path)


def encode_blas(blas: Blas) -> str:
    """``blas`` as one line, for another process."""
    return json.dumps([blas.name, None if blas.path is None else str(blas.path)])


def find_openblas() -> Path | None:
    """The system's OpenBLAS that can be preloaded, or None. Never the one within numpy."""
    return next(filter(_loadable, _openblas_candidates()), None)


def choose_blas(
    requested: str,
    *,
    workers: Literal["thread", "process"],
    platform: str = sys.platform,
) -> BlasChoice:
    """Decide what the stages multiply with.

    Args:
        requested: ``auto`` (a system OpenBLAS if there is one), ``wheel``, or a library's path.
        workers: Whether the stages are threads of this process or processes of their own.
        platform: As ``sys.platform``.

    Raises:
        UnsupportedError: The BLAS of a running process, or of this platform, cannot be chosen.
        UsageError: The path is not that of a BLAS.
    """
    path = None if requested in ("auto", "wheel") else Path(requested)
    if platform != "linux":
        if path is not None:
            raise UnsupportedError(
                f"--blas {path} works on Linux only; MLX links its BLAS firmly here.",
                "Leave --blas out.",
            )
        own = Blas("accelerate" if platform == "darwin" else "unknown")
        return BlasChoice({}, f"BLAS: {own}")
    if workers == "thread":
        return _for_threads(requested, path)
    if path is not None:
        return _preload(_checked(path))
    return _without_preload() if requested == "wheel" else _automatic()


def _blas_of_a_process() -> tuple[Blas, Blas]:
    """What MLX multiplies with in a process such as this one, and what it links by itself.

    Another process is asked: one that only looks after workers has no use for MLX.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
        running, linked = (json.loads(line) for line in done.stdout.splitlines())
    except (subprocess.TimeoutExpired, ValueError):  # what is wrong, the workers will say
        return Blas("unknown"), Blas("unknown")
    return _decoded(*running), _decoded(*linked)


def _decoded(name: str, path: str | None) -> Blas:
    return Blas(name, None if path is None else Path(path))


def _for_threads(requested: str, path: Path | None) -> BlasChoice:
    if path is not None:
        raise UnsupportedError(
            f"--blas {path} needs worker processes: a running process keeps its BLAS.",
            "Add --pp-workers process.",
        )
    import mlx.core  # noqa: F401

    running = running_blas()
    if requested == "wheel" and running != linked_blas():
        raise UnsupportedError(
            f"--blas wheel: {running} is preloaded into this process.",
            "Start it without LD_PRELOAD, or add --pp-workers process.",
        )
    if requested == "wheel" or running.fast:
        return BlasChoice({}, f"BLAS: {running}", running.fast)
    found = find_openblas()
    hint = _install() if found is None else f"--pp-workers process uses OpenBLAS ({found})"
    return BlasChoice({}, f"BLAS: {running}; {hint}")


def _automatic() -> BlasChoice:
    running, _ = _blas_of_a_process()
    if running.path is None:
        return BlasChoice({}, f"BLAS: {running}")
    if running.fast:
        return BlasChoice(ONE_THREAD, f"BLAS: {running}, one thread per stage", True)
    found = find_openblas()
    if found is None:
        return BlasChoice({}, f"BLAS: {running}; {_install()}")
    problem = _problem(found)
    if problem is not None:
        return BlasChoice({}, f"BLAS: {running}; {found} cannot be preloaded: {problem}")
    return _preload(found)


def _preload(library: Path) -> BlasChoice:
    before = os.environ.get("LD_PRELOAD", "")
    environment = {**ONE_THREAD, "LD_PRELOAD": f"{library}:{before}".rstrip(":")}
    blas = _classify(library)
    return BlasChoice(environment, f"BLAS: {blas}, one thread per stage", blas.fast)


def _without_preload() -> BlasChoice:
    """What MLX was built with, whatever is preloaded into this process."""
    _, linked = _blas_of_a_process()
    before = os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    kept = [entry for entry in before if not (entry and _classify(Path(entry)).fast)]
    environment = {} if kept == before else {"LD_PRELOAD": ":".join(kept)}
    if not linked.fast:
        return BlasChoice(environment, f"BLAS: {linked}")
    return BlasChoice(
        {**ONE_THREAD, **environment}, f"BLAS: {linked}, one thread per stage", linked.fast
    )


def _checked(path: Path) -> Path:
    library = path.absolute()
    problem = _problem(library) if library.is_file() else "there is no such file"
    if problem is not None:
        raise UsageError(
            f"--blas {path}: {problem}.",
            f"Give the path of a BLAS with CBLAS symbols, such as Debian's {DEBIAN_PACKAGE} has, "
            f"or auto.",
        )
    return library


def _problem(library: Path) -> str | None:
    """Why ``library`` cannot be preloaded as BLAS, as a process that tries it says; or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            env={**os.environ, **ONE_THREAD, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a process with it does not start within {_PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return None
    _, refused, reason = done.stderr.partition("cannot be preloaded (")
    if refused:
        return f"it cannot be loaded ({reason.partition('):')[0]})"
    return f"it is no BLAS: it has no {SYMBOL}"


def _install() -> str:
    return f"install {DEBIAN_PACKAGE} for 10-30x faster prefill (with --pp-workers process)"


# What the dynamic linker knows.


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _preloaded_blas() -> Blas | None:
    """The BLAS among the global libraries of this process, which all others must use."""
    path = _owner(ctypes.CDLL(None))
    return None if path is None else _classify(path)


def _owner(handle: ctypes.CDLL) -> Path | None:
    """The file of the BLAS symbol that ``handle`` finds."""
    try:
        address = ctypes.cast(getattr(handle, SYMBOL), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) or not info.file:
        return None
    return Path(os.fsdecode(info.file)).resolve()


def _loaded_mlx() -> Path | None:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        file = line.split(maxsplit=5)[-1]
        if file.endswith("/libmlx.so"):
            return Path(file)
    return None


def _classify(library: Path) -> Blas:
    """Told apart by the name of the file and its folder: distributions call all of them libblas."""
    real = library.resolve()
    name = f"{real.parent.name}/{real.name}".lower()
    for kind in ("openblas", "mkl", "blis"):
        if kind in name:
            return Blas(kind, library)
    bundled = real.parent.name.startswith("mlx") or real.name.startswith("libmlx.")
    return Blas("wheel" if bundled else "unknown", library)


# Where an OpenBLAS may be.


def _openblas_candidates() -> Iterator[Path]:
    yield from sorted(Path("/usr/lib").glob("*/openblas-pthread/libopenblas.so.0"))
    yield from sorted(Path("/usr/lib").glob("*/openblas-*/libopenblas.so.0"))
    folders = (Path(sys.prefix, "lib"), *map(Path, ("/usr/lib64", "/usr/lib", "/usr/local/lib")))
    for folder in (*folders, Path("/opt/OpenBLAS/lib")):
        # Not libopenblas64: its integers have 64 bits, MLX's calls have 32.
        for name in ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so.3"):
            yield folder / name
    yield from _from_linker_cache()


def _from_linker_cache() -> Iterator[Path]:
    """The entries of ``ldconfig -p``, lines such as ``libopenblas.so.0 (libc6) => /path``."""
    tool = Path("/sbin/ldconfig")
    if not tool.is_file():
        return
    listing = subprocess.run([tool, "-p"], capture_output=True, text=True).stdout
    for line in listing.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and name.startswith(("libopenblas.so.", "libopenblasp.so.")):
            yield Path(path)


def _loadable(library: Path) -> bool:
    """Whether ``library`` exists and is for the processor that Python runs on."""
    try:
        return _machine(library) == _machine(Path("/proc/self/exe"))
    except OSError:
        return False


def _machine(file: Path) -> tuple[bytes, bytes]:
    """Word size, byte order and processor of an ELF file, see elf(5)."""
    with file.open("rb") as stream:
        head = stream.read(20)
    return head[:6], head[18:20]
