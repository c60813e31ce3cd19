"""What clients make up must not grow the figures or the log."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]
NAMES = 1000


def random_names() -> list[str]:
    """Names of models as no two clients write them, some of them long or odd."""
    draw = random.Random(5)
    letters = "abcXYZ0189-_./: \"'\\{}<>\n\u00e9\u4e2d\U0001f600"
    return ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(NAMES)]


async def series(client: Any) -> set[str]:
    """The names and labels of all figures, without what prometheus-client says of time."""
    async with client.session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def test_a_thousand_names_leave_no_trace(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Labels and log stay as they are, in each of two apps of one process by itself."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "hi"}}
    names = random_names()
    async with served(metrics=True) as client, served(metrics=True, model_id="second") as other:

        async def ask(name: str) -> None:
            for path, body in bodies.items():
                status, answer = await client.post(path, {**body, "model": name})
                assert (status, answer["error"]["code"]) == (404, "model_not_found")

        untouched = await series(other)
        await ask(names[0])
        await client.get("/nowhere/0")
        before = await series(client)
        with caplog.at_level(logging.INFO):
            for index, name in enumerate(names[1:], 1):
                await ask(name)
                assert (await client.get(f"/nowhere/{index}"))[0] == 404
        after = await series(client)
        assert caplog.records == []
        assert after - before <= {name for name in after if 'endpoint="/metrics"' in name}
        assert not any(name in line for line in after for name in names if len(name) > 8)
        assert await series(other) - untouched <= {
            name for name in await series(other) if 'endpoint="/metrics"' in name
        }
        requests = [line for line in after if line.startswith("mlxcel_requests_total")]
        assert len(requests) <= 2 * (len(bodies) + 2)
