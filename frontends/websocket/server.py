"""The process of the websocket front end: uvicorn around the application, systemd's protocol, and an orderly end.

The first SIGTERM or SIGINT drains, a second one stops at once. Sockets that are still open at the end are closed with
1012 (service restart); clients come back to the next process and resume what was detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys

import uvicorn

from frontends.common.acceptor import Server
from frontends.common.notify import notify
from frontends.common.protection import check_protection, tls_files
from frontends.websocket.app import WebsocketFrontEnd
from frontends.websocket.protocol import FramesProtocol
from inferengine.config import Config, watchdog_interval_s
from inferengine.errors import ExitCode
from inferengine.listening import AddressTaken, open_listeners
from inferengine.logs import configure

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 20.0  # a peer that answers no ping for PING_TIMEOUT_S is gone
PING_TIMEOUT_S = 20.0
BACKLOG = 1024
GC_THRESHOLD = 20_000  # a stream makes short-lived objects for each token: the default looks at them 30 times as often
STOP_TIMEOUT_S = 3
_LOOK_S = 0.02


def run_websocket(config: Config) -> int:
    """Serve until a signal. Returns an exit code of ExitCode."""
    configure(config.log)
    try:
        (listener, *_) = open_listeners("ws", config.ws.host, config.ws.port)
    except AddressTaken as error:
        print(f"inferengine ws: {error}", file=sys.stderr)
        return ExitCode.ADDRESS
    front_end = WebsocketFrontEnd(config)
    check_protection("ws", listener, front_end.keys, allow_public=config.ws.allow_public)
    server = Server(server_config(config, front_end))
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(_serve(config, front_end, server, listener))


def server_config(config: Config, front_end: WebsocketFrontEnd) -> uvicorn.Config:
    """What uvicorn is told. Messages are not compressed: deltas are too short to gain, and it costs memory a socket."""
    tls = tls_files("ws", config.ws.tls_certificate, config.ws.tls_key)
    return uvicorn.Config(
        front_end.app(),
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
        ws=FramesProtocol,
        ws_max_size=config.ws.max_message_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )


async def _serve(config: Config, front_end: WebsocketFrontEnd, server: Server, listener: socket.socket) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_LOOK_S)
    end = _End()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # after uvicorn has set its own handlers, which drain nothing
        loop.add_signal_handler(number, end.on_signal)
    gc.collect()
    gc.freeze()  # what was loaded stays: no need to look through it again
    gc.set_threshold(GC_THRESHOLD)
    host, port = listener.getsockname()[:2]
    logger.info("listening on %s port %s", host, port)
    notify(f"READY=1\nSTATUS=listening on {host} port {port}")
    alive = asyncio.create_task(_feed_watchdog())
    stopping = asyncio.create_task(end.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    notify("STOPPING=1\nSTATUS=letting open requests finish")
    draining = asyncio.create_task(front_end.drain(config.engine.drain_timeout_s))
    aborted = asyncio.create_task(end.wait(2))
    await asyncio.wait([serving, draining, aborted], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for task in (alive, stopping, draining, aborted):
        task.cancel()
    await asyncio.gather(alive, stopping, draining, aborted, return_exceptions=True)
    return ExitCode.ABORTED if end.num_signals > 1 else ExitCode.OK


class _End:
    """Counts the signals to stop."""

    def __init__(self) -> None:
        self.num_signals = 0
        self._changed = asyncio.Event()

    def on_signal(self) -> None:
        self.num_signals += 1
        self._changed.set()

    async def wait(self, wanted: int = 1) -> None:
        while self.num_signals < wanted:
            self._changed.clear()
            await self._changed.wait()


async def _feed_watchdog() -> None:
    interval_s = watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
