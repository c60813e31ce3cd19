"""Servers as real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from mlxcel.cluster.secret import SECRET_FILE, create_secret

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
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters: ``make_cluster([models, models])`` has two peers, which wait."""
    clusters: list[Cluster] = []

    def make(models: Sequence[Path], *flags: str, **env: str) -> Cluster:
        clusters.append(Cluster(tmp_path_factory.mktemp("cluster"), models, *flags, **env))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
