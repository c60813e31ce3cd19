"""One of two processes that send MLX arrays to and fro: ``python -m mlxcel.bench.transport_end``.

Its first line of standard input says what it is, every further one how many bytes to send how
often. The driving end answers with the seconds of each round trip, the other end with nothing.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from typing import Protocol

import mlx.core as mx

from mlxcel.bench.transport_role import Role
from mlxcel.plugins import Plugins
from mlxcel.stage.arrays import from_wire, to_wire
from mlxcel.transport.contract import Connection, Keys, TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.wire import tensor as wire_tensor

WAIT = 60.0
WARM_UP = 3
"""Round trips that do not count."""


class End(Protocol):
    """Sends and receives arrays."""

    def send(self, array: mx.array) -> None:
        """Send ``array``, which is evaluated."""

    def receive(self, like: mx.array) -> mx.array:
        """The next array, of the shape and dtype of ``like``, evaluated."""
        ...


class TransportEnd:
    """Over a connection, as a stage does it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, array: mx.array) -> None:
        self._connection.send(wire_tensor.encode(to_wire(array)), WAIT)

    def receive(self, like: mx.array) -> mx.array:
        frame = self._connection.receive(WAIT)
        assert frame is not None
        return from_wire(wire_tensor.decode(frame)[0])


class SocketEnd:
    """Over a socket with as little as possible: a length, then the array's bytes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def send(self, array: mx.array) -> None:
        data = to_wire(array).data
        self._sock.sendmsg([struct.pack("<Q", len(data))])
        self._sock.sendall(data)

    def receive(self, like: mx.array) -> mx.array:
        (size,) = struct.unpack("<Q", self._take(8))
        return from_wire(wire_tensor.WireTensor("float32", tuple(like.shape), self._take(size)))

    def _take(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            assert count, "the other end has gone"
            view = view[count:]
        return data


class RingEnd:
    """MLX's own ring of two ranks."""

    def __init__(self) -> None:
        self._group = mx.distributed.init(strict=True, backend="ring")
        self._other = 1 - self._group.rank()

    def send(self, array: mx.array) -> None:
        mx.eval(mx.distributed.send(array, self._other, group=self._group))

    def receive(self, like: mx.array) -> mx.array:
        array = mx.distributed.recv_like(like, self._other, group=self._group)
        mx.eval(array)
        return array


def make_end(role: Role) -> End:
    """The end that ``role`` describes."""
    if role.kind == "ring":
        return RingEnd()
    sock = socket.socket(fileno=role.descriptor)
    if role.kind == "raw sockets":
        return SocketEnd(sock)
    keys = None if role.keys is None else Keys(*map(bytes.fromhex, role.keys))
    transport = make_transport(Plugins.discover(), role.kind, TransportOptions(spin=role.spin))
    return TransportEnd(transport.connection(sock, keys, "the other end", "pp_activation"))


def drive(end: End, array: mx.array, rounds: int) -> list[float]:
    """The seconds of each of ``rounds`` round trips of ``array``."""
    times = []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        end.send(array)
        answer = end.receive(array)
        times.append(time.perf_counter() - begun)
    assert mx.array_equal(answer, array), "what came back is not what was sent"
    return times[WARM_UP:]


def follow(end: End, array: mx.array, rounds: int) -> None:
    """Return each array that comes."""
    for _ in range(WARM_UP + rounds):
        end.send(end.receive(array))


def main() -> None:
    """Do what standard input says until it ends."""
    role = Role(**json.loads(sys.stdin.readline()))
    end = make_end(role)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        size, rounds = json.loads(line)
        array = mx.random.normal((size // 4,))
        mx.eval(array)
        if role.drives:
            print(json.dumps(drive(end, array, rounds)), flush=True)
        else:
            follow(end, array, rounds)


if __name__ == "__main__":
    main()
