"""From a model's text, as it comes, to the parts of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from mlxcel.engine.stop_strings import overlap
from mlxcel.engine.thinking import Thinking
from mlxcel.server.parts import Content, Part, Reasoning, ToolCall

ReadCalls = Callable[[str], Sequence[ToolCall] | None]
"""The calls that a text spells; None if it spells none."""


class Reader(Protocol):
    """Reads one text; no part is taken back once it is out."""

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        ...

    def finish(self, complete: bool) -> list[Part]:
        """What is left at the end; ``complete`` unless the text was cut short."""
        ...


class PlainReader:
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self, complete: bool) -> list[Part]:
        return []


class ForcedCallReader:
    """The whole text is one call, or what is left of one that was cut short."""

    def __init__(self, read: ReadCalls) -> None:
        self._read = read
        self._text: list[str] = []

    def feed(self, text: str) -> list[Part]:
        self._text.append(text)
        return []

    def finish(self, complete: bool) -> list[Part]:
        text = "".join(self._text)
        calls = self._read(text)
        return [*calls] if calls else PlainReader().feed(text)


Section = Literal["content", "reasoning", "call"]


class MarkedReader:
    """Thoughts and calls stand between marks, content outside of them.

    A call comes when it is whole. What stands between its marks and is no call is content,
    marks included. White space at the beginning of thoughts, and of content after a mark, is
    left out.

    Args:
        thinking: The marks of thoughts, if there are any.
        call: The marks of calls and what reads them; an empty end mark never comes.
        inside: Whether the text begins inside thoughts.
    """

    def __init__(
        self,
        thinking: Thinking | None,
        call: tuple[str, str, ReadCalls] | None = None,
        *,
        inside: bool = False,
    ) -> None:
        self._marks: dict[Section, list[tuple[str, Section]]] = {
            "content": [],
            "reasoning": [],
            "call": [],
        }
        if thinking is not None:
            self._marks["content"].append((thinking.start, "reasoning"))
            self._marks["content"] += [(mark, "content") for mark in thinking.noise]
            self._marks["reasoning"].append((thinking.end, "content"))
        if call is not None:
            start, end, self._read = call
            self._start, self._end = start, end
            self._marks["content"].append((start, "call"))
            self._marks["reasoning"].append((start, "call"))
            self._marks["call"] += [(end, "content")] if end else []
        self._section: Section = "reasoning" if inside else "content"
        self._fresh = inside
        self._held = ""
        self._call: list[str] = []

    @property
    def thinks(self) -> bool:
        """Whether the text is inside thoughts now."""
        return self._section == "reasoning"

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while (found := self._first_mark()) is not None:
            at, mark, section = found
            self._say(self._held[:at], parts)
            self._held = self._held[at + len(mark) :]
            if self._section == "call":
                parts += self._read_call(self._end)
            self._section, self._fresh = section, True
        keep = max((overlap(self._held, mark) for mark, _ in self._marks[self._section]), default=0)
        cut = len(self._held) - keep
        self._say(self._held[:cut], parts)
        self._held = self._held[cut:]
        return parts

    def finish(self, complete: bool) -> list[Part]:
        parts: list[Part] = []
        self._say(self._held, parts)
        self._held = ""
        if self._section == "call":
            # A model may end its text instead of the call; a call that was cut short is none.
            if complete or not self._end:
                parts += self._read_call("")
            else:
                parts += [Content(self._start + "".join(self._call))]
            self._section = "content"
        return parts

    def _first_mark(self) -> tuple[int, str, Section] | None:
        marks = self._marks[self._section]
        found = [(at, m, s) for m, s in marks if (at := self._held.find(m)) >= 0]
        return min(found, default=None)

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._section == "call":
            self._call.append(text)
            return
        if self._fresh:
            text = text.lstrip()
        if text:
            self._fresh = False
            parts.append(Reasoning(text) if self._section == "reasoning" else Content(text))

    def _read_call(self, end: str) -> Sequence[Part]:
        text = "".join(self._call)
        self._call.clear()
        return self._read(text) or [Content(self._start + text + end)]
