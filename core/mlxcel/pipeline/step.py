"""What travels between the engine and the stages: steps down the chain, answers back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.pipeline.operations import Operation


@attrs.frozen
class Step:
    """One forward pass of one slot through one stage.

    ``operations`` are applied first, in order; then, if there are ``tensors``, the batch
    under handle ``slot`` runs. The first stage receives ``{"tokens": int32 [rows, length]}``,
    later ones ``{"h": [rows, length, hidden], …}`` plus what the family sends along. A step
    without tensors only applies its operations. ``sample`` asks the last stage for one token
    per row from the last position; without it (a chunk of a prompt) no logits are made.
    """

    seq: int
    slot: int
    operations: tuple[Operation, ...] = ()
    tensors: Mapping[str, Any] = attrs.field(factory=dict)
    sample: bool = False


FAILED_ROW = -1
"""In place of a token id: this row's logits are not numbers."""

FAILED_GRAMMAR = -2
"""In place of a token id: this row's text cannot go on within its grammar."""


@attrs.frozen
class Logprobs:
    """Natural log-probabilities at one position: the drawn token's, and those of the likeliest.

    ``ids`` are the likeliest tokens, best first, ``values`` their log-probabilities.
    """

    drawn: float
    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@attrs.frozen
class Tokens:
    """The last stage's answer to a step: one token id per row, or none if none were asked.

    A row that failed has :data:`FAILED_ROW` or :data:`FAILED_GRAMMAR` instead; the others are
    not hurt. ``logprobs`` has an item per row, None for rows that did not ask, or is empty if
    no row did. ``causes`` says why, for each :data:`FAILED_GRAMMAR` in the order of the rows.
    """

    seq: int
    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs | None, ...] = ()
    causes: tuple[str, ...] = ()


@attrs.frozen
class StepFailed:
    """A stage's answer to a step that it could not run; later stages pass it on untouched."""

    seq: int
    slot: int
    stage: int
    requests: tuple[int, ...]
    cause: str


@attrs.frozen
class Stop:
    """The end of the stream: each stage passes it on and ends its loop."""


Message = Step | Tokens | StepFailed | Stop
