"""Two cards of one machine, in one command with a time limit: exactness, lost ranks, speed beside a peer, HTTP.

python -m benchmarks.two_cards --json FILE [--total 580] [--jobs exactness,losses,8b] [--peer-path FOLDER]

Jobs run one after the other, in the order of `jobs`, which is that of their worth. Each has a limit; one that could
hardly end in the rest of `--total` is left out, and its name is printed. A job that fails or hangs ends with its
processes, and the next one begins. FILE has what every job found and is written anew after each; logs.tar.gz beside
it what they said.

- `exactness`: tests/gpu/ranks.py
- `losses`: SIGKILL and SIGSTOP of a rank, 10 times each, in services side by side (benchmarks/stall_recovery.py)
- `8b`, `70b`, `70b-peer`, `32b`, `32b-peer`: `inferengine bench compare --tensor-parallel 2`, random weights in bf16.
  The 8B's two sides load together; of a 70B one side fills the cards
- `engine`, `engines`: an 8B under `inferengine up` at 128 streams, and two of them, one on each card, at 256
- `70b-http`: a 70B in bf16 on both cards under `inferengine up`, 64 streams; `70b-fp8-http`: in FP8 on one card

    python -m benchmarks.two_cards --serve llama-3.1-70b --json FILE [--section.key VALUE ...]

is the program of the last four.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES, write_model
from inferengine.bench.compare import SIDES, joined
from inferengine.bench.environment import write_result
from inferengine.bench.services import local_service
from inferengine.config import parse_flags

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
END_S = 15.0  # for a job to end its own processes after its limit
FREE_S = 15.0  # for the cards' memory to come back after a job
FREE_MIB = 2048  # of a card that nothing uses any more
LARGE_CARD_MIB = 100 * 1024  # from here on a 70B needs no small cache
STREAMS, TOKENS = 64, 128  # of the loads over HTTP
ROUNDS = 3  # requests of each stream
Row = dict[str, Any]


class Job(NamedTuple):
    """One process. `usual_s`: what it is expected to take; `{json}` in the command is the file for its result."""

    name: str
    command: list[str]
    usual_s: float
    limit_s: float


def compare(shape: str, sides: str, folder: Path, *words: str) -> list[str]:
    """Return the command that compares a shape; its config.json goes below `folder`."""
    model = folder / shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    command = [PYTHON, "-m", "inferengine.cli", "bench", "compare", "--model", str(model), "--sides", sides]
    return [*command, "--tensor-parallel", "2", "--rows", "1,16,64,128", "--json", "{json}", *words]


def jobs(folder: Path, *, card_mib: int, peer: Sequence[str], losses: int, services: int) -> list[Job]:
    """Return all jobs. `folder`: for models; `card_mib`: memory of a card; `peer`: flags of `bench compare` for the
    peer."""
    workloads = ("--workloads", "decode,prefill,first-token,short-greedy", "--quick")
    room: tuple[str, ...] = ()
    if card_mib < LARGE_CARD_MIB:  # weights take 66 GiB of a card
        room = ("--kv-tokens", "43008", "--sequences", "128", "--batched-tokens", "4096")
    seventy = ("--context", "8192", *room, *workloads)
    gib = str((card_mib - 4096) // 1024)
    small = ["--model.dtype", "float32", "--engine.max_num_seqs", "8", "--engine.max_num_batched_tokens", "512"]
    stall = [PYTHON, "-m", "benchmarks.stall_recovery", "--ranks", str(losses), "--services", str(services)]
    serve = [PYTHON, "-m", "benchmarks.two_cards", "--serve", "llama-3.1-70b", "--json", "{json}"]
    sizes = ["--model.max_model_len", "8192", "--cache.block_size", "64"]
    both_cards = ["--engine.tensor_parallel", "2", "--engine.max_num_seqs", "64", "--cache.num_blocks", "640"]
    one_card = ["--model.quantization", "fp8", "--engine.max_num_seqs", "64", "--cache.num_blocks", "272"]
    tokens = ["--engine.tune", "0", "--engine.max_num_batched_tokens"]
    engines = [PYTHON, "-m", "benchmarks.two_cards", "--serve", "llama-3.1-8b", "--json", "{json}", *sizes]
    return [
        Job("exactness", [PYTHON, "-m", "tests.gpu.ranks", "--limit", "110", "--json", "{json}"], 60, 125),
        Job(
            "losses",
            [*stall, "--streams", "4", "--max-tokens", "500", "--json", "{json}", *small, "--cache.num_blocks", "128"],
            110,
            180,
        ),
        Job(
            "8b",
            compare(
                "llama-3.1-8b", "peer,ours", folder, "--load-together", "--card-gib", gib, "--limit", "130", *workloads,
                *peer,
            ),
            150,
            270,
        ),
        Job("70b", compare("llama-3.1-70b", "ours", folder, "--limit", "150", *seventy), 105, 160),
        Job("70b-peer", compare("llama-3.1-70b", "peer", folder, "--limit", "230", *seventy, *peer), 170, 240),
        Job("70b-http", [*serve, *both_cards, *sizes, *tokens, "4096"], 65, 130),
        Job("70b-fp8-http", [*serve, *one_card, *sizes, *tokens, "2048"], 75, 140),
        Job("engine", [*engines, "--up.engines", "1", "--streams", "128"], 50, 100),
        Job("engines", [*engines, "--up.engines", "2", "--streams", "256"], 60, 120),
        Job("32b", compare("qwen3-32b", "ours", folder, "--limit", "110", *workloads), 75, 120),
        Job("32b-peer", compare("qwen3-32b", "peer", folder, "--limit", "190", *workloads, *peer), 130, 200),
    ]  # fmt: skip


class Runner:
    """Runs jobs until the time is over. `begin` is when it began, of time.monotonic."""

    def __init__(self, result: Path, logs: Path, total_s: float, begin: float, *, share: float = 0.6) -> None:
        """`result`: the file for all that was found; logs.tar.gz goes beside it. `logs`: a folder for what jobs write.
        `share`: a job begins where at least this share of its usual time is left."""
        self._result, self._logs, self._end, self._share = result, logs, begin + total_s, share
        for folder in (result.parent, logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Row] = {}
        self._document: Row = {}

    def run(self, waiting: Sequence[Job], about: Row) -> None:
        """Run them in this order. `about`: what the result's file says beside."""
        self._document = about
        for job in waiting:
            left = self._end - time.monotonic() - END_S
            if left < self._share * job.usual_s:
                print(f"left out {job.name}: {left:.0f} s are left, it takes about {job.usual_s:.0f}", flush=True)
                self.found[job.name] = {"exit": "left out"}
                continue
            self._run(job, min(job.limit_s, left))
            self.write()
            wait_for_memory()
        self.write()

    def _run(self, job: Job, limit_s: float) -> None:
        path, log = self._logs / f"{job.name}.json", self._logs / f"{job.name}.log"
        command = [word.replace("{json}", str(path)) for word in job.command]
        begin = time.monotonic()
        with log.open("w") as file:
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            code: int | str
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"no end after {limit_s:.0f} s"
            end(child)
        result = json.loads(path.read_text()) if path.exists() else None
        row = {"exit": code, "seconds": round(time.monotonic() - begin, 1), "command": " ".join(command[2:])}
        self.found[job.name] = row | {"result": result}
        print(f"{job.name:13} exit {code}, {row['seconds']} s", flush=True)
        for line in summary(result) if result is not None else []:
            print(f"    {line}", flush=True)
        if code != 0:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
            print("\n".join(f"    | {line[:200]}" for line in last), flush=True)

    def write(self) -> None:
        """Write what has been found so far."""
        rows = rows_of_both_sides(self.found)
        write_result(self._result, {**self._document, "benchmark": "two_cards", "rows": rows, "jobs": self.found})
        with tarfile.open(self._result.with_name("logs.tar.gz"), "w:gz") as archive:
            for log in sorted(self._logs.glob("*.log")):
                archive.add(log, log.name)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process group that may still run: as Ctrl-C first, so that it ends what it started itself."""
    for number, wait_s in ((signal.SIGINT, END_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number if child.poll() is None else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)


def memory_mib(what: str) -> list[int]:
    """Return `used` or `total` memory of each card, from nvidia-smi; none where that does not run."""
    command = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in text.split() if line.isdigit()]


def wait_for_memory() -> None:
    """Wait until the cards are free: processes that were killed give their memory back a little later."""
    deadline = time.monotonic() + FREE_S
    while any(used > FREE_MIB for used in memory_mib("used")) and time.monotonic() < deadline:
        time.sleep(0.3)


def rows_of_both_sides(found: Mapping[str, Row]) -> list[Row]:
    """Join the rows of jobs that compared engines: a model's sides may be measured by two jobs."""
    results = [row.get("result") or {} for row in found.values()]
    rows = [row for result in results if result.get("benchmark") == "compare" for row in result["rows"]]
    sides = [{**row, "side": side, "value": row[side]} for row in rows for side in SIDES if side in row]
    return joined(sides)


def summary(result: Row) -> list[str]:
    """Return a few lines about the result of any job."""
    kind = result.get("benchmark")
    if kind == "ranks":
        return [
            f"{', '.join(row['wrong']) or 'equal':10} {row['case']:12} {row['text'][:150]}" for row in result["cases"]
        ]
    if kind == "compare":
        lines = []
        for row in result["rows"]:
            sides = [f"{side} {row[side]:,.2f}" for side in ("ours", "peer") if side in row]
            ratio = f", ratio {row['ratio']}" if "ratio" in row else ""
            lines.append(f"{row['model']} {row['workload']}, {row['unit']}: {', '.join(sides)}{ratio}")
        return lines
    if "losses" in result:
        shown = ("SIGKILL_ended_s", "SIGSTOP_ended_s", "wrong", "processes_left", "files_left_in_dev_shm", "exit_code")
        lines = [f"{name}: {result[name]}" for name in shown]
        served = sorted(loss["served_s"] for loss in result["losses"])
        return [*lines, f"{len(result['errors'])} errors, served again after {served[0]:.1f} to {served[-1]:.1f} s"]
    return [f"{name}: {value}" for name, value in result.items() if isinstance(value, int | float | str)]


def serve(shape: str, flags: dict[str, Any], streams: int, path: Path) -> None:
    """Serve a shape with random weights over HTTP and load it with this many streams."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape)
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        begin = time.monotonic()
        with local_service(str(folder), "--model.load_format", "dummy", *words) as url:
            ready_s = time.monotonic() - begin
            loads = []
            for requests in (streams, ROUNDS * streams):  # the first one's figures are not kept
                file = folder / "load.json"
                command = [PYTHON, "-m", "benchmarks.serving", "--url", url, "--prompt", "ids", "--first-id", "300"]
                command += ["--last-id", "4000", "--concurrency", str(streams), "--requests", str(requests)]
                command += ["--input", str(TOKENS), "--output", str(TOKENS), "--json", str(file)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
                loads.append(json.loads(file.read_text()))
    found = loads[-1]
    document: Row = {"benchmark": "serve", "shape": shape, "settings": flags, "streams": streams, "ready_s": ready_s}
    document |= {"output_tokens_per_s": found["output_tokens_per_s"]}
    for figure in ("ttft_ms", "itl_ms"):
        document |= {f"{figure}_{percentile}": found[figure][percentile] for percentile in ("p50", "p99")}
    write_result(path, document | {"load": found})


def main() -> int:
    begin = time.monotonic()
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=float, default=580.0, metavar="S", help="seconds for everything")
    parser.add_argument("--jobs", default="", help="comma separated, in this order; default: all")
    parser.add_argument("--losses", type=int, default=10, help="of each signal")
    parser.add_argument("--services", type=int, default=5, help="that share the losses")
    parser.add_argument("--peer-python", default="", help="a Python that has vllm; default: this one")
    parser.add_argument("--peer-path", default="", help="put before PYTHONPATH of the peer")
    parser.add_argument("--serve", choices=sorted(SHAPES), help="serve a shape over HTTP and load it")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of --serve")
    parser.add_argument("--json", type=Path, required=True, help="the file for the result")
    options = parser.parse_args(rest)
    if options.serve:
        serve(options.serve, flags, options.streams, options.json)
        return 0
    peer = [word for name in ("python", "path") if (value := getattr(options, f"peer_{name}"))
            for word in (f"--peer-{name}", value)]  # fmt: skip
    total = memory_mib("total")
    with tempfile.TemporaryDirectory() as folder:
        known = jobs(
            Path(folder),
            card_mib=min(total, default=80 * 1024),
            peer=peer,
            losses=options.losses,
            services=options.services,
        )
        by_name = {job.name: job for job in known}
        names = options.jobs.split(",") if options.jobs else list(by_name)
        if unknown := set(names) - set(by_name):
            parser.error(f"--jobs knows {', '.join(by_name)}; got {min(unknown)}")
        runner = Runner(options.json, Path(folder, "logs"), options.total, begin)
        runner.run([by_name[name] for name in names], {"card_mib": total})
    failed = [name for name, row in runner.found.items() if row["exit"] != 0]
    print(f"{len(runner.found)} jobs in {time.monotonic() - begin:.0f} s, not passed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
