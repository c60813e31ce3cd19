"""Which of a test's cases are run when there is little time."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], few: Container[Any]) -> list[Any]:
    """``values`` for ``pytest.mark.parametrize``: those not of ``few`` are marked ``slow``.

    For cases that are unlike each other in little, such as families with the same caches.
    """
    return [value if value in few else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
