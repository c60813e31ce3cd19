"""Pipeline messages as bytes: a fixed prefix, a JSON header, then the step's tensors.

All numbers are little-endian::

    4 bytes  magic    b"MLXP"
    u8       version  2
    u8       kind     1 Step, 2 Tokens, 3 StepFailed, 4 Stop
    u64      sent     nanoseconds on the sender's monotonic clock; 0 where nobody measures
    u32      length   of the JSON header, at most 16 MiB
    ...      header   the message's fields; a step names its tensors in "tensors"
    ...      tensors  in that order, in the format of wire.tensor; only steps have any

Batch operations stand in the header as objects tagged by ``"op"``. A reader accepts exactly
the fields it knows, with exactly their types.
"""

from __future__ import annotations

import json
import struct

import attrs
import cattrs
from cattrs.strategies import configure_tagged_union

from mlxcel.errors import WireError
from mlxcel.pipeline.operations import Operation
from mlxcel.pipeline.step import Message, Step, StepFailed, Stop, Tokens
from mlxcel.wire import tensor as wire_tensor
from mlxcel.wire.strict_json import strict_converter, structure
from mlxcel.wire.tensor import MAX_BYTES, Buffer, WireTensor

MAGIC = b"MLXP"
VERSION = 2
MAX_HEADER = 16 << 20

_PREFIX = struct.Struct("<4sBBQI")


@attrs.frozen
class StepHeader:
    """A :class:`Step` without its tensors, whose names it lists."""

    seq: int
    slot: int
    operations: tuple[Operation, ...]
    sample: bool
    tensors: tuple[str, ...]


Header = StepHeader | Tokens | StepFailed | Stop

_KINDS: dict[int, type[Header]] = {1: StepHeader, 2: Tokens, 3: StepFailed, 4: Stop}
_CODES = {cls: kind for kind, cls in _KINDS.items()}


def encode(message: Message, sent: int = 0) -> bytes:
    """``message``, whose tensors are :class:`WireTensor`, as one buffer; ``sent`` is when.

    Raises:
        WireError: A tensor's fields do not agree, or a number does not fit the format.
    """
    return b"".join(pieces(message, sent))


def pieces(message: Message, sent: int = 0) -> list[Buffer]:
    """What :func:`encode` joins, so that a sender can place it without another copy."""
    tensors: dict[str, WireTensor] = {}
    header: Header
    if isinstance(message, Step):
        tensors = dict(message.tensors)
        header = StepHeader(
            message.seq, message.slot, message.operations, message.sample, tuple(tensors)
        )
    else:
        header = message
    try:
        text = json.dumps(_converter.unstructure(header), allow_nan=False).encode()
    except ValueError as error:
        raise WireError(f"a {type(message).__name__} that JSON cannot hold: {error}") from error
    if len(text) > MAX_HEADER:
        raise WireError(f"a message header of {len(text)} bytes; {MAX_HEADER} are allowed")
    result: list[Buffer] = [
        _PREFIX.pack(MAGIC, VERSION, _CODES[type(header)], sent, len(text)),
        text,
    ]
    for tensor in tensors.values():
        result.extend(wire_tensor.encode(tensor))
    return result


def sent_at(buffer: Buffer) -> int:
    """When the well-formed message in ``buffer`` was sent, as its prefix says."""
    sent: int = _PREFIX.unpack_from(buffer)[3]
    return sent


def decode(buffer: Buffer, *, max_bytes: int = MAX_BYTES) -> Message:
    """The one message that fills ``buffer``; its tensors are views of the buffer.

    ``max_bytes`` bounds each tensor.

    Raises:
        WireError: The bytes are anything else than one whole, well-formed message.
    """
    view = wire_tensor.flat(buffer)
    if len(view) < _PREFIX.size:
        raise WireError("the data ends within a message's prefix")
    magic, version, kind, _, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError("the data does not begin like a pipeline message")
    if version != VERSION:
        raise WireError(f"message version {version}; this mlxcel speaks version {VERSION}")
    cls = _KINDS.get(kind)
    if cls is None:
        raise WireError(f"unknown message kind {kind}")
    if length > MAX_HEADER:
        raise WireError(f"a message header of {length} bytes; {MAX_HEADER} are allowed")
    offset = _PREFIX.size + length
    if offset > len(view):
        raise WireError("the data ends within a message's header")
    what = "Step" if cls is StepHeader else cls.__name__
    converter = _converter if cls is StepHeader else _answers
    header: Header = structure(
        converter, view[_PREFIX.size : offset], cls, f"the header of a {what}"
    )

    if not isinstance(header, StepHeader):
        message: Message = header
    else:
        tensors = {}
        for name in header.tensors:
            if name in tensors:
                raise WireError(f"a step has two tensors named {name!r:.100}")
            tensors[name], offset = wire_tensor.decode(view, offset, max_bytes=max_bytes)
        message = Step(header.seq, header.slot, header.operations, tensors, header.sample)
    if offset != len(view):
        raise WireError(f"{len(view) - offset} bytes follow the message")
    return message


def _make_converter() -> cattrs.Converter:
    converter = strict_converter()
    configure_tagged_union(
        Operation, converter, tag_generator=lambda cls: cls.__name__.lower(), tag_name="op"
    )
    return converter


_converter = _make_converter()
_answers = strict_converter(escaping=True)  # the text of a failure is shown, a step's are not
