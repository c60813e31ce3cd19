"""What the documents say can be done as they say it."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxcel.cli.main import build_parser, run

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
)
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]

_SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_FLAG = re.compile(r"`(--?[a-z][a-z-]*)`")


def shell_lines(document: Path) -> Iterator[str]:
    """The lines of the document's shell blocks, without comments."""
    for block in _SHELL_BLOCK.findall(document.read_text(encoding="utf-8")):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines() if line)


def mlxcel_commands(document: Path) -> Iterator[list[str]]:
    """The arguments of every ``mlxcel`` command in the document's shell blocks."""
    for line in shell_lines(document):
        for command in line.split(" | "):
            name, *arguments = shlex.split(command)
            if name == "mlxcel":
                yield arguments


def parser_of(command: str) -> argparse.ArgumentParser:
    [subparsers] = [a for a in build_parser()._actions if a.dest == "command"]
    assert isinstance(subparsers.choices, dict)
    parser = subparsers.choices[command]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_commands_parse(document: Path) -> None:
    """Every mlxcel command in a shell block is one that the command line accepts."""
    for arguments in mlxcel_commands(document):
        build_parser().parse_args(arguments)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links name files that exist."""
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("command", ["generate", "plan", "serve", "chat"])
def test_the_flags_are_all_described(command: str) -> None:
    """The tables of a command's document name its parser's flags, each once."""
    text = (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    described = [flag for cell in first_cells for flag in _FLAG.findall(cell)]
    flags = {
        flag
        for action in parser_of(command)._actions
        if action.help != argparse.SUPPRESS
        for flag in action.option_strings
    }
    assert sorted(described) == sorted(flags)


@pytest.mark.parametrize("command", ["generate", "plan", "serve", "chat"])
def test_the_defaults_are_those_of_the_parser(command: str) -> None:
    """A default that a command's document states is the parser's."""
    text = (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")
    parser = parser_of(command)
    stated = re.findall(r"^\| .*`(--[a-z-]+)`[^|]* \| `?([^|`]+)`? \|", text, re.MULTILINE)
    assert stated
    words = {"none": (None, []), "off": (False,), "drawn": (None,), "1": (1, None)}
    for flag, default in stated:
        value = parser.get_default(flag.removeprefix("--").replace("-", "_"))
        assert value in words.get(default, ()) or str(value).removesuffix(".0") == default, flag


@pytest.mark.parametrize("name", ["README.md", "docs/generate.md", "docs/plan.md"])
def test_commands_run(
    name: str,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command that runs or plans a model works as the document has it."""
    # The documents' model has 30 layers; the tiny one has 6, so cuts are made anew.
    cuts = {"0-9,10-19,20-29": "0-1,2-3,4-5"}
    ran = 0
    for arguments in mlxcel_commands(ROOT / name):
        if arguments[0] in ("generate", "plan", "plugins"):
            places = dict.fromkeys(("smollm2", ".demo/smollm2"), str(tiny("llama"))) | cuts
            monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time"))
            assert run([places.get(word, word) for word in arguments]) == 0, arguments
            ran += 1
    assert ran
    assert capsys.readouterr().out


ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture
def live(tiny: Callable[..., Path]) -> Iterator[Callable[[list[str]], str]]:
    """Starts a server as a document has it, but with the tiny model, more context, a free port."""
    processes: list[subprocess.Popen[str]] = []

    def start(arguments: list[str]) -> str:
        places = dict.fromkeys(("smollm2", ".demo/smollm2"), str(tiny("llama")))
        command = [str(Path(sys.executable).with_name("mlxcel")), *arguments]
        command += ["--port", "0", "--ctx-size", "4096"]  # a token is a byte to the tiny model
        process = subprocess.Popen(
            [places.get(word, word) for word in command], stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("listening on "))
        return line.removeprefix("listening on ").strip()

    yield start
    for process in processes:
        process.terminate()
        process.communicate()


def wait_until_ready(url: str) -> None:
    status = "loading"
    while status == "loading":
        try:
            response = urllib.request.urlopen(f"{url}/health", timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        status = json.load(response)["status"]
    assert status == "ok"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("name", ["README.md", "docs/serve.md"])
def test_curl_lines_work(name: str, live: Callable[[list[str]], str]) -> None:
    """What a document asks of a server with curl is answered by the server it starts."""
    [serve] = [words for words in mlxcel_commands(ROOT / name) if words[0] == "serve"]
    url = live(serve)
    wait_until_ready(url)
    lines = [line for line in shell_lines(ROOT / name) if line.startswith("curl ")]
    assert lines
    for line in lines:
        assert ADDRESS in line
        words = shlex.split(line.replace(ADDRESS, url))
        done = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        if '"stream": true' in line:
            assert done.stdout.endswith("data: [DONE]\n\n")
        elif "/metrics" not in line:
            assert "error" not in json.loads(done.stdout)
