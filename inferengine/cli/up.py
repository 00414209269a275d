"""`inferengine up`: the whole service in one terminal, under a supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path

from inferengine.cli.command import Arguments, command
from inferengine.cli.terminal import Terminal
from inferengine.config import Config, child_environment, engine_address
from inferengine.errors import ExitCode
from inferengine.process import listen, stdio
from inferengine.process.child import ChildSpec
from inferengine.process.supervisor import Supervisor

WATCHDOG_MARGIN_S = 10.0  # a frozen engine ends by itself and logs why; the supervisor kills one that cannot


@command(takes_model=True)
def run(arguments: Arguments) -> int:
    """Run the engine, the HTTP front end and the websocket front end together, each as a process of its own.

    A process that crashes is started again by itself; the others go on. Ctrl-C or SIGTERM lets running requests
    finish, a second one ends at once. SIGHUP does the same where the service has a terminal, because that terminal is
    gone then; without one, each process reads its configuration again. MODEL is a checkpoint folder or a hub id in the
    local cache; without it the embedded model is served.

      inferengine up                                  the embedded model on http://127.0.0.1:8000
      inferengine up ./my-model --http.port 9000      a checkpoint folder
      inferengine up --engine.max_num_seqs 128 --config service.toml
    """
    config = arguments.config
    stdio.protect(json_lines=config.log.format == "json")
    with contextlib.ExitStack() as stack:
        try:
            http = stack.enter_context(_http_listener(config))
            ws = stack.enter_context(listen.listen_tcp(config.ws.host, config.ws.port, "ws"))
        except listen.AddressTaken as error:
            print(f"inferengine up: {error}", file=sys.stderr)
            return ExitCode.ADDRESS
        config = config.with_values(
            wire={"socket": engine_address(config)},
            http={} if config.http.uds else {"port": http.getsockname()[1]},
            ws={"port": ws.getsockname()[1]},
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferengine-up-")))
        terminal = Terminal(sys.stdout, json_lines=config.log.format == "json")
        supervisor = Supervisor(
            _spec("engine", config, None, watchdog_s=config.engine.frozen_after_s + WATCHDOG_MARGIN_S),
            [_spec("http", config, http), _spec("ws", config, ws)],
            folder,
            terminal,
            drain_timeout_s=config.engine.drain_timeout_s,
            hangup_stops=_has_terminal(),
            when_ready=lambda seconds: terminal.block(banner(config, http, ws, seconds)),
        )
        code = supervisor.run()
        terminal.end_progress()
        return code


def banner(config: Config, http: socket.socket, ws: socket.socket, seconds: float) -> str:
    """The text shown once everything runs: the addresses, and a command to try."""
    if config.http.uds:
        address, target = f"unix:{config.http.uds}", f"--unix-socket {config.http.uds} http://localhost"
    else:
        address = target = listen.url(http, scheme="https" if config.http.tls_certificate else "http")
    return "\n".join(
        [
            "",
            f"Ready after {seconds:.1f} s. Ctrl-C stops.",
            f"  HTTP       {address}",
            f"  chat page  {listen.url(ws, path='/', scheme='https' if config.ws.tls_certificate else 'http')}",
            f"  ZeroMQ     {engine_address(config)}",
            "Try:",
            f"  curl {target}/v1/completions -H 'Content-Type: application/json' \\",
            """    -d '{"prompt": "Once upon a time", "max_tokens": 40}'""",
            "",
        ]
    )


def _has_terminal() -> bool:
    """Whether the service has a terminal. When that is closed, the service must end by itself."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _http_listener(config: Config) -> socket.socket:
    if config.http.uds:
        return listen.listen_unix(config.http.uds)
    return listen.listen_tcp(config.http.host, config.http.port, "http")


def _spec(name: str, config: Config, listener: socket.socket | None, *, watchdog_s: float = 0.0) -> ChildSpec:
    command = [sys.executable, "-m", "inferengine.cli", name]
    return ChildSpec(name, command, child_environment(config), listener, watchdog_s)
