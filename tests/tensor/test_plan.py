"""The plan of a whole model, from its parameters."""

from __future__ import annotations

import attrs
import pytest

from mlxcel.family.attention import Attention
from mlxcel.family.recurrence import Mamba1
from mlxcel.family.shapes import (
    block,
    embedding,
    gated_experts,
    gated_mlp,
    linear,
    norm,
    vector,
)
from mlxcel.tensor.options import MoeMode, TensorParallel
from mlxcel.tensor.plan import CommPattern, Communication, Obstacle, ShardPlan, plan_of
from mlxcel.tensor.shard import REPLICATED, VOCAB, row

OPTIONS = TensorParallel(2, "within_expert", "vocab_parallel", "vocab_parallel")
ATTENTION = Attention(16, heads=6, kv_heads=2, head_dim=4)


@pytest.fixture
def plan() -> ShardPlan:
    """A layer of attention and an MLP, and one whose experts have to be added at once."""
    moe = (
        *gated_experts("model.layers.1.mlp.switch_mlp", 2, 16, 12, at_once=True),
        *gated_mlp("model.layers.1.mlp.shared_experts", 16, 12, at_once=True),
    )
    dense = gated_mlp("model.layers.0.mlp", 16, 12)
    return plan_of(
        [
            *embedding("model.embed_tokens", 15, 16),
            *block("model.layers.0", 16, ATTENTION.shapes("model.layers.0.self_attn"), dense),
            *block("model.layers.1", 16, moe),
            *norm("model.norm", 16),
            *linear("lm_head", 15, 16, shard=VOCAB),
        ],
        OPTIONS,
    )


def test_where_ranks_talk(plan: ShardPlan) -> None:
    """Once behind each block, or at once where something else follows within it."""
    assert plan.communications == (
        Communication("model.embed_tokens", CommPattern.ALL_REDUCE),
        Communication("model.layers.0.self_attn", CommPattern.ALL_REDUCE),
        Communication("model.layers.0.mlp", CommPattern.ALL_REDUCE),
        Communication("model.layers.1.mlp.switch_mlp", CommPattern.ALL_REDUCE),
        Communication("model.layers.1.mlp.shared_experts", CommPattern.ALL_REDUCE),
        Communication("lm_head", CommPattern.ALL_GATHER),
    )


def test_a_sum_amid_a_block() -> None:
    """It is added up behind the projection itself, and the block's result once more."""
    mixer = Mamba1(16, inner=32, state=4, kernel=4, rank=2)
    plan = plan_of(mixer.shapes("model.layers.0.mamba"), TensorParallel(2))
    within, behind = (
        Communication(f"model.layers.0.mamba{part}", CommPattern.ALL_REDUCE)
        for part in (".x_proj", "")
    )
    assert plan.communications == (within, behind)
    assert plan.after("model.layers.0.mamba.x_proj.weight") == (within,)
    assert plan.after("model.layers.0.mamba.out_proj.weight") == (behind,)


def test_which_sizes_are_legal(plan: ShardPlan) -> None:
    """Those that divide heads and widths; keys may be shared, and a vocabulary need not divide."""
    assert plan.legal_sizes(12) == (1, 2, 6)
    assert list(plan.obstacles(4)) == [
        Obstacle("model.layers.0.self_attn.q_proj", "6 query heads"),
        Obstacle("model.layers.0.self_attn.o_proj", "6 query heads"),
    ]
    assert Obstacle("model.layers.0.self_attn.k_proj", "2 KV heads") in list(plan.obstacles(3))
    assert next(plan.obstacles(5)).parts == "6 query heads"
    assert Obstacle("model.layers.0.mlp.down_proj", "intermediate size 12") in [*plan.obstacles(5)]
    assert not plan.divides(4) and plan.divides(6)


def test_no_group_is_divided(plan: ShardPlan) -> None:
    """What is packed in groups of inputs is shared out in whole groups, where inputs are split."""
    module = "model.layers.0.mlp.down_proj"
    packed = attrs.evolve(
        plan, groups={f"{module}.weight": 4, "model.layers.0.mlp.up_proj.weight": 16}
    )
    assert packed.legal_sizes(12) == (1,)
    assert list(packed.obstacles(2)) == [Obstacle(module, "3 quantization groups (of 4 inputs)")]


@pytest.mark.parametrize("mode", ["within_expert", "expert_parallel"])
def test_experts(mode: MoeMode) -> None:
    """Whole experts need as many of them as there are ranks; else each has to divide."""
    options = attrs.evolve(OPTIONS, moe=mode)
    shapes = gated_experts("model.layers.0.mlp.switch_mlp", 6, 8, 8)
    legal = plan_of(shapes, options).legal_sizes(8)
    assert legal == ((1, 2, 4, 8) if mode == "within_expert" else (1, 2, 3, 4, 5, 6))


def test_what_follows_a_parameter(plan: ShardPlan) -> None:
    """Who splits inputs, experts or the vocabulary, has a part in what ranks put together."""
    block = "model.layers.0.self_attn"
    assert plan.after(f"{block}.o_proj.weight") == (Communication(block, CommPattern.ALL_REDUCE),)
    assert plan.after(f"{block}.q_proj.weight") == ()
    assert plan.after("model.norm.weight") == ()
    assert plan.after("lm_head.weight") == (Communication("lm_head", CommPattern.ALL_GATHER),)


def test_what_a_packed_matrix_has_beside_it(plan: ShardPlan) -> None:
    """Scales and biases are split as their weight, a global scale not at all."""
    module = "model.layers.0.mlp.down_proj"
    for leaf in ("weight", "scales", "biases"):
        assert plan.shard_of(f"{module}.{leaf}") == row()
    assert plan.shard_of(f"{module}.global_scale") == REPLICATED
    for path in (f"{module}.bias", "model.layers.0.sinks"):
        with pytest.raises(KeyError):
            plan.shard_of(path)


def test_what_is_split_by_rows_is_in_a_layer() -> None:
    """Anywhere else nobody would know where to add it."""
    with pytest.raises(AssertionError, match="outside a layer"):
        plan_of(linear("head", 4, 4, shard=row()), OPTIONS)


def test_what_nobody_speaks_of_is_replicated() -> None:
    """Every rank has what no rule shares out."""
    shapes = [*vector("model.layers.0.scale", 3), *linear("model.layers.0.gate", 5, 7)]
    plan = plan_of(shapes, OPTIONS)
    assert {parameter.shard for parameter in plan.parameters.values()} == {REPLICATED}
    assert plan.communications == ()
    assert plan.divides(64)
