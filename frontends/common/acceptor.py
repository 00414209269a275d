"""uvicorn's server, with its own way to accept connections: many in a round of the event loop.

libuv accepts one connection in a round, which on a quiet loop is right and on a busy one is not: behind 500 clients
that came at once, with streams being written in every round, the next one waited five seconds to be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket

import uvicorn

logger = logging.getLogger(__name__)

ACCEPTS_PER_ROUND = 16  # more would leave nothing to the other workers of the same socket
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NO_ROOM_WAIT_S = 1.0


class Server(uvicorn.Server):
    """For listening sockets only. Everything but accepting is uvicorn's."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.servers = [Acceptor(self, listener) for listener in sockets or ()]  # type: ignore[misc]  # closed as theirs


class Acceptor:
    """Accepts from one socket until it is closed. What uvicorn needs of an asyncio.Server."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(server.config.backlog)
        self._listen()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Nothing of it goes on by itself."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                logger.error("no connection can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(NO_ROOM_WAIT_S, self._listen)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Hand it to its protocol, after the handshake of TLS where there is one."""
        with contextlib.suppress(OSError):  # it has gone already, or speaks no TLS
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._server.config.ssl)

    def _protocol(self) -> asyncio.Protocol:
        server = self._server
        protocol: asyncio.Protocol = server.config.http_protocol_class(  # type: ignore[call-arg]
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )
        return protocol
