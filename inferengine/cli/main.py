"""The command line: `inferengine COMMAND ...`. It finds the command and runs it.

COMMANDS is the table of all commands. A command's module is imported only when it is asked for, so that
`inferengine config` does not wait for torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from inferengine.cli.command import JSON_SWITCH, MOST_USED_KEYS, Command, key_groups, most_used_keys, option_lines
from inferengine.config.model_path import hub_id
from inferengine.errors import ConfigError, ExitCode, InferEngineError


class CommandEntry(NamedTuple):
    """One command: its line in the general help, and the `Command` that is imported when it is asked for. `needs` are
    the extras of the package without which it cannot run."""

    summary: str
    module: str
    function: str
    needs: tuple[str, ...] = ()


EXTRAS = {"engine": "torch", "server": "uvicorn", "ray": "ray"}  # extra → a package that only comes with it
EXECUTOR = "executor"  # what an engine needs: torch, or one of these, with which others compute
OTHER_EXECUTORS = ("aiohttp", "grpc")
EXECUTORS_GROUP = "inferengine.executors"  # entry points of other packages: docs/executor.md
COMMANDS = {
    "up": CommandEntry("engine and front ends together, in one terminal", "up", "run", (EXECUTOR, "server")),
    "engine": CommandEntry(
        "the engine alone: model, KV cache, batching loop, ZeroMQ socket", "serve", "engine", (EXECUTOR,)
    ),
    "executor": CommandEntry(
        "lend this machine's device to an engine elsewhere, over gRPC", "serve", "executor", ("engine",)
    ),
    "http": CommandEntry(
        "the HTTP front end: OpenAI-compatible routes and Server-Sent Events", "serve", "http", ("server",)
    ),
    "ws": CommandEntry("the websocket front end and its chat page", "serve", "ws", ("server",)),
    "fleet": CommandEntry(
        "engines on many machines, placed by Ray: what a fleet is doing", "fleet", "status", ("ray",)
    ),
    "fleet up": CommandEntry("start a fleet of engines on a Ray cluster", "fleet", "up", ("ray",)),
    "fleet serve": CommandEntry("HTTP and websocket front ends of a fleet", "fleet", "serve", ("ray", "server")),
    "fleet watch": CommandEntry(
        "keep the addresses of a fleet's engines in a file, for front ends", "fleet", "watch", ("ray",)
    ),
    "fleet status": CommandEntry("the engines of a fleet: state, address, load", "fleet", "status", ("ray",)),
    "fleet scale": CommandEntry("change how many engines a fleet has", "fleet", "scale", ("ray",)),
    "fleet drain": CommandEntry("let one engine finish and be replaced", "fleet", "drain", ("ray",)),
    "fleet upgrade": CommandEntry(
        "replace all engines, one after the other, while streams run", "fleet", "upgrade", ("ray",)
    ),
    "fleet down": CommandEntry("drain all engines and end the fleet", "fleet", "down", ("ray",)),
    "chat": CommandEntry("talk to a running engine in this terminal", "chat", "run"),
    "bench": CommandEntry("load on any OpenAI-compatible server: latencies, throughput, goodput", "bench", "run"),
    "bench sweep": CommandEntry(
        "the same at 1 to 128 requests in flight, with the point of saturation", "bench", "sweep"
    ),
    "bench arrivals": CommandEntry("burst, steady and Poisson arrivals at rates up to saturation", "bench", "arrivals"),
    "bench pressure": CommandEntry(
        "far more at once than the KV cache holds: nothing may be lost", "bench", "pressure"
    ),
    "bench compare": CommandEntry(
        "this engine and vLLM in process, any shape, several cards at once", "bench", "compare"
    ),
    "bench batch": CommandEntry("batches of several sizes: throughput, share of the roofline, MFU", "bench", "batch"),
    "bench fragmentation": CommandEntry("what blocks of several sizes waste", "bench", "fragmentation"),
    "bench ladder": CommandEntry("five workloads, and what each optimisation gives them", "bench", "ladder"),
    "bench sanity": CommandEntry("ask a server what has one right answer", "bench", "sanity"),
    "bench features": CommandEntry(
        "what sampling features and grammars cost, on one server or two", "bench", "features"
    ),
    "bench paired": CommandEntry("two servers in turn, their ratio, and a gate as exit code", "bench", "paired"),
    "evidence": CommandEntry("run what this machine can, and compare the documents' figures", "bench", "evidence"),
    "profile": CommandEntry(
        "record steps of a running engine: a Chrome trace and where the time goes", "profile", "run"
    ),
    "fetch": CommandEntry("bring a model from the Hugging Face hub into its local cache", "fetch", "run"),
    "doctor": CommandEntry("look at this machine: Python, GPU, driver, ports, disk; with remedies", "doctor", "run"),
    "check": CommandEntry("look for what keeps this configuration from working, with remedies", "check", "run"),
    "ping": CommandEntry("ask the engine whether it is alive: for health checks", "check", "ping"),
    "simulate": CommandEntry(
        "the scheduler in virtual time: capacity, policies, fleets, without a device", "simulate", "run"
    ),
    "simulate fleet": CommandEntry(
        "policies of load balancing over a thousand engines, on four traces", "simulate_fleet", "fleet"
    ),
    "simulate s1": CommandEntry("a reference simulator's 1,000 requests and its 26 metrics", "simulate", "s1"),
    "plan-memory": CommandEntry(
        "what a model needs and what fits, from config.json alone", "plan_memory", "run", ("engine",)
    ),
    "models": CommandEntry(
        "the families of models that are served, and what fits on which card", "plan_memory", "models", ("engine",)
    ),
    "tune": CommandEntry("measure which kernels a model takes on this card, or show it", "tune", "run", ("engine",)),
    "keygen": CommandEntry("make API keys for the front ends and CURVE keys for ZeroMQ over TCP", "keygen", "run"),
    "systemd": CommandEntry("whether the systemd units here are those for this Python", "systemd", "compare"),
    "systemd install": CommandEntry("install the systemd units for this Python, or print them", "systemd", "install"),
    "config": CommandEntry("print the resolved configuration as TOML, with what each key takes", "serve", "config"),
    "completion": CommandEntry("print the completion of commands, flags and values for a shell", "completion", "run"),
}


# What other programs call it, and words that difflib would miss.
SYNONYMS = {
    "serve": "up",
    "start": "up",
    "run": "up",
    "server": "up",
    "launch": "up",
    "websocket": "ws",
    "pull": "fetch",
    "download": "fetch",
    "benchmark": "bench",
    "diagnose": "doctor",
    "collect-env": "doctor",
    "status": "check",
    "health": "ping",
    "ps": "check",
    "complete": "completion",
}


def usage(*, all_keys: bool = False) -> str:
    """Return the text of `inferengine --help`, or of `--help-all` with every key of the configuration."""
    width = max(len(name) for name in COMMANDS)
    listing = "\n".join(f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items())
    keys = key_groups() if all_keys else {f"the {len(MOST_USED_KEYS)} keys most used": most_used_keys()}
    how_to_see_all = "" if all_keys else " `inferengine --help-all` lists them all,\nwith their values and defaults."
    return (
        "usage: inferengine COMMAND [MODEL] [--config FILE] [--section.key VALUE ...]\n\n"
        "  inferengine up                         the embedded model; HTTP on port 8000, a chat page on port 8001\n"
        "  inferengine up qwen3-0.6b              a model from the Hugging Face hub\n"
        "  inferengine up ./my-model --http.port 9000\n\n"
        f"commands:\n{listing}\n" + "\n".join(option_lines(keys)) + "\n\n"
        "Every key of the configuration is a flag (--http.port 9000) and an environment variable\n"
        f"(INFERENGINE_HTTP_PORT=9000).{how_to_see_all}\n"
        "`inferengine COMMAND --help` tells more about one command. With --json a command writes JSON."
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
    if not words or words[0] in ("-h", "--help", "help", "--help-all"):
        print(usage(all_keys=words[:1] == ["--help-all"]))
        return ExitCode.OK if words else ExitCode.USAGE
    if words[0] in ("-V", "--version"):
        from inferengine import __version__

        print(json.dumps({"version": __version__}) if JSON_SWITCH in words else f"inferengine {__version__}")
        return ExitCode.OK
    line = words
    name, words = _command_of(line)
    if name not in COMMANDS:
        print(f"inferengine: {unknown_command(name, line)}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        entry = COMMANDS[name]
        asks_for_help = bool({"-h", "--help", "--help-all"} & set(words))
        if not asks_for_help:
            require(*entry.needs)
        command: Command = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
        if asks_for_help:
            print(command.help(name, all_keys="--help-all" in words))
            return ExitCode.OK
        return command(words)
    except InferEngineError as error:
        print(error_text(name, error, as_json=JSON_SWITCH in words), file=sys.stderr)
        return ExitCode.USAGE if error.code == "invalid_request" else ExitCode.CRASH
    except KeyboardInterrupt:
        return ExitCode.ABORTED


def unknown_command(name: str, words: Sequence[str]) -> str:
    """Return the message for a first word that is no command, with the command that was probably meant."""
    if name.startswith("-"):
        return f"a command comes first, as in 'inferengine up {' '.join(words)}'; commands are {', '.join(COMMANDS)}"
    if "/" in name:
        return f"no command '{name}'; to serve that model: inferengine up {' '.join(words)}"
    cutoff = 0.5 if len(name) < 4 else 0.65
    close = [SYNONYMS[name]] if name in SYNONYMS else difflib.get_close_matches(name, COMMANDS, n=1, cutoff=cutoff)
    if close:
        return f"no command '{name}'; did you mean '{close[0]}'?"
    if hub_id(name) != name:
        return f"no command '{name}'; to serve that model: inferengine up {' '.join(words)}"
    return f"no command '{name}'; commands are {', '.join(COMMANDS)}"


def require(*extras: str) -> None:
    """Raise ConfigError, with the remedy, where an extra of the package is not installed."""
    needs_torch = EXECUTOR in extras and not _has_other_executor()
    wanted_extras = ["engine" if extra == EXECUTOR else extra for extra in extras if extra != EXECUTOR or needs_torch]
    missing = [extra for extra in wanted_extras if importlib.util.find_spec(EXTRAS[extra]) is None]
    if missing:
        wanted = "all" if {"engine", "server"} <= set(missing) else missing[0]
        in_clone = "scripts/install" if wanted in ("all", "engine", "server") else f"scripts/install {wanted}"
        raise ConfigError(
            "packages",
            f"{' and '.join(EXTRAS[extra] for extra in missing)} not installed: pip install 'inferengine[{wanted}]' "
            f"(in a clone: {in_clone})",
        )


def _has_other_executor() -> bool:
    """Return whether something other than torch may compute: a package of this one's executors, or an executor of
    another package."""
    if any(map(importlib.util.find_spec, OTHER_EXECUTORS)):
        return True
    from importlib.metadata import entry_points  # 20 ms that few commands need

    return bool(entry_points(group=EXECUTORS_GROUP))


def error_text(name: str, error: InferEngineError, *, as_json: bool) -> str:
    """Return an error as a command writes it."""
    if not as_json:
        return f"inferengine {name}: {error}"
    found = {"code": error.code, "field": error.field, "message": error.message, "remedy": error.kind.remedy}
    return json.dumps({"error": found}, ensure_ascii=False)


def _command_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the command, of two words or one, and the words after it."""
    two = " ".join(words[:2])
    return (two, words[2:]) if two in COMMANDS else (words[0], words[1:])


def _is_unread(stream: TextIO) -> bool:
    """Return whether the stream is a pipe or socket whose reader has closed it."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are reported whatever is asked for
    return bool(poll.poll(0))
