"""Sealed frames: what is sealed opens once, in order, unchanged, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import WireError
from mlxcel.wire import sealed
from mlxcel.wire.sealed import (
    CHUNK,
    HEADER,
    TAG,
    Opener,
    Sealer,
    frame_length,
    sealed_size,
    split,
)

KEY = bytes(range(32))


def open_frame(opener: Opener, frame: bytes) -> bytes:
    return bytes(opener.frame(frame[:HEADER], frame[HEADER:]))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_a_frame_opens_to_what_was_sealed(size: int) -> None:
    """Frames of any number of chunks, and their size on the wire."""
    plain = bytes(range(251)) * (size // 251 + 1)
    plain = plain[:size]
    frame = Sealer(KEY).frame([plain])
    assert len(frame) == HEADER + sealed_size(size)
    assert open_frame(Opener(KEY), frame) == plain


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_how_a_frame_is_cut_into_pieces_does_not_matter(pieces: list[bytes]) -> None:
    """Only the bytes of all pieces together are sealed."""
    assert Sealer(KEY).frame(pieces) == Sealer(KEY).frame([b"".join(pieces)])


def test_pieces_may_cross_chunks_and_large_ones_are_not_copied() -> None:
    """A chunk within one piece is a view of it."""
    large = memoryview(bytes(3 * CHUNK))
    chunks = list(split([memoryview(b"head"), large, memoryview(b"tail")]))
    assert [len(chunk) for chunk in chunks] == [8, CHUNK, CHUNK, CHUNK]
    assert chunks[1].obj is large.obj  # type: ignore[union-attr]
    assert b"".join(chunks) == b"head" + large + b"tail"


def test_what_stands_before_a_tensor_is_a_chunk_by_itself() -> None:
    """So that a tensor of some power of two is never copied to be joined with it."""
    tensor = memoryview(bytes(4 * CHUNK))
    head, *chunks = split([memoryview(b"he"), memoryview(b"ad"), tensor])
    assert head == b"head"
    assert all(chunk.obj is tensor.obj for chunk in chunks)  # type: ignore[union-attr]


def test_an_empty_piece_makes_no_copy() -> None:
    """Wherever it stands, chunks within one piece are views of it."""
    large = memoryview(bytes(2 * CHUNK))
    chunks = list(split([memoryview(b""), large, memoryview(b"")]))
    assert [len(chunk) for chunk in chunks] == [CHUNK, CHUNK]
    assert all(chunk.obj is large.obj for chunk in chunks)  # type: ignore[union-attr]
    assert list(split([memoryview(b"")])) == [b""]


def test_equal_frames_look_different() -> None:
    """The same words twice give no hint that they are the same."""
    sealer = Sealer(KEY)
    assert sealer.frame([b"again"]) != sealer.frame([b"again"])


def test_no_byte_of_a_frame_can_be_changed() -> None:
    """Every single bit of length, text and tags is protected."""
    frame = Sealer(KEY).frame([b"words"])
    for position in range(len(frame)):
        for bit in range(8):
            forged = bytearray(frame)
            forged[position] ^= 1 << bit
            with pytest.raises(WireError):
                open_frame(Opener(KEY), bytes(forged))


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [0, 1, 0]])
def test_frames_open_in_their_order_only(order: list[int]) -> None:
    """Dropped, repeated and reordered frames do not open."""
    sealer, opener = Sealer(KEY), Opener(KEY)
    frames = [sealer.frame([bytes([n])]) for n in range(3)]
    *good, bad = order
    for n in good:
        assert open_frame(opener, frames[n]) == bytes([n])
    with pytest.raises(WireError, match="does not open"):
        open_frame(opener, frames[bad])


def test_chunks_of_one_frame_cannot_be_swapped() -> None:
    """The order within a frame is protected too."""
    frame = Sealer(KEY).frame([bytes(CHUNK) + b"\1" * CHUNK])
    size = CHUNK + TAG
    head, first, second = frame[:HEADER], frame[HEADER : HEADER + size], frame[HEADER + size :]
    with pytest.raises(WireError):
        open_frame(Opener(KEY), head + second + first)


def test_a_chunk_cannot_stand_for_a_frame() -> None:
    """A frame cut at a chunk's end does not open under another length."""
    frame = Sealer(KEY).frame([bytes(2 * CHUNK)])
    forged = CHUNK.to_bytes(HEADER, "little") + frame[HEADER : HEADER + CHUNK + TAG]
    with pytest.raises(WireError):
        open_frame(Opener(KEY), forged)


def test_the_other_directions_key_opens_nothing() -> None:
    """What one said cannot be returned to it as an answer."""
    with pytest.raises(WireError):
        open_frame(Opener(bytes(32)), Sealer(KEY).frame([b"hello"]))


@pytest.mark.parametrize("sealed_bytes", [b"", bytes(TAG - 1), bytes(TAG + 4)])
def test_a_frame_of_the_wrong_size_is_refused(sealed_bytes: bytes) -> None:
    """What follows the header must be exactly what the length says."""
    with pytest.raises(WireError, match="sealed frame"):
        Opener(KEY).frame((5).to_bytes(HEADER, "little"), sealed_bytes)


def test_lengths_above_the_cap_are_refused() -> None:
    """The length is checked before anybody allocates by it."""
    header = (1000).to_bytes(HEADER, "little")
    assert frame_length(header, 1000) == 1000
    with pytest.raises(WireError, match="1000 bytes; 999 are allowed"):
        frame_length(header, 999)
    with pytest.raises(WireError):
        frame_length(b"\xff" * HEADER)


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that has sealed all that it may seals nothing more."""
    monkeypatch.setattr(sealed, "MAX_CHUNKS", 2)
    sealer = Sealer(KEY)
    sealer.frame([b"1"])
    sealer.frame([b"2"])
    with pytest.raises(WireError, match="connect again"):
        sealer.frame([b"3"])
