"""Numbers and names of layers in a sentence."""

from __future__ import annotations

import pytest

from mlxcel.errors import MemoryBudgetError
from mlxcel.errors.words import counted, named_layers, verb


@pytest.mark.parametrize(("number", "text"), [(0, "0 layers"), (1, "1 layer"), (2, "2 layers")])
def test_counted(number: int, text: str) -> None:
    """One thing has the singular."""
    assert counted(number, "layer") == text


def test_irregular_plural() -> None:
    """A plural that is not made with an s is given."""
    assert counted(1, "matrix", "matrices") == "1 matrix"
    assert counted(3, "matrix", "matrices") == "3 matrices"


@pytest.mark.parametrize(
    ("layers", "text"),
    [("3", "layer 3 is"), ("0-2", "layers 0-2 are"), ("1,4", "layers 1,4 are")],
)
def test_named_layers(layers: str, text: str) -> None:
    """Noun and verb go with how many layers there are."""
    assert f"{named_layers(layers)} {verb(layers, 'is', 'are')}" == text


@pytest.mark.parametrize(("layers", "text"), [("1", "layer 1 needs"), ("1-2", "layers 1-2 need")])
def test_a_stage_that_lacks_memory(layers: str, text: str) -> None:
    """A stage of one layer is told in the singular."""
    error = MemoryBudgetError(0, "cpu", layers, 9, 0, 5, best=False, room="")
    assert f"{text} 9 bytes" in str(error)
