"""Connecting to all peers of a cluster, those included that are just about to start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.session import Session
from mlxcel.errors import (
    BringUpError,
    DeadlineError,
    DialError,
    MlxcelError,
    NotANode,
    PeerFailure,
    PeerFull,
    PeerRefused,
    SecretMismatch,
    Unreachable,
    VersionMismatch,
)

RETRY_SECONDS = 0.5
"""How long after a peer was not there it is looked for again."""

_REASONS: Mapping[type[MlxcelError], str] = {
    Unreachable: "unreachable",
    NotANode: "no peer",
    VersionMismatch: "version",
    SecretMismatch: "secret",
    PeerFull: "busy",
    DeadlineError: "silent",
}


async def muster(
    peers: Sequence[tuple[str, Address]],
    dial: Callable[[Address], Awaitable[Session]],
    *,
    patience: float,
    on_waiting: Callable[[Address], None],
) -> list[Session]:
    """A connection to each of ``peers``, which are names and addresses.

    The first one is tried first, the others then side by side: of two coordinators that want
    the same peers at once, one gets them all and the other none.

    Args:
        dial: Makes one.
        patience: Seconds to go on trying where nothing listens yet. Where one peer can never be
            had, nobody is waited for any more.
        on_waiting: Told once of each peer that does not listen yet.

    Raises:
        BringUpError: Not all could be had; it lists each that could not, and none is kept.
    """
    until, hopeless = time.monotonic() + patience, asyncio.Event()
    first_tried, taken = asyncio.Event(), asyncio.Event()

    async def attempt(number: int, address: Address) -> Session | None:
        """A connection; None where the first peer belongs to another coordinator."""
        if number:
            await first_tried.wait()
        if taken.is_set():
            return None
        try:
            return await dial(address)
        except PeerRefused:
            if not number:
                taken.set()
            raise
        finally:
            first_tried.set()

    async def find(number: int, address: Address) -> Session | None:
        waiting = False
        while True:
            try:
                return await attempt(number, address)
            except Unreachable:
                if hopeless.is_set() or time.monotonic() + RETRY_SECONDS >= until:
                    raise
            except MlxcelError:
                hopeless.set()
                raise
            if not waiting:
                on_waiting(address)
                waiting = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hopeless.wait(), RETRY_SECONDS)

    found = await asyncio.gather(
        *(find(number, address) for number, (_, address) in enumerate(peers)),
        return_exceptions=True,
    )
    sessions = [session for session in found if isinstance(session, Session)]
    if len(sessions) == len(peers):
        return sessions
    for session in sessions:
        session.close()
    failures = []
    for (name, address), error in zip(peers, found, strict=True):
        if isinstance(error, MlxcelError):
            failures.append(_failure(name, address, error))
        elif isinstance(error, BaseException):
            raise error
    raise BringUpError("connect", tuple(failures))


def _failure(name: str, address: Address, error: MlxcelError) -> PeerFailure:
    """Why a peer could not be connected to, without its address twice."""
    match error:
        case DialError():
            text = f"{error.problem} {error.way_out}"
        case DeadlineError():
            text = str(attrs.evolve(error, peer="it"))
        case _:
            text = str(error)
    return PeerFailure(name, str(address), _REASONS.get(type(error), "refused"), text)
