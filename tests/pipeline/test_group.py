"""The connections of the ranks of a stage, and how they find out who is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mlxcel.errors import DeadlineError, RankLost, WireError
from mlxcel.pipeline.group import (
    LISTEN_SECONDS,
    NOTICE,
    TELL_SECONDS,
    RankGroup,
    group_peers,
)
from mlxcel.transport.plain import PlainConnection

SHORT = 0.05
"""A deadline that passes."""

LONG = 20.0
"""One that does not."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def groups(stack: ExitStack, size: int, timeout: float) -> list[RankGroup]:
    ends: list[dict[int, PlainConnection]] = [{} for _ in range(size)]
    for low in range(size):
        for high in (peer for peer in group_peers(low, size) if peer > low):
            a, b = socket.socketpair()
            ends[low][high], ends[high][low] = PlainConnection(a, "high"), PlainConnection(b, "low")
    made = [RankGroup(1, rank, size, ends[rank], timeout) for rank in range(size)]
    for group in made:
        stack.callback(group.close)
    return made


@pytest.mark.parametrize("size", range(1, 7))
def test_peers_know_each_other(size: int) -> None:
    """Whom a rank talks with talks with it: its neighbours and rank 0, never itself."""
    peers = [group_peers(rank, size) for rank in range(size)]
    for rank in range(size):
        assert rank not in peers[rank]
        assert all(rank in peers[peer] for peer in peers[rank])
        assert {0, (rank + 1) % size, (rank - 1) % size} - {rank} <= set(peers[rank])


def test_frames_pass_between_ranks(stack: ExitStack) -> None:
    """Whole, in order, whatever their first byte is."""
    first, second = groups(stack, 2, LONG)
    for frame in (b"", b"\1\0", b"\0", b"long" * 1000):
        first.send(1, [frame[:1], frame[1:]], "a test")
        assert second.receive(0, "a test") == frame
    assert first.room >= 32 << 10


def test_a_rank_that_closes_is_the_one(stack: ExitStack) -> None:
    """Whoever waits for it names it, and what for; then all of the group is closed."""
    one, two, three = groups(stack, 3, LONG)
    two.close()
    with pytest.raises(RankLost) as caught:
        three.receive(1, "all-reduce 7")
    error = caught.value
    assert (error.stage, error.rank, error.operation) == (1, 1, "all-reduce 7")
    with pytest.raises(RankLost):
        three.send(0, [b"more"], "all-reduce 8")
    with pytest.raises(RankLost) as caught:
        one.receive(2, "all-reduce 7")  # three has told it
    assert caught.value.rank == 1


def test_who_waits_tells_whom_it_waits_for(stack: ExitStack) -> None:
    """A deadline passes at one rank; the ones behind it name the rank that really is missing."""
    ranks = groups(stack, 4, SHORT)
    lost = []
    for rank in (3, 0, 1):  # 2 is missing; each waits for the one before
        with pytest.raises(RankLost) as caught:
            ranks[rank].receive((rank - 1) % 4, "all-reduce 1")
        lost.append((caught.value.rank, caught.value.how))
    assert lost == [(2, f"nothing came through within {SHORT} s")] * 3


def test_an_idle_rank_hears_of_it_too(stack: ExitStack) -> None:
    """Who waits for a decision without a deadline ends with the others."""
    ranks = groups(stack, 3, SHORT)
    with pytest.raises(RankLost):
        ranks[0].receive(2, "all-reduce 1")
    with pytest.raises(RankLost) as caught:
        ranks[1].receive(0, "the next decision", idle=True)
    assert (caught.value.rank, caught.value.operation) == (2, "the next decision")


def test_a_send_that_fails_asks_the_rank_before(stack: ExitStack) -> None:
    """The receiver may have left only because it missed a third one."""
    ranks = groups(stack, 4, LONG)
    ranks[3].close()
    for rank, source in ((2, 3), (0, 3)):
        with pytest.raises(RankLost):
            ranks[rank].receive(source, "all-reduce 1")
    with pytest.raises(RankLost) as caught:
        ranks[1].send(2, [b"x"], "all-reduce 1")
    assert caught.value.rank == 3


def test_who_sees_a_connection_end_says_so(stack: ExitStack) -> None:
    """Both ends of a connection that is cut tell it apart from what others tell them."""
    ranks = groups(stack, 3, SHORT)
    ranks[1]._connections[2]._stream._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    lost = []
    for rank, act in (
        (1, lambda: ranks[1].send(2, [b"x"], "all-reduce 1")),
        (2, lambda: ranks[2].receive(1, "all-reduce 1")),
        (0, lambda: ranks[0].receive(2, "all-reduce 1")),
    ):
        with pytest.raises(RankLost) as caught:
            act()
        lost.append((rank, caught.value.rank, caught.value.broken))
    assert lost == [(1, 2, True), (2, 1, True), (0, 1, False)]


def test_a_late_rank_has_not_ended_the_connection(stack: ExitStack) -> None:
    """A deadline says nothing of the connection; who is given up sees that it ends."""
    slow, waiting = groups(stack, 2, SHORT)
    with pytest.raises(RankLost) as caught:
        waiting.receive(0, "all-reduce 1")
    assert not caught.value.broken
    with pytest.raises(RankLost) as caught:
        slow.receive(1, "all-reduce 1")
    assert caught.value.broken


class Hung:
    """A connection whose other end neither takes nor sends anything, on a clock of its own."""

    now = 0.0

    def send(self, pieces: object, timeout: float) -> None:
        self.receive(timeout)

    def receive(self, timeout: float) -> None:
        Hung.now += timeout
        raise DeadlineError("a rank", "anything", timeout, "")

    def close(self) -> None:
        """Nothing."""


def test_notices_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks hang, who misses one leaves soon after its deadline."""
    monkeypatch.setattr(Hung, "now", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: Hung.now)
    connections: dict[int, Any] = {rank: Hung() for rank in range(1, 64)}
    group = RankGroup(0, 0, 64, connections, LONG)
    with pytest.raises(RankLost):
        group.receive(63, "all-reduce 1")
    assert Hung.now <= LONG + TELL_SECONDS + LISTEN_SECONDS


@pytest.mark.parametrize("frame", [b"", b"\2", b"\1", b"\1\0\xff"])
def test_frames_that_are_neither_data_nor_a_notice(stack: ExitStack, frame: bytes) -> None:
    """Refused; the group is closed."""
    a, b = socket.socketpair()
    there = PlainConnection(a, "here")
    stack.callback(there.close)
    group = RankGroup(0, 0, 2, {1: PlainConnection(b, "there")}, LONG)
    there.send([frame], LONG)
    with pytest.raises(WireError):
        group.receive(1, "a test")
    assert there.receive(LONG) is None


def test_a_notice_names_the_rank(stack: ExitStack) -> None:
    """It is a byte, the rank and the reason."""
    a, b = socket.socketpair()
    there = PlainConnection(a, "here")
    stack.callback(there.close)
    group = RankGroup(0, 0, 2, {1: PlainConnection(b, "there")}, LONG)
    there.send([NOTICE, b"\5", "gone, für immer".encode()], LONG)
    there.close()
    with pytest.raises(RankLost) as caught:
        group.receive(1, "a test")
    assert (caught.value.rank, caught.value.how) == (5, "gone, für immer")
