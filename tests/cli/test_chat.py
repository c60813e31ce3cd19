"""``mlxcel chat`` as a command: against servers, a local model, in pipes and on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxcel.cli.main import run

Answering = Callable[[Any], str]
MLXCEL = str(Path(sys.executable).with_name("mlxcel"))
SECONDS = 60.0


class Fake:
    """Answers with "echo: " and the last message; keeps the requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.stopped = asyncio.Event()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}]})
        body = json.loads(await request.read())
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        response = web.StreamResponse()
        await response.prepare(request)
        for delta in ({"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "echo: "}):
            await response.write(chunk(delta))
        await response.write(chunk({"content": text}))
        if text == "forever":
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(chunk({"content": "."}))
                    await asyncio.sleep(0.01)
            return response
        await response.write(chunk({}, "stop") + b"data: [DONE]\n\n")
        return response


def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


def refusing(status: int, message: str, **headers: str) -> Any:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models" and status != 401:
            return web.json_response({"data": []})
        return web.json_response({"error": {"message": message}}, status=status, headers=headers)

    return handler


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text into standard input, as from a pipe."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_pipe(
    answering: Answering, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line is a message; only the answers go to standard output."""
    fake = Fake()
    typed('one\n"""two\nthree"""\n/reset\nfour')
    flags = ["-n", "7", "--temp", "0.5", "--top-p", "0.9", "--seed", "3", "--system", "Hm."]
    assert run(["chat", "--url", answering(fake), *flags]) == 0
    assert capsys.readouterr().out == "echo: one\necho: two\nthree\necho: four\n"
    wishes = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    assert all(body | wishes == body and body["model"] == "fake" for body in fake.bodies)
    assert [len(body["messages"]) for body in fake.bodies] == [2, 4, 2]
    assert fake.bodies[0]["messages"][0] == {"role": "system", "content": "Hm."}


def test_what_is_not_wished_is_not_sent(answering: Answering, typed: Callable[[str], None]) -> None:
    """Then the server decides."""
    fake = Fake()
    typed("one\n")
    assert run(["chat", "--url", answering(fake), "--served-model-name", "other"]) == 0
    assert fake.bodies == [
        {"model": "other", "messages": [{"role": "user", "content": "one"}], "stream": True}
    ]


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (refusing(401, "A key is needed."), "status 401: A key is needed. Give the right key"),
        (
            refusing(503, "It loads.", **{"Retry-After": "2"}),
            "status 503: It loads. Try again in 2 s.",
        ),
        (refusing(429, "Many wait."), "status 429: Many wait. Try again later."),
    ],
)
def test_refusals_in_words(
    answering: Answering,
    typed: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    handler: Any,
    told: str,
) -> None:
    """In a pipe a refusal ends the command with one line and exit code 1."""
    typed("one\ntwo\n")
    assert run(["chat", "--url", answering(handler)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Give either --url or -m"),
        (["--url", "http://x", "-m", "y"], "Give either --url or -m"),
        (["--url", "x"], "--url x is no URL"),
        (["--url", "http://x", "-n", "0"], "-n/--max-tokens 0"),
        (["--url", "http://x", "--temp", "3"], "--temp 3.0"),
        (["--url", "http://x", "--top-p", "0"], "--top-p 0.0"),
        (["--url", "http://x", "--timeout", "nan"], "--timeout nan"),
        (["--url", "http://x", "--pp-size", "3"], "--pp-size does not go with --url"),
        (["--url", "http://x", "--tp-size", "2", "--seed", "1"], "--tp-size does not go"),
        (["--url", "http://x", "--dtype", "float16"], "--dtype does not go with --url"),
        (["--url", "http://x", "--no-plugin", "a"], "--no-plugin does not go with --url"),
        (["-m", "y", "--api-key", "k"], "--api-key does not go with -m"),
        (["-m", "y", "--served-model-name", "k"], "--served-model-name does not go with -m"),
    ],
)
def test_flags_that_cannot_be(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by name, exit 2."""
    assert run(["chat", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_local_model(
    tiny: Callable[..., Path], typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is served to this command alone, with the flags of generate, and answers twice alike."""
    typed("hello\n/reset\nhello\n")
    flags = ["--pp-workers", "thread", "--pp-size", "2", "-n", "12", "--seed", "1"]
    assert run(["chat", "-m", str(tiny("llama")), *flags]) == 0
    out = capsys.readouterr().out
    assert out == out[: len(out) // 2] * 2 != ""


def test_a_local_model_without_a_template(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot talk, and that is said before it is loaded."""
    import shutil

    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    (folder / "tokenizer_config.json").unlink()
    assert run(["chat", "-m", str(folder)]) == 2
    assert "has no chat template" in capsys.readouterr().err


class Terminal:
    """A terminal with ``mlxcel chat`` in it."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        self.process = subprocess.Popen(
            [MLXCEL, "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": "xterm"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> None:
        """Read until ``text`` has been shown, and forget what came before it."""
        while text not in self.shown:
            ready, _, _ = select.select([self._master], [], [], SECONDS)
            assert ready, f"waiting for {text!r}, there is {self.shown!r}"
            self.shown += os.read(self._master, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    """Make the terminal that standard input is the process's own, so that Ctrl-C reaches it."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(answering: Answering) -> Iterator[Terminal]:
    terminal = Terminal("--url", answering(Fake()))
    yield terminal
    terminal.close()


@pytest.mark.skipif(sys.platform != "linux", reason="written for Linux terminals")
def test_on_a_terminal(terminal: Terminal) -> None:
    """Thoughts are dim, Ctrl-C stops an answer and not the program, Ctrl-D ends it."""
    terminal.until("fake at http://127.0.0.1:")
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("\x1b[2mhm\x1b[0m")
    terminal.until("echo: hello")
    terminal.until("> ")
    terminal.type("forever\n")
    terminal.until("echo: forever...")
    terminal.type("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    terminal.type("half a line\x03")
    terminal.until("> ")
    terminal.type('"""two\n')
    terminal.until("... ")
    terminal.type('lines"""\n')
    terminal.until("echo: two")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="written for Linux terminals")
def test_a_server_that_goes_away(answering: Answering) -> None:
    """On a terminal an error is a line, and the next message is asked for."""
    terminal = Terminal("--url", answering(refusing(503, "It loads.")))
    try:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("It loads. Try again later.")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="written for Linux terminals")
def test_a_local_model_on_a_terminal(tiny: Callable[..., Path]) -> None:
    """Ctrl-C, which its worker processes get too, stops an answer; the next one comes."""
    terminal = Terminal("-m", str(tiny("llama")), "--pp-size", "2", "-n", "400")
    try:
        terminal.until("llama at http://127.0.0.1:")
        terminal.until("> ")
        for _ in range(2):
            terminal.type("hello\n")
            terminal.until("\ufffd")  # its nonsense is hardly ever a character
            terminal.type("\x03")
            terminal.until("(stopped)")
            terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
