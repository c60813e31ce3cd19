"""The status page in a real browser.

Where there is none the tests skip themselves, unless ``MLXCEL_NEEDS_BROWSER`` is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from mlxcel.errors import WorkerDied
from mlxcel.server.status import FEED
from mlxcel.testing.browser import Page, browsing, find_browser

Served = Callable[..., AbstractAsyncContextManager[Any]]
Browse = Callable[[], AbstractAsyncContextManager[Page]]

LONG = {"max_tokens": 200, "logit_bias": {"257": -100}}
"""A request whose end token cannot be drawn."""

SHOWN = "!document.getElementById('main').hidden"
STATE = "document.getElementById('state').textContent"

WATCH_SHIFTS = """
    window.shifted = 0;
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.shifted += entry.value;
    }).observe({type: "layout-shift", buffered: true});
"""

JUMP = """new Promise((resolve) => {
    new PerformanceObserver(() => resolve(window.shifted)).observe({type: "layout-shift"});
    document.body.style.paddingTop = "300px";
})"""

FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"

CONTRASTS = """(() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => numbers(colour).slice(0, 3)
        .map((part) => part / 255)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim();
        const element = walker.currentNode.parentElement;
        if (!text || element.matches("script, style")) continue;
        if (!element.checkVisibility({visibilityProperty: true})) continue;
        let behind = element;
        while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) {
            behind = behind.parentElement;
        }
        const light = luminance(getComputedStyle(element).color);
        const other = luminance(getComputedStyle(behind).backgroundColor);
        const ratio = (Math.max(light, other) + 0.05) / (Math.min(light, other) + 0.05);
        found.push([ratio, text]);
    }
    return found.sort((a, b) => a[0] - b[0]);
})()"""
"""The contrast of every visible text with what is behind it (WCAG 2.2, 1.4.3), the worst first."""


@pytest.fixture
def browse() -> Browse:
    path = find_browser()
    if path is None:
        if os.environ.get("MLXCEL_NEEDS_BROWSER"):
            pytest.fail("no browser was found, and MLXCEL_NEEDS_BROWSER is set")
        pytest.skip("needs a Chromium, such as Debian's chromium-headless-shell")
    return lambda: browsing(path)


def address(client: Any) -> str:
    return f"http://127.0.0.1:{client.port}/"


async def test_a_request_is_seen(tiny_served: Served, browse: Browse) -> None:
    """Stages appear, a request runs, its tokens and the work of both stages show."""
    async with tiny_served() as client, browse() as page:
        await page.open(address(client))
        await page.until(SHOWN)
        assert await page.evaluate("document.querySelectorAll('#stages li').length") == 2
        assert await page.evaluate(STATE) == "Ready."
        assert await page.evaluate("document.getElementById('model').textContent") == "tiny"
        text = "document.querySelector('#stages').innerText"
        assert "layers 0\u20132" in await page.evaluate(text)
        await client.complete("hello", **LONG)
        await page.until("document.getElementById('generated').textContent === '200'")
        await page.until("document.getElementById('highest').textContent !== '0 /s'")
        await page.until(
            "[...document.querySelectorAll('#stages path.edge')].every("
            "(path) => path.getAttribute('d').split(',').some((part) => parseFloat(part) < 100))"
        )
        assert page.problems == []
        assert all(url.startswith((address(client), "data:")) for url in page.requests)


@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_jumps(tiny_served: Served, browse: Browse, width: int) -> None:
    """On a phone and on a desk: nothing to scroll sideways, and nothing moves as figures come."""
    async with tiny_served() as client, browse() as page:
        await page.resize(width, 740)
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH_SHIFTS)
        await page.open(address(client))
        await page.until(SHOWN)
        await client.complete("hello", **LONG)
        await page.until("document.getElementById('highest').textContent !== '0 /s'")
        assert await page.evaluate("innerWidth") == width
        assert await page.evaluate(FITS)
        assert await page.evaluate("window.shifted") < 0.1
        assert await page.evaluate(JUMP) > 0.1, "a page that jumps must be noticed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everything_can_be_read(served: Served, browse: Browse, scheme: Any) -> None:
    """All text has a contrast of 4.5 or more, in each state and in both colour schemes."""
    async with served(api_keys=("s3cret",)) as client, browse() as page:
        client.app[FEED].seconds = 0.05
        await page.prefer(scheme)
        await page.open(address(client))
        await page.until("!document.getElementById('key').hidden")
        seen = [await page.evaluate(CONTRASTS)]
        await page.type("s3cret")
        await page.press("Enter")
        await page.until(SHOWN)
        for phase in ("loading", "ready", "draining", "failed"):
            before = await page.evaluate(STATE)
            client.backend.error = WorkerDied(1, 7, "by SIGKILL") if phase == "failed" else None
            client.backend.phase = phase
            await page.until(f"{STATE} !== {before!r}")
            seen.append(await page.evaluate(CONTRASTS))
        client.backend.phase, client.backend.error = "ready", None
        for texts in seen:
            assert len(texts) >= 4
            assert texts[0][0] >= 4.5, texts[0]
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, background[4:-1].split(","))) < 3 * 128
        assert dark == (scheme == "dark")


async def test_the_keyboard_is_enough(served: Served, browse: Browse, eventually: Any) -> None:
    """The first thing that Tab reaches stops the page, and starts it again; focus can be seen."""
    async with served() as client, browse() as page:
        feed = client.app[FEED]
        feed.seconds = 0.05
        await page.open(address(client))
        await page.until(SHOWN)
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "pause"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await page.evaluate(outline) == "solid"
        await page.press("Enter")
        await page.until(f"{STATE} === 'Paused.'")
        await eventually(lambda: feed.watching_now == 0)
        await page.press(" ")
        await page.until(f"{STATE} === 'Ready.'")
        assert feed.watching_now == 1
        assert await page.evaluate("document.getElementById('state').ariaLive") == "polite"


async def test_a_long_error_can_be_scrolled(served: Served, browse: Browse) -> None:
    """An error that does not fit is reached by the keyboard, and makes nothing jump."""
    async with served() as client, browse() as page:
        await page.resize(360, 740)
        client.app[FEED].seconds = 0.05
        client.backend.error = WorkerDied(1, 7, "by SIGKILL " * 40)
        client.backend.phase = "failed"
        await page.open(address(client))
        await page.until(SHOWN)
        await page.press("Tab")
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "state"
        assert await page.evaluate(FITS)
        client.backend.phase, client.backend.error = "ready", None


async def test_the_page_asks_for_a_key(served: Served, browse: Browse) -> None:
    """A key is asked for, refused, taken, remembered for the tab, and in no address."""
    async with served(api_keys=("s3cret",)) as client, browse() as page:
        await page.open(address(client))
        await page.until("!document.getElementById('key').hidden")
        assert await page.evaluate("document.activeElement.id") == "secret"
        await page.type("wrong")
        await page.press("Enter")
        await page.until("document.getElementById('refused').textContent !== ''")
        await page.type("s3cret")
        await page.press("Tab")
        await page.press("Enter")
        await page.until(SHOWN)
        assert await page.evaluate("document.getElementById('key').hidden")
        await page.open(address(client))
        await page.until(SHOWN)
        assert await page.evaluate("Object.values(sessionStorage)") == ["s3cret"]
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
        assert [url for url in page.requests if "s3cret" in url] == []


async def test_loading_shows_for_each_stage(served: Served, browse: Browse) -> None:
    """Stages that still load have a bar with their progress; it does not move for who minds."""
    async with served() as client, browse() as page:
        media = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        await page.call("Emulation.setEmulatedMedia", features=media)
        client.backend.phase = "loading"
        await page.open(address(client))
        await page.until(SHOWN)
        bars = "[...document.querySelectorAll('[role=progressbar]')]"
        assert await page.evaluate(f"{bars}.map((bar) => bar.ariaValueNow)") == ["50", "0"]
        assert await page.evaluate(STATE) == "Loading the model."
        moving = "getComputedStyle(document.querySelector('.loading i')).transitionDuration"
        assert await page.evaluate(moving) == "0s"


async def test_a_name_is_only_text(served: Served, browse: Browse) -> None:
    """Markup in the name of a model, or in an error, is shown as it is written."""
    evil = "<img src=x onerror=document.title=1><script>document.title=2</script>"
    async with served(model_id=evil) as client, browse() as page:
        client.backend.phase = "failed"
        client.backend.error = WorkerDied(1, 7, evil)
        await page.open(address(client))
        await page.until(SHOWN)
        assert await page.evaluate("document.getElementById('model').textContent") == evil
        assert evil in await page.evaluate(STATE)
        assert await page.evaluate("document.images.length") == 0
        assert await page.evaluate("document.title") == f"{evil} \u2013 mlxcel"
        client.backend.phase, client.backend.error = "ready", None


class Door:
    """Forwards connections to ``port``, until it is shut."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._inner = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        """Cut every connection, and take no more."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outward = await asyncio.open_connection("127.0.0.1", self._inner)
        self._writers += [writer, outward]
        await asyncio.gather(_copy(reader, outward), _copy(inner, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def door_to(client: Any) -> AsyncIterator[Door]:
    door = Door(client.port)
    await door.open()
    try:
        yield door
    finally:
        door.shut()


async def test_a_lost_connection_comes_back(served: Served, browse: Browse) -> None:
    """The page says that the connection is lost, and finds back by itself."""
    async with served() as client, door_to(client) as door, browse() as page:
        await page.open(address(door))
        await page.until(f"{STATE} === 'Ready.'")
        door.shut()
        await page.until(f"{STATE} === 'Connection lost. Trying again.'")
        await door.open()
        await page.until(f"{STATE} === 'Ready.'")
