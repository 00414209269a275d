"""Figures in documents are those of the results, which say what they were measured with; runs name what exists."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import SHAPES
from inferengine.bench import compare, environment, evidence, suites
from inferengine.bench.services import PeerPlace
from inferengine.cli import main as cli
from inferengine.errors import ExitCode, InferEngineError

RESULTS: dict[str, dict[str, Any]] = {
    "r.json": {
        "environment": {"revision": "abc", "date": "2026-11-23"},
        "rows": [{"name": "two words", "rate": 41492.39, "share": 0.1249}, {"name": "other", "rate": 2.5}],
    }
}


def complaints(text: str) -> list[str]:
    return evidence.problems_of_document("d.md", text, RESULTS)


def test_every_result_and_every_document_of_this_checkout_is_right() -> None:
    assert evidence.problems() == [], "inferengine evidence --write"


@pytest.mark.parametrize(
    "text",
    [
        "41,492 <!-- figure: r.json rows/0/rate -->",
        "| 41,492.4 / 2.50 <!-- figure: r.json rows/0/rate rows/1/rate --> | 2.5 <!-- figure: r.json rows/1/rate --> |",
        "of 3 runs 12.5 % <!-- figure: r.json rows/name=two+words/share *100 -->",
        "2,500 us <!-- figure: r.json rows/name=other/rate *1000 -->",
    ],
)
def test_a_figure_that_is_its_results_rounded_is_right(text: str) -> None:
    assert complaints(text) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("41,493 <!-- figure: r.json rows/0/rate -->", "41,493 is 41,492 in r.json at rows/0/rate"),
        ("2.51 <!-- figure: r.json rows/1/rate -->", "2.51 is 2.50"),
        ("2.5 <!-- figure: gone.json rows/1/rate -->", "no benchmarks/results/gone.json"),
        ("2.5 <!-- figure: r.json rows/7/rate -->", "has no number at rows/7/rate"),
        ("2.5 <!-- figure: r.json rows/name=third/rate -->", "0 entries have name=third"),
        ("other <!-- figure: r.json rows/1/name -->", "1 paths and 0 numbers"),
        ("7 <!-- figure: r.json rows/1/name -->", "is no number"),
    ],
)
def test_a_figure_that_differs_is_named_with_its_line(text: str, complaint: str) -> None:
    (found,) = complaints(f"# Title\n{text}\n")
    assert found.startswith("d.md:2: ")
    assert complaint in found


def test_numbers_are_corrected_where_they_are() -> None:
    text = (
        "of 9 runs 1 / 2.00 <!-- figure: r.json rows/0/rate rows/1/rate -->, 7,1 <!-- figure: r.json rows/0/rate -->\n"
    )
    right = text.replace("1 / 2.00", "41492 / 2.50").replace("7,1", "41,492")
    assert evidence.corrected(text, RESULTS) == right
    assert complaints(right) == []


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("# Speed\nIt makes 300 tokens/s.\n", False),
        ("# Speed\nIt makes 300 tokens/s (`benchmarks/results/r.json`).\n", True),
        ("# Speed\nIt made 300 tokens/s once; no raw\nfile was kept.\n", True),
        ("# Limits\nAfter 250 ms it gives up. <!-- no measurement -->\n", True),
        ("# Speed\n<!-- table -->\n| 3 ms |\n<!-- end -->\n", True),
        ("# Speed\n300 tokens/s\n# Other\n`benchmarks/results/r.json`\n", False),
    ],
)
def test_a_section_with_measured_figures_names_their_source(text: str, is_right: bool) -> None:
    assert (complaints(text) == []) == is_right


@pytest.mark.parametrize("key", ["revision", "date", "command", "seed"])
def test_a_result_that_does_not_say_how_it_was_measured_is_found(key: str) -> None:
    about = {"revision": "abc", "date": "2026", "command": "bench", "seed": None}
    assert evidence.problems_of_results({"r.json": {"environment": about}}) == []
    del about[key]
    assert evidence.problems_of_results({"r.json": {"environment": about}}) == [
        f"benchmarks/results/r.json has no environment.{key}"
    ]


def test_a_result_from_before_commands_were_written_says_so() -> None:
    about = {"revision": "abc", "date": "2026", "recorded": "the run wrote no revision"}
    assert evidence.problems_of_results({"r.json": {"environment": about}}) == []


def test_the_index_keeps_its_ages_and_lists_every_result() -> None:
    page = evidence.index(RESULTS, lambda name, revision: "**old**, 300 commits")
    assert "[r.json](../../benchmarks/results/r.json) |  | 2026-11-23 | abc | **old**, 300 commits |" in page
    assert evidence.index(RESULTS, evidence.known_ages(page)) == page


def test_a_revision_that_was_rebased_away_is_as_old_as_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        ran = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    def commit(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        git("add", "-A")
        git("commit", "-q", "-m", name)
        return git("rev-parse", "--short=12", "HEAD")

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git("init", "-q")
    first = commit("inferengine/one.py")
    commit("benchmarks/results/r.json")
    commit("inferengine/two.py")
    commit("inferengine/three.py")
    assert evidence.age("r.json", f"{first}-dirty") == "2 commits"
    assert evidence.age("r.json", "0123456789ab") == "2 commits"
    assert evidence.age("absent.json", "0123456789ab") == "unknown"


def test_a_machine_runs_what_it_can_and_names_are_checked() -> None:
    for devices in ([], ["NVIDIA H200"], ["NVIDIA H100", "NVIDIA H100"]):
        assert max(run.cards for run in evidence.possible_runs([], devices)) == len(devices)
    assert [run.name for run in evidence.possible_runs(["kernels"], [])] == ["kernels"]
    with pytest.raises(InferEngineError, match="'nothing' is none of s1"):
        evidence.possible_runs(["nothing"], [])


@pytest.mark.parametrize("run", evidence.RUNS, ids=lambda run: run.name)
def test_a_run_is_of_a_program_that_exists_and_writes_json(run: evidence.Run) -> None:
    words = shlex.split(run.command)
    assert (environment.ROOT / words[0]).is_file() or importlib.util.find_spec(words[0]) is not None
    assert "{json}" in words
    assert ("{url}" in words) == (run.service is not None)
    assert ("{theirs}" in words) == (run.theirs is not None)
    texts = " ".join([run.command, run.service or "", run.theirs or ""])
    assert set(re.findall(r"{shapes}/(\S+)", texts)) == set(run.shapes) <= set(SHAPES)
    assert ("{peer}" in texts or run.theirs is not None) == ("vllm" in run.packages or run.name == "two-cards")


@pytest.mark.parametrize(
    "run", [run for run in evidence.RUNS if run.command.startswith("inferengine.cli")], ids=lambda run: run.name
)
def test_a_run_of_the_command_line_has_options_that_it_knows(run: evidence.Run) -> None:
    places = dict.fromkeys(("json", "plots", "folder", "shapes", "url", "theirs"), "x")
    words = shlex.split(run.command.format(**places, peer="--peer-python p --peer-path q"))[1:]
    split = 2 if " ".join(words[:2]) in cli.COMMANDS else 1
    entry = cli.COMMANDS[" ".join(words[:split])]
    command = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
    values = command.parse(words[split:]).values
    assert set(values.get("features", "").split(",")) <= {*suites.FEATURES, ""}
    assert set(values.get("workloads", "").split(",")) <= {*compare.WORKLOADS, ""}


def test_a_run_whose_package_is_not_installed_is_left_out_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (evidence.Run("here", "json.tool", packages=("json",)), evidence.Run("not", "x", packages=("no_such",)))
    monkeypatch.setattr(evidence, "RUNS", runs)
    assert [run.name for run in evidence.possible_runs([], [])] == ["here"]
    assert [run.name for run in evidence.possible_runs(["not"], [])] == ["not"]


def test_a_result_is_named_after_the_card_or_the_cores() -> None:
    names = ["NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA GeForce RTX 4090"]
    assert [evidence.machine_name([name]) for name in names] == ["h100", "t4", "4090"]
    assert evidence.machine_name([]).startswith("cpu")


class TestRunning:
    """`evidence.run_all` on programs that are made for it, in a checkout of their own."""

    @pytest.fixture(autouse=True)
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(evidence, "ROOT", tmp_path)
        monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "plots")
        (tmp_path / "scripts").mkdir()
        (tmp_path / "out").mkdir()
        return tmp_path

    @pytest.fixture
    def run(self, checkout: Path) -> Callable[..., tuple[evidence.RunsReport, list[str]]]:
        def run(*runs: evidence.Run, **options: Any) -> tuple[evidence.RunsReport, list[str]]:
            said: list[str] = []
            outcome = evidence.run_all(runs, "cpu2", checkout / "out", said.append, **options)
            return outcome, [line.partition(" after")[0] for line in said if ": begun" not in line]

        return run

    @staticmethod
    def program(checkout: Path, name: str, text: str, **options: Any) -> evidence.Run:
        header = "import os, pathlib, sys, time\njson = pathlib.Path(sys.argv[1])\n"
        (checkout / "scripts" / name).write_text(header + text)
        return evidence.Run(name, f"scripts/{name} {{json}}", **options)

    def test_a_result_is_written_and_what_failed_is_named_and_leaves_a_log(self, checkout: Path, run: Any) -> None:
        good = self.program(checkout, "good", "json.write_text('{}')")
        bad = self.program(checkout, "bad", "sys.exit('no card')")
        outcome, said = run(good, bad)
        assert outcome == (["bad"], [])
        assert said == ["good: done", "bad: exit code 1"]
        assert (checkout / "out" / "good-cpu2.json").exists()
        assert [path.name for path in checkout.glob("out/*.log")] == ["bad-cpu2.log"]
        assert (checkout / "out" / "bad-cpu2.log").read_text() == "no card\n"

    def test_a_run_is_ended_at_its_limit_with_what_it_started(self, checkout: Path, run: Any) -> None:
        text = "import fcntl\nfile = json.open('w')\nfcntl.flock(file, fcntl.LOCK_EX)\nos.fork()\ntime.sleep(600)"
        outcome, said = run(self.program(checkout, "endless", text, limit_s=1.0))
        assert outcome == (["endless"], [])
        assert said == ["endless: ended, its limit was 1 s"]
        with (checkout / "out" / "endless-cpu2.json").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of the last process that holds it
        assert (checkout / "out" / "endless-cpu2.log").exists()

    def test_a_run_gets_the_models_it_names_and_where_the_peer_is(self, checkout: Path, run: Any) -> None:
        (checkout / "benchmarks").symlink_to(environment.ROOT / "benchmarks")
        text = "json.write_text(repr([(pathlib.Path(sys.argv[2]) / 'config.json').exists(), *sys.argv[3:]]))"
        command = "scripts/shaped {json} {shapes}/embedded {peer}"
        shaped = self.program(checkout, "shaped", text, shapes=("embedded",))._replace(command=command)
        assert run(shaped, peer=PeerPlace(path="/the peer"))[0] == ([], [])
        assert (checkout / "out" / "shaped-cpu2.json").read_text() == "[True, '--peer-path', '/the peer']"

    def test_runs_that_are_not_timed_are_side_by_side_after_the_others(self, checkout: Path, run: Any) -> None:
        text = (
            "folder = json.parent\nassert (folder / 'timed-cpu2.json').exists()\njson.write_text('{}')\n"
            "while len(list(folder.glob('side*.json'))) < 2: time.sleep(0.01)\n"
        )
        sides = [self.program(checkout, f"side{number}", text, is_timed=False, limit_s=60.0) for number in (1, 2)]
        timed = self.program(checkout, "timed", "assert not list(json.parent.glob('*.json'))\njson.write_text('{}')")
        assert run(*sides, timed)[0] == ([], [])

    def test_two_cards_work_at_once_and_then_together(
        self, checkout: Path, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evidence, "visible_cards", lambda: ["3", "5"])
        both = "while len(list(json.parent.glob('*.begun'))) < 2: time.sleep(0.01)\n"
        text = "card = os.environ['CUDA_VISIBLE_DEVICES']\njson.with_suffix('.begun').touch()\n" + both
        timed = self.program(checkout, "timed", text + "json.write_text(card)", cards=1, limit_s=60.0)
        soak = self.program(checkout, "soak", text + "json.write_text(card)", cards=1, limit_s=60.0, is_timed=False)
        text = "assert len(list(json.parent.glob('*-cpu2.json'))) == 2\njson.write_text('')"
        ranks = self.program(checkout, "ranks", text, cards=2)
        assert run(ranks, timed, soak)[0] == ([], [])
        assert [(checkout / "out" / f"{name}-cpu2.json").read_text() for name in ("timed", "soak")] == ["3", "5"]

    def test_none_begins_that_could_end_too_late(self, checkout: Path, run: Any) -> None:
        text = "json.write_text('{}')"
        runs = [
            self.program(checkout, "long", text, limit_s=70.0),
            self.program(checkout, "short", text, limit_s=30.0),
            self.program(checkout, "side", text, limit_s=40.0, is_timed=False),
        ]
        outcome, said = run(*runs, seconds=100.0)
        assert outcome == ([], ["long"])
        assert said == ["long: not begun, it may take 70 s and 60 s are left", "short: done", "side: done"]

    def test_resuming_skips_what_has_a_result_of_this_revision(
        self, checkout: Path, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evidence, "revision", lambda: "abc")
        runs = [self.program(checkout, name, "json.write_text('{}')") for name in ("this", "other", "broken", "none")]
        for name, content in {"this": "abc", "other": "abd"}.items():
            text = f'{{"environment": {{"revision": "{content}"}}}}'
            (checkout / "out" / f"{name}-cpu2.json").write_text(text)
        (checkout / "out" / "broken-cpu2.json").write_text("{")
        assert run(*runs, resume=True)[1] == [
            "this: has a result of this revision",
            "other: done",
            "broken: done",
            "none: done",
        ]


def test_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(evidence, "problems", lambda: ["this one"])
    assert cli.main(["evidence", "--check"]) == ExitCode.CRASH
    assert capsys.readouterr().out == "this one\n"
