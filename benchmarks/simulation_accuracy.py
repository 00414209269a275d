"""How well the simulator predicts the real engine: the same requests through both, one in real, one in virtual time.

python -m benchmarks.simulation_accuracy [--json FILE]                            embedded model on the CPU
python -m benchmarks.simulation_accuracy --clock cpu --engine.threads 1           the same on a machine that others use
python -m benchmarks.simulation_accuracy --shape llama-3.1-8b --device cuda --save h200-llama-3.1-8b.json \\
    --loads 0 0.6 --requests 400 --prompt-tokens uniform:32-512 --output-tokens uniform:32-256

The cost model is measured in this process, in parts before, between and after the slices of the load (--cost NAME: it
is given). On a CPU a yardstick runs between the steps (benchmarks/pace.py), with the clock stopped: steps are fitted at
the machine's reference pace, and in virtual time they take as much longer as the machine was slower at that time of
the load. Each load is a Poisson stream at that share of the real throughput of all requests at once (load 0). The
real engine is EngineCore driven by hand: no sockets, no second process.

What counts is the relative error on throughput and on the medians (`error`). Beside it: the error of a machine taken to
be of one pace (`error_at_one_pace`), the error where the simulator is given the real steps' own times, which is that of
everything but the cost model (`error_of_the_rest`), and the cost model's error on the load's steps by class.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.calibrate import Grid, at_reference_pace, default_token_limit, profile_of
from benchmarks.device import (
    Clock,
    Stopwatch,
    TimedStep,
    add_model_arguments,
    captured_steps,
    open_executor,
    plain_options,
    raise_failure,
)
from benchmarks.measured_steps import CALIBRATION, describe, save_steps
from benchmarks.pace import Pace, Yardstick, work_of, works_of
from inferengine.bench.environment import write_result
from inferengine.config import parse_flags
from inferengine.core.executor import Capacity, Executor
from inferengine.core.scheduler.queues import AdmissionLimits
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.cost_model import CostModel, DeviceProfile, HostTime, StepShape, load_profile
from inferengine.simulation.fitting import fit
from inferengine.simulation.fleet import Fleet
from inferengine.simulation.report import RunRecorder, distribution, interval_distribution
from inferengine.simulation.virtual_engine import EngineOptions, StepCost
from inferengine.simulation.workload import SyntheticWorkload, WorkloadOptions

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
TARGET = 0.10
DISTURBED = 3.0  # times the model's prediction: such a step says nothing about a class


class Slice(NamedTuple):
    """One run of the real engine: its steps, and when it began and ended by the run's clock."""

    workload: WorkloadOptions
    steps: list[TimedStep]
    begin_s: float
    end_s: float


class Results:
    """Figures of one load over all of its slices."""

    def __init__(self) -> None:
        self.recorder = RunRecorder()
        self.duration_s = 0.0

    def figures(self) -> dict[str, float]:
        """Return throughput and latencies; the keys that end in p50 and those per second are what is compared."""
        recorder = self.recorder
        first, total = distribution(recorder.first_token_s), distribution(recorder.total_s)
        between = interval_distribution(recorder.interval_values, recorder.interval_weights)
        return {
            "duration_s": round(self.duration_s, 3),
            "output_tokens_per_s": round(recorder.num_output_tokens / self.duration_s, 1),
            "requests_per_s": round(len(recorder.total_s) / self.duration_s, 3),
            "first_token_ms_p50": first["p50"],
            "first_token_ms_p99": first["p99"],
            "between_tokens_ms_p50": between["p50"],
            "between_tokens_ms_p99": between["p99"],
            "end_to_end_ms_p50": total["p50"],
            "end_to_end_ms_p99": total["p99"],
        }


def run_real(
    executor: Executor,
    capacity: Capacity,
    clock: Clock,
    yardstick: Yardstick,
    workload: WorkloadOptions,
    results: Results,
) -> Slice:
    """Run the engine's loop by hand: take what has arrived, step, record the output."""
    arrivals = list(SyntheticWorkload(workload).arrivals())
    watch = Stopwatch(executor, clock.now)
    core = EngineCore(watch, capacity, plain_options(capacity), clock=clock.now, on_failure=raise_failure)
    intervals = results.recorder.intervals()
    begin = last = clock.now()
    index = 0
    while index < len(arrivals) or core.has_work:
        yardstick.look()
        now = clock.now()
        while index < len(arrivals) and begin + arrivals[index].arrival_s <= now:
            item = arrivals[index]
            core.submit(
                Request(
                    uid=item.uid,
                    prompt_ids=item.prompt_ids,
                    params=PARAMS,
                    max_tokens=item.num_output,
                    arrival_s=begin + item.arrival_s,
                )
            )
            index += 1
        if not core.has_work:
            clock.sleep(begin + arrivals[index].arrival_s - clock.now())
            continue
        output = watch.step(core)
        if output is not None:
            last = watch.news_s
            intervals.add(output, last)
            for row in output.finished:
                results.recorder.finished(row)
    results.duration_s += last - begin
    return Slice(workload, watch.steps, begin, last)


def run_virtual(
    cost: StepCost,
    capacity: Capacity,
    max_in_flight: int,
    workload: WorkloadOptions,
    results: Results,
    pace: Callable[[float, StepShape], float] | None = None,
) -> None:
    """Run the same requests in virtual time."""
    limits = AdmissionLimits(capacity.max_model_len, 1 << 40, 1 << 30, 1 << 40)
    options = EngineOptions(capacity, cost, plain_options(capacity), limits, max_in_flight, pace)
    report = Fleet(options, SyntheticWorkload(workload), recorder=results.recorder).run()
    results.duration_s += report["duration_s"]


class Recorded:
    """Implements `simulation.virtual_engine.StepCost`: the times that the steps of a run really took, by their tokens,
    rows and decodes, in their order. Where the run had no such step left, the cost model's: an arrival at the very
    end of a step may find the next one in one world and miss it in the other."""

    def __init__(self, steps: Sequence[TimedStep], otherwise: CostModel) -> None:
        self.num_others = 0
        self._otherwise = otherwise
        self._seconds: dict[tuple[Any, ...], deque[float]] = {}
        for step in steps:
            self._seconds.setdefault(step.shape[:3], deque()).append(step.shape.seconds)

    def seconds(self, shape: StepShape) -> float:
        left = self._seconds.get(shape[:3])
        if left:
            return left.popleft()
        self.num_others += 1
        return self._otherwise.seconds(shape)

    def host_time(self, shape: StepShape) -> HostTime:
        """Return no host time: it is in the recorded times."""
        return HostTime(0.0, 0.0)


def compare(real: dict[str, float], virtual: dict[str, float]) -> dict[str, float]:
    """Return the relative errors of the simulator's figures."""
    return {name: round(virtual[name] / real[name] - 1.0, 4) for name in real if real[name]}


def judged(errors: dict[str, float]) -> dict[str, float]:
    """Return the figures that count."""
    return {name: error for name, error in errors.items() if name.endswith(("_p50", "per_s"))}


def step_class(shape: StepShape, cost: CostModel) -> str:
    """Return the class of a step: classes have errors of their own."""
    kind, _ = cost.kind_of(shape)
    if kind == "launched":
        return "launched kernel by kernel"
    if kind == "prompts":
        return "with prompts"
    return "decodes, other rows than before" if shape.is_changed else "decodes, the same rows"


def errors_by_class(cost: CostModel, steps: Sequence[TimedStep], pace: Pace) -> dict[str, dict[str, float]]:
    """Return how far the cost model is off on the steps of the load that the device's time is known of: of all their
    time together, and of the median step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        if step.shape.is_device_time:
            shape = at_reference_pace(step, pace)
            found.setdefault(step_class(shape, cost), []).append((cost.seconds(shape), shape.seconds))
    whole = sum(step.shape.seconds for step in steps)
    rows = {}
    for name, pairs in sorted(found.items()):
        calm = [(model, seconds) for model, seconds in pairs if seconds <= DISTURBED * model] or pairs
        rows[name] = {
            "steps": len(pairs),
            "share_of_time": round(sum(seconds for _, seconds in pairs) / whole, 4),
            "mean_ms": round(1e3 * statistics.fmean(seconds for _, seconds in pairs), 3),
            "error_of_their_time": round(sum(m for m, _ in pairs) / sum(s for _, s in pairs) - 1.0, 4),
            "median_error": round(statistics.median(model / seconds - 1.0 for model, seconds in pairs), 4),
            "median_scatter": round(statistics.median(abs(model / seconds - 1.0) for model, seconds in pairs), 4),
            "disturbed": len(pairs) - len(calm),
        }
    return rows


def predict(
    load: float, real: Results, slices: Sequence[Slice], profile: DeviceProfile, capacity: Capacity, pace: Pace
) -> dict[str, Any]:
    """Return predict one load, and return its row of the report."""
    followed, even, rest = Results(), Results(), Results()
    cost, in_flight, num_others = profile.cost, profile.max_in_flight, 0
    for item in slices:

        def pace_then(now: float, shape: StepShape, begin_s: float = item.begin_s) -> float:
            return pace.at(begin_s + now, work_of(shape))

        run_virtual(cost, capacity, in_flight, item.workload, followed, pace_then)
        run_virtual(cost, capacity, in_flight, item.workload, even)
        recorded = Recorded(item.steps, cost)
        run_virtual(recorded, capacity, in_flight, item.workload, rest)
        num_others += recorded.num_others
    figures = real.figures()
    return {
        "load": load,
        "requests": sum(item.workload.num_requests for item in slices),
        "rate": slices[0].workload.rate if load else 0.0,
        "real": figures,
        "simulated": followed.figures(),
        "error": compare(figures, followed.figures()),
        "error_at_one_pace": compare(figures, even.figures()),
        "error_of_the_rest": compare(figures, rest.figures()),
        "steps_of_another_shape": num_others,
        "pace_of_slices": [pace.mean(item.begin_s, item.end_s) for item in slices],
        "classes": errors_by_class(profile.cost, [step for item in slices for step in item.steps], pace),
    }


def show(row: dict[str, Any]) -> None:
    print(f"load {row['load']:g}: pace of the slices {', '.join(map(str, row['pace_of_slices']))}")
    print(f"  {'':<24}{'real':>12}{'simulated':>12}{'error':>9}{'at one pace':>13}{'of the rest':>13}")
    for name, error in row["error"].items():
        one_pace, rest = row["error_at_one_pace"][name], row["error_of_the_rest"][name]
        print(
            f"  {name:<24}{row['real'][name]:>12,.2f}{row['simulated'][name]:>12,.2f}{error:>+9.1%}{one_pace:>+13.1%}"
            f"{rest:>+13.1%}"
        )
    for name, item in row["classes"].items():
        print(
            f"  {item['steps']:>6} steps {name:<34}{item['share_of_time']:>6.0%} of the time, "
            f"{item['mean_ms']:>8.2f} ms; model {item['error_of_their_time']:>+6.1%}, "
            f"scatter {item['median_scatter']:.1%}"
        )


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of this program; those of the configuration have been taken out of `words`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--cost", help="a cost model by name or file; default: measured here")
    parser.add_argument("--save", type=Path, help="write the cost model that was measured here to this file")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.6, 0.9], help="0: all at once")
    parser.add_argument("--requests", type=int, default=200, help="of each load, in all slices together")
    parser.add_argument("--slices", type=int, default=0, help="runs that a load is cut into; 0: 4, on CUDA 1")
    parser.add_argument("--prompt-tokens", default="uniform:16-256")
    parser.add_argument("--output-tokens", default="uniform:16-96")
    parser.add_argument("--token-limit", type=int, default=0, help="of the calibration, see benchmarks/calibrate.py")
    parser.add_argument("--steps", type=Path, help="write the measured steps of calibration and loads here")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Measure, simulate the same loads, and compare."""
    flags, rest = parse_flags(sys.argv[1:])
    arguments = parse_arguments(rest)
    with open_executor(arguments, flags) as (executor, capacity, about):
        on_cpu = "CPU" in about["device"]
        num_slices = arguments.slices or (4 if on_cpu else 1)
        clock = Clock(arguments.clock)
        yardstick = Yardstick(clock, works_of(executor) if on_cpu else ())
        grid = Grid(executor, capacity, clock, yardstick, arguments.token_limit or default_token_limit(about))
        parts = [] if arguments.cost else grid.deal(num_slices * len(arguments.loads) + 1)
        gc.collect()
        gc.freeze()  # as the engine's process does when it is ready
        atexit.register(gc.unfreeze)  # else Triton reports at the end what was never collected

        def calibrate_part() -> None:
            if parts:
                grid.run(parts.pop())

        base = WorkloadOptions(
            num_requests=max(1, arguments.requests // num_slices),
            arrivals="at_once",
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            max_tokens=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
        )
        run = partial(run_real, executor, capacity, clock, yardstick)
        real, slices = run_loads(run, base, arguments.loads, num_slices, calibrate_part)
        measured: dict[str, Sequence[StepShape]] = {}
        if arguments.cost:
            profile = load_profile(arguments.cost)
            pace = yardstick.pace([1e-3 * ms for ms in profile.source.get("pace", {}).get("yardstick_ms", [])])
        else:
            pace = yardstick.pace()
            measured[CALIBRATION] = grid.steps(pace)
            found = fit(measured[CALIBRATION], captured_steps(executor))
            profile = profile_of(
                arguments.save.stem if arguments.save else "measured here", capacity, found, pace, about
            )
            about["fit"] = {"steps": found.num_steps, "median_error": round(found.median_error, 4)}
        about["pace"] = pace.summary()
        for load in arguments.loads:
            measured[f"load {load:g}"] = [at_reference_pace(step, pace) for item in slices[load] for step in item.steps]
    if arguments.save and not arguments.cost:
        profile.save(arguments.save)
    if arguments.steps:
        save_steps(arguments.steps, profile, measured)
    print(describe(profile.cost))
    rows = [predict(load, real[load], slices[load], profile, capacity, pace) for load in arguments.loads]
    report(rows, about, num_slices, arguments)


def run_loads(
    run: Callable[[WorkloadOptions, Results], Slice],
    base: WorkloadOptions,
    loads: Sequence[float],
    num_slices: int,
    between: Callable[[], None],
) -> tuple[dict[float, Results], dict[float, list[Slice]]]:
    """Run the loads in slices, by turns, and call `between` before, between and after them. Returns the results and the
    slices of each load: 0 is all at once, else a share of the requests per second that the engine can do."""
    real: dict[float, Results] = {load: Results() for load in loads}
    slices: dict[float, list[Slice]] = {load: [] for load in loads}
    between()
    first = Results()  # warms up, and says how much the engine can do
    run(base, first)
    most = first.figures()["requests_per_s"]
    for number in range(num_slices):
        for load in loads:
            workload = replace(base, seed=1 + number)
            if load:
                workload = replace(workload, arrivals="poisson", rate=load * most)
            slices[load].append(run(workload, real[load]))
            between()
    return real, slices


def report(
    rows: Sequence[dict[str, Any]], about: dict[str, Any], num_slices: int, arguments: argparse.Namespace
) -> None:
    """Print how far the simulated figures of each load are off, and write the result where that is asked for."""
    for row in rows:
        show(row)
    errors = [abs(error) for row in rows for error in judged(row["error"]).values()]
    within = sum(error <= TARGET for error in errors)
    print(f"machine {about['pace']}")
    print(f"{within} of {len(errors)} figures within {TARGET:.0%}; largest error {max(errors):.1%}")
    if arguments.json:
        document = {
            "benchmark": "simulation_accuracy",
            "environment": about,
            "requests": arguments.requests,
            "slices": num_slices,
            "prompt_tokens": arguments.prompt_tokens,
            "output_tokens": arguments.output_tokens,
            "within_target": within,
            "figures": len(errors),
            "largest_error": max(errors),
            "rows": rows,
        }
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
