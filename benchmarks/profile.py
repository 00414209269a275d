"""Where the time of a step goes: kernels (on a CPU operations) by time, idle share, and the share of the roofline.

python -m benchmarks.profile --shape llama-3.1-8b --batches 1 64 256 --prompt-tokens 128 [--trace FOLDER] [--json FILE]
python -m benchmarks.profile --shape llama-3.1-8b --batches --prefill 8x4096 [--json FILE]

Decodes at a steady batch, and prompts that all come at once with one output token each, under torch's profiler, which
sees the kernels inside CUDA graphs; `--trace` keeps the Chrome traces. `idle` is the share of the time between the
first kernel's start and the last one's end in which no kernel runs. `roofline` is the engine's own figure
(core/step_time.py), of the same steps before the profiler begins, which slows them a little. `step_us` and
`tokens_per_s` are theirs too. For an engine that serves already: `inferengine profile`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.offline import Bench, environment
from benchmarks.shapes import SHAPES
from inferengine.bench.environment import write_result
from inferengine.cli.profile import TraceSummary, summarize, table
from inferengine.config import load, parse_flags
from inferengine.engine.core import EngineCore

WARM_STEPS = 12
STEPS = 16
ROWS = 16  # kernels kept in the JSON


def profile_decode(bench: Bench, batch: int, prompt: int, trace: Path | None) -> dict[str, Any]:
    """Run STEPS decode steps at a steady batch, once timed and once recorded."""
    core = bench.core()
    for _ in range(batch):
        bench.submit(core, prompt, 4 * (WARM_STEPS + 2 * STEPS))
    warm = 0
    while warm < WARM_STEPS:
        output = core.step()
        warm += output is not None and len(output.uids) == batch
    core.roofline = bench.roofline()
    begin = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    step_us = (time.perf_counter() - begin) / STEPS * 1e6
    share = core.roofline.shares() if core.roofline is not None else {}
    summary = _record(bench, core, STEPS, trace and trace / f"decode_{batch}_{prompt}.json.gz")
    _end(core)
    print(f"batch {batch}, {prompt} prompt tokens: {step_us:.1f} us a step, share of the roofline {share}")
    print("\n".join(table(summary, 12)), flush=True)
    return {
        "row": "profile",
        "batch": batch,
        "prompt_tokens": prompt,
        "step_us": round(step_us, 1),
        "roofline": share.get("decode"),
        **_shown(summary, STEPS),
    }


def profile_prefill(bench: Bench, count: int, length: int, trace: Path | None) -> dict[str, Any]:
    """Run `count` prompts of `length` tokens, submitted at once: once to warm up, once timed and once recorded."""
    steps, seconds = 0, 0.0
    for _ in range(2):
        core = bench.core()
        for _ in range(count):
            bench.submit(core, length, 1)
        core.roofline = bench.roofline()
        steps, begin = 0, time.perf_counter()
        while core.has_work:
            core.step()
            steps += 1
        seconds = time.perf_counter() - begin
    share = core.roofline.shares() if core.roofline is not None else {}
    for _ in range(count):
        bench.submit(core, length, 1)
    summary = _record(bench, core, steps, trace and trace / f"prefill_{count}_{length}.json.gz")
    _end(core)
    print(f"{count} prompts of {length}: {count * length / seconds:.0f} tokens/s, share of the roofline {share}")
    print("\n".join(table(summary, 12)), flush=True)
    return {
        "row": "profile of prompts",
        "prompts": count,
        "prompt_tokens": length,
        "tokens_per_s": round(count * length / seconds, 1),
        "roofline": share.get("prefill"),
        **_shown(summary, steps),
    }


def _record(bench: Bench, core: EngineCore, steps: int, trace: Path | None) -> TraceSummary:
    """Run so many steps under the profiler, and keep the trace where it is asked for."""
    recorder = bench.executor.recorder()
    recorder.start()
    for _ in range(steps):
        recorder.begin_step()
        core.step()
        recorder.end_step()
    recorder.stop()
    data = recorder.trace()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(data)
    return summarize(json.loads(gzip.decompress(data)))


def _shown(summary: TraceSummary, steps: int) -> dict[str, Any]:
    """Return a summary's part of a row."""
    return {
        "idle": None if summary.idle_share is None else round(summary.idle_share, 4),
        "on_device": summary.on_device,
        "kernels": [
            {
                "name": row.name[:90],
                "us_per_step": round(row.total_us / steps, 1),
                "per_step": round(row.calls / steps, 1),
                "us": round(row.total_us / row.calls, 2),
                "share": round(row.share, 4),
            }
            for row in summary.rows[:ROWS]
        ],
    }


def _end(core: EngineCore) -> None:
    core.abort_all("abort", ("cancelled", "cancelled"))
    while core.has_work:
        core.step()


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[128])
    parser.add_argument("--prefill", nargs="*", default=[], metavar="COUNTxLENGTH", help="prompts that come at once")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        config = load(flags=flags).with_values(model={"path": scratch, "load_format": "dummy"})
        bench = Bench(config)
        rows = [
            profile_decode(bench, batch, prompt, arguments.trace)
            for prompt in arguments.prompt_tokens
            for batch in arguments.batches
        ]
        for text in arguments.prefill:
            count, length = text.split("x")
            rows.append(profile_prefill(bench, int(count), int(length), arguments.trace))
    if arguments.json:
        document = {"benchmark": "profile", "model": arguments.shape, "environment": environment(bench), "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
