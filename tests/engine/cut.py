"""A TCP relay whose connections can be cut at any moment: what a network does to a client."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Relay:
    """Listens on a port of its own and forwards to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._refusing = False
        self._closing = False
        self.num_cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, *, refuse: bool = False) -> None:
        """End all connections; with `refuse` take no new ones until `heal`."""
        self._refusing = refuse
        self.num_cuts += 1
        self._wake_writer.send(b"c")

    def heal(self) -> None:
        self._refusing = False

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # its thread was awake, and has closed everything already
            self._wake_writer.send(b"x")
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._wake_reader:
                    source.recv(64)
                    self._drop_all()
                elif source is self._listener:
                    self._connect(self._listener.accept()[0])
                elif source in self._pairs:
                    self._forward(source)
        self._drop_all()
        for item in (self._listener, self._wake_reader, self._wake_writer):
            item.close()
        self._selector.close()

    def _connect(self, client: socket.socket) -> None:
        if self._refusing:
            client.close()
            return
        engine = socket.create_connection(("127.0.0.1", self._target_port))
        for one, other in ((client, engine), (engine, client)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        target = self._pairs[source]
        try:
            data = source.recv(65536)
            if data:
                target.sendall(data)
                return
        except OSError:
            pass
        self._drop(source)
        self._drop(target)

    def _drop_all(self) -> None:
        for item in list(self._pairs):
            self._drop(item)

    def _drop(self, item: socket.socket) -> None:
        if self._pairs.pop(item, None) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(item)
            item.close()
