"""`inferengine up`: the whole service in one terminal, under a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferengine.cli.command import JSON_LOG, Arguments, Option, command, log_as_json
from inferengine.cli.fetch import missing_model
from inferengine.cli.terminal import Terminal
from inferengine.config import (
    CPU_CACHE_SHARE,
    MAX_PORT,
    Config,
    cache_directory,
    child_environment,
    engine_address,
    engine_addresses,
    visible_cards,
)
from inferengine.config.model_path import model_folder, served_name, weight_paths
from inferengine.errors import ConfigError, ExitCode
from inferengine.process import listen, stdio
from inferengine.process.child import ChildSpec
from inferengine.process.supervisor import Supervisor

IMPORTS_S, READ_BYTES_PER_S, WARM_UP_S = 4.0, 1e9, 20.0  # for the first estimate: torch, weights, CUDA graphs
WIRE_PORTS = 3  # of an engine over TCP: requests, STATUS, KV events
EVENTS_PORTS = 2  # of cache.events_address: events, and their replay
WATCHDOG_MARGIN_S = 10.0  # a frozen engine ends by itself and logs why; the supervisor kills one that cannot


ENGINES = Option(
    "--engines N", "engines behind the front ends, each on its own cards; 0: as many as fit: --up.engines N", 1
)


@command({"options": (ENGINES, JSON_LOG)}, takes_model=True, lists_keys=True)
def run(arguments: Arguments) -> int:
    """Run the engine, the HTTP front end and the websocket front end together, each as a process of its own.

    With `--engines N` there are N engines, each on its own card (with engine.tensor_parallel: on its own cards), behind
    the same addresses. Requests with equal beginnings go to the same engine. When one engine ends, its streams go on at
    another.

    A process that crashes is started again by itself; the others go on. Ctrl-C or SIGTERM lets running requests
    finish, a second one ends at once. SIGHUP does the same where the service has a terminal, because that terminal is
    gone then; without one, the API keys are read again. MODEL is a checkpoint folder, a GGUF
    file, a hub id (ORG/NAME) or a short name of one (`inferengine fetch --list`); what the local cache lacks is fetched
    first. Without MODEL the embedded model is served.

      inferengine up                                  the embedded model on http://127.0.0.1:8000
      inferengine up qwen3-0.6b                       a model from the Hugging Face hub
      inferengine up ./my-model --http.port 9000      a checkpoint folder
      inferengine up ./model-Q4_K_M.gguf              a GGUF file, computed packed
      inferengine up ./my-model --engines 4           an engine on each of four cards
      inferengine up --engine.max_num_seqs 128 --config service.toml
    """
    config = log_as_json(arguments)
    if "engines" in arguments.given:
        config = config.with_values(up={"engines": arguments.values["engines"]})
    stdio.protect(json_lines=config.log.format == "json")
    bring_model(config)
    with contextlib.ExitStack() as stack:
        try:
            http, ws = front_end_listeners(stack, config)
        except listen.AddressTaken as error:
            print(f"inferengine up: {error}", file=sys.stderr)
            return ExitCode.ADDRESS
        config = config.with_values(
            wire={"socket": engine_address(config)},
            up={"engines": num_engines(config, visible_cards())},
            http={} if config.http.uds else {"port": http.getsockname()[1]},
            ws={"port": ws.getsockname()[1]},
        )
        engines = engine_specs(config, visible_cards())
        config = config_of_front_ends(config)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferengine-up-")))
        starts = StartTimes(cache_directory() / "starts.json", _start_key(config))
        terminal = Terminal(
            sys.stdout,
            json_lines=config.log.format == "json",
            name_width=max(len(spec.name) for spec in engines),
            usual_s=starts.usual_s() or first_estimate_s(config),
        )
        what = "engine" if len(engines) == 1 else f"{len(engines)} engines"
        terminal.begin(f"starting {served_name(config)}: {what}, HTTP and websocket front ends")

        def when_ready(seconds: float) -> None:
            terminal.block(banner(config, http, ws, seconds))
            starts.keep(seconds)

        silence_s = front_end_silence_s(config)
        supervisor = Supervisor(
            engines,
            [
                service_spec("http", config, http, watchdog_s=silence_s),
                service_spec("ws", config, ws, watchdog_s=silence_s),
            ],
            folder,
            terminal,
            drain_timeout_s=config.engine.drain_timeout_s,
            hangup_stops=has_terminal(),
            when_ready=when_ready,
        )
        code = supervisor.run()
        terminal.end_progress()
        return code


def banner(config: Config, http: socket.socket, ws: socket.socket, seconds: float) -> str:
    """Return the text shown once everything runs: the addresses, and a command to try."""
    path, body = example(config)
    key = " -H 'Authorization: Bearer KEY'" if config.auth.keys_file else ""
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
            *(f"  ZeroMQ     {address}" for address in engine_addresses(config)),
            "Try:",
            f"  curl {target}{path} -H 'Content-Type: application/json'{key} \\",
            f"    -d '{json.dumps(body)}'",
            "",
        ]
    )


COMPLETION = "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 40}
EMBEDDING = "/v1/embeddings", {"input": "Once upon a time"}
RERANKING = "/v1/rerank", {"query": "a fox", "documents": ["The hen slept.", "The fox ran."]}


def example(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that the model can answer, as far as its config.json tells."""
    try:
        values = json.loads((model_folder(config) / "config.json").read_text(encoding="utf-8"))
        architecture = str(values["architectures"][0])
        sees_later = values.get("is_causal") is False or values.get("use_bidirectional_attention") is True
    except (ConfigError, OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return COMPLETION  # of a GGUF file, for one
    if architecture.endswith("ForSequenceClassification"):
        return RERANKING
    has_head = not architecture.endswith("Model") or "LMHead" in architecture  # BertModel, GPT2LMHeadModel
    return COMPLETION if has_head and not sees_later else EMBEDDING


def front_end_silence_s(config: Config) -> float:
    """Return the seconds without a sign of life after which a front end is killed; the parent of a frozen worker
    replaces that sooner."""
    return 2 * (config.engine.frozen_after_s + WATCHDOG_MARGIN_S)


def bring_model(config: Config) -> None:
    """Fetch the model, and the draft model, where the local cache lacks them. Raises ConfigError with the remedy.

    A process of its own does it: this one stays small for as long as the service runs.
    """
    wanted = {"model.path": config.model.path, "speculation.draft_model": config.speculation.draft_model}
    for key, name in wanted.items():
        if missing_model(name, key):
            quiet = ["--json"] if config.log.format == "json" else []
            command = [sys.executable, "-m", "inferengine.cli", "fetch", name, *quiet]
            code = subprocess.run(command, stdout=subprocess.DEVNULL, env=child_environment(Config())).returncode
            if code != ExitCode.OK:
                raise ModelNotFetched(key, name)


class ModelNotFetched(ConfigError):
    """A model could not be fetched; `inferengine fetch` has said why."""

    def __init__(self, key: str, name: str) -> None:
        super().__init__(key, f"{name} could not be fetched: see above")


def first_estimate_s(config: Config) -> float:
    """Estimate the seconds of a start of which nothing is remembered, from the size of the weights."""
    try:
        weights = sum(path.stat().st_size for path in weight_paths(model_folder(config)))
    except (ConfigError, OSError):
        weights = 0
    on_gpu = config.engine.device != "cpu" and Path("/dev/nvidiactl").exists()
    return IMPORTS_S + weights / READ_BYTES_PER_S + (WARM_UP_S if on_gpu else 0.0)


class StartTimes:
    """How long starts took, by what was started, in a small file: for the next start's estimate."""

    MOST = 100

    def __init__(self, file: Path, key: str) -> None:
        self._file = file
        self._key = key

    def usual_s(self) -> float:
        """Return the seconds of the last start; 0: not known."""
        found = self._read().get(self._key)
        return float(found) if isinstance(found, int | float) and 0 < found < 86_400 else 0.0

    def keep(self, seconds: float) -> None:
        """Remember a start. A folder that cannot be written is no reason to fail."""
        known = {key: value for key, value in self._read().items() if key != self._key}
        kept = dict([*known.items(), (self._key, round(seconds, 1))][-self.MOST :])
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            whole = self._file.with_suffix(".new")
            whole.write_text(json.dumps(kept, indent=1))
            whole.replace(self._file)

    def _read(self) -> dict[str, object]:
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


def _start_key(config: Config) -> str:
    model = config.model
    engines = f" {config.up.engines} engines" if config.up.engines > 1 else ""
    return f"{model.path or 'embedded'} {model.quantization} {model.load_format} {config.engine.device}{engines}"


def has_terminal() -> bool:
    """Return whether the service has a terminal. When that is closed, the service must end by itself."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def front_end_listeners(stack: contextlib.ExitStack, config: Config) -> tuple[socket.socket, socket.socket]:
    """Return the listening sockets of HTTP and websocket front end, closed with `stack`. Raises AddressTaken."""
    if config.http.uds:
        http = stack.enter_context(listen.listen_unix(config.http.uds))
    else:
        http = stack.enter_context(listen.listen_tcp(config.http.host, config.http.port, "http"))
    return http, stack.enter_context(listen.listen_tcp(config.ws.host, config.ws.port, "ws"))


def num_engines(config: Config, cards: Sequence[str]) -> int:
    """Return how many engines to start: up.engines, 0 resolved. `cards`: those that are visible.

    Raises ConfigError where there are too few cards, and for executors whose device is not on this machine."""
    wanted, each, device = config.up.engines, config.engine.tensor_parallel, config.engine.device
    if wanted != 1 and config.engine.executor in ("remote", "upstream"):
        raise ConfigError(
            "up.engines", f"engine.executor = {config.engine.executor} has its devices elsewhere: set it to 1"
        )
    if wanted == 1 or not _on_cards(config, cards):
        return max(1, wanted)
    fit = len(cards) // each
    if wanted > fit or not fit:
        per_engine = f" of {each} cards (engine.tensor_parallel)" if each > 1 else ""
        remedy = f"ask for at most {fit}" if fit else "name them in CUDA_VISIBLE_DEVICES"
        raise ConfigError(
            "up.engines",
            f"{wanted or 'any'} engines{per_engine} need {max(1, wanted) * each} cards, and {len(cards)} are visible "
            f"(CUDA_VISIBLE_DEVICES, else /dev/nvidia*): {remedy}"
            + ("" if device == "cuda" else ", or set engine.device to cpu"),
        )
    return wanted or fit


def engine_specs(config: Config, cards: Sequence[str]) -> list[ChildSpec]:
    """Return what to run for each of up.engines (resolved by `num_engines`).

    One of several has its number in its name, its sockets and its ports, and its share of the cards or of the cores
    and the memory. A single one has the configuration as it is."""
    watchdog_s = config.engine.frozen_after_s + WATCHDOG_MARGIN_S
    count = config.up.engines
    if count == 1:
        return [service_spec("engine", config, None, watchdog_s=watchdog_s)]
    specs = []
    for number in range(count):
        own = config_of_engine(config, number)
        each = own.engine.tensor_parallel
        devices: dict[str, str] = {}
        cores: dict[str, str] = {}
        if _on_cards(config, cards):
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(cards[number * each : (number + 1) * each])}
        else:
            own = own.with_values(cache={"memory_fraction": (config.cache.memory_fraction or CPU_CACHE_SHARE) / count})
            cores = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
        spec = service_spec("engine", own, None, watchdog_s=watchdog_s)
        command = [*spec.command, "--engine.name", own.engine.name]  # says which it is in a list of processes
        environment = {**cores, **spec.environment, **devices}
        specs.append(spec._replace(name=f"engine-{number}", command=command, environment=environment))
    return specs


def config_of_engine(config: Config, number: int) -> Config:
    """Return the configuration of one of several engines: names and addresses are its own. Raises ConfigError where
    its port would be none."""
    wire = {"socket": _numbered("wire.socket", config.wire.socket, number), "engines": ""}
    if config.wire.tcp:
        wire["tcp"] = _numbered("wire.tcp", config.wire.tcp, number)
    cache = {}
    if config.cache.events_address:
        address = config.cache.events_address
        cache["events_address"] = _numbered("cache.events_address", address, number, ports=EVENTS_PORTS)
    engine: dict[str, Any] = {"name": f"{config.engine.name}-{number}"}
    if config.engine.metrics_port:
        engine["metrics_port"] = _numbered_port("engine.metrics_port", config.engine.metrics_port, number, ports=1)
    return config.with_values(wire=wire, cache=cache, engine=engine)


def config_of_front_ends(config: Config) -> Config:
    """Return the configuration of the front ends: of several engines they know all, beside those of wire.engines."""
    if config.up.engines == 1:
        return config
    own = [engine_address(config_of_engine(config, number)) for number in range(config.up.engines)]
    named = engine_addresses(config) if config.wire.engines else []
    policy = "prefix_affinity" if config.wire.load_balancing == "auto" else config.wire.load_balancing
    addresses = list(dict.fromkeys([*own, *named]))
    return config.with_values(wire={"engines": ",".join(addresses), "load_balancing": policy})


def _on_cards(config: Config, cards: Sequence[str]) -> bool:
    device = config.engine.device
    return device == "cuda" or (device == "auto" and bool(cards))


def _numbered(key: str, address: str, number: int, *, ports: int = WIRE_PORTS) -> str:
    """Return the address of one of several engines: `engine.sock` → `engine-1.sock`; over TCP each has `ports` of its
    own."""
    before, dot, ending = address.rpartition(".")
    if address.startswith("tcp://"):
        host, _, port = address.rpartition(":")
        return f"{host}:{_numbered_port(key, int(port), number, ports=ports)}" if port.isdigit() else address
    return f"{before}-{number}.{ending}" if dot and "/" not in ending else f"{address}-{number}"


def _numbered_port(key: str, port: int, number: int, *, ports: int) -> int:
    """Return the first port of an engine that uses `ports` ports in a row, after those of the engines before it."""
    first = port + ports * number
    if port <= MAX_PORT < first + ports - 1:
        raise ConfigError(
            key,
            f"each engine of up.engines takes {ports} ports from {port} on: those of engine {number} would be above "
            f"{MAX_PORT}; choose a lower port or fewer engines",
        )
    return first


def service_spec(name: str, config: Config, listener: socket.socket | None, *, watchdog_s: float = 0.0) -> ChildSpec:
    """Return how to run a command of the service with this configuration."""
    command = [sys.executable, "-m", "inferengine.cli", name]
    return ChildSpec(name, command, child_environment(config), listener, watchdog_s)
