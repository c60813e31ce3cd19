"""Reading fields of config.json under a check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.errors import CheckpointError
from mlxcel.family import fields


def config_of(layers: int = 4, **settings: Any) -> ModelConfig:
    return ModelConfig(
        path=Path("somewhere/config.json"),
        raw=settings,
        text=settings,
        model_type="any",
        num_layers=layers,
    )


def assert_names(field: str, read: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read()
    assert caught.value.path == Path("somewhere/config.json")
    assert "config.json that belongs to the weights" in str(caught.value)


def test_count() -> None:
    """A count is a whole number; null counts as absent."""
    assert fields.count(config_of(size=3), "size") == 3
    assert fields.count(config_of(size=None), "size", default=7) == 7
    assert fields.count(config_of(size=0), "size", minimum=0) == 0


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "8", [8]])
def test_no_count(value: object) -> None:
    """Anything else is refused with the field's name."""
    assert_names("'?size'?", lambda: fields.count(config_of(size=value), "size"))


def test_flag() -> None:
    """A switch is true or false."""
    assert fields.flag(config_of(on=False), "on", default=True) is False
    assert fields.flag(config_of(), "on", default=True) is True
    assert_names("'on'", lambda: fields.flag(config_of(), "on"))
    assert_names("on is 1", lambda: fields.flag(config_of(on=1), "on"))


@pytest.mark.parametrize("value", [["a", "b", "a", "b"], "abab"])
def test_one_entry_per_layer(value: object) -> None:
    """A list and a string of letters are read alike."""
    assert fields.per_layer(config_of(kinds=value), "kinds", "ab") == ("a", "b", "a", "b")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "has no 'kinds'"),
        ("aba", "kinds has 3 entries, num_hidden_layers is 4"),
        ("ababa", "kinds has 5 entries, num_hidden_layers is 4"),
        ("abxa", "kinds has the unknown entry 'x'"),
        (4, "kinds is 4"),
    ],
)
def test_not_one_known_entry_per_layer(value: object, problem: str) -> None:
    """Too few, too many and unknown ones are refused, with what is known."""
    assert_names(problem, lambda: fields.per_layer(config_of(kinds=value), "kinds", "ab"))


def test_entries_that_follow_from_the_index() -> None:
    """Only an absent list is made up."""
    config = config_of(layer_types=None)
    types = fields.attention_types(config, lambda i: fields.FULL if i % 2 else fields.SLIDING)
    assert types == (fields.SLIDING, fields.FULL) * 2
    short = config_of(layer_types=[fields.FULL])
    assert_names("layer_types", lambda: fields.attention_types(short, lambda i: fields.FULL))


def sparse(rule: Callable[[ModelConfig, int], bool], **settings: Any) -> list[int]:
    return [index for index in range(6) if rule(config_of(6, **settings), index)]


def test_experts_by_step() -> None:
    """Every n-th layer counted from 1, without those that are named."""
    assert sparse(fields.experts_by_step, num_experts=8) == [0, 1, 2, 3, 4, 5]
    assert sparse(fields.experts_by_step, num_experts=8, decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(fields.experts_by_step, num_experts=8, mlp_only_layers=[1, 4]) == [0, 2, 3, 5]
    assert sparse(fields.experts_by_step, num_experts=0) == []
    wrong = config_of(num_experts=8, mlp_only_layers=3)
    assert_names("mlp_only_layers", lambda: fields.experts_by_step(wrong, 0))


def test_experts_after_dense() -> None:
    """The first ones have none, and then every n-th one counted from 0."""
    assert sparse(fields.experts_after_dense) == [0, 1, 2, 3, 4, 5]
    assert sparse(fields.experts_after_dense, first_k_dense_replace=3) == [3, 4, 5]
    assert sparse(fields.experts_after_dense, first_k_dense_replace=1, moe_layer_freq=2) == [2, 4]
    wrong = config_of(moe_layer_freq=0)
    assert_names("moe_layer_freq", lambda: fields.experts_after_dense(wrong, 0))
