"""Peers that are the ranks of stages: the same tokens as one process, and who is lost when."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from mlxcel.tensor.options import TensorParallel
from mlxcel.testing.quick import quick

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

GRACE = 3.0
SECONDS = 40.0
PAIRS = TensorParallel(2)
EVERYTHING = TensorParallel(2, "within_expert", "vocab_parallel", "vocab_parallel")

ENDLESS = {"max_tokens": 100_000, "logit_bias": {"257": -100}}
"""A request that only its length ends."""

UNLIKE = ("llama", "qwen3_moe", "deepseek_v3")
"""What differs in what ranks share out: heads, experts, latents."""

OTHERS = ("gemma4", "gpt_oss", "jamba", "kimi_k3", "llama4", "nemotron_h", "qwen3_5", "qwen3_next")


@pytest.fixture(scope="module")
def mesh(make_cluster: Callable[..., Any], models: Path) -> Any:
    """Four peers that compute as this process does."""
    flags = ("--blas", "wheel", "--cluster-heartbeat-grace", str(GRACE))
    return make_cluster([models] * 4, *flags)


@pytest.mark.parametrize("name", quick((*UNLIKE, *OTHERS), ("qwen3_moe",)))
def test_a_mesh_makes_the_tokens_of_one_process(
    mesh: Any, models: Path, walk: Any, name: str
) -> None:
    """Two stages of two ranks each, every one a peer: token for token what one process makes."""
    folder = models / name
    assert walk.through(mesh, folder, 2, PAIRS) == walk.alone(folder)


def test_everything_is_shared_out(mesh: Any, models: Path, walk: Any) -> None:
    """Experts, embedding and head can be split too; a stage alone can be the whole model."""
    folder = models / "qwen3_moe"
    assert walk.through(mesh, folder, 1, EVERYTHING) == walk.alone(folder)


# Over HTTP.


def complete(url: str) -> str:
    body = json.dumps({"prompt": "hello", "max_tokens": 8}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
        return str(json.load(response)["choices"][0]["text"])


@contextmanager
def streaming(url: str) -> Iterator[IO[bytes]]:
    """A completion under way: its first event has been read."""
    body = json.dumps({"prompt": "hello", "stream": True, **ENDLESS}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
        assert response.readline().startswith(b"data: ")
        yield response


@pytest.fixture
def coordinate(mesh: Any, models: Path) -> Callable[..., Any]:
    """Starts a coordinator of two stages with two ranks each."""
    flags = ("--pp-auto", "2", "--tp-size", "2", "--cluster-heartbeat-grace", str(GRACE))
    context = ("--ctx-size", "200000")
    return lambda *more, **named: mesh.coordinator(
        models / "llama", *flags, *context, *more, **named
    )


@pytest.fixture(scope="module")
def expected(serve: Callable[..., str], models: Path) -> str:
    """What one process writes."""
    url = serve(models / "llama", "--blas", "wheel", "--weights", "quantized")
    return complete(url)


LIGHT = """
import sys
from mlxcel.cli.main import run

code = run(sys.argv[1:])
heavy = [n for n in ("mlx", "mlx.core", "mlx_lm", "transformers") if n in sys.modules]
print("light:", code, heavy)
"""


def test_a_coordinator_serves_a_mesh(
    mesh: Any, models: Path, coordinate: Callable[..., Any], expected: str
) -> None:
    """It says which rank is where, serves what one process does, and stays light."""
    coordinator = coordinate(program=("-c", LIGHT))
    url = mesh.url(coordinator)
    assert complete(url) == expected
    health = json.load(urllib.request.urlopen(f"{url}/health", timeout=SECONDS))
    stages = [(stage["layers"], stage["ranks"]) for stage in health["stages"]]
    assert stages == [("0-2", 2), ("3-5", 2)]
    for index, address in enumerate(mesh.addresses):
        node = f"s{index // 2}-r{index % 2}"
        coordinator.wait_for(f"- {node} @ {address} [pipeline_tensor_parallel]")
        coordinator.wait_for(f"{node} @ {address}: layers ")
        coordinator.wait_for(f"{node}: loaded")
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0
    assert coordinator.wait_for("light:") == "light: 0 []"
    ours = (mesh.folder / ".mlxcel" / "cluster.toml").read_bytes()
    assert (mesh.folder / ".mlxcel" / "cluster-s1-r0.toml").read_bytes() == ours


def test_ranks_of_one_stage_serve(mesh: Any, models: Path, expected: str) -> None:
    """A cluster of a single stage, shared by two peers."""
    flags = ("--pp-auto", "1", "--tp-size", "2")
    coordinator = mesh.coordinator(models / "llama", *flags, peers=mesh.addresses[:2])
    assert complete(mesh.url(coordinator)) == expected
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


@pytest.mark.slow
def test_a_mesh_by_hand(mesh: Any, models: Path, expected: str) -> None:
    """A hand-written TOML gives every rank its node and its layers."""
    lines = ["[cluster]", "pipeline_parallel_size = 2", "tensor_parallel_size = 2"]
    for place, address in enumerate(reversed(mesh.addresses)):
        stage, rank = divmod(place, 2)
        lines += [
            "[[nodes]]",
            f'id = "node-{place}"',
            f'address = "{address}"',
            'role = "2d"',
            f"stage = {stage}",
            f"rank = {rank}",
            f'layers = "{"0-4" if stage == 0 else "5-5"}"',
        ]
    file = mesh.folder / "by-hand.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    here = "--node-id head --node-role hybrid --cluster-control-addr 127.0.0.1:19000".split()
    command = ["-m", str(models / "llama"), "--port", "0", "--distributed-config", str(file)]
    coordinator = mesh.node([*command, *here])
    assert complete(mesh.url(coordinator)) == expected
    coordinator.wait_for(f"node-1 @ {mesh.addresses[2]}: layers 0-4")
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


@pytest.mark.slow
def test_ranks_may_add_up_by_mlx(mesh: Any, coordinate: Callable[..., Any], expected: str) -> None:
    """With --tp-collectives ring each stage has a ring of its own, on ports that peers find."""
    coordinator = coordinate("--tp-collectives", "ring")
    assert complete(mesh.url(coordinator)) == expected
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("place", "part", "harm"),
    [
        pytest.param(3, "peer", kill, id="a follower is killed"),
        pytest.param(0, "worker", stop, id="a leader is stopped", marks=pytest.mark.slow),
        pytest.param(1, "worker", kill, id="a follower's worker is killed", marks=pytest.mark.slow),
        pytest.param(2, "peer", stop, id="a leader's peer is stopped", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_in_a_stream(
    mesh: Any,
    coordinate: Callable[..., Any],
    expected: str,
    place: int,
    part: str,
    harm: Callable[[int], None],
) -> None:
    """The client gets a typed, retryable error, the operator name and address; the others wait
    for the next coordinator, and so does the lost one when it is back."""
    peer = mesh.peers[place]
    released = [other.count("released") for other in mesh.peers]
    coordinator = coordinate()
    with streaming(mesh.url(coordinator)) as response:
        harm(peer.process.pid if part == "peer" else peer.workers()[0])
        data = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    error = json.loads(data[-1])["error"]
    assert (error["code"], error["retryable"]) == ("stage_lost", True)
    assert coordinator.exit_code() == 1
    [told] = [line for line in coordinator.lines if line.startswith("mlxcel: error: ")]
    assert f"s{place // 2}-r{place % 2} @ {mesh.addresses[place]} is lost" in told
    assert error["message"] in told
    assert coordinator.count("Traceback") == 0
    for other, before in zip(mesh.peers, released, strict=True):
        if other is not peer:
            other.wait_for("released", before + 1)
    if part == "peer":
        peer.restart()
        peer.wait_for("listening on")
    again = coordinate()
    assert complete(mesh.url(again)) == expected
    again.process.terminate()
    assert again.exit_code() == 0
