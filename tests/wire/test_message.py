"""Pipeline messages as bytes: exact round trips, and nothing but WireError for other bytes."""

import json
import struct
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxcel.errors import WireError
from mlxcel.pipeline import operations
from mlxcel.pipeline.operations import Merge, New, Operation, Release, Sampling
from mlxcel.pipeline.step import Logprobs, Message, Step, StepFailed, Stop, Tokens
from mlxcel.wire.message import MAX_HEADER, decode, encode, pieces, sent_at
from mlxcel.wire.tensor import WireTensor

ints = st.integers(-(1 << 63), (1 << 64) - 1)
shown_texts = st.text(st.characters(exclude_categories=["Cc", "Cs"], include_characters="\t\n"))
rows = st.lists(ints, max_size=4).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
some_floats = st.lists(floats, max_size=4).map(tuple)
samplings = st.builds(
    Sampling,
    floats,
    floats,
    ints,
    floats,
    ints,
    ints,
    bias_tokens=rows,
    bias_values=some_floats,
    logprobs=st.none() | ints,
)
some_logprobs = st.builds(Logprobs, floats, rows, some_floats)
some_operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(
        operations.New,
        ints,
        ints,
        samplings,
        prompt=rows,
        source=st.none() | ints,
        grammar=st.none() | st.text(),
        ends=rows,
    ),
    st.builds(operations.Merge, ints, rows),
    st.builds(operations.Extend, ints, ints),
    st.builds(operations.Filter, ints, rows),
    st.builds(operations.Extract, ints, ints, ints),
    st.builds(operations.Copy, ints, ints),
    st.builds(operations.Trim, ints, ints),
    st.builds(operations.Prepare, ints, rows, rows),
    st.builds(operations.Finalize, ints),
    st.builds(operations.Release, ints),
)
some_tensors = st.binary(min_size=1, max_size=20).map(
    lambda data: WireTensor("uint8", (1, len(data)), data)
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Step,
        ints,
        ints,
        st.lists(some_operations, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), some_tensors, max_size=3),
        st.booleans(),
    ),
    st.builds(
        Tokens,
        ints,
        ints,
        rows,
        st.lists(st.none() | some_logprobs, max_size=3).map(tuple),
        st.lists(shown_texts, max_size=3).map(tuple),
    ),
    st.builds(StepFailed, ints, ints, ints, rows, shown_texts),
    st.just(Stop()),
)

STEP = {"seq": 1, "slot": 2, "operations": [], "sample": True, "tensors": []}
SAMPLING = {"temperature": 0.5, "top_p": 1, "top_k": 0, "min_p": 0.0, "seed": 3, "choice": 0}


def raw(header: Any, kind: int = 1, version: int = 2, magic: bytes = b"MLXP") -> bytes:
    """A hand-made message without tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return magic + struct.pack("<BBQI", version, kind, 0, len(text)) + text


@given(messages)
def test_round_trip(message: Message) -> None:
    """Every message is read back equal, from any kind of buffer."""
    buffer = encode(message)
    assert decode(buffer) == message
    assert decode(memoryview(bytearray(buffer))) == message


def test_a_failure_cannot_play_with_the_terminal() -> None:
    """Control characters of its cause are read as escapes; what steps say stays as it is."""
    failed = StepFailed(1, 0, 0, (), "\x1b[2J")
    assert decode(encode(failed)) == StepFailed(1, 0, 0, (), "\\x1b[2J")
    step = Step(1, 0, (), {"\x1b": WireTensor("uint8", (1,), b"x")})
    assert decode(encode(step)) == step


def test_every_operation_can_travel() -> None:
    """The closed list of operations is covered by the round trips above."""
    tested = {
        "New", "Merge", "Extend", "Filter", "Extract", "Copy", "Trim", "Prepare", "Finalize",
        "Release",
    }  # fmt: skip
    assert {operation.__name__ for operation in get_args(Operation)} == tested


def test_the_layout_is_fixed() -> None:
    """The bytes on the wire are a contract between versions."""
    step = Step(1, 2, (Release(7),), {"tokens": WireTensor("uint8", (1,), b"x")}, True)
    text = (
        b'{"seq": 1, "slot": 2, "operations": [{"handle": 7, "op": "release"}], '
        b'"sample": true, "tensors": ["tokens"]}'
    )
    assert encode(step, 77) == (
        b"MLXP\x02\x01" + struct.pack("<QI", 77, len(text)) + text
        + b"\x01\x02\x01" + struct.pack("<QQ", 1, 1) + b"x"
    )  # fmt: skip
    assert encode(Stop()) == b"MLXP\x02\x04" + bytes(8) + b"\x02\0\0\0{}"


def test_the_send_time_travels_in_the_prefix() -> None:
    """A receiver can tell when the sender's clock showed, without reading the header."""
    assert sent_at(encode(Stop(), (1 << 64) - 1)) == (1 << 64) - 1
    assert sent_at(encode(Stop())) == 0


def test_tensors_are_not_copied() -> None:
    """A sender places a tensor's own memory; a reader gets a view of what it received."""
    data = memoryview(bytearray(b"abc"))
    assert any(
        piece is data for piece in pieces(Step(0, 0, (), {"h": WireTensor("uint8", (3,), data)}))
    )
    buffer = bytearray(encode(Step(0, 0, (), {"h": WireTensor("uint8", (3,), data)})))
    step = decode(buffer)
    assert isinstance(step, Step)
    buffer[-1] = 0
    assert bytes(step.tensors["h"].data) == b"ab\0"


def test_a_hand_made_message_is_accepted() -> None:
    """What the refusals below vary is itself well-formed."""
    new = {"op": "new", "handle": 1, "request": 2, "sampling": SAMPLING}
    merge = {"op": "merge", "handle": 1, "sources": [2, 3]}
    step = {**STEP, "operations": [new, merge]}
    sampling = Sampling(temperature=0.5, seed=3)
    assert decode(raw(step)) == Step(1, 2, (New(1, 2, sampling), Merge(1, (2, 3))), {}, True)


@pytest.mark.parametrize(
    ("buffer", "what"),
    [
        (b"", "ends within a message's prefix"),
        (raw(STEP)[:9], "ends within a message's prefix"),
        (raw(STEP)[:-1], "ends within a message's header"),
        (raw(STEP) + b"x", "1 bytes follow"),
        (raw({}, kind=4) + b"x", "1 bytes follow"),
        (raw(STEP, magic=b"HTTP"), "does not begin like"),
        (raw(STEP, version=1), "message version 1"),
        (raw(STEP, kind=0), "unknown message kind 0"),
        (raw(STEP, kind=5), "unknown message kind 5"),
        (b"MLXP\2\1" + struct.pack("<QI", 0, MAX_HEADER + 1), "message header of 16777217 bytes"),
        (raw({**STEP, "tensors": ["h"]}), "ends within a tensor's header"),
        (
            raw({**STEP, "tensors": ["h", "h"]}) + b"\1\2\1" + struct.pack("<QQ", 1, 1) + b"x",
            "two tensors named 'h'",
        ),
    ],
)
def test_malformed_frames_are_refused(buffer: bytes, what: str) -> None:
    """Prefix, lengths and tensors are checked against what is there."""
    with pytest.raises(WireError, match=what):
        decode(buffer)


def operation(**fields: Any) -> dict[str, Any]:
    """A step header with one operation of these fields."""
    return {**STEP, "operations": [fields]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        "{}".encode("utf-16"),
        b"[" * 100_000,
        b'{"seq": ' + b"9" * 5000 + b"}",
        [],
        None,
        "step",
        {},
        {**STEP, "more": 1},
        {key: value for key, value in STEP.items() if key != "sample"},
        {**STEP, "seq": "1"},
        {**STEP, "seq": 1.0},
        {**STEP, "seq": True},
        {**STEP, "seq": None},
        {**STEP, "seq": 1 << 64},
        {**STEP, "seq": -(1 << 63) - 1},
        {**STEP, "sample": 1},
        {**STEP, "operations": {}},
        {**STEP, "operations": None},
        {**STEP, "operations": "ab"},
        {**STEP, "operations": [[]]},
        {**STEP, "operations": [1]},
        {**STEP, "tensors": {}},
        {**STEP, "tensors": "h"},
        {**STEP, "tensors": [1]},
        operation(),
        operation(handle=1),
        operation(op="explode", handle=1),
        operation(op=[], handle=1),
        operation(op=None, handle=1),
        operation(op="release"),
        operation(op="release", handle="1"),
        operation(op="release", handle=1, more=2),
        operation(op="merge", handle=1, sources={"2": 3}),
        operation(op="merge", handle=1, sources=[2, "3"]),
        operation(op="new", handle=1, request=2, sampling=None),
        operation(op="new", handle=1, request=2, sampling={**SAMPLING, "temperature": "hot"}),
        operation(op="new", handle=1, request=2, sampling={**SAMPLING, "temperature": True}),
        operation(
            op="new", handle=1, request=2, sampling={**SAMPLING, "temperature": float("nan")}
        ),
        operation(op="new", handle=1, request=2, sampling={**SAMPLING, "temperature": 10**400}),
        operation(op="new", handle=1, request=2, sampling={**SAMPLING, "more": 1}),
    ],
)
def test_malformed_headers_are_refused(header: Any) -> None:
    """Only the known fields, operations and exact types are accepted."""
    with pytest.raises(WireError, match="the header of a Step"):
        decode(raw(header))


@pytest.mark.parametrize(
    "message",
    [
        Step(0, 0, (New(1, 2, Sampling(temperature=float("inf"))),)),
        Step(0, 0, (), {"h": WireTensor("uint8", (2,), b"x")}),
        Step(0, 0, (), {"h": WireTensor("uint8", (0,), b"")}),
        StepFailed(0, 0, 0, (), "x" * MAX_HEADER),
    ],
)
def test_what_a_reader_would_refuse_is_not_sent(message: Message) -> None:
    """A sender fails with a typed error of its own."""
    with pytest.raises(WireError):
        encode(message)


@given(messages, st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_mutated_messages_raise_nothing_else(message: Message, data: st.DataObject) -> None:
    """Whatever the bytes, decoding gives a message or a WireError."""
    buffer = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    del buffer[data.draw(st.integers(len(buffer) // 2, len(buffer))) :]
    with suppress(WireError):
        decode(buffer)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*STEP, *SAMPLING, "op", "handle", "sources"]), inner)
    ),
    max_leaves=10,
)


@given(st.integers(1, 4), json_values, st.data())
def test_structured_noise_raises_nothing_else(kind: int, noise: Any, data: st.DataObject) -> None:
    """Valid JSON of the wrong form in any place is a WireError, or happens to be right."""
    header: Any = noise
    if data.draw(st.booleans()):
        new = {"op": "new", "handle": 1, "request": 2, "sampling": dict(SAMPLING)}
        header = {**STEP, "operations": [new]}
        where = data.draw(st.sampled_from([header, new, new["sampling"]]))
        where[data.draw(st.sampled_from(sorted(where)))] = noise
    with suppress(WireError):
        decode(raw(header, kind))
