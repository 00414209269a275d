"""The command line: `inferengine COMMAND ...`. It finds the command and runs it.

COMMANDS is the table of all commands. A command's module is imported only when it is asked for, so that
`inferengine config` does not wait for torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from inferengine.cli.command import Command
from inferengine.errors import ExitCode, InferEngineError


class Entry(NamedTuple):
    """One command: its line in the general help, and the `Command` that is imported when it is asked for."""

    summary: str
    module: str
    function: str


COMMANDS = {
    "up": Entry("engine and front ends together, in one terminal", "up", "run"),
    "engine": Entry("the engine alone: model, KV cache, batching loop, ZeroMQ socket", "serve", "engine"),
    "http": Entry("the HTTP front end: OpenAI-compatible routes and Server-Sent Events", "serve", "http"),
    "ws": Entry("the websocket front end and its chat page", "serve", "ws"),
    "chat": Entry("talk to a running engine in this terminal", "chat", "run"),
    "bench": Entry("load on any OpenAI-compatible server: latencies, throughput, goodput", "bench", "run"),
    "profile": Entry("record steps of a running engine: a Chrome trace and where the time goes", "profile", "run"),
    "check": Entry("look for what would keep the service from working, with remedies", "check", "run"),
    "simulate": Entry("the scheduler in virtual time: capacity, policies, fleets, without a device", "simulate", "run"),
    "plan-memory": Entry("what a model needs and what fits, from its config.json alone", "plan_memory", "run"),
    "keygen": Entry("make API keys for the front ends and CURVE keys for ZeroMQ over TCP", "keygen", "run"),
    "config": Entry("print the resolved configuration as TOML", "serve", "config"),
}


def usage() -> str:
    """The text of `inferengine --help`."""
    width = max(len(name) for name in COMMANDS)
    listing = "\n".join(f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items())
    return (
        "usage: inferengine COMMAND [MODEL] [--config FILE] [--section.key VALUE ...]\n\n"
        f"commands:\n{listing}\n\n"
        "Every key of the configuration is a flag (--http.port 9000) and an environment variable\n"
        "(INFERENGINE_HTTP_PORT=9000): `inferengine config` lists them all.\n"
        "`inferengine COMMAND --help` tells more about one command."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the process's exit code (see errors.ExitCode)."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here: a closed pipe found at the interpreter's end is reported as an error
        return code
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        with open(os.devnull, "wb") as nowhere:
            for stream in unread:  # their buffers are flushed at the end, to nowhere
                os.dup2(nowhere.fileno(), stream.fileno())
        return ExitCode.UNREAD


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return ExitCode.OK if words else ExitCode.USAGE
    if words[0] in ("-V", "--version"):
        from inferengine import __version__

        print(f"inferengine {__version__}")
        return ExitCode.OK
    name = words[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else f"; commands are {', '.join(COMMANDS)}"
        print(f"inferengine: no command '{name}'{hint}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        entry = COMMANDS[name]
        command: Command = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
        if any(word in ("-h", "--help") for word in words[1:]):
            print(command.help(name))
            return ExitCode.OK
        return command(words[1:])
    except InferEngineError as error:
        print(f"inferengine {name}: {error}", file=sys.stderr)
        return ExitCode.USAGE if error.code == "invalid_request" else ExitCode.CRASH
    except KeyboardInterrupt:
        return ExitCode.ABORTED


def _is_unread(stream: TextIO) -> bool:
    """Whether it is a pipe or socket whose reader has closed it."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are reported whatever is asked for
    return bool(poll.poll(0))
