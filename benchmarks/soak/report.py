"""The result of a mixed soak, from the files that it left: the verdict, figures by the minute, plots."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.soak.verdict import FIGURES, TOLD, Samples, latency_slopes, lives, not_judged, verdicts
from inferengine.bench.environment import write_result
from inferengine.bench.plots import Series, line_chart

NAMES = ("engine", "http worker", "http", "ws", "up", "grammars")
MOST_EXAMPLES = 20


def read(folder: Path) -> tuple[dict[str, Any], Samples]:
    """Read the files that a run has left."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return json.loads((folder / "run.json").read_text()), [json.loads(line) for line in lines]


def result(run: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Return the result as a document for benchmarks/results."""
    judged = verdicts(samples)
    growing = [
        f"{one['process']} {one['life']}: {figure}"
        for one in judged
        for figure in FIGURES
        if figure in one and one[figure]["verdict"] == "growing"
    ]
    missing = not_judged(judged)
    back: dict[str, list[float]] = defaultdict(list)
    for fault in run["fault_list"]:
        if "back_after_s" in fault:
            back[fault["name"]].append(fault["back_after_s"])
    by_kind: Counter[str] = Counter()
    for name, count in run["totals"].items():
        by_kind[name.rpartition(", ")[2]] += count
    windows = run["windows"]
    fields = ("seconds", "rate", "seed", "device", "own_disk", "requests", "compared", "batches", "faults")
    return {
        "benchmark": "soak mixed",
        "complete": run.get("complete", True),
        "hours": round(run["seconds"] / 3600, 2),
        **{name: run[name] for name in fields},
        "num_faults": sum(run["faults"].values()),
        "outcomes": dict(by_kind),
        "unexpected": len(run["unexpected"]),
        "unexpected_examples": [text[:300] for text in run["unexpected"][:MOST_EXAMPLES]],
        "unclean": run["unclean"],
        "quiet_windows": {
            "count": len(windows),
            "slowest_end_s": max((window["ended_after_s"] for window in windows), default=None),
            "slowest_clean_s": max((window["clean_after_s"] for window in windows), default=None),
        },
        "back_after_s": {
            name: {"median": statistics.median(values), "most": max(values), "times": len(values)}
            for name, values in sorted(back.items())
        },
        "load_average": {
            "median": round(statistics.median(sample["load_average"] for sample in samples), 2),
            "most": round(max(sample["load_average"] for sample in samples), 2),
        },
        "lives": dict(Counter(name for name, _ in lives(samples))),
        "latency": latency_slopes(samples),
        "longest": {name: next(one for one in judged if one["process"] == name) for name in _names(judged)},
        "processes": judged,
        "growing": growing,
        "not_judged": missing,
        "verdict": "growing" if growing else "too short" if missing else "flat",
        "passed": run.get("complete", True) and not (growing or run["unexpected"] or run["unclean"]),
        "minutes": by_minutes(samples),
    }


def _names(judged: list[dict[str, Any]]) -> list[str]:
    return [name for name in NAMES if any(one["process"] == name for one in judged)]


def by_minutes(samples: Samples) -> dict[str, list[Any]]:
    """Return columns of one value a minute; of several processes of one name the sum; null where nothing was
    measured."""
    minutes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        minutes[int(sample["t"] // 60)].append(sample)
    columns: dict[str, list[Any]] = {"minute": sorted(minutes)}
    for minute in columns["minute"]:
        found = minutes[minute]
        row: dict[str, Any] = {
            "requests": sum(sum(sample["requests"].values()) for sample in found),
            "errors": sum(sum(sample["errors"].values()) for sample in found),
        }
        for name in ("first_token", "between_tokens"):
            for share in ("p50_s", "p99_s"):
                values = [sample[name][share] for sample in found if sample[name][share] is not None]
                row[f"{name} {share}"] = round(statistics.median(values), 4) if values else None
        for name in NAMES:
            for figure in ("rss_mib", "descriptors"):
                row[f"{name} {figure}"] = _summed(found, name, figure)
        for figure in ("device_mib", *TOLD):
            row[f"engine {figure}"] = _summed(found, "engine", figure)
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def _summed(samples: Samples, name: str, figure: str) -> float | None:
    """Return the median of the sums over the processes of a name; None where nothing was measured."""
    sums = [
        sum(process.get(figure) or 0 for process in sample["processes"] if process["name"] == name)
        for sample in samples
    ]
    return round(statistics.median(sums), 1) if any(sums) else None


def charts(document: dict[str, Any]) -> dict[str, str]:
    """Return SVG by file name, which tells a card's from a CPU's. Raises ConfigError without matplotlib."""
    columns = document["minutes"]
    end = "" if document["device"] == "cpu" else f"-{document['device']}"

    def series(column: str, label: str, factor: float = 1.0) -> Series:
        known = [
            (minute, value)
            for minute, value in zip(columns["minute"], columns[column], strict=True)
            if value is not None
        ]
        return Series(label, [minute for minute, _ in known], [factor * value for _, value in known])

    def chart(series: list[Series], title: str, y_label: str) -> str:
        return line_chart(series, title=title, x_label="minutes", y_label=y_label)

    memory = [series(f"{name} rss_mib", name) for name in NAMES]
    on_card = series("engine device_mib", "engine, on the card")
    return {
        f"soak-memory{end}.svg": chart(
            [*memory, *([on_card] if on_card.x else [])],
            "Memory of each part under mixed load and faults",
            "RSS in MiB, of both workers together",
        ),
        f"soak-latency{end}.svg": chart(
            [
                series("first_token p50_s", "first token, median", 1e3),
                series("between_tokens p50_s", "between tokens, median", 1e3),
                series("between_tokens p99_s", "between tokens, 99 %", 1e3),
            ],
            "Latency under mixed load and faults, all within one machine",
            "ms",
        ),
    }


def write(folder: Path, json_file: Path | None, plots: Path | None) -> dict[str, Any]:
    """Judge the run in `folder`, and write what is asked for."""
    run, samples = read(folder)
    document = result(run, samples)
    if json_file is not None:
        write_result(json_file, {**document, "environment": run["environment"]})
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for name, text in charts(document).items():
            (plots / name).write_text(text)
    return document
