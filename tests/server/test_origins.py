"""Web pages of other origins, and the browsers that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]
CHAT = "/v1/chat/completions"
PAGE = {"Origin": "https://chat.example"}
ASKING = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def test_no_page_is_let_in_unasked(served: Served) -> None:
    """Without the option nothing is said of origins, and a browser keeps the page out."""
    async with served() as client:
        async with client.session.options(CHAT, headers=ASKING) as response:
            assert response.status == 405
            told = response.headers
        async with client.session.get("/v1/models", headers=PAGE) as response:
            assert response.status == 200
            told = {**told, **response.headers}
        assert not [name for name in told if name.startswith("Access-Control") or name == "Vary"]


@pytest.mark.parametrize("allowed", [("https://other.example", "https://chat.example"), ("*",)])
async def test_a_page_that_is_let_in(served: Served, allowed: tuple[str, ...]) -> None:
    """A preflight brings no key and is answered; so are what follows, errors and streams."""
    origin = "*" if allowed == ("*",) else PAGE["Origin"]
    async with served(allowed_origins=allowed, api_keys=("k",)) as client:
        async with client.session.options(CHAT, headers=ASKING) as response:
            assert (response.status, await response.read()) == (204, b"")
            told = response.headers
        assert told["Access-Control-Allow-Origin"] == origin
        assert told["Access-Control-Allow-Headers"] == ASKING["Access-Control-Request-Headers"]
        assert "POST" in told["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in told
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        key = {"Authorization": "Bearer k"}
        for more, stream, status in (({}, False, 401), (key, False, 200), (key, True, 200)):
            sent = {**body, "stream": stream}
            async with client.session.post(CHAT, json=sent, headers={**PAGE, **more}) as response:
                await response.read()
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == origin
                assert response.headers.get("Vary") == (None if origin == "*" else "Origin")
                assert response.headers["Access-Control-Expose-Headers"] == "Retry-After"


async def test_others_stay_out(served: Served) -> None:
    """Another origin is told nothing, also one that begins alike; nor are programs."""
    async with served(allowed_origins=("https://chat.example",)) as client:
        for origin in ("https://chat.example.evil", "http://chat.example", "null"):
            asking = {**ASKING, "Origin": origin}
            async with client.session.options(CHAT, headers=asking) as response:
                assert response.status == 405
                assert "Access-Control-Allow-Origin" not in response.headers
                assert response.headers["Vary"] == "Origin"
        async with client.session.options(CHAT) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with client.session.options("/nowhere", headers=ASKING) as response:
            assert response.status == 404


@pytest.mark.parametrize("allowed", [(), ("https://other.example",)])
async def test_a_page_that_is_not_let_in_makes_no_work(
    served: Served, allowed: tuple[str, ...]
) -> None:
    """A browser sends simple requests unasked and only hides the answer: they are refused."""
    async with served("hello", allowed_origins=allowed) as client:
        for origin in ("https://chat.example", "null", "http://127.0.0.1:1"):
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            body = '{"prompt": "hi"}'
            async with client.session.post("/v1/completions", data=body, headers=headers) as reply:
                assert reply.status == 403
                assert (await reply.json())["error"]["code"] == "origin_not_allowed"
        own = {"Origin": f"http://127.0.0.1:{client.port}"}
        async with client.session.post(
            "/v1/completions", json={"prompt": "hi"}, headers=own
        ) as reply:
            assert reply.status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("[::1]:{port}", 200),
        ("localhost", 200),
        ("mini:{port}", 200),
        ("mini.local:{port}", 200),
        ("rebound.example:{port}", 403),
        ("127.0.0.1.rebound.example", 403),
        ("localhost.rebound.example:{port}", 403),
        ("[::1", 403),
    ],
)
async def test_a_name_that_leads_here_is_not_trusted(
    served: Served, host: str, status: int
) -> None:
    """A page whose owner makes its name lead to this machine is not one of the server's own."""
    async with served("hello") as client:
        name = host.format(port=client.port)
        headers = {"Origin": f"http://{name}", "Host": name}
        async with client.session.post(
            "/v1/completions", json={"prompt": "hi"}, headers=headers
        ) as reply:
            assert reply.status == status, await reply.text()


async def test_a_name_that_is_let_in_is_trusted(served: Served) -> None:
    """Behind a proxy that keeps the name, --allowed-origins names it."""
    async with served("hello", allowed_origins=("https://llm.example",)) as client:
        headers = {"Origin": "https://llm.example", "Host": "llm.example"}
        async with client.session.post(
            "/v1/completions", json={"prompt": "hi"}, headers=headers
        ) as reply:
            assert reply.status == 200


async def test_paths_without_their_beginning(served: Served) -> None:
    """OpenAI's paths answer without /v1 too, as those of mlx-lm and llama.cpp do."""
    async with served("hello") as client:
        message = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("/chat/completions", message), ("/completions", {"prompt": "hi"})):
            status, short = await client.post(path, body)
            _, long = await client.post(f"/v1{path}", body)
            assert (status, short["choices"]) == (200, long["choices"])
        for path in ("/models", "/models/tiny"):
            assert await client.get(path) == await client.get(f"/v1{path}")
