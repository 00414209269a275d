"""docs/performance.md says what the committed results say, and a comparison is joined as it claims."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import compare, published

RESULTS = json.loads((published.RESULTS / "compare-h200.json").read_text())


def test_every_table_is_what_its_results_say() -> None:
    text = published.DOCUMENT.read_text()
    assert published.fill(text) == text, "run python -m benchmarks.published"


def test_every_plot_is_what_its_results_say() -> None:
    for name, svg in published.plots(RESULTS).items():
        assert (published.PLOTS / name).read_text() == svg, "run python -m benchmarks.published"
        assert f"(plots/{name})" in published.DOCUMENT.read_text()


def test_a_figure_that_was_edited_by_hand_is_made_right() -> None:
    text = published.DOCUMENT.read_text()
    edited = text.replace("| 3.95 |", "| 3.15 |")
    assert edited != text
    assert published.fill(edited) == text


def test_a_table_that_was_left_out_is_missed() -> None:
    text = published.DOCUMENT.read_text().replace("<!-- draws -->", "")
    with pytest.raises(SystemExit, match="draws"):
        published.fill(text)


def test_the_peers_worse_figures_are_not_left_out() -> None:
    """Every row of the results is in the table, whoever was faster."""
    worse = {**RESULTS["rows"][0], "workload": "slower here", "ratio": 0.5}
    table = published.comparison({**RESULTS, "rows": [*RESULTS["rows"], worse]})
    assert [row["workload"] in table for row in RESULTS["rows"]] == [True] * len(RESULTS["rows"])
    assert "slower here" in table
    assert "0.5" in table


def test_plots_show_both_sides_and_the_floor() -> None:
    svg = published.plots(RESULTS)["decode-llama-3.1-8b.svg"]
    names = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours", "vLLM", "what the card allows"} <= set(names)


def test_rows_are_joined_by_workload_with_their_ratio_and_share_of_the_floor(tmp_path: Path) -> None:
    ours, peer = tmp_path / "ours.jsonl", tmp_path / "peer.jsonl"
    trace = {"available": False, "why": "not available"}
    where = compare.environment({"available": True, "devices": [{"name": "NVIDIA H200"}]})
    assert where["device"] == "NVIDIA H200"
    rows = [
        {"environment": where},
        {"workload": "llama-3.1-8b decode 1", "value": 4.0, "unit": "ms per step", "gpu": trace},
        {"workload": "llama-3.1-8b throughput t=0", "value": 9000.0, "unit": "output tokens/s"},
        {"workload": "load and warm-up", "value": 3.0, "unit": "s"},
    ]
    ours.write_text("\n".join(map(json.dumps, rows)))
    peer.write_text(json.dumps({"workload": "llama-3.1-8b decode 1", "value": 5.0, "unit": "ms per step"}) + "\n")
    document = compare.report(ours, peer, "vLLM 0.26.0")
    assert (document["peer"], document["environment"], document["peer_environment"]) == ("vLLM 0.26.0", where, {})
    decode, throughput = document["rows"]
    assert (decode["ratio"], decode["floor_share"], decode["gpu_ours"]) == (1.25, 0.845, trace)
    assert (throughput["ours"], throughput["peer"]) == (9000.0, None)
    assert "ratio" not in throughput
    assert "gpu_peer" not in decode
