"""What a worker does with its job: connect, build its stage or its rank of one, and run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

# What takes long is imported by the functions that use it: a worker says that it lives before.
from mlxcel.errors import MlxcelError, RankLost
from mlxcel.pipeline.control import DataSocket, FromWorker, Job
from mlxcel.pipeline.follower import FollowingInbox, NoOutbox
from mlxcel.pipeline.group import RankGroup
from mlxcel.pipeline.leader import LeadingInbox
from mlxcel.pipeline.link import Inbox, Outbox
from mlxcel.pipeline.meeting import meet as meet_ranks
from mlxcel.pipeline.report import Failed
from mlxcel.pipeline.socket_link import ConnectionInbox, ConnectionOutbox
from mlxcel.pipeline.sockets import SocketKey
from mlxcel.pipeline.worker import run_stage
from mlxcel.stage.owner import Given
from mlxcel.transport.plain import PlainConnection
from mlxcel.wire.tensor import WireTensor

if TYPE_CHECKING:
    import socket

    from mlxcel.plugins import Plugins
    from mlxcel.stage.contract import StageExecutor, StageSpec
    from mlxcel.transport.contract import Connection

RECEIVE: SocketKey = ("receive", 0)
SEND: SocketKey = ("send", 0)


def serve(
    job: Job,
    sockets: Mapping[SocketKey, Given],
    plugins: Plugins,
    say: Callable[[FromWorker], None],
    at_the_end: Callable[..., None] = lambda *endings: None,
) -> int:
    """Be what ``job`` says until the links end; returns the process's exit code.

    Args:
        sockets: Those that the job's spec needs.
        say: Tells the owner, in any thread.
        at_the_end: Is given functions to call with a reason should the owner go.
    """
    from mlxcel.stage.build import build_executor
    from mlxcel.tensor.make import make_collectives

    spec = job.spec

    def fail(error: MlxcelError) -> None:
        say(Failed(spec.index, error, spec.rank or 0))

    def give_up(error: RankLost) -> None:
        """What MLX waits for itself cannot be waked."""
        fail(error)
        os._exit(1)

    try:
        connections = {
            key: _connection(plugins, data, sock) for key, (data, sock) in sockets.items()
        }
    except MlxcelError as error:
        fail(error)
        return 1
    group = _group(job, connections)
    inbox, outbox = _links(job, sockets, connections, group)
    at_the_end(inbox.close, outbox.close)

    def build(spec: StageSpec) -> StageExecutor:
        return build_executor(plugins, spec, make_collectives(job, group, give_up))

    meet = partial(meet_ranks, group) if group is not None else lambda: None
    run_stage(spec, build, inbox, outbox, say, meet)
    return 0


def _group(job: Job, connections: Mapping[SocketKey, Connection]) -> RankGroup | None:
    """The other ranks of the stage, if they are workers of their own."""
    spec = job.spec
    if spec.rank is None:
        return None
    others = {rank: it for (direction, rank), it in connections.items() if direction == "group"}
    return RankGroup(spec.index, spec.rank, spec.tensor.size, others, job.rank_timeout)


def _links(
    job: Job,
    sockets: Mapping[SocketKey, Given],
    connections: Mapping[SocketKey, Connection],
    group: RankGroup | None,
) -> tuple[Inbox, Outbox]:
    """What the stage receives from and sends to."""
    own: Inbox | None = None
    if before := connections.get(RECEIVE):
        # Rank 0 alone gives credits back. In steps without tensors, such as releases of caches, it
        # does not wait for the others, so more may be on their way to one that lags behind.
        follows = group is not None and group.rank > 0
        own = ConnectionInbox(before, sockets[RECEIVE][0].name, job.credits + 1, patient=follows)
    outbox: Outbox = NoOutbox()
    if after := connections.get(SEND):
        outbox = ConnectionOutbox(after, sockets[SEND][0].name, job.timeout, _as_wire)
    if group is not None and group.rank:
        return FollowingInbox(group, own), outbox
    assert own is not None, "who leads has a link to take steps from"
    return own if group is None else LeadingInbox(own, group, carry=job.spec.first), outbox


def _as_wire(value: Any) -> WireTensor:
    from mlxcel.stage.arrays import to_wire

    return value if isinstance(value, WireTensor) else to_wire(value)


def _connection(plugins: Plugins, data: DataSocket, sock: socket.socket) -> Connection:
    if not data.transport:
        return PlainConnection(sock, data.peer, data.options)
    from mlxcel.transport.make import make_transport

    transport = make_transport(plugins, data.transport, data.options)
    return transport.connection(sock, data.keys, data.peer, data.traffic)
