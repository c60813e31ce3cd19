"""The sockets between the processes of one machine: stages in a row, ranks side by side."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import attrs

from mlxcel.pipeline.control import DataSocket
from mlxcel.pipeline.group import group_peers
from mlxcel.stage.contract import StageSpec
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.spin import spin_for

LOOPBACK = "127.0.0.1"

Given = tuple[DataSocket, socket.socket]
"""A worker's end of a socket pair, and what it is."""


@attrs.frozen
class Grid:
    """All socket pairs of a pipeline.

    Attributes:
        first, last: The engine's ends of the link to the first stage and of that from the last.
        workers: What each worker gets, in the order of the specs.
    """

    first: socket.socket
    last: socket.socket
    workers: tuple[list[Given], ...]


def wire(specs: Sequence[StageSpec], options: TransportOptions, rank_timeout: float) -> Grid:
    """Connect the workers of ``specs`` with each other and with the engine.

    Steps pass between equal ranks of neighbouring stages, and between the engine and rank 0 of
    the first and of the last stage; the ranks of a stage have a pair for each two that talk.

    Args:
        specs: Stages in order, the ranks of a stage one after the other.
        options: Of all connections.
        rank_timeout: How long the other end may stand still within a frame of the group.
    """
    ranks = len(specs) // (specs[-1].index + 1)
    titles = [spec.title for spec in specs]
    workers: tuple[list[Given], ...] = tuple([] for _ in specs)

    def give(worker: int, data: DataSocket, sock: socket.socket) -> None:
        workers[worker].append((data, sock))

    first, sock = socket.socketpair()
    give(0, DataSocket("receive", f"engine to {titles[0]}", "engine", options=options), sock)
    sock, last = socket.socketpair()
    give(-ranks, DataSocket("send", f"{titles[-ranks]} to engine", "engine", options=options), sock)
    for before in range(len(specs) - ranks):
        after = before + ranks
        name = f"{titles[before]} to {titles[after]}"
        there, here = socket.socketpair()
        give(before, DataSocket("send", name, titles[after], options=options), there)
        give(after, DataSocket("receive", name, titles[before], options=options), here)
    spin = spin_for(len(specs), traffic="tp_collective")
    within = attrs.evolve(options, stall=rank_timeout, spin=spin)
    for stage in range(0, len(specs), ranks):
        for low, high in _talking(ranks):
            pair = ((low, high), (high, low))
            for (own, other), sock in zip(pair, socket.socketpair(), strict=True):
                peer = titles[stage + other]
                data = DataSocket("group", f"the group of {titles[stage + own]}", peer)
                data = attrs.evolve(data, traffic="tp_collective", options=within, rank=other)
                give(stage + own, data, sock)
    return Grid(first, last, workers)


def _talking(ranks: int) -> Iterator[tuple[int, int]]:
    """Each two ranks of a stage that have a connection, the lower one first."""
    for low in range(ranks):
        yield from ((low, high) for high in group_peers(low, ranks) if high > low)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]
