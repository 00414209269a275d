"""`inferengine up`: the whole service in one terminal, under a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from inferengine.cli.command import JSON_LOG, Arguments, command, log_as_json
from inferengine.cli.fetch import missing_model
from inferengine.cli.terminal import Terminal
from inferengine.config import Config, cache_directory, child_environment, engine_address
from inferengine.config.model_path import model_folder, served_name
from inferengine.errors import ConfigError, ExitCode
from inferengine.process import listen, stdio
from inferengine.process.child import ChildSpec
from inferengine.process.supervisor import Supervisor

IMPORTS_S, READ_BYTES_PER_S, WARM_UP_S = 4.0, 1e9, 20.0  # for the first estimate: torch, weights, CUDA graphs
WATCHDOG_MARGIN_S = 10.0  # a frozen engine ends by itself and logs why; the supervisor kills one that cannot


@command({"options": (JSON_LOG,)}, takes_model=True, lists_keys=True)
def run(arguments: Arguments) -> int:
    """Run the engine, the HTTP front end and the websocket front end together, each as a process of its own.

    A process that crashes is started again by itself; the others go on. Ctrl-C or SIGTERM lets running requests
    finish, a second one ends at once. SIGHUP does the same where the service has a terminal, because that terminal is
    gone then; without one, each process reads its configuration again. MODEL is a checkpoint folder, a hub id
    (ORG/NAME) or a short name of one (`inferengine fetch --list`); what the local cache lacks is fetched first. Without
    MODEL the embedded model is served.

      inferengine up                                  the embedded model on http://127.0.0.1:8000
      inferengine up qwen3-0.6b                       a model from the Hugging Face hub
      inferengine up ./my-model --http.port 9000      a checkpoint folder
      inferengine up --engine.max_num_seqs 128 --config service.toml
    """
    config = log_as_json(arguments)
    stdio.protect(json_lines=config.log.format == "json")
    bring_model(config)
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
        starts = StartTimes(cache_directory() / "starts.json", _start_key(config))
        terminal = Terminal(
            sys.stdout, json_lines=config.log.format == "json", usual_s=starts.usual_s() or first_estimate_s(config)
        )
        terminal.begin(f"starting {served_name(config)}: engine, HTTP and websocket front ends")

        def when_ready(seconds: float) -> None:
            terminal.block(banner(config, http, ws, seconds))
            starts.keep(seconds)

        supervisor = Supervisor(
            _spec("engine", config, None, watchdog_s=config.engine.frozen_after_s + WATCHDOG_MARGIN_S),
            [_spec("http", config, http), _spec("ws", config, ws)],
            folder,
            terminal,
            drain_timeout_s=config.engine.drain_timeout_s,
            hangup_stops=_has_terminal(),
            when_ready=when_ready,
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
    """Seconds that a start may take of which nothing is remembered: from the size of the weights."""
    try:
        weights = sum(path.stat().st_size for path in model_folder(config).glob("*.safetensors"))
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
        """Seconds of the last start; 0: not known."""
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
    return f"{model.path or 'embedded'} {model.quantization} {model.load_format} {config.engine.device}"


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
