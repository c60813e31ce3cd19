"""What an engine and a worker process say to each other beside the steps: JSON frames."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import attrs
import cattrs
from cattrs.strategies import configure_tagged_union

from mlxcel.errors import MlxcelError, WorkerFailed
from mlxcel.pipeline.report import Ended, Failed, Hello, Loaded, Loading
from mlxcel.stage.contract import StageSpec
from mlxcel.wire.frame import receive_frame, send_frame
from mlxcel.wire.strict_json import strict_converter, structure

MAX_CONTROL = 1 << 20


@attrs.frozen
class Job:
    """The engine's first message: which stage to be.

    ``credits`` are the steps in flight at most, ``timeout`` the seconds any wait may last,
    ``without`` the plugins that the user left out.
    """

    spec: StageSpec
    credits: int
    timeout: float
    without: tuple[str, ...]


Control = Job | Hello | Loading | Loaded | Failed | Ended


def send_control(sock: socket.socket, message: Control) -> None:
    """Send one message.

    Raises:
        OSError: The peer is gone or takes nothing.
    """
    text = json.dumps(_converter.unstructure(message, unstructure_as=Control))
    send_frame(sock, [text.encode()])


def receive_control(sock: socket.socket) -> Control | None:
    """The next message, or None when the peer has closed.

    Raises:
        WireError: The bytes are no control message.
        OSError: The connection broke, or its deadline has passed.
    """
    frame = receive_frame(sock, MAX_CONTROL)
    if frame is None:
        return None
    message: Control = structure(_converter, frame, Control, "a control message")
    return message


def _error_out(error: BaseException) -> dict[str, Any]:
    """An error in words: objects of Python never cross a process boundary."""
    code = error.exit_code if isinstance(error, MlxcelError) else 1
    text = str(error) if isinstance(error, MlxcelError) else f"{type(error).__name__}: {error}"
    return {"kind": type(error).__name__, "text": text, "exit_code": code}


def _failed_in(value: dict[str, Any], _: Any) -> Failed:
    stage, error = int(value["stage"]), value["error"]
    return Failed(
        stage,
        WorkerFailed(stage, str(error["kind"]), str(error["text"]), int(error["exit_code"])),
    )


def _make_converter() -> cattrs.Converter:
    converter = strict_converter()
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    converter.register_unstructure_hook_func(
        lambda cls: isinstance(cls, type) and issubclass(cls, BaseException), _error_out
    )
    converter.register_structure_hook(Failed, _failed_in)
    configure_tagged_union(Control, converter, tag_name="message")
    return converter


_converter = _make_converter()
