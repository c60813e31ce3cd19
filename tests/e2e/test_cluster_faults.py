"""Processes of a cluster that die, hang or do not fit: who says so, and who goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
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
def cluster(make_cluster: Callable[..., Any], model: Path) -> Any:
    """Two peers that outlive the tests; one that a test breaks is started again."""
    flags = ("--blas", "wheel", "--cluster-heartbeat-grace", str(GRACE))
    return make_cluster(model, 2, *flags)


@pytest.fixture
def coordinate(cluster: Any, model: Path) -> Callable[..., Any]:
    """Starts a coordinator with the grace of these tests."""
    return lambda *flags: cluster.coordinator(
        model, "--cluster-heartbeat-grace", str(GRACE), "--ctx-size", "200000", *flags
    )


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


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("part", ["peer", "worker"])
@pytest.mark.parametrize(("harm", "what"), [(kill, ""), (stop, "")], ids=["killed", "stopped"])
def test_a_stage_that_is_lost_in_a_stream(
    cluster: Any,
    coordinate: Callable[..., Any],
    stage: int,
    part: str,
    harm: Callable[[int], None],
    what: str,
) -> None:
    """Its clients get a typed, retryable error in seconds, the operator its name and address;
    the other peer is ready for the next coordinator, and so is this one once it is back."""
    if (stage, part) == (0, "worker") or (stage, harm) == (1, stop):
        pytest.skip("the same as on the other stage")
    peer, other = cluster.peers[stage], cluster.peers[1 - stage]
    released = other.count("released")
    coordinator = coordinate()
    url = cluster.url(coordinator)
    victim = peer.process.pid if part == "peer" else peer.workers()[0]
    try:
        with streaming(url) as response:
            harm(victim)
            error = last_event(response)["error"]
        assert (error["code"], error["retryable"]) == ("stage_lost", True)
        told = error_of(coordinator)
        assert f"stage-{stage} @ {cluster.addresses[stage]} is lost" in told
        assert error["message"] in told
        other.wait_for("released", released + 1)
    finally:
        if part == "peer":
            peer.restart()
    peer.wait_for("listening on")
    works(cluster, coordinate)
