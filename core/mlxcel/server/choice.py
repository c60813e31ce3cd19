"""One choice of an answer while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.engine.sequence import FinishReason, Output
from mlxcel.server.logprobs import Drawn
from mlxcel.server.parts import Content, Part, Reasoning, ToolCall
from mlxcel.server.readers import Reader


@attrs.frozen
class Prompt:
    """What a choice goes on from.

    Attributes:
        tokens: Its token ids.
        echo: Its text, where the answer repeats it.
        inside: Whether it ends inside thoughts.
    """

    tokens: tuple[int, ...]
    echo: str = ""
    inside: bool = False


@attrs.define(eq=False)
class Choice:
    """A choice and all that has come of it.

    Attributes:
        index: Its place in the answer.
        prompt: What it goes on from.
        first: Whether it is the first choice of its prompt.
        reader: What makes parts of its text.
        cached: How many tokens of the prompt were known; told with the last token.
        finish_reason: Why it ended, once it has.
        ended_itself: Whether it ended by the model's own end token.
        calls: The calls so far.
        drawn: The tokens with their log-probabilities, if they were asked for.
        tokens: All tokens so far.
        parts: All parts so far.
    """

    index: int
    prompt: Prompt
    first: bool
    reader: Reader
    cached: int = 0
    finish_reason: FinishReason | None = None
    ended_itself: bool = False
    calls: int = 0
    drawn: list[Drawn] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    parts: list[Part] = attrs.field(factory=list)

    @property
    def made(self) -> int:
        """How many tokens have come."""
        return len(self.tokens)

    def take(self, output: Output) -> list[Part]:
        """The parts that ``output`` brings; they are not kept."""
        self.tokens += output.tokens
        parts = self.reader.feed(output.text)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.cached = output.cached
            self.ended_itself = output.finish_reason == "stop" and not output.tokens
            parts += self.reader.finish(output.finish_reason == "stop")
        for part in parts:
            self.calls += isinstance(part, ToolCall)
        return parts

    def keep(self, output: Output) -> None:
        """Take ``output`` and keep all of it."""
        self.parts += self.take(output)
        self.drawn += zip(output.tokens, output.logprobs, strict=False)

    def reason(self) -> str:
        """The finish reason in OpenAI's words."""
        if self.calls and self.finish_reason == "stop":
            return "tool_calls"
        assert self.finish_reason in ("stop", "length"), self.finish_reason
        return self.finish_reason


def joined_content(parts: Sequence[Part]) -> str:
    """All content, in one."""
    return "".join(part.text for part in parts if isinstance(part, Content))


def joined_reasoning(parts: Sequence[Part]) -> str:
    """All thoughts, in one."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))
