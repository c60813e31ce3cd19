"""The model's own log-probabilities of what was drawn, for the rows that ask."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxcel.pipeline.step import Logprobs
from mlxcel.stage.batch import Row

LEAST = -9999.0
"""What stands for anything smaller, minus infinity included, which JSON cannot hold."""


def logprobs(
    logits: mx.array, rows: Sequence[Row], tokens: Sequence[int]
) -> tuple[Logprobs | None, ...]:
    """An item per row, None for rows that did not ask or failed; empty if no row asked.

    The values are natural logarithms: the log-softmax, in float32, of the logits as the model
    made them, before biases, penalties, grammar, temperature and filters. The likeliest tokens
    come by value, and by the smaller id where values are equal.

    Args:
        logits: [rows, vocab], any floating dtype.
        rows: What each row asks for, in the order of ``logits``.
        tokens: What was drawn for each row; negative where the row failed.
    """
    asked = {
        row: at.sampling.logprobs
        for row, at in enumerate(rows)
        if at.sampling.logprobs is not None and tokens[row] >= 0
    }
    if not asked:
        return ()
    picked = logits[mx.array(list(asked))].astype(mx.float32)
    normal = np.array(picked - mx.logsumexp(picked, axis=-1, keepdims=True))
    values = np.maximum(np.nan_to_num(normal, nan=LEAST), LEAST)
    found: list[Logprobs | None] = [None] * len(rows)
    for mine, (row, count) in zip(values, asked.items(), strict=True):
        ids = _likeliest(mine, count)
        found[row] = Logprobs(
            float(mine[tokens[row]]), tuple(ids.tolist()), tuple(mine[ids].tolist())
        )
    return tuple(found)


def _likeliest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The ids of the ``count`` largest of [vocab] values, largest first."""
    count = min(count, values.size)
    if count == 0:
        return np.empty(0, np.intp)
    ids = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return ids[np.argsort(-values[ids], kind="stable")[:count]]
