"""Entry points: what plugins exist, by their metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Literal

import attrs

from mlxcel.errors import PluginError

GROUPS: Mapping[str, str] = {
    "mlxcel.families": "family",
    "mlxcel.transports": "transport",
    "mlxcel.triggers": "trigger",
    "mlxcel.executors": "executor",
    "mlxcel.weight_transfer": "weight_transfer",
    "mlxcel.plugins": "hooks",
}
"""Entry-point group to the kind of plugin that it names."""

State = Literal["loaded", "failed", "disabled", "duplicate", "incompatible"]
BAD_STATES: frozenset[State] = frozenset({"failed", "duplicate", "incompatible"})


@attrs.define(eq=False)
class Entry:
    """One entry point; ``state`` is None until somebody asks for the plugin."""

    kind: str
    point: metadata.EntryPoint
    distribution: str
    version: str
    state: State | None = None
    reason: str = ""
    plugin: object = None
    cause: BaseException | None = None

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name

    def error(self) -> PluginError:
        error = PluginError(self.kind, self.name, self.distribution, self.reason)
        error.__cause__ = self.cause
        return error


def installed() -> Iterable[metadata.EntryPoint]:
    """The entry points of all installed distributions in mlxcel's groups."""
    points = metadata.entry_points()  # of each distribution, only the first on the path
    return [point for group in GROUPS for point in points.select(group=group)]


def read_entries(points: Iterable[metadata.EntryPoint]) -> list[Entry]:
    """An entry per kind, name and distribution; the first wins, as an import would."""
    entries: dict[tuple[str, str, str], Entry] = {}
    for point in points:
        if kind := GROUPS.get(point.group):
            distribution = point.dist.name if point.dist else ""
            version = point.dist.version if point.dist else ""
            normalized = re.sub(r"[-_.]+", "-", distribution).lower()
            entry = Entry(kind, point, distribution, version)
            entries.setdefault((kind, point.name, normalized), entry)
    return list(entries.values())
