"""What rank 0 tells its group: every decision survives the way, and nothing else is one."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import WireError
from mlxcel.pipeline.decision import Kind, StepDecision, decide, decode, pieces
from mlxcel.pipeline.operations import New, Release, Sampling
from mlxcel.pipeline.step import Step, Stop
from mlxcel.wire import message
from mlxcel.wire.tensor import WireTensor

TOKENS = {"tokens": WireTensor("int32", (1, 2), b"\1\0\0\0\2\0\0\0")}
NEW = New(0, 7, Sampling())
STEPS = {
    "prefill": Step(1, 0, (NEW,), TOKENS),
    "decode": Step(2, 0, (), TOKENS, sample=True),
    "admit": Step(3, 0, (NEW,)),
    "evict": Step(4, 0, (Release(0),)),
}


def frame(decision: StepDecision) -> memoryview:
    return memoryview(b"".join(bytes(piece) for piece in pieces(decision)))


def arrived(decision: StepDecision) -> StepDecision:
    return decode(frame(decision))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_decisions_without_a_step_survive(kind: Kind) -> None:
    """Every kind arrives with its number."""
    assert arrived(StepDecision(kind, 2**64 - 1)) == StepDecision(kind, 2**64 - 1)


@pytest.mark.parametrize("kind", STEPS)
def test_decisions_carry_steps(kind: Kind) -> None:
    """In the first stage the step comes along, its operations and tensors included."""
    step = STEPS[kind]
    decision = decide(step, carry=True)
    assert decision == StepDecision(kind, step.seq, step)
    found = arrived(decision).step
    assert found is not None
    assert (found.seq, found.slot, found.operations) == (step.seq, step.slot, step.operations)
    assert found.sample == step.sample
    assert {name: bytes(tensor.data) for name, tensor in found.tensors.items()} == {
        name: bytes(tensor.data) for name, tensor in step.tensors.items()
    }


@pytest.mark.parametrize("kind", STEPS)
def test_later_stages_carry_no_step(kind: Kind) -> None:
    """Where every rank has a link of its own, only kind and number are told."""
    step = STEPS[kind]
    assert decide(step, carry=False) == StepDecision(kind, step.seq)


def test_a_stop_is_a_shutdown() -> None:
    """The end of the stream ends the group."""
    assert decide(Stop(), carry=True) == StepDecision("shutdown")


@given(st.binary(max_size=64))
def test_junk_is_a_wire_error(junk: bytes) -> None:
    """Whatever the bytes are, they are a decision without a step or a WireError."""
    with contextlib.suppress(WireError):
        assert decode(memoryview(junk)).kind in get_args(Kind)


@given(st.sampled_from(sorted(STEPS)), st.data())
def test_damaged_decisions_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    """A frame that is cut, or has a byte changed, is still well-formed or a WireError."""
    whole = bytearray(frame(decide(STEPS[kind], carry=True)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        with contextlib.suppress(WireError):
            decode(memoryview(damaged))


def test_bytes_behind_a_decision_are_refused() -> None:
    """A decision without a step is exactly its header."""
    with pytest.raises(WireError, match="follow"):
        decode(memoryview(bytes(frame(StepDecision("evict", 1))) + b"x"))


def test_a_decision_that_carries_something_else_is_refused() -> None:
    """Only steps are carried."""
    carrying = bytes(frame(decide(STEPS["decode"], carry=True)))[:10]
    with pytest.raises(WireError, match="carries no step"):
        decode(memoryview(carrying + message.encode(Stop())))
