"""The real model: what it says, on any split, and that mlx-lm says the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.cli.main import run
from mlxcel.engine.tokenizer import load_tokenizer
from mlxcel.family import Family
from mlxcel.testing.split import Scene, check_split

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer briefly."
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[int]:
    """mlx-lm's greedy tokens up to the end token, with float32 activations as on a CPU."""
    from mlx.utils import tree_map
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    def cast(value: mx.array) -> mx.array:
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value

    config = read_config(demo_model)
    tokenizer = load_tokenizer(demo_model, config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    model, _ = load_model(demo_model)
    model.update(tree_map(cast, model.parameters()))

    def tokens() -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=20):
            if int(token) in tokenizer.eos_ids:
                return
            yield int(token)

    return list(tokens())


@pytest.mark.parametrize("layers", ["0-29", "0-9,10-29", "0-14,15-29", "0-19,20-29"])
def test_the_capital_of_france(
    demo_model: Path, expected: list[int], layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One stage and three cuts answer alike, token by token what mlx-lm answers."""
    flags = ["-p", QUESTION, "-n", "20", "--json", "--dtype", "float32", "--pp-layers", layers]
    assert run(["generate", "-m", str(demo_model), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert result["text"] == ANSWER
    assert result["finish_reason"] == "stop"
    assert result["tokens"] == expected


@pytest.mark.parametrize(
    "stages",
    [["--pp-size", "1"], ["--pp-size", "2"], ["--pp-size", "2", "--pp-workers", "process"]],
)
def test_three_ranks_say_the_same(
    demo_model: Path, expected: list[int], stages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its 9 heads on 3 keys can be shared by three ranks, in threads and in processes."""
    flags = ["-p", QUESTION, "-n", "20", "--json", "--dtype", "float32", "--tp-size", "3", *stages]
    assert run(["generate", "-m", str(demo_model), *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[0])["tokens"] == expected
    assert "decode path: native batched forward" in err.splitlines()


def test_two_ranks_cannot_share_nine_heads(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be shared out is refused with the sizes that can."""
    assert run(["generate", "-m", str(demo_model), "-p", QUESTION, "--tp-size", "2"]) == 2
    assert "Legal sizes: 1, 3." in capsys.readouterr().err


def test_split_equals_whole(demo_model: Path, family_of: Callable[[Path], Family]) -> None:
    """Cut at every third layer, every logit is the whole model's to the last bit."""
    ranges = [range(start, start + 3) for start in range(0, 30, 3)]
    scenes = [Scene((9, 4), chunk=5, steps=2)]
    family = family_of(demo_model)
    assert check_split(demo_model, family, ranges, dtype="float32", scenes=scenes) == []
