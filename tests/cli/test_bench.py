"""`inferengine bench` against a small server: what it sends, what it writes, what it refuses."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from inferengine.cli import main as cli
from inferengine.cli.bench import Progress, arrivals, batch, load_options, paired, pressure, run, sweep
from inferengine.errors import ConfigError, ExitCode
from tests.bench.servers import WORDS, serving


@pytest.mark.parametrize(
    "loop", [["--concurrency", "3"], ["--rate", "500", "--burstiness", "0.5"]], ids=["closed", "open"]
)
def test_a_load_is_measured_and_written(loop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    words = ["--requests", "8", "--input", "5", "--output", "2:4", "--goodput", "ttft:60000", "e2e:60000"]
    with serving() as server:
        assert cli.main(["bench", "--url", server.url, *loop, *words, "--json", str(file)]) == ExitCode.OK
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"], found["model"]) == (8, 0, "fake")
    assert (found["output_tokens"], found["prompt_tokens"]) == (8 * WORDS, 8 * 7)
    assert all(found[name]["p99"] > 0 for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    assert found["goodput_per_s"] == found["requests_per_s"]
    assert len(server.bodies) == 8 + 2, "and two before the clock started"
    assert all(len(body["prompt"].split()) == 5 and 2 <= body["max_tokens"] <= 4 for body in server.bodies)
    shown = capsys.readouterr().out
    assert "8 completed, 0 failed" in shown
    assert "first token" in shown


def test_chat_is_asked_below_an_address_that_ends_in_v1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        words = ["--url", f"{server.url}/v1/", "--chat", "--requests", "2", "--warm-up", "0", "--json", "-"]
        assert cli.main(["bench", *words]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2 * WORDS
    assert server.paths == ["/v1/chat/completions"] * 2


def test_a_server_that_closes_after_each_body_is_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.is_chunked = False
        assert cli.main(["bench", "--url", server.url, "--requests", "6", "--concurrency", "2"]) == ExitCode.OK
    assert "6 completed, 0 failed" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["bench", "--url", url, "--model", "any"]) == ExitCode.CRASH
    complaint = capsys.readouterr().err
    assert f"no server answers at {url}" in complaint
    assert "start one there, or name its address with --url" in complaint


def test_a_missing_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.api_key = "ie_of_this_test"
        assert cli.main(["bench", "--url", server.url, "--api-key", "wrong"]) == ExitCode.CRASH
        assert "--api-key" in capsys.readouterr().err
        words = ["--url", server.url, "--api-key", "ie_of_this_test", "--requests", "1", "--json", "-"]
        assert cli.main(["bench", *words]) == ExitCode.OK
    assert "ie_of_this_test" not in capsys.readouterr().out, "a report does not tell the key"


def test_a_server_without_a_list_needs_a_named_model(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.lists_models = False
        assert cli.main(["bench", "--url", server.url]) == ExitCode.CRASH
        assert "a model with --model" in capsys.readouterr().err
        assert cli.main(["bench", "--url", server.url, "--model", "mine", "--requests", "1"]) == ExitCode.OK
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_a_load_of_which_nothing_completed_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.refuses = True
        assert cli.main(["bench", "--url", server.url, "--requests", "3"]) == ExitCode.CRASH
    assert "3 times: 503" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--urll", "x"], "--urll: no such option; did you mean --url?"),
        (["--http.port", "1"], "--http.port: no such option"),
        (["--url", "localhost:8000"], "is not like http://host:8000"),
        (["--requests"], "--requests: a value must follow"),
        (["--requests", "0"], "--requests: must be at least 1"),
        (["--concurrency", "two"], "--concurrency: must be a whole number"),
        (["--rate", "inf"], "--rate: must be neither negative nor infinite"),
        (["--input", "9:3"], "--input: '9:3' is not like"),
        (["--output", "lognormal:5"], "--output: 'lognormal:5' is not like"),
        (["--prompt", "tokens"], "--prompt: must be text or ids"),
        (["--goodput", "itl:5"], "--goodput: 'itl' is none of ttft, tpot, e2e"),
        (["--goodput", "ttft"], "--goodput: 'ttft' is not like ttft:500"),
        (["--api-key", "a\r\nb"], "--api-key: must be one line"),
    ],
)
def test_a_mistake_names_the_option(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_options(run.parse(words))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("series", "flag"),
    [
        (sweep, "--concurrency"), (sweep, "--rate"), (arrivals, "--rate"), (pressure, "--concurrency"),
        (pressure, "--rate"), (batch, "--requests"), (batch, "--rate"), (paired, "--url"),
    ],
)  # fmt: skip
def test_what_a_series_decides_by_itself_is_refused_not_ignored(series: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: no such option"):
        series.parse([flag, "3"])


def test_the_same_seed_asks_for_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "4", "--warm-up", "0", "--concurrency", "1", "--prompt", "ids", "--input", "lognormal:9:0.5"]
    with serving() as server:
        for seed in ("1", "1", "2"):
            assert cli.main(["bench", "--url", server.url, *words, "--seed", seed]) == ExitCode.OK
    first, second, other = (server.bodies[start : start + 4] for start in (0, 4, 8))
    assert first == second != other


def test_a_bar_is_drawn_on_a_terminal_alone() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, pipe = Screen(), io.StringIO()
    for stream in (screen, pipe):
        progress = Progress(stream, 4)
        progress.step()
        progress.clear()
    assert "1 of 4 requests" in screen.getvalue()
    assert "25 %" in screen.getvalue()
    assert pipe.getvalue() == ""
