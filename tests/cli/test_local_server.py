"""A server within a command that does not come up, or does not end."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from mlxcel.cli import local_server
from mlxcel.errors import DeadlineError


async def never(app: web.Application) -> None:
    """Is not done before the loop is."""
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("waits", "limit", "told"),
    [("on_startup", "START_SECONDS", "its start"), ("on_cleanup", "END_SECONDS", "its end")],
)
def test_waits_have_an_end(
    waits: str, limit: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a typed error that says what was waited for, not a traceback."""
    app = web.Application()
    getattr(app, waits).append(never)
    monkeypatch.setattr(local_server, limit, 0.05)
    with pytest.raises(DeadlineError) as caught, local_server._in_background(app):
        pass
    assert f"while waiting for {told}" in str(caught.value)
