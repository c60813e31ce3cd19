"""One rank in a process of its own, for test_collectives.py.

Its first line of standard input says which rank it is and how it reaches the others; every further
one is an operation with its array, answered with the result or the error.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import time
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel.errors import MlxcelError, RankLost
from mlxcel.pipeline.group import RankGroup
from mlxcel.plugins import Plugins
from mlxcel.tensor import distributed
from mlxcel.tensor.collectives import Collectives
from mlxcel.tensor.distributed import DistributedCollectives
from mlxcel.tensor.ring import RingCollectives
from mlxcel.transport import Keys, PlainConnection, TransportOptions
from mlxcel.transport.make import make_transport


def main() -> None:
    role = json.loads(sys.stdin.readline())
    try:
        collectives = make(role)
    except MlxcelError as error:
        say(described(error))
        return
    say({"ready": True})
    for line in sys.stdin:
        begun = time.monotonic()
        try:
            say(done(collectives, json.loads(line)))
        except MlxcelError as error:
            say({"seconds": time.monotonic() - begun, **described(error)})
    collectives.close()


def make(role: dict[str, Any]) -> Collectives:
    rank, timeout = role["rank"], role["timeout"]
    if "backend" in role:
        hosts = tuple(role["hosts"])
        distributed.CONNECT_SECONDS = role.get("connect", distributed.CONNECT_SECONDS)
        return DistributedCollectives(role["backend"], rank, hosts, 3, timeout, give_up)
    options = TransportOptions(stall=timeout)
    transport = make_transport(Plugins.discover(environ={}), "tcp", options)
    connections = {}
    for peer, (descriptor, keys) in role["connections"].items():
        sock = socket.socket(fileno=descriptor)
        connections[int(peer)] = (
            transport.connection(sock, Keys(*map(bytes.fromhex, keys)), peer, "tp_collective")
            if keys
            else PlainConnection(sock, peer, options)
        )
    return RingCollectives(RankGroup(3, rank, role["size"], connections, timeout))


def done(collectives: Collectives, command: dict[str, Any]) -> dict[str, Any]:
    name = command.pop("name")
    if name == "barrier":
        collectives.barrier()
        return {}
    x = read(command)
    if command.get("transposed"):
        x = x.T
    extra = (command["root"],) if "root" in command else ()
    result = getattr(collectives, name)(x, *extra)
    if isinstance(collectives, DistributedCollectives):
        with collectives.watched():
            mx.eval(result)
    return {"dtype": str(result.dtype), "shape": result.shape, "data": data(result)}


def read(command: dict[str, Any]) -> mx.array:
    raw = np.frombuffer(base64.b64decode(command["data"]), np.uint8)
    dtype = getattr(mx, command["dtype"])
    if not raw.size:
        return mx.zeros(command["shape"], dtype)
    return mx.array(raw).view(dtype).reshape(command["shape"])


def data(x: mx.array) -> str:
    bits = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    return base64.b64encode(bits.tobytes()).decode()


def described(error: MlxcelError) -> dict[str, Any]:
    facts = {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, RankLost):
        facts |= {"stage": error.stage, "rank": error.rank, "operation": error.operation}
    return facts


def give_up(error: RankLost) -> None:
    say(described(error))
    os._exit(1)


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
