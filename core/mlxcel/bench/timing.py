"""The two figures every subject of a bench is asked for, from when its tokens came."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Timing:
    """One request: when it was handed in, and when each of its tokens came (seconds)."""

    started: float
    times: Sequence[float]


def decode_rate(timings: Sequence[Timing]) -> float:
    """Tokens per second while all requests decode side by side.

    From the last request's first token to the first request's last one: neither prompts nor
    a thinning batch are in it.
    """
    start = max(timing.times[0] for timing in timings)
    stop = min(timing.times[-1] for timing in timings)
    tokens = sum(start < time <= stop for timing in timings for time in timing.times)
    return tokens / (stop - start)


def prefill_rate(timings: Sequence[Timing], prompt_tokens: int) -> float:
    """Prompt tokens per second until the last request had its first token."""
    start = min(timing.started for timing in timings)
    return prompt_tokens / (max(timing.times[0] for timing in timings) - start)
