"""Series of loads against one server, or two: a sweep of concurrencies, patterns of arrival, a full KV cache, a pair.

Each series is a list of loads (LoadOptions) that are measured one after the other; its report has one row for each, and
what follows from all of them: where throughput stops to grow, whether anything was lost, the ratio of two servers.
"""

from __future__ import annotations

import math
import random
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from typing import Any

from inferengine.bench.load_options import LoadOptions
from inferengine.errors import InferEngineError

Measure = Callable[[LoadOptions], dict[str, Any]]

SATURATED = 1.05  # throughput has stopped to grow where a doubled load gives less than this times more
BURST_RATE, STEADY = 1e9, 1e9  # requests per second that are at once; a burstiness without chance
GATE = 0.91  # of the other server's throughput
RESAMPLES = 4000  # of the bootstrap
COUNTERS = ("vllm:num_preemptions_total", "vllm:request_success_total", "vllm:admission_rejections_total")
METRICS_TIMEOUT_S = 10.0


def sweep(measure: Measure, options: LoadOptions, concurrencies: Sequence[int]) -> dict[str, Any]:
    """Measure closed loops of these numbers of requests in flight, with at least four requests for each.

    `saturation` is the first concurrency after which throughput grows by less than 5 %; None where it never does.
    """
    rows = []
    for concurrency in concurrencies:
        load = replace(options, concurrency=concurrency, rate=0.0, requests=max(options.requests, 4 * concurrency))
        rows.append({"concurrency": concurrency, **measure(load)})
    return {"benchmark": "sweep", "rows": rows, "saturation": saturation(rows), "failed": _failed(rows)}


def saturation(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the concurrency of the first row whose successor gives less than SATURATED times its throughput."""
    for before, after in pairwise(rows):
        if after["output_tokens_per_s"] < SATURATED * before["output_tokens_per_s"]:
            return int(before["concurrency"])
    return None


def arrivals(measure: Measure, options: LoadOptions, shares: Sequence[float]) -> dict[str, Any]:
    """Measure all requests at once (burst), then equal gaps (steady) and Poisson arrivals at these shares of the rate
    at which a closed loop of `options.concurrency` ends requests."""
    closed = measure(replace(options, rate=0.0))
    most = closed["requests_per_s"]
    if not most:
        raise InferEngineError("engine_unavailable", "no request completed: there is no rate to take shares of")
    rows = [
        {"pattern": "closed", "rate": None, **closed},
        {"pattern": "burst", "rate": None, **measure(replace(options, rate=BURST_RATE, burstiness=STEADY))},
    ]
    for pattern, burstiness in (("steady", STEADY), ("poisson", 1.0)):
        for share in shares:
            rate = round(share * most, 3)
            load = replace(options, rate=rate, burstiness=burstiness)
            rows.append({"pattern": pattern, "rate": rate, "share": share, **measure(load)})
    return {"benchmark": "arrivals", "saturated_requests_per_s": most, "rows": rows, "failed": _failed(rows)}


def pressure(measure: Measure, options: LoadOptions) -> dict[str, Any]:
    """Send far more at once than the server's KV cache holds, and read from /metrics what it did about it.

    `preemptions` and the other counters are None where the server has no such metric."""
    before = read_counters(options)
    row = measure(replace(options, rate=BURST_RATE, burstiness=STEADY))
    after = read_counters(options)
    counted = {name: None if end is None else end - (before[name] or 0.0) for name, end in after.items()}
    return {
        "benchmark": "pressure",
        "rows": [row],
        "failed": row["failed"],
        "preemptions": counted["vllm:num_preemptions_total"],
        "choices_ended": counted["vllm:request_success_total"],
        "rejections": counted["vllm:admission_rejections_total"],
    }


def read_counters(options: LoadOptions) -> dict[str, float | None]:
    """Return the sums of COUNTERS over their labels, from the server's /metrics."""
    request = urllib.request.Request(options.url.removesuffix("/").removesuffix("/v1") + "/metrics")
    if options.api_key:
        request.add_header("Authorization", f"Bearer {options.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=METRICS_TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, urllib.error.URLError):
        text = ""
    return {name: _sum_of(text, name) for name in COUNTERS}


def _sum_of(text: str, name: str) -> float | None:
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and not line.startswith("#")
    ]
    return sum(values) if values else None


def paired(
    measure: Measure, ours: LoadOptions, theirs: LoadOptions, runs: int, *, gate: float = GATE, seed: int = 0
) -> dict[str, Any]:
    """Measure two servers in turn, each first as often as second, and compare their output tokens per second.

    `ratio` is the median of ours over theirs by pair; `interval` holds 95 % of the medians of RESAMPLES resampled sets
    of pairs (percentile bootstrap: Efron, 1979). `passed`: the ratio reaches `gate` and no request failed.
    """
    pairs: list[dict[str, Any]] = []
    for number in range(runs):
        order = [("ours", ours), ("theirs", theirs)]
        pairs.append({name: measure(load) for name, load in (order if number % 2 == 0 else order[::-1])})
    ratios = [_ratio(pair["ours"]["output_tokens_per_s"], pair["theirs"]["output_tokens_per_s"]) for pair in pairs]
    ratio = statistics.median(ratios)
    failed = {name: sum(pair[name]["failed"] for pair in pairs) for name in ("ours", "theirs")}
    return {
        "benchmark": "paired",
        "pairs": pairs,
        "ratios": ratios,
        "ratio": ratio,
        "interval": bootstrap(ratios, seed),
        "gate": gate,
        "failed": failed,
        "passed": ratio >= gate and not any(failed.values()),
    }


def bootstrap(values: Sequence[float], seed: int) -> list[float]:
    """Return the bounds that hold 95 % of the medians of resampled `values`."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [medians[round(0.025 * (RESAMPLES - 1))], medians[round(0.975 * (RESAMPLES - 1))]]


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.inf if ours else 0.0


def _failed(rows: Iterable[dict[str, Any]]) -> int:
    return sum(row["failed"] for row in rows)


# -- as text ----------------------------------------------------------------------------------------------------------

COLUMNS = ("requests/s", "tokens/s", "first token p50", "p99", "between p50", "p99", "failed")


def markdown(found: dict[str, Any]) -> str:
    """Return a report of a series as Markdown: its table, and a sentence of what follows."""
    if found["benchmark"] == "paired":
        return _paired_markdown(found)
    lines = [_line(("load", *COLUMNS)), _line(["---"] * (1 + len(COLUMNS)))]
    lines += [_line((_name(row), *_figures(row))) for row in found["rows"]]
    return "\n".join([f"# {found['benchmark']}", "", *lines, "", _conclusion(found), ""])


def _paired_markdown(found: dict[str, Any]) -> str:
    lines = [_line(("run", "server", *COLUMNS)), _line(["---"] * (2 + len(COLUMNS)))]
    for number, pair in enumerate(found["pairs"], 1):
        lines += [_line((str(number), name, *_figures(row))) for name, row in pair.items()]
    return "\n".join(["# paired", "", *lines, "", _conclusion(found), ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _name(row: dict[str, Any]) -> str:
    if "concurrency" in row:
        return f"{row['concurrency']} at a time"
    if "pattern" not in row:
        return "all at once"
    return row["pattern"] if row["rate"] is None else f"{row['pattern']}, {row['rate']:g}/s"


def _figures(row: dict[str, Any]) -> list[str]:
    times = [row[name].get(share) for name in ("ttft_ms", "itl_ms") for share in ("p50", "p99")]
    return [
        f"{row['requests_per_s']:,.2f}",
        f"{row['output_tokens_per_s']:,.1f}",
        *("-" if value is None else f"{value:,.1f} ms" for value in times),
        str(row["failed"]),
    ]


def _conclusion(found: dict[str, Any]) -> str:
    match found["benchmark"]:
        case "sweep" if found["saturation"] is None:
            return "Throughput grows up to the last row."
        case "sweep":
            return f"Throughput stops to grow at {found['saturation']} requests at a time."
        case "arrivals":
            return f"Saturated at {found['saturated_requests_per_s']:,.2f} requests/s; {found['failed']} failed."
        case "pressure":
            told = "unknown" if found["preemptions"] is None else f"{found['preemptions']:.0f}"
            return f"{found['failed']} requests were lost; preemptions: {told}."
    low, high = found["interval"]
    verdict = "passed" if found["passed"] else "failed"
    return f"Ratio {found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}), gate {found['gate']:g}: {verdict}."


BAR_PX, BAR_HEIGHT_PX = 420, 18


def html(found: dict[str, Any], environment: dict[str, Any]) -> str:
    """Return the report as one HTML page: throughput as bars, the table, the conclusion, and where it was measured."""
    rows = _labelled_rows(found)
    most = max((row["output_tokens_per_s"] for _, row in rows), default=0.0) or 1.0
    bars, height = [], len(rows) * (BAR_HEIGHT_PX + 4)
    for place, (name, row) in enumerate(rows):
        top, width = place * (BAR_HEIGHT_PX + 4), BAR_PX * row["output_tokens_per_s"] / most
        text = f'<text x="0" y="{top + 13}">{escape(name)}</text>'
        value = f'<text x="{205 + width:.0f}" y="{top + 13}">{row["output_tokens_per_s"]:,.0f}</text>'
        bars.append(f'{text}<rect x="200" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT_PX}"/>{value}')
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("load", *COLUMNS))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (name, *_figures(row))) + "</tr>" for name, row in rows
    )
    where = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in environment.items())
    return (
        f"<!doctype html><meta charset=utf-8><title>{found['benchmark']}</title>"
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}text{font-size:13px}"
        "rect{fill:#36c}dt{font-weight:600}</style>"
        f"<h1>{found['benchmark']}</h1><p>{escape(_conclusion(found))}</p><h2>Output tokens per second</h2>"
        f'<svg width="{BAR_PX + 300}" height="{height}">{"".join(bars)}</svg>'
        f"<table><tr>{head}</tr>{body}</table><h2>Measured with</h2><dl>{where}</dl>\n"
    )


def _labelled_rows(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if found["benchmark"] != "paired":
        return [(_name(row), row) for row in found["rows"]]
    return [
        (f"run {number}, {name}", row) for number, pair in enumerate(found["pairs"], 1) for name, row in pair.items()
    ]
