"""One request on its way through the engine."""

from __future__ import annotations

import enum
from typing import Literal

import attrs

from mlxcel.engine.detokenizer import StreamingDetokenizer
from mlxcel.engine.slot import Request
from mlxcel.engine.stop_strings import StopStrings
from mlxcel.errors import MlxcelError
from mlxcel.pipeline.step import Logprobs

FinishReason = Literal["stop", "length", "cancelled", "error"]


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PENDING_PREFILL = "pending_prefill"
    DECODING = "decoding"
    COMPLETED = "completed"
    EVICTED = "evicted"


@attrs.frozen
class Output:
    """What a step brought for one request.

    ``text`` is final: no later token changes it. ``finish_reason`` comes exactly once, with
    the last output; ``error`` says why where it is ``error``. ``cached`` tokens of the prompt
    were known already; that comes with the last output too. ``logprobs`` has an item for each
    of ``tokens`` where they were asked for, else it is empty.
    """

    request: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: MlxcelError | None = None
    cached: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@attrs.define(eq=False)
class Sequence:
    """A request with all that the engine knows of it.

    Attributes:
        last: The token that its next step carries.
        made: Tokens generated so far.
        cached: Tokens of the prompt that the stages knew already.
        arrived: When it came (monotonic seconds).
    """

    request: Request
    decoder: StreamingDetokenizer | None
    stops: StopStrings
    state: State = State.WAITING
    last: int = 0
    made: int = 0
    cached: int = 0
    arrived: float = 0.0

    @property
    def finished(self) -> bool:
        return self.state in (State.COMPLETED, State.EVICTED)

    @property
    def longest(self) -> int:
        """Tokens that it can have at most, prompt included."""
        return len(self.request.prompt) + self.request.max_tokens

    def advance(self, token: int, ends: bool, logprobs: Logprobs | None = None) -> Output:
        """The output that one more token makes; ``ends`` if it is an end token.

        The sequence is finished by an end token, a stop string, or its last allowed token.
        """
        if ends and not self.request.ignore_end:
            return self.finish("stop", self._flush())
        self.last, self.made = token, self.made + 1
        text = self.stops.feed(self.decoder.add(token)) if self.decoder else ""
        tokens, found = (token,), () if logprobs is None else (logprobs,)
        if self.stops.stopped:
            return self.finish("stop", text, tokens, found)
        if self.made >= self.request.max_tokens:
            return self.finish("length", text + self._flush(), tokens, found)
        return Output(self.request.index, text, tokens, logprobs=found)

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Logprobs, ...] = (),
        error: MlxcelError | None = None,
    ) -> Output:
        """Its last output; from here on it takes no tokens."""
        self.state = State.COMPLETED
        return Output(self.request.index, text, tokens, reason, error, self.cached, logprobs)

    def _flush(self) -> str:
        """The text that waited for more: half a character, or the beginning of a stop string."""
        rest = self.stops.feed(self.decoder.finish()) if self.decoder else ""
        return rest if self.stops.stopped else rest + self.stops.finish()
