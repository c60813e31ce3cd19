"""One of the ranks that add up arrays: ``python -m mlxcel.bench.collectives_end``.

Its first line of standard input says what it is, every further one how many bytes to add up how
often. Rank 0 answers with the seconds of each.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import mlx.core as mx

from mlxcel.bench.collectives_role import Role
from mlxcel.errors import RankLost
from mlxcel.pipeline.group import RankGroup
from mlxcel.plugins import Plugins
from mlxcel.tensor.collectives import Collectives
from mlxcel.tensor.distributed import DistributedCollectives
from mlxcel.tensor.ring import RingCollectives
from mlxcel.transport.contract import Keys, TransportOptions
from mlxcel.transport.make import make_transport

WAIT = 60.0
WARM_UP = 5
"""Rounds that do not count."""


def make_rank(role: Role) -> Collectives:
    """The rank that ``role`` describes."""
    if not role.transport:
        return DistributedCollectives("ring", role.rank, tuple(role.hosts), 0, WAIT, _give_up)
    options = TransportOptions(spin=role.spin, stall=WAIT)
    transport = make_transport(Plugins.discover(), role.transport, options)
    connections = {
        int(peer): transport.connection(
            socket.socket(fileno=descriptor),
            Keys(*map(bytes.fromhex, keys)) if keys else None,
            f"rank {peer}",
            "tp_collective",
        )
        for peer, (descriptor, keys) in role.connections.items()
    }
    return RingCollectives(RankGroup(0, role.rank, role.size, connections, WAIT))


def rounds_of(collectives: Collectives, x: mx.array, rounds: int) -> list[float]:
    """The seconds of each of ``rounds`` sums of ``x``."""
    times = []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        mx.eval(collectives.all_sum(x))
        times.append(time.perf_counter() - begun)
    return times[WARM_UP:]


def main() -> None:
    """Do what standard input says until it ends."""
    role = Role(**json.loads(sys.stdin.readline()))
    collectives = make_rank(role)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        size, rounds = json.loads(line)
        x = mx.random.normal((size // 4,), key=mx.random.key(role.rank))
        mx.eval(x)
        with collectives.watched():
            collectives.barrier()
            times = rounds_of(collectives, x, rounds)
        if role.rank == 0:
            print(json.dumps(times), flush=True)
    collectives.close()


def _give_up(error: RankLost) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
