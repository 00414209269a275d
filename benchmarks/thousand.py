"""One thousand synthetic requests of varying length against the simulated executor: what the scheduler and the cache do
by themselves, with every figure of theirs.

python -m benchmarks.thousand [--requests 1000] [--json FILE] [--plots FOLDER]

Nothing waits for a device, so tokens per second are those of the engine's own code, on one core. Half of the prompts
begin with one of eight system prompts; the pool is smaller than the demand, so that blocks are evicted and sequences
preempted.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

from inferengine.bench.environment import write_result
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.simulation import plots
from inferengine.simulation.report import RunRecorder, distribution, interval_distribution
from inferengine.simulation.simulated_executor import SimulatedExecutor, make_capacity
from inferengine.simulation.workload import SyntheticWorkload, WorkloadOptions

PARAMS = SamplingParams(ignore_eos=True)
GAUGE_STEPS = 8


def run(num_requests: int, num_blocks: int, max_num_seqs: int, seed: int) -> tuple[dict[str, Any], RunRecorder]:
    """All requests at once; returns the report and the columns behind it."""
    capacity = make_capacity(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    options = SchedulerOptions(capacity.max_num_batched_tokens, max_num_seqs)
    core = EngineCore(SimulatedExecutor(capacity), capacity, options, clock=time.perf_counter)
    workload = SyntheticWorkload(
        WorkloadOptions(
            num_requests,
            arrivals="at_once",
            prompt_tokens="lognormal:96:0.7",
            output_tokens="lognormal:192:0.7",
            max_tokens=capacity.max_model_len,
            num_prefixes=8,
            prefix_tokens=64,
            seed=seed,
        )
    )
    arrivals = list(workload.arrivals())
    recorder = RunRecorder()
    intervals = recorder.intervals()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for item in arrivals:
        core.submit(
            Request(
                uid=item.uid,
                prompt_ids=item.prompt_ids,
                params=PARAMS,
                max_tokens=item.num_output,
                seed=item.seed,
                arrival_s=begin,
            )
        )
    while core.has_work:
        output = core.step()
        if output is not None:
            intervals.add(output, time.perf_counter())
            for row in output.finished:
                recorder.finished(row)
        if core.scheduler.stats.num_steps % GAUGE_STEPS == 0:
            gauges = core.scheduler.snapshot()
            recorder.gauge(gauges.kv_usage, gauges.internal_fragmentation)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    core.scheduler.check()
    expected = sum(item.num_output for item in arrivals)
    if recorder.num_output_tokens != expected or recorder.reasons != Counter({"length": num_requests}):
        raise SystemExit(f"wrong: {recorder.num_output_tokens} tokens of {expected}, ends {recorder.reasons}")
    stats, kv = core.scheduler.stats, core.scheduler.kv
    report = {
        "benchmark": "thousand",
        "requests": num_requests,
        "prompt_tokens": recorder.num_prompt_tokens,
        "output_tokens": recorder.num_output_tokens,
        "wall_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "output_tokens_per_s": round(recorder.num_output_tokens / wall_s),
        "output_tokens_per_cpu_s": round(recorder.num_output_tokens / cpu_s),
        "total_tokens_per_s": round((recorder.num_output_tokens + recorder.num_prompt_tokens) / wall_s),
        "requests_per_s": round(num_requests / wall_s, 1),
        "latency_ms": {
            "end_to_end": distribution(recorder.total_s),
            "first_token": distribution(recorder.first_token_s),
            "queue": distribution(recorder.queued_s),
            "between_tokens": interval_distribution(recorder.interval_values, recorder.interval_weights),
        },
        "steps": stats.num_steps,
        "mean_batch": round(stats.num_scheduled_rows / stats.num_steps, 1),
        "max_batch": stats.max_batch,
        "cache": {
            "blocks": num_blocks,
            "mean_utilization": round(math.fsum(recorder.kv_usage) / len(recorder.kv_usage), 4),
            "max_utilization": round(max(recorder.kv_usage), 4),
            "mean_internal_fragmentation": round(math.fsum(recorder.fragmentation) / len(recorder.fragmentation), 4),
            "prefix_hit_rate": round(kv.num_hit_tokens / kv.num_lookup_tokens, 4),
            "evictions": kv.num_evictions,
            "pressure_events": stats.num_failed_allocations,
            "preemptions": stats.num_preemptions,
        },
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return report, recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    report, recorder = run(arguments.requests, arguments.blocks, arguments.max_num_seqs, arguments.seed)
    print(json.dumps(report, indent=1))
    if arguments.json:
        write_result(arguments.json, report)
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        curves = [
            plots.cumulative("first token", [1e3 * value for value in recorder.first_token_s]),
            plots.cumulative("end to end", [1e3 * value for value in recorder.total_s]),
        ]
        title = f"{arguments.requests:,} requests at once, no device"
        chart = plots.line_chart(curves, title=title, x_label="milliseconds", y_label="share of requests")
        (arguments.plots / "thousand.svg").write_text(chart)


if __name__ == "__main__":
    main()
