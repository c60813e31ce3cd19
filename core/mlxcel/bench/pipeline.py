"""``mlxcel bench pipeline``: what stages cost and bring, against mlx-lm on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mlxcel.bench.clustered import clustered
from mlxcel.bench.pairs import Comparison, compare
from mlxcel.bench.subjects import Copies, Subject, reference, staged
from mlxcel.bench.timing import decode_rate, prefill_rate
from mlxcel.checkpoint.config import read_config
from mlxcel.stage.blas import find_openblas

SHORT = 8
"""Prompt tokens in the cases that measure decoding."""

PREFILL_CHUNK = 24
"""Prompt tokens a step in the prefill cases: eight chunks of 192 tokens fill two stages."""

FAST_CHUNK = 64
"""The same with a fast BLAS, whose products need more rows to be fast."""


Opener = Callable[[ExitStack], Subject]
"""Opens a subject that lives as long as the stack."""


@attrs.frozen
class Settings:
    """How long the bench runs: pairs of each case, tokens decoded, tokens prefilled."""

    pairs: int = 5
    tokens: int = 16
    prompt: int = 192


@attrs.frozen
class Case:
    """One row: two subjects on the same ``prompts`` prompts of ``length`` tokens.

    ``prefill`` asks for the rate of the prompt instead of the rate after it.
    """

    name: str
    reference: Opener
    ours: Opener
    prompts: int
    length: int
    bound: str = ""
    prefill: bool = False


@attrs.frozen
class Row:
    """A finished case."""

    name: str
    bound: str
    comparison: Comparison


def cases(folder: Path, settings: Settings) -> list[Case]:
    """All cases of the bench; those with OpenBLAS only where it is found."""
    layers = read_config(folder).num_layers
    even = f"0-{layers // 2 - 1},{layers // 2}-{layers - 1}"
    wheel = wheel_cases(folder, settings.prompt, even)
    return wheel + (openblas_cases(folder, settings.prompt, even) if find_openblas() else [])


def wheel_cases(folder: Path, long: int, even: str) -> list[Case]:
    """The wheel's BLAS and the weights as stored, on both sides."""
    single, batch, copies = mlx_lm(folder), mlx_lm(folder, batch=True), mlx_lm(folder, copies=2)
    one, two = mlxcel(folder, size=1), mlxcel(folder, size=2)
    chunked = mlxcel(folder, size=2, chunk=PREFILL_CHUNK)
    chunked_even = mlxcel(folder, layers=even, chunk=PREFILL_CHUNK)
    threads = mlxcel(folder, size=2, workers="thread")
    alone, uneven = mlxcel(folder, size=2, rows=1), mlxcel(folder, layers=even)
    remote = peers(folder)
    return [
        Case("two copies of mlx-lm, against one (the machine's limit)", single, copies, 1, SHORT),
        Case("decode, 1 stage, 1 sequence, against mlx-lm", single, one, 1, SHORT, "≥ 0.97"),
        Case("decode, 2 stages, 1 sequence, against mlx-lm", single, two, 1, SHORT, "≥ 0.93"),
        Case("decode, 2 stages, 4 sequences, against batch", batch, two, 4, SHORT, "≥ 1.5"),
        Case("decode, 2 stages, 4 sequences, against two copies", copies, two, 4, SHORT, "≥ 0.9"),
        Case("the same, one sequence a slot, against two copies", copies, alone, 4, SHORT),
        Case("the same, even cut, against batch", batch, uneven, 4, SHORT),
        Case("the same, stages as threads, against batch", batch, threads, 4, SHORT),
        Case("prefill, 2 stages, even cut", single, chunked_even, 1, long, "≥ 1.6", True),
        Case("prefill, 2 stages, decode-balanced cut", single, chunked, 1, long, "≥ 1.4", True),
        Case(
            "decode, 2 peers, 4 sequences, against 2 local stages", two, remote, 4, SHORT, "≥ 0.95"
        ),
        Case("decode, 2 peers, 1 sequence, against mlx-lm", single, remote, 1, SHORT, "≥ 0.9"),
    ]


def openblas_cases(folder: Path, long: int, even: str) -> list[Case]:
    """OpenBLAS and dequantized weights, against mlx-lm as a user runs it (the wheel's BLAS)."""
    single, batch = mlx_lm(folder), mlx_lm(folder, batch=True)

    def fast(**options: Any) -> Opener:
        return mlxcel(folder, blas="auto", weights="dequantized", **options)

    one, two = fast(size=1), fast(size=2)
    eights, two_eights = fast(size=1, rows=8), fast(size=2, rows=8)
    whole, chunked = fast(size=1, chunk=FAST_CHUNK), fast(layers=even, chunk=FAST_CHUNK)
    return [
        Case("OpenBLAS: decode, 1 stage, 1 sequence, against mlx-lm", single, one, 1, SHORT),
        Case("OpenBLAS: decode, 1 stage, 8 sequences, batch", batch, one, 8, SHORT, "≥ 6"),
        Case("OpenBLAS: prefill, 1 stage, against mlx-lm", single, one, 1, long, "≥ 15", True),
        Case(
            "OpenBLAS: decode, 16 sequences in eights, 2 stages against 1",
            eights,
            two_eights,
            16,
            SHORT,
            "≥ 1.4",
        ),
        Case("OpenBLAS: decode, 8 sequences, 2 stages against 1", one, two, 8, SHORT),
        Case("OpenBLAS: prefill, 2 stages against 1", whole, chunked, 1, 2 * long, "≥ 1.4", True),
    ]


def mlx_lm(folder: Path, *, batch: bool = False, copies: int = 1) -> Opener:
    """Opens mlx-lm: its single stream, its BatchGenerator, or several copies side by side."""

    def open_it(stack: ExitStack) -> Subject:
        opened = [stack.enter_context(reference(folder, batch=batch)) for _ in range(copies)]
        return opened[0] if copies == 1 else Copies(tuple(opened))

    return open_it


def mlxcel(folder: Path, **options: Any) -> Opener:
    """Opens a pipeline; the options are those of :func:`mlxcel.bench.subjects.staged`."""
    return lambda stack: stack.enter_context(staged(folder, **options))


def peers(folder: Path, **options: Any) -> Opener:
    """Opens a cluster; the options are those of :func:`mlxcel.bench.clustered.clustered`."""
    return lambda stack: stack.enter_context(clustered(folder, **options))


def run(chosen: Sequence[Case], settings: Settings) -> Iterator[Row]:
    """Run the cases one after the other; within a case the two subjects take turns."""
    for case in chosen:
        with ExitStack() as stack:
            theirs, ours = case.reference(stack), case.ours(stack)
            comparison = compare(
                partial(_rate, case, theirs, settings),
                partial(_rate, case, ours, settings),
                settings.pairs,
            )
        yield Row(case.name, case.bound, comparison)


def _rate(case: Case, subject: Subject, settings: Settings) -> float:
    """Tokens per second of one run."""
    prompts = _prompts(case.prompts, case.length)
    if case.prefill:
        return prefill_rate(subject.run(prompts, 1), case.prompts * case.length)
    return decode_rate(subject.run(prompts, settings.tokens))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table; speeds are medians in tokens per second."""
    lines = [
        "| case | reference tok/s | ours tok/s | ratio | pairs' range | bound |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        c = row.comparison
        lines.append(
            f"| {row.name} | {c.reference.median:.1f} | {c.ours.median:.1f} "
            f"| {c.ratio.median:.2f} | {c.ratio.low:.2f}-{c.ratio.high:.2f} | {row.bound} |"
        )
    return "\n".join(lines)


def _prompts(count: int, length: int) -> list[list[int]]:
    """Token ids that every vocabulary has, different in each prompt."""
    return [[(7 * row + 13 * i) % 250 + 1 for i in range(length)] for row in range(count)]
