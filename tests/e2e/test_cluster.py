"""A coordinator and peers as real processes: the same tokens as one process."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.testing import tiny as checkpoints
from mlxcel.testing.quick import quick

UNLIKE = ("deepseek_v3", "gemma4", "gpt_oss", "jamba", "llama", "qwen3_5")
"""What differs in what a boundary carries and in what stages keep."""

OTHERS = (
    "ernie4_5",
    "gemma3_text",
    "glm4",
    "glm_moe_dsa",
    "hunyuan_v1_dense",
    "kimi_k3",
    "llama4",
    "mistral",
    "mixtral",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_next",
)
NAMES = (*UNLIKE, *OTHERS)
"""A checkpoint of every family that has one; the others of :func:`names` are variants."""

BROKEN = ("llama_untied_headless",)
"""What no command accepts."""

VARIANTS = tuple(name for name in checkpoints.names() if name not in (*NAMES, *BROKEN))
SECONDS = 60.0


@pytest.fixture(scope="module")
def group(make_cluster: Callable[..., Any], models: Path) -> Any:
    """Three peers that compute as this process does."""
    return make_cluster([models] * 3, "--blas", "wheel")


def check(cluster: Any, walk: Any, folder: Path, size: int) -> None:
    assert walk.through(cluster, folder, size) == walk.alone(folder)


def test_every_family_is_walked(plugins: Plugins, models: Path) -> None:
    """The list above has a checkpoint of each installed family that has one and can run."""
    served: dict[str, set[str]] = {}
    for name in checkpoints.names():
        wire, family = choose_family(read_config(models / name), plugins)
        if family.runnable:
            served.setdefault(plugins.distribution("family", wire.partition(":")[0]), set()).add(
                name
            )
    assert [owner for owner, names in served.items() if not names & set(NAMES)] == []


@pytest.mark.parametrize("name", quick((*NAMES, *VARIANTS), ("gemma4", "jamba")))
def test_two_peers_make_the_tokens_of_one_process(
    group: Any, models: Path, walk: Any, name: str
) -> None:
    """Every family, split over two peers: token for token what one process makes."""
    check(group, walk, models / name, 2)


@pytest.mark.parametrize("name", quick(NAMES, ("llama",)))
def test_three_peers_make_the_tokens_of_one_process(
    group: Any, models: Path, walk: Any, name: str
) -> None:
    """A peer in the middle, which has neither embedding nor head, changes nothing."""
    check(group, walk, models / name, 3)


# Over HTTP.


def post(url: str, **body: Any) -> Any:
    with urllib.request.urlopen(url, json.dumps(body).encode(), SECONDS) as response:
        return json.load(response)


def stream(url: str, **body: Any) -> Iterator[Any]:
    data = json.dumps({"stream": True, **body}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", data, SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@pytest.fixture(scope="module")
def pair(group: Any) -> list[str]:
    """The addresses of the first two peers."""
    return list(group.addresses[:2])


@pytest.fixture
def served(group: Any, pair: list[str], models: Path) -> Iterator[Any]:
    """A coordinator over two peers that is ready; it ends well when the test has passed."""
    coordinator = group.coordinator(models / "llama", "--metrics", peers=pair)
    coordinator.url = group.url(coordinator)
    yield coordinator
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


def test_a_coordinator_serves(
    group: Any, served: Any, pair: list[str], models: Path, serve: Callable[..., str]
) -> None:
    """Started as a command, it says all that the operator wants to know, and serves like one."""
    alone = serve(models / "llama", "--blas", "wheel", "--weights", "quantized")
    wanted = {"prompt": "Hello", "max_tokens": 12}
    expected = post(f"{alone}/v1/completions", **wanted)["choices"][0]["text"]
    assert post(f"{served.url}/v1/completions", **wanted)["choices"][0]["text"] == expected
    pieces = [chunk["choices"][0]["text"] for chunk in stream(served.url, **wanted)]
    assert "".join(pieces) == expected
    health = json.load(urllib.request.urlopen(f"{served.url}/health", timeout=SECONDS))
    assert health["status"] == "ok"
    assert [stage["layers"] for stage in health["stages"]] == ["0-2", "3-5"]

    for stage, address in enumerate(pair):
        served.wait_for(f"- stage-{stage} @ {address} [pipeline_stage]")
        served.wait_for(f"stage-{stage} @ {address}: layers {3 * stage}-{3 * stage + 2}")
        served.wait_for(f"stage-{stage}: loaded")
    ready = served.wait_for("ready: ")
    for phase in ("connect", "plan", "offer", "commit", "activate", "load", "warm-up"):
        assert f"{phase} " in ready
    lines = [line.partition(" ")[0] for line in served.lines]
    assert lines.index("listening") > lines.index("cluster:"), "all have committed by then"

    ours = (group.folder / ".mlxcel" / "cluster.toml").read_bytes()
    for stage in range(2):
        theirs = group.folder / ".mlxcel" / f"cluster-stage-{stage}.toml"
        assert theirs.read_bytes() == ours, "byte for byte the coordinator's"

    # Who comes too late learns it before any peer hears of it, or from the peers.
    late = group.coordinator(models / "llama", "--port", served.url.rpartition(":")[2], peers=pair)
    assert late.exit_code() == 1
    assert late.count("the server cannot listen on 127.0.0.1") == 1
    assert late.count("stage-0") == 0
    second = group.coordinator(models / "llama", peers=pair)
    assert second.exit_code() == 1
    [error] = [line for line in second.lines if "mlxcel: error:" in line]
    assert f"stage-0 @ {pair[0]}" in error and "busy" in error
    assert "nothing was started" in error
    assert post(f"{served.url}/v1/completions", **wanted)["choices"][0]["text"] == expected


def test_ctrl_c_releases_the_peers(group: Any, pair: list[str], models: Path) -> None:
    """A coordinator that serves ends with 0, and its peers are free again."""
    peers = group.peers[:2]
    released = [peer.count("released") for peer in peers]
    coordinator = group.coordinator(models / "llama", peers=pair)
    group.url(coordinator)
    coordinator.process.send_signal(signal.SIGINT)
    assert coordinator.exit_code() == 0
    for peer, before in zip(peers, released, strict=True):
        peer.wait_for("released", before + 1)


def test_spares_are_named(group: Any, models: Path) -> None:
    """Two stages need the first two peers; --verbose tells what these have loaded."""
    coordinator = group.coordinator(
        models / "llama", "--pp-auto", "2", "--verbose", peers=list(reversed(group.addresses))
    )
    group.url(coordinator)
    coordinator.wait_for("pipeline partition quality: 2 stages")
    coordinator.wait_for("stage 1 device 'stage-1' layers=3")
    coordinator.wait_for(f"not used, a spare: {group.addresses[2]}")
    coordinator.wait_for(f"stage-1 @ {group.addresses[1]}: layers 3-5")
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


def test_by_hand(group: Any, models: Path) -> None:
    """A hand-written TOML gives the coordinator its peers and their layers."""
    lines = [
        "[cluster]",
        "pipeline_parallel_size = 2",
        f'secret_file = "{group.secret}"',
    ]
    for stage, (address, layers) in enumerate(
        zip(group.addresses[:2], ("0-4", "5-5"), strict=True)
    ):
        lines += [
            "[[nodes]]",
            f'id = "stage-{stage}"',
            f'address = "{address}"',
            'role = "pipeline_stage"',
            f"stage = {stage}",
            f'layers = "{layers}"',
        ]
    lines += ["[[nodes]]", 'id = "boss"', 'address = "127.0.0.1:19000"', 'role = "hybrid"']
    file = group.folder / "by-hand.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = ["-m", str(models / "llama"), "--port", "0", "--distributed-config", str(file)]
    coordinator = group.node([*command, "--node-id", "boss"])
    url = group.url(coordinator)
    coordinator.wait_for(f"stage-0 @ {group.addresses[0]}: layers 0-4")
    assert post(f"{url}/v1/completions", prompt="Hello", max_tokens=3)["usage"]
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in taken]


@pytest.mark.slow
def test_all_by_hand(group: Any, models: Path) -> None:
    """Peers that plan by themselves come to the plan of a coordinator with flags that they do not
    take, and serve it; what they must be told alike, they are told by name."""
    file = group.folder / "all-by-hand.toml"
    lines = ["[cluster]", "pipeline_parallel_size = 3"]
    for stage, port in enumerate(free_ports(3)):
        lines += [
            "[[nodes]]",
            f'id = "stage-{stage}"',
            f'address = "127.0.0.1:{port}"',
            'role = "pipeline_stage"',
            f"stage = {stage}",
        ]
    lines += ["[[nodes]]", 'id = "boss"', 'address = "127.0.0.1:19000"', 'role = "hybrid"']
    file.write_text("\n".join(lines), encoding="utf-8")
    command = ["-m", str(models / "qwen3_5"), "--distributed-config", str(file), "--node-id"]
    peers = [group.node([*command, f"stage-{stage}", "--blas", "wheel"]) for stage in range(3)]
    for peer in peers:
        peer.wait_for("listening on")
    boss = [*command, "boss", "--port", "0"]
    coordinator = group.node([*boss, "--pp-balance", "time"])
    url = group.url(coordinator)
    for stage, layers in enumerate(("0-2", "3-5", "6-7")):
        planned = [line for line in coordinator.lines if line.startswith(f"stage-{stage} @ ")]
        assert f": layers {layers}, " in planned[0], "by bytes it would be others"
    assert post(f"{url}/v1/completions", prompt="Hello", max_tokens=3)["usage"]
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0
    other = group.node([*boss, "--pp-layers", "0-1,2-3,4-7"])
    assert other.exit_code() == 1
    assert other.count("the same --pp-layers and --allow-mirrored-kv") == 1


def test_a_coordinator_stays_light(group: Any, pair: list[str], models: Path) -> None:
    """It brings up a cluster and answers a request without importing MLX or mlx-lm."""
    source = (
        "import sys\nfrom mlxcel.cli.main import run\ncode = run(sys.argv[1:])\n"
        "heavy = [n for n in ('mlx', 'mlx.core', 'mlx_lm', 'transformers') if n in sys.modules]\n"
        "print('light:', code, heavy)\n"
    )
    coordinator = group.coordinator(models / "llama", peers=pair, program=("-c", source))
    url = group.url(coordinator)
    assert post(f"{url}/v1/completions", prompt="Hello", max_tokens=3)["usage"]
    coordinator.process.terminate()
    assert coordinator.exit_code() == 0
    assert coordinator.wait_for("light:") == "light: 0 []"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_bring_up(
    group: Any, pair: list[str], models: Path, number: int
) -> None:
    """Interrupted before it serves, it says nothing and lets all peers go."""
    peers = group.peers[:2]
    before = [peer.count("has left") for peer in peers]
    coordinator = group.coordinator(models / "llama", peers=pair)
    coordinator.wait_for("activations:")
    coordinator.process.send_signal(number)
    assert coordinator.exit_code() in (0, 130)
    assert coordinator.count("Traceback") == 0
    for peer, count in zip(peers, before, strict=True):
        peer.wait_for("has left", count + 1)


@pytest.mark.slow
def test_smollm2_over_http(
    make_cluster: Callable[..., Any], demo_model: Path, serve: Callable[..., str]
) -> None:
    """The demo model, over two and over three peers, writes what it writes in one process."""
    flags = ("--dtype", "float32", "--weights", "dequantized")
    cluster = make_cluster([demo_model] * 3)
    wanted = {"prompt": "The sea is", "max_tokens": 24}
    alone = serve(demo_model, *flags)
    expected = post(f"{alone}/v1/completions", **wanted)["choices"][0]["text"]
    for size in (2, 3):
        coordinator = cluster.coordinator(demo_model, *flags, peers=cluster.addresses[:size])
        url = cluster.url(coordinator)
        assert post(f"{url}/v1/completions", **wanted)["choices"][0]["text"] == expected
        coordinator.process.terminate()
        assert coordinator.exit_code() == 0
