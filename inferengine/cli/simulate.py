"""usage: inferengine simulate [--config FILE] [--section.key VALUE ...] [options]

Run the engine's own scheduler in virtual time: a workload against one engine or a fleet, in seconds instead of hours.
[engine], [cache] and [scheduler] mean what they mean to the engine; sizes left at 0 come from the cost model.

the device
  --cost NAME|FILE.json    how long steps take; `--cost list` names those that come with the package
  --engines N              engines behind the client's chooser (default 1)
  --choice POLICY          round_robin, power_of_two (default) or prefix_affinity
  --fail T:ENGINE[:BACK]   engine ENGINE dies after T seconds and is back BACK seconds later; any number of times
the workload
  --requests N             how many (default 1000)
  --arrivals KIND          poisson (default), steady, gamma, burst, at_once
  --rate R                 requests (conversations) per second (default 10)
  --variation V            gamma: standard deviation over mean of the gaps (default 2)
  --burst-size N           burst: requests at a time (default 100)
  --prompt-tokens SPEC     128, uniform:64-256, exponential:200 or lognormal:200:0.8, median and sigma (default)
  --output-tokens SPEC     likewise (default lognormal:100:0.8)
  --prefixes N             system prompts shared by all, popularity after Zipf (default 0: none)
  --prefix-tokens N        their length (default 512)
  --turns N                turns of each conversation (default 1); --think-s S between them (default 5)
  --tenants N              tenants, for scheduler.policy fair (default 1)
  --deadline-s S           every request's deadline (default: none)
  --trace FILE.jsonl       recorded requests instead, own form or Mooncake's; --speed X plays it X times as fast
  --seed N                 of everything that is drawn (default 0)
the report
  --slo-ttft-ms MS         goodput: first token within (default 1000)
  --slo-itl-ms MS          goodput: mean time per further token within (default 100)
  --json FILE              the report as JSON;  --plots FOLDER  latency and timeline as SVG
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferengine.cli.common import output_file, resolve
from inferengine.client.load_balancing import POLICIES
from inferengine.config import Config
from inferengine.engine.options import admission_limits, scheduler_options
from inferengine.errors import ConfigError, ExitCode
from inferengine.simulation import plots
from inferengine.simulation.cost_model import DeviceProfile, load_profile, profile_names
from inferengine.simulation.fleet import Failure, Fleet
from inferengine.simulation.report import Objective, RunRecorder, table
from inferengine.simulation.virtual_engine import EngineOptions
from inferengine.simulation.workload import SyntheticWorkload, TraceWorkload, Workload, WorkloadOptions

DEFAULTS: dict[str, Any] = {
    "cost": "h200-llama-3.1-8b-analytic", "engines": 1, "choice": "power_of_two", "requests": 1000,
    "arrivals": "poisson",
    "rate": 10.0, "variation": 2.0, "burst-size": 100, "prompt-tokens": "lognormal:200:0.8",
    "output-tokens": "lognormal:100:0.8", "prefixes": 0, "prefix-tokens": 512, "turns": 1, "think-s": 5.0, "tenants": 1,
    "deadline-s": 0.0, "trace": "", "speed": 1.0, "seed": 0, "slo-ttft-ms": 1000.0, "slo-itl-ms": 100.0, "json": "",
    "plots": "",
}  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Simulate, print the table, write what was asked for."""
    values, failures, rest = parse(arguments)
    config = resolve(rest, options=[f"--{name}" for name in (*DEFAULTS, "fail")])
    if values["cost"] == "list":
        print("\n".join(f"{name}: {load_profile(name).name}" for name in profile_names()))
        return ExitCode.OK
    report_file = output_file("--json", values["json"]) if values["json"] else None
    options = engine_options(config, load_profile(values["cost"]))
    recorder = RunRecorder(Objective(values["slo-ttft-ms"] / 1e3, values["slo-itl-ms"] / 1e3))
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
    with _no_cycles():
        report = fleet.run()
    report["simulation"] = {
        "wall_s": round(time.perf_counter() - begin, 3),
        "cpu_s": round(time.process_time() - begin_cpu, 3),
        "arguments": {**values, "fail": [list(failure) for failure in failures]},
    }
    print(table(report))
    print(
        f"\nsimulated in {report['simulation']['wall_s']:,.1f} s ({report['simulation']['cpu_s']:,.1f} s of one core)"
    )
    if report_file is not None:
        report_file.write_text(json.dumps(report, indent=1) + "\n")
    if values["plots"]:
        write_plots(Path(values["plots"]), recorder)
    return ExitCode.OK


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Without the search for garbage in cycles: a simulation leaves none behind, and looking costs a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[Failure], list[str]]:
    """This command's own options, and the words that are left for the configuration. Raises ConfigError."""
    values, failures, rest = dict(DEFAULTS), list[Failure](), list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or (name not in DEFAULTS and name != "fail"):
            rest.append(word)
            continue
        if not equals:
            text = next(words, "")
        if not text:
            raise ConfigError(word, "a value must follow")
        if name == "fail":
            failures.append(_failure(text))
        else:
            values[name] = _typed(f"--{name}", type(DEFAULTS[name]), text)
    for name in ("engines", "requests", "burst-size", "turns", "tenants"):
        if values[name] < 1:
            raise ConfigError(f"--{name}", "must be at least 1")
    if values["choice"] not in POLICIES:
        raise ConfigError("--choice", f"must be one of {', '.join(POLICIES)}; got '{values['choice']}'")
    return values, failures, rest


def engine_options(config: Config, profile: DeviceProfile) -> EngineOptions:
    """One engine as the configuration and the cost model have it."""
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


def workload(values: dict[str, Any], options: EngineOptions) -> Workload:
    """What arrives."""
    longest = min(options.limits.max_model_len, options.limits.num_kv_tokens)
    if values["trace"]:
        return TraceWorkload(Path(values["trace"]), speed=values["speed"], max_tokens=longest)
    synthetic = WorkloadOptions(
        num_requests=values["requests"],
        arrivals=values["arrivals"],
        rate=values["rate"],
        variation=values["variation"],
        burst_size=values["burst-size"],
        prompt_tokens=values["prompt-tokens"],
        output_tokens=values["output-tokens"],
        max_tokens=longest,
        num_prefixes=values["prefixes"],
        prefix_tokens=values["prefix-tokens"],
        turns=values["turns"],
        think_s=values["think-s"],
        num_tenants=values["tenants"],
        seed=values["seed"],
    )
    return SyntheticWorkload(replace(synthetic, deadline_s=values["deadline-s"] or None))


def write_plots(folder: Path, recorder: RunRecorder) -> None:
    """latency.svg and timeline.svg."""
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
    if failure.engine < 0 or failure.time_s < 0:
        raise ConfigError("--fail", "neither time nor engine may be negative")
    return failure


def _typed(name: str, kind: type[Any], text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(name, f"must be {'a whole number' if kind is int else 'a number'}; got '{text}'") from None
    if kind is not str and value < 0:
        raise ConfigError(name, "must not be negative")
    return value
