"""The handshake as bytes: who does not know the secret, or was not there, gets nowhere."""

from __future__ import annotations

import hmac
import json
import struct

import attrs
import pytest

from mlxcel.cluster import handshake
from mlxcel.cluster.handshake import (
    CLAIM_PREFIX,
    HELLO_SIZE,
    MAX_BODY,
    PROOF,
    Accept,
    Acceptor,
    Dialer,
    OtherVersion,
    OverCapacity,
    Refuse,
    Verdict,
    WrongProof,
    claim_size,
    farewell,
    read_hello,
    verdict_size,
)
from mlxcel.cluster.introduction import Introduction, Purpose
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.errors import WireError

SECRET = ClusterSecret(b"the secret of this test")
OTHER = ClusterSecret(b"the secret of another one")
COORDINATOR = Introduction(
    "coordinator",
    "coordinator",
    "c",
    {"mlxcel": "1"},
    {"family:llama": "2"},
    ("llama", "gemma4"),
    purpose=Purpose("data", "s", "0-1", "pp_activation"),
)
PEER = attrs.evolve(COORDINATOR, node="10.0.0.2:19001", role="peer", memory=5, purpose=Purpose())


def shake(verdict: Verdict = Accept()) -> tuple[Acceptor, Dialer, bytes, bytes]:  # noqa: B008
    """Both sides after a whole handshake, the claim and the verdict."""
    acceptor = Acceptor(SECRET)
    dialer = Dialer(SECRET, acceptor.hello)
    claim = dialer.claim(COORDINATOR)
    assert acceptor.read_claim(claim) == COORDINATOR
    return acceptor, dialer, claim, acceptor.verdict(verdict, PEER)


@pytest.mark.parametrize("verdict", [Accept(), OverCapacity(), Refuse("because ✗")])
def test_both_learn_who_the_other_is_and_the_verdict(verdict: Verdict) -> None:
    """Introductions and verdicts arrive as they were given."""
    _, dialer, _, answer = shake(verdict)
    assert dialer.read_verdict(answer) == (verdict, PEER)


def test_both_have_the_same_keys_and_each_direction_its_own() -> None:
    """What one sends with is what the other receives with; no two connections share a key."""
    keys = set()
    for _ in range(2):
        acceptor, dialer, _, _ = shake()
        ours, theirs = dialer.keys(), acceptor.keys()
        assert (ours.send, ours.receive) == (theirs.receive, theirs.send)
        keys |= {ours.send, ours.receive}
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 4


def test_nothing_secret_is_shown() -> None:
    """Neither secret nor keys stand in a log by accident."""
    acceptor, _, _, _ = shake()
    assert repr(acceptor.keys()) == "Keys()"
    assert "secret of" not in repr(SECRET)


def test_another_secret_proves_nothing() -> None:
    """Neither to the acceptor nor to the dialer."""
    acceptor = Acceptor(SECRET)
    with pytest.raises(WrongProof):
        acceptor.read_claim(Dialer(OTHER, acceptor.hello).claim(COORDINATOR))
    impostor = Acceptor(OTHER)
    dialer = Dialer(SECRET, impostor.hello)
    dialer.claim(COORDINATOR)
    with pytest.raises(WrongProof):
        dialer.read_verdict(impostor.verdict(Accept(), PEER))


def test_a_replayed_claim_proves_nothing() -> None:
    """The acceptor's nonce is new each time."""
    _, _, claim, _ = shake()
    with pytest.raises(WrongProof):
        Acceptor(SECRET).read_claim(claim)


def test_a_replayed_verdict_proves_nothing() -> None:
    """An old verdict does not fit a new claim, even after the same hello."""
    acceptor, _, _, verdict = shake()
    dialer = Dialer(SECRET, acceptor.hello)
    dialer.claim(COORDINATOR)
    with pytest.raises(WrongProof):
        dialer.read_verdict(verdict)


def test_a_dialer_is_not_answered_with_its_own_words() -> None:
    """The proof of a claim is none of a verdict."""
    acceptor = Acceptor(SECRET)
    dialer = Dialer(SECRET, acceptor.hello)
    claim = dialer.claim(COORDINATOR)
    body = claim[CLAIM_PREFIX:-PROOF]
    with pytest.raises(WrongProof):
        dialer.read_verdict(struct.pack("<BI", 0, len(body)) + claim[CLAIM_PREFIX:])


def test_an_acceptors_own_hello_returned_is_no_claim() -> None:
    """A nonce that is reflected proves nothing."""
    acceptor = Acceptor(SECRET)
    forged = acceptor.hello + struct.pack("<I", 0) + bytes(PROOF)
    with pytest.raises(WrongProof):
        acceptor.read_claim(forged)


@pytest.mark.parametrize("what", ["claim", "verdict"])
def test_no_bit_can_be_changed(what: str) -> None:
    """Versions, nonces, lengths, bodies, verdicts and proofs are all protected."""
    acceptor, dialer, claim, verdict = shake(Refuse("no"))
    message, read = {
        "claim": (claim, acceptor.read_claim),
        "verdict": (verdict, dialer.read_verdict),
    }[what]
    read(message)
    for position in range(len(message)):
        forged = bytearray(message)
        forged[position] ^= 1 << position % 8
        with pytest.raises(WireError):
            read(bytes(forged))


def test_another_version_is_named() -> None:
    """By the first eight bytes, from either side, whatever follows them."""
    hello = b"MLXC" + struct.pack("<I", 6)
    with pytest.raises(OtherVersion, match="protocol version 6; this mlxcel speaks 5") as caught:
        Dialer(SECRET, hello + b"a longer hello of the future" * 9)
    assert caught.value.version == 6
    with pytest.raises(OtherVersion):
        claim_size(hello + bytes(CLAIM_PREFIX - 8))
    assert farewell() == b"MLXC\x05\0\0\0"


@pytest.mark.parametrize("hello", [b"", b"HTTP/1.1 400 Bad Request" * 9, b"MLXC", b"MLXC\5\0\0\0"])
def test_what_is_no_hello_is_refused(hello: bytes) -> None:
    """Another program is recognised without a secret."""
    with pytest.raises(WireError):
        read_hello(hello)
    assert len(Acceptor(SECRET).hello) == HELLO_SIZE


def test_lengths_are_bounded() -> None:
    """A body's length is checked before it is waited for."""
    prefix = b"MLXC" + struct.pack("<I", 5) + bytes(32)
    assert claim_size(prefix + struct.pack("<I", MAX_BODY)) == CLAIM_PREFIX + MAX_BODY + PROOF
    with pytest.raises(WireError, match="are allowed"):
        claim_size(prefix + struct.pack("<I", MAX_BODY + 1))
    with pytest.raises(WireError, match="are allowed"):
        verdict_size(struct.pack("<BI", 0, 0xFFFFFFFF))
    acceptor = Acceptor(SECRET)
    with pytest.raises(WireError, match="are allowed"):
        Dialer(SECRET, acceptor.hello).claim(attrs.evolve(COORDINATOR, cluster="x" * MAX_BODY))


def test_a_reason_is_cut_to_what_fits() -> None:
    """A long reason does not keep the refusal from arriving."""
    _, dialer, _, answer = shake(Refuse("because " * 9999))
    verdict, _ = dialer.read_verdict(answer)
    assert isinstance(verdict, Refuse) and len(verdict.reason) == handshake.MAX_REASON


@pytest.mark.parametrize(
    "change",
    [
        {"node": 3},
        {"role": "king"},
        {"families": "llama"},
        {"memory": "5"},
        {"new": 1},
        {"plugins": 1},
    ],
)
def test_an_introduction_has_exactly_its_fields(change: dict[str, object]) -> None:
    """Also from somebody who knows the secret."""
    acceptor = Acceptor(SECRET)
    body = json.dumps(attrs.asdict(COORDINATOR) | change).encode()
    said = b"MLXC" + struct.pack("<I32sI", 5, bytes(32), len(body)) + body
    label = b"mlxcel 5 dialer\0"
    proof = hmac.digest(SECRET.value, label + acceptor.hello + said, "sha256")
    with pytest.raises(WireError, match="the body of a claim"):
        acceptor.read_claim(said + proof)
