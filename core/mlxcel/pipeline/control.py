"""What a worker process and its owner say to each other beside the steps: JSON frames.

The owner is an engine, or the supervisor of a peer. It sends a :class:`Job` and, each with an open
socket (see unix(7), SCM_RIGHTS), the :class:`DataSocket` that the job needs, see
:func:`mlxcel.pipeline.sockets.sockets_of`; the worker sends the rest.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from cattrs.strategies import configure_tagged_union

from mlxcel.errors import MlxcelError, RankLost, WireError, WorkerFailed
from mlxcel.pipeline.report import Beat, Ended, Failed, Hello, Loaded, Loading
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.contract import Keys, TrafficClass, TransportOptions
from mlxcel.wire.frame import receive_frame, send_frame
from mlxcel.wire.strict_json import strict_converter, structure
from mlxcel.wire.tensor import Buffer, flat

MAX_CONTROL = 1 << 20

RANK_SECONDS = 30.0
"""How long the ranks of a stage may make each other wait, if nothing else is said."""


@attrs.frozen
class Job:
    """Which stage to be.

    ``credits`` are the steps in flight at most, ``timeout`` the seconds any wait may last, and
    ``rank_timeout`` those that the other ranks of the stage may make this one wait for.
    ``collectives`` is how the ranks reach each other: ``transport`` over the group's sockets,
    else a backend of ``mx.distributed``, with the addresses of the ranks in ``fabric``.
    """

    spec: StageSpec
    credits: int
    timeout: float
    rank_timeout: float = RANK_SECONDS
    collectives: str = "transport"
    fabric: tuple[str, ...] = ()


@attrs.frozen
class DataSocket:
    """What the socket is that follows this message.

    ``direction`` is the worker's: it receives steps or sends them on, or talks with ``rank`` of
    its group. ``name`` is the link's and
    ``peer`` whoever is at the other end, for errors. ``transport`` is the plugin that carries the
    frames, with ``keys`` and for ``traffic``; empty for frames in the clear.
    """

    direction: Literal["receive", "send", "group"]
    name: str
    peer: str
    transport: str = ""
    keys: Keys | None = None
    traffic: TrafficClass = "pp_activation"
    options: TransportOptions = attrs.field(factory=TransportOptions)
    rank: int = 0


@attrs.frozen
class Alive:
    """The worker's process runs; said twice a second from its start to its end."""


FromWorker = Hello | Alive | Loading | Loaded | Failed | Ended | Beat
Control = Job | DataSocket | FromWorker


def send_control(sock: socket.socket, message: Control) -> None:
    """Send one message.

    Raises:
        OSError: The peer is gone or takes nothing.
    """
    send_frame(sock, [encode_control(message)])


def receive_control(sock: socket.socket) -> Control | None:
    """The next message, or None when the peer has closed.

    Raises:
        WireError: The bytes are no control message.
        OSError: The connection broke, or its deadline has passed.
    """
    frame = receive_frame(sock, MAX_CONTROL)
    return None if frame is None else decode_control(frame)


def encode_control(message: Control) -> bytes:
    """One message as the content of a frame."""
    return json.dumps(_converter.unstructure(message, unstructure_as=Control)).encode()


def decode_control(frame: Buffer) -> Control:
    """The message in a frame.

    Raises:
        WireError: The bytes are no control message.
    """
    message: Control = structure(_converter, flat(frame), Control, "a control message")
    return message


def send_socket(control: socket.socket, message: DataSocket, sock: socket.socket) -> None:
    """Hand ``sock`` to the worker; the caller still has to close its own copy.

    Raises:
        OSError: The worker is gone or takes nothing.
    """
    send_control(control, message)
    socket.send_fds(control, [b"\0"], [sock.fileno()])


def receive_socket(control: socket.socket) -> socket.socket:
    """The socket that follows a :class:`DataSocket`.

    Raises:
        WireError: None does.
        OSError: The connection broke.
    """
    # A file descriptor travels with a byte of its own, which no other read can swallow.
    _, numbers, _, _ = socket.recv_fds(control, 1, 1)
    if not numbers:
        raise WireError("no socket follows its description")
    return socket.socket(fileno=numbers[0])


def speak_of_failures(converter: cattrs.Converter) -> None:
    """Have ``converter`` write errors in words, and read them as :class:`WorkerFailed`."""
    converter.register_unstructure_hook_func(
        lambda cls: isinstance(cls, type) and issubclass(cls, BaseException),
        lambda error: converter.unstructure(_error_out(error)),
    )
    converter.register_structure_hook(Failed, lambda value, _: _failed_in(value, converter))


def _error_out(error: BaseException) -> dict[str, Any]:
    """An error in words: objects of Python never cross a process boundary."""
    if isinstance(error, WorkerFailed):  # in words already: a supervisor passes it on
        words = {"kind": error.kind, "text": error.text, "exit_code": error.exit_code}
        if error.lost is None:
            return words
        return {**words, "lost": list(error.lost), "broken": error.broken}
    code = error.exit_code if isinstance(error, MlxcelError) else 1
    text = str(error) if isinstance(error, MlxcelError) else f"{type(error).__name__}: {error}"
    words = {"kind": type(error).__name__, "text": text, "exit_code": code}
    if isinstance(error, RankLost):
        words |= {"lost": [error.stage, error.rank], "broken": error.how if error.broken else ""}
    return words


def _failed_in(value: dict[str, Any], converter: cattrs.Converter) -> Failed:
    stage, rank, error = int(value["stage"]), int(value["rank"]), value["error"]
    kind, text, broken = (
        converter.structure(words, str)
        for words in (error["kind"], error["text"], error.get("broken", ""))
    )
    code = int(error["exit_code"])
    lost = None
    if "lost" in error:
        lost_stage, lost_rank = error["lost"]
        lost = int(lost_stage), int(lost_rank)
    return Failed(stage, WorkerFailed(stage, kind, text, code, lost=lost, broken=broken), rank)


def _make_converter() -> cattrs.Converter:
    converter = strict_converter(escaping=True)
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    speak_of_failures(converter)
    configure_tagged_union(Control, converter, tag_name="message")
    return converter


_converter = _make_converter()
