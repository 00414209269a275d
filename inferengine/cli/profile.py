"""`inferengine profile`: a Chrome trace of some steps of a running engine, and the table of where the time goes.

The table has the kernels where the trace has any, else the host's operations, each without what it calls. The format is
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("X" events with ts and dur in us).
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.bench.environment import write_result
from inferengine.cli.command import Arguments, Option, command, connect, output_file
from inferengine.client import Client
from inferengine.config import engine_address
from inferengine.errors import ConfigError, ExitCode
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
        Option("--json", "print the whole table as JSON instead"),
        Option("--read FILE", "print the table of a trace that exists; nothing is recorded"),
    )
}
USAGE = (
    "[--steps N] [--wait S] [--out FILE] [--top N] [--summary FILE] [--config FILE] [--section.key VALUE ...]",
    "--read FILE [--top N] [--summary FILE]",
)

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORY = "cpu_op"
STEP_CATEGORY, STEP = "user_annotation", "step "  # executor/tools/trace.py
NAME_CHARACTERS = 80
Event = Mapping[str, Any]


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
    trace = read_trace(Path(values["read"])) if values["read"] else _record(arguments)
    summary = summarize(trace)
    print(json.dumps(summary.to_map(), indent=1) if values["json"] else "\n".join(table(summary, values["top"])))
    if report is not None:
        write_result(report, summary.to_map())
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


class TraceRow(NamedTuple):
    """One kernel or operation. `share` is of the time in all of them."""

    name: str
    total_us: float
    calls: int
    share: float


class TraceSummary(NamedTuple):
    """`on_device`: the rows are kernels, and `idle_share` is that of the time from the first to the last of them in
    which none ran; None for operations of the host. `steps_us` are the recorded steps, as the host saw them."""

    on_device: bool
    rows: list[TraceRow]
    steps_us: list[float]
    idle_share: float | None

    def to_map(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        return {**self._asdict(), "rows": [row._asdict() for row in self.rows]}


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace file, compressed or not. Raises ConfigError."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = document.get("traceEvents") if isinstance(document, dict) else None
        if isinstance(events, list) and all(isinstance(event, dict) for event in events):
            return dict(document)
    except OSError as error:
        raise ConfigError(path.name, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError):
        pass
    raise ConfigError(path.name, "is no Chrome trace: name a file that 'inferengine profile' wrote")


def summarize(trace: Mapping[str, Any]) -> TraceSummary:
    """Return the table of a trace, what takes longest first."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    steps = [
        float(event["dur"])
        for event in events
        if event.get("cat") == STEP_CATEGORY and str(event.get("name")).startswith(STEP)
    ]
    kernels = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if not kernels:
        return TraceSummary(
            False, _rows(own_times(event for event in events if event.get("cat") == HOST_CATEGORY)), steps, None
        )
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels)
    length = max(end for _, end in spans) - spans[0][0]
    idle = 1 - covered(spans) / length if length else 0.0
    return TraceSummary(True, _rows((str(event["name"]), float(event["dur"])) for event in kernels), steps, idle)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, which are in order of their beginnings: kernels of dependent
    launches overlap."""
    length, reach = 0.0, float("-inf")
    for begin, end in spans:
        length += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return length


def own_times(events: Iterable[Event]) -> list[tuple[str, float]]:
    """Return the name of each event and its duration without the events inside it, thread by thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append(event)
    result: list[tuple[str, float]] = []
    for thread in threads.values():
        thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        around: list[tuple[float, int]] = []  # end and place in `result` of the events that are open
        for event in thread:
            begin, duration = float(event["ts"]), float(event["dur"])
            while around and around[-1][0] <= begin:
                around.pop()
            if around:
                name, own = result[around[-1][1]]
                result[around[-1][1]] = name, max(0.0, own - duration)
            around.append((begin + duration, len(result)))
            result.append((str(event["name"]), duration))
    return result


def table(summary: TraceSummary, top: int) -> list[str]:
    """Return the table as lines of text: the steps, the totals, then the `top` rows and the rest in one."""
    steps = summary.steps_us
    count = max(1, len(steps))
    heads = []
    if steps:
        median, longest = statistics.median(steps) / 1e3, max(steps) / 1e3
        heads.append(f"{len(steps)} steps: median {median:.2f} ms, longest {longest:.2f} ms, as the host saw them")
    total_ms = sum(row.total_us for row in summary.rows) / 1e3
    what = "kernels on the device" if summary.on_device else "operations on the host, each without what it calls"
    heads.append(f"{total_ms:.2f} ms in {what}; {total_ms / count:.3f} ms a step")
    if summary.idle_share is not None:
        heads.append(f"the device is idle {summary.idle_share:.1%} of the time between its first and last kernel")
    heads.append(f"{'total ms':>10}{'share':>8}{'calls':>8}{'a step':>9}{'mean us':>10}  name")
    shown = [
        f"{row.total_us / 1e3:>10.2f}{row.share:>8.1%}{row.calls:>8}{row.calls / count:>9.1f}"
        f"{row.total_us / row.calls:>10.2f}  {row.name[:NAME_CHARACTERS]}"
        for row in summary.rows[:top]
    ]
    rest = summary.rows[top:]
    if rest:
        rest_us, calls = sum(row.total_us for row in rest), sum(row.calls for row in rest)
        share = sum(row.share for row in rest)
        shown.append(
            f"{rest_us / 1e3:>10.2f}{share:>8.1%}{calls:>8}{calls / count:>9.1f}{rest_us / calls:>10.2f}"
            f"  ({len(rest)} more)"
        )
    return heads + shown


def _rows(named: Iterable[tuple[str, float]]) -> list[TraceRow]:
    times: dict[str, list[float]] = defaultdict(list)
    for name, duration in named:
        times[name].append(duration)
    total = sum(map(sum, times.values())) or 1.0
    rows = [TraceRow(name, sum(each), len(each), sum(each) / total) for name, each in times.items()]
    return sorted(rows, key=lambda row: -row.total_us)
