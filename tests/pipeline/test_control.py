"""Control messages between an engine and a worker process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import CheckpointError, RankLost, WireError, WorkerFailed
from mlxcel.pipeline.control import (
    Alive,
    Control,
    DataSocket,
    Job,
    receive_control,
    receive_socket,
    send_control,
    send_socket,
)
from mlxcel.pipeline.report import Beat, Ended, Failed, Hello, Loaded, Loading, Software
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.contract import Keys, TransportOptions
from mlxcel.wire.frame import send_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize(
    "message",
    [
        Job(StageSpec(Path("folder"), "llama", 1, 3, 4, 8, "float32"), 6, 2.5),
        DataSocket("receive", "engine to stage 0", "engine"),
        DataSocket(
            "send",
            "1-2",
            "10.0.0.2:19001",
            "wire",
            Keys(bytes(32), bytes(range(32))),
            "tp_collective",
            TransportOptions(1e-4, 1 << 20),
        ),
        Alive(),
        Hello(4711, Software({"mlx": "1.2", "BLAS": "wheel"}), "gpu", True, 1 << 34),
        Loading(0, 10, 20),
        Loaded(0, 20, 1.5),
        Ended(2, 0.25, None, None),
        Ended(2, 0.25, 1.0, 2.0),
        Beat(1, 0.5, 0.25, 7, (120.0, 95.5), 1 << 30, 4096),
    ],
)
def test_messages_survive_the_way(pair: Pair, message: Control) -> None:
    """Every message arrives equal to what was sent."""
    send_control(pair[0], message)
    assert receive_control(pair[1]) == message


def test_a_socket_travels_behind_its_description(pair: Pair) -> None:
    """Sockets and messages keep their order, and what arrives is the same connection."""
    first, second = DataSocket("receive", "a", "x"), DataSocket("send", "b", "y")
    others = [socket.socketpair() for _ in range(2)]
    send_socket(pair[0], first, others[0][0])
    send_control(pair[0], Alive())
    send_socket(pair[0], second, others[1][0])
    assert receive_control(pair[1]) == first
    with others[0][1] as far, receive_socket(pair[1]) as near:
        near.sendall(b"one")
        assert far.recv(10) == b"one"
    assert receive_control(pair[1]) == Alive()
    assert receive_control(pair[1]) == second
    with others[1][1] as far, receive_socket(pair[1]) as near:
        near.sendall(b"two")
        assert far.recv(10) == b"two"
    for here, _ in others:
        here.close()


def test_a_socket_that_does_not_come_is_a_wire_error(pair: Pair) -> None:
    """A description without its socket is refused."""
    pair[0].sendall(b"\0")
    with pytest.raises(WireError, match="no socket follows"):
        receive_socket(pair[1])


def test_errors_travel_as_words(pair: Pair) -> None:
    """An error arrives with its kind, its text and its exit code, never as an object."""
    error = CheckpointError(Path("model"), "is damaged.", "Download it again.")
    send_control(pair[0], Failed(3, error))
    failed = receive_control(pair[1])
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, WorkerFailed)
    assert (failed.stage, failed.error.kind, failed.error.exit_code) == (3, "CheckpointError", 1)
    assert str(failed.error) == "stage 3: model: is damaged. Download it again."


def test_an_error_that_is_passed_on_stays_as_it_was(pair: Pair) -> None:
    """A supervisor that tells on what its worker said adds no words of its own."""
    said = WorkerFailed(3, "CheckpointError", "model: is damaged. Download it again.", 2)
    send_control(pair[0], Failed(3, said))
    failed = receive_control(pair[1])
    assert isinstance(failed, Failed) and isinstance(failed.error, WorkerFailed)
    assert attrs.astuple(failed.error) == attrs.astuple(said)


def test_foreign_errors_say_their_type(pair: Pair) -> None:
    """An error that is not mlxcel's own is told with the name of its type."""
    send_control(pair[0], Failed(0, KeyError("gone")))
    failed = receive_control(pair[1])
    assert isinstance(failed, Failed)
    assert str(failed.error) == "stage 0: KeyError: 'gone'"


def test_the_end_of_the_peer_is_none(pair: Pair) -> None:
    """A closed connection is the end, not an error."""
    pair[0].close()
    assert receive_control(pair[1]) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "stage", "error", "kind", "spec", "done", "software"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    _JSON
    | st.fixed_dictionaries({"message": st.sampled_from(["Failed", "Job", "Hello", "DataSocket"])})
)
def test_junk_is_a_wire_error(value: object) -> None:
    """JSON that is no control message is refused as such, whatever it looks like."""
    a, b = socket.socketpair()
    with a, b:
        send_frame(a, [json.dumps(value).encode()])
        with pytest.raises(WireError):
            receive_control(b)


@pytest.mark.parametrize("junk", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_wire_error(pair: Pair, junk: bytes) -> None:
    """Bytes that are no JSON are refused too."""
    send_frame(pair[0], [junk])
    with pytest.raises(WireError):
        receive_control(pair[1])


def test_a_lost_rank_keeps_its_place(pair: tuple[socket.socket, socket.socket]) -> None:
    """Which rank another one misses is told as numbers, also by whoever passes it on."""
    error: Exception = RankLost(2, 1, "the all-reduce", "it is gone", broken=True)
    for _ in range(2):
        send_control(pair[0], Failed(2, error, 0))
        failed = receive_control(pair[1])
        assert isinstance(failed, Failed) and isinstance(failed.error, WorkerFailed)
        assert (failed.error.kind, failed.error.lost) == ("RankLost", (2, 1))
        assert failed.error.broken == "it is gone"
        error = failed.error
