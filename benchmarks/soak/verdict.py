"""Flat or growing: the slope of what each process holds over its life, with an interval of 95 %.

The slope is Theil's and Sen's, the median of the slopes of all pairs of points, and its interval Kendall's: neither
asks how the values are distributed. A point is one minute: of memory its median, of descriptors and threads its least,
because those of open requests come and go. The first WARM_UP_S of a life are left out. Neighbouring minutes are not
independent, which the interval does not know: it is somewhat too narrow.

Of an engine everything before its first eviction is left out too. On a CPU the pages of its KV cache become memory when
they are first written, up to the size that the memory plan in its log names. An eviction means that no block is new.

What has come to rest does not grow: the second half of the minutes must rise too, by at least a RESTING part of the
slope of all. A burst can lift a process's memory once, to a level at which its allocator keeps it.

What fails a run are FIGURES. TOLD are judged likewise and only reported: they tell a leak from an allocator that keeps
what it was given for a moment (clock/soak_heap.py). PSS is sampled and not judged: it changes whenever another program
on the machine that has the same files mapped starts or ends.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

WARM_UP_S = 300.0
LEAST_MINUTES = 10
Z = 1.96
# The least growth over a life that counts. `device_mib` is an engine's memory on a card.
FIGURES = {"rss_mib": 2.0, "device_mib": 2.0, "descriptors": 3.0, "threads": 2.0}
TOLD = {"in_use_mib": 2.0, "free_mib": 2.0, "python_blocks": 2000.0}
RESTING = 0.25
SHARE = 0.02  # least growth of memory that counts, as a share: less may be an allocator's drift
LASTING = ("engine", "http worker", "http", "ws", "up")  # parts that must each have been judged for a whole verdict
# How long a process has to live for a verdict: some minutes more than are counted, because a minute may be cut.
LEAST_LIFE_S = WARM_UP_S + 60.0 * (LEAST_MINUTES + 2)
Samples = Sequence[dict[str, Any]]


class Slope(NamedTuple):
    """A slope per hour: the estimate and the ends of its interval."""

    per_hour: float
    low: float
    high: float


def theil_sen(points: Sequence[tuple[float, float]]) -> Slope:
    """Return the slope of (hours, value) points. Needs at least three points with different hours."""
    slopes = sorted(
        (y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x1
    )
    n = len(points)
    apart = Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, math.floor((len(slopes) - apart) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + apart) / 2))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])


def judge(figure: str, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the verdict on one figure of one process's life: flat, growing or too short."""
    if len(points) < LEAST_MINUTES:
        return {"verdict": "too short", "minutes": len(points)}
    slope = theil_sen(points)
    hours = points[-1][0] - points[0][0]
    level = statistics.median(y for _, y in points)
    counts = (FIGURES | TOLD)[figure]
    if figure not in ("descriptors", "threads"):
        counts = max(counts, SHARE * level)
    rises_on = theil_sen(points[len(points) // 2 :]).per_hour > RESTING * slope.per_hour
    growing = slope.low > 0 and slope.per_hour * hours > counts and rises_on
    rounded = {name: round(value, 3) for name, value in slope._asdict().items()}
    return {
        "verdict": "growing" if growing else "flat",
        "minutes": len(points),
        "median": round(level, 2),
        **rounded,
    }


def lives(samples: Samples) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return what was sampled of each process from its start to its end, with the moment `t`, and whether its memory
    may be judged (`full`)."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        for process in sample["processes"]:
            rows = found[process["name"], process["life"]]
            full = process["name"] != "engine" or has_full_cache(sample) or bool(rows and rows[-1]["full"])
            rows.append({**process, "t": sample["t"], "full": full})
    return dict(found)


def has_full_cache(sample: dict[str, Any]) -> bool:
    """Return whether every block of the engine's KV cache has been used; true of samples from before this was asked."""
    engine = sample["engine"]
    return engine is not None and engine.get("evictions", 1) != 0


def by_minute(rows: Sequence[dict[str, Any]], figure: str) -> list[tuple[float, float]]:
    """Return (hours, value) of each minute after the warm-up, of an engine with a full cache."""
    minutes: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["full"] and row["t"] - rows[0]["t"] >= WARM_UP_S and row.get(figure) is not None:
            minutes[int(row["t"] // 60)].append(row[figure])
    middle = min if figure in ("descriptors", "threads") else statistics.median
    return [(minute / 60, float(middle(values))) for minute, values in sorted(minutes.items())]


def verdicts(samples: Samples) -> list[dict[str, Any]]:
    """Return a verdict for each process's life that was long enough, the longest first, with all FIGURES, and of TOLD
    and the card's memory what was sampled."""
    made = []
    for (name, life), rows in lives(samples).items():
        points = {figure: by_minute(rows, figure) for figure in FIGURES | TOLD}
        always = ("rss_mib", "descriptors", "threads")
        judged = {figure: judge(figure, found) for figure, found in points.items() if found or figure in always}
        if any(one["verdict"] != "too short" for one in judged.values()):
            began_s, minutes = rows[0]["t"], round((rows[-1]["t"] - rows[0]["t"]) / 60, 1)
            full_after_s = next(round(row["t"] - began_s, 1) for row in rows if row["full"])
            judged = judged if name != "engine" else {"cache_full_after_s": full_after_s, **judged}
            made.append({"process": name, "life": life, "minutes": minutes, **judged})
    return sorted(made, key=lambda one: -one["minutes"])


def not_judged(judged: Sequence[dict[str, Any]]) -> list[str]:
    """Return the LASTING parts of which no process lived long enough for a verdict on its memory."""
    known = {one["process"] for one in judged if one["rss_mib"]["verdict"] != "too short"}
    return [name for name in LASTING if name not in known]


def latency_slopes(samples: Samples) -> dict[str, Any]:
    """Return the slopes of the medians of each minute, per hour. Other programs on the machine move them, so they judge
    nothing."""
    found = {}
    for name in ("first_token", "between_tokens"):
        minutes: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            if sample[name]["p50_s"] is not None:
                minutes[int(sample["t"] // 60)].append(sample[name]["p50_s"])
        points = [(minute / 60, statistics.median(values)) for minute, values in sorted(minutes.items())]
        if len(points) >= LEAST_MINUTES:
            slope = theil_sen(points)
            found[name] = {
                "median_ms": round(1e3 * statistics.median(y for _, y in points), 2),
                **{f"{end}_ms": round(1e3 * value, 3) for end, value in slope._asdict().items()},
            }
    return found
