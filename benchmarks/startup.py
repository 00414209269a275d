"""How long until the service is READY, and until the first token; and which phases of the start took how long.

python -m benchmarks.startup [--runs 5] [--model FOLDER | --shape NAME ...] [--fresh] [--engine-only] [--json FILE]
    [--section.key VALUE ...]

Each run starts processes anew: `inferengine engine` from exec to sd_notify and to the first token of a prompt of 128
tokens (greedy), then `inferengine up` from exec to its banner. `--shape` writes a checkpoint of random weights first,
as safetensors in a temporary folder: files just written are in the page cache. With `--model.load_format dummy` there
is only its config.json. The first run of a machine compiles kernels on a card; it is told apart. `--fresh` makes it
one: compiled kernels and measured tables are kept in a folder that is empty at first. On a machine that does other
things too, look at `engine_ready_cpu_s`: the CPU time that the engine needed.
"""

from __future__ import annotations

import argparse
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.idle import cpu_seconds
from benchmarks.shapes import SHAPES, write_dummy_model, write_weights
from inferengine.bench.environment import write_result
from inferengine.client import Client
from inferengine.config import parse_flags
from inferengine.sampling_params import SamplingParams

TIMEOUT_S = 300.0
PROMPT_TOKENS = 128


class EngineStart(NamedTuple):
    """Seconds from exec. `phases` are the engine's own, from when it had read its configuration."""

    ready_s: float
    cpu_s: float
    first_token_s: float
    phases: dict[str, float]


def start_engine(words: list[str], environment: dict[str, str]) -> EngineStart:
    """Start `inferengine engine` in this environment once."""
    with tempfile.TemporaryDirectory() as folder:
        path, address = f"{folder}/notify", f"ipc://{folder}/engine.sock"
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(path)
        began = time.monotonic()
        process = _start(["engine", *words, "--wire.socket", address], {**environment, "NOTIFY_SOCKET": path})
        try:
            ready_s = _wait_ready(process, notify, began)
            cpu_s = cpu_seconds(process.pid)
            client = Client(address, status_address="")
            client.connect(TIMEOUT_S)
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            stream = client.submit([5] * PROMPT_TOKENS, params).streams[0]
            next(delta for delta in stream if delta.token_ids)
            first_token_s = time.monotonic() - began
            phases = dict(client.admin("stats")["startup_seconds"])
            client.close()
            return EngineStart(ready_s, cpu_s, first_token_s, phases)
        finally:
            _stop(process)
            notify.close()


def start_up(words: list[str], environment: dict[str, str]) -> float:
    """Measure the seconds from exec of `inferengine up` to its banner."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**environment, "XDG_RUNTIME_DIR": folder}
        began = time.monotonic()
        process = _start(["up", *words, "--http.port", "0", "--ws.port", "0"], environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if b"Ready after" in line:
                    return time.monotonic() - began
            raise SystemExit(f"the service did not get ready; exit code {process.wait()}")
        finally:
            _stop(process)


def report(starts: Sequence[EngineStart], ups: Sequence[float]) -> dict[str, Any]:
    """Return medians and all values; the first run apart, because it may have compiled kernels and read files from a
    disk."""
    later = starts[1:] or starts
    columns = {
        "engine_ready_s": [start.ready_s for start in later],
        "engine_first_token_s": [start.first_token_s for start in later],
        "engine_ready_cpu_s": [start.cpu_s for start in later],
        **({"up_ready_s": list(ups)} if ups else {}),
    }
    names = list(dict.fromkeys(name for start in starts for name in start.phases))
    return {
        "first_run": starts[0]._asdict(),
        **{
            name: {"median": round(statistics.median(values), 3), "all": [round(value, 3) for value in values]}
            for name, values in columns.items()
        },
        "phases_s": {
            name: round(statistics.median(start.phases.get(name, 0.0) for start in later), 3) for name in names
        },
    }


def lines(results: dict[str, Any]) -> list[str]:
    """Return lines for people: phases of a median start, then the whole."""
    first, phases = results["first_run"], results["phases_s"]
    before = (
        first["ready_s"] - sum(first["phases"].values()),
        results["engine_ready_s"]["median"] - sum(phases.values()),
    )
    rows = [(*before, "starting Python, reading the configuration")]
    rows += [(first["phases"].get(name, 0.0), seconds, name) for name, seconds in phases.items()]
    rows += [
        (first[of_first], results[name]["median"], f"from exec: {text}")
        for name, of_first, text in (
            ("engine_ready_s", "ready_s", "engine ready"),
            ("engine_first_token_s", "first_token_s", "first token"),
        )
    ]
    shown = [f"{results['model']}: first run, then the median of the others"]
    shown += [f"{one:>8.2f} {other:>8.2f} s  {text}" for one, other, text in rows]
    ups = results.get("up_ready_s")
    return shown if ups is None else [*shown, f"{'':>8} {ups['median']:>8.2f} s  from exec: up: banner"]


def checkpoint(shape: str, folder: Path, *, dummy: bool) -> str:
    """Write a checkpoint of this shape, or only what an engine with dummy weights reads. Returns its folder."""
    if not dummy:
        write_weights(folder, shape)
    return str(write_dummy_model(shape, folder))


def kept_in(folder: str) -> dict[str, str]:
    """Return the environment of an engine that keeps compiled kernels and measured tables in this folder."""
    return {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder, "CUDA_CACHE_PATH": f"{folder}/cuda"}


def measure(shape: str | None, arguments: argparse.Namespace, flags: dict[str, str]) -> dict[str, Any]:
    """Start the model of a shape, `arguments.model` or the embedded one, several times."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as kept:
        model = [arguments.model] if arguments.model else []
        if shape is not None:
            model = [checkpoint(shape, Path(scratch), dummy=flags.get("model.load_format") == "dummy")]
        words = [*model, *(word for key, value in flags.items() for word in (f"--{key}", value))]
        environment = {**os.environ, **(kept_in(kept) if arguments.fresh else {})}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        starts = [start_engine(words, environment) for _ in range(arguments.runs)]
        ups = [] if arguments.engine_only else [start_up(words, environment) for _ in range(arguments.runs)]
    return {
        "benchmark": "startup",
        "model": shape or (Path(arguments.model).name if arguments.model else "embedded"),
        "fresh": arguments.fresh,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
        "flags": flags,
        **report(starts, ups),
    }


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help="checkpoint folder; neither this nor --shape: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", help="random weights of these shapes, in turn")
    parser.add_argument("--fresh", action="store_true", help="nothing is compiled or measured before the first run")
    parser.add_argument("--engine-only", action="store_true", help="without `inferengine up`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    found = []
    for shape in arguments.shape or [None]:
        found.append(measure(shape, arguments, flags))
        print("\n".join(lines(found[-1])), flush=True)
    if arguments.json:
        write_result(arguments.json, found[0] if len(found) == 1 else {"benchmark": "startup", "models": found})


# -- inside ----------------------------------------------------------------------------------------------------------


def _wait_ready(process: subprocess.Popen[bytes], notify: socket.socket, began: float) -> float:
    while time.monotonic() - began < TIMEOUT_S and process.poll() is None:
        if select.select([notify], [], [], 1.0)[0] and b"READY=1" in notify.recv(8192):
            return time.monotonic() - began
    raise SystemExit(f"the engine did not get ready; exit code {process.poll()}")


def _start(words: list[str], environment: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "inferengine.cli", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, **more)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
