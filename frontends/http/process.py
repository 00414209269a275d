"""Run the process of `inferengine http`. A single worker runs in it; several are its children on one socket.

A worker runs uvicorn on sockets that are already open. After a signal it finishes the open streams before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from sse_starlette.sse import AppStatus

from frontends.common.auth import KeyRing, Quotas, check_protection, read_keys, read_names, read_origins, tls_files
from frontends.common.connection_limits import ConnectionLimits, raise_file_limit
from frontends.common.event_loop import collect_garbage_rarely
from frontends.common.server import FrontendServer
from frontends.http.app import make_app, make_metrics, make_quotas, make_service
from frontends.http.middleware import TrustedProxies
from frontends.http.openai.batch_store import check_folder
from frontends.http.openai.response_store import make_database, remove_database
from frontends.http.state import HttpState
from frontends.http.telemetry import HttpMetrics
from inferengine.client.discovery import check_engines
from inferengine.config import Config, HttpConfig
from inferengine.errors import ExitCode
from inferengine.observability.logging import configure
from inferengine.process import stdio
from inferengine.process.listen import AddressTaken, describe, open_listeners
from inferengine.process.reload import Reload
from inferengine.process.system import return_large_blocks, usable_cores
from inferengine.process.workers import SignsOfLife, Workers, choose_num_workers

logger = logging.getLogger(__name__)

TURN_S = 0.25
GRACE_S = 2.0  # for the last events to leave after the drain's end
KEEP_ALIVE_S = 24 * 3600  # of uvicorn: `ConnectionTracker` closes the idle ones sooner, and counts them


@dataclass(frozen=True)
class Shared:
    """State that all workers of a process share, made before the first worker."""

    sockets: list[socket.socket]
    metrics: HttpMetrics
    keys: KeyRing
    quotas: Quotas
    responses_path: Path | None = None

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork."""
        self.metrics.choose_worker(worker)
        self.quotas.choose_worker(worker)


def run_worker(config: Config, shared: Shared, on_turn: Callable[[bool], None], reload: Reload | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the worker's exit code.

    `on_turn(stopping)` is called from the event loop, first when it accepts connections. Reloads on SIGHUP.
    """

    def turn(stopping: bool) -> None:
        on_turn(stopping)
        stdio.retry()
        if reload is not None:
            reload.run_if_due(shared.keys.reload_if_any)

    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]  # it would cut the streams at once
    # For signals before uvicorn installs its own handlers. uvicorn also raises its signals again here when it is done.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    service = make_service(config, shared.metrics, shared.keys, shared.quotas, shared.responses_path)
    tls = tls_files("http", config.http.tls_certificate, config.http.tls_key)
    server = FrontendServer(
        uvicorn.Config(
            make_app(service, shared.sockets),
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # X-Forwarded-For, which any client can write, would make up addresses; ProxyMiddleware reads the scheme.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.engine.drain_timeout_s + 2 * GRACE_S) + 1,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
        ),
        connection_limits(config.http),
        shared.metrics.refusals,
        max_head_bytes=config.http.max_header_bytes,
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(_serve(server, service, shared.sockets, config.engine.drain_timeout_s, turn, signals))


def connection_limits(http: HttpConfig) -> ConnectionLimits:
    """Return the server's connection limits (timeouts in seconds, most connections) from the configuration."""
    return ConnectionLimits(
        header_s=http.header_timeout_s,
        body_progress_s=http.body_progress_timeout_s,
        idle_s=http.idle_timeout_s,
        most=http.max_connections,
        most_per_address=http.max_connections_per_address,
    )


async def _serve(
    server: FrontendServer,
    service: HttpState,
    sockets: list[socket.socket],
    drain_timeout_s: float,
    on_turn: Callable[[bool], None],
    early_signals: list[int],
) -> int:
    serving = asyncio.create_task(server.serve(sockets=sockets))
    parent = os.getppid()
    drain_until: float | None = None
    collect_garbage_rarely()
    while not serving.done():
        now = time.monotonic()
        if server.started:
            service.metrics.cells.beat(now)
            on_turn(server.should_exit)
        if os.getppid() != parent:
            server.should_exit = True  # the parent process, which restarts workers, is gone
        if server.started and early_signals:
            server.should_exit = True
        if server.should_exit and drain_until is None:
            drain_until = now + drain_timeout_s
            service.drain()
        if drain_until is not None and (now >= drain_until or server.num_signals > 1):
            service.abandon_all()
        await asyncio.wait([serving], timeout=TURN_S if server.started else 0.01)
    await serving
    return ExitCode.OK if server.started else ExitCode.CRASH


def run_http(config: Config, reload: Reload | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code. Raises ConfigError for unsafe settings."""
    configure(config.log)
    num_workers = choose_num_workers(config.http.workers, usable_cores())
    config = config.with_values(http={"workers": num_workers})
    raise_file_limit()
    return_large_blocks()
    try:
        sockets = open_listeners("http", config.http.host, config.http.port, config.http.uds)
    except AddressTaken as error:
        print(f"inferengine http: {error}", file=sys.stderr)
        return ExitCode.ADDRESS
    address = describe(sockets[0], "https" if config.http.tls_certificate else "http")
    keys = read_keys(config.auth.keys_file)
    check_protection("http", sockets, keys, allow_public=config.http.allow_public)
    read_names("http", config.http.allowed_hosts)
    read_origins("http.cors_origins", config.http.cors_origins)
    TrustedProxies(config.http.trusted_proxies)
    check_engines(config)
    check_folder(config)
    tls_files("http", config.http.tls_certificate, config.http.tls_key)
    logger.info("listening", extra={"fields": {"address": address, "workers": num_workers}})
    shared = Shared(sockets, make_metrics(num_workers), keys, make_quotas(config, keys))
    signs = SignsOfLife(f"serving {address}")
    if num_workers == 1:
        return run_worker(config, shared, signs.turn, reload)
    responses_path = make_database()
    shared = replace(shared, responses_path=responses_path)

    def serve(worker: int) -> int:
        shared.choose_worker(worker)
        return run_worker(config, shared, lambda stopping: None, reload)

    try:
        return Workers(
            serve,
            num_workers=num_workers,
            sockets=sockets,
            cells=shared.metrics.cells,
            frozen_after_s=config.engine.frozen_after_s,
            signs=signs,
            reload=reload,
        ).run()
    finally:
        remove_database(responses_path)
