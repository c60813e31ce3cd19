"""Control messages: all of them, sealed, each in its direction only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from mlxcel.cluster.control_channel import (
    MAX_MESSAGE,
    ControlChannel,
    ControlMessage,
    decode_message,
    encode_message,
)
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    ModelIdentity,
    Offer,
    Ping,
    Pong,
    Refused,
    Release,
    Reported,
    ToCoordinator,
    ToPeer,
)
from mlxcel.cluster.session import Session
from mlxcel.errors import ChannelClosed, DeadlineError, StageError, WireError, WorkerFailed
from mlxcel.pipeline.report import Beat, Ended, Failed, Loaded, Loading
from mlxcel.transport import Keys
from mlxcel.wire.sealed import Sealer

DOWN, UP = b"d" * 32, b"u" * 32
WAIT = 10.0
COORDINATOR = Introduction("coordinator", "coordinator", "c", {}, {}, ())
PEER = attrs.evolve(COORDINATOR, node="peer", role="peer")
OFFER = Offer(
    session="s",
    node="stage-0",
    family="llama",
    stage=0,
    stages=2,
    start=0,
    stop=5,
    cast=None,
    dequantize=True,
    identity=ModelIdentity("ab" * 32, (("model.safetensors", 1 << 40),), 10),
    topology="[cluster]\nname = 'ü'\n",
    digest="cd" * 32,
    cluster="c",
    versions={"mlxcel": "1"},
    plugins={"family:llama": "1"},
    bytes=1 << 40,
    transport="tcp",
    credits=8,
    timeout=30.0,
    dials={"0-1": "10.0.0.3:19001"},
)
DOWNWARD: list[ToPeer] = [OFFER, Commit("s"), Activate("s"), Release("s", "over"), Ping(3)]
UPWARD: list[ToCoordinator] = [
    Accepted("s"),
    Refused("s", "memory", "needs 5, has 3"),
    Committed("s"),
    Activated("s"),
    Reported("s", Loading(1, 5, 9)),
    Reported("s", Loaded(1, 9, 0.5)),
    Reported("s", Ended(1, 0.5, None, 2.0)),
    Reported("s", Beat(1, 0.5, 0.25, 3, (1.5, 2.0), 7, 8)),
    Pong(3, 1.25),
    Pong(4, 1.5, 0.0),
]


def sessions() -> tuple[Session, Session]:
    """The coordinator's session with a peer, and that peer's with it."""
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    return (
        Session(a, Keys(DOWN, UP), PEER, "the peer"),
        Session(b, Keys(UP, DOWN), COORDINATOR, "the coordinator"),
    )


def run(test: Callable[[ControlChannel, ControlChannel], Awaitable[None]]) -> None:
    """Run ``test`` with the coordinator's channel and the peer's."""

    async def main() -> None:
        ours, theirs = (ControlChannel(session) for session in sessions())
        try:
            async with asyncio.timeout(WAIT):
                await test(ours, theirs)
        finally:
            ours.close()
            theirs.close()

    asyncio.run(main())


def test_every_message_arrives_as_it_was() -> None:
    """In order, in both directions."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        for down in DOWNWARD:
            await ours.send(down, WAIT)
        assert [await theirs.receive(WAIT) for _ in DOWNWARD] == DOWNWARD
        for up in UPWARD:
            await theirs.send(up, WAIT)
        assert [await ours.receive(WAIT) for _ in UPWARD] == UPWARD

    run(test)


def test_an_error_arrives_in_words() -> None:
    """Objects never cross; the text and the exit code do."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        await theirs.send(Reported("s", Failed(1, StageError(1, "a step", "boom"))), WAIT)
        message = await ours.receive(WAIT)
        assert isinstance(message, Reported) and isinstance(message.report, Failed)
        error = message.report.error
        assert isinstance(error, WorkerFailed)
        assert "boom" in error.text

    run(test)


@pytest.mark.parametrize("message", [*DOWNWARD[1:2], Ping(1)])
def test_only_a_coordinator_commands(message: ToPeer) -> None:
    """A peer cannot tell the coordinator what to do; it ends the channel."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        await theirs.send(message, WAIT)
        with pytest.raises(WireError):
            await ours.receive(WAIT)
        with pytest.raises(ChannelClosed):
            await ours.receive(WAIT)
        assert await theirs.receive(WAIT) is None

    run(test)


def test_waiting_in_vain_loses_nothing() -> None:
    """After a time-out and after a cancellation the next message arrives whole."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        frame = Sealer(UP).frame([encode_message(Pong(9, 1.0))])
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(theirs.session.sock, frame[:11])
        with pytest.raises(DeadlineError, match=r"the peer.*the next message"):
            await ours.receive(0.01)
        waiting = asyncio.create_task(ours.receive(None))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await loop.sock_sendall(theirs.session.sock, frame[11:])
        assert await ours.receive(WAIT) == Pong(9, 1.0)

    run(test)


def test_closing_wakes_who_waits() -> None:
    """The waiting task learns that it was this end; later calls do too."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        waiting = asyncio.create_task(ours.receive(None))
        await asyncio.sleep(0)
        ours.close()
        for call in (waiting, ours.receive(None), ours.send(Ping(1), WAIT)):
            with pytest.raises(ChannelClosed, match="the peer is closed: it was closed here"):
                await call
        assert await theirs.receive(WAIT) is None
        ours.close()

    run(test)


def test_a_node_that_dies_within_a_message_is_an_error() -> None:
    """Only between two messages is an end an end."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        frame = Sealer(UP).frame([encode_message(Pong(9, 1.0))])
        await asyncio.get_running_loop().sock_sendall(theirs.session.sock, frame[:-1])
        theirs.close()
        with pytest.raises(ChannelClosed, match="too early"):
            await ours.receive(WAIT)

    run(test)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 40,
        (MAX_MESSAGE + 1).to_bytes(8, "little"),
        (5).to_bytes(8, "little") + bytes(21),
        Sealer(DOWN).frame([encode_message(Pong(9, 1.0))]),
        Sealer(UP).frame([b"{"]),
        Sealer(UP).frame([b'{"message": "Pong", "number": 1, "clock": 1.0, "new": 1}']),
        Sealer(UP).frame([b'{"message": "Quit"}']),
        Sealer(UP).frame([b"[" * 100_000]),
        Sealer(UP).frame([b"null"]),
    ],
)
def test_what_is_no_message_ends_the_channel(frame: bytes) -> None:
    """Forged, too large, reflected, malformed, or of another version."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        await asyncio.get_running_loop().sock_sendall(theirs.session.sock, frame)
        with pytest.raises(WireError):
            await ours.receive(WAIT)
        with pytest.raises(ChannelClosed):
            await ours.send(Ping(1), WAIT)

    run(test)


def test_many_tasks_may_send() -> None:
    """Frames of several tasks do not mix, larger than what the socket takes at once."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        messages = [Release(str(n), "x" * 200_000) for n in range(10)]
        async with asyncio.TaskGroup() as tasks:
            for message in messages:
                tasks.create_task(ours.send(message, WAIT))
            received: list[Any] = [await theirs.receive(WAIT) for _ in messages]
        assert sorted(received, key=lambda m: int(m.session)) == messages

    run(test)


def test_a_node_that_takes_nothing_is_a_deadline() -> None:
    """The channel is of no use any more, as a part of the message may be on its way."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        async def flood() -> None:
            while True:
                await ours.send(Release("s", "x" * 1_000_000), 0.05)

        with pytest.raises(DeadlineError, match=r"the peer.*Release to be taken"):
            await flood()
        with pytest.raises(ChannelClosed):
            await ours.send(Ping(1), WAIT)

    run(test)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    """The error names it, and the channel lives on."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        with pytest.raises(WireError, match="Release has"):
            await ours.send(Release("s", "x" * MAX_MESSAGE), WAIT)
        await ours.send(Ping(1), WAIT)
        assert await theirs.receive(WAIT) == Ping(1)

    run(test)


@pytest.mark.parametrize("message", [*DOWNWARD, *UPWARD], ids=lambda m: type(m).__name__)
def test_missing_and_foreign_fields_are_refused(message: ControlMessage) -> None:
    """A message has the fields of its class, with their types."""
    fields = json.loads(encode_message(message))
    assert decode_message(json.dumps(fields).encode()) == message
    with pytest.raises(WireError):
        decode_message(json.dumps(fields | {"more": 1}).encode())
    for name in fields.keys() - {"silent"}:
        with pytest.raises(WireError):
            decode_message(json.dumps(fields | {name: [[]]}).encode())


NOT_UTF8 = os.fsdecode(b"/models/caf\xe9")


@pytest.mark.parametrize(
    "message",
    [
        Refused("s", "checkpoint", NOT_UTF8),
        Release("s", NOT_UTF8),
        Reported("s", Failed(1, FileNotFoundError(NOT_UTF8))),
        Reported("s", Failed(1, WorkerFailed(1, "OSError", NOT_UTF8))),
        attrs.evolve(OFFER, cast=NOT_UTF8, versions={NOT_UTF8: "1"}),
        Activate("s", (NOT_UTF8,)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_name_that_is_no_utf8_arrives_with_a_backslash(message: ControlMessage) -> None:
    """Linux has such file names, and errors tell of them."""
    arrived = decode_message(encode_message(message))
    assert type(arrived) is type(message)
    assert "caf\\\\udce9" in str(attrs.asdict(arrived)) or "caf\\\\udce9" in repr(arrived)


@pytest.mark.parametrize("half", ["\ud800", "x\udfff"])
def test_half_a_surrogate_pair_is_no_text(half: str) -> None:
    """JSON can say it, and nobody could pass it on, write it or print it."""
    fields = json.loads(encode_message(OFFER))
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    for change in (
        *({name: half} for name in (*texts, "cast")),
        {"versions": {half: "1"}},
        {"versions": {"a": half}},
    ):
        with pytest.raises(WireError):
            decode_message(json.dumps(fields | change).encode())
    failed = json.loads(encode_message(Reported("s", Failed(1, ValueError("x")))))
    failed["report"]["error"]["text"] = half
    with pytest.raises(WireError):
        decode_message(json.dumps(failed).encode())


@pytest.mark.parametrize(
    "message",
    [
        Release("s", "\x1b[2Jgone"),
        Refused("s", "busy", "\x1b[2Jgone"),
        Reported("s", Failed(1, StageError(1, "a step", "\x1b[2Jgone"))),
    ],
)
def test_a_message_cannot_play_with_the_terminal(message: ControlMessage) -> None:
    """Control characters are read as escapes, but tabs and ends of lines."""
    arrived = repr(decode_message(encode_message(message)))
    assert "\\\\x1b[2Jgone" in arrived
    said = decode_message(encode_message(Release("s", "a\tb\nc\r\x9bü✗")))
    assert said == Release("s", "a\tb\nc\\x0d\\x9bü✗")


def test_a_connection_that_the_system_gives_up_is_no_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ETIMEDOUT is a TimeoutError too, and says nothing of this node's own patience."""

    async def test(ours: ControlChannel, theirs: ControlChannel) -> None:
        async def sock_sendall(*_: object) -> None:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_sendall", sock_sendall)
        with pytest.raises(ChannelClosed, match="Connection timed out"):
            await ours.send(Ping(1), WAIT)

    run(test)
