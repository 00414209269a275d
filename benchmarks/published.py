"""The tables and plots of docs/performance.md, made from the committed results.

    python -m benchmarks.published            writes both: after a new results/compare-h200.json, for one
    python -m benchmarks.published --check    exit code 1 and the names of what differs from the results

In the document a table stands between `<!-- NAME -->` and `<!-- end -->`; NAME is one of TABLES. Plots are SVG files in
docs/plots.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import compare
from inferengine.bench import compare as compare_engines
from inferengine.bench.plots import Series, bar_chart, line_chart

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
RESULTS = ROOT / "benchmarks" / "results"
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
DRAWS = {"greedy": "greedy", "temperature": "temperature", "top_k_50": "top-k 50", "top_p_0.9": "top-p 0.9"}
Document = dict[str, Any]


def comparison(results: Document) -> str:
    """Format ours beside the peer, row by row."""
    return compare.table(results, peer=peer_of(results))


def peer_of(results: Document) -> str:
    return str(results["peer"]).partition(" ")[0]


def step_table(model: Document) -> str:
    """Format the milliseconds of a decode step by number of rows, and what it takes with other kernels."""
    keys = ("ours_ms", "ours_matrix_only_ms", "cublas_ms", "cublas_matrix_only_ms", "deterministic_ms")
    rows = []
    for number, row in model["rows"].items():
        ours, *others = (f"{row['step'][key]:.2f}" for key in keys)
        rows.append([number, f"{row['step']['floor_ms']:.2f}", f"**{ours}**", *others])
    head = ["rows", "floor", "ours", "ours, no attention", "cuBLAS step", "cuBLAS, no attention", "deterministic"]
    return _markdown(head, rows)


def product_table(model: Document) -> str:
    """Format the microseconds of each product, ours and cuBLAS's, and of attention."""
    rows = []
    for number, row in model["rows"].items():
        both = [(row["products"][name]["ours"]["us"], row["products"][name]["cublas"]["us"]) for name in PRODUCTS]
        attention = f"{row['attention']['us']:.1f} ({row['attention']['floor_us']:.1f})"
        rows.append([number, *(f"{ours:.1f} / {cublas:.1f}" for ours, cublas in both), attention])
    return _markdown(["rows", *PRODUCTS, "attention (floor)"], rows)


def draw_table(model: Document) -> str:
    """Format the microseconds of a draw from the whole vocabulary."""
    rows = [[number, *(f"{row['sampling_us'][key]:.0f}" for key in DRAWS)] for number, row in model["rows"].items()]
    return _markdown(["rows", *DRAWS.values()], rows)


def without_sampled_load(results: Document) -> str:
    """Format a comparison made while a load was not run once before it was timed: vLLM compiled its sampler's kernel
    within most of the sampled loads, so their ratios are left out."""
    rows = [row for row in results["rows"] if row["workload"] != "short sampled"]
    return compare_engines.markdown({**results, "rows": rows})


def only(*models: str) -> Callable[[Document], str]:
    """Return what formats some models of a comparison, as `without_sampled_load`: the others were measured again."""

    def table(results: Document) -> str:
        rows = [row for row in results["rows"] if row["model"] in models]
        return without_sampled_load({**results, "rows": rows})

    return table


# By name: the results, and what makes a table of them.
TABLES: dict[str, tuple[str, Callable[[Document], str]]] = {
    "comparison": ("compare-h200.json", comparison),
    "shapes": ("compare-nine-h200.json", compare_engines.markdown),
    "mixtures": ("compare-moe-h200.json", without_sampled_load),
    "qwen3-30b-h100": ("compare-qwen-moe-h100.json", without_sampled_load),
    "gpt-oss-20b-h100": ("compare-gpt-oss-h100.json", without_sampled_load),
    "eight-h100": ("compare-eight-h100.json", without_sampled_load),
    "more-h200": ("compare-more-h200.json", only("gemma-2-9b")),
    "again-h200": ("compare-again-h200.json", only("llama-3.2-3b", "olmo-2-7b")),
    "two-h100": ("two-cards-large-h100.json", compare_engines.markdown),
    "steps-8b": ("kernels-h200.json", lambda results: step_table(results["models"]["llama-8b"])),
    "steps-0.6b": ("kernels-h200.json", lambda results: step_table(results["models"]["qwen-0.6b"])),
    "products-8b": ("kernels-h200.json", lambda results: product_table(results["models"]["llama-8b"])),
    "products-0.6b": ("kernels-h200.json", lambda results: product_table(results["models"]["qwen-0.6b"])),
    "draws": ("kernels-h200.json", lambda results: draw_table(results["models"]["llama-8b"])),
}
MARKED = re.compile(r"<!-- (?P<name>[\w.-]+) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)


def fill(text: str) -> str:
    """Return the document with every marked table made anew. Raises SystemExit for an unknown or a missing one."""
    names = [match["name"] for match in MARKED.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise SystemExit(f"{DOCUMENT.name} marks {', '.join(sorted(names))}; there are {', '.join(sorted(TABLES))}")

    def table(match: re.Match[str]) -> str:
        file, make = TABLES[match["name"]]
        return f"<!-- {match['name']} -->\n{make(_read(file))}\n<!-- end -->"

    return MARKED.sub(table, text)


def plots(results: Document) -> dict[str, str]:
    """Draw a comparison. Returns SVG by file name."""
    peer = peer_of(results)
    rows = {row["workload"]: row for row in results["rows"]}
    charts = {}
    for model, title in (("llama-3.1-8b", "Llama-3.1-8B"), ("qwen3-0.6b", "Qwen3-0.6B")):
        batches = [int(name.rpartition(" ")[2]) for name in rows if name.startswith(f"{model} decode")]
        names = [f"{model} decode {batch}" for batch in batches]
        charts[f"decode-{model}.svg"] = line_chart(
            [Series(name, batches, values) for name, values in _three(rows, names, peer)],
            title=f"{title}, one H200: milliseconds per decode step (less is better)",
            x_label="rows in the batch",
            y_label="ms per step",
            logarithmic_x=True,
        )
    lengths = (128, 1024, 8192)
    charts["first-token.svg"] = _bars(
        rows,
        {f"{length:,} tokens": f"llama-3.1-8b first token {length}" for length in lengths},
        peer,
        title="Llama-3.1-8B, one H200: first token of one prompt (less is better)",
        y_label="ms",
    )
    charts["throughput.svg"] = _bars(
        rows,
        {
            "8B prefill": "llama-3.1-8b prefill 16x4096",
            "8B mixed, t=1": "llama-3.1-8b throughput t=1",
            "8B mixed, t=0": "llama-3.1-8b throughput t=0",
            "0.6B, 256 requests": "qwen3-0.6b 256 requests",
            "HTTP, 16": "http c=16 output",
            "HTTP, 128": "http c=128 output",
        },
        peer,
        title="One H200: tokens per second (more is better)",
        y_label="prompt tokens/s of prefill, else output tokens/s",
    )
    for figure, file in (("first token", "serving-first-token.svg"), ("between tokens", "serving-between-tokens.svg")):
        charts[file] = _bars(
            rows,
            {
                f"{concurrency} streams, {share}": f"http c={concurrency} {figure} {share}"
                for concurrency in (16, 128)
                for share in ("p50", "p99")
            },
            peer,
            title=f"Llama-3.1-8B over HTTP, one H200: {figure} (less is better)",
            y_label="ms",
        )
    return charts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; the exit code says whether all is right")
    arguments = parser.parse_args()
    wanted = {DOCUMENT: fill(DOCUMENT.read_text())}
    wanted |= {PLOTS / name: svg for name, svg in plots(_read("compare-h200.json")).items()}
    different = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in different:
            print(
                f"{path.relative_to(ROOT)} is not what the results say: python -m benchmarks.published", file=sys.stderr
            )
        return int(bool(different))
    PLOTS.mkdir(exist_ok=True)
    for path in different:
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


# -- inside ----------------------------------------------------------------------------------------------------------


def _three(rows: dict[str, Document], names: list[str], peer: str) -> list[tuple[str, list[float]]]:
    """Return ours, the peer's, and the floor where there is one; nan where a row has none."""
    floors = [compare.WORKLOADS[name].floor or math.nan for name in names]
    found = [
        ("ours", [rows[name]["ours"] for name in names]),
        (peer, [rows[name]["peer"] or math.nan for name in names]),
    ]
    return [*found, ("what the card allows", floors)] if any(map(math.isfinite, floors)) else found


def _bars(rows: dict[str, Document], groups: dict[str, str], peer: str, *, title: str, y_label: str) -> str:
    """Draw bars. `groups`: what is written below, and the workload."""
    found = {label: name for label, name in groups.items() if name in rows}
    series = [Series(name, [], values) for name, values in _three(rows, list(found.values()), peer)]
    return bar_chart(list(found), series, title=title, y_label=y_label)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in line) + "|" for line in lines)


def _read(name: str) -> Document:
    found: Document = json.loads((RESULTS / name).read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
