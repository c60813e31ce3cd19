"""A pipeline whose stages cost nothing: for measuring what stands around them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from mlxcel.pipeline.operations import Extend, Filter, Merge, New, Release
from mlxcel.pipeline.step import Step, StepFailed, Tokens


class NullPipeline:
    """Answers every step with made-up tokens, one answer that has some a round of the engine.

    There is no thread and no model.

    Args:
        stages: How many stages the engine shall believe in.
        credits: See :class:`mlxcel.pipeline.pipeline.Pipeline`.
        tokens: The token ids to answer with, over and over.
        before_answer: Called with the number of tokens of each answer that has some; may wait.

    Attributes:
        steps: How many answers had tokens.
    """

    def __init__(
        self,
        stages: int,
        credits: int,
        tokens: Sequence[int],
        before_answer: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.count = stages
        self.credits = credits
        self.timeout = 60.0
        self.steps = 0
        self._given = False
        self._before_answer = before_answer
        self._listener: Callable[[], None] = lambda: None
        self._rows: dict[int, int] = {}
        self._answers: deque[Tokens] = deque()
        self._token = itertools.cycle(tokens)

    def submit(self, step: Step) -> None:
        for operation in step.operations:
            match operation:
                case New(handle):
                    self._rows[handle] = 1
                case Merge(handle, sources):
                    self._rows[handle] = sum(self._rows.pop(source) for source in sources)
                case Extend(handle, source):
                    self._rows[handle] += self._rows.pop(source)
                case Filter(handle, kept):
                    self._rows[handle] = len(kept)
                case Release(handle):
                    self._rows.pop(handle, None)
        rows = self._rows.get(step.slot, 0) if step.sample else 0
        self.steps += bool(rows)
        self._answers.append(
            Tokens(step.seq, step.slot, tuple(itertools.islice(self._token, rows)))
        )
        self._listener()

    def poll(self) -> Tokens | StepFailed | None:
        if not self._answers:
            return None
        if self._given:
            # Whoever lets answers through may want to see first what came of the last one.
            self._given = False
            self._listener()
            return None
        if made := len(self._answers[0].tokens):
            self._before_answer(made)
            self._given = True
        return self._answers.popleft()

    def listen(self, listener: Callable[[], None]) -> None:
        """An answer is there as soon as its step is submitted."""
        self._listener = listener
