"""The flags that say in which stages and which types a model is held."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mlxcel.errors import UsageError

LONGEST_WAIT = 1e6
"""Seconds that any flag may ask to wait."""


def add_stage_flags(group: argparse._ActionsContainer) -> None:
    """How many stages there are, and which layers each has."""
    group.add_argument("--pp-size", type=int, metavar="N", help="pipeline stages (1)")
    group.add_argument(
        "--pp-layers", metavar="RANGES", help='layers of each stage, such as "0-14,15-29"'
    )
    group.add_argument(
        "--pp-balance",
        default="bytes",
        choices=["bytes", "time", "time:prefill"],
        help="what automatic stages have equal shares of (bytes)",
    )
    group.add_argument(
        "--allow-mirrored-kv",
        action="store_true",
        help="let stages keep copies of earlier ones' caches where layers share them, so that "
        "more cuts are legal",
    )


def add_type_flags(group: argparse._ActionsContainer) -> None:
    """What the weights are in memory."""
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "checkpoint", "float32", "bfloat16", "float16"],
        help="dtype of floating parameters and activations (auto)",
    )
    group.add_argument(
        "--weights",
        default="auto",
        choices=["auto", "quantized", "dequantized"],
        help="what quantized weights are in memory (auto: whichever is faster and fits)",
    )


Bound = tuple[str, object, bool, str]
"""Of a flag its name, its value, whether that fits, and what would."""


def check_bounds(bounds: Iterable[Bound]) -> None:
    """Refuse values that mean nothing.

    Raises:
        UsageError: The first that does not fit.
    """
    for flag, value, fits, wanted in bounds:
        if not fits:
            raise UsageError(f"{flag} {value} is out of range.", f"Give {wanted}.")
