"""A cluster on one machine: a coordinator and two peers, and the same tokens as one process.

    python examples/demo.py [FOLDER]

Gets SmolLM2-135M-Instruct into FOLDER (default ``.demo/smollm2``) unless it is there. Asks a server
in one process a few questions over HTTP; then starts two peers and a coordinator, processes of
their own that share a new secret and talk over encrypted loopback connections, and asks them the
same. Prints what each node says, how fast both were, and what went over the wire. The exit code is
0 only if all tokens are identical.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from mlxcel.cli.main import run as mlxcel

QUESTIONS = (
    "What is the capital of France? Answer briefly.",
    "Name three primary colours.",
    "What do bees make?",
    "Write a sentence about the sea.",
)
TOKENS = 24
SAME_STEPS = ("--pp-micro-batch-size", "1", "--prefix-cache", "0", "--pp-balance", "time")
"""One question in each micro-batch, so that both runs do the same steps."""

LISTENING = "listening on "
SECONDS = 120.0
BEAT_SECONDS = 1.5
"""After which the figures of the last steps have arrived."""

console = Console(highlight=False, soft_wrap=True)


@attrs.frozen
class Run:
    """What a server answered: the tokens of each question, and how fast."""

    tokens: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def speed(self) -> float:
        """Generated tokens per second, prompts included."""
        return sum(map(len, self.tokens)) / self.seconds


class Node:
    """A running command; what it says is shown behind its name."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], cwd: Path) -> None:
        self._name = name
        self._said = threading.Condition()
        self._lines: list[str] = []
        console.print(f"$ mlxcel {' '.join(command)}", style="bold")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlxcel", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            cwd=cwd,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, beginning: str) -> str:
        """The rest of the line that begins so.

        Raises:
            RuntimeError: The command ended, or took too long to say it.
        """

        def found() -> list[str]:
            return [line for line in self._lines if line.startswith(beginning)]

        with self._said:
            if not self._said.wait_for(found, SECONDS):
                raise RuntimeError(f"{self._name} did not come up")
            return found()[0].removeprefix(beginning)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            console.print(f"[{self._name}] {line.rstrip()}", style="dim", markup=False)
            with self._said:
                self._lines.append(line.rstrip())
                self._said.notify_all()


@contextmanager
def node(name: str, *command: str, home: Path) -> Iterator[Node]:
    """A command that runs within the context, with the secret of ``home``."""
    env = {"MLXCEL_CLUSTER_SECRET_FILE": str(home / "secret")}
    running = Node(name, command, env, home)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait()


def free_ports(count: int) -> list[int]:
    """So many ports that nobody uses."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [sock.getsockname()[1] for sock in sockets]


def ask_all(url: str) -> Run:
    """All questions at once; the answer to the first is shown as it comes."""
    console.print(f"\n> {QUESTIONS[0]}")
    began = time.perf_counter()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        tokens = tuple(pool.map(lambda question: ask(url, question), QUESTIONS))
    seconds = time.perf_counter() - began
    console.print("\n")
    return Run(tokens, seconds)


def ask(url: str, question: str) -> tuple[str, ...]:
    """The tokens of the answer to one question."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    tokens: list[str] = []
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            tokens += [
                entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())
            ]
            if question == QUESTIONS[0]:
                print(choice["delta"].get("content", ""), end="", flush=True)
    return tuple(tokens)


def get(url: str) -> Any:
    """The JSON object at ``url``, when the server takes requests."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it loads
                raise
            time.sleep(0.05)


def alone(model: str, home: Path) -> Run:
    """Ask a server that runs the whole model in one worker process."""
    with node("one process", "serve", "-m", model, "--port", "0", *SAME_STEPS, home=home) as server:
        url = server.wait_for(LISTENING)
        get(f"{url}/health")
        return ask_all(url)


def clustered(model: str, home: Path) -> tuple[Run, dict[str, Any]]:
    """Ask a coordinator with two peers; also what it says of their work."""
    addresses = sorted(f"127.0.0.1:{port}" for port in free_ports(2))
    with ExitStack() as stack:
        peers = [
            stack.enter_context(
                node(
                    f"peer {number}",
                    *("serve", "--pp-peer", "-m", model, "--cluster-control-addr", address),
                    home=home,
                )
            )
            for number, address in enumerate(addresses)
        ]
        for peer in peers:
            peer.wait_for(LISTENING)
        coordinator = stack.enter_context(
            node(
                "coordinator",
                *("serve", "-m", model, "--pp-auto", "2", "--cluster-peers", ",".join(addresses)),
                *("--port", "0", *SAME_STEPS),
                home=home,
            )
        )
        url = coordinator.wait_for(LISTENING)
        coordinator.wait_for("ready: ")
        run = ask_all(url)
        time.sleep(BEAT_SECONDS)
        return run, get(f"{url}/status")


def show(status: dict[str, Any]) -> None:
    """What each stage holds and received, and how long messages took between them."""
    stages = Table("stage", "node", "layers", "weights", "received over the wire")
    for stage in status["stages"]:
        stages.add_row(
            str(stage["stage"]),
            stage["place"],
            stage["layers"],
            f"{stage['bytes_total'] / 1e6:.1f} MB",
            f"{stage['received'] / 1e6:.2f} MB",
        )
    hops = Table("from", "to", "messages", "p50", "p99")
    for hop in status["hops"]:
        hops.add_row(
            hop["from"],
            hop["to"],
            str(hop["count"]),
            f"{hop['p50']:.0f} µs",
            f"{hop['p99']:.0f} µs",
        )
    console.print(stages)
    console.print(hops)


def main(folder: Path) -> int:
    if code := mlxcel(["fetch-demo-model", str(folder)]):
        return code
    model = str(folder.resolve())
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        if code := mlxcel(["cluster", "secret", str(home / "secret")]):
            return code
        one = alone(model, home)
        two, status = clustered(model, home)
    show(status)
    identical = one.tokens == two.tokens
    console.print(f"one process {one.speed:.1f} tok/s, two peers {two.speed:.1f} tok/s")
    console.print(f"tokens identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/smollm2")))
