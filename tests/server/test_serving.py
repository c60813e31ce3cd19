"""Work on bodies in threads, when the server ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from mlxcel.server.serving import SERVING, SMALL_BODY, THREADS

Served = Callable[..., AbstractAsyncContextManager[Any]]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("waits_for", ["body", "tools"])
async def test_work_that_is_queued_at_the_end(
    served: Served, eventually: Any, waits_for: str
) -> None:
    """Whoever waits for a thread is told that the server ends, and is not hung up on."""
    free = threading.Event()
    async with served() as client:
        serving = client.app[SERVING]
        await serving.tool_format()
        busy = [serving.threads.submit(free.wait, 60.0) for _ in range(THREADS)]
        await eventually(lambda: all(each.running() for each in busy))
        try:
            if waits_for == "body":
                asked = asyncio.ensure_future(client.complete("x" * SMALL_BODY))
            else:
                serving.look_for_tools()
                asked = asyncio.ensure_future(client.chat(tools=[TOOL]))
            await eventually(lambda: serving.threads._work_queue.qsize() == 1)
            await serving.stop(0)
            status, body = await asked
            assert (status, body["error"]["code"]) == (503, "unavailable")
        finally:
            free.set()


async def test_who_gives_up_waiting_is_cancelled(served: Served) -> None:
    """Only the server's end is told as such: a cancelled wait stays one."""
    free = threading.Event()
    async with served() as client:
        work = client.app[SERVING].work(0, lambda: free.wait(60.0), hard=True)
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        free.set()
