"""Cases that are run when there is little time, and those that wait."""

from __future__ import annotations

import pytest

from mlxcel.testing.quick import quick


def test_all_cases_stay_and_few_are_quick() -> None:
    """In their order; the others are marked."""
    single = quick(["a", "b"], ["b"])
    assert single == [pytest.param("a", marks=pytest.mark.slow), "b"]
    pairs = quick([("a", 1), ("b", 2)], [("a", 1)])
    assert pairs == [("a", 1), pytest.param("b", 2, marks=pytest.mark.slow)]
