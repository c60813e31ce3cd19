"""Whatever comes from a network is accepted or refused, quickly and within bounds."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxcel.errors import WireError
from mlxcel.testing import fuzz as fuzz_module
from mlxcel.testing.fuzz import Found, check, fuzz, main, mutate
from mlxcel.testing.fuzz_targets import Target, targets

TARGETS = {target.name: target for target in targets()}

structured = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Five tests below: 2,000 structured inputs."""


@pytest.mark.slow
def test_a_million_damaged_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    """All decoders survive what `make fuzz` does."""
    main(["--inputs", "1000000"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TARGETS)
    assert sum(int(line.split(": ")[1].split()[0]) for line in lines) >= 1_000_000


@pytest.mark.parametrize("name", TARGETS)
def test_some_damaged_inputs(name: str) -> None:
    """A few hundred for each decoder at every run, and the undamaged samples are accepted."""
    fuzz(TARGETS[name], 300, seed=7)


def test_a_seed_makes_the_same_inputs() -> None:
    """What was found can be found again."""
    samples = (b"some words", b"and others")
    one, two = (
        [mutate(random.Random(3), samples) for _ in range(50)],
        [mutate(random.Random(3), samples) for _ in range(50)],
    )
    assert one == two
    source = random.Random(3)
    assert len({mutate(source, samples) for _ in range(50)}) > 40


def careless(data: bytes) -> object:
    """A decoder that believes a length, an index and a name."""
    if len(data) < 3:
        raise WireError("too short")
    return {1: "one"}[data[0]]


def test_a_careless_decoder_is_found() -> None:
    """The fuzzer notices what it is there for, and says for which bytes."""
    with pytest.raises(Found, match=r"careless: KeyError: .* bytes are ") as caught:
        fuzz(Target("careless", careless, (b"\1abc",)), 1000, seed=0)
    with pytest.raises(KeyError):
        careless(caught.value.data)


def test_a_greedy_decoder_is_found() -> None:
    """Memory by a length that was not checked."""

    def greedy(data: bytes) -> object:
        return bytearray(int.from_bytes(data[:3], "little"))

    with pytest.raises(Found, match="it allocated"):
        fuzz(Target("greedy", greedy, (b"\1\0\0",)), 1000, seed=0)


def test_a_slow_decoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that grows with what a stranger says."""
    clock = iter([0.0, 5.0])
    monkeypatch.setattr(fuzz_module.time, "thread_time", lambda: next(clock))
    with pytest.raises(Found, match=r"it took 5\.0 s"):
        check(Target("slow", bytes, (b"",)), b"x")


# Inputs that are well-formed where it counts, and wrong somewhere.

numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 1 << 63, 1 << 64, 1e308])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def damaged_json(draw: st.DrawFn, texts: tuple[bytes, ...]) -> bytes:
    """One of the JSON ``texts`` with one value, somewhere within, replaced, removed or added."""
    whole = {"": json.loads(draw(st.sampled_from(texts)))}
    place: Any = whole
    key: Any = ""
    while (inner := place[key]) and isinstance(inner, (dict, list)) and draw(st.booleans()):
        place = inner
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = draw(st.sampled_from(keys))
    match draw(st.integers(0, 2)):
        case 0:
            place[key] = draw(values)
        case 1 if place is not whole:
            del place[key]
        case _:
            if isinstance(place, dict):
                place[draw(st.text(max_size=8))] = draw(values)
            else:
                place.append(draw(values))
    return json.dumps(whole.get("")).encode()


def samples(name: str) -> tuple[bytes, ...]:
    return TARGETS[name].samples


@structured
@given(damaged_json(samples("control message")))
def test_structured_control_messages(text: bytes) -> None:
    """Values of any type and size in any place."""
    fuzz_check("control message", text)


@structured
@given(damaged_json(samples("worker message")))
def test_structured_worker_messages(text: bytes) -> None:
    """The same between a worker and its owner."""
    fuzz_check("worker message", text)


@structured
@given(damaged_json(samples("claim with a right proof")))
def test_structured_claims(body: bytes) -> None:
    """Introductions by somebody who knows the secret."""
    fuzz_check("claim with a right proof", body)


HEADER = struct.Struct("<4sBBQI")


@structured
@given(
    damaged_json(
        tuple(s[HEADER.size : HEADER.size + HEADER.unpack_from(s)[4]] for s in samples("message"))
    ),
    st.integers(0, 5),
    st.integers(-2, 2),
    st.lists(st.sampled_from(samples("tensor")), max_size=3),
)
def test_structured_messages(header: bytes, kind: int, off: int, tensors: list[bytes]) -> None:
    """Headers that do not fit their kind, their length or the tensors behind them."""
    magic, version, *_ = HEADER.unpack_from(samples("message")[0])
    prefix = HEADER.pack(magic, version, kind, 0, max(0, len(header) + off))
    fuzz_check("message", prefix + header + b"".join(tensors))


small = st.integers(0, 255)
sizes = st.integers(0, 9) | st.sampled_from([1 << 20, 1 << 32, 1 << 63, (1 << 64) - 1])


@structured
@given(st.integers(0, 2), st.integers(0, 16), st.lists(sizes, max_size=9), sizes, st.binary())
def test_structured_tensors(
    kind: int, dtype: int, dims: list[int], length: int, data: bytes
) -> None:
    """Dimensions whose product wraps around, and lengths that do not fit."""
    header = struct.pack(f"<BBB{len(dims)}Q", kind, dtype, len(dims), *dims)
    fuzz_check("tensor", header + struct.pack("<Q", length) + data)
    fuzz_check("tensor", header + struct.pack("<Q", len(data)) + data)


def fuzz_check(name: str, data: bytes) -> None:
    fuzz_module.tracemalloc.start()
    try:
        check(TARGETS[name], data)
    finally:
        fuzz_module.tracemalloc.stop()
