"""What schedule + commit cost, in CPU time per step, at steady decode and with turnover; fresh, and after a long life.

python benchmarks/scheduler.py [--running 256 1024] [--aged 100000] [--json FILE]

`aged` is the number of requests that finished before the measurement; their prompts stay in the prefix cache, two
blocks each, so 100,000 of them leave 200,000 cached blocks. What a step costs must not depend on it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from array import array
from pathlib import Path

from inferengine.bench.environment import write_result
from inferengine.core.executor import Capacity, KVGroup, StepResult
from inferengine.core.scheduler.scheduler import Scheduler, SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.sampling_params import SamplingParams

PARAMS = SamplingParams(ignore_eos=True)


def make_scheduler(running: int, cached_blocks: int) -> Scheduler:
    blocks = running * 40 + cached_blocks
    capacity = Capacity(16, [KVGroup(blocks)], running, 65536, 8192, 32000)
    return Scheduler(capacity, SchedulerOptions(65536, running))


def add(scheduler: Scheduler, uid: int, max_tokens: int, prompt_length: int = 128) -> None:
    begin = uid * 4096 % (1 << 31)
    prompt = array("I", range(begin, begin + prompt_length))  # nobody else's
    scheduler.add(Request(uid=uid, prompt_ids=prompt, params=PARAMS, max_tokens=max_tokens))


def live(scheduler: Scheduler, num_requests: int) -> None:
    """Let so many requests of two full blocks come and go."""
    added = 0
    while added < num_requests or scheduler.has_unfinished:
        while added < num_requests and len(scheduler.waiting) < 64:
            added += 1
            add(scheduler, -added, max_tokens=2, prompt_length=32)
        scheduled = scheduler.schedule(0.0).step
        assert scheduled is not None
        scheduler.commit(scheduled, StepResult([5] * len(scheduled.sampled)), 0.0)


def measure(running: int, *, steps: int, lifetime: int | None, aged: int = 0) -> dict[str, float]:
    """Measure the milliseconds per step. `lifetime`: output tokens per request, each replaced when it ends; None:
    nobody ends. `aged`: requests that have come and gone before."""
    scheduler = make_scheduler(running, cached_blocks=20_000 + 2 * aged)
    live(scheduler, aged)
    snapshot = scheduler.snapshot()
    uid = 0
    for uid in range(1, running + 1):
        add(scheduler, uid, lifetime + uid % lifetime if lifetime else 10**6)
    times: list[float] = []
    finished = 0
    for step in range(steps + 20):
        begin = time.thread_time()
        scheduled = scheduler.schedule(0.0).step
        assert scheduled is not None
        middle = time.thread_time()
        result = StepResult([5 + step % 1000] * len(scheduled.sampled))
        commit_begin = time.thread_time()
        output = scheduler.commit(scheduled, result, 0.0)
        end = time.thread_time()
        for _ in output.finished:
            uid += 1
            finished += 1
            add(scheduler, uid, lifetime or 1)
        if step >= 20:
            times.append((middle - begin + end - commit_begin) * 1e3)
    return {
        "running": running,
        "lifetime_tokens": lifetime or 0,
        "finished_before": aged,
        "cached_blocks_before": snapshot.num_blocks_cached,
        "finished": finished,
        "median_ms": round(statistics.median(times), 4),
        "p99_ms": round(sorted(times)[int(len(times) * 0.99)], 4),
        "mean_ms": round(statistics.fmean(times), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--aged", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for running in arguments.running:
        for lifetime in (None, 128):
            for aged in arguments.aged:
                rows.append(measure(running, steps=arguments.steps, lifetime=lifetime, aged=aged))
                print(rows[-1], flush=True)
    if arguments.json:
        report = {
            "benchmark": "scheduler",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": rows,
        }
        write_result(arguments.json, report)


if __name__ == "__main__":
    main()
