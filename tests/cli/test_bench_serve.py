"""``mlxcel bench serve`` as a command: flags, and servers that are there already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxcel.cli.bench_serve import parse_lengths
from mlxcel.cli.main import run
from mlxcel.errors import UsageError

Answering = Callable[[Any], str]


class Fake:
    """A server that makes as many tokens as it is asked for, and keeps the requests."""

    def __init__(self, key: str | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.left = 1000
        self._key = key

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "No key."}}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake"}, {"id": "other"}]})
        self.left -= 1
        if self.left < 0:
            return web.json_response({"error": {"message": "Gone."}}, status=503)
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.paths.append(request.path)
        text = {"text": "a", "delta": {"content": "a"}, "finish_reason": None}
        usage = {"prompt_tokens": 64, "completion_tokens": body["max_tokens"]}
        chunks = [{"choices": [text]}, {"choices": [text]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]))


def bench(*arguments: str) -> int:
    return run(["bench", "serve", *arguments])


def test_any_server(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first model is asked; the figures of all requests but the first are a JSON object."""
    fake = Fake()
    url = answering(fake)
    flags = ["--requests", "5", "--seed", "7", "--output-length", "3", "--json"]
    assert bench("--url", url, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["servers"] == [{"url": f"{url}/v1", "model": "fake"}]
    assert (found["good"], found["output_tokens"], found["errors"]) == (5, 15, {})
    assert (found["seed"], found["load"]["rate"], found["load"]["clients"]) == (7, None, 8)
    assert len(fake.bodies) == 6
    assert {body["model"] for body in fake.bodies} == {"fake"}


def test_chats_at_a_rate(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """The other endpoint, another model, requests that come by themselves."""
    fake = Fake()
    flags = ["--endpoint", "chat", "--rate", "500", "--served-model-name", "other"]
    assert bench("--url", f"{answering(fake)}/v1/", *flags, "--requests", "4") == 0
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert {body["model"] for body in fake.bodies} == {"other"}
    assert "500 a second, as many at once as come" in capsys.readouterr().out


def test_a_warm_prefix(answering: Answering) -> None:
    """All prompts begin with what the uncounted request was."""
    fake = Fake()
    flags = ["--prompt-length", "20", "--warm-prefix", "15", "--requests", "4"]
    assert bench("--url", answering(fake), *flags) == 0
    first, *others = [body["prompt"] for body in fake.bodies]
    assert len(first.split()) == 15
    assert all(prompt.startswith(first) for prompt in others)
    assert len(set(others)) == 4


def test_two_servers_in_turn(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """Both get the same requests, new ones in each pair; ratios are printed."""
    ours, theirs = Fake(), Fake()
    flags = ["--pairs", "2", "--requests", "3", "--compare", answering(theirs)]
    assert bench("--url", answering(ours), *flags) == 0
    assert ours.bodies == theirs.bodies
    assert len({body["prompt"] for body in ours.bodies}) == 1 + 3 * 3
    out = capsys.readouterr().out
    assert "| figure | reference | ours | ratio | pairs' range |" in out
    assert "| output |" in out


def test_keys(
    answering: Answering, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server gets its own key and not the other's, the first one from the environment too."""
    ours, theirs = answering(Fake("one")), answering(Fake("two"))
    both = ["--url", ours, "--compare", theirs, "--pairs", "1", "--requests", "1"]
    assert bench(*both, "--api-key", "one", "--compare-api-key", "two") == 0
    monkeypatch.setenv("OPENAI_API_KEY", "one")
    assert bench("--url", ours, "--requests", "1", "--json") == 0
    assert '"one"' not in capsys.readouterr().out
    assert bench(*both) == 1
    assert f"{theirs}/v1 answered with status 401: No key." in capsys.readouterr().err


def test_a_server_that_gives_up(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures are counted by kind; only if nothing at all was answered, the exit code is 1."""
    fake = Fake()
    url = answering(fake)
    fake.left = 4
    assert bench("--url", url, "--requests", "6") == 0
    assert "failed, status 503: 3" in capsys.readouterr().out
    fake.left = 1
    assert bench("--url", url, "--requests", "6") == 1
    assert "| 0 | 6 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Give --url, or -m"),
        (["--url", "nonsense"], "--url nonsense is no URL"),
        (["--url", "http://x", "--compare", "nonsense"], "--compare nonsense is no URL"),
        (["--url", "http://x", "--against", "mlx-lm"], "--against mlx-lm needs a model"),
        (["--url", "http://x", "--", "--pp-size", "2"], "--pp-size 2: --url is not started here"),
        (["--url", "http://x", "--requests", "0"], "--requests 0"),
        (["--url", "http://x", "--clients", "0"], "--clients 0"),
        (["--url", "http://x", "--pairs", "0"], "--pairs 0"),
        (["--url", "http://x", "--rate", "0"], "--rate 0"),
        (["--url", "http://x", "--rate", "nan"], "--rate nan"),
        (["--url", "http://x", "--timeout", "0"], "--timeout 0"),
        (["--url", "http://x", "--prompt-length", "many"], "--prompt-length many is no length"),
        (["--url", "http://x", "--output-length", "5-3"], "--output-length 5-3 is no length"),
        (["--url", "http://x", "--warm-prefix", "64"], "--warm-prefix 64"),
    ],
)
def test_flags_that_cannot_be(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by name, exit 2, before anything starts."""
    assert bench(*arguments) == 2
    assert told in capsys.readouterr().err


def test_two_ways_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second server is either there or started."""
    flags = ["-m", str(tmp_path), "--against", "mlx-lm", "--compare", "http://x"]
    assert bench("--url", "http://x", *flags) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_lengths() -> None:
    """One number, or two that are in order."""
    assert parse_lengths("--x", "64") == (64, 64)
    assert parse_lengths("--x", "1-3") == (1, 3)
    for text in ("0", "3-2", "1-", "-1", "1-2-3", "², ", "", "1048577", "9" * 30):
        with pytest.raises(UsageError, match="--x"):
            parse_lengths("--x", text)
