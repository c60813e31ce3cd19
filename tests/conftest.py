"""Fixtures that several test files share."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from aiohttp import web

from mlxcel.checkpoint.config import read_config
from mlxcel.family import Family
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.testing import tiny as tiny_checkpoints

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

DEMO_FOLDER = Path(__file__).parents[1] / ".demo"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Only one process at a time is within; tests may run in several."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Site:
    """A folder like site-packages, to which made-up distributions are installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def module(self, name: str, source: str) -> None:
        (self.path / f"{name}.py").write_text(source, encoding="utf-8")

    def distribution(
        self, name: str, groups: Mapping[str, Mapping[str, str]], version: str = "1.2.3"
    ) -> None:
        """Install ``name``; ``groups`` is entry-point group to {entry name: module:object}."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(header, encoding="utf-8")
        lines = []
        for group, points in groups.items():
            lines.append(f"[{group}]")
            lines += [f"{entry} = {target}" for entry, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")

    def family(
        self,
        name: str,
        *,
        distribution: str = "",
        wire_names: tuple[str, ...] = (),
        model_types: tuple[str, ...] = (),
        api_version: str | None = "1.0",
        fallback: bool = False,
        before: str = "",
    ) -> None:
        """Install a family; ``before`` is source that runs at its import."""
        distribution = distribution or f"fake-family-{name}"
        module = distribution.replace("-", "_")
        wire_names = wire_names or (name,)
        api = "" if api_version is None else f"    api_version = {api_version!r}\n"
        self.module(
            module,
            f"{before}\nfrom mlxcel.family import Family\n\n"
            f"class Fake(Family):\n{api}"
            f"    wire_names = {wire_names!r}\n    model_types = {model_types!r}\n"
            f"    fallback = {fallback!r}\n\n"
            f"plugin = Fake()\n",
        )
        points = dict.fromkeys(wire_names, f"{module}:plugin")
        self.distribution(distribution, {"mlxcel.families": points})

    def hooks(self, name: str, source: str) -> None:
        """Install a hook plugin, the module ``fake_hooks_<name>`` with ``source``."""
        header = 'from mlxcel.hookspecs import hookimpl\n\napi_version = "1.0"\n\n'
        self.module(f"fake_hooks_{name}", header + source)
        points = {"mlxcel.plugins": {name: f"fake_hooks_{name}"}}
        self.distribution(f"fake-hooks-{name}", points)

    def entry_points(self) -> list[metadata.EntryPoint]:
        distributions = metadata.distributions(path=[str(self.path)])
        return [point for distribution in distributions for point in distribution.entry_points]


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Site]]:
    """Makes site folders that are first on the path; forgets their modules afterwards."""
    sites: list[Site] = []

    def make(name: str) -> Site:
        sites.append(Site(tmp_path / name))
        monkeypatch.syspath_prepend(str(sites[-1].path))
        return sites[-1]

    yield make
    folders = tuple(str(site.path) for site in sites)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folders):
            del sys.modules[name]


@pytest.fixture
def site(make_site: Callable[[str], Site]) -> Site:
    return make_site("site")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny checkpoints: ``tiny("llama", quantize="4:32")`` is a folder.

    Each is made once a run, for all processes of it together, so no test may change one.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # what the workers' own folders are in

    def make(name: str, **options: Any) -> Path:
        given = sorted((key, value) for key, value in options.items() if value is not None)
        digest = hashlib.sha256(repr(given).encode()).hexdigest()
        folder = shared / "tiny" / digest[:8] / name
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    part = folder.with_suffix(".part")
                    tiny_checkpoints.build(name, part, **options).rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """The plugins that are installed, whatever the environment leaves out."""
    return Plugins.discover(environ={})


@pytest.fixture(scope="session")
def family_of(plugins: Plugins) -> Callable[[Path], Family]:
    """Chooses the family that serves a checkpoint, as every command does."""
    return lambda path: choose_family(read_config(path), plugins)[1]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as ``mlxcel fetch-demo-model`` makes it, kept between runs."""
    folder = DEMO_FOLDER / "smollm2"
    DEMO_FOLDER.mkdir(exist_ok=True)
    command = [sys.executable, "-c", "from mlxcel.cli.main import run; raise SystemExit(run())"]
    with locked(DEMO_FOLDER / "lock"):
        done = subprocess.run(
            [*command, "fetch-demo-model", str(folder)], capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"the demo model cannot be made:\n{done.stderr}")
    return folder


WebHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@pytest.fixture
def answering() -> Iterator[Callable[[WebHandler], str]]:
    """Serves a handler for every path, from a thread with a loop of its own; returns the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[web.ServerRunner] = []

    async def start(handler: WebHandler) -> str:
        runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=1.0)
        servers.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield lambda handler: asyncio.run_coroutine_threadsafe(start(handler), loop).result(60)
    for runner in servers:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
