"""What `inferengine up` writes: prefixed lines, progress that moves on a terminal and is terse elsewhere."""

from __future__ import annotations

import io
import json

from inferengine.cli.terminal import Terminal, split_share, with_bar


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


def test_json_lines_pass_through_and_everything_else_is_json_too() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, json_lines=True)
    terminal.line("engine", '{"message": "hello"}')
    terminal.notice("stopping")
    terminal.status("engine", "loading 1 %")
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"message": "hello"},
        {"source": "up", "message": "stopping"},
        {"source": "engine", "status": "loading 1 %"},
    ]


def test_a_share_is_told_from_its_phase() -> None:
    assert split_share("loading weights 40 %") == ("loading weights", 40)
    assert split_share("warming up") == ("warming up", None)
    assert split_share("huge 400 %") == ("huge", 100)
    assert with_bar("loading 50 %").count("█") == with_bar("loading 50 %").count("░")
