"""`inferengine profile`: a Chrome trace of some steps of a running engine, and the table of where the time goes."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from inferengine.cli import trace_summary
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.cli.connect import connect
from inferengine.client import Client
from inferengine.config import engine_address
from inferengine.errors import ExitCode
from inferengine.wire.curve import client_keys

OPTIONS = {
    "options": (
        Option("--steps N", "steps to record, at most 100", 20, minimum=1),
        Option(
            "--wait S", "seconds after which the recording ends with the steps there were, at most 20", 10, minimum=1
        ),
        Option("--out FILE", "where the trace goes; not compressed where the name ends in .json", "trace.json.gz"),
        Option("--top N", "rows of the table", 20, minimum=1),
        Option("--summary FILE", "the whole table as JSON"),
        Option("--read FILE", "print the table of a trace that exists; nothing is recorded"),
    )
}
USAGE = (
    "[--steps N] [--wait S] [--out FILE] [--top N] [--summary FILE] [--config FILE] [--section.key VALUE ...]",
    "--read FILE [--top N] [--summary FILE]",
)


@command(OPTIONS, usage=USAGE)
def run(arguments: Arguments) -> int:
    """Record steps of a running engine, write a Chrome trace and print where the time goes.

    The table lists the kernels, or on a CPU the operations, that took the time. Open the trace in
    https://ui.perfetto.dev or chrome://tracing. Send requests meanwhile: an idle engine has no steps.

    Recorded steps are a little slower, and at the end all streams pause for some 5 ms for each step recorded. The
    request goes over the engine's socket, so whoever may use that may profile; over HTTP an admin's key
    may: POST /profile.
    """
    values = arguments.values
    report = output_file("--summary", values["summary"]) if values["summary"] else None
    trace = trace_summary.read_trace(Path(values["read"])) if values["read"] else _record(arguments)
    summary = trace_summary.summarize(trace)
    print("\n".join(trace_summary.lines(summary, values["top"])))
    if report is not None:
        report.write_text(json.dumps(summary.to_map(), indent=1) + "\n")
    return ExitCode.OK


def _record(arguments: Arguments) -> dict[str, Any]:
    """Record with the engine, write its trace and return it. Raises InferEngineError as the engine does."""
    config, steps, wait_s = arguments.config, arguments.values["steps"], arguments.values["wait"]
    out = output_file("--out", arguments.values["out"])
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
