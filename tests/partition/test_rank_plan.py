"""Sizes and options that cannot work, refused before anything loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import TensorParallelError, UnsupportedError, UsageError
from mlxcel.family import Family
from mlxcel.partition.from_config import checkpoint_from_config
from mlxcel.partition.plan import Plan, make_plan
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

Make = Callable[..., Plan]
PLANS = {  # of models that everybody knows
    "llama": {
        "hidden_size": 576,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "qwen3_moe": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 192,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 1000,
    },
}


@pytest.fixture
def planned(tmp_path: Path, plugins: Plugins, family_of: Callable[[Path], Family]) -> Make:
    """Plans a model from its config.json alone."""

    def make(model_type: str, size: int, /, *, config: Mapping[str, Any] = {}, **how: Any) -> Plan:
        settings = {"model_type": model_type, **PLANS[model_type], **config}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        family = family_of(tmp_path)
        options = {name: how.pop(name) for name in ("moe", "embedding", "head") if name in how}
        return make_plan(
            checkpoint_from_config(tmp_path, family),
            family,
            DtypeChoice(None, ""),
            plugins,
            tensor=TensorParallel(size, **options),
            **how,
        )

    return make


def refusal(make: Make, *what: Any, **how: Any) -> TensorParallelError:
    with pytest.raises(TensorParallelError) as caught:
        make(*what, **how)
    assert caught.value.exit_code == 2
    return caught.value


def test_heads_of_smollm2(planned: Make) -> None:
    """Nine query heads and three of keys: three ranks can, two cannot, and the legal ones are
    named with all that binds them."""
    assert planned("llama", 3).ranks is not None
    assert str(refusal(planned, "llama", 2)) == (
        "--tp-size 2 cannot share the 9 query heads of model.layers.0.self_attn.q_proj. "
        "Legal sizes: 1, 3."
    )
    wider = refusal(planned, "llama", 2, config={"intermediate_size": 1539})
    assert wider.legal == (1, 3, 9)


def test_key_heads_are_repeated(planned: Make) -> None:
    """With fewer heads of keys than ranks, their number has to divide that of the ranks."""
    config = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    found = refusal(planned, "llama", 6, config=config)
    assert (found.parts, found.legal) == ("4 KV heads", (1, 2, 4, 12))
    planned("llama", 12, config=config)


def test_the_intermediate_size(planned: Make) -> None:
    """It has to divide where the heads do."""
    found = refusal(planned, "llama", 3, config={"intermediate_size": 1000})
    assert found.parts == "intermediate size 1000"
    assert found.module == "model.layers.0.mlp.gate_proj"
    assert "(--pp-size)" in str(found) and found.legal == (1,)


def test_quantization_groups(planned: Make) -> None:
    """Ranks share whole groups of inputs, unless the weights are unpacked."""
    config = {"intermediate_size": 192, "quantization": {"group_size": 64, "bits": 4}}
    planned("llama", 3, config=config)
    config["num_attention_heads"] = config["num_key_value_heads"] = 12
    config["head_dim"] = 64
    found = refusal(planned, "llama", 6, config=config)
    assert found.parts == "3 quantization groups (of 64 inputs)"
    assert found.module == "model.layers.0.mlp.down_proj"
    assert found.legal == (1, 3)
    assert found.otherwise == (("--weights dequantized", (2, 4, 6, 12)),)
    planned("llama", 6, config=config, dequantize=True)


def test_each_module_has_its_own_groups(planned: Make) -> None:
    """An override counts for its module, and one that is not packed has no groups."""
    down = "model.layers.1.mlp.down_proj"
    own = {"group_size": 128, "bits": 4}
    config: dict[str, Any] = {"intermediate_size": 128, "num_attention_heads": 12}
    config |= {"num_key_value_heads": 12, "head_dim": 64, "hidden_size": 128}
    config["quantization"] = {"group_size": 64, "bits": 4}
    planned("llama", 2, config=config)
    config["quantization"][down] = own
    found = refusal(planned, "llama", 2, config=config)
    assert (found.module, found.parts) == (down, "1 quantization group (of 128 inputs)")
    config["quantization"][down] = False
    planned("llama", 2, config=config)


def test_experts(planned: Make) -> None:
    """Whole experts need one for each rank; shares of experts need sizes that divide."""
    found = refusal(planned, "qwen3_moe", 8)
    assert (found.parts, found.legal) == ("6 experts", (1, 2, 4))
    assert found.otherwise == (("--tp-moe-mode within_expert", (8, 16)),)
    packed = {"quantization": {"group_size": 64, "bits": 4}}
    found = refusal(planned, "qwen3_moe", 2, moe="within_expert", config=packed)
    assert found.module.endswith("switch_mlp.down_proj")
    assert found.otherwise == (
        ("--weights dequantized", (2, 4, 8, 16)),
        ("--tp-moe-mode expert_parallel", (2, 4)),
    )


def test_a_tied_table_has_one_mode(planned: Make) -> None:
    """It is shared out at both ends or at neither."""
    tied = {"tie_word_embeddings": True}
    with pytest.raises(UsageError, match=r"its embedding. Give both the same mode"):
        planned("llama", 3, config=tied, head="vocab_parallel")
    planned("llama", 3, config=tied, head="vocab_parallel", embedding="vocab_parallel")
    planned("llama", 3, head="vocab_parallel", config={"tie_word_embeddings": False})


def test_no_mirrors(planned: Make) -> None:
    """Mirrors of caches do not go with ranks."""
    with pytest.raises(UsageError, match="--allow-mirrored-kv does not go with --tp-size 3"):
        planned("llama", 3, mirrors=True)


def test_generic_models(planned: Make) -> None:
    """Nobody knows what of an architecture may be split that only mlx-lm knows."""
    with pytest.raises(UnsupportedError, match=r"'gpt2' cannot be split .*--pp-size"):
        planned("llama", 3, config={"model_type": "gpt2"})


class Unsplit(Family):
    """A family that speaks of its parameters but not of how they are split."""

    api_version = "1.0"
    wire_names = ("unsplit",)

    def shapes(self, config: Any) -> Any:
        from mlxcel.family.shapes import embedding, norm

        yield from embedding("model.embed_tokens", 8, 8)
        for layer in range(config.num_layers):
            yield from norm(f"model.layers.{layer}.norm", 8)


class Silent(Family):
    """One that does not even do that."""

    api_version = "1.0"
    wire_names = ("silent",)


@pytest.mark.parametrize("family", [Unsplit(), Silent()])
def test_families_that_do_not_say(
    family: Family, tiny: Callable[..., Path], plugins: Plugins
) -> None:
    """Without shards there is nothing to share: more stages are the way out."""
    checkpoint = family.open(tiny("llama"))
    with pytest.raises(UnsupportedError, match=r"'llama' cannot be split .*--pp-size"):
        make_plan(checkpoint, family, DtypeChoice(None, ""), plugins, tensor=TensorParallel(2))


def test_what_is_packed_the_weights_say(
    tiny: Callable[..., Path], tmp_path: Path, plugins: Plugins, family_of: Callable[..., Family]
) -> None:
    """A module without scales has no groups, whatever the settings' default is."""
    path = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 128, "bits": 4}  # but nothing is packed
    (path / "config.json").write_text(json.dumps(config))
    family = family_of(path)
    plan = make_plan(
        family.open(path), family, DtypeChoice(None, ""), plugins, tensor=TensorParallel(4)
    )
    assert plan.ranks is not None and plan.ranks.packed == {}
