"""Reading server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event; comments and the other fields are left out.

    Args:
        lines: The body, cut after each line feed. An event that its end cuts off is dropped.
    """
    data: list[bytes] = []
    async for line in lines:
        line = line.rstrip(b"\r\n")
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
