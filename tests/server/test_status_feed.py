"""One producer for all who watch."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from mlxcel.server.errors import ApiError
from mlxcel.server.status_feed import Feed


class Maker:
    """Makes numbered events."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> bytes:
        self.made += 1
        return b"%d" % self.made


async def test_nothing_is_made_for_nobody(eventually: Any) -> None:
    """The producer runs only as long as somebody watches."""
    maker = Maker()
    feed = Feed(maker, seconds=0.0)
    with feed.watching():
        await feed.next()
    await asyncio.sleep(0)
    made = maker.made
    for _ in range(20):
        await asyncio.sleep(0)
    assert (maker.made, feed.watching_now) == (made, 0)
    with feed.watching():
        assert await feed.next() == b"%d" % (made + 1)


async def test_all_get_the_same_event() -> None:
    """However many watch, an event is made once."""
    maker = Maker()
    feed = Feed(maker, seconds=0.01)
    with feed.watching(), feed.watching(), feed.watching():
        assert await asyncio.gather(*(feed.next() for _ in range(3))) == [b"1"] * 3


async def test_who_is_slow_misses_events() -> None:
    """Events do not queue: the next one is the one that comes next."""
    feed = Feed(Maker(), seconds=0.0)
    with feed.watching():
        first = await feed.next()
        for _ in range(10):
            await asyncio.sleep(0)
        later = await feed.next()
    assert first is not None and later is not None
    assert int(later) > int(first) + 1


async def test_there_is_room_for_so_many() -> None:
    """One more than allowed is refused, and may come back when another has left."""
    feed = Feed(Maker(), seconds=0.0, watchers=2)
    with feed.watching():
        with feed.watching(), pytest.raises(ApiError) as refused, feed.watching():
            pass
        assert (refused.value.status, refused.value.retry_after) == (503, 5.0)
        with feed.watching():
            assert await feed.next() is not None


async def test_an_event_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, the log says so once in a row, and watchers get the next that can."""
    made = iter([ZeroDivisionError("first"), ZeroDivisionError("second"), b"third", b"fourth"])

    def make() -> bytes:
        if isinstance(event := next(made), Exception):
            raise event
        return event

    feed = Feed(make, seconds=0.0)
    with feed.watching():
        async with asyncio.timeout(60):
            assert await feed.next() == b"third"
    [record] = caplog.records
    assert record.exc_info is not None and str(record.exc_info[1]) == "first"


async def test_the_end_is_told_whatever_happens() -> None:
    """Who waits is let go also where the last event cannot be made."""
    feed = Feed(lambda: b"%d" % (1 // 0), seconds=60.0)
    with feed.watching():
        waiting = asyncio.create_task(feed.next())
        await asyncio.sleep(0)
        feed.close()
        async with asyncio.timeout(60):
            assert await waiting is None
        assert await feed.next() is None


async def test_the_end_is_told_at_once() -> None:
    """Closing makes a last event for those who wait, and ends the others."""
    feed = Feed(itertools.repeat(b"last").__next__, seconds=60.0)
    with feed.watching():
        waiting = asyncio.create_task(feed.next())
        await asyncio.sleep(0)
        feed.close()
        assert await waiting == b"last"
        assert await feed.next() is None
