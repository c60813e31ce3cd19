"""The queue between two threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mlxcel.errors import ChannelClosed, ChannelFull, DeadlineError
from mlxcel.pipeline.channel import Channel

LONG = 60.0


def in_thread(function: Callable[[], int]) -> Future[int]:
    """``function`` on its way in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def test_first_in_first_out() -> None:
    """Items come out in the order they went in."""
    channel: Channel[int] = Channel(3, "a to b")
    for item in (1, 2, 3):
        channel.put(item)
    assert [channel.get(LONG) for _ in range(3)] == [1, 2, 3]


def test_a_put_wakes_a_waiting_get() -> None:
    """A get that began before the put receives its item."""
    channel: Channel[int] = Channel(1, "a to b")
    future = in_thread(lambda: channel.get(LONG))
    channel.put(7)
    assert future.result(LONG) == 7


def test_a_full_channel_refuses_at_once() -> None:
    """More than the capacity is a broken credit rule, not a reason to wait."""
    channel: Channel[int] = Channel(2, "a to b")
    channel.put(1)
    channel.put(2)
    with pytest.raises(ChannelFull, match=r"a to b .* 2 messages"):
        channel.put(3)
    assert channel.get(LONG) == 1
    channel.put(3)


def test_a_put_may_wait_for_a_place() -> None:
    """It goes in as soon as something is taken, in the order of the puts."""
    channel: Channel[int] = Channel(1, "a to b")
    channel.put(1)
    waiting = in_thread(lambda: channel.put(2, wait=True) or 0)
    assert [channel.get(LONG), channel.get(LONG)] == [1, 2]
    assert waiting.result(LONG) == 0


def test_a_put_that_waits_ends_with_the_channel() -> None:
    """Whoever waits for a place learns that nobody will take the item."""
    channel: Channel[int] = Channel(1, "a to b")
    channel.put(1)
    waiting = in_thread(lambda: channel.put(2, wait=True) or 0)
    channel.close("over")
    with pytest.raises(ChannelClosed, match="over"):
        waiting.result(LONG)


def test_a_get_has_a_deadline() -> None:
    """Nothing in time: the error names the channel and what was waited for."""
    channel: Channel[int] = Channel(1, "stage 0 to stage 1")
    with pytest.raises(DeadlineError, match=r"stage 0 to stage 1 .* 0 s .* the tokens"):
        channel.get(0, "the tokens")


def test_a_closed_channel_still_gives_what_it_holds() -> None:
    """Closing loses nothing: gets drain the channel, then say why it is closed."""
    channel: Channel[int] = Channel(2, "a to b")
    channel.put(1)
    channel.close("b stopped")
    channel.close("too late")
    with pytest.raises(ChannelClosed, match="a to b is closed: b stopped"):
        channel.put(2)
    assert channel.get(LONG) == 1
    with pytest.raises(ChannelClosed, match="a to b is closed: b stopped"):
        channel.get(LONG)


def test_close_wakes_every_waiting_get() -> None:
    """Nobody waits for a channel that is closed."""
    channel: Channel[int] = Channel(1, "a to b")
    futures = [in_thread(lambda: channel.get(LONG)) for _ in range(3)]
    channel.close()
    for future in futures:
        with pytest.raises(ChannelClosed, match=r"a to b is closed\."):
            future.result(LONG)


def test_many_threads_lose_and_repeat_nothing() -> None:
    """What several threads put is got exactly once by several others."""
    channel: Channel[int] = Channel(400, "a to b")
    start = threading.Barrier(8)

    def put(first: int) -> int:
        start.wait(LONG)
        for item in range(first, first + 100):
            channel.put(item)
        return 0

    got: list[int] = []

    def get() -> int:
        start.wait(LONG)
        got.extend(channel.get(LONG) for _ in range(100))
        return 0

    futures = [in_thread(lambda i=i: put(100 * i)) for i in range(4)]
    futures += [in_thread(get) for _ in range(4)]
    for future in futures:
        future.result(LONG)
    assert sorted(got) == list(range(400))


def test_a_channel_holds_something() -> None:
    """A capacity of nothing is a mistake of the caller."""
    with pytest.raises(ValueError, match="0 items"):
        Channel(0, "a to b")
