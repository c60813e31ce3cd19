"""A headless Chromium, driven over its DevTools protocol, for tests of pages.

The protocol is described at https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")
SECONDS = 60.0


def find_browser() -> str | None:
    """The path of a Chromium on this machine, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


_UNTIL = """(holds) => new Promise((resolve) => {
    const watcher = new MutationObserver(look);
    function look() {
        if (!holds()) return;
        watcher.disconnect();
        resolve();
    }
    const all = {subtree: true, childList: true, attributes: true, characterData: true};
    watcher.observe(document, all);
    look();
})"""


class Page:
    """One tab.

    Attributes:
        requests: The addresses that it has fetched, its own included.
        problems: What went wrong in it: exceptions, errors on its console, refusals of its policy.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol.

        Raises:
            RuntimeError: The browser refuses it.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._calls[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(SECONDS):
            return await self._calls[number]

    async def listen(self) -> None:
        """Take what the browser says, until it ends."""
        async for received in self._socket:
            message = received.json()
            if (call := self._calls.pop(message.get("id"), None)) is not None:
                if "error" in message:
                    call.set_exception(RuntimeError(str(message["error"])))
                else:
                    call.set_result(message["result"])
                continue
            parameters = message.get("params", {})
            match message.get("method"):
                case "Network.requestWillBeSent":
                    self.requests.append(parameters["request"]["url"])
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    self.problems.append(str(parameters["exceptionDetails"]))
                case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                    self.problems.append(parameters["entry"]["text"])

    async def attach(self) -> None:
        """Make the tab, and hear of what happens in it."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Go to ``url``, and wait until it has loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or what its promise brings.

        Raises:
            RuntimeError: It throws.
        """
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds, looking whenever the page changes.

        Raises:
            AssertionError: It never does.
        """
        try:
            await self.evaluate(f"({_UNTIL})(() => ({condition}))")
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never: {condition}\n{text}\n{self.problems}") from None

    async def resize(self, width: int, height: int) -> None:
        """Be a screen of this size in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """Belong to somebody who likes it light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str) -> None:
        """Press and release a key, such as ``Tab`` or ``Enter``."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        up = {"type": "keyUp", "key": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", **up)

    async def type(self, text: str) -> None:
        """Enter ``text`` where the focus is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """Write what is to be seen, the whole page, to the PNG file ``path``."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def browsing(browser: str) -> AsyncIterator[Page]:
    """A tab in a browser of its own, which ends with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser,
            "--headless",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            # Chromium's sandbox refuses to work for root, who runs tests in containers.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group that ends together: it has processes of its own
        )
        assert process.stderr is not None
        try:
            url = await _address(process.stderr)
            reading = asyncio.create_task(process.stderr.read())  # or it fills up and blocks
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    await page.attach()
                    yield page
                finally:
                    listening.cancel()
            reading.cancel()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(stderr: asyncio.StreamReader) -> str:
    """Where the browser listens, which it says on standard error.

    Raises:
        RuntimeError: It ended before it said so.
    """
    said = ""
    async with asyncio.timeout(SECONDS):
        while line := (await stderr.readline()).decode():
            said += line
            _, listens, url = line.partition("DevTools listening on ")
            if listens:
                return url.strip()
    raise RuntimeError(f"the browser did not start:\n{said}")
