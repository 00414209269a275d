"""`inferengine simulate fleet`: compares load-balancing policies over up to thousands of engines, on four traces."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from inferengine.bench.environment import write_result
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.cli.simulate import engine_options, without_garbage_collection
from inferengine.errors import ConfigError, ExitCode
from inferengine.simulation.cost_model import load_profile
from inferengine.simulation.fleet import Fleet
from inferengine.simulation.light_fleet import CHOICES, IDEAL, LightFleet, deaths, summary
from inferengine.simulation.report import Objective, RunRecorder, percentile
from inferengine.simulation.traces import TRACES, Trace, WrittenTrace
from inferengine.simulation.virtual_engine import EngineOptions

OPTIONS = {
    "the fleet": (
        Option("--engines N", "number of engines", 1000, minimum=1),
        Option(
            "--cost NAME|FILE.json", "how long steps take (simulate --cost list)", "h200-llama-3.1-70b-fp8-analytic"
        ),
        Option("--choices LIST", f"policies, comma-separated, of {', '.join(CHOICES)}", ",".join(CHOICES)),
        Option("--front-ends N", "front ends, each with a balancer of its own", 1, minimum=1),
        Option("--sessions", "requests name the session that they belong to", False),
        Option("--apart", "engines do not tell each front end what the other front ends sent", False),
        Option("--deaths SHARE", "share of the engines that die each minute, evenly spread; 0: none", 0.0),
        Option("--restart-s S", "seconds from an engine's death until it is back, with an empty cache", 60.0),
    ),
    "the traces": (
        Option("--traces LIST", f"comma-separated, of {', '.join(TRACES)}", ",".join(TRACES)),
        Option("--load X", "factor of the traces' request rates", 1.0),
        Option("--duration-s S", "virtual seconds in which sessions begin", 24.0),
        Option("--warm-up-s S", "requests that arrive before this virtual second do not count", 12.0),
        Option("--seed N", "seed of all random draws", 0),
    ),
    "the report": (
        Option("--check", "compare the simplified engines with the engine's own scheduler instead", False),
        Option("--json [FILE]", "write the report as JSON; without FILE print it instead of the table"),
    ),
}


@command(OPTIONS)
def fleet(arguments: Arguments) -> int:
    """Compare load-balancing policies in virtual time: four traces, up to thousands of engines.

    The simulation follows an engine's steps and prompt chunks, not single tokens; --check measures its error against
    the engine's own scheduler. Goodput counts the requests whose time to the first token and mean time per token meet
    the trace's objective, as a share of those of an ideal policy.
    """
    values = arguments.values
    traces = _chosen("--traces", values["traces"], tuple(TRACES))
    choices = _chosen("--choices", values["choices"], CHOICES)
    if not 0 <= values["warm_up_s"] < values["duration_s"]:
        raise ConfigError("--warm-up-s", "must be below --duration-s")
    report_file = output_file("--json", values["json"]) if values["json"] not in ("", "-") else None
    options = engine_options(arguments.config, load_profile(values["cost"]))
    begin = time.process_time()
    rows: list[dict[str, Any]] = []
    with without_garbage_collection():
        for name in traces:
            made = (check if values["check"] else compare)(name, choices, values, options)
            rows += made
            if values["json"] != "-":
                print(table(made), flush=True)
    arguments_used = {key: value for key, value in values.items() if key not in ("json", "check")}
    report = {"arguments": arguments_used, "cpu_s": round(time.process_time() - begin, 1), "rows": rows}
    if values["json"] == "-":
        print(json.dumps(report, indent=1))
    if report_file is not None:
        write_result(report_file, report, seed=values["seed"])
    return ExitCode.OK


def compare(
    name: str, choices: Sequence[str], values: Mapping[str, Any], options: EngineOptions
) -> list[dict[str, Any]]:
    """Return one row for each policy on a trace. Rows have `of_ideal` if the ideal policy is among them."""
    rows: list[dict[str, Any]] = []
    for choice in sorted(choices, key=lambda item: item != IDEAL):
        begin = time.process_time()
        run = LightFleet(
            options,
            _trace(name, values),
            num_engines=values["engines"],
            choice=choice,
            num_front_ends=values["front_ends"],
            names_sessions=values["sessions"],
            tells_placements=not values["apart"],
            failures=[] if choice == IDEAL else _deaths(values),
            seed=values["seed"],
        )
        run.run()
        row = {"trace": name, "choice": choice, **summary(run, begin_s=values["warm_up_s"])}
        row["cpu_s"] = round(time.process_time() - begin, 1)
        rows.append(row)
        if rows[0]["choice"] == IDEAL:
            row["of_ideal"] = round(row["good"] / max(1, rows[0]["good"]), 4)
    return rows


def check(name: str, choices: Sequence[str], values: Mapping[str, Any], options: EngineOptions) -> list[dict[str, Any]]:
    """Return a row for each policy of the service: figures of light engines, of the own scheduler, and the error."""
    rows = []
    for choice in choices:
        if choice not in ("round_robin", "power_of_two", "prefix_affinity"):
            continue
        light = LightFleet(
            options, _trace(name, values), num_engines=values["engines"], choice=choice, seed=values["seed"]
        )
        light.run()
        found = summary(light, begin_s=0.0)
        objective = TRACES[name].objective
        recorder = RunRecorder(Objective(*objective))
        real = Fleet(
            options,
            WrittenTrace(_trace(name, values)),
            num_engines=values["engines"],
            choice=choice,
            recorder=recorder,
            seed=values["seed"],
        )
        report = real.run()
        exact = {
            "requests": recorder.num_submitted,
            "good": recorder.num_good,
            "hit_rate": report["engine"]["prefix_hit_rate"],
            "first_token_ms": _percentiles(recorder.first_token_s, 1),
            "token_ms": _percentiles(recorder.token_s, 2),
            "total_ms": _percentiles(recorder.total_s, 1),
        }
        row: dict[str, Any] = {
            "trace": name,
            "choice": choice,
            "light": {key: found[key] for key in exact},
            "own": exact,
        }
        row["error"] = _errors(row["light"], exact)
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as lines of text."""
    if not rows:
        return ""
    if "error" in rows[0]:
        return "\n".join(f"{row['trace']:<8}{row['choice']:<17}{json.dumps(row['error'])}" for row in rows)
    names = ("requests", "good", "of ideal", "hits", "first p99", "token p99")
    lines = [f"{'trace':<8}{'policy':<17}" + "".join(f"{name:>11}" for name in names)]
    for row in rows:
        lines.append(
            f"{row['trace']:<8}{row['choice']:<17}{row['requests']:>11,}{row['good_share']:>11.2%}"
            f"{row.get('of_ideal', float('nan')):>11.2%}{row['hit_rate']:>11.1%}{row['first_token_ms']['p99']:>11,.0f}"
            f"{row['token_ms']['p99']:>11,.1f}"
        )
    return "\n".join(lines)


def _trace(name: str, values: Mapping[str, Any]) -> Trace:
    return Trace(
        TRACES[name],
        num_engines=values["engines"],
        duration_s=values["duration_s"],
        load=values["load"],
        seed=values["seed"],
    )


def _deaths(values: Mapping[str, Any]) -> list[Any]:
    if not values["deaths"]:
        return []
    return deaths(
        values["engines"],
        values["duration_s"],
        share_per_minute=values["deaths"],
        restart_s=values["restart_s"],
        seed=values["seed"],
    )


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(option, f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _percentiles(values: Sequence[float], digits: int) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{100 * q:g}": round(1e3 * percentile(ordered, q), digits) for q in (0.5, 0.9, 0.99)}


def _errors(light: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of each figure; for the hit rate the difference."""
    errors = {"good": light["good"] / max(1, exact["good"]) - 1, "hit_rate": light["hit_rate"] - exact["hit_rate"]}
    for key in ("first_token_ms", "token_ms", "total_ms"):
        errors |= {f"{key}_{name}": light[key][name] / exact[key][name] - 1 for name in ("p50", "p99")}
    return {key: round(value, 4) for key, value in errors.items()}
