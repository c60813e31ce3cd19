"""A plan as a table with a bar per stage."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mlxcel.cli.size import format_size
from mlxcel.partition.assignment import StageAssignment
from mlxcel.partition.ranges import format_ranges

BAR = 18
"""Characters of the longest bar."""


def print_table(stages: Sequence[StageAssignment], budgets: Sequence[int] | None) -> None:
    """Print one row per stage; the bars show weights, caches and what the budget leaves.

    All bars have one scale: the longest is the largest budget, or the heaviest stage.
    """
    console = Console(highlight=False)
    weights, caches, free = "#=." if console.options.ascii_only else "█▒·"
    with_caches = any(stage.kv_bytes for stage in stages)
    limits = [stage.total_bytes for stage in stages] if budgets is None else budgets
    scale = max(limits) or 1

    def columns(count: int) -> int:
        return round(BAR * count / scale)

    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="fold")
    table.add_column("weights", justify="right", no_wrap=True)
    if with_caches:
        table.add_column("KV caches", justify="right", no_wrap=True)
    if budgets is not None:
        table.add_column("of memory", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage, limit in zip(stages, limits, strict=True):
        cells = [
            str(stage.stage_index),
            _holds(stage),
            format_size(stage.estimated_memory_bytes),
        ]
        if with_caches:
            cells.append(format_size(stage.kv_bytes))
        if budgets is not None:
            cells.append(f"{format_size(limit)} {100 * stage.total_bytes / limit:3.0f}%")
        end = columns(stage.estimated_memory_bytes)
        used = columns(stage.total_bytes)
        bar = weights * end + caches * (used - end) + free * (columns(limit) - used)
        table.add_row(*cells, bar)
    console.print(table)


def _holds(stage: StageAssignment) -> str:
    parts = [format_ranges([stage.layer_range])]
    if stage.has_embedding:
        parts.insert(0, "embed")
    if stage.has_lm_head:
        parts.append("head")
    return " + ".join(parts)
