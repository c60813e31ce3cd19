"""Sizes of memory in words."""

from __future__ import annotations

import pytest

from mlxcel.cli.size import format_size, parse_size
from mlxcel.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2MB", 2 * 10**6),
        ("2MiB", 2 << 20),
        ("16GB", 16 * 10**9),
        ("16GiB", 16 << 30),
        ("16 gb", 16 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("0.1GB", 100_000_000),
        ("1TiB", 1 << 40),
        (" 8GB ", 8 * 10**9),
    ],
)
def test_parse(text: str, expected: int) -> None:
    """Units without i are powers of 1000, those with i of 1024; fractions are exact."""
    assert parse_size(text, "--memory") == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "1e9", "nan", "inf", "16XB", "1,5GB", "8GBs", "1.GB", "9" * 30, "16Gi B"],
)
def test_what_is_no_size(text: str) -> None:
    """The error quotes flag and text."""
    with pytest.raises(UsageError, match=r"--memory .* is no size") as caught:
        parse_size(text, "--memory")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (16 * 10**9, "16.00 GB"),
        (10**16, "10000.00 TB"),
    ],
)
def test_format(count: int, text: str) -> None:
    """Powers of 1000, the largest unit that leaves a number from 1 on."""
    assert format_size(count) == text
