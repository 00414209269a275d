"""What `inferengine up` writes: prefixed lines, progress that moves on a terminal and is terse elsewhere."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime

from inferengine.cli.terminal import LiveLine, Terminal, cut_to_width, split_share, with_bar


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_file_each_phase_and_quarter_is_one_line() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    for share in range(0, 101, 5):
        terminal.status("engine", f"loading weights {share} %")
    terminal.status("engine", "warming up")
    shares = [line.rpartition("weights ")[2] for line in stream.getvalue().splitlines()]
    assert shares[:-1] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert shares[-1] == "engine | warming up"


def test_in_a_file_a_status_that_the_child_has_just_written_is_not_repeated() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.line("ws", "2026-01-01 12:00:00 info listening on 127.0.0.1 port 8001")
    terminal.status("ws", "listening on 127.0.0.1 port 8001")
    terminal.status("http", "listening on 127.0.0.1 port 8001")
    assert [line[:4] for line in stream.getvalue().splitlines()] == ["ws  ", "http"]


def test_on_a_terminal_progress_is_one_line_below_the_others() -> None:
    screen = Screen()
    terminal = Terminal(screen)
    terminal.status("engine", "loading weights 50 %")
    terminal.line("http", "listening")
    assert screen.getvalue().endswith("50 %")
    assert screen.getvalue().index("listening") < screen.getvalue().rindex("50 %")
    terminal.end_progress()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_json_lines_pass_through_and_everything_else_is_json_with_its_time() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, json_lines=True)
    terminal.line("engine", '{"message": "hello"}')
    terminal.notice("stopping")
    terminal.status("engine", "loading 1 %")
    terminal.block("\nReady after 4.5 s.\n  HTTP  http://127.0.0.1:8000\n")
    hello, *own = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert hello == {"message": "hello"}
    times = [datetime.fromisoformat(line.pop("time")) for line in own]
    assert all(time.tzinfo is UTC for time in times)
    assert own == [
        {"level": "info", "source": "up", "message": "stopping"},
        {"level": "info", "source": "engine", "status": "loading 1 %"},
        {"level": "info", "source": "up", "message": "Ready after 4.5 s.\n  HTTP  http://127.0.0.1:8000"},
    ]


def test_in_a_file_messages_of_the_supervisor_have_their_time() -> None:
    stream = io.StringIO()
    Terminal(stream).notice("engine is ready again")
    found = re.fullmatch(r"up     \| (.+) engine is ready again\n", stream.getvalue())
    assert found
    assert datetime.fromisoformat(found[1])


def test_a_share_is_told_from_its_phase() -> None:
    assert split_share("loading weights 40 %") == ("loading weights", 40)
    assert split_share("warming up") == ("warming up", None)
    assert split_share("huge 400 %") == ("huge", 100)
    assert with_bar("loading 50 %").count("█") == with_bar("loading 50 %").count("░")


def test_a_start_is_shown_at_once_and_counts_with_an_estimate_until_it_is_ready() -> None:
    now = [10.0]
    screen = Screen()
    terminal = Terminal(screen, usual_s=4.0, clock=lambda: now[0])
    terminal.begin("starting the-model")
    assert "starting the-model" in screen.getvalue()
    terminal.status("engine", "loading weights 50 %")
    now[0] = 11.0
    assert terminal.retry(), "the supervisor comes again to move the line"
    assert screen.getvalue().endswith("50 %  1.0 s, about 3 s left")
    terminal.status("http", "listening")
    assert screen.getvalue().endswith("about 3 s left"), "the line is about what takes longest"
    now[0] = 15.0
    terminal.retry()
    assert screen.getvalue().endswith("5.0 s, usually 4 s")
    terminal.block("Ready")
    assert not terminal.retry()


def test_a_live_line_moves_on_a_terminal_and_tells_quarters_elsewhere() -> None:
    screen, file = Screen(), io.StringIO()
    for line in (LiveLine(screen), LiveLine(file)):
        for share in range(0, 101, 5):
            line.show(f"fetching x: {share} MB {share} %")
    assert screen.getvalue().count("\n") == 0
    assert len(file.getvalue().splitlines()) == 5


def test_a_line_is_cut_where_the_terminal_ends() -> None:
    assert cut_to_width("x" * 100, 80) == "x" * 78 + "…"
    assert cut_to_width("short", 80) == "short"
