"""Frames that nobody on the way can read or change: AES-256-GCM in chunks.

All numbers are little-endian::

    u64  length   of the frame's plaintext
    then for every chunk of it, at least one even if it is empty:
    ...  the chunk, encrypted
    16   its tag

All chunks have 256 KiB but the first, which has what that leaves: where a tensor of some power of
two follows its header, the header is a chunk of its own, and no chunk is joined of two.

The nonce of a chunk is the number of chunks sealed before it with the same key, which does not
travel; the length stands in the clear and is authenticated with every chunk. So a chunk that is
changed, repeated, left out or moved does not open. A reader that takes chunk by chunk needs no more
memory than one until the first one has proved that the length is genuine; one that waits for the
whole frame (:meth:`Opener.frame`) must bound its length, and collect no more than has come.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mlxcel.errors import WireError
from mlxcel.wire.frame import MAX_FRAME
from mlxcel.wire.tensor import Buffer, flat

HEADER = 8
TAG = 16
CHUNK = 256 << 10
"""The plaintext bytes of every chunk of a frame but its first."""

AT_ONCE = 2
"""How many chunks are sealed before they are sent: an end's cipher and the other end's kernel then
take turns instead of waiting for each other. More no longer fit a core's cache."""

MAX_CHUNKS = 1 << 63
"""How many chunks one key may seal; a nonce is never used twice."""

_LENGTH = struct.Struct("<Q")


class Sealer:
    """Seals the frames of one direction of one connection, one at a time: it has no lock.

    Args:
        key: 32 bytes, used for this direction of this connection only.

    Attributes:
        sequence: Chunks sealed so far.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._out = memoryview(bytearray(HEADER + AT_ONCE * (CHUNK + TAG)))
        self.sequence = 0

    def seal(self, pieces: Sequence[Buffer]) -> Iterable[memoryview]:
        """The bytes of one frame in parts; each is valid until the next is asked for.

        Large pieces are encrypted where they are; only what shares a chunk is joined. All must
        be asked for, or the reader cannot open what follows.

        Raises:
            WireError: The key has sealed all that it may.
        """
        length = sum(
            [piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces]
        )
        header = _LENGTH.pack(length)
        self._out[:HEADER] = header
        if length > CHUNK:
            return self._seal_chunks(header, pieces)
        return (self._out[: self._seal(header, b"".join(pieces), HEADER)],)

    def _seal_chunks(self, header: bytes, pieces: Sequence[Buffer]) -> Iterator[memoryview]:
        chunks = split([flat(piece) for piece in pieces])
        end = HEADER  # before the first chunk
        while some := tuple(islice(chunks, AT_ONCE)):
            for plain in some:
                end = self._seal(header, plain, end)
            yield self._out[:end]
            end = 0

    def _seal(self, header: bytes, plain: Buffer, start: int) -> int:
        """Encrypt one chunk to ``start``; returns where it ends."""
        end = start + len(plain) + TAG
        nonce = _nonce(self.sequence)
        self.sequence += 1  # before anything can fail: no nonce is used twice
        self._cipher.encrypt_into(nonce, plain, header, self._out[start:end])
        return end

    def frame(self, pieces: Sequence[Buffer]) -> bytes:
        """One whole frame as bytes, for short messages."""
        return b"".join(bytes(part) for part in self.seal(pieces))


class Opener:
    """Opens the frames of one direction of one connection; see :class:`Sealer`."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self.sequence = 0

    def open_into(self, header: Buffer, sealed: Buffer, into: memoryview) -> None:
        """Decrypt the next chunk, tag included, into ``into``, which it must fill.

        Args:
            header: The eight bytes at the frame's beginning.

        Raises:
            WireError: It is not what the other end has sealed as its next chunk. Nothing that
                follows can be opened; the connection must close.
        """
        try:
            self._cipher.decrypt_into(_nonce(self.sequence), sealed, header, into)
        except InvalidTag:
            raise WireError(
                "a sealed chunk does not open: it was forged, damaged, repeated or out of order"
            ) from None
        self.sequence += 1

    def frame(self, header: Buffer, sealed: Buffer) -> memoryview:
        """The plaintext of a whole frame whose chunks are all here.

        Raises:
            WireError: It does not open, or is not of the length that its header says.
        """
        length = frame_length(header)
        view = flat(sealed)
        if len(view) != sealed_size(length):
            raise WireError(f"a sealed frame of {len(view)} bytes for a text of {length}")
        plain = memoryview(bytearray(length))
        start = offset = 0
        for size in chunk_sizes(length):
            stop = start + size + TAG
            self.open_into(header, view[start:stop], plain[offset : offset + size])
            start, offset = stop, offset + size
        return plain


def frame_length(header: Buffer, max_frame: int = MAX_FRAME) -> int:
    """The plaintext length that the eight bytes ``header`` state.

    Raises:
        WireError: It is more than ``max_frame``.
    """
    (length,) = _LENGTH.unpack(header)
    if length > max_frame:
        raise WireError(f"a frame of {length} bytes; {max_frame} are allowed")
    return int(length)


def sealed_size(length: int) -> int:
    """How many bytes follow the header of a frame whose plaintext has ``length`` bytes."""
    return length + TAG * max(1, -(-length // CHUNK))


def chunk_sizes(length: int) -> Iterator[int]:
    """The plaintext bytes of each chunk of a frame of ``length`` bytes."""
    yield length % CHUNK or min(length, CHUNK)
    for _ in range(-(-length // CHUNK) - 1):
        yield CHUNK


def split(views: Sequence[memoryview]) -> Iterator[Buffer]:
    """The bytes of ``views``, one after the other, in chunks of :func:`chunk_sizes`.

    A chunk that lies within one view is a view of it; others are joined.
    """
    rest = (view for view in views if len(view))
    view = memoryview(b"")
    for size in chunk_sizes(sum(map(len, views))):
        parts = []
        while size:
            view = view or next(rest)
            part, view = view[:size], view[size:]
            parts.append(part)
            size -= len(part)
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def _nonce(sequence: int) -> bytes:
    if sequence >= MAX_CHUNKS:
        raise WireError("this connection has sealed all that its key may; connect again")
    return sequence.to_bytes(12, "little")
