"""benchmarks/two_cards.py: jobs in order within their time, what is kept of them, and the commands that they run."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import two_cards
from benchmarks.two_cards import Job, Runner
from inferengine.bench.compare import OTHER_BYTES, Need
from inferengine.cli.bench import _need

CARDS = {"H100": 81_559, "H200": 143_771}  # MiB


def job(name: str, program: str, usual_s: float = 0.1, limit_s: float = 30.0) -> Job:
    return Job(name, [sys.executable, "-c", program, "{json}"], usual_s, limit_s)


@pytest.fixture(autouse=True)
def no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_cards, "memory_mib", lambda what: [])


def run(out: Path, jobs: list[Job], total_s: float = 120.0) -> dict[str, Any]:
    Runner(out / "out" / "two-cards.json", out / "logs", total_s + two_cards.END_S, time.monotonic()).run(
        jobs, {"card_mib": []}
    )
    document: dict[str, Any] = json.loads((out / "out" / "two-cards.json").read_text())
    return document


WRITES = "import json, sys; json.dump({'benchmark': 'serve', 'streams': 64}, open(sys.argv[1], 'w')); print('said')"


def test_what_a_job_finds_is_kept_with_its_command_and_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, [job("one", WRITES), job("two", "raise SystemExit('out of luck')")])
    assert list(found["jobs"]) == ["one", "two"]
    one, two = found["jobs"].values()
    assert (one["exit"], one["result"]["streams"]) == (0, 64)
    assert (two["exit"], two["result"]) == (1, None)
    assert found["environment"]["revision"]
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        assert archive.getnames() == ["one.log", "two.log"]
    printed = capsys.readouterr().out
    assert "streams: 64" in printed
    assert "| out of luck" in printed, "the end of what a job said that failed"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"two-cards.json", "logs.tar.gz"}


def compares(side: str, step_ms: float) -> str:
    row = {"model": "8b", "workload": "decode 1", "unit": "ms per step", side: step_ms}
    return f"import json, sys; json.dump({ {'benchmark': 'compare', 'rows': [row]} }, open(sys.argv[1], 'w'))"


def test_sides_that_two_jobs_measure_are_joined(tmp_path: Path) -> None:
    found = run(
        tmp_path, [job("8b", compares("ours", 2.0)), job("8b-peer", compares("peer", 3.0)), job("http", WRITES)]
    )
    expected = {"model": "8b", "workload": "decode 1", "unit": "ms per step", "ours": 2.0, "peer": 3.0, "ratio": 1.5}
    assert found["rows"] == [expected]


def test_a_job_that_hangs_ends_at_its_limit_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes no notice of Ctrl-C, either."""
    monkeypatch.setattr(two_cards, "END_S", 0.5)
    pid = tmp_path / "pid"
    program = f"""
import pathlib, signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
time.sleep(60)
"""
    begin = time.monotonic()
    found = run(tmp_path, [job("hangs", program, limit_s=3.0), job("next", WRITES)])
    assert time.monotonic() - begin < 40
    assert found["jobs"]["hangs"]["exit"] == "no end after 3 s"
    assert found["jobs"]["next"]["exit"] == 0
    status = Path(f"/proc/{pid.read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_could_hardly_end_in_time_is_left_out(tmp_path: Path) -> None:
    found = run(tmp_path, [job("long", WRITES, usual_s=900.0), job("short", WRITES)], total_s=60.0)
    assert found["jobs"]["long"] == {"exit": "left out"}
    assert found["jobs"]["short"]["exit"] == 0


@pytest.mark.parametrize("card", CARDS)
def test_a_job_fits_the_cards(card: str, tmp_path: Path) -> None:
    """Weights of a 70B leave little of an 80 GB card: both sides then get the same small room."""
    known = two_cards.jobs(tmp_path, card_mib=CARDS[card], peer=[], losses=10, services=5)
    by_name = {each.name: each for each in known}
    assert all(each.usual_s < each.limit_s for each in known)
    ours, peer = by_name["70b"].command, by_name["70b-peer"].command
    assert ours[ours.index("--context") :] == peer[peer.index("--context") :]
    assert ("--kv-tokens" in ours) == (card == "H100")
    seventy = two_cards.SHAPES["llama-3.1-70b"]
    assert seventy["hidden_size"] == 8192
    if "--kv-tokens" in ours:
        tokens = int(ours[ours.index("--kv-tokens") + 1])
        assert tokens >= 128 * (128 + 192) + 128 * 16, "128 sequences of the decode load, in blocks"
        assert fits(_need(tmp_path / "llama-3.1-70b", tokens, 2), CARDS[card])
    eight = _need(tmp_path / "llama-3.1-8b", 212_992, 2)
    words = by_name["8b"].command
    assert 2 * eight.whole <= int(words[words.index("--card-gib") + 1]) << 30, "both sides load together"


def fits(need: Need, card_mib: int) -> bool:
    """Return whether weights and cache leave 5 GiB for activations, graphs and exchanges."""
    return need.whole - OTHER_BYTES + (5 << 30) <= card_mib << 20


def test_the_losses_are_shared_among_services(tmp_path: Path) -> None:
    known = two_cards.jobs(tmp_path, card_mib=80_000, peer=["--peer-path", "/peer"], losses=10, services=5)
    words = next(each for each in known if each.name == "losses").command
    assert words[words.index("--ranks") + 1] == "10"
    assert words[words.index("--services") + 1] == "5"
    assert "--cache.num_blocks" in words, "each service by itself would take the whole card"
    assert [each.name for each in known if "/peer" in each.command] == ["8b", "70b-peer", "32b-peer"]
