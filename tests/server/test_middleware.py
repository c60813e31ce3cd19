"""Keys, bodies that are too large, paths that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first-key", 200),
        ("Bearer second-key", 200),
        ("bearer  first-key", 200),
        ("Bearer first-ke", 401),
        ("Bearer ", 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        ("Bearer schlüssel", 401),
        (None, 401),
    ],
)
async def test_keys(served: Served, header: str | None, status: int) -> None:
    """Only who brings one of the keys is answered; health needs none."""
    async with served(api_keys=("first-key", "second-key"), metrics=True) as client:
        headers = {"Authorization": header} if header else {}
        body = {"prompt": "hi"}
        found, answer = await client.post("/v1/completions", body, headers=headers)
        assert found == status
        if status == 401:
            assert answer["error"]["code"] == "invalid_api_key"
            assert (await client.get("/v1/models", headers=headers))[0] == 401
            assert (await client.get("/metrics", headers=headers))[0] == 401
        assert (await client.get("/health", headers=headers))[0] == 200


@pytest.mark.parametrize(("key", "status"), [("first-key", 200), ("first-ke", 401), ("", 401)])
async def test_keys_as_anthropics_clients_bring_them(served: Served, key: str, status: int) -> None:
    """A key may come as x-api-key, to every path."""
    async with served(api_keys=("first-key",)) as client:
        for headers in ({"x-api-key": key}, {"x-api-key": key, "Authorization": "Bearer none"}):
            assert (await client.post("/v1/completions", {"prompt": "a"}, headers=headers))[
                0
            ] == status


async def test_bodies_that_are_too_large(served: Served) -> None:
    """The limit holds with and without a declared length."""
    async with served(max_body_size=1000) as client:

        async def parts() -> Any:
            for _ in range(20):
                yield b" " * 100

        for data in (b" " * 2000, parts()):
            async with client.session.post("/v1/completions", data=data) as response:
                assert response.status == 413
                assert "1000 bytes" in (await response.json())["error"]["message"]
        assert (await client.complete("x" * 500))[0] == 200


async def test_what_is_not_there(served: Served) -> None:
    """Unknown paths and wrong methods are told in OpenAI's form."""
    async with served() as client:
        status, body = await client.get("/v1/embeddings")
        assert (status, body["error"]["code"]) == (404, "not_found")
        async with client.session.get("/v1/completions") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert "POST" in (await response.json())["error"]["message"]
