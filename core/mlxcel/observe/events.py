"""What observers are told: plain facts, after they happened."""

from __future__ import annotations

import attrs


@attrs.frozen
class StageLoaded:
    """Stage ``stage`` holds its ``layers`` (first, one past the last) in ``bytes`` of tensors."""

    stage: int
    layers: tuple[int, int]
    bytes: int
    seconds: float


@attrs.frozen
class StageStopped:
    """Stage ``stage`` ended: it computed for ``busy_seconds`` of the ``span_seconds`` it ran."""

    stage: int
    busy_seconds: float
    span_seconds: float


@attrs.frozen
class GenerationFinished:
    """All ``prompts`` of one generation are answered, with ``tokens`` new tokens in total."""

    prompts: int
    tokens: int
    seconds: float


Event = StageLoaded | StageStopped | GenerationFinished
