"""What the ranks of a stage get of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlxcel.family import Family
from mlxcel.family.transformer import TransformerStage, flat_parameters
from mlxcel.stage.load import load_stage
from mlxcel.tensor.options import TensorParallel

Load = Callable[..., TransformerStage]


@pytest.fixture
def load(tiny: Callable[..., Path], family_of: Callable[[Path], Family]) -> Load:
    """Loads the first layers of a tiny checkpoint as some ranks of two."""

    def load(
        name: str, ranks: range, cast: str | None = None, **options: object
    ) -> TransformerStage:
        path = tiny(name)
        family = family_of(path)
        checkpoint = family.open(path)
        tensor = TensorParallel(2)
        return load_stage(checkpoint, family, 0, 2, cast, tensor=tensor, ranks=ranks, **options)  # type: ignore[arg-type]

    return load


def named(stage: TransformerStage, suffix: str) -> list[mx.array]:
    return [v for name, v in flat_parameters(stage.model).items() if name.endswith(suffix)]


def test_a_bias_that_is_added_once(load: Load) -> None:
    """Only the first rank has it; the others do not have zeros, but nothing."""
    assert len(named(load("gpt_oss_plain", range(1)), "o_proj.bias")) == 2
    assert named(load("gpt_oss_plain", range(1, 2)), "o_proj.bias") == []
    both = load("gpt_oss_plain", range(2))
    assert len(named(both, "o_proj.bias")) == 2
    assert len(named(both, "q_proj.bias")) == 4


def test_what_is_not_split_is_there_once(load: Load) -> None:
    """Ranks that are one worker share it, and it counts once."""
    both, first = load("llama", range(2)), load("llama", range(1))
    norms = [id(v) for v in named(both, "layernorm.weight")]
    assert len(set(norms)) == len(norms) == 4
    second = load("llama", range(1, 2))
    shared = sum(
        v.nbytes for v in (*named(both, "norm.weight"), *named(both, "embed_tokens.weight"))
    )
    assert both.nbytes() == first.nbytes() + second.nbytes() - shared


@pytest.mark.parametrize("ranks", [range(2), range(1), range(1, 2)], ids=str)
@pytest.mark.parametrize("cast", [None, "bfloat16"])
def test_progress_counts_the_own_bytes(load: Load, ranks: range, cast: str | None) -> None:
    """Progress ends at the bytes that these ranks hold."""
    seen: list[tuple[int, int]] = []
    stage = load(
        "gpt_oss_plain", ranks, cast, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (stage.nbytes(), stage.nbytes())
    assert {total for _, total in seen} == {stage.nbytes()}
