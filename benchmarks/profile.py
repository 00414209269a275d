"""Where the time of a step goes on the device: kernels by time, idle share, and the share of the roofline.

python benchmarks/profile.py --shape llama-3.1-8b --batches 1 64 256 --prompt-tokens 128 [--trace FOLDER] [--json FILE]

Decodes at a steady batch under torch's profiler, which sees the kernels inside CUDA graphs. `idle` is the share of the
time between the first kernel's start and the last one's end in which no kernel runs. `roofline` is the time that the
step's bytes (weights once, KV once) would take at the device's measured bandwidth over the time that it took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.offline import Bench, environment
from benchmarks.shapes import SHAPES
from inferengine.config import load, parse_flags
from inferengine.runtime import memory_plan

WARM_STEPS = 12
STEPS = 16
READ_BYTES_PER_S = 4.45e12  # of an H200, measured with a plain read kernel


def profile_decode(bench: Bench, shape: dict[str, Any], batch: int, prompt: int, trace: Path | None) -> dict[str, Any]:
    """Kernels of STEPS decode steps at a steady batch."""
    core = bench.core()
    for _ in range(batch):
        bench.submit(core, prompt, 4 * (WARM_STEPS + STEPS))
    warm = 0
    while warm < WARM_STEPS:
        output = core.step()
        warm += output is not None and len(output.uids) == batch
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            core.step()
        torch.cuda.synchronize()
    core.abort_all("abort", ("cancelled", "cancelled"))
    while core.has_work:
        core.step()
    if trace is not None:
        recorded.export_chrome_trace(str(trace / f"decode_{batch}.json"))
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        by_name[event.name].append(event.time_range.end - event.time_range.start)
    total = spans[-1][1] - spans[0][0]
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    step_us = total / STEPS
    return {
        "row": "profile",
        "batch": batch,
        "prompt_tokens": prompt,
        "step_us": round(step_us, 1),
        "idle": round(1 - _covered(spans) / total, 4),
        "roofline": round(_least_us(bench, shape, batch, prompt + WARM_STEPS + STEPS // 2) / step_us, 3),
        "kernels": [
            {
                "name": name[:90],
                "us_per_step": round(sum(times) / STEPS, 1),
                "per_step": round(len(times) / STEPS, 1),
                "us": round(sum(times) / len(times), 2),
            }
            for name, times in ranked[:16]
        ],
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels of dependent launches overlap."""
    covered, reach = 0.0, float("-inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return covered


def _least_us(bench: Bench, shape: dict[str, Any], batch: int, context: int) -> float:
    executor = bench.executor
    item = executor.dtype.itemsize
    weights = memory_plan.weight_bytes(executor.config, shape, executor.dtype)
    if not executor.config.tied_embeddings:
        weights -= executor.config.vocab_size * executor.config.hidden_size * item  # few of its rows are read
    groups = range(len(executor.config.group_windows))
    kv = sum(executor.config.kv_bytes_per_token(group, item) for group in groups) * batch * context
    return float((weights + kv) / READ_BYTES_PER_S * 1e6)


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[128])
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        config = load(flags=flags).with_values(model={"path": scratch, "load_format": "dummy"})
        bench = Bench(config)
    rows = []
    for prompt in arguments.prompt_tokens:
        for batch in arguments.batches:
            rows.append(profile_decode(bench, SHAPES[arguments.shape], batch, prompt, arguments.trace))
            kernels = rows[-1]["kernels"]
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "kernels"}), flush=True)
            for kernel in kernels[:12]:
                name, each = kernel["name"][:70], f"{kernel['per_step']:6.1f} x {kernel['us']:8.2f}"
                print(f"  {kernel['us_per_step']:9.1f} us  {each}  {name}")
    if arguments.json:
        document = {"benchmark": "profile", "model": arguments.shape, "environment": environment(bench), "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
