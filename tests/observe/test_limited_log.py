"""Log lines that strangers provoke come at a bounded rate."""

from __future__ import annotations

import logging

import pytest

from mlxcel.observe.limited_log import LimitedLog


def test_one_line_per_reason_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    """The next line says how many were left out; another reason is not held back."""
    now = 0.0
    log = LimitedLog(logging.getLogger("test"), interval=10.0, clock=lambda: now)
    for n in range(5):
        log.warning("knock", f"knock {n}")
    log.warning("ring", "ring")
    now = 10.0
    log.warning("knock", "knock again")
    now = 20.0
    log.warning("knock", "and again")
    assert caplog.messages == ["knock 0", "ring", "knock again (4 more like this)", "and again"]
