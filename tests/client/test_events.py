"""Reading server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mlxcel.client.events import read_events


async def lines(body: bytes) -> AsyncIterator[bytes]:
    for line in body.splitlines(keepends=True):
        yield line


def events(body: bytes) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [event async for event in read_events(lines(body))]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 1\ndata: a\n\n", [b"a"]),
        (b"data: a\n\ndata: cut", [b"a"]),
        (b"\n\n\ndata: a\n\n", [b"a"]),
        (b"", []),
    ],
)
def test_events(body: bytes, expected: list[bytes]) -> None:
    """Only whole events' data come out, whatever stands around them."""
    assert events(body) == expected
