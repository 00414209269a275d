"""Series of loads against a server: concurrencies, arrivals, batches, a full KV cache, block sizes, a ladder, features,
a pair.

Each series is a list of loads (LoadOptions) that are measured one after the other; its report has one row for each, and
what follows from all of them: where throughput stops growing, whether anything was lost, the ratio of two servers.
`sanity` measures nothing: it asks what any server must answer rightly.

Any OpenAI-compatible server will do. What only some tell is None of others: preemptions come from vLLM's metrics, the
share of the roofline and the measured fragmentation from this project's `/stats`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import threading
import urllib.error
import urllib.request
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from inferengine.bench.load_options import WORKLOADS, LoadOptions
from inferengine.bench.plots import Series, bar_chart, line_chart
from inferengine.errors import ConfigError, InferEngineError

Measure = Callable[[LoadOptions], dict[str, Any]]

SATURATED = 1.05  # the best throughput over one that counts as saturated, at most
BURST_RATE, STEADY = 1e9, 1e9  # requests per second that are at once; a burstiness without chance
GATE = 0.91  # of the other server's throughput
RESAMPLES = 4000  # of the bootstrap
COUNTERS = ("vllm:num_preemptions_total", "vllm:request_success_total", "vllm:admission_rejections_total")
METRICS_TIMEOUT_S = 10.0
SAMPLE_S = 0.05  # between two looks at /stats
NUM_INSTANTS = 400  # of a load at which the held tokens are added up


def sweep(measure: Measure, options: LoadOptions, concurrencies: Sequence[int]) -> dict[str, Any]:
    """Measure closed loops of these numbers of requests in flight, with at least four requests for each, and prompts
    of its own for each load: none finds those of another cached.

    `saturation` is the least concurrency whose throughput is within 5 % of the best; None where that is the last.
    """
    rows = []
    for number, concurrency in enumerate(concurrencies):
        load = replace(options, concurrency=concurrency, rate=0.0, requests=max(options.requests, 4 * concurrency))
        load = replace(load, seed=options.seed + number)
        rows.append({"concurrency": concurrency, **measure(load)})
    return {"benchmark": "sweep", "rows": rows, "saturation": saturation(rows), "failed": _failed(rows)}


def _at_once(options: LoadOptions, number: int = 0) -> LoadOptions:
    """Return the load with all requests at once, and prompts of its own for each run: no run finds those of another
    cached."""
    return replace(options, rate=BURST_RATE, burstiness=STEADY, seed=options.seed + number)


def saturation(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the least concurrency whose throughput is within SATURATED of the best; None where that is the last."""
    best = max(row["output_tokens_per_s"] for row in rows)
    enough = [row["concurrency"] for row in rows if SATURATED * row["output_tokens_per_s"] >= best]
    return None if enough[0] == rows[-1]["concurrency"] else int(enough[0])


def arrivals(measure: Measure, options: LoadOptions, shares: Sequence[float]) -> dict[str, Any]:
    """Measure all requests at once (burst), then equal gaps (steady) and Poisson arrivals at these shares of the rate
    at which a closed loop of `options.concurrency` ends requests. Raises InferEngineError where none completed."""
    closed = measure(replace(options, rate=0.0))
    most = closed["requests_per_s"]
    if not most:
        raise InferEngineError("engine_unavailable", "no request completed: there is no rate to take shares of")
    rows = [
        {"pattern": "closed", "rate": None, **closed},
        {"pattern": "burst", "rate": None, **measure(_at_once(options, 1))},
    ]
    for pattern, burstiness in (("steady", STEADY), ("poisson", 1.0)):
        for share in shares:
            rate = round(share * most, 3)
            load = replace(options, rate=rate, burstiness=burstiness, seed=options.seed + len(rows))
            rows.append({"pattern": pattern, "rate": rate, "share": share, **measure(load)})
    return {"benchmark": "arrivals", "saturated_requests_per_s": most, "rows": rows, "failed": _failed(rows)}


def pressure(measure: Measure, options: LoadOptions) -> dict[str, Any]:
    """Send far more at once than the server's KV cache holds, and read from /metrics what it did about it.

    `preemptions` and the other counters are None where the server has no such metric."""
    before = read_counters(options)
    row = measure(_at_once(options))
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
    text = _get(options, "/metrics")
    return {name: _sum_of(text, name) for name in COUNTERS}


def _get(options: LoadOptions, path: str) -> str:
    """Return the server's response at a path outside /v1; empty where there is none."""
    request = urllib.request.Request(options.url.removesuffix("/").removesuffix("/v1") + path)
    if options.api_key:
        request.add_header("Authorization", f"Bearer {options.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=METRICS_TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, urllib.error.URLError):
        return ""


def read_stats(options: LoadOptions) -> dict[str, Any]:
    """Return this project's /stats; empty of another server."""
    try:
        found = json.loads(_get(options, "/stats") or "{}")
    except ValueError:
        found = {}
    return found if isinstance(found, dict) and "cache" in found else {}


def _sum_of(text: str, name: str) -> float | None:
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and not line.startswith("#")
    ]
    return sum(values) if values else None


def batch(
    measure: Measure,
    options: LoadOptions,
    batches: Sequence[int],
    repeats: int,
    *,
    parameters: float = 0.0,
    peak_operations_per_s: float = 0.0,
) -> dict[str, Any]:
    """Send batches of these sizes, all requests of one at once, and keep of each size the run of median throughput.

    `roofline_share`: of each phase, the least time that the device allows over the time taken, as the server tells.
    `mfu`: two operations for each of `parameters` and each token, over the peak rate; None where either is unknown.
    """
    rows = []
    for size in batches:
        runs: list[dict[str, Any]] = []
        shares: dict[str, float] = {}
        for number in range(repeats):
            before = read_stats(options)
            runs.append(measure(replace(_at_once(options, number), requests=size)))
            after = read_stats(options)
            shares = _roofline_share(before, after) or shares
        runs.sort(key=lambda run: run["output_tokens_per_s"])
        row = runs[len(runs) // 2]
        peak = peak_operations_per_s or after.get("roofline", {}).get("peak_operations_per_s", 0.0)
        mfu = 2 * parameters * row["total_tokens_per_s"] / peak if parameters and peak else None
        failed = sum(run["failed"] for run in runs)
        rates = [run["output_tokens_per_s"] for run in runs]
        rows.append({"batch": size, **row, "failed": failed, "runs": rates, "roofline_share": shares, "mfu": mfu})
    return {"benchmark": "batch", "rows": rows, "failed": _failed(rows)}


def _roofline_share(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Return the share of the roofline by phase, between two readings of /stats."""
    first, last = before.get("roofline") or {}, after.get("roofline") or {}
    found = {}
    for phase, taken_s in last.get("step_seconds", {}).items():
        taken = taken_s - first.get("step_seconds", {}).get(phase, 0.0)
        least = last["least_seconds"][phase] - first.get("least_seconds", {}).get(phase, 0.0)
        if taken > 0:
            found[phase] = round(least / taken, 4)
    return found


class CacheSampler:
    """Reads the fragmentation and the use of the KV cache from /stats during `with`."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-sampler", daemon=True)
        self._samples: list[dict[str, Any]] = []

    def __enter__(self) -> CacheSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            cache = read_stats(self._options).get("cache")
            if cache is None:
                return  # another server
            if cache["used_pages"]:
                self._samples.append(cache)

    def summary(self) -> dict[str, Any] | None:
        """Return averages and peaks over the samples with pages in use; None without any."""
        if not self._samples:
            return None
        wasted = [sample["internal_fragmentation"] for sample in self._samples]
        used = [sample["utilization"] for sample in self._samples]
        return {
            "block_size": self._samples[-1]["page_size"],
            "samples": len(self._samples),
            "average": round(statistics.fmean(wasted), 4),
            "peak": max(wasted),
            "average_utilization": round(statistics.fmean(used), 4),
            "peak_utilization": max(used),
        }


Served = Callable[[int], AbstractContextManager[str]]


def fragmentation(
    measure: Measure, options: LoadOptions, block_sizes: Sequence[int], served: Served | None = None
) -> dict[str, Any]:
    """Tell how much of the blocks in use holds nothing, for several block sizes.

    One load is measured; from its requests' lengths and times follows what each block size would waste, for any
    server. `measured` is what the server itself told meanwhile, for its own block size. With `served`, which starts a
    server with a block size and gives its address, each size is measured.
    """
    loads, measured = [], []
    for size in block_sizes if served is not None else block_sizes[:1]:
        with nullcontext(options.url) if served is None else served(size) as url:
            asked = replace(options, url=url, detailed=True)
            with CacheSampler(asked) as sampler:
                loads.append(measure(asked))
        if summary := sampler.summary():
            measured.append(summary)
    load = loads[0]
    held = held_tokens(load)
    longest = max((sum(pair) for pair in zip(load["input_lens"], load["output_lens"], strict=True)), default=0)
    rows = [_waste(held, size) for size in block_sizes]
    rows.append({**_waste(held, max(1, longest)), "contiguous": True})
    failed = _failed(loads)
    return {"benchmark": "fragmentation", "load": load, "rows": rows, "measured": measured, "failed": failed}


def held_tokens(load: dict[str, Any]) -> list[list[int]]:
    """Return, for evenly spaced instants of a detailed load, how many tokens each running request holds: its prompt
    from its first token on, and as many of its output as its events say."""
    requests = []
    columns = (load[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"))
    for start, ttft, itls, num_prompt, num_output, error in zip(*columns, strict=True):
        if not error:
            times = list(accumulate(itls, initial=start + ttft))
            requests.append((times, num_prompt, num_output))
    end = max((times[-1] for times, _, _ in requests), default=0.0)
    instants = []
    for place in range(NUM_INSTANTS):
        now = end * (place + 0.5) / NUM_INSTANTS
        running = [request for request in requests if request[0][0] <= now < request[0][-1]]
        instants.append(
            [prompt + round(output * bisect_right(times, now) / len(times)) for times, prompt, output in running]
        )
    return [instant for instant in instants if instant]


def _waste(held: Sequence[Sequence[int]], block_size: int) -> dict[str, Any]:
    shares, blocks = [], []
    for lengths in held:
        blocks.append(sum(-(-length // block_size) for length in lengths))
        shares.append(1.0 - sum(lengths) / (blocks[-1] * block_size))
    return {
        "block_size": block_size,
        "average": round(statistics.fmean(shares), 4) if shares else 0.0,
        "peak": round(max(shares, default=0.0), 4),
        "peak_blocks": max(blocks, default=0),
    }


def ladder(
    measure: Measure, options: LoadOptions, rungs: Sequence[tuple[str, AbstractContextManager[str]]], repeats: int
) -> dict[str, Any]:
    """Measure the five WORKLOADS on each rung: a server with one more optimisation switched on than that before.

    A rung's context gives its address. Each cell is the median of `repeats` runs of the workload's own figure.
    """
    rows = []
    for name, server in rungs:
        runs: dict[str, list[float]] = {}
        failed = 0
        with server as url:
            for workload, about in WORKLOADS.items():
                for number in range(repeats):
                    load = _at_once(options, number)
                    load = replace(load, url=url, workload=workload)
                    found = measure(load)
                    failed += found["failed"]
                    runs.setdefault(workload, []).append(_figure(found, about.figure))
        figures = {workload: statistics.median(values) for workload, values in runs.items()}
        rows.append({"rung": name, "figures": figures, "runs": runs, "failed": failed})
    units = {name: about.unit for name, about in WORKLOADS.items()}
    return {"benchmark": "ladder", "rows": rows, "units": units, "gains": _gains(rows), "failed": _failed(rows)}


def _figure(found: dict[str, Any], path: Sequence[str]) -> float:
    for name in path:
        found = found.get(name, math.nan) if isinstance(found, dict) else math.nan
    return float(found) if isinstance(found, int | float) else math.nan


def _gains(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return, by workload, how many times better its own rung is than the one below it."""
    gains = {}
    for name, about in WORKLOADS.items():
        for below, row in pairwise(rows):
            before, after = below["figures"][name], row["figures"][name]
            if row["rung"].endswith(about.shows) and before and after:
                gains[name] = after / before if about.higher_is_better else before / after
    return gains


RUNGS = {  # of this project's own service: what each switches on, in the order of climbing
    "static": {
        "scheduler.policy": "static",
        "cache.layout": "contiguous",
        "scheduler.chunked_prefill": "false",
        "cache.prefix_caching": "false",
    },
    "+ continuous": {"scheduler.policy": "fcfs"},
    "+ paged": {"cache.layout": "paged"},
    "+ chunked": {"scheduler.chunked_prefill": "true"},
    "+ prefix": {"cache.prefix_caching": "true"},
}


def rung_flags() -> dict[str, list[str]]:
    """Return the flags of `inferengine up` for each of RUNGS: its own and those of the rungs below it."""
    found: dict[str, list[str]] = {}
    switched: dict[str, str] = {}
    for name, change in RUNGS.items():
        switched |= change
        found[name] = [word for key, value in switched.items() for word in (f"--{key}", value)]
    return found


# -- sanity -----------------------------------------------------------------------------------------------------------

Ask = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]  # a body for /v1/completions -> status and JSON


def sanity(ask: Ask, streamed: Callable[[dict[str, Any]], str], model: str) -> dict[str, Any]:
    """Ask a server what has one right answer, and say which were right.

    `ask` sends a body and returns status and JSON, `streamed` the text of the same as a stream.
    """
    greedy = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    seeded = {**greedy, "temperature": 1.0, "seed": 7}
    texts = [_text(ask(greedy)) for _ in range(2)]
    status, whole = ask(greedy)
    usage = whole.get("usage") or {}
    word = next((part for part in texts[0].split() if len(part) > 1), " ")
    stopped = ask({**greedy, "stop": [word]})
    checks = {
        "a request is answered with text": status == 200 and bool(texts[0].strip()),
        "the same greedy request gives the same text": texts[0] == texts[1],
        "a stream gives the text of the whole answer": streamed(greedy) == texts[0],
        "max_tokens is kept exactly": usage.get("completion_tokens") == greedy["max_tokens"],
        "usage adds up": usage.get("total_tokens")
        == sum(usage.get(f"{n}_tokens", 0) for n in ("prompt", "completion")),
        "a seed gives the same draws again": _text(ask(seeded)) == _text(ask(seeded)),
        "a stop string ends the text and is not in it": word not in _text(stopped) and _reason(stopped) == "stop",
        "a length that is none is refused": 400 <= ask({**greedy, "max_tokens": -1})[0] < 500,
        "a model that is not there is refused": ask({**greedy, "model": "no-such-model"})[0] == 404,
        "a prompt that is none is refused": 400 <= ask({**greedy, "prompt": {}})[0] < 500,
    }
    rows = [{"check": name, "passed": passed} for name, passed in checks.items()]
    failed = sum(not row["passed"] for row in rows)
    return {"benchmark": "sanity", "rows": rows, "failed": failed, "passed": not failed}


def _text(answer: tuple[int, dict[str, Any]]) -> str:
    choices = answer[1].get("choices") or [{}]
    return str(choices[0].get("text", ""))


def _reason(answer: tuple[int, dict[str, Any]]) -> str:
    choices = answer[1].get("choices") or [{}]
    return str(choices[0].get("finish_reason", ""))


# -- a pair -----------------------------------------------------------------------------------------------------------


def paired(
    measure: Measure, ours: LoadOptions, theirs: LoadOptions, runs: int, *, gate: float = GATE, seed: int = 0
) -> dict[str, Any]:
    """Measure two servers in turn, each first as often as second, and compare their output tokens per second.

    Both get the same requests; those of another pair are others, so that no load finds its prompts cached.

    `ratio` is the median of ours over theirs by pair; `interval` holds 95 % of the medians of RESAMPLES resampled sets
    of pairs (percentile bootstrap: Efron, 1979). `passed`: the ratio reaches `gate` and no request failed.
    """
    pairs: list[dict[str, Any]] = []
    for number in range(runs):
        order = [("ours", ours), ("theirs", theirs)]
        order = order if number % 2 == 0 else order[::-1]
        pairs.append({name: measure(replace(load, seed=load.seed + number)) for name, load in order})
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


# -- features --------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "is_open": {"type": "boolean"}},
        "required": ["name", "count", "is_open"],
    },
}
PLAIN = "drawn"  # the load that the others are held against: temperature 1 and nothing else
# Fields of the requests. Greedy is the one that draws nothing; outputs under a grammar go on to the end of `--output`.
FEATURES: dict[str, dict[str, Any]] = {
    PLAIN: {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 1},
    "penalties": {
        "temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 50,
    },
    "logprobs": {"temperature": 1.0, "logprobs": 5},
    "n": {"temperature": 1.0, "n": 4},
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]+"}},
    "counted regex": {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{1,9}[ ,]){1000}"}},
    "schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "shared prefix": {"temperature": 1.0},
}  # fmt: skip
SHARED_TOKENS = 1024  # that the prompts of "shared prefix" begin with


def features(measure: Measure, ours: LoadOptions, theirs: LoadOptions | None, chosen: Sequence[str]) -> dict[str, Any]:
    """Measure the same load with each feature, on one server or on two in turn, each first as often as second.

    A row's `share` is its output tokens per second over those of the plain load of the same server, `ratio` ours over
    theirs. As many requests as are in flight are sent before the clock starts: what a feature costs once is not in it.
    """
    rows: list[dict[str, Any]] = []
    plain: dict[str, float] = {}
    for number, name in enumerate(dict.fromkeys((PLAIN, *chosen))):
        servers = [("ours", ours)] + ([("theirs", theirs)] if theirs is not None else [])
        row: dict[str, Any] = {"feature": name, "share": {}}
        for side, load in servers if number % 2 == 0 else servers[::-1]:
            found = measure(_with_feature(load, name, number))
            plain.setdefault(side, found["output_tokens_per_s"])
            row[side] = found
            row["share"][side] = _ratio(found["output_tokens_per_s"], plain[side])
        if theirs is not None:
            row["ratio"] = _ratio(row["ours"]["output_tokens_per_s"], row["theirs"]["output_tokens_per_s"])
        rows.append(row)
    failed = sum(row[side]["failed"] for row in rows for side in row["share"])
    return {"benchmark": "features", "rows": rows, "failed": failed}


def _with_feature(load: LoadOptions, name: str, number: int) -> LoadOptions:
    """Return the load with a feature's fields, and prompts of its own: no load finds those of another cached."""
    body = dict(FEATURES[name])
    if load.chat and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    requests = max(load.concurrency, load.requests // body.get("n", 1))
    shared = SHARED_TOKENS if name == "shared prefix" else load.shared_prefix
    warm_up = max(load.warm_up, load.concurrency)
    return replace(load, body=body, requests=requests, shared_prefix=shared, warm_up=warm_up, seed=load.seed + number)


# -- as text ----------------------------------------------------------------------------------------------------------

COLUMNS = ("requests/s", "tokens/s", "first token p50", "p99", "between p50", "p99", "failed")


def markdown(found: dict[str, Any]) -> str:
    """Return a report of a series as Markdown: its table, and a sentence of what follows."""
    head, *lines = _cells(found)
    table = [_line(head), _line(["---"] * len(head)), *map(_line, lines)]
    return "\n".join([f"# {found['benchmark']}", "", *table, "", _conclusion(found), ""])


def _cells(found: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a report's table: its head, then its lines."""
    rows = found.get("rows", [])
    match found["benchmark"]:
        case "paired":
            lines = [
                [str(number), name, *_figures(row)]
                for number, pair in enumerate(found["pairs"], 1)
                for name, row in pair.items()
            ]
            return [["run", "server", *COLUMNS], *lines]
        case "batch":
            lines = [[_name(row), *_figures(row), _shares(row["roofline_share"]), _percent(row["mfu"])] for row in rows]
            return [["load", *COLUMNS, "share of the roofline", "MFU"], *lines]
        case "fragmentation":
            measured = {row["block_size"]: row for row in found["measured"]}
            lines = [
                [
                    f"{row['block_size']} tokens" + (", one a request (contiguous)" if row.get("contiguous") else ""),
                    _percent(row["average"]),
                    _percent(row["peak"]),
                    f"{row['peak_blocks']:,}",
                    *(_percent(measured.get(row["block_size"], {}).get(name)) for name in ("average", "peak")),
                ]
                for row in rows
            ]
            return [["block", "wasted", "peak", "blocks, peak", "told by the server", "peak"], *lines]
        case "ladder":
            lines = [[row["rung"], *(f"{value:,.1f}" for value in row["figures"].values())] for row in rows]
            return [["rung", *(f"{name}, {unit}" for name, unit in found["units"].items())], *lines]
        case "features":
            lines = [
                [
                    row["feature"],
                    side,
                    *_figures(row[side]),
                    _percent(share),
                    f"{row['ratio']:.2f}" if row.get("ratio") else "-",
                ]
                for row in rows
                for side, share in row["share"].items()
            ]
            return [["feature", "server", *COLUMNS, "share of plain", "ratio"], *lines]
        case "sanity":
            return [["check", "passed"], *([row["check"], "yes" if row["passed"] else "**no**"] for row in rows)]
    return [["load", *COLUMNS], *([_name(row), *_figures(row)] for row in rows)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items()) or "-"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _name(row: dict[str, Any]) -> str:
    if "batch" in row:
        return f"a batch of {row['batch']}"
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
            return f"Throughput stops growing at a concurrency of {found['saturation']}."
        case "arrivals":
            return f"Saturated at {found['saturated_requests_per_s']:,.2f} requests/s; {found['failed']} failed."
        case "pressure":
            told = "unknown" if found["preemptions"] is None else f"{found['preemptions']:.0f}"
            return f"{found['failed']} requests were lost; preemptions: {told}."
        case "batch":
            best = max(found["rows"], key=lambda row: row["output_tokens_per_s"])
            return f"Most tokens per second: {_name(best)}; {found['failed']} failed."
        case "fragmentation":
            return f"Shares of the blocks in use that hold no token; {found['failed']} requests failed."
        case "ladder":
            gains = ", ".join(f"{name} {gain:.2f} times" for name, gain in found["gains"].items())
            return f"{found['failed']} requests failed." + (
                f" Gain of each workload's own rung: {gains}." if gains else ""
            )
        case "features":
            return f"{found['failed']} requests failed."
        case "sanity":
            return f"{found['failed']} of {len(found['rows'])} checks failed."
    low, high = found["interval"]
    verdict = "passed" if found["passed"] else "failed"
    return f"Ratio {found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}), gate {found['gate']:g}: {verdict}."


def html(found: dict[str, Any], environment: dict[str, Any]) -> str:
    """Return the report as one HTML page: the table, the conclusion, plots where matplotlib is there, and where it was
    measured."""
    head, *lines = _cells(found)
    head_cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    where = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in environment.items())
    try:
        drawn = "".join(svg[svg.index("<svg") :] for svg in plots(found).values())
    except ConfigError as error:
        drawn = f"<p>No plots: {escape(str(error))}</p>"
    return (
        f"<!doctype html><meta charset=utf-8><title>{found['benchmark']}</title>"
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}dt{font-weight:600}"
        "</style>"
        f"<h1>{found['benchmark']}</h1><p>{escape(_conclusion(found))}</p>{drawn}"
        f"<table><tr>{head_cells}</tr>{body}</table><h2>Measured with</h2><dl>{where}</dl>\n"
    )


def plots(found: dict[str, Any]) -> dict[str, str]:
    """Return the plots of a report as SVG, by file name. Raises ConfigError without matplotlib."""
    rows, kind = found.get("rows", []), found["benchmark"]
    match kind:
        case "sweep" | "batch":
            key = "concurrency" if kind == "sweep" else "batch"
            label = "requests in flight" if kind == "sweep" else "requests in the batch"
            xs = [row[key] for row in rows]
            waits = [
                Series(f"{what}, {share}", xs, [row[name].get(share, math.nan) for row in rows])
                for what, name in (("first token", "ttft_ms"), ("between tokens", "itl_ms"))
                for share in ("p50", "p99")
            ]
            rate = [Series("output", xs, [row["output_tokens_per_s"] for row in rows])]
            return {
                f"{kind}-throughput.svg": line_chart(
                    rate, title="Throughput", x_label=label, y_label="tokens/s", logarithmic_x=True
                ),
                f"{kind}-latency.svg": line_chart(
                    waits, title="Latency", x_label=label, y_label="ms", logarithmic_x=True
                ),
            }
        case "fragmentation":
            bars = [Series(name, [], [row[name] * 100 for row in rows]) for name in ("average", "peak")]
            sizes = [str(row["block_size"]) for row in rows]
            return {"fragmentation.svg": bar_chart(sizes, bars, title="Wasted by block size", y_label="percent")}
        case "ladder":
            bars = [Series(row["rung"], [], [_times_better(rows[0], row, name) for name in WORKLOADS]) for row in rows]
            title = "What each optimisation gives (times better than the first rung)"
            return {"ladder.svg": bar_chart(list(WORKLOADS), bars, title=title, y_label="times", show_values=False)}
        case "paired":
            runs = [str(number) for number in range(1, len(found["pairs"]) + 1)]
            bars = [
                Series(name, [], [pair[name]["output_tokens_per_s"] for pair in found["pairs"]])
                for name in ("ours", "theirs")
            ]
            return {"paired.svg": bar_chart(runs, bars, title="Output tokens per second, by pair", y_label="tokens/s")}
        case "features":
            sides = list(rows[0]["share"])
            bars = [Series(side, [], [row[side]["output_tokens_per_s"] for row in rows]) for side in sides]
            named = [row["feature"] for row in rows]
            return {"features.svg": bar_chart(named, bars, title="Output tokens per second", y_label="tokens/s")}
        case "sanity":
            return {}
    names = [_name(row) for row in rows]
    bars = [Series("output", [], [row["output_tokens_per_s"] for row in rows])]
    waits = [
        Series(f"first token {share}", [], [row["ttft_ms"].get(share, math.nan) for row in rows])
        for share in ("p50", "p99")
    ]
    return {
        f"{kind}-throughput.svg": bar_chart(names, bars, title="Throughput", y_label="tokens/s"),
        f"{kind}-first-token.svg": bar_chart(names, waits, title="First token", y_label="ms"),
    }


def _times_better(first: dict[str, Any], row: dict[str, Any], name: str) -> float:
    before, after = first["figures"][name], row["figures"][name]
    if not before or not after:
        return math.nan
    return float(after / before if WORKLOADS[name].higher_is_better else before / after)
