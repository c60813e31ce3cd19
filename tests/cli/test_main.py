"""The command line itself: help, version, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from mlxcel import __version__
from mlxcel.cli import main
from mlxcel.errors import MlxcelError, PluginError, UsageError

HEAVY = """
import sys
from io import TextIOWrapper
from pathlib import Path
from mlxcel.cli.main import run
try:
    code = run({argv!r})
except SystemExit as stop:
    code = stop.code
heavy = [name for name in ("mlx", "mlx_lm", "transformers") if name in sys.modules]
print(code, heavy, file=sys.stderr)
"""


def fake(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Make ``plugins`` run ``command``."""
    monkeypatch.setattr("mlxcel.cli.plugins.run", command)


def raiser(error: BaseException) -> Any:
    def command(args: Any) -> int:
        raise error

    return command


def test_ctrl_c_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first second, in which subcommands are imported, ends as quietly as the rest."""
    monkeypatch.setattr(main, "build_parser", lambda: raiser(KeyboardInterrupt())(None))
    assert main.run(["plugins"]) == main.INTERRUPTED


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["cluster", "--help"],
        ["plugins", "--help"],
    ],
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    """Help is quick: neither MLX nor mlx-lm nor transformers is imported."""
    done = subprocess.run(
        [sys.executable, "-c", HEAVY.format(argv=argv)], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "0 []"
    assert "mlxcel" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints name and version."""
    with pytest.raises(SystemExit) as stop:
        main.run(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"mlxcel {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["plugins", "--no-such-flag"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be parsed is a usage error."""
    with pytest.raises(SystemExit) as stop:
        main.run(argv)
    assert stop.value.code == 2
    assert "usage: mlxcel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MlxcelError("something failed"), 1, "mlxcel: error: something failed\n"),
        (UsageError("It cannot be.", "Do that."), 2, "mlxcel: error: It cannot be. Do that.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error raised on purpose shows its text, not a traceback."""
    fake(monkeypatch, raiser(error))
    assert main.run(["plugins"]) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(("strict", "shown"), [("1", True), ("0", False)])
def test_strict_mode_shows_the_plugins_traceback(
    strict: str,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MLXCEL_PLUGINS_STRICT=1 prints the cause of a plugin's failure."""
    error = PluginError("family", "alpha", "fake", "it broke.")
    error.__cause__ = ValueError("the cause")
    monkeypatch.setenv("MLXCEL_PLUGINS_STRICT", strict)
    fake(monkeypatch, raiser(error))
    assert main.run(["plugins"]) == 1
    assert ("ValueError: the cause" in capsys.readouterr().err) is shown


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug keeps its traceback."""
    fake(monkeypatch, raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main.run(["plugins"])


def test_a_reader_that_leaves_is_no_error() -> None:
    """Writing into a closed pipe ends quietly."""
    source = (
        "import sys\nfrom mlxcel.cli import main, plugins\n"
        "plugins.run = lambda args: print('x' * 200_000) or 0\n"
        "sys.stdin.read()\nsys.exit(main.run(['plugins']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), stderr) == (main.BROKEN_PIPE, b"")


def test_each_subcommand_registers_its_own_name() -> None:
    """The table of subcommands and what their modules add to the parser agree."""
    [action] = [a for a in main.build_parser()._actions if a.dest == "command"]
    assert list(action.choices or ()) == list(main.SUBCOMMANDS)


def command(shell: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``mlxcel plugins`` in a shell, with the redirections of ``shell``."""
    line = f'exec "{sys.executable}" -m mlxcel plugins {shell}'
    environment = {**os.environ, **environ}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk() -> None:
    """Output that cannot be written is one line of error."""
    done = command(">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("mlxcel: error: the output cannot be written (No space left")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    """A command works without its standard streams."""
    done = command(closed)
    assert (done.returncode, done.stderr) == (0, "")


def test_characters_that_the_terminal_lacks(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """They are replaced; the text around them arrives."""
    out = TextIOWrapper(open(os.dup(1), "wb"), encoding="ascii")  # noqa: SIM115 - closed below
    monkeypatch.setattr("sys.stdout", out)
    fake(monkeypatch, lambda args: print("añb") or 0)
    assert main.run(["plugins"]) == 0
    out.close()
    assert capfdbinary.readouterr().out == b"a?b\n"
