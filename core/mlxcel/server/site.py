"""Where an application is served: a socket that is bound already."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from mlxcel.errors import AddressError

BACKLOG = 128


class Site(web.BaseSite):
    """Serves on ``sock``, which it closes.

    Args:
        most: How many connections may be open at once; one more closes the oldest, whatever it is
            at. None leaves that to the system.
    """

    def __init__(self, runner: web.AppRunner, sock: socket.socket, most: int | None = None) -> None:
        super().__init__(runner)
        self._sock = sock
        self._most = most

    @property
    def name(self) -> str:
        """Its address."""
        return url_of(self._sock)

    async def start(self) -> None:
        """Begin to accept connections.

        Raises:
            AddressError: Somebody else listens on the port since it was bound.
        """
        await super().start()
        # From now on its connections may not keep the next server from the port (see bind).
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol, sock=self._sock, backlog=BACKLOG
            )
        except OSError as error:
            host, port = self._sock.getsockname()[:2]
            raise AddressError(host, port, error.strerror or str(error)) from error

    def _protocol(self) -> RequestHandler:
        """What takes the next connection, which is made right after this turn of the loop."""
        server = self._runner.server
        assert server is not None, "the runner is set up"
        if self._most is not None:
            asyncio.get_running_loop().call_soon(self._make_room, self._most)
        return server()

    def _make_room(self, most: int) -> None:
        server = self._runner.server
        if server is not None:
            # A connection that is being closed has no transport any more.
            transports = [c.transport for c in server.connections if c.transport is not None]
            for transport in transports[: max(0, len(transports) + 1 - most)]:
                transport.abort()


def url_of(sock: socket.socket) -> str:
    """The address of a listening socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
