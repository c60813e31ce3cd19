"""The status page and what feeds it, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest

from mlxcel.engine.kv_manager import StageKVManager
from mlxcel.errors import WorkerDied
from mlxcel.family.caches import KVCacheKind
from mlxcel.observe.live import HISTORY_SECONDS
from mlxcel.server.snapshot import NOW_SECONDS
from mlxcel.server.status import FEED
from mlxcel.server.status_page import PAGE, POLICY

Served = Callable[..., AbstractAsyncContextManager[Any]]


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """What comes over an event stream."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


async def test_the_state_of_everything(served: Served) -> None:
    """``/status`` has the phase, requests, tokens, and each stage with its memory and shares."""
    kind = KVCacheKind(2, 32, 32)
    managers = [StageKVManager(i, [kind], 10_000_000, itemsize=4, chunk=512) for i in range(2)]
    async with served("hello", managers=managers) as client:
        await client.complete("abc")
        status, body = await client.get("/status")
        assert status == 200
        assert (body["model"], body["phase"], "error" in body) == ("tiny", "ready", False)
        assert body["requests"] == {"running": 0, "waiting": 0}
        assert body["tokens"]["generated"] == 5
        first, second = body["stages"]
        assert (first["stage"], first["place"], second["ready"]) == (0, "", False)
        assert (first["layers"], first["bytes_done"], first["bytes_total"]) == ("0-2", 5, 10)
        assert (second["layers"], second["kv_used"], second["kv_budget"]) == ("3-5", 0, 10_000_000)
        assert len(body["timeline"]["tokens"]) == HISTORY_SECONDS
        assert [len(row) for row in body["timeline"]["busy"]] == [HISTORY_SECONDS] * 2


async def test_a_failure_is_told(served: Served) -> None:
    """The state of a failed server has the error's text."""
    async with served() as client:
        client.backend.phase, client.backend.error = "failed", WorkerDied(1, 7, "by SIGKILL")
        body = (await client.get("/status"))[1]
        assert body["phase"] == "failed"
        assert "stage 1" in body["error"]


async def test_events_go_on_where_the_first_ends(served: Served) -> None:
    """The first event has the whole timeline, the others the last seconds of it."""
    async with served() as client:
        client.app[FEED].seconds = 0.0
        async with client.session.get("/status/events") as response:
            assert response.content_type == "text/event-stream"
            stream = events(response)
            first, second = await anext(stream), await anext(stream)
        assert len(first["timeline"]["tokens"]) == HISTORY_SECONDS
        assert len(second["timeline"]["tokens"]) == NOW_SECONDS
        assert second["timeline"]["last"] >= first["timeline"]["last"]


async def test_watchers_see_the_end(served: Served) -> None:
    """When the server stops, the last event says so, and the stream ends."""
    async with aiohttp.ClientSession() as session:
        async with served() as client:
            url = f"http://127.0.0.1:{client.port}/status/events"
            response = await session.get(url)
            stream = events(response)
            assert (await anext(stream))["phase"] == "ready"
        assert [event["phase"] async for event in stream][-1] == "stopped"


async def test_watchers_that_leave_are_forgotten(served: Served, eventually: Any) -> None:
    """A closed page costs nothing."""
    async with served() as client:
        feed = client.app[FEED]
        feed.seconds = 0.01
        responses = [await client.session.get("/status/events") for _ in range(5)]
        assert feed.watching_now == 5
        for response in responses:
            response.close()
        await eventually(lambda: feed.watching_now == 0)


async def test_one_watcher_too_many(served: Served) -> None:
    """Who watches beyond the limit is told when to come back."""
    async with served() as client:
        client.app[FEED]._watchers = 1
        path = "/status/events"
        async with client.session.get(path), client.session.get(path) as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"] == "5"
            assert (await refused.json())["error"]["code"] == "too_many_watchers"


async def test_keys(served: Served) -> None:
    """The page is for everybody, what it shows is for those who have a key."""
    async with served(api_keys=("s3cret",)) as client:
        async with client.session.get("/") as response:
            assert response.status == 200
            assert "tiny" not in await response.text()
        for path in ("/status", "/status/events"):
            assert (await client.get(path))[0] == 401
            headers = {"Authorization": "Bearer s3cret"}
            async with client.session.get(path, headers=headers) as response:
                assert response.status == 200


async def test_headers_alone(served: Served) -> None:
    """HEAD tells of the page and of one state, and not of a stream that has no end."""
    async with served() as client:
        for path, status in (("/", 200), ("/status", 200), ("/status/events", 405)):
            async with client.session.head(path) as response:
                assert (response.status, await response.read()) == (status, b"")
        assert client.app[FEED].watching_now == 0


@pytest.mark.parametrize("path", ["/", "/status", "/status/events"])
async def test_other_methods(served: Served, path: str) -> None:
    """There is nothing to send to the page."""
    async with served() as client:
        for method in ("POST", "PUT", "DELETE"):
            async with client.session.request(method, path) as response:
                assert response.status == 405
                assert (await response.json())["error"]["code"] == "method"


async def test_the_policy(served: Served) -> None:
    """The page may run the script that it brings, and talk to its own server; nothing else."""
    async with served() as client, client.session.get("/") as response:
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        text = await response.text()
    assert text == PAGE
    assert "unsafe" not in POLICY and "http" not in POLICY
    for element in ("script", "style"):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in POLICY


def test_the_page_brings_all_it_needs() -> None:
    """It names no other file and no other host, and has nothing that its policy would refuse."""
    names = re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?([^"')\s>]+)""", PAGE)
    assert [name for name in names if not name.startswith("data:")] == []
    assert re.findall(r"<[^>]+\s(on\w+|style)=", PAGE) == []
    assert "innerHTML" not in PAGE and "eval" not in PAGE


async def test_a_request_shows_in_the_timeline(tiny_served: Served, eventually: Any) -> None:
    """Work of a real pipeline appears as busy time, tokens and memory, and goes by."""
    async with tiny_served(metrics=True) as client:
        await client.complete("hello", max_tokens=20, logit_bias={"257": -100})
        live = client.backend.live

        def whole() -> bool:
            """Whether the seconds of the request are over: the timeline has whole ones only."""
            seen = live.timeline()
            return sum(seen.tokens) == live.generated and all(sum(row) > 0 for row in seen.busy)

        await eventually(whole)
        body = (await client.get("/status"))[1]
        assert sum(body["timeline"]["tokens"]) == body["tokens"]["generated"] == 20
        assert all(stage["memory"] > 0 for stage in body["stages"])
        async with client.session.get("/metrics") as response:
            text = await response.text()
        for name in ("busy", "bubble"):
            for stage in "01":
                assert f'mlxcel_pp_stage_{name}_fraction{{stage="{stage}"}}' in text
        assert "mlxcel_pp_mean_bubble_ratio" in text
