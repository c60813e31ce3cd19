"""Links over sockets: messages pass, and whatever is wrong ends the link with a reason."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mlxcel.errors import ChannelClosed, DeadlineError
from mlxcel.pipeline.operations import Release
from mlxcel.pipeline.socket_link import MOST_HOPS, ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.step import Step, Stop, Tokens
from mlxcel.transport.plain import PlainConnection
from mlxcel.wire import message as wire_message
from mlxcel.wire.frame import send_frame
from mlxcel.wire.message import encode
from mlxcel.wire.tensor import WireTensor

Pair = tuple[socket.socket, socket.socket]
WAIT = 10.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def outbox(sock: socket.socket, timeout: float = WAIT) -> ConnectionOutbox:
    return ConnectionOutbox(
        PlainConnection(sock, "b"),
        "a to b",
        timeout,
        lambda value: WireTensor("uint8", (len(value),), value),
    )


def inbox(sock: socket.socket, capacity: int = 4) -> ConnectionInbox:
    return ConnectionInbox(PlainConnection(sock, "a"), "a to b", capacity)


def test_messages_pass_in_order(pair: Pair) -> None:
    """What one end sends the other receives, tensors made into bytes by the sender."""
    sending, receiving = outbox(pair[0]), inbox(pair[1])
    sending.send(Step(1, 0, (Release(7),), {"h": b"abc"}))
    sending.send(Tokens(1, 0, (5,)))
    sending.send(Stop())
    step = receiving.receive(WAIT)
    assert isinstance(step, Step)
    assert (step.seq, step.operations) == (1, (Release(7),))
    assert (step.tensors["h"].shape, bytes(step.tensors["h"].data)) == ((3,), b"abc")
    assert receiving.receive(WAIT) == Tokens(1, 0, (5,))
    assert receiving.receive(WAIT) == Stop()


def test_what_was_sent_before_the_end_still_arrives(pair: Pair) -> None:
    """A sender that closes loses nothing; after that the link is closed with a reason."""
    sending, receiving = outbox(pair[0]), inbox(pair[1])
    sending.send(Tokens(3, 0))
    sending.close()
    assert receiving.receive(WAIT) == Tokens(3, 0)
    with pytest.raises(ChannelClosed, match="the other end has closed it"):
        receiving.receive(WAIT)


def test_sending_to_nobody_says_so(pair: Pair) -> None:
    """A message to an end that is gone fails as a closed link."""
    pair[1].close()
    with pytest.raises(ChannelClosed, match="a to b"):
        outbox(pair[0]).send(Stop())


def test_a_receiver_that_takes_nothing_is_named_in_time(pair: Pair) -> None:
    """A send has a deadline, and its error names the link and the flag."""
    sending = outbox(pair[0], 0.05)
    with pytest.raises(DeadlineError, match=r"a to b did not answer.*--pp-timeout"):
        sending.send(Step(0, 0, (), {"h": bytes(32 << 20)}))


@pytest.mark.parametrize("junk", [b"", b"junk", b"MLXP\x02\x09" + bytes(12)])
def test_junk_closes_the_link(pair: Pair, junk: bytes) -> None:
    """A frame that is no message closes the link, and the reason says what was wrong."""
    receiving = inbox(pair[1])
    send_frame(pair[0], [junk])
    with pytest.raises(ChannelClosed, match="malformed wire data"):
        receiving.receive(WAIT)


def test_more_messages_than_credits_close_the_link(pair: Pair) -> None:
    """A sender that keeps no credits cannot make the receiver's queue grow."""
    receiving = inbox(pair[1], 2)
    for seq in range(3):
        send_frame(pair[0], [encode(Tokens(seq, 0))])
    pair[0].settimeout(WAIT)
    assert pair[0].recv(1) == b""  # the receiver has hung up
    assert [receiving.receive(WAIT) for _ in range(2)] == [Tokens(0, 0), Tokens(1, 0)]
    with pytest.raises(ChannelClosed, match="already holds its 2 messages"):
        receiving.receive(WAIT)


def test_hop_times_are_taken_once(pair: Pair) -> None:
    """An inbox keeps what the latest messages took, in microseconds, until somebody takes it."""
    sending, receiving = outbox(pair[0]), inbox(pair[1], 2 * MOST_HOPS)
    for seq in range(MOST_HOPS + 3):
        sending.send(Tokens(seq, 0))
    for _ in range(MOST_HOPS + 3):
        receiving.receive(WAIT)
    hops = receiving.take_hops()
    assert len(hops) == MOST_HOPS
    assert all(0 < hop < WAIT * 1e6 for hop in hops)
    assert receiving.take_hops() == ()


def test_a_message_without_a_send_time_gives_no_hop(pair: Pair) -> None:
    """Who does not measure does not spoil the figures."""
    receiving = inbox(pair[1])
    send_frame(pair[0], [encode(Stop())])
    receiving.receive(WAIT)
    assert receiving.take_hops() == ()


def test_both_ends_count_the_bytes_on_the_wire(pair: Pair) -> None:
    """What one end has sent the other has received, lengths of frames included."""
    sending, receiving = outbox(pair[0]), inbox(pair[1])
    sending.send(Stop())
    receiving.receive(WAIT)
    assert sending.sent == receiving.received == 8 + len(encode(Stop()))


def test_what_goes_wrong_here_is_not_blamed_on_the_other_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for a frame, say: the reason is named."""

    def decode(frame: object) -> None:
        raise MemoryError

    monkeypatch.setattr(wire_message, "decode", decode)
    sending, receiving = outbox(pair[0]), inbox(pair[1])
    sending.send(Tokens(1, 0, (5,)))
    with pytest.raises(ChannelClosed, match="MemoryError"):
        receiving.receive(WAIT)
