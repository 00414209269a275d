"""usage: inferengine profile [--steps N] [--out FILE] [--top N] [--summary FILE] [--wait S]
                           [--config FILE] [--section.key VALUE ...]
       inferengine profile --read FILE [--top N] [--summary FILE]

Record N steps of a running engine (20, at most 100), write a Chrome trace and print which kernels, or on a CPU which
operations, took the time. Open the trace in https://ui.perfetto.dev or chrome://tracing. Send requests meanwhile: an
idle engine has no steps, and after S seconds (10, at most 20) the recording ends with what there was.

  --out FILE       where the trace goes; default trace.json.gz. Not compressed where the name ends in .json
  --top N          rows of the table; default 20
  --summary FILE   the whole table as JSON
  --read FILE      the table of a trace that is there already

Recorded steps are a little slower, and at the end all streams pause for some 5 ms for each step recorded. It goes over
the engine's socket, so whoever may use that may profile; over HTTP an admin's key does: POST /profile.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferengine.cli import trace_summary
from inferengine.cli.common import output_file, resolve
from inferengine.cli.connect import connect
from inferengine.client import Client
from inferengine.config import Config, engine_address
from inferengine.errors import ConfigError, ExitCode
from inferengine.wire.curve import client_keys

OPTIONS = {"--steps": "20", "--out": "trace.json.gz", "--top": "20", "--summary": "", "--wait": "10", "--read": ""}


def run(arguments: Sequence[str]) -> int:
    """Record or read, then print."""
    try:
        options, rest = _take_options(arguments)
        report = output_file("--summary", options["--summary"]) if options["--summary"] else None
        top = _number(options, "--top")
        if options["--read"]:
            resolve(rest, options=list(OPTIONS))
            trace = trace_summary.read_trace(Path(options["--read"]))
        else:
            config = resolve(rest, options=list(OPTIONS))
            trace = _record(config, options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    summary = trace_summary.summarize(trace)
    print("\n".join(trace_summary.lines(summary, top)))
    if report is not None:
        report.write_text(json.dumps(summary.to_map(), indent=1) + "\n")
    return ExitCode.OK


def _record(config: Config, options: dict[str, str]) -> dict[str, Any]:
    """Have the engine record, and write its trace. Raises InferEngineError as the engine does."""
    steps, wait_s = _number(options, "--steps"), _number(options, "--wait")
    out = output_file("--out", options["--out"])
    client = Client(engine_address(config), status_address="", role="profile", curve=client_keys(config))
    try:
        connect(client)
        print(f"recording {steps} steps", file=sys.stderr, flush=True)
        result = client.admin("profile", steps=steps, wait_s=wait_s)
    finally:
        client.close()
    data: bytes = result["trace"]
    plain = gzip.decompress(data)
    out.write_bytes(plain if out.suffix == ".json" else data)
    print(f"wrote {out}: {result['steps']} steps in {result['seconds']:.2f} s", file=sys.stderr)
    trace: dict[str, Any] = json.loads(plain)
    return trace


def _take_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """This command's own options with their defaults, and all other words."""
    options, rest = dict(OPTIONS), []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in OPTIONS:
            options[name] = value if equals else next(words, "")
            if not options[name]:
                raise ConfigError(name, "a value must follow")
        else:
            rest.append(word)
    return options, rest


def _number(options: dict[str, str], name: str) -> int:
    text = options[name]
    if not text.isdecimal() or not int(text):
        raise ConfigError(name, "must be a whole number above 0")
    return int(text)
