"""The files and functions of a chat are counted once, and what idle ticks enter is told apart."""

from __future__ import annotations

from benchmarks.chat_path import named, report
from inferengine.errors import InferEngineError


def test_a_function_of_two_threads_counts_once() -> None:
    counted = report({"engine": {"loop": {"a.py:1 f"}, "wire": {"a.py:1 f", "b.py:1 g"}}}, {})
    assert (counted["files"], counted["functions"]) == (2, 2)
    assert counted["threads"]["engine wire"] == {"files": 2, "functions": 2}


def test_a_file_in_which_the_chat_calls_only_what_ticks_call_is_told_apart() -> None:
    chat = {"http": {"main": {"a.py:1 tick", "b.py:1 tick", "b.py:9 answer"}}}
    counted = report(chat, {"http": {"main": {"a.py:1 tick", "b.py:1 tick"}}})
    assert (counted["files_without_idle"], counted["functions_without_idle"]) == (1, 1)
    assert counted["files_of_chat_alone"] == 0
    assert counted["entered"]["a.py"] == {"idle_alone": True, "functions": ["tick"]}
    assert counted["entered"]["b.py"] == {"idle_alone": False, "functions": ["answer", "tick"]}


def test_only_functions_of_ours_are_named() -> None:
    (name,) = named({InferEngineError.__init__.__code__, test_only_functions_of_ours_are_named.__code__})
    assert name.startswith("inferengine/errors.py:")
    assert name.endswith(" InferEngineError.__init__")
