"""`run_http`: the process behind `inferengine http`. One worker runs in it; several are its children on one socket."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from frontends.common.descriptors import raise_file_limit
from frontends.common.hosts import read_names
from frontends.common.keys import read_keys
from frontends.common.protection import check_protection, tls_files
from frontends.common.workers import SignsOfLife, Workers
from frontends.http.app import make_metrics, make_quotas, make_shelf
from frontends.http.response_shelf import make_folder, remove_folder
from frontends.http.worker import Shared, run_worker
from inferengine.config import Config
from inferengine.errors import ExitCode
from inferengine.heap import return_large_blocks
from inferengine.listening import AddressTaken, describe, open_listeners
from inferengine.logs import configure
from inferengine.reload import Reload

logger = logging.getLogger(__name__)


def run_http(config: Config, reload: Reload | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code. Raises ConfigError for what may not be served
    like this."""
    configure(config.log)
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
    tls_files("http", config.http.tls_certificate, config.http.tls_key)
    logger.info("listening", extra={"fields": {"address": address, "workers": config.http.workers}})
    shared = Shared(sockets, make_metrics(config.http.workers), keys, make_quotas(config, keys))
    signs = SignsOfLife(f"serving {address}")
    if config.http.workers == 1:
        return run_worker(config, shared, signs.turn, reload)
    folder = make_folder()
    shared = replace(shared, shelf=make_shelf(folder))

    def serve(worker: int) -> int:
        shared.choose_worker(worker)
        return run_worker(config, shared, lambda stopping: None, reload)

    try:
        return Workers(
            serve,
            num_workers=config.http.workers,
            sockets=sockets,
            cells=shared.metrics.cells,
            frozen_after_s=config.engine.frozen_after_s,
            signs=signs,
            reload=reload,
        ).run()
    finally:
        remove_folder(folder)
