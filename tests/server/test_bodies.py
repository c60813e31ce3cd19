"""What common clients and frameworks send is accepted, or refused by the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Served = Callable[..., AbstractAsyncContextManager[Any]]
BODIES = sorted((Path(__file__).parent / "bodies").glob("*.json"))


@pytest.mark.parametrize("file", BODIES, ids=lambda file: file.stem)
async def test_a_body_is_taken(served: Served, file: Path) -> None:
    """Each gets an answer of its API's form; what cannot be done is refused by name."""
    case = json.loads(file.read_text(encoding="utf-8"))
    body, refused = case["body"], case.get("refuses")
    async with served("hello", context=100_000) as client:
        whole = {name: value for name, value in body.items() if not name.startswith("stream")}
        status, answer = await client.post(case["path"], whole)
        if refused is not None:
            assert status == 400
            assert f"'{refused}'" in answer["error"]["message"]
            assert client.backend.requests == []
            return
        assert status == 200, answer
        assert len(answer.get("choices", [1])) == len(client.backend.requests)
        if body.get("stream"):
            async with client.session.post(case["path"], json=body) as response:
                assert response.status == 200
                text = await response.text()
            wants_usage = bool(body.get("stream_options"))
            assert ('"usage":{' in text) == (wants_usage or case["path"] == "/v1/messages")


def test_there_are_bodies() -> None:
    """The folder is found."""
    assert len(BODIES) >= 30
