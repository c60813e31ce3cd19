"""Outputs find their way from the engine's thread to those who answer clients."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlxcel.engine.sequence import Output
from mlxcel.server.dispatch import Dispatcher, Stream


def dispatcher() -> Dispatcher:
    made = Dispatcher(lambda stream, output, now: None, lambda tokens: None)
    made.attach()
    return made


def ignore(number: int, output: Output) -> None:
    """Hears and does nothing."""


async def test_outputs_come_from_another_thread() -> None:
    """Each stream hears its own outputs, in order, and which of its requests they are for."""
    made = dispatcher()
    heard: list[tuple[str, int, str]] = []
    with (
        made.open(2, lambda number, output: heard.append(("one", number, output.text))) as one,
        made.open(1, lambda number, output: heard.append(("two", number, output.text))) as two,
    ):
        first, second = one.numbers
        outputs = [Output(second, "a"), Output(two.numbers[0], "x"), Output(first, "b")]
        outputs += [Output(n, finish_reason="stop") for n in (first, second)]
        thread = threading.Thread(target=made.deliver, args=(outputs,))
        thread.start()
        while one.running:
            await one.wait(60)
        assert heard[:3] == [("one", 1, "a"), ("two", 0, "x"), ("one", 0, "b")]
        assert two.running
        thread.join()


async def test_a_wait_lasts_so_long_and_no_longer() -> None:
    """A stream to which nothing comes lets its handler look around."""
    with dispatcher().open(1, ignore) as stream:
        await stream.wait(0.001)
        assert stream.running


async def test_a_wait_ends_when_somebody_wakes_it() -> None:
    """Whoever has something for the handler to do can end its sleep; nobody's sleep is harmless."""
    with dispatcher().open(1, ignore) as stream:
        stream.wake()
        asyncio.get_running_loop().call_soon(stream.wake)
        await stream.wait(3600)
        assert stream.running


async def test_numbers_are_never_used_twice() -> None:
    """An output for a stream that is closed reaches nobody."""
    made = dispatcher()
    heard: list[str] = []
    with made.open(3, ignore) as first:
        pass
    with made.open(1, lambda number, output: heard.append(output.text)) as second:
        assert second.numbers[0] > first.numbers[-1]
        made.deliver([Output(first.numbers[0], "late")])
        made.deliver([Output(second.numbers[0], "mine", finish_reason="stop")])
        await second.wait(3600)
        assert heard == ["mine"]


async def test_what_a_stream_raises_ends_it_alone() -> None:
    """An error of one reader is that stream's; the others of the round hear their outputs."""
    made = dispatcher()
    heard: list[str] = []

    def fail(number: int, output: Output) -> None:
        raise ValueError(output.text)

    with (
        made.open(1, fail) as bad,
        made.open(1, lambda number, output: heard.append(output.text)) as good,
    ):
        made.deliver([Output(bad.numbers[0], "a"), Output(good.numbers[0], "b")])
        made.deliver([Output(bad.numbers[0], "c"), Output(good.numbers[0], "d")])
        await bad.wait(3600)
        assert not bad.running
        assert str(bad.error) == "a"
        good.put(Output(good.numbers[0], "e", finish_reason="stop"))
        assert heard[-1] == "e"
        assert not good.running


async def test_a_handler_that_is_cancelled_leaves_the_stream_whole() -> None:
    """What comes after a cancelled wait can be waited for again."""
    with dispatcher().open(1, ignore) as stream:
        task = asyncio.ensure_future(stream.wait(60))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        asyncio.get_running_loop().call_soon(
            stream.put, Output(stream.numbers[0], finish_reason="stop")
        )
        await stream.wait(3600)
        assert not stream.running


def test_an_engine_that_outlives_the_loop_is_harmless() -> None:
    """Delivering into a loop that has ended does nothing."""

    async def make() -> Dispatcher:
        return dispatcher()

    asyncio.run(make()).deliver([Output(1, "x")])


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_stream_runs_until_all_its_requests_end(requests: int) -> None:
    """The last finish reason ends the stream, not the first."""
    stream = Stream(range(5, 5 + requests), ignore)
    for number in stream.numbers:
        assert stream.running
        stream.put(Output(number, finish_reason="length"))
    assert not stream.running
