"""Clients that only read: ``python -m mlxcel.bench.readers PORT COUNT``.

The request's body comes from standard input. What is read is thrown away, but for the number
of server-sent events: before each wait for more, how many there were is written to standard
output as four bytes, little endian.
"""

from __future__ import annotations

import selectors
import socket
import sys

from mlxcel.bench.streaming import PATH, READ_COUNT

BUFFER = 1 << 16


def main(argv: list[str]) -> int:
    """Read until the server hangs up."""
    port, count = map(int, argv)
    body = sys.stdin.buffer.read()
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(head.encode() + body)
            selector.register(sock, selectors.EVENT_READ, sock)
        events = 0
        while True:
            ready = selector.select(0)
            if not ready:
                sys.stdout.buffer.write(READ_COUNT.pack(events))
                sys.stdout.buffer.flush()
                events = 0
                ready = selector.select()
            for key, _ in ready:
                data = key.data.recv(BUFFER)
                if not data:
                    return 0
                events += data.count(b"\n\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
