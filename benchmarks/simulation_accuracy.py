"""How well the simulator predicts the real engine: the same requests through both, one in real, one in virtual time.

python -m benchmarks.simulation_accuracy [--json FILE]                            embedded model on the CPU
python -m benchmarks.simulation_accuracy --clock cpu --engine.threads 1           the same on a machine that others use
python -m benchmarks.simulation_accuracy --shape llama-3.1-8b --device cuda --cost h200-llama-3.1-8b \\
    --loads 0.5 0.9 --requests 400 --prompt-tokens uniform:128-1024 --output-tokens uniform:64-512

Without --cost the cost model is measured in this process, before and after each run. Each load is a Poisson stream
at that share of the throughput that the simulator predicts for all requests at once (load 0). The real engine is
EngineCore driven by hand:
no sockets, no second process. The figure that counts is the relative error on throughput and on the medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.calibrate import calibrate, profile_of
from benchmarks.device import Clock, add_model_arguments, open_executor, plain_options, raise_failure
from inferengine.config import parse_flags
from inferengine.core.admission import AdmissionLimits
from inferengine.core.executor import Capacity, Executor
from inferengine.core.request import Request
from inferengine.engine.core import EngineCore
from inferengine.params import SamplingParams
from inferengine.simulation.cost_model import DeviceProfile, StepShape, load_profile
from inferengine.simulation.engine import EngineOptions
from inferengine.simulation.fitting import fit
from inferengine.simulation.fleet import Fleet
from inferengine.simulation.report import Recorder, distribution, interval_distribution
from inferengine.simulation.workload import SyntheticWorkload, WorkloadOptions

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
TARGET = 0.10


def run_real(executor: Executor, capacity: Capacity, clock: Clock, workload: WorkloadOptions) -> dict[str, float]:
    """The engine's loop by hand: take what has arrived, step, note the news."""
    arrivals = list(SyntheticWorkload(workload).arrivals())
    core = EngineCore(executor, capacity, plain_options(capacity), clock=clock.now, on_failure=raise_failure)
    recorder = Recorder()
    intervals = recorder.intervals()
    begin = last = clock.now()
    index = 0
    while index < len(arrivals) or core.has_work:
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
        output = core.step()
        if output is not None:
            last = clock.now()
            intervals.add(output, last)
            for row in output.finished:
                recorder.finished(row)
    return figures(recorder, last - begin)


def run_virtual(profile: DeviceProfile, capacity: Capacity, workload: WorkloadOptions) -> dict[str, float]:
    """The same requests in virtual time."""
    limits = AdmissionLimits(capacity.max_model_len, 1 << 40, 1 << 30, 1 << 40)
    options = EngineOptions(capacity, profile.cost, plain_options(capacity), limits, profile.max_in_flight)
    fleet = Fleet(options, SyntheticWorkload(workload))
    report = fleet.run()
    return figures(fleet.recorder, report["duration_s"])


def figures(recorder: Recorder, duration_s: float) -> dict[str, float]:
    """Throughput and latencies; the keys that end in p50 and those per second are what is compared."""
    first, total = distribution(recorder.first_token_s), distribution(recorder.total_s)
    between = interval_distribution(recorder.interval_values, recorder.interval_weights)
    return {
        "duration_s": round(duration_s, 3),
        "output_tokens_per_s": round(recorder.num_output_tokens / duration_s, 1),
        "requests_per_s": round(len(recorder.total_s) / duration_s, 3),
        "first_token_ms_p50": first["p50"],
        "first_token_ms_p99": first["p99"],
        "between_tokens_ms_p50": between["p50"],
        "between_tokens_ms_p99": between["p99"],
        "end_to_end_ms_p50": total["p50"],
        "end_to_end_ms_p99": total["p99"],
    }


def compare(real: dict[str, float], virtual: dict[str, float]) -> dict[str, float]:
    """Relative errors of the simulator's figures."""
    return {name: round(virtual[name] / real[name] - 1.0, 4) for name in real if real[name]}


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--cost", help="a cost model by name or file; default: measured here, before the runs")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.6, 0.9], help="0: all at once")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt-tokens", default="uniform:16-256")
    parser.add_argument("--output-tokens", default="uniform:16-96")
    parser.add_argument(
        "--token-limit", type=int, default=18_000, help="of the calibration, see benchmarks/calibrate.py"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    rows: list[dict[str, Any]] = []
    with open_executor(arguments, flags) as (executor, capacity, about):
        clock = Clock(arguments.clock)
        steps: list[StepShape] = []

        def measure() -> DeviceProfile:
            """The given cost model, or one from steps measured just before and just after a run: machines drift."""
            if arguments.cost:
                return load_profile(arguments.cost)
            before = steps[:]
            steps[:], _ = calibrate(executor, capacity, clock, token_limit=arguments.token_limit)
            found = fit(before + steps)
            about["fit_median_error"] = round(found.median_error, 4)
            return profile_of("measured here", capacity, found, about)

        base = WorkloadOptions(
            num_requests=arguments.requests,
            arrivals="at_once",
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            max_tokens=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
        )
        most = run_virtual(measure(), capacity, base)["requests_per_s"]
        for load in arguments.loads:
            workload = replace(base, arrivals="poisson", rate=load * most) if load else base
            real = run_real(executor, capacity, clock, workload)
            virtual = run_virtual(measure(), capacity, workload)
            rows.append({"load": load, "real": real, "simulated": virtual, "error": compare(real, virtual)})
            print(f"load {load:g}")
            for name, error in rows[-1]["error"].items():
                print(f"  {name:<24}{real[name]:>12,.2f} real {virtual[name]:>12,.2f} simulated {error:>+8.1%}")
    judged = [
        abs(error)
        for row in rows
        for name, error in row["error"].items()
        if name.endswith("_p50") or name.endswith("per_s")
    ]
    within = sum(error <= TARGET for error in judged)
    print(f"{within} of {len(judged)} figures within {TARGET:.0%}; largest error {max(judged):.1%}")
    if arguments.json:
        document = {
            "benchmark": "simulation_accuracy",
            "environment": about,
            "requests": arguments.requests,
            "largest_error": max(judged),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
