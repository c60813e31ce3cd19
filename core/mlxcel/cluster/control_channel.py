"""Messages over an authenticated connection, for the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import cattrs
from cattrs.strategies import configure_tagged_union

from mlxcel.cluster.messages import ToCoordinator, ToPeer
from mlxcel.cluster.session import Session
from mlxcel.cluster.sockets import has_expired, read_exactly, read_up_to, reason_of
from mlxcel.errors import ChannelClosed, DeadlineError, WireError
from mlxcel.pipeline.control import speak_of_failures
from mlxcel.pipeline.report import Report
from mlxcel.wire.sealed import HEADER, Opener, Sealer, frame_length, sealed_size
from mlxcel.wire.strict_json import strict_converter, structure
from mlxcel.wire.tensor import Buffer, flat

MAX_MESSAGE = 1 << 20
"""The largest message, in bytes of JSON."""

ControlMessage = ToPeer | ToCoordinator


class ControlChannel:
    """Sealed JSON messages both ways, over a session that it owns from now on.

    Messages of the kind that the other end's role sends are accepted: a coordinator sends
    :data:`ToPeer`, a peer :data:`ToCoordinator`. Make it in the event loop that uses it.

    Attributes:
        session: The session, for the peer's introduction and address.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._kind: Any = ToPeer if session.peer.role == "coordinator" else ToCoordinator
        self._loop = asyncio.get_running_loop()
        self._sealer = Sealer(session.keys.send)
        self._opener = Opener(session.keys.receive)
        self._sending = asyncio.Lock()
        self._reading: asyncio.Task[ControlMessage | None] | None = None
        self._closed = False

    async def send(self, message: ControlMessage, timeout: float) -> None:
        """Send ``message`` within ``timeout`` seconds; any number of tasks may send.

        Raises:
            DeadlineError: The other node took nothing in time; the channel is closed.
            ChannelClosed: The connection is gone.
            WireError: The message is too large.
        """
        text = encode_message(message)
        try:
            async with asyncio.timeout(timeout), self._sending:
                self._check_open()
                try:
                    frame = self._sealer.frame([text])
                    await self._loop.sock_sendall(self.session.sock, frame)
                except BaseException:
                    self.close()  # a part of it may be on its way
                    raise
        except OSError as error:
            if has_expired(error):
                raise DeadlineError(
                    self.session.address,
                    f"{type(message).__name__} to be taken",
                    timeout,
                    "It hangs or is cut off from the network.",
                ) from None
            raise ChannelClosed(self.session.address, reason_of(error)) from error

    async def receive(self, timeout: float | None) -> ControlMessage | None:
        """The next message, or None when the other node has closed between two messages.

        After a time-out, or when the call is cancelled, the channel can still be used. One
        task may receive at a time.

        Raises:
            DeadlineError: Nothing came in time.
            WireError: The message is forged, malformed or not one that this node understands;
                the channel is closed.
            ChannelClosed: The connection broke.
        """
        # A task of its own, so that giving up waiting loses no bytes.
        if self._reading is None:
            self._check_open()
            self._reading = self._loop.create_task(self._read())
        reading = self._reading
        await asyncio.wait({reading}, timeout=timeout)
        if not reading.done():
            raise DeadlineError(
                self.session.address,
                "the next message",
                timeout or 0.0,
                "It hangs or is cut off from the network.",
            )
        self._reading = None
        try:
            message = reading.result()
        except asyncio.CancelledError:
            raise ChannelClosed(self.session.address, "it was closed here") from None
        except (EOFError, OSError) as error:
            reason = "it was closed here" if self._closed else reason_of(error)
            self.close()
            raise ChannelClosed(self.session.address, reason) from error
        except WireError:
            self.session.report_forgery()
            self.close()
            raise
        return message

    async def _read(self) -> ControlMessage | None:
        sock = self.session.sock
        header = await read_up_to(sock, HEADER)
        if not header:
            return None
        header += await read_exactly(sock, HEADER - len(header))
        sealed = await read_exactly(sock, sealed_size(frame_length(header, MAX_MESSAGE)))
        return decode_message(self._opener.frame(header, sealed), self._kind)

    def close(self) -> None:
        """End the connection and wake whoever waits in it; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
        if self.session.sock.fileno() >= 0:
            self._loop.remove_reader(self.session.sock)
            self._loop.remove_writer(self.session.sock)
        self.session.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(self.session.address, "it was closed here")


def encode_message(message: ControlMessage) -> bytes:
    """``message`` as JSON.

    Raises:
        WireError: It is larger than :data:`MAX_MESSAGE`.
    """
    value = _converter.unstructure(message, unstructure_as=ControlMessage)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    if len(text) > MAX_MESSAGE:
        what = type(message).__name__
        raise WireError(f"{what} has {len(text)} bytes; {MAX_MESSAGE} are allowed")
    return text


def decode_message(text: Buffer, kind: Any = ControlMessage) -> ControlMessage:
    """The message of the union ``kind`` that ``text`` is.

    Raises:
        WireError: It is none, or has other fields than this version knows.
    """
    message: ControlMessage = structure(_converter, flat(text), kind, "a control message")
    return message


def _make_converter() -> cattrs.Converter:
    converter = strict_converter(escaping=True)
    speak_of_failures(converter)
    configure_tagged_union(Report, converter, tag_name="report")
    for union in (ToPeer, ToCoordinator, ControlMessage):
        configure_tagged_union(union, converter, tag_name="message")
    return converter


_converter = _make_converter()
