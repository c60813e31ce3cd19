"""What each rank holds of each parameter, and where the ranks talk: as a table and as JSON."""

from __future__ import annotations

import re
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from mlxcel.partition.ranges import format_layers
from mlxcel.partition.rank_plan import RankPlan
from mlxcel.tensor.plan import Communication
from mlxcel.tensor.shard import Shard, ShardStrategy

WIDTH = 120
"""Of the table where no terminal says how wide it is."""

_LAYER = re.compile(r"^(.*\blayers\.(\d+)\.)(.+)$")


@attrs.frozen
class TensorRow:
    """One parameter of all layers that ranks share in the same way.

    Attributes:
        name: The parameter; within a layer, by its name there.
        layers: Those that have it; empty for what is no layer's.
        shard: What a rank has of it.
        shape, rank_shape: Its sizes, and those of the first rank's share.
        communications: How the ranks put together what it has a part in; their paths are like
            ``name``.
    """

    name: str
    layers: tuple[int, ...]
    shard: Shard
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    communications: tuple[Communication, ...]


def tensor_rows(plan: RankPlan) -> tuple[TensorRow, ...]:
    """All parameters in the order of a forward pass, equal ones of several layers together."""
    found: dict[TensorRow, list[int]] = {}
    for path, parameter in plan.shards.parameters.items():
        match = _LAYER.match(path)
        prefix = match[1] if match else ""
        row = TensorRow(
            path.removeprefix(prefix),
            (),
            parameter.shard,
            parameter.shape,
            parameter.shard.held(parameter.shape, range(1), plan.size),
            tuple(
                attrs.evolve(talk, path=talk.path.removeprefix(prefix))
                for talk in plan.shards.after(path)
            ),
        )
        layers = found.setdefault(row, [])
        if match:
            layers.append(int(match[2]))
    return tuple(attrs.evolve(row, layers=tuple(layers)) for row, layers in found.items())


def print_tensors(plan: RankPlan) -> None:
    """Print one row per parameter."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", overflow="fold")
    table.add_column("parameter", overflow="fold", min_width=20)
    table.add_column("split", min_width=12)
    table.add_column("of a rank", no_wrap=True)
    table.add_column("then", min_width=11)
    for row in tensor_rows(plan):
        table.add_row(
            format_layers(row.layers),
            row.name if row.layers else ".".join(row.name.split(".")[-2:]),
            _split(row, plan.size),
            "x".join(map(str, row.rank_shape)),
            ", ".join(_talk(talk, row.name) for talk in row.communications),
        )
    console.print(table)


def tensors_as_json(plan: RankPlan) -> list[dict[str, Any]]:
    """The same rows as objects."""
    return [
        {
            "parameter": row.name,
            "layers": list(row.layers),
            "strategy": row.shard.strategy.value,
            "units": row.shard.units,
            "shape": list(row.shape),
            "rank_shape": list(row.rank_shape),
            "communications": [
                {"pattern": talk.pattern.value, "after": talk.path} for talk in row.communications
            ],
        }
        for row in tensor_rows(plan)
    ]


def _split(row: TensorRow, ranks: int) -> str:
    shard = row.shard
    if shard.strategy is ShardStrategy.EXPERT:
        return f"by {row.shape[0]} experts"
    if shard.once:
        return "rank 0 only"
    if shard.units is None:
        return str(shard.strategy.value)
    text = f"{shard.strategy.value} by {shard.units} {shard.what}"
    if ranks > shard.units:  # they repeat
        text += f", each on {ranks // shard.units} ranks"
    return text


def _talk(talk: Communication, name: str) -> str:
    what: str = talk.pattern.value.replace("_", "-")
    return what if name.startswith(f"{talk.path}.weight") else f"{what} of {talk.path}"
