"""Split one tiny model of an architecture at every layer and compare with the whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.errors import UnsupportedError
from mlxcel.family.batching import Batching
from mlxcel.family.contract import Family
from mlxcel.partition.cache_bytes import cache_bytes
from mlxcel.partition.profile import profile_checkpoint
from mlxcel.plugins import Plugins
from mlxcel.testing.split import (
    HANDLE,
    Chain,
    Scene,
    Whole,
    check_split,
    differences,
    every_cut,
    unlike_alone,
)
from mlxcel.testing.survey.configs import tiny_config
from mlxcel.testing.survey.finding import Finding, served_by
from mlxcel.testing.survey.model import draw_model, write_model

CHUNKED = Scene((17,), chunk=8, steps=2)
RAGGED = Scene((17, 5, 11), steps=4)
SCENES = {
    Batching.PADDED: RAGGED,
    Batching.EQUAL: Scene((11, 11, 11), steps=4),
    Batching.SINGLE: Scene((17,), steps=4),
}
"""The largest batch that the rows of a model may be in."""
TOLERANCE = 1e-4
FLOAT32_BYTES = 4
QUANTIZED = "4:32"


def survey(architecture: str, plugins: Plugins) -> Finding:
    """Find out what becomes of ``architecture``, which no family of its own serves."""
    name, family = served_by(architecture, plugins)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = tiny_config(architecture)
            model = draw_model(architecture, config)
            _run(model)
        except (Exception, SystemExit) as error:
            return Finding(architecture, name, "none", _short(error))
        try:
            problems = list(_problems(Path(folder), model, config, family))
        except UnsupportedError as error:
            return Finding(architecture, name, "refused", _reason(error))
        if problems:
            return Finding(architecture, name, "differs", problems[0])
        batching = family.batching(family.open(Path(folder) / "plain").config)
        return Finding(architecture, name, "split", batching.value)


def _problems(
    path: Path, model: nn.Module, config: Mapping[str, Any], family: Family
) -> Iterator[str]:
    """All that is not as it should be, plain and quantized."""
    plain = write_model(model, config, path / "plain")
    yield from check_split(plain, family, scenes=[CHUNKED])
    yield from _different(plain, family)
    yield from _unlike(plain, family)
    packed = write_model(model, config, path / "packed", quantize=QUANTIZED)
    yield from _different(packed, family)


def _different(path: Path, family: Family) -> Iterator[str]:
    """What a batch shows: other logits, other bytes than planned, larger caches."""
    checkpoint = family.open(path)
    scene = SCENES[family.batching(checkpoint.config)]
    chain = Chain(path, family, every_cut(path, family))
    yield from differences(Whole(path, family), chain, scene)
    profile = profile_checkpoint(checkpoint, family, DtypeChoice(None, ""))
    planned = [layer.bytes for layer in profile.layers]
    planned[0] += profile.embedding_bytes
    planned[-1] += profile.head_bytes
    kinds = family.caches(checkpoint.config)
    longest = max(scene.lengths) + scene.steps
    for layer, (stage, table) in enumerate(zip(chain.stages, chain.tables, strict=True)):
        if stage.nbytes() != planned[layer]:
            yield f"layer {layer} takes {stage.nbytes()} bytes, {planned[layer]} were planned"
        batch = table[HANDLE]
        held = sum(cache.nbytes for cache in batch.caches if cache is not None)
        reserved = cache_bytes(kinds[layer], len(batch.rows), longest, itemsize=FLOAT32_BYTES)
        if held > reserved:
            yield f"layer {layer} keeps {held} bytes of a batch, {reserved} are reserved"


def _unlike(path: Path, family: Family) -> Iterator[str]:
    """Rows of the largest batch that the family allows that are not those of single runs."""
    scene = SCENES[family.batching(family.open(path).config)]
    chain = Chain(path, family, every_cut(path, family))
    yield from unlike_alone(chain, Whole(path, family), scene, TOLERANCE)


def _run(model: nn.Module) -> None:
    """A prompt and a token, so that what cannot run at all is told from what cannot be split."""
    caches = make_prompt_cache(model)
    for tokens in ([[*range(9)]], [[9]]):
        mx.eval(model(mx.array(tokens), cache=caches))


def _reason(error: UnsupportedError) -> str:
    return error.problem.partition(": ")[2].rstrip(".")


def _short(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "its module ends the process"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
