"""`inferengine simulate`: flags, the configuration's keys, files written, errors that name the option."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from inferengine.bench import plots
from inferengine.cli import simulate
from inferengine.errors import ConfigError


def test_a_run_prints_the_table_and_writes_json_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = simulate.run(
        ["--requests", "60", "--rate=30", "--engines", "2", "--fail", "0.5:1:0.3", "--json", str(tmp_path / "r.json"),
         "--plots", str(tmp_path / "plots"), "--scheduler.policy", "shortest", "--engine.max_num_seqs", "4"]
    )  # fmt: skip
    assert code == 0
    assert "60 submitted" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["requests"]["submitted"] == 60
    assert report["engine"]["failures"] == 1
    assert report["engine"]["max_batch"] <= 4
    assert report["simulation"]["arguments"]["rate"] == 30.0
    for name in ("latency", "timeline", "cache"):
        root = ElementTree.parse(tmp_path / "plots" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")


def test_a_recorded_trace_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"timestamp": 10, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    path = tmp_path / "trace.jsonl"
    path.write_text(2 * (json.dumps(line) + "\n"))
    assert simulate.run(["--trace", str(path)]) == 0
    assert "2 submitted, 2 finished" in capsys.readouterr().out


def test_two_devices_that_share_the_model_are_faster_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*words: str) -> float:
        assert simulate.run(["--requests", "20", "--rate", "20", "--json", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        return float(report["latency_ms"]["end_to_end"]["mean"])

    one, two = seconds(), seconds("--tensor-parallel", "2")
    assert one / 2 < two < one
    assert seconds("--engine.tensor_parallel", "2") == two


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "fast"], "--rate"),
        (["--rate", "-1"], "--rate"),
        (["--requests", "0"], "--requests"),
        (["--requests"], "--requests"),
        (["--choice", "best"], "--choice"),
        (["--fail", "3"], "--fail"),
        (["--fail", "3:9"], "--fail"),
        (["--fail", "nan:0"], "--fail"),
        (["--fail", "1:0:inf"], "--fail"),
        (["--cost", "nothing"], "--cost"),
        (["--tensor-parallel", "4"], "--tensor-parallel"),
        (["--trace", "nowhere.jsonl"], "--trace"),
        (["--prompt-tokens", "many"], "--prompt-tokens"),
        (["--request", "5"], "--request"),
        (["--scheduler.policy", "best"], "scheduler.policy"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        simulate.run(words)


def test_every_option_of_the_help_exists_and_is_in_the_help() -> None:
    text = simulate.run.help("simulate")
    assert [
        option.spec for group in simulate.OPTIONS.values() for option in group if f"  {option.spec}" not in text
    ] == []


SVG = "{http://www.w3.org/2000/svg}"


def chart_texts(chart: str) -> list[str | None]:
    return [node.text for node in ElementTree.fromstring(chart).iter(f"{SVG}text")]


def line_points(chart: str, color: str) -> list[tuple[float, float]]:
    """Return the points of the line of this color, in pixels."""
    paths = ElementTree.fromstring(chart).iter(f"{SVG}path")
    longest = max(
        (node for node in paths if f"stroke: {color}" in node.attrib["style"]), key=lambda n: len(n.attrib["d"])
    )
    words = longest.attrib["d"].replace("M", " ").replace("L", " ").split()
    return list(zip(map(float, words[::2]), map(float, words[1::2]), strict=True))


def test_charts_place_points_on_their_axes_and_escape_names() -> None:
    line = plots.Series("a < b", [0.0, 5.0, 10.0], [0.0, 1.0, 4.0])
    chart = plots.line_chart([line], title="t & u", x_label="x", y_label="y")
    points = line_points(chart, plots.COLORS[0])
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.01)
    assert points[0][1] - points[2][1] == pytest.approx(4 * (points[0][1] - points[1][1]), abs=0.01)
    assert {"a < b", "t & u", "x", "y"} <= set(chart_texts(chart))


def test_the_same_data_gives_the_same_bytes() -> None:
    def draw() -> str:
        return plots.line_chart([plots.Series("a", [1.0, 2.0], [3.0, 4.0])], title="t", x_label="x", y_label="y")

    assert draw() == draw()


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm() -> None:
    line = plots.Series("x", [0.0, 1.0, 10.0, 100.0], [0.0, 1.0, 2.0, 3.0])
    chart = plots.line_chart([line], title="", x_label="", y_label="", logarithmic_x=True)
    xs = [x for x, _ in line_points(chart, plots.COLORS[0])]
    assert len(xs) == 3
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def test_bars_are_as_high_as_their_values() -> None:
    series = plots.Series("s", [], [1.0, 2.0, float("nan")])
    chart = plots.bar_chart(["one", "two", "three"], [series], title="", y_label="")
    bars = [
        node.attrib["d"].replace("M", " ").replace("L", " ").replace("z", " ").split()
        for node in ElementTree.fromstring(chart).iter(f"{SVG}path")
        if f"fill: {plots.COLORS[0]}" in node.attrib.get("style", "") and "clip-path" in node.attrib
    ]
    heights = [max(map(float, words[1::2])) - min(map(float, words[1::2])) for words in bars]
    assert heights == [pytest.approx(heights[0]), pytest.approx(2 * heights[0])]


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"inferengine\[plots\]"):
        simulate.run(["--requests", "5", "--plots", "unused"])


def test_a_cumulative_curve_ends_at_one_however_much_it_is_thinned() -> None:
    curve = plots.cumulative("x", [float(i) for i in range(10_000)], points=50)
    assert len(curve.xs) <= 52
    assert (curve.xs[-1], curve.ys[-1]) == (9999.0, 1.0)
    assert plots.cumulative("x", []).xs == []
