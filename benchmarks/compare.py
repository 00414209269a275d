"""The same workloads for this engine and for a peer, and one comparison of both with ratios.

python -m benchmarks.compare run --shape llama-3.1-8b --out ours.jsonl          our engine, in process
python -m benchmarks.compare http --url http://127.0.0.1:8000 --out ours.jsonl  any OpenAI-compatible server
python -m benchmarks.compare report ours.jsonl peer.jsonl --peer "vLLM 0.26.0" --json out.json   ratios, floors, a table

A workload is a name in WORKLOADS; its seed, its lengths and the way its time is taken are part of it. Decode: (median
time of 256 output tokens - median time of 1) / 255, so that neither prompts nor set-up count. A peer's results are rows
of the same shape, one JSON object each line: {"workload", "value", "unit", "gpu"?}. `gpu` is what NVML saw of the
devices while the row was measured (inferengine/bench/gpu_trace.py). A line {"environment": {...}} says where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES
from inferengine.bench.environment import revision, version, write_result
from inferengine.bench.gpu_trace import GpuTrace

Row = dict[str, Any]
Emit = Callable[..., None]  # name, value, and what NVML saw where it is known better than by the clock


class Workload(NamedTuple):
    """What is measured, in which unit, and whether less is better. `floor`: what the device's ceilings allow."""

    unit: str
    lower_is_better: bool
    floor: float | None = None


# Floors of one H200: bytes / 4.45 TB/s (weights once, KV once) or FLOPs / 696 TFLOP/s, whichever is larger.
WORKLOADS: dict[str, Workload] = {
    **{
        f"llama-3.1-8b decode {batch}": Workload("ms per step", True, floor)
        for batch, floor in {1: 3.38, 8: 3.43, 32: 3.62, 64: 3.86, 128: 4.34, 256: 7.4}.items()
    },
    "llama-3.1-8b prefill 16x4096": Workload("prompt tokens/s", False, 46_000),
    **{f"llama-3.1-8b first token {length}": Workload("ms", True) for length in (128, 1024, 8192)},
    "llama-3.1-8b throughput t=1": Workload("output tokens/s", False),
    "llama-3.1-8b throughput t=0": Workload("output tokens/s", False),
    **{
        f"qwen3-0.6b decode {batch}": Workload("ms per step", True, floor)
        for batch, floor in {1: 0.27, 32: 0.3, 256: 2.0}.items()
    },
    "qwen3-0.6b 256 requests": Workload("output tokens/s", False, 38_000),
    **{
        f"http c={concurrency} {figure}": Workload(unit, unit == "ms")
        for concurrency in (16, 128)
        for figure, unit in {
            "output": "output tokens/s", "first token p50": "ms", "first token p99": "ms",
            "between tokens p50": "ms", "between tokens p99": "ms",
        }.items()
    },
    "start-up": Workload("s", True),
}  # fmt: skip


class Runner:
    """Our engine in process, with the peer's way of timing."""

    def __init__(self, shape: str, emit: Emit, **sections: Any) -> None:
        from benchmarks.offline import Bench, drain
        from inferengine.config import load

        self.shape, self.emit, self.drain = shape, emit, drain
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
            model = {"path": folder, "load_format": "dummy", **sections.pop("model", {})}
            self.bench = Bench(load(environment={}).with_values(model=model, **sections))
        emit(f"{shape} load and warm-up", time.perf_counter() - begin)

    def generate(self, prompts: list[list[int]], outputs: list[int], temperature: float = 0.0) -> float:
        """Return the seconds for these requests, submitted at once."""
        core = self.bench.core()
        begin = time.perf_counter()
        for prompt, output in zip(prompts, outputs, strict=True):
            self.bench.submit(core, prompt, output, temperature)
        self.drain(core)
        return time.perf_counter() - begin

    def prompts(self, rng: random.Random, count: int, length: int) -> list[list[int]]:
        return [[rng.randint(10, 10_000) for _ in range(length)] for _ in range(count)]

    def decode(self, batch: int) -> None:
        prompts = self.prompts(random.Random(1), batch, 128)
        self.generate(prompts, [8] * batch)
        one = [self.generate(prompts, [1] * batch) for _ in range(3)]
        many = [self.generate(prompts, [256] * batch) for _ in range(3 if batch <= 32 else 2)]
        step_s = (statistics.median(many) - statistics.median(one)) / 255
        self.emit(f"{self.shape} decode {batch}", step_s * 1e3)

    def llama(self) -> None:
        for batch in (1, 8, 32, 64, 128, 256):
            self.decode(batch)
        prompts = self.prompts(random.Random(1), 16, 4096)
        seconds = [self.generate(prompts, [1] * 16) for _ in range(4)][1:]
        self.emit(f"{self.shape} prefill 16x4096", 16 * 4096 / statistics.median(seconds))
        for length in (128, 1024, 8192):
            prompts = self.prompts(random.Random(1), 1, length)
            times = [self.generate(prompts, [1]) for _ in range(8)][1:]
            self.emit(f"{self.shape} first token {length}", statistics.median(times) * 1e3)
        rng = random.Random(0)
        inputs, outputs = [rng.randint(128, 1024) for _ in range(512)], [rng.randint(64, 512) for _ in range(512)]
        prompts = [[rng.randint(10, 127_000) for _ in range(length)] for length in inputs]
        for temperature in (1.0, 0.0):
            seconds_all = self.generate(prompts, outputs, temperature)
            self.emit(f"{self.shape} throughput t={temperature:.0f}", sum(outputs) / seconds_all)

    def qwen(self) -> None:
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
        seconds = [self.generate(prompts, outputs, 0.6) for _ in range(2)]
        self.emit(f"{self.shape} 256 requests", sum(outputs) / min(seconds))
        for batch in (1, 32, 256):
            self.decode(batch)


def run_ours(shape: str, emit: Emit) -> None:
    if shape == "qwen3-0.6b":
        Runner(shape, emit, model={"max_model_len": 4096}).qwen()
    else:
        Runner(shape, emit, model={"max_model_len": 16_384}).llama()


def run_http(url: str, model: str, emit: Emit) -> None:
    """Run the two HTTP workloads through `inferengine bench`, the better of two runs."""
    loads: dict[int, list[str]] = {
        16: ["--requests", "100", "--input", "128:384", "--output", "32:96"],
        128: ["--requests", "512", "--input", "512", "--output", "128"],
    }
    for concurrency, load in loads.items():
        best: Row | None = None
        for _ in range(2):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command = [sys.executable, "-m", "benchmarks.serving", "--url", url, "--model", model]
                command += ["--prompt", "ids", "--first-id", "300", "--last-id", "4000"]
                command += ["--concurrency", str(concurrency), *load, "--json", file.name]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found: Row = json.loads(Path(file.name).read_text())
            if best is None or found["output_tokens_per_s"] > best["output_tokens_per_s"]:
                best = found
        assert best is not None
        emit(f"http c={concurrency} output", best["output_tokens_per_s"], best["gpu"])
        for figure, key in (("first token", "ttft_ms"), ("between tokens", "itl_ms")):
            for percentile in ("p50", "p99"):
                emit(f"http c={concurrency} {figure} {percentile}", best[key][percentile], best["gpu"])


def report(ours: Path, peer: Path, peer_name: str = "peer") -> Row:
    """Join both sides' rows by workload; `ratio` above 1 means that ours is better, `floor_share` how close it is to
    what the device allows."""
    mine, theirs = _read(ours), _read(peer)
    rows = []
    for name, workload in WORKLOADS.items():
        if name not in mine:
            continue
        both = mine[name], theirs.get(name, {})
        row: Row = {"workload": name, "unit": workload.unit}
        row |= {"ours": float(both[0]["value"]), "peer": float(both[1]["value"]) if both[1] else None}
        if row["peer"]:
            ratio = row["peer"] / row["ours"] if workload.lower_is_better else row["ours"] / row["peer"]
            row["ratio"] = round(ratio, 3)
        if workload.floor:
            share = workload.floor / row["ours"] if workload.lower_is_better else row["ours"] / workload.floor
            row["floor_share"] = round(share, 3)
        row |= {f"gpu_{side}": one["gpu"] for side, one in zip(("ours", "peer"), both, strict=True) if "gpu" in one}
        rows.append(row)
    document: Row = {"benchmark": "compare", "rows": rows, "peer": peer_name}
    return document | {"environment": _environment_of(ours), "peer_environment": _environment_of(peer)}


def table(document: Row, *, peer: str = "peer") -> str:
    """Return the comparison as Markdown."""
    lines = [f"| workload | unit | ours | {peer} | ratio | share of the floor |", "|---|---|---|---|---|---|"]
    for row in document["rows"]:
        theirs = "" if row["peer"] is None else f"{row['peer']:,.2f}"
        ratio, share = row.get("ratio", ""), f"{row['floor_share']:.0%}" if "floor_share" in row else ""
        lines.append(f"| {row['workload']} | {row['unit']} | {row['ours']:,.2f} | {theirs} | {ratio} | {share} |")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Row]:
    return {row["workload"]: row for row in _lines(path) if "workload" in row}


def _environment_of(path: Path) -> Row:
    """Return the environment that was written last: several runs may have gone into one file."""
    found = [dict(row["environment"]) for row in _lines(path) if "environment" in row]
    return found[-1] if found else {}


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def environment(gpus: Row) -> Row:
    """Return where and with what something is measured; `gpus` is a summary of inferengine/bench/gpu_trace.py."""
    devices = [device["name"] for device in gpus.get("devices", [])]
    packages = {name: version(name) for name in ("inferengine", "torch", "triton")}
    return {
        "device": ", ".join(devices) or f"{platform.machine()} CPU",
        "python": platform.python_version(),
        **{name: version for name, version in packages.items() if version},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "revision": revision(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    ours = commands.add_parser("run")
    ours.add_argument("--shape", choices=["llama-3.1-8b", "qwen3-0.6b"], required=True)
    ours.add_argument("--out", type=Path, required=True)
    http = commands.add_parser("http")
    http.add_argument("--url", required=True)
    http.add_argument("--model", default="")
    http.add_argument("--out", type=Path, required=True)
    joined = commands.add_parser("report")
    joined.add_argument("ours", type=Path)
    joined.add_argument("their", metavar="peer", type=Path)
    joined.add_argument("--peer", default="peer", help="what the peer is, its version and settings")
    joined.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "report":
        document = report(arguments.ours, arguments.their, arguments.peer)
        print(table(document, peer=arguments.peer.partition(" ")[0]))
        if arguments.json:
            write_result(arguments.json, document)
        return

    with GpuTrace() as gpus:
        with arguments.out.open("a") as file:
            file.write(json.dumps({"environment": environment(gpus.summary())}) + "\n")

        def emit(name: str, value: float, gpu: Row | None = None) -> None:
            unit = WORKLOADS[name].unit if name in WORKLOADS else "s"
            row: Row = {"workload": name, "value": round(value, 4), "unit": unit}
            print(json.dumps(row), flush=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(row | {"gpu": gpu or gpus.lap()}) + "\n")

        if arguments.command == "run":
            run_ours(arguments.shape, emit)
        else:
            run_http(arguments.url, arguments.model, emit)


if __name__ == "__main__":
    main()
