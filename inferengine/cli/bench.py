"""`inferengine bench`: send a load to any OpenAI-compatible server and report latencies and throughput.

`bench sweep`, `bench arrivals`, `bench pressure` and `bench paired` measure series of loads (bench/suites.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any, TextIO

from inferengine.bench import load_generator, suites
from inferengine.bench.environment import environment, write_result
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.load_options import LoadOptions, request_bodies
from inferengine.bench.report import report, standard_fields, table
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.cli.terminal import with_bar
from inferengine.errors import ConfigError, ExitCode

OPTIONS = {
    "the server": (
        Option("--url URL", "it may end in /v1", LoadOptions.url),
        Option("--api-key KEY", "sent as a bearer token"),
        Option("--model NAME", "default: the first of /v1/models"),
        Option("--chat", "/v1/chat/completions instead of /v1/completions"),
    ),
    "the load": (
        Option("--concurrency N", "closed loop: requests in flight", LoadOptions.concurrency),
        Option("--rate R", "open loop instead: requests per second, Poisson arrivals", LoadOptions.rate),
        Option("--burstiness B", "gaps of the open loop: 1 Poisson, below 1 clumped", LoadOptions.burstiness),
        Option("--requests N", "how many", LoadOptions.requests),
        Option(
            "--input SPEC",
            "prompt length in words, or tokens with --prompt ids: 128, 64:512 (uniform) or lognormal:200:0.6, median "
            "and sigma",
            LoadOptions.input,
        ),
        Option("--output SPEC", "max_tokens likewise, with ignore_eos", LoadOptions.output),
        Option("--prompt text|ids", "words, or random token ids of --first-id to --last-id", LoadOptions.prompt),
        Option("--first-id N", "least token id of --prompt ids", LoadOptions.first_id),
        Option("--last-id N", "largest token id of --prompt ids", LoadOptions.last_id),
        Option("--shared-prefix N", "words or tokens that all prompts begin with", LoadOptions.shared_prefix),
        Option("--temperature T", "sampling temperature; 0 is greedy", LoadOptions.temperature),
        Option("--warm-up N", "requests before the clock starts", LoadOptions.warm_up),
        Option("--seed N", "seed of lengths, words and arrivals", LoadOptions.seed),
    ),
    "the report": (
        Option(
            "--goodput NAME:MS",
            "count requests that met these limits: ttft:500 tpot:50 e2e:5000, one or more",
            (),
            repeated=True,
        ),
        Option(
            "--json [FILE]",
            "all figures, with NVML's trace of this machine's devices; without FILE they are printed instead",
        ),
    ),
}


@command(OPTIONS, takes_configuration=False)
def run(arguments: Arguments) -> int:
    """Send a load to any OpenAI-compatible server and report what a client sees.

    The report has time to first token, time between events and per output token, time of whole requests, throughput and
    goodput. It needs no engine on this machine. The exit code is 1 when no request completed.
    """
    options, file = load_options(arguments)
    written = output_file("--json", file) if file not in ("", "-") else None
    found = measure(options, sys.stderr)
    text = json.dumps(found, indent=2)
    if written is not None:
        written.write_text(text + "\n")
    print(text if file == "-" else table(found))
    return ExitCode.OK if found["completed"] else ExitCode.CRASH


SERIES_REPORT = (
    Option("--json FILE", "all figures of every load, with the environment"),
    Option("--markdown FILE", "the table that is printed"),
    Option("--html FILE", "a page with the table and throughput as bars"),
)
SWEEP = OPTIONS | {
    "the sweep": (Option("--concurrencies LIST", "requests in flight, one load each", "1,2,4,8,16,32,64,128"),),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
ARRIVALS = OPTIONS | {
    "the arrivals": (
        Option("--shares LIST", "rates of steady and Poisson arrivals, of the saturated one", "0.25,0.5,0.75,1"),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
PRESSURE = OPTIONS | {"the report": (OPTIONS["the report"][0], *SERIES_REPORT)}
PAIRED = OPTIONS | {
    "the pair": (
        Option("--ours URL", "the server whose throughput is held against the other's", LoadOptions.url),
        Option("--theirs URL", "the other server", "http://127.0.0.1:8001"),
        Option("--theirs-model NAME", "default: the first of its /v1/models"),
        Option("--runs N", "pairs of loads; each server is first in every other one", 5, minimum=1),
        Option("--gate RATIO", "least ratio of output tokens per second that passes", suites.GATE),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}


@command(SWEEP, takes_configuration=False)
def sweep(arguments: Arguments) -> int:
    """Measure a server at 1 to 128 requests in flight, and find where its throughput stops to grow.

    The exit code is 1 when a request failed.
    """
    concurrencies = numbers(arguments, "concurrencies", int)
    return _series(arguments, lambda load: suites.sweep(_quietly, load, concurrencies))


@command(ARRIVALS, takes_configuration=False)
def arrivals(arguments: Arguments) -> int:
    """Measure a server under a burst, steady and Poisson arrivals, at rates up to its saturation.

    The exit code is 1 when a request failed.
    """
    shares = numbers(arguments, "shares", float)
    return _series(arguments, lambda load: suites.arrivals(_quietly, load, shares))


@command(PRESSURE, takes_configuration=False)
def pressure(arguments: Arguments) -> int:
    """Send --requests at once, far more than the server's KV cache holds: nothing may be lost.

    Preemptions are read from the server's /metrics, where it has vLLM's names. The exit code is 1 when a request
    failed.
    """
    return _series(arguments, lambda load: suites.pressure(_quietly, load))


@command(PAIRED, takes_configuration=False)
def paired(arguments: Arguments) -> int:
    """Measure two servers in turn with the same load, and compare their output tokens per second.

    The exit code is 0 when the median ratio of the pairs reaches the gate and no request failed, else 1.
    """
    values = arguments.values
    other = {"url": values["theirs"], "model": values["theirs_model"]}

    def measured(load: LoadOptions) -> dict[str, Any]:
        ours, theirs = replace(load, url=values["ours"]), replace(load, **other)
        return suites.paired(_quietly, ours, theirs, values["runs"], gate=values["gate"], seed=load.seed)

    return _series(arguments, measured)


def numbers(arguments: Arguments, name: str, kind: type[int] | type[float]) -> list[Any]:
    """The numbers above zero of a list with commas. Raises ConfigError that names the flag."""
    option = Option(f"--{name} LIST", "", kind(0), minimum=None)
    found = [option.convert(part) for part in arguments.values[name].split(",")]
    if min(found) <= 0:
        raise ConfigError(
            option.flag, f"must be numbers above 0 with commas between them; got '{arguments.values[name]}'"
        )
    return found


def _quietly(options: LoadOptions) -> dict[str, Any]:
    return measure(options, sys.stderr)


def _series(arguments: Arguments, measured: Callable[[LoadOptions], dict[str, Any]]) -> int:
    """Measure a series of loads, write its reports and print its table."""
    files = {name: arguments.values[name] for name in ("json", "markdown", "html")}
    written = {name: output_file(f"--{name}", file) for name, file in files.items() if file}
    load, _ = load_options(arguments)
    found = measured(load)
    about = environment(seed=load.seed)
    for name, path in written.items():
        match name:
            case "json":
                write_result(path, {"environment": about, **found})
            case "markdown":
                path.write_text(suites.markdown(found))
            case _:
                path.write_text(suites.html(found, about))
    print(suites.markdown(found))
    return ExitCode.OK if found.get("passed", not found["failed"]) else ExitCode.CRASH


def load_options(arguments: Arguments) -> tuple[LoadOptions, str]:
    """The load, and where the JSON goes: a file, `-` or nowhere (""). Raises ConfigError."""
    names = {field.name for field in fields(LoadOptions)}
    values = {name: value for name, value in arguments.values.items() if name in names}
    file = arguments.values["json"]
    limits = Option("--goodput NAME:MS", "", 0.0)
    values["goodput"] = {
        name: limits.convert(limit) for name, _, limit in (text.partition(":") for text in values["goodput"])
    }
    return LoadOptions(**values), file


def measure(options: LoadOptions, stream: TextIO) -> dict[str, Any]:
    """The report of one load; progress goes to `stream` where that is a terminal. Raises InferEngineError."""
    model = load_generator.served_model(options)
    bodies = request_bodies(options, model)
    progress = Progress(stream, options.requests)
    with GpuTrace() as gpus:
        outcome = asyncio.run(load_generator.run(options, bodies, gpus, ended=progress.step))
    progress.clear()
    load = {name: value for name, value in asdict(options).items() if name not in ("api_key", "model")}
    return {
        "benchmark": "serving",
        "environment": environment(seed=options.seed, devices=[one["name"] for one in outcome.gpu.get("devices", [])]),
        "model": model,
        "load": load,
        **standard_fields(outcome.replies, outcome.seconds, load, model),
        **report(outcome.replies, outcome.seconds, options.goodput),
        "gpu": outcome.gpu,
    }


class Progress:
    """A bar of the requests that have ended. Writes only to a terminal."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._ended = 0
        self._moving = stream.isatty()
        self._share = -1

    def step(self) -> None:
        """Count one more request that has ended."""
        self._ended += 1
        share = 100 * self._ended // self._total
        if self._moving and share != self._share:  # at most a hundred writes: drawing must not disturb the measurement
            self._share = share
            self._stream.write(f"\r\x1b[2K{with_bar(f'{self._ended} of {self._total} requests {share} %')}")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the bar."""
        if self._moving:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
