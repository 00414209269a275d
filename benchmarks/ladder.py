"""The ladder: every optimisation switched on in turn, over five workloads that each make one of them matter.

python -m benchmarks.ladder [--repeats 3] [--json FILE] [--svg FILE]       embedded model on the CPU
python -m benchmarks.ladder --shape llama-3.1-8b --device cuda             on the card: CUDA graphs and overlap too

Rungs stand on each other: static batches -> continuous batching -> paged cache -> chunked prefill -> prefix cache
-> (CUDA) graphs -> overlap. Each cell is the workload's own figure: output tokens per second where throughput is at
stake, milliseconds where waiting is. `gain` compares a rung with the one below it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device import Clock, add_model_arguments, open_executor, raise_failure, switched
from inferengine.bench import plots
from inferengine.bench.environment import write_result
from inferengine.bench.load_options import WORKLOADS, Sizes
from inferengine.config import parse_flags
from inferengine.core.executor import Capacity, Executor, KVGroup
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.report import RunRecorder, percentile, weighted_percentiles

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Rung(NamedTuple):
    """Switches of one rung. `graphs` and `overlap` are the executor's, the others the scheduler's."""

    name: str
    options: dict[str, Any]
    graphs: bool = False
    overlap: bool = False


def make_rungs(on_cuda: bool) -> list[Rung]:
    """Return the rungs in the order of climbing; each has everything that those before it have. Chunks are cut so that
    streams keep their rhythm: a target of 20 ms between tokens on a card, 60 ms on a CPU."""
    off = {"policy": "static", "contiguous": True, "chunked_prefill": False, "prefix_caching": False}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("static", {}),
        ("+ continuous", {"policy": "fcfs"}),
        ("+ paged", {"contiguous": False}),
        ("+ chunked", {"chunked_prefill": True, "itl_target_s": 0.020 if on_cuda else 0.060}),
        ("+ prefix", {"prefix_caching": True}),
    ]
    rungs: list[Rung] = []
    options = off
    for name, change in steps:
        options = {**options, **change}
        rungs.append(Rung(name, options))
    if on_cuda:
        rungs.append(Rung("+ graphs", options, graphs=True))
        rungs.append(Rung("+ overlap", options, graphs=True, overlap=True))
    return rungs


def tokens_per_s(recorder: RunRecorder, seconds: float) -> float:
    return recorder.num_output_tokens / seconds


def slowest_interval_ms(recorder: RunRecorder, seconds: float) -> float:
    return 1e3 * weighted_percentiles(recorder.interval_values, recorder.interval_weights, [0.99])[0]


def first_token_ms(recorder: RunRecorder, seconds: float) -> float:
    return 1e3 * percentile(sorted(recorder.first_token_s), 0.5)


# What a workload's figure is of a run in this process.
FIGURES: dict[tuple[str, ...], Callable[[RunRecorder, float], float]] = {
    ("output_tokens_per_s",): tokens_per_s,
    ("itl_ms", "p99"): slowest_interval_ms,
    ("ttft_ms", "p50"): first_token_ms,
}
LONGEST_IN_POOL = 4  # paged_attention's pool holds so many of the longest length: reserving it leaves room for four


def sizes_for(on_cuda: bool, max_len: int) -> Sizes:
    if on_cuda:
        return Sizes(32, 512, 64, min(2048, max_len // 2), 8)
    return Sizes(8, 96, 32, min(448, max_len // 2), 4)


def longest_for(capacity: Capacity, on_cuda: bool) -> int:
    """Return the tokens that a contiguous cache reserves for each sequence."""
    return min(capacity.max_model_len, 8192 if on_cuda else 1024)


def measure(
    executor: Executor, capacity: Capacity, rung: Rung, name: str, sizes: Sizes, clock: Clock, seed: int, max_len: int
) -> float:
    """Measure the figure of a workload on this rung."""
    workload = WORKLOADS[name]
    blocks = capacity.groups[0].num_blocks
    if name == "paged_attention":
        blocks = min(blocks, -(-LONGEST_IN_POOL * max_len // capacity.block_size))
    pool = capacity._replace(groups=[KVGroup(blocks, *group[1:]) for group in capacity.groups], max_model_len=max_len)
    core = EngineCore(
        executor, pool, SchedulerOptions(capacity.max_num_batched_tokens, sizes.batch, **rung.options), clock=clock.now,
        on_failure=raise_failure,
    )  # fmt: skip
    items, generator = workload.items(sizes), random.Random(seed)
    draw = partial(generator.randrange, capacity.vocab_size)
    shared = [draw() for _ in range(max(item.shared for item in items))]
    prompts = [shared[: item.shared] + [draw() for _ in range(item.num_prompt - item.shared)] for item in items]
    recorder = RunRecorder()
    intervals = recorder.intervals()
    begin = clock.now()
    for uid, (item, prompt_ids) in enumerate(zip(items, prompts, strict=True)):
        core.submit(
            Request(
                uid=uid, prompt_ids=prompt_ids, params=PARAMS, max_tokens=item.num_output, arrival_s=begin,
            )
        )  # fmt: skip
    while core.has_work:
        output = core.step()
        if output is not None:
            intervals.add(output, clock.now())
            for row in output.finished:
                recorder.finished(row)
    if recorder.reasons != {"length": len(items)}:
        raise SystemExit(f"{name} on {rung.name}: requests ended with {recorder.reasons}")
    return FIGURES[workload.figure](recorder, clock.now() - begin)


def table(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> str:
    """Format a table: rungs down, workloads across; the cell that a rung was made for is marked."""
    width = max(len(rung.name) for rung in rungs) + 2
    lines = [" " * width + "".join(f"{name:>24}" for name in WORKLOADS)]
    lines.append(" " * width + "".join(f"{item.unit:>24}" for item in WORKLOADS.values()))
    for rung in rungs:
        cells = []
        for name, item in WORKLOADS.items():
            mark = "*" if rung.name.endswith(item.shows) else " "
            cells.append(f"{figures[name][rung.name]:>23,.1f}{mark}")
        lines.append(f"{rung.name:<{width}}" + "".join(cells))
    lines.append("* the rung that the workload was made for: " + ", ".join(_gains(rungs, figures)))
    return "\n".join(lines)


def _gains(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> list[str]:
    gains = []
    for name, item in WORKLOADS.items():
        for below, rung in pairwise(rungs):
            if rung.name.endswith(item.shows):
                before, after = figures[name][below.name], figures[name][rung.name]
                gain = after / before if item.higher_is_better else before / after
                gains.append(f"{item.shows} {gain:.2f}x")
    return gains


def chart(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> str:
    """Draw each workload's figure on each rung, relative to the lowest; above 1 is better."""
    bars = []
    for rung in rungs:
        ratios = []
        for name, item in WORKLOADS.items():
            base, value = figures[name][rungs[0].name], figures[name][rung.name]
            ratios.append(value / base if item.higher_is_better else base / value)
        bars.append(plots.Series(rung.name, [], ratios))
    names = list(WORKLOADS)
    title = "What each optimisation gives (times better than static batches)"
    return plots.bar_chart(names, bars, title=title, y_label="times better", show_values=False)


def report(
    rungs: Sequence[Rung],
    runs: dict[str, dict[str, list[float]]],
    about: dict[str, Any],
    sizes: Sizes,
    file: Path | None,
) -> dict[str, dict[str, float]]:
    """Write the medians of all repeats so far to `file`, and return them."""
    medians = {
        name: {rung: round(statistics.median(values), 2) for rung, values in row.items()} for name, row in runs.items()
    }
    if file is not None:
        document = {
            "benchmark": "ladder",
            "environment": about,
            "time": time.strftime("%Y-%m-%d"),
            "sizes": sizes._asdict(),
            "units": {name: item.unit for name, item in WORKLOADS.items()},
            "rungs": [rung._asdict() for rung in rungs],
            "figures": medians,
            "runs": runs,
        }
        write_result(file, document)
    return medians


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many runs counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args(rest)
    clock = Clock(arguments.clock)
    runs: dict[str, dict[str, list[float]]] = {name: {} for name in WORKLOADS}
    on_cuda = arguments.device == "cuda"
    rungs = make_rungs(on_cuda)
    engine = {"cuda_graphs": on_cuda, "overlap": "on" if on_cuda else "off"}
    with open_executor(arguments, flags, engine=engine) as (executor, capacity, about):
        max_len = longest_for(capacity, on_cuda)
        sizes = sizes_for(on_cuda, max_len)
        for repeat in range(arguments.repeats + 1):  # 0 is the warm-up
            for rung in rungs:
                for name in list(WORKLOADS)[: None if repeat else 1]:
                    with switched(executor, graphs=rung.graphs, overlap=rung.overlap):
                        value = measure(executor, capacity, rung, name, sizes, clock, repeat, max_len)
                    if repeat:
                        runs[name].setdefault(rung.name, []).append(value)
                        print(f"{repeat} {rung.name:<14}{name:<22}{value:>12,.1f} {WORKLOADS[name].unit}", flush=True)
            if repeat:
                medians = report(rungs, runs, about, sizes, arguments.json)  # what is there, should it end early
    print(table(rungs, medians))
    if arguments.svg:
        arguments.svg.write_text(chart(rungs, medians))


if __name__ == "__main__":
    main()
