"""Draw one token per row from the last position's logits, on the last stage.

A draw has no state: its key is a function of the request's seed, the choice and the
position in the sequence. So the same request gives the same tokens whatever it shares a
batch with, however the model is split, and after a replay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlxcel.pipeline.operations import Sampling
from mlxcel.pipeline.step import FAILED_GRAMMAR, FAILED_ROW
from mlxcel.stage.batch import Row

_MASK = (1 << 64) - 1


def sample(logits: mx.array, rows: Sequence[Row]) -> list[int]:
    """One token id per row.

    In its place stands :data:`FAILED_ROW` where the logits are not numbers, and
    :data:`FAILED_GRAMMAR` where a row's matcher has a problem.

    Args:
        logits: [rows, vocab], any floating dtype.
        rows: How each row samples, in the order of ``logits``.
    """
    if any(map(_adjusts, rows)):
        # Stacked anew, not assigned: MLX's arrays share what is assigned to a slice of them.
        logits = mx.stack(
            [_adjust(logits[i], row) if _adjusts(row) else logits[i] for i, row in enumerate(rows)]
        )
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logprobs, axis=-1)
    if any(row.sampling.temperature != 0 for row in rows):
        tokens = mx.stack(
            [
                tokens[i] if row.sampling.temperature == 0 else _draw(logprobs[i], row)
                for i, row in enumerate(rows)
            ]
        )
    # A NaN anywhere makes the whole row's log-probabilities NaN.
    failed = mx.isnan(logprobs[:, 0])
    made = cast(list[int], mx.where(failed, FAILED_ROW, tokens.astype(mx.int32)).tolist())
    return [
        token if row.matcher is None or row.matcher.problem is None else FAILED_GRAMMAR
        for row, token in zip(rows, made, strict=True)
    ]


def _adjusts(row: Row) -> bool:
    """Whether a row's logits are not taken as they are."""
    sampling = row.sampling
    return sampling.looks_back or bool(sampling.bias_tokens) or row.matcher is not None


def _adjust(logits: mx.array, row: Row) -> mx.array:
    """[vocab] logits with the row's penalties and biases, and only what its grammar allows."""
    sampling = row.sampling
    seen = mx.array(sorted({*row.prompt, *row.drawn}))
    if sampling.repetition_penalty != 1 and seen.size:
        penalty, found = sampling.repetition_penalty, logits[seen]
        logits[seen] = mx.where(found < 0, found * penalty, found / penalty)
    if row.drawn and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(row.drawn)
        taken = [
            sampling.presence_penalty + n * sampling.frequency_penalty for n in counts.values()
        ]
        logits[mx.array(list(counts))] -= mx.array(taken).astype(logits.dtype)
    if sampling.bias_tokens:
        added = mx.array(sampling.bias_values).astype(logits.dtype)
        logits = logits.at[mx.array(sampling.bias_tokens)].add(added)
    if row.matcher is not None and (allowed := row.matcher.allowed(logits.size)) is not None:
        logits = mx.where(allowed, logits, -mx.inf)
    return logits


def draw_key(sampling: Sampling, position: int) -> int:
    """The 64-bit key of one draw: splitmix64 (Steele, Lea & Flood 2014) over the three parts."""
    key = 0
    for part in (sampling.seed, sampling.choice, position):
        key = (key + part + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def _draw(logprobs: mx.array, row: Row) -> mx.array:
    """A token id from [vocab] log-probabilities: top-p, min-p, top-k, then the temperature."""
    sampling = row.sampling
    logprobs = logprobs.astype(mx.float32)
    if 0 < sampling.top_p < 1:
        logprobs = _keep_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0:
        floor = mx.max(logprobs) + math.log(sampling.min_p)
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    if 0 < sampling.top_k < logprobs.size:
        kept = mx.argpartition(-logprobs, kth=sampling.top_k - 1)[: sampling.top_k]
        only = mx.full(logprobs.shape, -mx.inf)
        only[kept] = logprobs[kept]
        logprobs = only
    key = mx.random.key(draw_key(sampling, row.position))
    return mx.random.categorical(logprobs / sampling.temperature, key=key)


def _keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The smallest set of tokens whose probability reaches ``top_p`` (Holtzman et al. 2019)."""
    order = mx.argsort(-logprobs)
    ranked = mx.exp(logprobs[order])
    before = mx.cumsum(ranked, axis=-1, inclusive=False)
    kept = mx.zeros(logprobs.shape, dtype=mx.bool_)
    kept[order] = before < top_p * mx.sum(ranked)
    return mx.where(kept, logprobs, -mx.inf)
