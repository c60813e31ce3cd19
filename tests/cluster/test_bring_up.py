"""The three questions of a bring-up, and every way in which a peer may not say yes."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from mlxcel.cluster.bring_up import PHASES, STRAGGLERS_SECONDS, BringUp, Phase
from mlxcel.cluster.messages import (
    Accepted,
    Activate,
    Activated,
    Commit,
    Committed,
    ModelIdentity,
    Offer,
    Pong,
    Refused,
    ToCoordinator,
)

PATIENCE = 10.0
ADDRESSES = ("10.0.0.1:19001", "10.0.0.2:19001", "10.0.0.3:19001")
YES = {"offer": Accepted, "commit": Committed, "activate": Activated}


def offer(stage: int) -> Offer:
    return Offer(
        session="s",
        node=f"stage-{stage}",
        family="llama",
        stage=stage,
        stages=3,
        start=stage,
        stop=stage + 1,
        cast=None,
        dequantize=False,
        identity=ModelIdentity("0" * 64, (), 3),
        topology="",
        digest="",
        cluster="c",
        versions={},
        plugins={},
        bytes=1,
        transport="tcp",
        credits=4,
        timeout=60.0,
        dials={},
    )


OFFERS = tuple(offer(stage) for stage in range(3))


def yes(phase: Phase, session: str = "s") -> ToCoordinator:
    message: ToCoordinator = YES[phase](session)
    return message


def reached(phase: Phase) -> BringUp:
    """A bring-up at second 0 in ``phase``, the one before answered by all."""
    asking = BringUp(OFFERS, ADDRESSES, PATIENCE)
    asking.begin(0.0)
    for earlier in PHASES[: PHASES.index(phase)]:
        for peer in range(3):
            asking.receive(peer, yes(earlier), 0.0)
    assert asking.phase == phase
    return asking


def test_all_say_yes() -> None:
    """Each question goes to all peers when all have answered the one before, and not earlier."""
    asking = BringUp(OFFERS, ADDRESSES, PATIENCE)
    assert [(send.peer, send.message) for send in asking.begin(0.0)] == list(enumerate(OFFERS))
    for phase, following in zip(PHASES, [Commit("s"), Activate("s"), None], strict=True):
        assert asking.phase == phase
        now = 1.0 + PHASES.index(phase)
        assert asking.receive(2, yes(phase), now) == []
        assert asking.receive(0, yes(phase), now) == []
        sends = asking.receive(1, yes(phase), now)
        expected = [] if following is None else [(peer, following) for peer in range(3)]
        assert [(send.peer, send.message) for send in sends] == expected
    assert asking.done
    assert asking.error is None
    assert asking.seconds == {"offer": 1.0, "commit": 1.0, "activate": 1.0}


def refuse(asking: BringUp, phase: Phase) -> None:
    asking.receive(1, Refused("s", "memory", "It needs more. Stop something."), 1.0)


def silence(asking: BringUp, phase: Phase) -> None:
    asking.tick(PATIENCE)


def close(asking: BringUp, phase: Phase) -> None:
    asking.lose(1, "its process has closed the connection", 1.0)


def late(asking: BringUp, phase: Phase) -> None:
    asking.tick(PATIENCE)
    asking.receive(1, yes(phase), PATIENCE + 0.1)


def wrong_session(asking: BringUp, phase: Phase) -> None:
    asking.receive(1, yes(phase, "another"), 1.0)
    asking.receive(1, Refused("another", "busy", "never mind"), 1.0)
    asking.tick(PATIENCE)


def garbage(asking: BringUp, phase: Phase) -> None:
    asking.lose(1, "malformed wire data: a control message: ValueError", 1.0)


def another_answer(asking: BringUp, phase: Phase) -> None:
    other = PHASES[(PHASES.index(phase) + 1) % 3]
    asking.receive(1, yes(other), 1.0)


FAULTS: dict[Callable[[BringUp, Phase], None], tuple[str, str]] = {
    refuse: ("memory", "Stop something."),
    silence: ("silent", "did not answer the {phase} within 10.0 s"),
    close: ("lost", "has closed the connection"),
    late: ("silent", "did not answer the {phase} within 10.0 s"),
    wrong_session: ("silent", "did not answer the {phase} within 10.0 s"),
    garbage: ("lost", "malformed wire data"),
    another_answer: ("protocol", "it answered the {phase} with"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_peer_that_does_not_say_yes(
    phase: Phase, fault: Callable[[BringUp, Phase], None]
) -> None:
    """In every phase and for every fault the error names the peer, its address and the cause."""
    asking = reached(phase)
    for peer in (0, 2):
        asking.receive(peer, yes(phase), 0.5)
    fault(asking, phase)
    assert not asking.done
    assert asking.error is not None
    assert asking.error.phase == phase
    [failure] = asking.error.failures
    reason, text = FAULTS[fault]
    assert (failure.node, failure.address, failure.reason) == ("stage-1", ADDRESSES[1], reason)
    assert text.format(phase=phase) in failure.text
    assert f"stage-1 @ {ADDRESSES[1]}" in str(asking.error)
    assert "nothing was started" in str(asking.error)


def test_all_failures_are_told() -> None:
    """A refusal and a peer that is lost soon after are in the same error, in order; one that had
    no time to answer has done nothing wrong."""
    asking = reached("offer")
    asking.receive(2, Refused("s", "version", "Upgrade."), 1.0)
    assert asking.error is None, "the others may still say what they have to say"
    assert asking.deadline == 1.0 + STRAGGLERS_SECONDS
    asking.lose(0, "gone", 1.5)
    assert asking.error is None
    asking.tick(1.0 + STRAGGLERS_SECONDS)
    assert asking.error is not None
    assert [(f.node, f.reason) for f in asking.error.failures] == [
        ("stage-0", "lost"),
        ("stage-2", "version"),
    ]


def test_silence_to_the_end_is_told_beside_a_refusal() -> None:
    """A peer that had all of its time is named, too."""
    asking = reached("offer")
    asking.receive(2, Refused("s", "version", "Upgrade."), PATIENCE - 0.5)
    asking.receive(0, Accepted("s"), PATIENCE - 0.5)
    assert asking.deadline == PATIENCE
    asking.tick(PATIENCE)
    assert asking.error is not None
    assert [failure.reason for failure in asking.error.failures] == ["silent", "version"]


def test_after_a_no_nobody_is_asked_further() -> None:
    """When the last answer is in, one refusal ends it: no commit goes out."""
    asking = reached("offer")
    assert asking.receive(0, Refused("s", "family", "Install it."), 0.1) == []
    assert asking.receive(1, Accepted("s"), 0.2) == []
    assert asking.receive(2, Accepted("s"), 0.3) == []
    assert asking.error is not None
    assert asking.receive(2, Accepted("s"), 0.4) == []
    assert asking.lose(2, "gone", 0.5) == []
    assert [failure.node for failure in asking.error.failures] == ["stage-0"]


def test_the_first_fault_of_a_peer_is_what_is_told() -> None:
    """A peer that refuses and then hangs up has refused."""
    asking = reached("commit")
    asking.receive(0, Refused("s", "busy", "Wait."), 0.1)
    asking.lose(0, "gone", 0.2)
    asking.tick(60.0)
    assert asking.error is not None
    assert asking.error.failures[0].reason == "busy"


def test_a_repeated_yes_is_one_yes() -> None:
    """A peer that answers twice does not answer for another."""
    asking = reached("offer")
    for _ in range(3):
        assert asking.receive(0, Accepted("s"), 0.1) == []
    assert not asking.over


def test_what_is_no_answer_changes_nothing() -> None:
    """Pongs come at any time."""
    asking = reached("offer")
    assert asking.receive(0, Pong(1, 2.0), 0.1) == []
    assert not asking.over


def test_time_that_is_not_over_changes_nothing() -> None:
    """Before its deadline a question stays open."""
    asking = reached("activate")
    asking.tick(PATIENCE - 0.01)
    assert not asking.over


def test_ranks_learn_where_the_others_of_their_stage_are() -> None:
    """What peers say of their own connections goes to all ranks of their stage, and no others."""
    offers = [attrs.evolve(OFFERS[peer // 2], rank=peer % 2, stages=2) for peer in range(4)]
    asking = BringUp(offers, [f"10.0.0.{peer}:1" for peer in range(4)], PATIENCE)
    asking.begin(0.0)
    for peer in (2, 0, 3, 1):
        asking.receive(peer, Accepted("s", f"10.0.0.{peer}:7"), 0.0)
    for peer in range(3):
        asking.receive(peer, Committed("s"), 0.0)
    sends = asking.receive(3, Committed("s"), 0.0)
    stages = [("10.0.0.0:7", "10.0.0.1:7"), ("10.0.0.2:7", "10.0.0.3:7")]
    assert [(send.peer, send.message) for send in sends] == [
        (peer, Activate("s", stages[peer // 2])) for peer in range(4)
    ]
