"""Health and figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from mlxcel.engine.kv_manager import StageKVManager
from mlxcel.errors import WorkerDied
from mlxcel.family.caches import KVCacheKind

Served = Callable[..., AbstractAsyncContextManager[Any]]


async def test_health_of_each_stage(served: Served) -> None:
    """Health is 200 only when requests are taken, and says how far each stage is."""
    async with served() as client:
        status, body = await client.get("/health")
        assert (status, body["status"]) == (200, "ok")
        loading = {"bytes_done": 5, "bytes_total": 10, "ready": False}
        stage = {"stage": 0, "ranks": 1, "layers": "0-2", **loading}
        assert body["stages"][0] == stage
        assert len(body["stages"]) == 2


@pytest.mark.parametrize(("phase", "retry"), [("loading", "2"), ("draining", None)])
async def test_health_when_not_ready(served: Served, phase: str, retry: str | None) -> None:
    """Loading and draining are 503; only loading is worth waiting for."""
    async with served() as client:
        client.backend.phase = phase
        async with client.session.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["status"] == phase
            assert response.headers.get("Retry-After") == retry


async def test_health_of_a_failure(served: Served) -> None:
    """A failed backend is told with its reason."""
    async with served() as client:
        client.backend.phase, client.backend.error = "failed", WorkerDied(1, 7, "by SIGKILL")
        status, body = await client.get("/health")
        assert (status, body["status"]) == (503, "failed")
        assert "stage 1" in body["error"]


async def figures(client: Any) -> dict[str, float]:
    async with client.session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in (await response.text()).splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_metrics_count(served: Served, eventually: Any) -> None:
    """Requests, tokens, latencies and reserved memory are counted."""
    kinds = [KVCacheKind(2, 32, 32)]
    managers = [StageKVManager(i, kinds, 10_000_000, itemsize=4, chunk=512) for i in range(2)]
    async with served("hello", metrics=True, managers=managers) as client:
        await client.complete("abc")
        client.gate.close()
        running = asyncio.ensure_future(client.complete("abc"))
        await eventually(lambda: client.backend.active == 1)
        counted = await figures(client)
        answered = 'endpoint="/v1/completions",model="tiny",status="200"'
        assert counted[f"mlxcel_requests_total{{{answered}}}"] == 1
        assert counted["mlxcel_prompt_tokens_total"] == 6
        assert counted["mlxcel_generated_tokens_total"] == 5
        assert counted["mlxcel_time_to_first_token_seconds_count"] == 1
        assert counted["mlxcel_inter_token_latency_seconds_count"] == 4
        assert counted["mlxcel_active_sequences"] == 1
        for stage in "01":
            assert counted[f'mlxcel_kv_reserved_bytes{{stage="{stage}"}}'] > 0
            assert counted[f'mlxcel_kv_budget_bytes{{stage="{stage}"}}'] == 10_000_000
        client.gate.release()
        await running
        await eventually(lambda: client.backend.active == 0)
        assert (await figures(client))['mlxcel_kv_reserved_bytes{stage="0"}'] == 0


async def test_a_stages_refusals_are_counted(served: Served, eventually: Any) -> None:
    """A request that must wait for memory is a rejection of the stage that lacks it."""
    kind = KVCacheKind(2, 32, 32)
    managers = [StageKVManager(i, [kind], None, itemsize=4, chunk=512) for i in range(2)]
    managers[1].budget = int(managers[1].bytes_of(1, 515) * 1.5)
    async with served(metrics=True, managers=managers) as client:
        client.gate.close()
        both = [asyncio.ensure_future(client.complete("abc")) for _ in range(2)]
        name = 'mlxcel_pp_admission_rejections_total{reason="memory",stage="1"}'
        await eventually(lambda: client.backend.waiting == 1)
        assert (await figures(client))[name] == 1
        client.gate.release()
        assert [status for status, _ in await asyncio.gather(*both)] == [200, 200]


async def test_a_stream_that_fails_is_no_success(served: Served) -> None:
    """What ends with an error event counts as what it would have been as an answer of its own."""
    async with served("hello", metrics=True) as client:
        client.gate.close()
        body = {"prompt": "abc", "stream": True}
        client.gate.let(2)
        async with client.session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            await response.content.readline()
            client.gate.fail = RuntimeError("no")
            client.gate.release()
            assert b"stage_failed" in await response.read()
        label = 'endpoint="/v1/completions",model="tiny",status='
        counted = await figures(client)
        assert {name: value for name, value in counted.items() if f"total{{{label}" in name} == {
            f'mlxcel_requests_total{{{label}"503"}}': 1
        }


async def test_a_hundred_names_are_one_series(served: Served) -> None:
    """What clients make up does not become a label."""
    async with served(metrics=True) as client:
        for index in range(100):
            assert (await client.chat(model=f"model-{index}"))[0] == 404
            assert (await client.get(f"/nowhere/{index}"))[0] == 404
        requests = {n: v for n, v in (await figures(client)).items() if "requests_total" in n}
        assert len(requests) == 2
        assert sum(requests.values()) == 200
        assert any('model="other"' in name for name in requests)


async def test_metrics_only_when_asked_for(served: Served) -> None:
    """Without the option there is no /metrics."""
    async with served() as client:
        assert (await client.get("/metrics"))[0] == 404
