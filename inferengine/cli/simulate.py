"""`inferengine simulate`: the engine's own scheduler in virtual time. `simulate s1`: a reference's 1,000 requests."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferengine.bench import plots
from inferengine.bench.environment import write_result
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.client.load_balancing import POLICIES
from inferengine.config import Config
from inferengine.engine.options import admission_limits, scheduler_options
from inferengine.errors import ConfigError, ExitCode
from inferengine.simulation import reference_run
from inferengine.simulation.cost_model import DeviceProfile, load_profile, profile_names
from inferengine.simulation.fleet import Failure, Fleet
from inferengine.simulation.report import Objective, RunRecorder, table
from inferengine.simulation.virtual_engine import EngineOptions
from inferengine.simulation.workload import SyntheticWorkload, TraceWorkload, Workload, WorkloadOptions

OPTIONS = {
    "the device": (
        Option(
            "--cost NAME|FILE.json",
            "how long steps take; `--cost list` names those that come with the package",
            "h200-llama-3.1-8b-analytic",
        ),
        Option(
            "--tensor-parallel N", "devices of each engine that share the model; default: engine.tensor_parallel", 0
        ),
        Option("--engines N", "engines behind the client's load balancing", 1, minimum=1),
        Option("--choice POLICY", "load balancing: " + ", ".join(POLICIES), "power_of_two", choices=tuple(POLICIES)),
        Option(
            "--fail T:ENGINE[:BACK]",
            "engine ENGINE dies after T seconds and is back BACK seconds later; any number of times",
            (),
            repeated=True,
        ),
    ),
    "the workload": (
        Option("--requests N", "how many", 1000, minimum=1),
        Option("--arrivals KIND", "poisson, steady, gamma, burst, at_once", "poisson"),
        Option("--rate R", "requests (conversations) per second", 10.0),
        Option("--variation V", "gamma: standard deviation over mean of the gaps", 2.0),
        Option("--burst-size N", "burst: requests at a time", 100, minimum=1),
        Option(
            "--prompt-tokens SPEC",
            "128, uniform:64-256, exponential:200 or lognormal:200:0.8, median and sigma",
            "lognormal:200:0.8",
        ),
        Option("--output-tokens SPEC", "likewise", "lognormal:100:0.8"),
        Option("--prefixes N", "system prompts shared by all, popularity after Zipf; 0: none", 0),
        Option("--prefix-tokens N", "their length", 512),
        Option("--turns N", "turns of each conversation", 1, minimum=1),
        Option("--think-s S", "seconds between turns", 5.0),
        Option("--tenants N", "tenants, for scheduler.policy fair", 1, minimum=1),
        Option("--deadline-s S", "every request's deadline; 0: none", 0.0),
        Option("--trace FILE.jsonl", "recorded requests instead, own form or Mooncake's"),
        Option("--speed X", "plays the trace X times as fast", 1.0),
        Option("--seed N", "of everything that is drawn", 0),
    ),
    "the report": (
        Option("--slo-ttft-ms MS", "goodput: first token within", 1000.0),
        Option("--slo-itl-ms MS", "goodput: mean time per further token within", 100.0),
        Option("--json [FILE]", "the report as JSON; without FILE it is printed instead of the table"),
        Option("--plots FOLDER", "latency, timeline and cache as SVG; needs inferengine[plots]"),
    ),
}


@command(OPTIONS)
def run(arguments: Arguments) -> int:
    """Run the engine's own scheduler in virtual time: a workload against one engine or a fleet.

    It takes seconds instead of hours. [engine], [cache] and [scheduler] mean what they mean to the engine; sizes left
    at 0 come from the cost model.
    """
    values, config = arguments.values, arguments.config
    if values["cost"] == "list":
        print("\n".join(f"{name}: {load_profile(name).name}" for name in profile_names()))
        return ExitCode.OK
    if values["plots"]:
        plots.require_matplotlib()
    failures = [_failure(text) for text in values["fail"]]
    report_file = output_file("--json", values["json"]) if values["json"] not in ("", "-") else None
    ranks = values["tensor_parallel"] or config.engine.tensor_parallel
    options = engine_options(config, load_profile(values["cost"]).divided(ranks))
    recorder = RunRecorder(Objective(values["slo_ttft_ms"] / 1e3, values["slo_itl_ms"] / 1e3))
    for failure in failures:
        if failure.engine >= values["engines"]:
            raise ConfigError("--fail", f"there is no engine {failure.engine}; --engines is {values['engines']}")
    fleet = Fleet(
        options,
        workload(values, options),
        num_engines=values["engines"],
        choice=values["choice"],
        failures=failures,
        recorder=recorder,
        seed=values["seed"],
    )
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with without_garbage_collection():
        report = fleet.run()
    dashed = {name.replace("_", "-"): value for name, value in values.items()}
    report["simulation"] = {
        "wall_s": round(time.perf_counter() - begin, 3),
        "cpu_s": round(time.process_time() - begin_cpu, 3),
        "arguments": {**dashed, "fail": [list(failure) for failure in failures]},
    }
    if values["json"] == "-":
        print(json.dumps(report, indent=1))
    else:
        print(table(report))
        took = report["simulation"]
        print(f"\nsimulated in {took['wall_s']:,.1f} s ({took['cpu_s']:,.1f} s of one core)")
    if report_file is not None:
        write_result(report_file, report, seed=values["seed"])
    if values["plots"]:
        write_plots(Path(values["plots"]), recorder)
    return ExitCode.OK


REFERENCE = reference_run.ReferenceWorkload()
REFERENCE_OPTIONS = {
    "the workload": tuple(
        Option(f"--{name.replace('_', '-')} N", text, getattr(REFERENCE, name), minimum=1)
        for name, text in {
            "requests": "at once",
            "seed": "of lengths and prompts",
            "min_prompt_tokens": "shortest prompt",
            "max_prompt_tokens": "longest prompt",
            "min_new_tokens": "shortest output",
            "max_new_tokens": "longest output",
            "max_batch_size": "sequences in a step",
            "prefill_budget": "prompt tokens in a step, decodes not counted",
            "cache_block_size": "tokens of a block",
            "cache_num_blocks": "blocks",
            "rounds": "so many times the requests in one engine: step time and memory must stay flat",
        }.items()
    ),
    "the report": (
        Option(
            "--clock KIND",
            "wall; or cpu, this process's own seconds, on a machine that others use",
            "wall",
            choices=tuple(reference_run.CLOCKS),
        ),
        Option("--json [FILE]", "all figures, with the environment; without FILE they are printed instead"),
    ),
}


@command(REFERENCE_OPTIONS, takes_configuration=False)
def s1(arguments: Arguments) -> int:
    """Run a reference simulator's 1,000 requests against the scheduler, without a device.

    The report has the reference's 26 metrics under its names, and its figures beside ours where they do not depend on
    the machine. The exit code is 1 where those differ.
    """
    values = dict(arguments.values)
    file, clock = values.pop("json"), values.pop("clock")
    written = output_file("--json", file) if file not in ("", "-") else None
    workload = reference_run.ReferenceWorkload(**values)
    with without_garbage_collection():
        found = reference_run.run(workload, clock)
    if written is not None:
        write_result(written, found, seed=workload.seed)
    print(json.dumps(found, indent=1) if file == "-" else reference_run.table(found))
    return ExitCode.OK if found.get("equal", True) else ExitCode.CRASH


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch the cyclic garbage collector off: a simulation makes no cycles, and it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def engine_options(config: Config, profile: DeviceProfile) -> EngineOptions:
    """Return the options of one simulated engine, from the configuration and the cost model."""
    block_size = config.cache.block_size or profile.block_size
    num_blocks = config.cache.num_blocks or profile.num_blocks * profile.block_size // block_size
    capacity = profile.capacity(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
    )
    in_flight = {"on": 2, "off": 1}.get(config.engine.overlap, profile.max_in_flight)
    return EngineOptions(
        capacity, profile.cost, scheduler_options(config, capacity), admission_limits(config, capacity), in_flight
    )


def workload(values: Mapping[str, Any], options: EngineOptions) -> Workload:
    """Return the requests that arrive: of a recorded trace, or drawn at random."""
    longest = min(options.limits.max_model_len, options.limits.num_kv_tokens)
    if values["trace"]:
        return TraceWorkload(Path(values["trace"]), speed=values["speed"], max_tokens=longest)
    synthetic = WorkloadOptions(
        num_requests=values["requests"],
        arrivals=values["arrivals"],
        rate=values["rate"],
        variation=values["variation"],
        burst_size=values["burst_size"],
        prompt_tokens=values["prompt_tokens"],
        output_tokens=values["output_tokens"],
        max_tokens=longest,
        num_prefixes=values["prefixes"],
        prefix_tokens=values["prefix_tokens"],
        turns=values["turns"],
        think_s=values["think_s"],
        num_tenants=values["tenants"],
        seed=values["seed"],
    )
    return SyntheticWorkload(replace(synthetic, deadline_s=values["deadline_s"] or None))


def write_plots(folder: Path, recorder: RunRecorder) -> None:
    """Write latency.svg, timeline.svg and cache.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        "first token": recorder.first_token_s,
        "per output token": recorder.token_s,
        "end to end": recorder.total_s,
    }
    curves = [plots.cumulative(name, [1e3 * value for value in column]) for name, column in names.items()]
    (folder / "latency.svg").write_text(
        plots.line_chart(
            curves, title="Latency", x_label="milliseconds", y_label="share of requests", logarithmic_x=True
        )
    )
    samples = recorder.timeline.samples
    times = [sample.time_s for sample in samples]
    lines = [
        plots.Series("running", times, [sample.num_running for sample in samples]),
        plots.Series("waiting", times, [sample.num_waiting for sample in samples]),
    ]
    (folder / "timeline.svg").write_text(
        plots.line_chart(lines, title="Requests over time", x_label="seconds", y_label="requests")
    )
    usage = [plots.Series("KV cache", times, [100 * sample.kv_usage for sample in samples])]
    (folder / "cache.svg").write_text(
        plots.line_chart(usage, title="KV cache in use", x_label="seconds", y_label="percent")
    )


def _failure(text: str) -> Failure:
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= 3:
            raise ValueError
        failure = Failure(float(parts[0]), int(parts[1]), float(parts[2]) if len(parts) == 3 else None)
    except ValueError:
        raise ConfigError("--fail", f"'{text}' is not TIME:ENGINE or TIME:ENGINE:BACK, in seconds") from None
    if failure.engine < 0 or not all(0 <= time_s < math.inf for time_s in failure[::2] if time_s is not None):
        raise ConfigError("--fail", "neither times nor the engine may be negative or infinite")
    return failure
