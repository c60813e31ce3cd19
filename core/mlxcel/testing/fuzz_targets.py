"""Every decoder of bytes from another node or a stranger, with samples of what it accepts."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.beacon import Beacon, BeaconReader, make_beacon
from mlxcel.cluster.control_channel import decode_message, encode_message
from mlxcel.cluster.handshake import (
    CLAIM_PREFIX,
    PROOF,
    VERDICT_PREFIX,
    Accept,
    Acceptor,
    Dialer,
    Refuse,
    read_hello,
)
from mlxcel.cluster.introduction import PROTOCOL_VERSION, Introduction
from mlxcel.cluster.messages import (
    Accepted,
    Commit,
    ModelIdentity,
    Offer,
    Ping,
    Pong,
    Refused,
    Reported,
)
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.topology import DEFAULT_TRANSPORT, Node, NodeRole, Topology
from mlxcel.cluster.topology_toml import emit_topology, parse_topology
from mlxcel.errors import MlxcelError, WireError
from mlxcel.pipeline import decision, operations
from mlxcel.pipeline.control import decode_control, encode_control
from mlxcel.pipeline.group import DATA, NOTICE, RankGroup
from mlxcel.pipeline.report import Beat, Failed, Loading
from mlxcel.pipeline.step import Logprobs, Step, StepFailed, Stop, Tokens
from mlxcel.plugins import Plugins
from mlxcel.tensor.exchange import HEADER as PIECE_HEADER
from mlxcel.tensor.exchange import Exchange
from mlxcel.transport import Keys, TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.wire import message as wire_message
from mlxcel.wire import tensor as wire_tensor
from mlxcel.wire.sealed import CHUNK, HEADER, Opener, Sealer
from mlxcel.wire.tensor import DTYPES, Buffer, WireTensor

SECRET = ClusterSecret(b"a secret that is known to the fuzzer")
KEY = bytes(range(32))
NOW = 1.8e9


@attrs.frozen
class Target:
    """A decoder.

    ``decode`` must return or raise ``refusal``, whatever it is given; ``samples`` are what it
    returns for, as a beginning for mutations.
    """

    name: str
    decode: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    refusal: type[MlxcelError] = WireError


def targets() -> tuple[Target, ...]:
    """All decoders."""
    return (
        Target("sealed frame", _open, _sealed_frames()),
        Target("sealed connection", _receiver(), _sealed_frames(), MlxcelError),
        Target("tensor", lambda data: wire_tensor.decode(data, max_bytes=1 << 20), _tensors()),
        Target("message", lambda data: wire_message.decode(data, max_bytes=1 << 20), _messages()),
        Target("decision", lambda data: decision.decode(memoryview(data)), _decisions()),
        Target("worker message", decode_control, _worker_messages()),
        # What is accepted can be passed on.
        Target(
            "control message",
            lambda data: encode_message(decode_message(data)),
            _control_messages(),
        ),
        Target("rank's frame", _from_rank, _rank_frames(), MlxcelError),
        Target("piece of a collective", _piece, (_sample_piece(),), MlxcelError),
        Target("topology", _topology, (_toml().encode(),), MlxcelError),
        *_handshake(),
        *_beacons(),
    )


def _open(data: bytes) -> object:
    """Open a frame that is followed by nothing, as a reader does that has all of it."""
    if len(data) < HEADER:
        raise WireError("too short")
    return Opener(KEY).frame(data[:HEADER], data[HEADER:])


def _receiver() -> Callable[[bytes], object]:
    """What the transport makes of bytes that end after a while."""
    plugins = Plugins.discover(environ={})
    transport = make_transport(plugins, DEFAULT_TRANSPORT, TransportOptions(stall=60.0))

    def receive(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        sending = threading.Thread(target=_send_all, args=(theirs, data))
        sending.start()
        connection = transport.connection(ours, Keys(KEY[::-1], KEY), "fuzz", "pp_activation")
        try:
            return connection.receive(60.0)
        finally:
            connection.close()
            sending.join()

    return receive


def _send_all(sock: socket.socket, data: bytes) -> None:
    with sock, contextlib.suppress(OSError):
        sock.sendall(data)


class _Said:
    """A connection that brings one frame."""

    peer = "fuzz"
    sent = received = room = 0

    def __init__(self, frame: bytes) -> None:
        self._frames = [memoryview(frame)]

    def send(self, pieces: Sequence[Buffer], timeout: float) -> None:
        pass

    def receive(self, timeout: float | None) -> memoryview | None:
        return self._frames.pop() if self._frames else None

    def close(self) -> None:
        pass


def _from_rank(data: bytes) -> object:
    return RankGroup(0, 1, 2, {0: _Said(data)}, 1.0).receive(0, "a frame")


def _rank_frames() -> tuple[bytes, ...]:
    """Data only: a notice is an error, told by another rank; mutations make some of these."""
    return (DATA + b"words", DATA + NOTICE + b"\2it is late")


_VALUES = np.zeros(8, np.float32)


def _piece(data: bytes) -> object:
    """The first piece of a sum of eight numbers, as the frame that brings it."""
    exchange = Exchange(RankGroup(0, 1, 2, {0: _Said(data)}, 1.0), "all-reduce", 3, "float32", 64)
    exchange.receive(_VALUES, 0, lambda place, values: None)
    return data


def _sample_piece() -> bytes:
    return DATA + PIECE_HEADER.pack(0, DTYPES["float32"].code, 0, 3) + bytes(_VALUES.nbytes)


def _topology(data: bytes) -> object:
    """As a text: it comes within an offer."""
    return parse_topology(data.decode("utf-8", "surrogateescape"), "the offered TOML")


_RANK: NodeRole = "pipeline_tensor_parallel"


def _toml() -> str:
    nodes = [Node("coordinator", Address("10.0.0.1", 19000), "hybrid")]
    nodes += [
        Node(f"s{stage}-r{rank}", Address(f"10.0.{stage}.{rank}", 1), _RANK, stage, rank)
        for stage in range(2)
        for rank in range(2)
    ]
    return emit_topology(Topology(tuple(nodes), "c", 2, 2))


def _sealed_frames() -> tuple[bytes, ...]:
    return tuple(Sealer(KEY).frame([text]) for text in (b"", b"words", bytes(CHUNK + 9)))


def _tensors() -> tuple[bytes, ...]:
    tensors = (
        WireTensor("float32", (2, 3), bytes(24)),
        WireTensor("bool", (4,), b"\0\1\1\0"),
        WireTensor("bfloat16", (), b"ab"),
        WireTensor("uint8", (1,) * 8, b"x"),
    )
    return tuple(b"".join(wire_tensor.encode(tensor)) for tensor in tensors)


def _messages() -> tuple[bytes, ...]:
    sampling = operations.Sampling(0.5, 0.9, 40, 0.1, 7, bias_tokens=(1,), bias_values=(0.5,))
    step = Step(
        5,
        1,
        (
            operations.New(3, 4, sampling, prompt=(1, 2, 3)),
            operations.Merge(1, (2, 3)),
            operations.Extract(1, 0, 7),
            operations.Prepare(1, (1, 2), (3, 4)),
        ),
        {"h": WireTensor("float16", (1, 2, 2), bytes(8)), "x": WireTensor("int8", (1,), b"1")},
        True,
    )
    messages = (
        step,
        Step(6, 1, (operations.Release(3),)),
        Tokens(5, 1, (7, 8), (Logprobs(-0.5, (1, 2), (-0.5, -1.5)), None)),
        StepFailed(5, 1, 0, (3, 4), "RuntimeError: boom"),
        Stop(),
    )
    return tuple(wire_message.encode(message, 123456789) for message in messages)


def _decisions() -> tuple[bytes, ...]:
    step = Step(7, 1, (operations.Release(3),), {"tokens": WireTensor("int32", (1,), bytes(4))})
    decisions = (
        decision.decide(step, carry=True),
        decision.decide(step, carry=False),
        decision.decide(Stop(), carry=True),
    )
    return tuple(b"".join(decision.pieces(made)) for made in decisions)


def _worker_messages() -> tuple[bytes, ...]:
    reports = (
        Loading(0, 5, 9),
        Failed(1, ValueError("x")),
        Beat(1, 0.5, 0.2, 3, (1.0, 2.0), 7, 8),
    )
    return tuple(encode_control(report) for report in reports)


def _control_messages() -> tuple[bytes, ...]:
    offer = Offer(
        session="s",
        node="stage-0",
        family="llama-like",
        stage=0,
        stages=2,
        start=0,
        stop=5,
        cast=None,
        dequantize=False,
        identity=ModelIdentity("ab" * 32, (("model.safetensors", 1 << 40),), 10),
        topology='[cluster]\nname = "c"\n',
        digest="cd" * 32,
        cluster="c",
        versions={"mlxcel": "1"},
        plugins={"family:one": "1"},
        bytes=1 << 40,
        transport="any",
        credits=8,
        timeout=30.0,
        dials={"0-1": "10.0.0.3:19001"},
    )
    messages = (
        offer,
        Commit("s"),
        Ping(3),
        Accepted("s"),
        Refused("s", "memory", "needs 5"),
        Reported("s", Beat(1, 0.5, 0.2, 3, (1.0,))),
        Reported("s", Failed(1, ValueError("x"))),
        Pong(3, 1.5, 0.5),
    )
    return tuple(encode_message(message) for message in messages)


def _handshake() -> tuple[Target, ...]:
    """What both sides read: as it comes, and with a proof that is made right again."""
    introduction = Introduction("peer", "peer", "c", {"a": "1"}, {"b:c": "2"}, ("d", "e"), 5)
    hello = Acceptor(SECRET, bytes(32)).hello

    def acceptor() -> Acceptor:
        return Acceptor(SECRET, bytes(32))

    def dialer() -> Dialer:
        dialer = Dialer(SECRET, hello, bytes(32))
        dialer.claim(introduction)
        return dialer

    claim = dialer().claim(introduction)
    reading = acceptor()
    reading.read_claim(claim)
    verdicts = [reading.verdict(v, introduction) for v in (Accept(), Refuse("because"))]

    def proved_claim(body: bytes) -> object:
        said = claim[: CLAIM_PREFIX - 4] + struct.pack("<I", len(body)) + body
        return acceptor().read_claim(said + _proof(b"mlxcel 5 dialer\0", hello + said))

    def proved_verdict(data: bytes) -> object:
        code, body = data[:1] or b"\0", data[VERDICT_PREFIX:]
        said = code + struct.pack("<I", len(body)) + body
        proof = _proof(b"mlxcel 5 acceptor\0", hello + claim + said)
        return dialer().read_verdict(said + proof)

    return (
        Target("hello", read_hello, (hello,)),
        Target("claim", lambda data: acceptor().read_claim(data), (claim,)),
        Target("claim with a right proof", proved_claim, (claim[CLAIM_PREFIX:-PROOF],)),
        Target("verdict", lambda data: dialer().read_verdict(data), tuple(verdicts)),
        Target("verdict with a right proof", proved_verdict, tuple(v[:-PROOF] for v in verdicts)),
    )


def _beacons() -> tuple[Target, ...]:
    beacon = Beacon("c", Address("10.0.0.2", 19001), "1.2.3", PROTOCOL_VERSION)
    datagram = make_beacon(beacon, SECRET, NOW, bytes(16))

    def read(data: bytes) -> object:
        return BeaconReader(SECRET, "c").read(data, "10.0.0.2", NOW)

    return (
        Target("beacon", read, (datagram,)),
        Target(
            "beacon with a right proof",
            lambda said: read(said + _proof(b"mlxcel beacon 1\0", said)),
            (datagram[:-PROOF],),
        ),
    )


def _proof(label: bytes, said: bytes) -> bytes:
    return hmac.digest(SECRET.value, label + said, "sha256")
