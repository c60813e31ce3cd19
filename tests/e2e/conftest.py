"""Servers as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import pytest

from mlxcel.cluster.addresses import Address, parse_address
from mlxcel.cluster.assign import assign
from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.introduce import introduce
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.remote_model import Wishes, make_offers, plan_remotely
from mlxcel.cluster.remote_pipeline import running_remotely
from mlxcel.cluster.secret import SECRET_FILE, create_secret, read_secret
from mlxcel.engine.generation import Generation
from mlxcel.engine.local import open_model, running
from mlxcel.engine.slot import Request
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import ALONE, TensorParallel
from mlxcel.testing import tiny as tiny_checkpoints
from mlxcel.transport import TransportOptions
from mlxcel.transport.make import make_transport

Serve = Callable[..., str]
LISTENING = "listening on "


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts ``mlxcel serve`` for a checkpoint with further flags; the URL, once it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path, *flags: str) -> str:
        mlxcel = str(Path(sys.executable).with_name("mlxcel"))
        process = subprocess.Popen(
            [mlxcel, "serve", "-m", str(folder), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            if line.startswith(LISTENING):
                url = line.removeprefix(LISTENING).strip()
                _wait_until_ready(url, process)
                return url
            told.append(line)
        raise AssertionError(f"the server ended: {told}")

    yield start
    for process in processes:
        process.terminate()
        process.communicate()


def _wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                return
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it loads
                raise
    raise AssertionError("the server ended while it loaded")


WAIT = 60.0
"""Seconds within which a process must have said what a test waits for."""


class Node:
    """A process of a cluster; what it prints is kept as it comes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.command, self.env, self.cwd = command, env, cwd
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.start()

    def start(self, *flags: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [*self.command, *flags],
            env={**os.environ, **self.env, **env},
            cwd=self.cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # tests under nohup
        )
        self._ended = False
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def restart(self, *flags: str, **env: str) -> None:
        """The same again, after its end, with further flags and environment for this once."""
        self.end()
        self.lines = []
        self.start(*flags, **env)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, text: str, times: int = 1) -> str:
        """The line that has ``text``, when there are so many of them; the last of these."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        self._wait_until(lambda: len(found()) >= times, text)
        return found()[times - 1]

    def wait_until_armed(self) -> None:
        """Of a peer: until it has a fresh worker after its last session."""

        def is_armed() -> bool:
            said = [line.partition(":")[0] for line in self.lines]
            return "armed" in [word for word in said if word in ("armed", "released")][-1:]

        self._wait_until(is_armed, "armed, after the last session")

    def _wait_until(self, wanted: Callable[[], bool], what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: wanted() or self._ended, WAIT)
            assert wanted(), "\n".join([f"no {what!r}:", *self.lines])

    def count(self, text: str) -> int:
        """How many lines have ``text`` so far."""
        return sum(text in line for line in self.lines)

    def exit_code(self, seconds: float = WAIT) -> int:
        """How it ends, once all that it said has been read."""
        code = self.process.wait(seconds)
        self._reader.join(WAIT)
        return code

    def workers(self) -> list[int]:
        """The process numbers of its children."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in tasks for pid in path.read_text().split()]

    def is_stopped(self) -> bool:
        """Whether a SIGSTOP holds it."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(") ")[2].startswith("T")

    def end(self) -> None:
        """Kill it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(WAIT)


class Cluster:
    """Peers on this machine that share a secret, and coordinators for them.

    Attributes:
        folder: Where all of them run.
        peers: In the order of their stages.
    """

    def __init__(self, folder: Path, models: Sequence[Path], *flags: str, **env: str) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        create_secret(self.secret)
        self._env = {SECRET_FILE: str(self.secret), **env}
        self._nodes: list[Node] = []
        self.addresses = sorted(f"127.0.0.1:{free_port()}" for _ in models)
        self.peers = [
            self.peer(address, model, *flags)
            for address, model in zip(self.addresses, models, strict=True)
        ]
        for peer in self.peers:
            peer.wait_for("listening on")

    def peer(self, address: str, models: Path, *flags: str) -> Node:
        """A further peer, which is not waited for."""
        command = ["--pp-peer", "-m", str(models), "--cluster-control-addr", address, *flags]
        return self.node(command)

    def coordinator(
        self, model: Path, *flags: str, peers: Sequence[str] = (), program: Sequence[str] = ()
    ) -> Node:
        """A coordinator on a free port over all peers, or those at the addresses ``peers``.

        Args:
            program: What Python is to run instead of the command.
        """
        peers = peers or self.addresses
        command = ["-m", str(model), "--port", "0", "--pp-auto", str(len(peers))]
        return self.node([*command, "--cluster-peers", ",".join(peers), *flags], program)

    def url(self, coordinator: Node) -> str:
        """Where a coordinator serves, when it is ready."""
        line = coordinator.wait_for(LISTENING)
        coordinator.wait_for("ready: ")
        return line.removeprefix(LISTENING).strip()

    def close(self) -> None:
        for node in self._nodes:
            node.end()

    def node(self, flags: Sequence[str], program: Sequence[str] = ()) -> Node:
        """``mlxcel serve`` with these flags and the cluster's secret."""
        mlxcel = str(Path(sys.executable).with_name("mlxcel"))
        command = [sys.executable, *program] if program else [mlxcel]
        node = Node([*command, "serve", *flags], self._env, self.folder)
        self._nodes.append(node)
        return node


def free_port() -> int:
    """A port that nobody uses now; peers must be told a port that others know too."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """A folder that peers hold: every tiny checkpoint there is."""
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_checkpoints.names():
        (folder / name).symlink_to(tiny(name))
    return folder


SECONDS = 60.0


def tokens(pipeline: WorkerPipeline) -> dict[int, list[int]]:
    """Three prompts of unequal length, one row a slot so that every step has one shape."""
    prompts = ([5, 3, 8, 13, 21, 34, 55], [2, 7], [1, 4, 9, 16, 25])
    requests = [Request(i, tuple(prompt), 6) for i, prompt in enumerate(prompts)]
    made: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    for event in Generation(pipeline, requests, end_tokens=(), rows=1, chunk=3):
        if event.token is not None:
            made[event.index].append(event.token)
    return made


@attrs.frozen
class Walk:
    """Runs checkpoints in one process and through peers, with a coordinator in this process."""

    plugins: Plugins

    def alone(self, folder: Path) -> dict[int, list[int]]:
        """What one process makes of the prompts."""
        model = open_model(folder, self.plugins, dtype="float32", weights="quantized")
        with running(model, credits=8, timeout=SECONDS) as pipeline:
            return tokens(pipeline)

    def through(
        self, cluster: Cluster, folder: Path, stages: int, tensor: TensorParallel = ALONE
    ) -> dict[int, list[int]]:
        """What the first peers of ``cluster`` make of them."""
        options = ClusterOptions(stages=stages, tensor=tensor, control=Address("127.0.0.1", 19000))
        addresses = [parse_address(address, "") for address in cluster.addresses]
        topology = assign(options, addresses).topology
        ours = introduce(
            self.plugins, node="coordinator", role="coordinator", cluster=topology.name
        )
        transport = make_transport(self.plugins, "tcp", TransportOptions())
        with Coordinator(read_secret(cluster.secret, "file"), ours, grace=30.0) as coordinator:
            nodes = [(node.id, node.address) for node in topology.stages]
            peers = coordinator.connect(nodes, SECONDS)
            wishes = Wishes(dtype="float32", weights="quantized", context=64, tensor=tensor)
            model = plan_remotely(folder, self.plugins, topology, peers, wishes, probe=True)
            offers = make_offers(model, topology, ours, credits=8, timeout=SECONDS)
            coordinator.bring_up(offers, SECONDS)
            with running_remotely(
                model, coordinator, transport, 30.0, SECONDS, credits=8
            ) as pipeline:
                return tokens(pipeline)


@pytest.fixture(scope="session")
def walk(plugins: Plugins) -> Walk:
    return Walk(plugins)


@pytest.fixture(scope="module")
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters: ``make_cluster([models, models])`` has two peers, which wait."""
    clusters: list[Cluster] = []

    def make(models: Sequence[Path], *flags: str, **env: str) -> Cluster:
        clusters.append(Cluster(tmp_path_factory.mktemp("cluster"), models, *flags, **env))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
