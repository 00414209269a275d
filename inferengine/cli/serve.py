"""The service's processes, each alone: the engine, the HTTP and the websocket front end; and their configuration.

Each process reads its configuration first and protects itself from a standard output that blocks. It imports its
libraries last, so that a mistake in the configuration is reported at once.
"""

from __future__ import annotations

import json

from inferengine.cli.command import JSON_LOG, Arguments, Option, command, log_as_json
from inferengine.config import Config, describe, share_cores_with_others, to_toml
from inferengine.errors import ExitCode
from inferengine.process import stdio
from inferengine.process.reload import Reload

SERVICE_OPTIONS = {"options": (JSON_LOG,)}


@command(SERVICE_OPTIONS, takes_model=True, sections=("model", "engine", "cache", "scheduler", "speculation"))
def engine(arguments: Arguments) -> int:
    """Run the engine alone.

    It loads the model, binds its ZeroMQ socket and serves until SIGTERM, which lets running requests finish
    (engine.drain_timeout_s); a second SIGTERM ends at once. SIGHUP reads the configuration again (log.level). MODEL is
    a checkpoint folder, or a model in the hub's local cache (`inferengine fetch MODEL`); without it the embedded model
    is served.

    Exit codes: 0 drained, 1 crash, 2 configuration, 3 the model cannot be loaded, 4 it does not fit in memory,
    5 the socket cannot be bound, 6 the loop or the I/O thread stopped turning, 7 a step stalled, 130 drain cut short.
    """
    config, reload = _prepare(arguments)
    share_cores_with_others()
    from inferengine.engine.process import run_engine

    return run_engine(config, reload)


@command(SERVICE_OPTIONS, takes_model=True, sections=("remote", "model", "engine", "cache", "speculation"))
def executor(arguments: Arguments) -> int:
    """Lend this machine's device to an engine elsewhere, over gRPC.

    The engine runs with engine.executor = remote and remote.address; it schedules, this process computes. One engine
    at a time. MODEL must be the same on both sides. Beyond loopback addresses both sides need certificates
    (remote.tls_ca, tls_certificate, tls_key).
    """
    config, _ = _prepare(arguments)
    share_cores_with_others()
    from inferengine.engine.process import run_executor

    return run_executor(config)


@command(SERVICE_OPTIONS, sections=("http",))
def http(arguments: Arguments) -> int:
    """Run the HTTP front end: OpenAI-compatible routes, Server-Sent Events, health and metrics.

    It needs no model files: tokenizer and chat template come from the engine over the wire. It may start before the
    engine and outlive it. A listening socket handed over by systemd is used instead of http.host and http.port.
    """
    config, reload = _prepare(arguments)
    from frontends.http.process import run_http

    return run_http(config, reload)


@command(SERVICE_OPTIONS, sections=("ws",))
def ws(arguments: Arguments) -> int:
    """Run the websocket front end: many requests over one socket, and the chat page.

    It needs no model files, may start before the engine and outlive it. A listening socket handed over by systemd is
    used instead of ws.host and ws.port.
    """
    config, reload = _prepare(arguments)
    from frontends.websocket.process import run_websocket

    return run_websocket(config, reload)


@command(
    {"options": (Option("--json", "JSON: each key's value, default, type, choices and meaning"),)}, takes_model=True
)
def config(arguments: Arguments) -> int:
    """Print the configuration that these flags, the environment and the file give together.

    It is a TOML file in which each key carries its meaning and the values that it takes. Write it to a file and pass
    that as --config to keep it.
    """
    print(
        json.dumps(describe(arguments.config), indent=1) if arguments.values["json"] else to_toml(arguments.config),
        end="",
    )
    return ExitCode.OK


def _prepare(arguments: Arguments) -> tuple[Config, Reload]:
    """Do what the three processes have in common before they import their libraries."""
    found = log_as_json(arguments)
    reload = Reload(found, lambda: _read_again(arguments))
    stdio.protect(json_lines=found.log.format == "json")
    return found, reload


def _read_again(arguments: Arguments) -> Config:
    read = arguments.read()
    return read.with_values(log={"format": "json"}) if arguments.values["json"] else read
