"""``mlxcel bench tensor``: what ranks that share every layer bring, against one process.

Both sides load the same checkpoint and multiply with the same BLAS, one thread in each process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import attrs

from mlxcel.bench.pipeline import SHORT, Case, Opener, mlxcel
from mlxcel.bench.subjects import Prompts, Subject
from mlxcel.bench.timing import Timing

BOUND = "≥ 1.5"


@attrs.frozen
class Settings:
    """What is measured.

    Attributes:
        ranks: Processes that share the layers.
        collectives: How they reach each other, as ``--tp-collectives`` says.
        blas: As ``--blas``.
        prompt: Tokens of the prompt whose prefill is timed.
    """

    ranks: int = 2
    collectives: str = "transport"
    blas: str = "auto"
    prompt: int = 512


@attrs.frozen
class SideBySide:
    """Independent pipelines that run the same prompts at the same time."""

    subjects: tuple[Subject, ...]

    def run(self, prompts: Prompts, tokens: int) -> list[Timing]:
        with ThreadPoolExecutor(len(self.subjects)) as pool:
            runs = pool.map(lambda subject: subject.run(prompts, tokens), self.subjects)
            return [timing for timings in runs for timing in timings]


def cases(folder: Path, settings: Settings) -> list[Case]:
    """All cases of the bench, for the model in ``folder``."""
    ranks, long = settings.ranks, settings.prompt
    one = mlxcel(folder, size=1, blas=settings.blas)
    shared = mlxcel(
        folder, size=1, blas=settings.blas, ranks=ranks, collectives=settings.collectives
    )
    copies = _copies(one, ranks)
    limit = f"{ranks} processes side by side, against one (the machine's limit)"
    return [
        Case(f"decode, {limit}", one, copies, 1, SHORT),
        Case(f"decode, 1 sequence, {ranks} ranks against 1 process", one, shared, 1, SHORT, BOUND),
        Case(
            f"prefill, {long} tokens, {ranks} ranks against 1 process",
            one,
            shared,
            1,
            long,
            BOUND,
            True,
        ),
    ]


def _copies(one: Opener, count: int) -> Opener:
    def open_it(stack: ExitStack) -> Subject:
        return SideBySide(tuple(one(stack) for _ in range(count)))

    return open_it
