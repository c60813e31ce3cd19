"""Processes of a cluster that die, hang or do not fit: who says so, and who goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

GRACE = 2.0
SECONDS = 20.0
"""Within which a loss must have been told; the grace, and what a busy machine adds."""

ENDLESS = {"max_tokens": 100_000, "logit_bias": {"257": -100}}
"""A request that only its length ends."""

HOLD = """
import os
import time

from mlxcel.hookspecs import hookimpl

api_version = "1.0"


@hookimpl
def mlxcel_build_executor(spec):
    while os.path.exists(os.environ["HOLD_LOADING"]):
        time.sleep(0.01)
    return None
"""


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The second peer's copy of the checkpoint, which a test may damage."""
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("own") / "llama"))


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, no stage of the cluster gets beyond the beginning of its load."""
    return tmp_path_factory.mktemp("hold") / "hold"


def installed(site: Path, name: str, version: str, points: str = "") -> Path:
    """A folder like site-packages with one distribution in it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
    return site


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Any], model: Path, own: Path, hold: Path) -> Any:
    """Two peers that outlive the tests; one that a test breaks is started again."""
    site = installed(
        hold.parent / "site", "holding", "1.0", "[mlxcel.plugins]\nholding = holding\n"
    )
    (site / "holding.py").write_text(HOLD)
    flags = ("--blas", "wheel", "--cluster-heartbeat-grace", str(GRACE))
    return make_cluster([model, own], *flags, PYTHONPATH=str(site), HOLD_LOADING=str(hold))


@pytest.fixture(autouse=True)
def whole(cluster: Any) -> Iterator[None]:
    """What a test has broken is put right, so that the next one finds two peers that wait."""
    yield
    for peer in cluster.peers:
        if peer.process.poll() is not None or peer.is_stopped():
            peer.restart()
            peer.wait_for("listening on")


@pytest.fixture
def coordinate(cluster: Any, model: Path) -> Callable[..., Any]:
    """Starts a coordinator with the grace of these tests."""
    own = ("--cluster-heartbeat-grace", str(GRACE), "--ctx-size", "200000")
    return lambda *flags, peers=(): cluster.coordinator(model, *own, *flags, peers=peers)


@contextmanager
def streaming(url: str) -> Iterator[IO[bytes]]:
    """A completion under way: its first event has been read."""
    body = json.dumps({"prompt": "hello", "stream": True, **ENDLESS}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
        assert response.readline().startswith(b"data: ")
        yield response


def last_event(response: IO[bytes]) -> Any:
    data = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    return json.loads(data[-1])


def works(cluster: Any, coordinate: Callable[..., Any]) -> None:
    """A new coordinator brings the same peers up, serves, and ends well."""
    coordinator = coordinate()
    url = cluster.url(coordinator)
    body = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 3
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


def error_of(coordinator: Any) -> str:
    """The one line that a coordinator ends with, exit code 1."""
    assert coordinator.exit_code() == 1
    errors = [line for line in coordinator.lines if line.startswith("mlxcel: error: ")]
    assert len(errors) == 1, coordinator.lines
    assert coordinator.count("Traceback") == 0
    return str(errors[0])


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# In a stream.


@pytest.mark.parametrize(
    ("stage", "part", "harm"),
    [
        pytest.param(1, "peer", kill, id="a peer is killed"),
        pytest.param(0, "worker", kill, id="a worker is killed", marks=pytest.mark.slow),
        pytest.param(1, "worker", stop, id="a worker is stopped"),
        pytest.param(0, "peer", stop, id="a peer is stopped", marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_is_lost_in_a_stream(
    cluster: Any, coordinate: Callable[..., Any], stage: int, part: str, harm: Callable[[int], None]
) -> None:
    """Clients get a typed, retryable error, the operator name and address, the others re-arm."""
    peer, other = cluster.peers[stage], cluster.peers[1 - stage]
    released = other.count("released")
    coordinator = coordinate()
    url = cluster.url(coordinator)
    with streaming(url) as response:
        harm(peer.process.pid if part == "peer" else peer.workers()[0])
        error = last_event(response)["error"]
    assert (error["code"], error["retryable"]) == ("stage_lost", True)
    told = error_of(coordinator)
    assert f"stage-{stage} @ {cluster.addresses[stage]} is lost" in told
    assert error["message"] in told
    other.wait_for("released", released + 1)


@pytest.mark.parametrize("harm", [kill, pytest.param(stop, marks=pytest.mark.slow)])
def test_a_coordinator_that_is_lost_in_a_stream(
    cluster: Any, coordinate: Callable[..., Any], harm: Callable[[int], None]
) -> None:
    """The peers say who is gone and re-arm; one that comes back finds itself without peers."""
    released = [peer.count("released") for peer in cluster.peers]
    coordinator = coordinate()
    url = cluster.url(coordinator)
    with streaming(url):
        harm(coordinator.process.pid)
        for peer, before in zip(cluster.peers, released, strict=True):
            line = peer.wait_for("released", before + 1)
            assert "the coordinator at 127.0.0.1" in line
    if harm is stop:
        os.kill(coordinator.process.pid, signal.SIGCONT)
        assert "is lost" in error_of(coordinator)


class Cable:
    """Carries connections on to a peer until it is cut: then nothing comes through any more, and
    neither end hears of it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._uncut = 0
        self._mended = threading.Event()
        self._mended.set()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, all_but: int = 0) -> None:
        """Let nothing through, except for the first ``all_but`` connections."""
        self._uncut = all_but
        self._mended.clear()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._mended.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(*ends, number), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if number >= self._uncut:
                    self._mended.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("control", "what"),
    [
        pytest.param(1, "nothing comes through the data link", id="of the data"),
        pytest.param(0, "it has not answered for", id="whole", marks=pytest.mark.slow),
    ],
)
def test_a_cable_that_is_cut_in_a_stream(
    cluster: Any, coordinate: Callable[..., Any], control: int, what: str
) -> None:
    """No connection ends, so silence tells; while pings still come back, the link is named."""
    cable = Cable(cluster.addresses[1])
    released = [peer.count("released") for peer in cluster.peers]
    try:
        coordinator = coordinate(peers=[cluster.addresses[0], cable.address])
        url = cluster.url(coordinator)
        with streaming(url) as response:
            cable.cut(all_but=control)
            error = last_event(response)["error"]
        assert (error["code"], error["retryable"]) == ("stage_lost", True)
        assert what in error_of(coordinator)
        for peer, before in zip(cluster.peers, released, strict=True):
            peer.wait_for("released", before + 1)
    finally:
        cable.close()


# While the stages load.


@pytest.fixture
def loading(
    cluster: Any, coordinate: Callable[..., Any], hold: Path
) -> Iterator[Callable[[], Any]]:
    """Starts a coordinator whose stages stay at the beginning of their load until the end."""

    def start() -> Any:
        for peer in cluster.peers:
            peer.wait_until_armed()
        before = [peer.count("loading as stage") for peer in cluster.peers]
        hold.touch()
        coordinator = coordinate()
        for peer, count in zip(cluster.peers, before, strict=True):
            peer.wait_for("loading as stage", count + 1)
        return coordinator

    yield start
    hold.unlink()


@pytest.mark.parametrize("harm", [kill, pytest.param(stop, marks=pytest.mark.slow)])
def test_a_worker_that_is_lost_while_it_loads(
    cluster: Any, loading: Callable[[], Any], harm: Callable[[int], None]
) -> None:
    """The coordinator ends with the name of the stage, and both peers re-arm."""
    released = [peer.count("released") for peer in cluster.peers]
    coordinator = loading()
    harm(cluster.peers[1].workers()[0])
    assert f"stage-1 @ {cluster.addresses[1]} is lost" in error_of(coordinator)
    for peer, before in zip(cluster.peers, released, strict=True):
        peer.wait_for("released", before + 1)


def test_a_coordinator_that_is_interrupted_while_the_stages_load(
    cluster: Any, loading: Callable[[], Any]
) -> None:
    """SIGTERM does not wait for stages that hang: the peers are released at once."""
    released = [peer.count("released") for peer in cluster.peers]
    coordinator = loading()
    coordinator.wait_for("listening on")
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0
    for peer, before in zip(cluster.peers, released, strict=True):
        peer.wait_for("released", before + 1)


# While they wait.


@pytest.mark.slow
def test_a_worker_that_is_lost_while_it_waits(cluster: Any, coordinate: Callable[..., Any]) -> None:
    """Its peer arms another one, and no coordinator notices."""
    peer = cluster.peers[0]
    peer.wait_until_armed()
    armed = peer.count("armed: ")
    kill(peer.workers()[0])
    peer.wait_for("armed: ", armed + 1)
    works(cluster, coordinate)


def test_a_peer_that_is_not_there(cluster: Any, coordinate: Callable[..., Any]) -> None:
    """The coordinator names its address and what to start there; nothing starts elsewhere."""
    loaded = cluster.peers[0].count("loading as stage")
    cluster.peers[1].end()
    told = error_of(coordinate("--cluster-discovery-timeout", "0.1"))
    assert f"stage-1 @ {cluster.addresses[1]} (unreachable)" in told
    assert f"--pp-peer --cluster-control-addr {cluster.addresses[1]}" in told
    assert cluster.peers[0].count("loading as stage") == loaded


# Peers that do not fit.

Fault = tuple[str, Callable[[], None]]
"""What the operator must read of a fault, and what removes it."""


def another_byte(peer: Any, own: Path, tmp_path: Path) -> Fault:
    file = own / "config.json"
    before = file.read_bytes()
    file.write_bytes(before + b" ")
    return r"\(checkpoint\): .*config.json differs.*Copy", lambda: restore(file, before)


def a_shorter_file(peer: Any, own: Path, tmp_path: Path) -> Fault:
    file = sorted(own.glob("*.safetensors"))[0]
    before = file.read_bytes()
    file.write_bytes(before[:-4])
    return rf"\(checkpoint\): .*{file.name}", lambda: restore(file, before)


def restore(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def again(peer: Any, *flags: str, **env: str) -> Callable[[], None]:
    """Start the peer otherwise; what is returned starts it as it was."""
    peer.restart(*flags, **env)
    peer.wait_for("listening on")

    def back() -> None:
        peer.restart()
        peer.wait_for("listening on")

    return back


def another_version(peer: Any, own: Path, tmp_path: Path) -> Fault:
    site = installed(tmp_path / "site", "mlx-lm", "0.0.1")
    way_back = again(peer, PYTHONPATH=f"{site}:{peer.env['PYTHONPATH']}")
    return r"\(version\): it has mlx-lm 0\.0\.1, the coordinator .*Install the same", way_back


def another_cluster(peer: Any, own: Path, tmp_path: Path) -> Fault:
    return "'elsewhere'.*--cluster-name", again(peer, "--cluster-name", "elsewhere")


def a_missing_family(peer: Any, own: Path, tmp_path: Path) -> Fault:
    text = r"\(family\): pipeline capability mismatch: .*'llama'.*Install that family"
    return text, again(peer, "--no-plugin", "llama")


def too_little_memory(peer: Any, own: Path, tmp_path: Path) -> Fault:
    (tmp_path / "sitecustomize.py").write_text(
        "import mlxcel.checkpoint.weights_mode as weights_mode\n"
        "weights_mode.available_memory = lambda: 1 << 20\n"
    )
    way_back = again(peer, PYTHONPATH=f"{tmp_path}:{peer.env['PYTHONPATH']}")
    return "bytes short: .*Free memory there", way_back


@pytest.mark.parametrize(
    "fault",
    [
        another_byte,
        a_missing_family,
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in (a_shorter_file, another_version, another_cluster, too_little_memory)
        ),
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_peer_that_does_not_fit(
    cluster: Any,
    coordinate: Callable[..., Any],
    own: Path,
    tmp_path: Path,
    fault: Callable[..., Fault],
) -> None:
    """The coordinator says which, why and what helps; nothing starts anywhere; when that peer is
    put right, the same command works without a restart of the other."""
    text, put_right = fault(cluster.peers[1], own, tmp_path)
    loaded = [peer.count("loading as stage") for peer in cluster.peers]
    told = error_of(coordinate())
    assert re.search(text, told), told
    assert cluster.addresses[1] in told
    assert [peer.count("loading as stage") for peer in cluster.peers] == loaded
    put_right()
    works(cluster, coordinate)
