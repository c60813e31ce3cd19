"""Outputs find their way from the engine's thread to those who wait."""

from __future__ import annotations

import asyncio
import threading

from mlxcel.engine.sequence import Output
from mlxcel.server.dispatch import Dispatcher, Stream


def dispatcher(capacity: int = 4) -> Dispatcher:
    made = Dispatcher(capacity, lambda stream, output: None)
    made.attach()
    return made


def never() -> None:
    raise AssertionError("nothing overflows here")


async def test_outputs_come_from_another_thread() -> None:
    """Each stream gets its own outputs, in order, all that came since it last looked."""
    made = dispatcher()
    with made.open(never) as one, made.open(never) as two:
        outputs = [Output(one.index, "a"), Output(two.index, "x"), Output(one.index, "b")]
        thread = threading.Thread(target=made.deliver, args=(outputs,))
        thread.start()
        assert [output.text for output in await one.take(60)] == ["a", "b"]
        assert [output.text for output in await two.take(60)] == ["x"]
        thread.join()


async def test_a_reader_waits_so_long_and_no_longer() -> None:
    """A stream to which nothing comes says so."""
    with dispatcher().open(never) as stream:
        assert await stream.take(0.001) == []


async def test_numbers_are_never_used_twice() -> None:
    """An output for a stream that is closed reaches nobody."""
    made = dispatcher()
    with made.open(never) as first:
        pass
    with made.open(never) as second:
        assert second.index > first.index
        made.deliver([Output(first.index, "late"), Output(second.index, "mine")])
        assert [output.text for output in await second.take(60)] == ["mine"]


async def test_who_does_not_read_overflows_once() -> None:
    """More outputs than fit are dropped, and the client's end is called for once."""
    calls = []
    stream = Stream(1, 3, lambda: calls.append(1))
    for _ in range(10):
        stream.put(Output(1, "x"))
    assert calls == [1]
    assert await stream.take(0.001) == []
    stream.put(Output(1, finish_reason="stop"))
    assert stream.finished


async def test_a_reader_that_is_cancelled_leaves_the_stream_whole() -> None:
    """What comes after a cancelled wait is there for the next."""
    with dispatcher().open(never) as stream:
        task = asyncio.ensure_future(stream.take(60))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stream.put(Output(stream.index, "a"))
        assert [output.text for output in await stream.take(60)] == ["a"]


def test_an_engine_that_outlives_the_loop_is_harmless() -> None:
    """Delivering into a loop that has ended does nothing."""

    async def make() -> Dispatcher:
        return dispatcher()

    asyncio.run(make()).deliver([Output(1, "x")])
