"""The table of docs/families.md: ``python -m mlxcel.testing.family_table`` prints it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs

from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.family import Family
from mlxcel.family.choose import choose_family
from mlxcel.partition.from_config import checkpoint_from_config
from mlxcel.partition.profile import ModelProfile, profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.testing.headers_only import write_headers
from mlxcel.testing.published import PUBLISHED, Published

_AS_STORED = DtypeChoice(None, "")
_HEAD = (
    "| distribution | wire names | state | with the sizes of | packed | from headers "
    "| from config.json | difference |\n|---|---|---|---|---|---:|---:|---:|"
)


@attrs.frozen
class Comparison:
    """One config, profiled from headers of its real size and from config.json alone."""

    published: Published
    name: str
    family: Family
    distribution: str
    headers: ModelProfile
    estimate: ModelProfile

    @property
    def difference(self) -> float:
        """By how much the estimated bytes are off, as a share of the real ones."""
        return abs(self.estimate.total_bytes / self.headers.total_bytes - 1)

    def row(self) -> str:
        """Its line of the table."""
        own = [self.name] if self.family.fallback else self.family.wire_names
        cells = (
            self.distribution,
            ", ".join(f"`{name}`" for name in own),
            "runs" if self.family.runnable else "can be planned",
            self.published.name,
            self.published.quantize.replace(":affine", "")
            .replace(":", "-bit, g", 1)
            .replace(":", " "),
            f"{self.headers.total_bytes / 1e9:.2f} GB",
            f"{self.estimate.total_bytes / 1e9:.2f} GB",
            f"{100 * self.difference:.2f} %",
        )
        return f"| {' | '.join(cells)} |"


def compare(published: Published, folder: Path, plugins: Plugins) -> Comparison:
    """Profile ``published`` both ways; ``folder`` is for its files."""
    path = write_headers(folder / "headers", published.config, quantize=published.quantize)
    alone = folder / "config.json"
    alone.write_bytes((path / "config.json").read_bytes())
    name, family = choose_family(read_config(path), plugins)
    return Comparison(
        published,
        name,
        family,
        plugins.distribution("family", name.partition(":")[0]),
        profile_checkpoint(family.open(path), family, _AS_STORED),
        profile_checkpoint(checkpoint_from_config(alone, family), family, _AS_STORED),
    )


def table(plugins: Plugins) -> str:
    """All of :data:`mlxcel.testing.published.PUBLISHED`, one line each."""
    lines = [_HEAD]
    for published in PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(compare(published, Path(folder), plugins).row())
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Plugins.discover()))
