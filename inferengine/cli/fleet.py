"""`inferengine fleet ...`: engines on many machines, placed and restarted by Ray."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferengine.cli.command import JSON_LOG, Arguments, Option, command, log_as_json
from inferengine.cli.terminal import Terminal
from inferengine.cli.up import (
    WATCHDOG_MARGIN_S,
    banner,
    front_end_listeners,
    front_end_silence_s,
    has_terminal,
    service_spec,
)
from inferengine.config import Config
from inferengine.errors import ConfigError, ExitCode, InferEngineError
from inferengine.fleet.spec import FleetKeys, FleetSpec, Goal, engine_settings
from inferengine.process import listen, stdio
from inferengine.process.child import ChildSpec
from inferengine.process.supervisor import Supervisor

if TYPE_CHECKING:  # at run time Ray is imported only by commands that connect to a cluster
    from inferengine.fleet.actors import Directory

logger = logging.getLogger(__name__)

ASK_S = 0.5  # between requests for the fleet's state
NOTICE_S = 10.0  # between lines about a wait in which nothing changes

RAY = Option(
    "--ray ADDRESS",
    "the Ray cluster: HOST:PORT of its head on a machine that is a node of it, ray://HOST:PORT from elsewhere, auto "
    "for the cluster of this machine",
    "auto",
)
FLEET = Option("--fleet NAME", "name of the fleet; several can be on one cluster", "main")
MODEL = Option("--model M", "the model; the same as the bare argument MODEL", None, kind=str)
TENSOR_PARALLEL = Option(
    "--tensor-parallel N", "cards of each engine, all of one machine: --engine.tensor_parallel N", None, kind=int
)
CPUS = Option("--cpus N", "processor cores that Ray sets aside for each engine", 1.0)
SURGE = Option(
    "--surge N", "extra engines while others are replaced, 1 or 0; 0 needs no additional room on the machines", 1
)
QUEUE = Option("--queue N", "waiting requests per engine above which engines are added", 4.0)
FIRST_TOKEN = Option(
    "--first-token-ms N",
    "milliseconds to the first token (95th percentile) above which engines are added; 0: no limit",
    0.0,
)
WAIT = Option("--wait S", "seconds to wait until the change is done; 0: return at once", 600.0)
JSON = Option("--json", "print the fleet's state as JSON")
FOLDER = Option("--folder FOLDER", "folder for the front ends' files; created if it is missing", "fleet")
WHERE = (RAY, FLEET)
ENGINE_OPTIONS = (MODEL, TENSOR_PARALLEL, CPUS, SURGE, QUEUE, FIRST_TOKEN)


@command(
    {
        "the fleet": (
            *WHERE,
            Option("--engines N", "number of engines; with --least or --most: their number at the start", 1, minimum=1),
            Option("--least N", "fewest engines; their number then follows the load", None, kind=int, minimum=1),
            Option("--most N", "most engines; their number then follows the load", None, kind=int, minimum=1),
            *ENGINE_OPTIONS,
        ),
        "the output": (WAIT, JSON),
    },
    takes_model=True,
    lists_keys=True,
)
def up(arguments: Arguments) -> int:
    """Start a fleet: engines on the machines of a Ray cluster, with keys of its own.

    Each engine is a Ray actor that runs `inferengine engine` on a free port, with CURVE. Ray places it, and restarts it
    when it or its machine is gone. The package and the model must be on every machine. The command returns when all
    engines are READY; `inferengine fleet serve` then starts the front ends. With --least or --most the number of
    engines follows the load. The configuration keys of this command line apply to every engine.

      inferengine fleet up --ray 10.0.0.1:6379 --model ./my-model --engines 8 --tensor-parallel 2
      inferengine fleet up ./my-model --engines 4 --most 16 --first-token-ms 500
    """
    from inferengine.wire import curve

    values = arguments.values
    config = _engine_config(arguments)
    least, most = _bounds(values, values["engines"])
    settings = engine_settings(config)
    with _cluster(arguments):
        from inferengine.fleet.actors import Directory

        spec = _spec(config, values, settings, least, most)
        engine, front = curve.new_pair(), curve.new_pair()
        keys = FleetKeys(*(key.decode() for key in (*engine, *front)))
        directory = Directory.start(values["fleet"], Goal(spec, values["engines"]), keys)
        return _wait(arguments, directory, f"fleet serve --ray {values['ray']} --fleet {values['fleet']}")


@command({"the fleet": WHERE, "the output": (JSON,)})
def status(arguments: Arguments) -> int:
    """Show a fleet: the state, address, load and restarts of each engine, and the change in progress."""
    with _directory(arguments) as directory:
        _show(arguments, directory.ask("status"))
        return ExitCode.OK


@command(
    {
        "the fleet": (
            *WHERE,
            Option("--engines N", "a fixed number of engines", None, kind=int, minimum=1),
            Option("--least N", "fewest engines; their number then follows the load", None, kind=int, minimum=1),
            Option("--most N", "most engines; their number then follows the load", None, kind=int, minimum=1),
        ),
        "the output": (WAIT, JSON),
    }
)
def scale(arguments: Arguments) -> int:
    """Change the number of engines of a fleet: to a fixed number, or to bounds within which it follows the load.

    Surplus engines finish their requests before they end.
    """
    values = arguments.values
    if (values["engines"] is None) == (values["least"] is None and values["most"] is None):
        raise ConfigError("--engines", "give either --engines N, or --least N, --most N or both")
    with _directory(arguments) as directory:
        state = directory.ask("status")
        least, most = (
            (values["engines"], values["engines"])
            if values["engines"] is not None
            else (values["least"] or state["least"], values["most"] or state["most"])
        )
        if least > most:
            raise ConfigError("--least", f"{least} is above --most, which is {most}: lower one, or raise the other")
        directory.ask("scale", least, most)
        return _wait(arguments, directory)


@command(
    {
        "the fleet": (*WHERE, Option("--engine NAME", "the engine, as `fleet status` names it", None, kind=str)),
        "the output": (WAIT, JSON),
    }
)
def drain(arguments: Arguments) -> int:
    """Drain one engine and start another in its place, where Ray finds room.

    Front ends send it no new requests from then on. Requests that have not ended after engine.drain_timeout_s continue
    on other engines. To empty a machine use Ray's own `ray drain-node`: its engines are replaced first, then drained.
    """
    found = re.fullmatch(r"engine-(\d+)", arguments.values["engine"] or "")
    if found is None:
        raise ConfigError("--engine", "a name must follow, as 'inferengine fleet status' shows it, such as engine-3")
    with _directory(arguments) as directory:
        if not directory.ask("drain", int(found[1])):
            raise ConfigError("--engine", f"there is no {found[0]}: 'inferengine fleet status' shows those that are")
        return _wait(arguments, directory)


@command(
    {"the fleet": (*WHERE, *ENGINE_OPTIONS), "the output": (WAIT, JSON)},
    takes_model=True,
    lists_keys=True,
)
def upgrade(arguments: Arguments) -> int:
    """Replace all engines, one after the other, by engines with this command line's model and configuration.

    A new engine is READY before an old one drains, and streams that do not end in time continue on other engines. New
    engines run the package version that is installed on their machine now. If the first new engine does not start, the
    upgrade stops and the old engines keep serving; another `fleet upgrade` resumes from there. The bounds of the
    fleet's size stay as they are.
    """
    config = _engine_config(arguments)
    settings = engine_settings(config)
    with _directory(arguments) as directory:
        spec = _spec(config, arguments.values, settings, 1, 1)  # the directory keeps the bounds that the fleet has
        directory.ask("upgrade", spec.to_map())
        return _wait(arguments, directory)


@command({"the fleet": (*WHERE, Option("--now", "end the engines at once")), "the output": (WAIT, JSON)})
def down(arguments: Arguments) -> int:
    """End a fleet: the engines finish their requests (engine.drain_timeout_s) and are removed, then the directory."""
    with _directory(arguments) as directory:
        directory.ask("close", at_once=arguments.values["now"])
        deadline = time.monotonic() + arguments.values["wait"]
        while (state := directory.ask("status"))["engines"]:
            if time.monotonic() > deadline:
                raise InferEngineError(
                    "draining", "Engines still finish what runs: wait with another 'fleet down', or end it with --now."
                )
            time.sleep(ASK_S)
        directory.remove()
        if arguments.values["json"]:
            print(json.dumps(state))
        else:
            print(f"The fleet {directory.fleet} has ended.")
        return ExitCode.OK


@command(
    {
        "the fleet": (*WHERE, FOLDER, Option("--once", "write the files, and exit as soon as there is an engine")),
        "options": (JSON_LOG,),
    }
)
def watch(arguments: Arguments) -> int:
    """Write the files that a fleet's front ends need: FOLDER/engines, FOLDER/front.key and FOLDER/front.toml.

    The command runs until it is stopped, and keeps the addresses up to date. Front ends on this machine then need no
    Ray: `inferengine http --config FOLDER/front.toml`. While the fleet's directory or Ray is away, the files stay as
    they are. `inferengine fleet serve` runs this and the front ends.
    """
    config = log_as_json(arguments)
    stdio.protect(json_lines=config.log.format == "json")
    from inferengine.fleet.watcher import RETRY_S
    from inferengine.observability.logging import configure

    configure(config.log)
    once, complaint = arguments.values["once"], ""
    while True:
        try:
            with _directory(arguments) as directory:
                signal.signal(
                    signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK)
                )  # Ray's own handler prints a stack trace
                if _watch(directory, Path(arguments.values["folder"]), once=once):
                    return ExitCode.OK
        except InferEngineError as error:
            if once or error.field == "--folder":
                raise
            if str(error) != complaint:  # the fleet or the cluster may come back, so keep trying
                complaint = str(error)
                logger.warning("%s", complaint)
        time.sleep(RETRY_S)


def _watch(directory: Directory, folder: Path, *, once: bool) -> bool:
    """Write the files until the directory is lost; with `once` until there is an engine.

    Returns whether `once` is done: False means that the caller connects again.
    """
    from inferengine.fleet.watcher import EngineWatcher, write_front_end_files
    from inferengine.process.system import Notifier
    from inferengine.wire.curve import KeyPair

    keys = directory.ask("front_end_keys")
    pair = KeyPair(keys["front_public"].encode(), keys["front_secret"].encode())
    files = write_front_end_files(folder, pair, keys["engine_public"])
    watcher = EngineWatcher(files.engines, lambda: directory.ask("addresses"))
    Notifier.from_environment().send("READY=1", f"STATUS=writing {files.engines}")
    watcher.run(lambda: once and watcher.num_engines > 0)
    return once and watcher.num_engines > 0


@command(
    {
        "the fleet": (
            *WHERE,
            FOLDER._replace(help="folder for the front ends' files; default: a temporary one", default=""),
        ),
        "options": (JSON_LOG,),
    },
    sections=("http", "ws"),
)
def serve(arguments: Arguments) -> int:
    """Run a fleet's HTTP and websocket front ends on this machine, and the watcher that tells them the addresses.

    Like `inferengine up` without an engine: a process that ends is restarted, and the first Ctrl-C or SIGTERM lets open
    requests finish. Any number of machines can run front ends of one fleet. Only the process `watch` connects to Ray.
    """
    config = log_as_json(arguments)
    stdio.protect(json_lines=config.log.format == "json")
    fleet = [value for option in WHERE for value in (option.flag, arguments.values[option.name])]
    with contextlib.ExitStack() as stack:
        try:
            http, ws = front_end_listeners(stack, config)
        except listen.AddressTaken as error:
            print(f"inferengine fleet serve: {error}", file=sys.stderr)
            return ExitCode.ADDRESS
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferengine-fleet-")))
        files = Path(arguments.values["folder"] or folder / "files")
        watching = service_spec("watch", config, None)
        command = [*watching.command[:-1], "fleet", "watch", *fleet, "--folder", str(files)]
        code = subprocess.run([*command, "--once"], env=dict(watching.environment)).returncode
        if code != ExitCode.OK:
            return code  # the command has printed the reason
        config = _front_end_config(config, files, http, ws)
        terminal = Terminal(sys.stdout, json_lines=config.log.format == "json", name_width=5, usual_s=5.0)
        terminal.begin(f"starting the front ends of fleet {arguments.values['fleet']}")
        front_ends = [
            ChildSpec("watch", command, watching.environment),
            service_spec("http", config, http, watchdog_s=front_end_silence_s(config)),
            service_spec("ws", config, ws, watchdog_s=front_end_silence_s(config)),
        ]
        supervisor = Supervisor(
            [],
            front_ends,
            folder,
            terminal,
            drain_timeout_s=config.engine.drain_timeout_s,
            hangup_stops=has_terminal(),
            when_ready=lambda seconds: terminal.block(banner(config, http, ws, seconds)),
        )
        ended = supervisor.run()
        terminal.end_progress()
        return ended


# -- what the commands share -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(arguments: Arguments) -> Iterator[None]:
    from inferengine.fleet import actors

    actors.connect(arguments.values["ray"])
    try:
        yield
    finally:
        actors.disconnect()


@contextlib.contextmanager
def _directory(arguments: Arguments) -> Iterator[Directory]:
    with _cluster(arguments):
        from inferengine.fleet.actors import Directory

        yield Directory.find(arguments.values["fleet"])


def _engine_config(arguments: Arguments) -> Config:
    """Return the engines' configuration: the keys of this command line, and its flags that set one. Raises ConfigError
    for a flag that is out of range."""
    config, values = arguments.config, arguments.values
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", values["fleet"]) is None:
        raise ConfigError("--fleet", "a name has letters, digits, - _ and . and begins with a letter or a digit")
    if values["surge"] not in (0, 1):
        raise ConfigError("--surge", f"must be 1 or 0; got {values['surge']}")
    if values["queue"] <= 0:
        raise ConfigError("--queue", "must be above 0")
    if values["model"] is not None:
        if config.model.path and config.model.path != values["model"]:
            raise ConfigError("--model", f"and '{config.model.path}' name two models: give one")
        config = config.with_values(model={"path": values["model"]})
    if values["tensor_parallel"] is not None:
        config = config.with_values(engine={"tensor_parallel": values["tensor_parallel"]})
    return config


def _bounds(values: Mapping[str, Any], engines: int) -> tuple[int, int]:
    """Return the fewest and the most engines; both are `engines` if neither --least nor --most is given."""
    if values["least"] is None and values["most"] is None:
        return engines, engines
    least, most = values["least"] or 1, values["most"] or engines
    if not least <= engines <= most:
        raise ConfigError("--engines", f"{engines} must be between --least, {least}, and --most, {most}")
    return least, most


def _spec(config: Config, values: Mapping[str, Any], settings: Mapping[str, str], least: int, most: int) -> FleetSpec:
    """Return the engines that this command line wants. Needs a connection to Ray, which knows the cluster's GPUs."""
    from inferengine.fleet.actors import cluster_gpus

    device = config.engine.device
    has_gpus = device == "cuda" or (device == "auto" and cluster_gpus() > 0)
    return FleetSpec(
        settings=settings,
        least=least,
        most=most,
        cpus=values["cpus"],
        gpus=config.engine.tensor_parallel if has_gpus else 0,
        tensor_parallel=config.engine.tensor_parallel,
        drain_timeout_s=config.engine.drain_timeout_s,
        watchdog_s=config.engine.frozen_after_s + WATCHDOG_MARGIN_S,
        surge=values["surge"],
        queue=values["queue"],
        first_token_ms=values["first_token_ms"],
    )


def _wait(arguments: Arguments, directory: Directory, serve_with: str = "") -> int:
    """Wait until the fleet has reached its goal, and show it. Raises engine_unavailable, naming what is missing."""
    began, said, said_s = time.monotonic(), "", 0.0
    while True:
        state = directory.ask("status")
        now = time.monotonic()
        if state["settled"] or not arguments.values["wait"]:
            _show(arguments, state)
            if serve_with and not arguments.values["json"]:
                print(f"Front ends: inferengine {serve_with}")
            return ExitCode.OK
        missing = what_is_missing(state)
        if state["failure"]:
            raise InferEngineError(
                "engine_unavailable",
                f"No engine of this configuration starts: {state['failure']}. Correct it with 'inferengine fleet "
                "upgrade', or end the fleet with 'fleet down'.",
            )
        if now - began > arguments.values["wait"]:
            raise InferEngineError("engine_unavailable", f"{missing} after {arguments.values['wait']:g} s (--wait).")
        if not arguments.values["json"] and (missing != said or now - said_s > NOTICE_S):
            print(f"{now - began:5.1f} s  {missing}", flush=True)
            said, said_s = missing, now
        time.sleep(ASK_S)


def what_is_missing(state: dict[str, Any]) -> str:
    """Return one line about what separates a fleet from its goal, with the remedy where Ray has no room."""
    engines = state["engines"]
    ready = sum(engine["state"] == "ready" for engine in engines)
    parts = [f"{ready} of {state['wanted']} engines are READY"]
    outdated = sum(engine["revision"] != state["revision"] for engine in engines)
    draining = sum(engine["state"] == "draining" for engine in engines)
    without_room = sum(engine["state"] == "starting" and not engine["pid"] for engine in engines)
    if outdated:
        parts.append(f"{outdated} are still to be replaced")
    if draining:
        parts.append(f"{draining} drain")
    if without_room:
        remedy = "'ray status' shows what is free; " + (
            "--surge 0 needs no more" if outdated else "--cpus asks for less"
        )
        parts.append(f"{without_room} wait for room on a machine or for Ray ({remedy})")
    return ", ".join(parts)


def _show(arguments: Arguments, state: dict[str, Any]) -> None:
    if arguments.values["json"]:
        print(json.dumps(state))
        return
    print(f"fleet {state['fleet']}: {what_is_missing(state)}")
    if state["failure"]:
        print(f"the configuration of revision {state['revision']} does not start: {state['failure']}")
    rows = [("engine", "state", "revision", "address", "running", "waiting", "restarts", "status")]
    for engine in state["engines"]:
        figures = [engine[key] for key in ("revision", "address", "running", "waiting", "restarts", "status")]
        rows.append((engine["name"], engine["state"], *(str(figure) for figure in figures)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())


def _front_end_config(config: Config, folder: Path, http: socket.socket, ws: socket.socket) -> Config:
    """Return the front ends' configuration, with the addresses and keys that `fleet watch` has written."""
    import tomllib

    from inferengine.fleet.watcher import FrontEndFiles

    written = tomllib.loads(FrontEndFiles.of(folder).configuration.read_text(encoding="utf-8"))
    return config.with_values(
        wire=written["wire"],
        http={} if config.http.uds else {"port": http.getsockname()[1]},
        ws={"port": ws.getsockname()[1]},
    )
