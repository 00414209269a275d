"""usage: inferengine bench [--url URL] [options]

Load on any OpenAI-compatible server, and what a client sees of it: time to first token, time between events and per
output token, whole requests, throughput, goodput. Needs no engine on this machine.

the server
  --url URL            default http://127.0.0.1:8000; it may end in /v1
  --api-key KEY        sent as a bearer token
  --model NAME         default: the first of /v1/models
  --chat               /v1/chat/completions instead of /v1/completions
the load
  --concurrency N      closed loop: requests in flight (default 16)
  --rate R             open loop instead: requests per second, Poisson arrivals
  --burstiness B       shape of the open loop's gaps: 1 Poisson (default), below 1 clumped
  --requests N         how many (default 128)
  --input SPEC         prompt length in words, or tokens with --prompt ids: 128 (default), 64:512 (uniform) or
                       lognormal:200:0.6, median and sigma
  --output SPEC        max_tokens likewise, with ignore_eos (default 64)
  --prompt text|ids    words (default) or random token ids of --first-id N (100) to --last-id N (1000)
  --shared-prefix N    words or tokens that all prompts begin with (default 0)
  --temperature T      default 0
  --warm-up N          requests before the clock starts (default 2)
  --seed N             of everything that is drawn (default 0)
the report
  --goodput NAME:MS    count what met these limits: ttft:500 tpot:50 e2e:5000, one or more
  --json FILE          all figures, with NVML's trace of this machine's devices; - prints them instead of the table

Exit code 1 when no request completed.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, TextIO

from inferengine.bench import load_generator
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.load_options import LoadOptions, request_bodies
from inferengine.bench.report import report, table
from inferengine.cli.common import output_file, with_bar
from inferengine.errors import ConfigError, ExitCode

KINDS = {item.name.replace("_", "-"): type(item.default) for item in fields(LoadOptions) if item.name != "goodput"}
NAMES = (*KINDS, "goodput", "json")


def run(arguments: Sequence[str]) -> int:
    """Send the load, print the table, write what was asked for."""
    options, file = parse(arguments)
    written = output_file("--json", file) if file not in ("", "-") else None
    found = measure(options, sys.stderr)
    text = json.dumps(found, indent=2)
    if written is not None:
        written.write_text(text + "\n")
    print(text if file == "-" else table(found))
    return ExitCode.OK if found["completed"] else ExitCode.CRASH


def measure(options: LoadOptions, stream: TextIO) -> dict[str, Any]:
    """The report of one load; progress goes to `stream` where that is a terminal. Raises InferEngineError."""
    model = load_generator.served_model(options)
    bodies = request_bodies(options, model)
    progress = Progress(stream, options.requests)
    with GpuTrace() as gpus:
        outcome = asyncio.run(load_generator.run(options, bodies, gpus, ended=progress.step))
    progress.clear()
    told = {name: value for name, value in asdict(options).items() if name not in ("api_key", "model")}
    return {
        "benchmark": "serving",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "model": model,
        "load": told,
        **report(outcome.replies, outcome.seconds, options.goodput),
        "gpu": outcome.gpu,
    }


def parse(arguments: Sequence[str]) -> tuple[LoadOptions, str]:
    """The load, and where the JSON goes: a file, `-` or nowhere (""). Raises ConfigError."""
    values: dict[str, Any] = {}
    goodput: dict[str, float] = {}
    file, rest = "", list[str]()
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in NAMES:
            rest.append(word)
            continue
        if name == "chat" and not equals:
            values["chat"] = True
            continue
        if not equals:
            text = words.pop(0) if words else ""
        if not text:
            raise ConfigError(f"--{name}", "a value must follow")
        if name == "json":
            file = text
        elif name == "goodput":
            goodput |= [_limit(text)]
            while words and not words[0].startswith("-"):
                goodput |= [_limit(words.pop(0))]
        else:
            values[name.replace("-", "_")] = _typed(f"--{name}", KINDS[name], text)
    if rest:
        close = difflib.get_close_matches(rest[0], [f"--{name}" for name in NAMES], n=1)
        raise ConfigError(rest[0], f"no such option; {f'did you mean {close[0]}?' if close else 'see --help'}")
    return LoadOptions(**values, goodput=goodput), file


class Progress:
    """A bar of the requests that have ended. Says nothing where nobody watches."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._ended = 0
        self._moving = stream.isatty()
        self._share = -1

    def step(self) -> None:
        """One more has ended."""
        self._ended += 1
        share = 100 * self._ended // self._total
        if self._moving and share != self._share:  # a hundred lines at most: the client shall not measure itself
            self._share = share
            self._stream.write(f"\r\x1b[2K{with_bar(f'{self._ended} of {self._total} requests {share} %')}")
            self._stream.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._moving:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    return name, _typed("--goodput", float, value)


def _typed(name: str, kind: type[Any], text: str) -> Any:
    if kind is bool:
        raise ConfigError(name, "takes no value")
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(name, f"must be {'a whole number' if kind is int else 'a number'}; got '{text}'") from None
    if kind is not str and not 0 <= value < math.inf:
        raise ConfigError(name, "must be neither negative nor infinite")
    return value
