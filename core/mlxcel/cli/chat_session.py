"""A conversation: turns, commands, and what happens when a turn goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxcel.cli.chat_input import ReadLine, read_message
from mlxcel.cli.chat_screen import Screen
from mlxcel.errors import MlxcelError

Message = Mapping[str, Any]
Ask = Callable[[Sequence[Message], Callable[[str], None], Callable[[str], None]], str | None]
"""Answers messages: tells text and thoughts as they come, and returns the finish reason."""

HELP = """\
/reset          forget the conversation
/system TEXT    forget it, and begin with this system message (none without TEXT)
/save FILE      write the conversation to a new file, as JSON
/quit           end (so does Ctrl-D)
A message of several lines stands between lines with \"\"\". Ctrl-C stops an answer."""


class Session:
    """One conversation between a person or a program and a model.

    Args:
        ask: Answers messages.
        read_line: Where messages come from.
        screen: Where answers go.
        system: The system message.
        interactive: Whether errors and Ctrl-C end an answer only; else they end everything.

    Attributes:
        turns: What was said, the system message left out.
    """

    def __init__(
        self,
        ask: Ask,
        read_line: ReadLine,
        screen: Screen,
        *,
        system: str | None = None,
        interactive: bool = False,
    ) -> None:
        self.turns: list[Message] = []
        self.system = system
        self._ask = ask
        self._read_line = read_line
        self._screen = screen
        self._interactive = interactive
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        """The conversation as a model is given it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def run(self) -> None:
        """Talk until there are no more messages, or one of them is /quit.

        Raises:
            MlxcelError, KeyboardInterrupt: An answer failed, or was stopped, and nobody is
                there to see it.
        """
        going = True
        while going:
            try:
                text = read_message(self._read_line)
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._screen.note("")
                continue
            if text.startswith("/"):
                going = self.command(text)
            elif text.strip():
                self.say(text)

    def say(self, text: str) -> None:
        """Send a message and show the answer; one that failed is as if never sent."""
        parts: list[str] = []

        def on_text(piece: str) -> None:
            parts.append(piece)
            self._screen.text(piece)

        asked = [*self.messages, {"role": "user", "content": text}]
        with self._survived():
            try:
                reason = self._ask(asked, on_text, self._screen.thought)
            except KeyboardInterrupt:
                reason = "stopped"
                if not self._interactive:
                    raise
            finally:
                self._screen.end()
            if reason in NOTES:
                self._screen.note(NOTES[reason])
            if parts:
                answer = {"role": "assistant", "content": "".join(parts)}
                self.turns += [asked[-1], answer]

    def command(self, line: str) -> bool:
        """Obey ``line``, which begins with a slash; whether to go on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.turns.clear()
                self._screen.note("The conversation is forgotten.")
            case "/system":
                self.turns.clear()
                self.system = rest or None
                self._screen.note("A new conversation begins.")
            case "/save":
                self._save(rest)
            case _:
                self._screen.note(HELP if name == "/help" else f"{name} is no command.\n{HELP}")
        return True

    def _save(self, name: str) -> None:
        """Write the conversation; never over a file that it did not write itself."""
        if not name:
            self._screen.note("/save needs the name of a file.")
            return
        path = Path(name).expanduser().absolute()
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            self._screen.note(f"{path} cannot be written ({error.strerror}).")
        else:
            self._saved.add(path)
            self._screen.note(f"{len(self.messages)} messages are in {path}.")

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except MlxcelError as error:
            if not self._interactive:
                raise
            self._screen.note(str(error))


NOTES = {
    "length": "(cut off: the answer reached its most tokens, see -n/--max-tokens)",
    "stopped": "(stopped)",
}
"""What is said of an answer that did not end by itself."""
