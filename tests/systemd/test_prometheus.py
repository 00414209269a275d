"""Alert rules and the dashboard's queries, evaluated by Prometheus' own promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "systemd"
LABELS = 'engine="e",model_name="m"'

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (package prometheus)")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)


def queries() -> dict[str, str]:
    """Return, by panel and number, the dashboard's queries with its variables filled in."""
    dashboard = json.loads((FOLDER / "grafana" / "inferengine.json").read_text())
    return {
        f"{panel['title']} {number}": target["expr"]
        .replace("$__rate_interval", "5m")
        .replace("$model", ".*")
        # Grafana writes .* where a variable stands for all
        .replace("$engine", ".*")
        for panel in dashboard["panels"]
        for number, target in enumerate(panel.get("targets", ()))
    }


def test_the_rules_are_valid_and_pass_their_tests() -> None:
    folder = FOLDER / "prometheus"
    for ran in (
        promtool("check", "rules", folder / "alerts.yml"),
        promtool("test", "rules", folder / "alerts_test.yml"),
    ):
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_rule_that_is_about_silence_is_tested_loud_and_quiet() -> None:
    tests = yaml.safe_load((FOLDER / "prometheus" / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for name in ("InferEngineUnreachable", "InferEngineNotScraped", "InferEngineDown", "InferEngineFrozen"):
        assert {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name} == {True, False}, name


def test_two_front_ends_that_show_one_engine_do_not_double_its_figures(tmp_path: Path) -> None:
    """Every query about engines gives the same number from two front ends as from one."""
    about_engines = {name: query for name, query in queries().items() if "model_name" in query}
    assert len(about_engines) > 30
    series = {
        found for query in about_engines.values() for found in re.findall(r"([a-z][a-z0-9_:]*)\{model_name", query)
    }

    def input_series(instance: str) -> list[dict[str, str]]:
        lines = []
        for name in sorted(series):
            # `le` in two steps: quantiles lie between them
            for extra in ('le="1"', 'le="+Inf"') if name.endswith("_bucket") else ('phase="decode"',):
                labels = f'{LABELS},instance="{instance}",gpu="0",finished_reason="stop",reason="overloaded",{extra}'
                lines.append({"series": f"{name}{{{labels}}}", "values": "0+15x80" if "+Inf" in extra else "0+10x80"})
        return lines

    def evaluate(instances: str) -> str:
        tests = [
            {
                "interval": "15s",
                "input_series": [line for instance in instances for line in input_series(instance)],
                "promql_expr_test": [
                    {"expr": query, "eval_time": "15m", "exp_samples": []} for query in about_engines.values()
                ],
            }
        ]
        file = tmp_path / f"{instances}.yml"
        file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": tests}))
        ran = promtool("test", "rules", file)  # nothing is expected, so that it prints what there is
        return ran.stdout + ran.stderr

    one, two = evaluate("a"), evaluate("ab")
    assert one.count("got:") == len(about_engines)
    assert one == two.replace("ab.yml", "a.yml")
