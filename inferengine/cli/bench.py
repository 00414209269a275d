"""`inferengine bench`: send a load to any OpenAI-compatible server and report latencies and throughput."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any, TextIO

from inferengine.bench import load_generator
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.load_options import LoadOptions, request_bodies
from inferengine.bench.report import report, table
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.cli.terminal import with_bar
from inferengine.errors import ExitCode

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


def load_options(arguments: Arguments) -> tuple[LoadOptions, str]:
    """The load, and where the JSON goes: a file, `-` or nowhere (""). Raises ConfigError."""
    values = dict(arguments.values)
    file = values.pop("json")
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
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "model": model,
        "load": load,
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
