"""Links: what one stage sends, the next one receives."""

import array

import pytest

from mlxcel.errors import ChannelClosed, ChannelFull, DeadlineError, WireError
from mlxcel.pipeline.link import Link, WireLink, memory_link
from mlxcel.pipeline.operations import New, Release, Sampling
from mlxcel.pipeline.step import Message, Step, StepFailed, Stop, Tokens
from mlxcel.wire.tensor import WireTensor

LONG = 60.0


def to_wire(values: "array.array[int]") -> WireTensor:
    """Integers of a stage that computes with Python arrays."""
    return WireTensor("int32", (len(values),), values.tobytes())


def from_wire(tensor: WireTensor) -> "array.array[int]":
    """The inverse of to_wire."""
    return array.array("i", bytes(tensor.data))


def wire_link(capacity: int, name: str) -> Link:
    return WireLink(memory_link(capacity, name), to_wire, from_wire)


MESSAGES: list[Message] = [
    Step(0, 1, (New(1, 9, Sampling(temperature=0.5)), Release(3)), {}, False),
    Step(1, 1, (), {"tokens": array.array("i", [5, -6]), "h": array.array("i", [7])}, True),
    Tokens(1, 1, (17, 4)),
    StepFailed(2, 1, 0, (9,), "ValueError: no"),
    Stop(),
]


@pytest.mark.parametrize("make", [memory_link, wire_link])
def test_messages_arrive_equal_and_in_order(make: type) -> None:
    """Every kind of message passes a link unchanged."""
    link = make(len(MESSAGES), "0 to 1")
    for message in MESSAGES:
        link.send(message)
    assert [link.receive(LONG) for _ in MESSAGES] == MESSAGES


@pytest.mark.parametrize("make", [memory_link, wire_link])
def test_a_link_keeps_the_rules_of_its_channel(make: type) -> None:
    """Full, late and closed are the channel's own errors, on every link."""
    link = make(1, "0 to 1")
    with pytest.raises(DeadlineError, match="0 to 1"):
        link.receive(0)
    link.send(Stop())
    with pytest.raises(ChannelFull, match="0 to 1"):
        link.send(Stop())
    link.close("stage 1 is gone")
    with pytest.raises(ChannelClosed, match="stage 1 is gone"):
        link.send(Stop())
    assert link.receive(LONG) == Stop()
    with pytest.raises(ChannelClosed, match="stage 1 is gone"):
        link.receive(LONG)


def test_a_memory_link_passes_arrays_as_they_are() -> None:
    """Between threads nothing is copied."""
    values = array.array("i", [1, 2])
    link = memory_link(1, "0 to 1")
    link.send(Step(0, 0, tensors={"h": values}))
    received = link.receive(LONG)
    assert isinstance(received, Step)
    assert received.tensors["h"] is values


def test_a_wire_link_passes_bytes_only() -> None:
    """Behind the wire there is a new array, made from what the bytes say."""
    values = array.array("i", [1, 2])
    inner = memory_link(1, "0 to 1")
    link = WireLink(inner, to_wire, from_wire)
    link.send(Step(0, 0, tensors={"h": values}))
    values[0] = 99
    received = link.receive(LONG)
    assert isinstance(received, Step)
    assert list(received.tensors["h"]) == [1, 2]


def test_a_wire_link_refuses_what_the_wire_cannot_carry() -> None:
    """A tensor that the format has no room for fails at its sender."""
    link = wire_link(1, "0 to 1")
    with pytest.raises(WireError, match="empty"):
        link.send(Step(0, 0, tensors={"h": array.array("i")}))
