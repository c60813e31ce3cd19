"""``mlxcel plan --tp-size`` as a user runs it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.cli.main import run
from mlxcel.engine.local import open_model
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import MOST_RANKS, TensorParallel

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command: exit code, output and errors."""

    def call(model: Path, *flags: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return run(["plan", "-m", str(model), *flags]), *capsys.readouterr()

    return call


@pytest.fixture
def planned(plan: Command) -> Callable[..., dict[str, Any]]:
    """The JSON object of the command."""

    def call(model: Path, *flags: str) -> dict[str, Any]:
        code, out, err = plan(model, *flags, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return call


def test_the_table(plan: Command, tiny: Callable[..., Path]) -> None:
    """A row says for all equal layers how a parameter is split, what a rank has and what follows;
    the table of stages comes first."""
    code, out, _ = plan(tiny("llama"), "--tp-size", "4", "--tp-lm-head-mode", "vocab_parallel")
    assert code == 0
    rows = [re.sub(r"\s+", " ", line).strip() for line in out.splitlines()]
    assert rows[1].startswith("0 embed + 0-5 + head")
    for expected in (
        "embed_tokens.weight replicated 288x64",
        "0-5 self_attn.q_proj.weight column by 4 query heads 32x64",
        "0-5 self_attn.k_proj.weight column by 2 KV heads, each on 2 ranks 32x64",
        "0-5 self_attn.o_proj.weight row by 4 query heads 64x32 all-reduce of self_attn",
        "0-5 self_attn.o_proj.bias rank 0 only 64",
        "0-5 mlp.down_proj.weight row 64x32 all-reduce of mlp",
        "0-5 input_layernorm.weight replicated 64",
        "lm_head.weight vocab 72x64 all-gather",
        "ranks: 4 share each stage; memory is that of one",
    ):
        assert expected in rows


def test_layers_of_several_kinds(
    planned: Callable[..., dict[str, Any]], tiny: Callable[..., Path]
) -> None:
    """Every row lists its own layers; modes choose how experts are shared out."""
    for mode, strategy, share in (
        ("expert_parallel", "expert", [2, 64, 64]),
        ("within_expert", "row", [4, 64, 32]),
    ):
        found = planned(tiny("qwen3_5_moe"), "--tp-size", "2", "--tp-moe-mode", mode)
        assert found["tensor_parallel_size"] == 2
        rows = {row["parameter"]: row for row in found["tensors"]}
        assert rows["mlp.switch_mlp.down_proj.weight"] == {
            "parameter": "mlp.switch_mlp.down_proj.weight",
            "layers": list(range(8)),
            "strategy": strategy,
            "units": None,
            "shape": [4, 64, 64],
            "rank_shape": share,
            "communications": [{"pattern": "all_reduce", "after": "mlp"}],
        }
        assert rows["self_attn.k_proj.weight"]["layers"] == [3, 7]
        assert rows["linear_attn.A_log"]["layers"] == [0, 1, 2, 4, 5, 6]
        assert rows["linear_attn.A_log"]["units"] == 2


def test_bytes_are_of_one_rank(
    planned: Callable[..., dict[str, Any]], tiny: Callable[..., Path], plugins: Plugins
) -> None:
    """They are those that workers of one rank each are planned with; config.json alone will do."""
    flags = ("--tp-size", "2", "--pp-size", "2", "--dtype", "float32", "--context", "100")
    found = planned(tiny("llama"), *flags)
    tensor = TensorParallel(2)
    model = open_model(tiny("llama"), plugins, size=2, dtype="float32", tensor=tensor, apart=True)
    assert [stage["estimated_memory_bytes"] for stage in found["stages"]] == [
        stage.estimated_memory_bytes for stage in model.plan.stages
    ]
    assert planned(tiny("llama") / "config.json", *flags) == found
    whole = planned(tiny("llama"), *flags[2:])
    for rank, stage in zip(found["stages"], whole["stages"], strict=True):
        assert 2 * rank["kv_bytes"] == stage["kv_bytes"]


def test_impossible_sizes(plan: Command, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """They end with exit code 2 and the legal sizes, also from config.json alone."""
    shutil.copy(tiny("llama") / "config.json", tmp_path)
    for model in (tiny("llama"), tmp_path):
        code, out, err = plan(model, "--tp-size", "3")
        assert (code, out) == (2, "")
        assert "cannot share the 4 query heads" in err and "Legal sizes: 1, 2, 4." in err


@pytest.mark.parametrize("size", ["0", "-1", str(MOST_RANKS + 1)])
def test_sizes_that_mean_nothing(size: str, plan: Command, tiny: Callable[..., Path]) -> None:
    """A number that is none of ranks is refused by the flag's name."""
    code, _, err = plan(tiny("llama"), "--tp-size", size)
    assert code == 2
    assert f"--tp-size {size} is out of range. Give 1 to {MOST_RANKS}." in err


def test_modes_need_ranks(plan: Command, tiny: Callable[..., Path]) -> None:
    """What is said about ranks that are not there is refused, not ignored."""
    code, _, err = plan(tiny("llama"), "--tp-moe-mode", "within_expert")
    assert code == 2
    assert "--tp-moe-mode has no effect" in err


def test_memory_of_this_machine_is_shared_by_all_ranks(
    plan: Command, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--memory auto gives each rank of each stage an equal part."""
    monkeypatch.setattr("mlxcel.checkpoint.weights_mode.available_memory", lambda: 1 << 30)
    flags = ("--tp-size", "2", "--pp-size", "2", "--memory", "auto")
    assert "268.44 MB" in plan(tiny("llama"), *flags)[1]


def test_the_demo_model(plan: Command, tmp_path: Path) -> None:
    """SmolLM2 runs on three ranks and not on two, and the way out is named."""
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = plan(tmp_path, "--tp-size", "3")
    assert code == 0
    assert re.search(r"0-29 +self_attn\.q_proj\.weight +column by 9 query heads +192x576", out)
    code, _, err = plan(tmp_path, "--tp-size", "2")
    assert code == 2
    assert "9 query heads" in err and "Legal sizes: 1, 3." in err
