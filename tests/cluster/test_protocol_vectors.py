"""A second implementation of docs/protocol.md, made from that page alone, against the first one.

Nothing of mlxcel is used by :class:`Node` and the functions beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import re
import socket
import struct
from pathlib import Path
from typing import Any

import attrs
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.beacon import Beacon, BeaconReader
from mlxcel.cluster.beacon import make_beacon as first_beacon
from mlxcel.cluster.control_channel import ControlChannel
from mlxcel.cluster.gate import Gate
from mlxcel.cluster.handshake import Accept, Acceptor, Dialer, OverCapacity, Refuse
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.messages import Ping, Pong
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session
from mlxcel.wire.sealed import Opener, Sealer

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
CHUNK = 262144
WAIT = 10.0


# The second implementation.


def proof(secret: bytes, label: bytes, said: bytes) -> bytes:
    return hmac.new(secret, label + said, hashlib.sha256).digest()


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for 32 bytes, which are one block."""
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def make_claim(secret: bytes, hello: bytes, nonce: bytes, body: bytes) -> bytes:
    said = b"MLXC" + struct.pack("<I", 5) + nonce + struct.pack("<I", len(body)) + body
    return said + proof(secret, b"mlxcel 5 dialer\0", hello + said)


def make_verdict(secret: bytes, hello: bytes, claim: bytes, code: int, body: bytes) -> bytes:
    said = struct.pack("<BI", code, len(body)) + body
    return said + proof(secret, b"mlxcel 5 acceptor\0", hello + claim + said)


def make_keys(secret: bytes, hello: bytes, claim: bytes) -> tuple[bytes, bytes]:
    """From dialer to acceptor, and back."""
    salt = hello[8:40] + claim[8:40]
    digest = hashlib.sha256(hello + claim).digest()
    return (
        hkdf(secret, salt, b"mlxcel 5 dialer to acceptor\0" + digest),
        hkdf(secret, salt, b"mlxcel 5 acceptor to dialer\0" + digest),
    )


def make_beacon(
    secret: bytes, window: int, nonce: bytes, cluster: str, host: str, port: int, version: str
) -> bytes:
    texts = [text.encode() for text in (cluster, host, version)]
    said = b"MLXB\x01" + struct.pack("<IQ", 5, window) + nonce
    said += struct.pack("<HBBB", port, *map(len, texts)) + b"".join(texts)
    return said + proof(secret, b"mlxcel beacon 1\0", said)


@attrs.define
class Direction:
    """Frames of one direction."""

    key: bytes
    number: int = 0

    def nonce(self) -> bytes:
        self.number += 1
        return (self.number - 1).to_bytes(12, "little")

    def seal(self, plain: bytes) -> bytes:
        length = struct.pack("<Q", len(plain))
        first = first_chunk(len(plain))
        chunks = [plain[:first]]
        chunks += [plain[i : i + CHUNK] for i in range(first, len(plain), CHUNK)]
        return length + b"".join(
            AESGCM(self.key).encrypt(self.nonce(), chunk, length) for chunk in chunks
        )

    def open(self, frame: bytes) -> bytes:
        length, rest, plain = frame[:8], frame[8:], b""
        (left,) = struct.unpack("<Q", length)
        size = first_chunk(left) + 16
        while True:
            plain += AESGCM(self.key).decrypt(self.nonce(), rest[:size], length)
            rest, left = rest[size:], left - size + 16
            if not left:
                assert rest == b""
                return plain
            size = CHUNK + 16


def first_chunk(length: int) -> int:
    """What is left when all other chunks are whole."""
    return length % CHUNK if length % CHUNK or not length else CHUNK


@attrs.define
class Node:
    """A dialer over a blocking socket."""

    sock: socket.socket
    secret: bytes
    body: bytes
    sending: Direction = attrs.field(init=False)
    receiving: Direction = attrs.field(init=False)

    def take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            assert piece, "closed"
            data += piece
        return data

    def shake(self) -> tuple[int, Any]:
        """The verdict and its body."""
        hello = self.take(40)
        assert hello[:8] == b"MLXC\x05\0\0\0"
        claim = make_claim(self.secret, hello, bytes(range(32)), self.body)
        self.sock.sendall(claim)
        head = self.take(5)
        code, length = struct.unpack("<BI", head)
        body = self.take(length)
        assert self.take(32) == make_verdict(self.secret, hello, claim, code, body)[-32:]
        sending, receiving = make_keys(self.secret, hello, claim)
        self.sending, self.receiving = Direction(sending), Direction(receiving)
        return code, json.loads(body)

    def say(self, message: dict[str, Any]) -> None:
        self.sock.sendall(self.sending.seal(json.dumps(message).encode()))

    def hear(self) -> Any:
        header = self.take(8)
        (length,) = struct.unpack("<Q", header)
        chunks = max(1, -(-length // CHUNK))
        return json.loads(self.receiving.open(header + self.take(length + 16 * chunks)))


# The first one, with everything that is random given.

SECRET = b"sixteen bytes or more, and random"
NONCE_A = bytes(range(32))
NONCE_D = bytes(range(32, 64))
COORDINATOR = Introduction(
    node="coordinator",
    role="coordinator",
    cluster="mlxcel-cluster",
    versions={"mlxcel": "0.1.0"},
    plugins={"family:llama": "0.1.0"},
    families=("llama",),
)
NOW = 1_800_000_000.0
NONCE_B = bytes(range(64, 80))
BEACON = Beacon("mlxcel-cluster", Address("10.0.0.2", 19001), "0.1.0", 5)
PEER = attrs.evolve(COORDINATOR, node="10.0.0.2:19001", role="peer", memory=8 << 30)


def vectors() -> dict[str, str]:
    """What docs/protocol.md must say, by mlxcel itself."""
    acceptor = Acceptor(ClusterSecret(SECRET), NONCE_A)
    dialer = Dialer(ClusterSecret(SECRET), acceptor.hello, NONCE_D)
    purpose = Purpose("data", "s1", "0-1", "pp_activation")
    claim = dialer.claim(attrs.evolve(COORDINATOR, purpose=purpose))
    acceptor.read_claim(claim)
    verdicts = {
        "accept": acceptor.verdict(Accept(), PEER),
        "over capacity": acceptor.verdict(OverCapacity(), PEER),
        "refuse": acceptor.verdict(Refuse("it is Sunday"), PEER),
    }
    keys = dialer.keys()
    sealer = Sealer(keys.send)
    large = bytes(range(256)) * 1025
    result = {
        "secret": SECRET.decode(),
        "hello": acceptor.hello.hex(),
        "claim body": claim[44:-32].decode(),
        "claim": claim.hex(),
    }
    for name, verdict in verdicts.items():
        result[f"{name} body"] = verdict[5:-32].decode()
        result[f"{name} proof"] = verdict[-32:].hex()
    return result | {
        "key dialer to acceptor": keys.send.hex(),
        "key acceptor to dialer": keys.receive.hex(),
        "frame 1 plaintext": "hello",
        "frame 1": sealer.frame([b"hello"]).hex(),
        "frame 2 plaintext": "",
        "frame 2": sealer.frame([]).hex(),
        "frame 3 plaintext": "00 01 02 … fe ff, 1025 times",
        "SHA-256 of frame 3": hashlib.sha256(sealer.frame([large])).hexdigest(),
        "beacon time window": str(int(NOW) // 60),
        "beacon nonce": NONCE_B.hex(),
        "beacon cluster": BEACON.cluster,
        "beacon address": str(BEACON.address),
        "beacon version": BEACON.version,
        "beacon": first_beacon(BEACON, ClusterSecret(SECRET), NOW, NONCE_B).hex(),
    }


def documented() -> dict[str, str]:
    """The vectors as the document has them: a name, ``=``, the value; broken lines are joined."""
    text = DOCUMENT.read_text(encoding="utf-8").split("## Test vectors")[1]
    block = re.sub(r"\n +", "", re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0])
    pairs = (line.partition(" =") for line in block.splitlines())
    return {name: value.removeprefix(" ") for name, _, value in pairs}


def test_the_document_has_the_vectors_of_mlxcel() -> None:
    """The page is up to date."""
    assert documented() == vectors()


def test_the_second_implementation_reproduces_the_vectors() -> None:
    """Whoever follows the page arrives at the same bytes."""
    v = documented()
    secret, hello, claim = v["secret"].encode(), bytes.fromhex(v["hello"]), v["claim"]
    assert hello == b"MLXC\x05\0\0\0" + NONCE_A
    made = make_claim(secret, hello, NONCE_D, v["claim body"].encode())
    assert made.hex() == claim
    for code, name in enumerate(["accept", "over capacity", "refuse"]):
        body = v[f"{name} body"].encode()
        verdict = make_verdict(secret, hello, made, code, body)
        assert verdict[-32:].hex() == v[f"{name} proof"]
    sending, receiving = make_keys(secret, hello, made)
    assert (sending.hex(), receiving.hex()) == (
        v["key dialer to acceptor"],
        v["key acceptor to dialer"],
    )
    direction = Direction(sending)
    assert direction.seal(b"hello").hex() == v["frame 1"]
    assert direction.seal(b"").hex() == v["frame 2"]
    third = direction.seal(bytes(range(256)) * 1025)
    assert hashlib.sha256(third).hexdigest() == v["SHA-256 of frame 3"]
    window, nonce = int(v["beacon time window"]), bytes.fromhex(v["beacon nonce"])
    host, _, port = v["beacon address"].partition(":")
    beacon = make_beacon(
        secret, window, nonce, v["beacon cluster"], host, int(port), v["beacon version"]
    )
    assert beacon.hex() == v["beacon"]


def test_a_beacon_of_the_second_implementation_is_heard() -> None:
    """A node that follows the page is found."""
    made = make_beacon(
        SECRET, int(NOW) // 60, NONCE_B, "mlxcel-cluster", "10.0.0.2", 19001, "0.1.0"
    )
    reader = BeaconReader(ClusterSecret(SECRET), "mlxcel-cluster")
    assert reader.read(made, "10.0.0.2", NOW) == BEACON


def test_each_opens_what_the_other_seals() -> None:
    """Frames of one chunk, of none and of several, in both directions."""
    key = bytes(32)
    mine, theirs = Direction(key), Sealer(key)
    back, opener = Direction(key), Opener(key)
    for size in (1, 0, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1):
        plain = random.Random(size).randbytes(size)
        assert mine.open(theirs.frame([plain])) == plain
        frame = back.seal(plain)
        assert opener.frame(frame[:8], frame[8:]) == plain


def test_the_second_implementation_talks_with_a_real_gate() -> None:
    """Handshake, verdict and messages in both directions over a socket."""

    def stranger(port: int) -> None:
        body = json.dumps(attrs.asdict(COORDINATOR) | {"families": ["llama"]}).encode()
        with socket.create_connection(("127.0.0.1", port), WAIT) as sock:
            node = Node(sock, SECRET, body)
            code, answer = node.shake()
            assert code == 0
            assert answer["introduction"]["node"] == PEER.node
            node.say({"message": "Ping", "number": 7})
            assert node.hear() == {"message": "Pong", "number": 7, "clock": 1.5, "silent": None}

    async def answer(session: Session) -> None:
        channel = ControlChannel(session)
        ping = await channel.receive(WAIT)
        assert isinstance(ping, Ping)
        await channel.send(Pong(ping.number, 1.5), WAIT)
        assert await channel.receive(WAIT) is None
        channel.close()

    async def run() -> None:
        gate = Gate(ClusterSecret(SECRET), lambda: PEER, lambda _: Accept(), answer)
        where = await gate.listen(Address("127.0.0.1", 0))
        await asyncio.to_thread(stranger, where.port)
        await gate.close()
        assert gate.counts.accepted == 1
        assert gate.counts.failed == 0

    asyncio.run(run())
