"""`inferengine check`: find what keeps the service from working on this machine, with this configuration.

`inferengine ping` asks the engine alone, for health checks.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from inferengine.cli import model_files
from inferengine.cli.command import Arguments, Option, command
from inferengine.config import Config, cache_directory, engine_address, status_address, unsafe_folder
from inferengine.config.model_path import draft_folder, model_folder
from inferengine.errors import ConfigError, ExitCode, InferEngineError
from inferengine.process import listen

OK, NOTE, PROBLEM = "ok", "note", "problem"
ENGINE_TIMEOUT_S = 1.0
MAX_HEALTH_BYTES = 65536
LONGEST_UNIX_PATH = 107  # bytes, sockaddr_un
ENGINE_UNIT = "inferengine-engine.service"
UNIT_FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
HIDDEN_FROM_UNITS = ("/root", "/home", "/run/user")  # ProtectHome=
REINSTALL = "sudo inferengine systemd install writes units that see it, or take a Python that all users may run"
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:<[0-9.]+,)?>=\s*([0-9.]+)(?:,<[0-9.]+)?\s*(;.*)?$")
EXTRA_MARKER = re.compile(r"extra == '([a-z-]+)'")
PARTS = {"": "client", "server": "front ends", "engine": "engine"}  # extra → what it brings
MARK_OF_PART = {"server": "uvicorn", "engine": "torch"}  # without this package the part was not asked for

FROZEN_AFTER_MS = 30_000.0  # a loop that has not turned for so long hangs; it turns while a model loads
PING_OPTIONS = {
    "options": (
        Option("--ready", "succeed only when the engine takes requests"),
        Option("--timeout S", "longest wait for the answer, in seconds", 5.0, kind=float),
        Option("--json", "print the answer as JSON"),
    )
}


class Finding(NamedTuple):
    """One line of the report. The text of a problem ends with its remedy."""

    grade: str
    subject: str
    text: str


@command(
    {
        "options": (
            Option("--compare", "compare with transformers layer by layer, and check nothing else"),
            Option("--json", "print the findings as JSON"),
        )
    },
    takes_model=True,
    reads_late=True,
)
def run(arguments: Arguments) -> int:
    """Look for what would keep the service from working on this machine, with this configuration.

    It looks at the Python packages, the configuration, the model's files, the device, the engine's socket, the ports,
    and whether an engine answers. One line each: ok, note (worth knowing) or problem (with its remedy). The exit code
    is 1 when there is a problem, 2 when the configuration itself cannot be used.

    With --compare it runs the model beside transformers' own implementation over the same tokens and shows, layer by
    layer, where the two differ. The exit code is 1 when they do.
    """
    if arguments.values["compare"]:
        return compare(arguments)
    return report_on(
        arguments, packages(), (model, device, onnx, speculation, engine_socket, ports, interpreter, engine)
    )


def report_on(
    arguments: Arguments, first: Iterable[Finding], looks: Sequence[Callable[[Config], Iterable[Finding]]]
) -> int:
    """Print `first`, and what each of `looks` finds with the configuration. Returns the exit code.

    On a terminal each line is written when it is found.
    """
    printer = _Printer(as_json=arguments.values["json"])
    for finding in first:
        printer.add(finding)
    try:
        config = arguments.config
    except ConfigError as error:
        printer.add(Finding(PROBLEM, "config", f"{error.field}: {error.message}"))
        printer.end()
        return ExitCode.USAGE
    printer.add(Finding(OK, "config", "every key is known and in range"))
    for look in looks:
        for finding in look(config):
            printer.add(finding)
    printer.end()
    return ExitCode.CRASH if printer.num_problems else ExitCode.OK


def compare(arguments: Arguments) -> int:
    """Print where this engine's model and transformers' own differ. Returns 1 when they do."""
    try:
        config = arguments.config
        from inferengine.executor.tools import compare_hf  # here: torch and the model only when asked for

        comparison = compare_hf.compare(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    print("\n".join(compare_hf.table(comparison)))
    return ExitCode.OK if comparison.parted is None else ExitCode.CRASH


def packages() -> Iterator[Finding]:
    """Check whether what pyproject.toml asks for is installed and new enough, for the base and for each extra."""
    yield Finding(OK, "python", sys.version.split()[0])
    for extra, what in PARTS.items():
        missing: list[str] = []
        old: list[str] = []
        found = 0
        for name, least in requirements(extra):
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                missing.append(name)
                continue
            if numbers(version) < numbers(least):
                old.append(f"{name} {version} is older than {least}")
            found += 1
        remedy = f"pip install --upgrade 'inferengine[{extra or 'client'}]' (in a clone: scripts/install)"
        if old:
            yield Finding(PROBLEM, "packages", f"{what}: {', '.join(old)}: {remedy}")
        elif missing and (found == 0 or extra) and MARK_OF_PART.get(extra) in missing:
            yield Finding(NOTE, "packages", f"{what}: not installed; {remedy}")
        elif missing:
            yield Finding(PROBLEM, "packages", f"{what}: {', '.join(missing)} not installed: {remedy}")
        else:
            yield Finding(OK, "packages", f"{what}: {found} installed and new enough")


def requirements(extra: str) -> Iterator[tuple[str, str]]:
    """Yield the packages that the extra asks for on this machine, and their least versions; "": those of the base."""
    for requirement in metadata.requires("inferengine") or []:
        match = REQUIREMENT.match(requirement.replace('"', "'"))
        if match is None:
            continue
        marker = match.group(3) or ""
        of = EXTRA_MARKER.search(marker)
        if (of.group(1) if of else "") != extra:
            continue
        if "Linux" in marker and not (sys.platform.startswith("linux") and os.uname().machine == "x86_64"):
            continue
        yield match.group(1), match.group(2)


def model(config: Config) -> Iterator[Finding]:
    """Check whether the checkpoint is complete and would load."""
    if config.model.load_format == "dummy":
        yield Finding(NOTE, "model", "load_format is dummy: random weights, for measuring speed only")
    try:
        folder = model_folder(config)
        found = model_files.inspect(folder)
        if config.model.path:
            _dry_run(folder, config.model.quantization)
    except (model_files.BadModel, ConfigError) as error:
        text = error.message if isinstance(error, ConfigError) else str(error)
        yield Finding(PROBLEM, "model", f"{config.model.path or 'embedded model'}: {text}")
        return
    yield Finding(
        OK,
        "model",
        f"{folder.name}: {found.model_type}, {found.num_parameters / 1e6:,.1f} M parameters in "
        f"{found.num_tensors} tensors, {'/'.join(found.dtypes)}, {found.num_bytes / 1e6:,.1f} MB",
    )
    if not found.has_chat_template:
        yield Finding(NOTE, "model", "it has no chat template: completions work, chat is refused")


def _dry_run(folder: Path, quantization: str) -> None:
    """Build the model without its weights. Raises ConfigError.

    It takes torch, and a second to import it; `packages` reports where torch is missing.
    """
    try:
        from inferengine.executor.load import dry_run
    except ImportError:
        return
    dry_run(folder, quantization)


def device(config: Config) -> Iterator[Finding]:
    """Check whether the device that is asked for is there."""
    nvidia = Path("/dev/nvidiactl").exists()
    if config.engine.device == "cuda" and not nvidia:
        yield Finding(PROBLEM, "device", "engine.device is cuda and there is no NVIDIA driver: use --engine.device cpu")
    elif nvidia and config.engine.device != "cpu":
        yield Finding(OK, "device", "NVIDIA driver is there")
    else:
        yield Finding(OK, "device", f"CPU, {len(os.sched_getaffinity(0))} cores")


def onnx(config: Config) -> Iterator[Finding]:
    """Check, with engine.executor = onnx, whether its packages are installed."""
    if config.engine.executor != "onnx":
        return
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "pip install 'inferengine[onnx]' (in a clone: scripts/install test)"
        yield Finding(PROBLEM, "onnx", f"{' and '.join(missing)} not installed: {remedy}")
        return
    names = [name for name in ("onnxruntime-gpu", "onnxruntime") if _version(name)]
    versions = ", ".join(f"{name} {_version(name)}" for name in ["onnx", *names])
    yield Finding(OK, "onnx", f"{versions}; exports in {cache_directory() / 'onnx'}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def speculation(config: Config) -> Iterator[Finding]:
    """Report where draft tokens come from."""
    on_cpu = config.engine.device == "cpu" or not Path("/dev/nvidiactl").exists()
    method = config.speculation.method
    try:
        folder = draft_folder(config, on_cpu=on_cpu)
    except ConfigError as error:
        if error.field != "model.path":  # `model` reports that one
            yield Finding(PROBLEM, "speculation", f"{error.field}: {error.message}")
        return
    if folder is not None:
        yield Finding(OK, "speculation", f"draft model {folder.name} (speculation.method is {method})")
    elif method == "ngram":
        yield Finding(OK, "speculation", "draft tokens from repeated text (speculation.method is ngram)")
    else:
        yield Finding(OK, "speculation", f"no draft tokens (speculation.method is {method})")


def engine_socket(config: Config) -> Iterator[Finding]:
    """Check whether the engine can bind its sockets here."""
    try:
        address = engine_address(config)
    except (ConfigError, OSError) as error:
        yield Finding(PROBLEM, "socket", f"{error}: set --wire.socket ipc:///some/folder/engine.sock")
        return
    if not address.startswith("ipc://"):
        yield Finding(OK, "socket", address)
        return
    path = Path(address.removeprefix("ipc://"))
    longest = status_address(config).removeprefix("ipc://")
    if len(os.fsencode(longest)) > LONGEST_UNIX_PATH:
        yield Finding(PROBLEM, "socket", f"{path} is longer than a unix socket may be: set a shorter --wire.socket")
    elif not path.parent.is_dir():
        yield Finding(PROBLEM, "socket", f"there is no folder {path.parent}: make it, or set --wire.socket")
    elif complaint := unsafe_folder(path.parent, _user_of(path.parent)):
        yield Finding(PROBLEM, "socket", complaint)
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        yield Finding(PROBLEM, "socket", f"this user may not write to {path.parent}: set --wire.socket")
    elif path.parent.stat().st_mode & 0o007:
        yield Finding(NOTE, "socket", f"every user of this machine may enter {path.parent}: chmod 0750 keeps them out")
    else:
        yield Finding(OK, "socket", address)


def _user_of(folder: Path) -> int:
    """Return the user whose engine uses this folder: this user, or for root the owner of the folder (the service's
    user)."""
    return os.getuid() or folder.stat().st_uid


def ports(config: Config) -> Iterator[Finding]:
    """Check whether the front ends can listen, or listen already."""
    for name, host, port in (("http", config.http.host, config.http.port), ("ws", config.ws.host, config.ws.port)):
        if name == "http" and config.http.uds:
            continue
        try:
            listen.listen_tcp(host, port, name).close()
        except listen.AddressTaken as error:
            if _is_ours(host, port):
                yield Finding(OK, name, f"an InferEngine front end serves {host}:{port}")
            else:
                yield Finding(PROBLEM, name, str(error))
        else:
            yield Finding(OK, name, f"{host}:{port} is free")


def interpreter(config: Config) -> Iterator[Finding]:
    """Check whether the systemd units, where they are installed, can run this Python.

    They run as a user of their own and do not see /root and /home, but for what `inferengine systemd install` has bound
    for them. Where they cannot run it, they end with 203/EXEC.
    """
    unit = next((path for folder in UNIT_FOLDERS if (path := Path(folder, ENGINE_UNIT)).exists()), None)
    if unit is None:
        return
    try:
        text = unit.read_text()
    except OSError:
        text = ""
    if f"ExecStart={sys.executable} " in text and "BindReadOnlyPaths=" in text:
        yield Finding(OK, "units", "they can run this Python, which is bound for them")
    elif complaint := out_of_reach(Path(sys.executable)):
        yield Finding(PROBLEM, "units", complaint)
    else:
        yield Finding(OK, "units", "they can run this Python")


def out_of_reach(python: Path) -> str:
    """Return why services of another user cannot run this interpreter, and what to do; empty: they can."""
    real = python.resolve()
    for place in (python.absolute(), real):
        hidden = next((folder for folder in HIDDEN_FROM_UNITS if place.is_relative_to(folder)), None)
        if hidden is not None:
            return f"{place} is below {hidden}, which the units do not see (203/EXEC): {REINSTALL}"
    for place in (real, *real.parents):
        try:
            if not place.stat().st_mode & 0o001:
                return f"{place} may not be entered or run by other users (203/EXEC): chmod o+x it, or {REINSTALL}"
        except OSError as error:
            return f"{place} cannot be looked at ({error.strerror}): {REINSTALL}"
    return ""


def engine(config: Config) -> Iterator[Finding]:
    """Check whether an engine answers, and in which state it is."""
    from inferengine.client import Client  # zmq is among the packages that may be missing
    from inferengine.wire.curve import client_keys

    client = Client(engine_address(config), status_address="", role="check", curve=client_keys(config))
    try:
        welcome = client.connect(ENGINE_TIMEOUT_S)
        age_ms = client.ping(ENGINE_TIMEOUT_S).loop_age_ms
    except InferEngineError:
        others = other_engines(client.address)
        remedy = "'inferengine up' starts one"
        if others:
            listed = ", ".join(others)
            remedy = f"others do: {listed}. Name one of them: --wire.socket {others[0]}"
        yield Finding(NOTE, "engine", f"none answers at {client.address}; {remedy}")
        return
    finally:
        client.close()
    name = welcome.model.name if welcome.model else "no model yet"
    phase, share = welcome.progress
    progress = f", {phase} {share:.0%}" if welcome.state == "STARTING" and phase else ""
    if age_ms > config.engine.frozen_after_s * 1000:
        yield Finding(PROBLEM, "engine", f"its loop has made no progress for {age_ms / 1000:.0f} s: restart it")
    else:
        yield Finding(OK, "engine", f"{welcome.engine} is {welcome.state}{progress}: {name}; loop age {age_ms:.0f} ms")


def other_engines(address: str) -> list[str]:
    """Return the sockets of other engines in the same folder, such as those of `up --engines 2`."""
    path = Path(address.removeprefix("ipc://"))
    if str(path) == address:
        return []
    return [
        f"ipc://{each}" for each in sorted(path.parent.glob("*.sock")) if each != path and listen.answers(str(each))
    ]


@command(PING_OPTIONS, usage=("[--ready] [--timeout S] [--json] [--config FILE] [--section.key VALUE ...]",))
def ping(arguments: Arguments) -> int:
    """Ask the engine at wire.socket whether it is alive, and exit with 0 or 1.

    Alive is an engine that answers and whose loop turns, while it loads a model too. It is what a health check of a
    container runs; for a front end ask its paths /ping (alive) and /ready instead.
    """
    from inferengine.client import Client  # zmq is among the packages that may be missing
    from inferengine.wire.curve import client_keys
    from inferengine.wire.messages import READY

    address, values = engine_address(arguments.config), arguments.values
    try:
        client = Client(address, status_address="", role="ping", curve=client_keys(arguments.config))
        try:
            state = client.connect(values["timeout"]).state
            pong = client.ping(values["timeout"])
        finally:
            client.close()
        alive = pong.loop_age_ms <= FROZEN_AFTER_MS
        good = alive and (state == READY or not values["ready"])
        answer = {"address": address, "alive": alive, "state": state, "loop_age_ms": round(pong.loop_age_ms, 1)}
        line = f"{'ok' if good else 'not ok'}: {state}, its loop turned {pong.loop_age_ms / 1e3:.1f} s ago"
    except ConfigError:
        raise  # another question than whether the engine is alive
    except InferEngineError as error:
        good = False
        answer = {"address": address, "alive": False, "error": error.message}
        needs_key = address.startswith("tcp://") and not arguments.config.wire.curve_engine_key
        hint = "; if it asks for keys, wire.curve_engine_key is needed" if needs_key else ""
        line = f"not ok: {error.message} ({address}{hint})"
    print(json.dumps(answer) if values["json"] else line)
    return ExitCode.OK if good else ExitCode.CRASH


def _is_ours(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=ENGINE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))
        return isinstance(health, dict) and ("engines" in health or "engine" in health)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return False
    finally:
        connection.close()


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, those of a local build left out: `2.13.0+cpu` is [2, 13, 0]."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


class _Printer:
    """Writes findings: one line each as soon as it is known, or one JSON object at the end."""

    SUBJECT_WIDTH = 11

    def __init__(self, *, as_json: bool) -> None:
        self.num_problems = 0
        self._as_json = as_json
        self._findings: list[Finding] = []
        self._colours = {OK: "32", NOTE: "33", PROBLEM: "1;31"} if sys.stdout.isatty() else {}

    def add(self, finding: Finding) -> None:
        """Write a finding, or keep it for the JSON."""
        self.num_problems += finding.grade == PROBLEM
        self._findings.append(finding)
        if self._as_json:
            return
        shown = f"{finding.grade:<7}"
        if finding.grade in self._colours:
            shown = f"\x1b[{self._colours[finding.grade]}m{shown}\x1b[0m"
        print(f"{shown}  {finding.subject:<{self.SUBJECT_WIDTH}}  {finding.text}", flush=True)

    def end(self) -> None:
        """Write what is left."""
        if self._as_json:
            found = [finding._asdict() for finding in self._findings]
            print(json.dumps({"problems": self.num_problems, "findings": found}, indent=1))
