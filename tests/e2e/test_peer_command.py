"""The command of a peer as a real process: its worker, its end, and who outlives whom."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfds")

SECONDS = 30.0


def ends(pid: int) -> bool:
    """Whether the process ends in time; it need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], SECONDS)[0])
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Any], tiny: Callable[..., Path]) -> Any:
    """One peer that waits."""
    return make_cluster([tiny("llama")])


def test_a_peer_replaces_its_worker_and_ends_when_asked(cluster: Any) -> None:
    """A worker that dies at rest is told and replaced; a signal is a clean end."""
    [peer] = cluster.peers
    armed = peer.count("armed: ")
    [worker] = peer.workers()
    os.kill(worker, signal.SIGKILL)
    peer.wait_for(f"worker process {worker} has ended: killed by SIGKILL")
    peer.wait_for("armed: ", armed + 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        [worker] = peer.workers()
        peer.process.send_signal(number)
        assert peer.exit_code(SECONDS) == 0
        assert ends(worker)
        assert not [line for line in peer.lines if "Traceback" in line]
        peer.restart()
        peer.wait_until_armed()


def test_a_supervisor_has_no_mlx(cluster: Any) -> None:
    """Only the worker maps MLX's library; what looks after it stays small."""
    [peer] = cluster.peers
    peer.wait_until_armed()
    [worker] = peer.workers()
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (peer.process.pid, worker)]
    assert ["libmlx" in text for text in maps] == [False, True]


def test_a_worker_does_not_outlive_its_supervisor(cluster: Any) -> None:
    """Kill -9 of the peer's process: its worker finds out and ends."""
    [peer] = cluster.peers
    [worker] = peer.workers()
    peer.process.kill()
    assert ends(worker)
    peer.restart()
    peer.wait_for("listening on")


@pytest.mark.slow
def test_an_interrupted_start_leaves_nobody(cluster: Any) -> None:
    """Ctrl-C while the worker imports is a clean end, too."""
    [peer] = cluster.peers
    peer.restart()
    peer.wait_for("BLAS: ")
    while not (workers := peer.workers()):
        assert peer.process.poll() is None
    peer.process.send_signal(signal.SIGINT)
    assert peer.exit_code(SECONDS) == 0
    assert all(ends(worker) for worker in workers)
    assert not [line for line in peer.lines if "Traceback" in line]
