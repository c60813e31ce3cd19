"""What ``mlxcel chat`` is told: messages of one line or several, from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from io import TextIOWrapper

QUOTES = '"""'

ReadLine = Callable[[str], str]
"""The next line without its end, after a prompt; EOFError when there is none."""


def open_input() -> ReadLine:
    """Reads standard input: on a terminal with line editing and a history of lines."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() uses it once it is there
        return input
    return _read_quietly


def read_message(read_line: ReadLine) -> str:
    """The next message: a line, or the lines from one that begins with \"\"\" to one that ends so.

    Raises:
        EOFError: There is none.
    """
    line = read_line("> ")
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES):
        lines.append(read_line("... "))
    return "\n".join(lines).removesuffix(QUOTES)


def _read_quietly(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")
