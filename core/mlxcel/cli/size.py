"""Sizes of memory as people write them: ``16GB`` is 16·10⁹ bytes, ``16GiB`` is 16·2³⁰."""

from __future__ import annotations

import re
from fractions import Fraction

from mlxcel.errors import UsageError

_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGTP]?)(I?)B)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(text: str, flag: str) -> int:
    """The bytes that ``text``, a value of ``flag``, stands for.

    Raises:
        UsageError: It is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise UsageError(
            f"{flag} {text!r} is no size.", "Write bytes, or a unit such as 16GB, 1.5TB or 8GiB."
        )
    number, unit, binary = match[1], (match[2] or "").upper(), match[3]
    return int(Fraction(number) * (1024 if binary else 1000) ** _POWERS[unit])


def format_size(count: int) -> str:
    """``count`` bytes in the unit that fits: ``16.00 GB``."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
