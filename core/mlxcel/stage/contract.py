"""What a stage is asked to be, and what may run one; no MLX here.

A :class:`StageSpec` is all that a worker needs to build its stage, wherever it runs. The
hook ``mlxcel_build_executor`` turns it into a :class:`StageExecutor`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs

from mlxcel.pipeline.step import Step, Tokens
from mlxcel.tensor.options import ALONE, TensorParallel


@attrs.frozen
class StageSpec:
    """One stage of one model, or one rank of it.

    ``start`` and ``stop`` are its layers, half-open; ``cast`` the dtype that floating
    parameters are cast to, None for as stored; ``dequantize`` whether quantized modules
    become plain ones with float32 weights.

    ``tensor`` says how many ranks share the stage. With ``rank`` None all of them are this
    worker, in one graph; else it is that one, and the others are workers of their own.
    """

    checkpoint: Path
    family: str
    index: int
    count: int
    start: int
    stop: int
    cast: str | None = None
    dequantize: bool = False
    tensor: TensorParallel = ALONE
    rank: int | None = None

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for its stage: it takes the steps and draws the tokens."""
        return not self.rank

    @property
    def ranks(self) -> range:
        """The ranks that this worker is."""
        return range(self.tensor.size) if self.rank is None else range(self.rank, self.rank + 1)

    @property
    def title(self) -> str:
        """What errors call it."""
        stage = f"stage {self.index}"
        return stage if self.rank is None else f"rank {self.rank} of {stage}"


Progress = Callable[[int, int], None]
"""Called while loading with the bytes done and the bytes in all."""


class StageExecutor(Protocol):
    """Runs the steps of one stage. All calls come from the one thread that made it.

    It may also have a method ``memory() -> int``: the bytes that it holds now, asked after each
    step, so it has to be quick.
    """

    def load(self, progress: Progress) -> int:
        """Make the stage ready; returns the bytes of its parameters."""
        ...

    def run(self, step: Step) -> Step | Tokens:
        """Apply the step's operations and run its slot.

        Returns:
            The step for the next stage, or the last stage's tokens.

        Raises:
            SamplingFailed: All ranks have run the step, but no tokens could be drawn. It is the
                only failure that ranks which are workers of their own survive.
        """
        ...

    def requests(self, step: Step) -> tuple[int, ...]:
        """The requests that are lost when ``step`` fails."""
        ...

    def close(self) -> None:
        """Give everything back; called once, also after a failure."""
        ...
