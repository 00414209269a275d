"""The process of the websocket front end: uvicorn around the application, systemd's protocol, and shutdown. A single
worker runs in it; several are its children on one socket.

The first SIGTERM or SIGINT drains, a second one stops at once. Sockets that are still open at the end are closed with
1012 (service restart); clients reconnect to the next process and resume detached requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import uvicorn

from frontends.common.auth import check_protection, read_names, read_origins, tls_files
from frontends.common.connection_limits import ConnectionLimits, raise_file_limit
from frontends.common.event_loop import collect_garbage_rarely
from frontends.common.server import FrontendServer
from frontends.websocket.app import SharedState, WebsocketFrontEnd, make_shared
from frontends.websocket.channel import FramesProtocol
from inferengine.client.discovery import check_engines
from inferengine.config import Config
from inferengine.errors import ExitCode
from inferengine.observability.logging import configure
from inferengine.process import stdio
from inferengine.process.listen import AddressTaken, open_listeners
from inferengine.process.reload import Reload
from inferengine.process.system import return_large_blocks
from inferengine.process.workers import TURN_S, SignsOfLife, Workers

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 20.0  # a peer that answers no ping for PING_TIMEOUT_S is gone
PING_TIMEOUT_S = 20.0
BACKLOG = 1024
STOP_TIMEOUT_S = 3
KEEP_ALIVE_S = 24 * 3600  # of uvicorn: `ConnectionTracker` closes the idle ones sooner, and counts them
_START_POLL_S = 0.02


def run_websocket(config: Config, reload: Reload | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns an exit code of ExitCode."""
    configure(config.log)
    raise_file_limit()
    return_large_blocks()
    try:
        (listener, *_) = open_listeners("ws", config.ws.host, config.ws.port)
    except AddressTaken as error:
        print(f"inferengine ws: {error}", file=sys.stderr)
        return ExitCode.ADDRESS
    shared = make_shared(config)
    check_protection("ws", [listener], shared.keys, allow_public=config.ws.allow_public)
    tls_files("ws", config.ws.tls_certificate, config.ws.tls_key)
    read_names("ws", config.ws.allowed_hosts)
    read_origins("ws.origins", config.ws.origins)
    check_engines(config)
    host, port = listener.getsockname()[:2]
    logger.info("listening on %s port %s", host, port)
    signs = SignsOfLife(f"listening on {host} port {port}")
    if config.ws.workers == 1:
        return run_worker(config, shared, listener, signs.turn, reload=reload)

    def serve(worker: int) -> int:
        shared.choose_worker(worker)
        return run_worker(config, shared, listener, lambda stopping: None, parent=parent, reload=reload)

    parent = os.getpid()
    return Workers(
        serve,
        num_workers=config.ws.workers,
        sockets=[listener],
        cells=shared.metrics.cells,
        frozen_after_s=config.engine.frozen_after_s,
        signs=signs,
        reload=reload,
    ).run()


def run_worker(
    config: Config,
    shared: SharedState,
    listener: socket.socket,
    on_turn: Callable[[bool], None],
    *,
    parent: int = 0,
    reload: Reload | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until the process `parent` ends. `on_turn(stopping)` is called from the event
    loop, first when it accepts connections. Reloads on SIGHUP. Returns an exit code of ExitCode."""

    def turn(stopping: bool) -> None:
        on_turn(stopping)
        stdio.retry()
        if reload is not None:
            reload.run_if_due(shared.keys.reload_if_any)

    front_end = WebsocketFrontEnd(config, shared=shared)
    server = FrontendServer(
        server_config(config, front_end, [listener]), connection_limits(config), shared.metrics.refusals
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(_serve(config, front_end, server, listener, turn, parent))


def connection_limits(config: Config) -> ConnectionLimits:
    """Return the limits of this front end's connections."""
    ws = config.ws
    return ConnectionLimits(
        header_s=ws.header_timeout_s,
        body_progress_s=ws.header_timeout_s,  # no request here has a body
        idle_s=ws.idle_timeout_s,
        most=ws.max_connections,
        most_per_address=ws.max_connections_per_address,
    )


def server_config(
    config: Config, front_end: WebsocketFrontEnd, listeners: Sequence[socket.socket] = ()
) -> uvicorn.Config:
    """Return uvicorn's configuration. Messages are not compressed: deltas are too short to gain, and each socket would
    need memory for it."""
    tls = tls_files("ws", config.ws.tls_certificate, config.ws.tls_key)
    return uvicorn.Config(
        front_end.app(listeners),
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
        ws=FramesProtocol,
        ws_max_size=config.ws.max_message_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # as of the HTTP front end
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )


async def _serve(
    config: Config,
    front_end: WebsocketFrontEnd,
    server: FrontendServer,
    listener: socket.socket,
    on_turn: Callable[[bool], None],
    parent: int,
) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_START_POLL_S)
    if not server.started:
        await serving
        return ExitCode.CRASH
    signals = _StopSignals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # after uvicorn has set its own handlers, which drain nothing
        loop.add_signal_handler(number, signals.on_signal)
    collect_garbage_rarely()
    alive = asyncio.create_task(_watch_process(front_end, signals, on_turn, parent))
    stopping = asyncio.create_task(signals.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    on_turn(True)
    draining = asyncio.create_task(front_end.drain(config.engine.drain_timeout_s))
    aborted = asyncio.create_task(signals.wait(2))
    await asyncio.wait([serving, draining, aborted], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    for task in (alive, stopping, draining, aborted):
        task.cancel()
    await asyncio.gather(alive, stopping, draining, aborted, return_exceptions=True)
    return ExitCode.ABORTED if signals.num_signals > 1 else ExitCode.OK


class _StopSignals:
    """Counts SIGTERM and SIGINT."""

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


async def _watch_process(
    front_end: WebsocketFrontEnd, signals: _StopSignals, on_turn: Callable[[bool], None], parent: int
) -> None:
    """Report forever that the event loop runs, and stop when the parent process ends."""
    while True:
        front_end.beat()
        on_turn(signals.num_signals > 0)
        if parent and os.getppid() != parent and not signals.num_signals:
            signals.on_signal()
        await asyncio.sleep(TURN_S)
