"""Makes the pictures of the status page under docs/: a real model in three stages, under load.

Needs a Chromium such as Debian's chromium-headless-shell, and takes two and a half minutes::

    python examples/screenshot.py
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import aiohttp

from mlxcel.testing.browser import Page, browsing, find_browser

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".demo" / "smollm2"
PROMPTS = (
    "Write a story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue, step by step.",
    "List twenty animals, and say where each of them lives.",
    "Describe a small town by the sea in the morning.",
)

CLIENTS = ((12, 1), (22, 4), (8, 0), (24, 8), (10, 2), (44, 6))
"""For how many seconds how many clients ask at once."""

PICTURES: tuple[tuple[str, int, Literal["light", "dark"]], ...] = (
    ("status.png", 1180, "light"),
    ("status-phone.png", 390, "dark"),
)
"""File, width in CSS pixels, colour scheme."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of its own, and its address."""
    command = [sys.executable, "-m", "mlxcel"]
    subprocess.run([*command, "fetch-demo-model", str(MODEL)], check=True)
    flags = [
        "--pp-size",
        "3",
        "--pp-balance",
        "time",
        "--port",
        "0",
        "--alias",
        "SmolLM2-135M-Instruct",
    ]
    process = subprocess.Popen(
        [*command, "serve", "-m", str(MODEL), *flags, "--kv-cache-budget", "256MB"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = (line for line in process.stderr if line.startswith("listening on "))
        yield next(lines).removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.communicate()


async def client(session: aiohttp.ClientSession, number: int) -> None:
    """Ask one question after the other."""
    while True:
        content = PROMPTS[number % len(PROMPTS)]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 96}
        async with session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            await response.read()
        number += 1


async def load(session: aiohttp.ClientSession) -> None:
    """Let clients come and go as :data:`CLIENTS` says."""
    while (await session.get("/health")).status != 200:
        await asyncio.sleep(0.2)
    for seconds, clients in CLIENTS:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(client(session, number))
                await asyncio.sleep(seconds)


async def photograph(page: Page, url: str) -> None:
    """Take each of the :data:`PICTURES`."""
    for name, width, scheme in PICTURES:
        await page.prefer(scheme)
        await page.resize(width, 100)
        await page.open(url)
        await page.until("!document.getElementById('main').hidden")
        height = await page.evaluate("document.documentElement.scrollHeight")
        await page.resize(width, height)
        await page.screenshot(ROOT / "docs" / name)
        print(f"docs/{name}")


async def main() -> None:
    """Serve, let clients ask, and take the pictures while they do."""
    if (browser := find_browser()) is None:
        raise SystemExit(
            "There is no Chromium here; on Debian: apt install chromium-headless-shell"
        )
    with serving() as url:
        async with aiohttp.ClientSession(url) as session, browsing(browser) as page:
            working = asyncio.create_task(load(session))
            await asyncio.sleep(sum(seconds for seconds, _ in CLIENTS) + 2)
            await photograph(page, url)
            working.cancel()
            await asyncio.wait([working])


if __name__ == "__main__":
    asyncio.run(main())
