"""The list of models, and the names that requests may use."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

Served = Callable[..., AbstractAsyncContextManager[Any]]


async def test_the_list_has_the_one_model(served: Served) -> None:
    """/v1/models lists the served model, with its context."""
    before = int(time.time())
    async with served(model_id="org/tiny") as client:
        _, body = await client.get("/v1/models")
        created = body["data"][0]["created"]
        assert type(created) is int and before <= created <= time.time()
        model = {
            "id": "org/tiny",
            "object": "model",
            "created": created,
            "owned_by": "mlxcel",
            "context_size": 512,
        }
        assert body == {"object": "list", "data": [model]}
        assert await client.get("/v1/models/org/tiny") == (200, model)
        assert await client.get("/v1/models/org%2Ftiny") == (200, model)


async def test_names(served: Served) -> None:
    """The alias, the other names and no name mean the model; anything else is 404."""
    async with served(other_names=("folder", "/path/to/folder")) as client:
        for name in ("tiny", "folder", "/path/to/folder", None):
            status, body = await client.chat(model=name)
            assert (status, body["model"]) == (200, "tiny")
        for path in ("/v1/models/gpt-4", "/v1/models/%F0%9F"):
            assert (await client.get(path))[0] == 404
        status, body = await client.chat(model="gpt-4")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-4'" in body["error"]["message"] or '"gpt-4"' in body["error"]["message"]
