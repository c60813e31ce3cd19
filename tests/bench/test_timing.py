"""Rates from the times at which tokens came."""

from __future__ import annotations

from mlxcel.bench.timing import Timing, decode_rate, prefill_rate


def test_decoding_is_measured_while_all_decode() -> None:
    """From the last first token to the first last one; tokens outside do not count."""
    early = Timing(0.0, [1.0, 2.0, 3.0, 4.0])
    late = Timing(0.0, [2.0, 3.0, 4.0, 5.0, 6.0])
    assert decode_rate([early, late]) == 4 / 2.0


def test_prefill_ends_with_the_last_first_token() -> None:
    """Prompt tokens over the time from the first start to the last first token."""
    timings = [Timing(1.0, [3.0, 4.0]), Timing(2.0, [6.0])]
    assert prefill_rate(timings, 100) == 100 / 5.0
