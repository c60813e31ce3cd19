"""What the tests of several families share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxcel.checkpoint.checkpoint import Checkpoint
from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.cli.main import run
from mlxcel.family import Family
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.stage.load import load_stage

PROMPTS = ("Hello, world! abc", "Hey", "One sentence")
TOKENS = 12


@pytest.fixture
def assert_greedy_parity(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Checks that ``mlxcel generate`` gives mlx-lm's greedy tokens, alone and in a batch.

    Called with a checkpoint, the layers of each stage, and further flags.
    """

    def generate(path: Path, *prompts: str, flags: tuple[str, ...]) -> list[list[int]]:
        texts = [part for prompt in prompts for part in ("-p", prompt)]
        command = ["generate", "-m", str(path), "--json", "--no-chat-template", "-n", str(TOKENS)]
        assert run([*command, *texts, *flags]) == 0
        *results, _ = map(json.loads, capsys.readouterr().out.splitlines())
        return [result["tokens"] for result in results]

    def check(path: Path, layers: str, *more: str) -> None:
        model, _ = load_model(path)
        expected = []
        for text in PROMPTS:
            steps = generate_step(mx.array(list(text.encode())), model, max_tokens=TOKENS)
            expected.append([int(token) for token, _ in steps])
        cut = ("--pp-layers", layers, *more)
        assert [generate(path, text, flags=cut)[0] for text in PROMPTS] == expected
        for flags in (cut, ("--pp-size", "1"), (*cut, "--prefill-chunk-size", "4")):
            batch = ("--pp-micro-batch-size", "3")
            assert generate(path, *PROMPTS, flags=(*batch, *flags)) == expected, flags

    return check


DTYPES = ("float32", "bfloat16")
QUICK = {("float32", "bfloat16"), ("bfloat16", None)}


@pytest.fixture(
    params=[
        pytest.param((stored, cast), marks=[] if (stored, cast) in QUICK else pytest.mark.slow)
        for stored in DTYPES
        for cast in (None, *DTYPES)
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def stored_and_cast(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """What a checkpoint is stored in, and what its activations are cast to."""
    pair: tuple[str, str | None] = request.param
    return pair


@pytest.fixture
def assert_planned_bytes() -> Callable[[Checkpoint, Family, str | None], None]:
    """Checks that every layer and both ends hold in memory what the profile says."""

    def check(checkpoint: Checkpoint, family: Family, cast: str | None) -> None:
        profile = profile_checkpoint(checkpoint, family, DtypeChoice(cast, ""))
        last = len(profile.layers) - 1
        for index, layer in enumerate(profile.layers):
            planned = layer.bytes
            planned += profile.embedding_bytes if index == 0 else 0
            planned += profile.head_bytes if index == last else 0
            loaded = load_stage(checkpoint, family, index, index + 1, cast).nbytes()
            assert loaded == planned, f"layer {index}"

    return check
