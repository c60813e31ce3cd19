"""Plans from config.json alone, at real sizes, against headers of the same sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.family.choose import choose_family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.from_config import checkpoint_from_config
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.testing.family_table import compare, table
from mlxcel.testing.headers_only import skeleton, write_headers
from mlxcel.testing.published import PUBLISHED, Published

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"

every_model = pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.name)


@every_model
def test_parameters(published: Published, tmp_path: Path, plugins: Plugins) -> None:
    """At real sizes, too, every parameter is foretold, with what is packed."""
    path = write_headers(tmp_path, published.config)
    _, family = choose_family(read_config(path), plugins)
    if family.fallback:
        pytest.skip("estimated, not foretold")
    shapes = {shape.name: shape for shape in family.shapes(family.open(path).config)}
    model, _ = skeleton(published.config)
    modules = dict(model.named_modules())
    assert {n: s.shape for n, s in shapes.items()} == {
        name: tuple(value.shape) for name, value in flat_parameters(model).items()
    }
    for name, shape in shapes.items():
        assert shape.packs <= hasattr(modules[name.rpartition(".")[0]], "to_quantized"), name


@every_model
def test_bytes_from_config(published: Published, tmp_path: Path, plugins: Plugins) -> None:
    """Every layer and both ends weigh what the headers say, up to how biases are stored."""
    found = compare(published, tmp_path, plugins)
    assert found.difference < (0.001 if found.family.fallback else 0.0001)
    real, estimate = found.headers, found.estimate
    assert estimate.groups == real.groups
    assert estimate.embedding_bytes == real.embedding_bytes
    assert estimate.shared_bytes == real.shared_bytes
    assert estimate.head_bytes == pytest.approx(real.head_bytes, rel=0.001)
    for own, theirs in zip(estimate.layers, real.layers, strict=True):
        assert own.bytes == pytest.approx(theirs.bytes, rel=0.001)
        assert own.work == pytest.approx(theirs.work, rel=0.001)


@every_model
def test_bytes_of_plain_weights(published: Published, tmp_path: Path, plugins: Plugins) -> None:
    """So they are for weights that are not packed."""
    path = write_headers(tmp_path / "headers", published.config)
    _, family = choose_family(read_config(path), plugins)
    as_stored = DtypeChoice(None, "")
    real = profile_checkpoint(family.open(path), family, as_stored)
    alone = tmp_path / "config.json"
    alone.write_bytes((path / "config.json").read_bytes())
    estimate = profile_checkpoint(checkpoint_from_config(alone, family), family, as_stored)
    assert estimate.total_bytes == pytest.approx(real.total_bytes, rel=0.001)


def test_the_table_in_the_documentation(plugins: Plugins) -> None:
    """docs/families.md has the table that is printed, and it has every first-party wire name."""
    text = table(plugins)
    assert text in DOCUMENT.read_text(encoding="utf-8")
    names = [r.name for r in plugins.records("family") if r.distribution.startswith("mlxcel-")]
    assert [n for n in names if f"`{n}`" not in text and f"`{n}:" not in text] == []
