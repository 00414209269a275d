"""One worker process: uvicorn over sockets that are open already, until a signal; then streams finish first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from sse_starlette.sse import AppStatus

from frontends.common.acceptor import Server
from frontends.common.connections import Limits
from frontends.common.keys import KeyRing
from frontends.common.protection import tls_files
from frontends.common.quotas import Quotas
from frontends.http.app import make_app, make_service
from frontends.http.metrics import HttpMetrics
from frontends.http.response_shelf import ResponseShelf
from frontends.http.service import Service
from inferengine import output
from inferengine.config import Config, HttpConfig
from inferengine.errors import ExitCode
from inferengine.reload import Reload

logger = logging.getLogger(__name__)

TURN_S = 0.25
GC_THRESHOLD = 20_000  # a stream makes short-lived objects for each token: the default looks at them 30 times as often
GRACE_S = 2.0  # for the last events to leave after the drain's end
KEEP_ALIVE_S = 24 * 3600  # of uvicorn: `Connections` closes the idle ones sooner, and counts them


@dataclass(frozen=True)
class Shared:
    """What all workers of a process have in common, made before the first of them."""

    sockets: list[socket.socket]
    metrics: HttpMetrics
    keys: KeyRing
    quotas: Quotas
    shelf: ResponseShelf | None = None

    def choose_worker(self, worker: int) -> None:
        """After the fork: count as this one."""
        self.metrics.choose_worker(worker)
        self.quotas.choose_worker(worker)


def run_worker(config: Config, shared: Shared, on_turn: Callable[[bool], None], reload: Reload | None = None) -> int:
    """Serve until SIGTERM or SIGINT. `on_turn(stopping)` is called from the event loop, first when it accepts; what
    SIGHUP asks for is done there."""

    def turn(stopping: bool) -> None:
        on_turn(stopping)
        output.retry()
        if reload is not None:
            reload.run_if_due(shared.keys.reload_if_any)

    AppStatus.enable_automatic_graceful_drain = False  # it would cut the streams at once
    # uvicorn raises its signals again when it is done, for whoever handled them before; nobody else is to hear them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    service = make_service(config, shared.metrics, shared.keys, shared.quotas, shared.shelf)
    tls = tls_files("http", config.http.tls_certificate, config.http.tls_key)
    server = Server(
        uvicorn.Config(
            make_app(service, shared.sockets),
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.engine.drain_timeout_s + 2 * GRACE_S) + 1,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
        ),
        connection_limits(config.http),
        shared.metrics.refusals,
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(_serve(server, service, shared.sockets, config.engine.drain_timeout_s, turn))


def connection_limits(http: HttpConfig) -> Limits:
    return Limits(
        header_s=http.header_timeout_s,
        body_progress_s=http.body_progress_timeout_s,
        idle_s=http.idle_timeout_s,
        most=http.max_connections,
        most_per_address=http.max_connections_per_address,
    )


async def _serve(
    server: Server,
    service: Service,
    sockets: list[socket.socket],
    drain_timeout_s: float,
    on_turn: Callable[[bool], None],
) -> int:
    serving = asyncio.create_task(server.serve(sockets=sockets))
    parent = os.getppid()
    drain_until: float | None = None
    gc.collect()
    gc.freeze()  # what was loaded stays: no need to look through it again
    gc.set_threshold(GC_THRESHOLD)
    while not serving.done():
        now = time.monotonic()
        if server.started:
            service.metrics.cells.beat(now)
            on_turn(server.should_exit)
        if os.getppid() != parent:
            server.should_exit = True  # the process that would restart us is gone
        if server.should_exit and drain_until is None:
            drain_until = now + drain_timeout_s
            service.drain()
        if drain_until is not None and (now >= drain_until or len(server._captured_signals) > 1):
            service.abandon_all()
        await asyncio.wait([serving], timeout=TURN_S if server.started else 0.01)
    await serving
    return ExitCode.OK if server.started else ExitCode.CRASH
