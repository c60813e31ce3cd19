"""What rank 0 of a stage tells its group to do next.

The engine alone decides; rank 0 gets its step frame and hands it on. In the first stage the
decision carries the step itself, as only rank 0 has a link to the engine; in later ones every rank
has its own, with its own hidden states, and the decision says when to take which.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

import attrs

from mlxcel.errors import WireError
from mlxcel.pipeline.operations import New
from mlxcel.pipeline.step import Step, Stop
from mlxcel.wire import message as wire_message
from mlxcel.wire.tensor import Buffer

Kind = Literal["prefill", "decode", "admit", "evict", "barrier", "shutdown"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEADER = struct.Struct("<BQ?")


@attrs.frozen
class StepDecision:
    """One decision.

    ``seq`` is the step's number. ``step`` is the step itself; None means that every rank takes
    it from its own link, or that there is none.
    """

    kind: Kind
    seq: int = 0
    step: Step | None = None


def decide(message: Step | Stop, *, carry: bool) -> StepDecision:
    """The decision that follows from what rank 0 has received.

    Args:
        carry: Whether the other ranks have no link of their own to take a step from.
    """
    if isinstance(message, Stop):
        return StepDecision("shutdown")
    return StepDecision(_kind(message), message.seq, message if carry else None)


def pieces(decision: StepDecision) -> list[Buffer]:
    """The decision as one frame; tensors of its step are bytes already."""
    header = _HEADER.pack(_KINDS.index(decision.kind), decision.seq, decision.step is not None)
    if decision.step is None:
        return [header]
    return [header, *wire_message.pieces(decision.step, 0)]


def decode(frame: memoryview) -> StepDecision:
    """The decision in a frame.

    Raises:
        WireError: The bytes are no decision.
    """
    if len(frame) < _HEADER.size:
        raise WireError("a decision that is cut short")
    kind, seq, carries = _HEADER.unpack(frame[: _HEADER.size])
    if kind >= len(_KINDS):
        raise WireError(f"a decision of the unknown kind {kind}")
    step = None
    if carries:
        message = wire_message.decode(frame[_HEADER.size :])
        if not isinstance(message, Step):
            raise WireError("a decision that carries no step")
        step = message
    elif len(frame) > _HEADER.size:
        raise WireError(f"{len(frame) - _HEADER.size} bytes follow a decision without a step")
    return StepDecision(_KINDS[kind], seq, step)


def _kind(step: Step) -> Kind:
    if not step.tensors:
        admits = any(isinstance(operation, New) for operation in step.operations)
        return "admit" if admits else "evict"
    return "prefill" if not step.sample else "decode"
