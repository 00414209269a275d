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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device import Clock, add_model_arguments, open_executor, raise_failure, switched
from inferengine.bench.environment import write_result
from inferengine.config import parse_flags
from inferengine.core.executor import Capacity, Executor, KVGroup
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.simulation import plots
from inferengine.simulation.report import RunRecorder, percentile, weighted_percentiles

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Rung(NamedTuple):
    """Switches of one rung. `graphs` and `overlap` are the executor's, the others the scheduler's."""

    name: str
    options: dict[str, Any]
    graphs: bool = False
    overlap: bool = False


def make_rungs(on_cuda: bool) -> list[Rung]:
    """In the order of climbing; each has everything that those before it have. Chunks are cut so that streams keep
    their rhythm: a target of 20 ms between tokens on a card, 60 ms on a CPU."""
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


class Item(NamedTuple):
    """One request of a workload; all come at once."""

    prompt_ids: list[int]
    num_output: int


class Workload(NamedTuple):
    """What makes one optimisation matter, and the figure that shows it."""

    name: str
    shows: str
    unit: str
    figure: Callable[[RunRecorder, float], float]
    make: Callable[[random.Random, Sizes], list[Item]]
    num_blocks: Callable[[Capacity, Sizes], int] | None = None  # fewer than the device has
    higher_is_better: bool = True


class Sizes(NamedTuple):
    """How large the workloads are: a card takes more than two CPU cores."""

    batch: int
    prompt: int
    output: int
    long_prompt: int
    max_len: int  # what a contiguous cache reserves for each sequence
    vocab: int


def tokens_per_s(recorder: RunRecorder, seconds: float) -> float:
    return recorder.num_output_tokens / seconds


def slowest_interval_ms(recorder: RunRecorder, seconds: float) -> float:
    return 1e3 * weighted_percentiles(recorder.interval_values, recorder.interval_weights, [0.99])[0]


def first_token_ms(recorder: RunRecorder, seconds: float) -> float:
    return 1e3 * percentile(sorted(recorder.first_token_s), 0.5)


def _baseline(rng: random.Random, sizes: Sizes) -> list[Item]:
    """Equal requests that fit at once: no switch should cost anything here."""
    return [Item(_ids(rng, sizes, sizes.prompt), sizes.output) for _ in range(max(2, sizes.batch // 4))]


def _continuous(rng: random.Random, sizes: Sizes) -> list[Item]:
    """Three batches' worth, one long output among seven short ones: a static batch waits for its longest."""
    outputs = [sizes.output * 2 if i % 8 == 0 else max(4, sizes.output // 8) for i in range(3 * sizes.batch)]
    return [Item(_ids(rng, sizes, sizes.prompt // 4), count) for count in outputs]


def _paged(rng: random.Random, sizes: Sizes) -> list[Item]:
    """Short requests, and a pool for four of the longest length: reserving it leaves room for four."""
    return [Item(_ids(rng, sizes, sizes.prompt // 4), sizes.output // 2) for _ in range(2 * sizes.batch)]


def _chunked(rng: random.Random, sizes: Sizes) -> list[Item]:
    """Streams that run while long prompts come in: how long must they wait for their next token? Enough prompts that
    the steps that hold them are more than one in a hundred."""
    streams = [Item(_ids(rng, sizes, 16), 3 * sizes.output) for _ in range(max(2, sizes.batch // 4))]
    return streams + [Item(_ids(rng, sizes, sizes.long_prompt), 2) for _ in range(max(4, sizes.batch // 2))]


def _prefix(rng: random.Random, sizes: Sizes) -> list[Item]:
    """Everybody sends the same long instructions and a short question."""
    shared = _ids(rng, sizes, sizes.long_prompt)
    return [Item(shared + _ids(rng, sizes, 24), max(4, sizes.output // 8)) for _ in range(3 * sizes.batch)]


def _ids(rng: random.Random, sizes: Sizes, count: int) -> list[int]:
    return [rng.randrange(sizes.vocab) for _ in range(max(1, count))]


WORKLOADS = (
    Workload("baseline", "nothing", "tok/s", tokens_per_s, _baseline),
    Workload("continuous_batching", "continuous", "tok/s", tokens_per_s, _continuous),
    Workload(
        "paged_attention", "paged", "tok/s", tokens_per_s, _paged,
        num_blocks=lambda capacity, sizes: -(-4 * sizes.max_len // capacity.block_size),
    ),
    Workload(
        "chunked_prefill", "chunked", "ms between tokens, p99", slowest_interval_ms, _chunked, higher_is_better=False
    ),
    Workload("prefix_caching", "prefix", "ms to first token, p50", first_token_ms, _prefix, higher_is_better=False),
)  # fmt: skip


def sizes_for(capacity: Capacity, on_cuda: bool) -> Sizes:
    longest = min(capacity.max_model_len, 8192 if on_cuda else 1024)
    if on_cuda:
        return Sizes(32, 512, 64, min(2048, longest // 2), longest, capacity.vocab_size)
    return Sizes(8, 96, 32, min(448, longest // 2), longest, capacity.vocab_size)


def measure(
    executor: Executor, capacity: Capacity, rung: Rung, workload: Workload, sizes: Sizes, clock: Clock, seed: int
) -> float:
    """The workload's figure on this rung."""
    blocks = capacity.groups[0].num_blocks
    if workload.num_blocks is not None:
        blocks = min(blocks, workload.num_blocks(capacity, sizes))
    pool = capacity._replace(
        groups=[KVGroup(blocks, *group[1:]) for group in capacity.groups], max_model_len=sizes.max_len
    )
    core = EngineCore(
        executor, pool, SchedulerOptions(capacity.max_num_batched_tokens, sizes.batch, **rung.options), clock=clock.now,
        on_failure=raise_failure,
    )  # fmt: skip
    items = workload.make(random.Random(seed), sizes)
    recorder = RunRecorder()
    intervals = recorder.intervals()
    begin = clock.now()
    for uid, item in enumerate(items):
        core.submit(
            Request(
                uid=uid, prompt_ids=item.prompt_ids, params=PARAMS, max_tokens=item.num_output,
                arrival_s=begin,
            )
        )  # fmt: skip
    while core.has_work:
        output = core.step()
        if output is not None:
            intervals.add(output, clock.now())
            for row in output.finished:
                recorder.finished(row)
    if recorder.reasons != {"length": len(items)}:
        raise SystemExit(f"{workload.name} on {rung.name}: requests ended with {recorder.reasons}")
    return workload.figure(recorder, clock.now() - begin)


def table(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> str:
    """Rungs down, workloads across; the cell that a rung was made for is marked."""
    width = max(len(rung.name) for rung in rungs) + 2
    lines = [" " * width + "".join(f"{item.name:>24}" for item in WORKLOADS)]
    lines.append(" " * width + "".join(f"{item.unit:>24}" for item in WORKLOADS))
    for rung in rungs:
        cells = []
        for item in WORKLOADS:
            mark = "*" if rung.name.endswith(item.shows) else " "
            cells.append(f"{figures[item.name][rung.name]:>23,.1f}{mark}")
        lines.append(f"{rung.name:<{width}}" + "".join(cells))
    lines.append("* the rung that the workload was made for: " + ", ".join(_gains(rungs, figures)))
    return "\n".join(lines)


def _gains(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> list[str]:
    gains = []
    for item in WORKLOADS:
        for below, rung in pairwise(rungs):
            if rung.name.endswith(item.shows):
                before, after = figures[item.name][below.name], figures[item.name][rung.name]
                gain = after / before if item.higher_is_better else before / after
                gains.append(f"{item.shows} {gain:.2f}x")
    return gains


def chart(rungs: Sequence[Rung], figures: dict[str, dict[str, float]]) -> str:
    """Each workload's figure on each rung, relative to the lowest; above 1 is better."""
    bars = []
    for rung in rungs:
        ratios = []
        for item in WORKLOADS:
            base, value = figures[item.name][rungs[0].name], figures[item.name][rung.name]
            ratios.append(value / base if item.higher_is_better else base / value)
        bars.append(plots.Series(rung.name, [], ratios))
    names = [item.name for item in WORKLOADS]
    title = "What each optimisation gives (times better than static batches)"
    return plots.bar_chart(names, bars, title=title, y_label="times better", show_values=False)


def report(
    rungs: Sequence[Rung],
    runs: dict[str, dict[str, list[float]]],
    about: dict[str, Any],
    sizes: Sizes,
    file: Path | None,
) -> dict[str, dict[str, float]]:
    """The medians of all repeats so far, which are written to `file`."""
    medians = {
        name: {rung: round(statistics.median(values), 2) for rung, values in row.items()} for name, row in runs.items()
    }
    if file is not None:
        document = {
            "benchmark": "ladder",
            "environment": about,
            "time": time.strftime("%Y-%m-%d"),
            "sizes": sizes._asdict(),
            "units": {item.name: item.unit for item in WORKLOADS},
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
    runs: dict[str, dict[str, list[float]]] = {item.name: {} for item in WORKLOADS}
    on_cuda = arguments.device == "cuda"
    rungs = make_rungs(on_cuda)
    engine = {"cuda_graphs": on_cuda, "overlap": "on" if on_cuda else "off"}
    with open_executor(arguments, flags, engine=engine) as (executor, capacity, about):
        sizes = sizes_for(capacity, on_cuda)
        for repeat in range(arguments.repeats + 1):  # 0 is the warm-up
            for rung in rungs:
                for workload in WORKLOADS if repeat else WORKLOADS[:1]:
                    with switched(executor, graphs=rung.graphs, overlap=rung.overlap):
                        value = measure(executor, capacity, rung, workload, sizes, clock, seed=repeat)
                    if repeat:
                        runs[workload.name].setdefault(rung.name, []).append(value)
                        print(f"{repeat} {rung.name:<14}{workload.name:<22}{value:>12,.1f} {workload.unit}", flush=True)
            if repeat:
                medians = report(rungs, runs, about, sizes, arguments.json)  # what is there, should it end early
    print(table(rungs, medians))
    if arguments.svg:
        arguments.svg.write_text(chart(rungs, medians))


if __name__ == "__main__":
    main()
