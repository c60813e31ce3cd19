"""What ``mlxcel chat`` shows: answers on standard output, everything else beside them."""

from __future__ import annotations

import os
import sys

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_CONTROLS = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


class Screen:
    """Writes an answer as it comes; thoughts are dim, and shown on a terminal only."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._dims = self._terminal and os.environ.get("TERM") != "dumb"
        self._dims = self._dims and not os.environ.get("NO_COLOR")
        self._thinking = False
        self._last = "\n"

    def thought(self, text: str) -> None:
        """Some of what the model thinks before it answers."""
        if self._terminal:
            if not self._thinking:
                self._write(DIM * self._dims)
            self._thinking = True
            self._say(text)

    def text(self, text: str) -> None:
        """Some of the answer."""
        if self._thinking:
            self._stop_thinking()
            self._say("\n" if self._last == "\n" else "\n\n")
        self._say(text)

    def end(self) -> None:
        """The answer is over, or was stopped; what follows begins a line."""
        self._stop_thinking()
        if self._last != "\n":
            self._say("\n")

    def note(self, line: str) -> None:
        """Something that the model did not say."""
        dims = self._dims and sys.stderr.isatty()
        print(f"{DIM}{line}{PLAIN}" if dims else line, file=sys.stderr, flush=True)

    def _stop_thinking(self) -> None:
        if self._thinking:
            self._write(PLAIN * self._dims)
        self._thinking = False

    def _say(self, text: str) -> None:
        """Write what others said: on a terminal, they may not steer it."""
        self._write(text.translate(_CONTROLS) if self._terminal else text)
        self._last = text[-1:] or self._last

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
