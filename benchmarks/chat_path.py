"""Which of our files and functions one streamed chat runs through, from the HTTP front end to the model and back.

python -m benchmarks.chat_path [--tokens 8] [--json FILE]

Starts an engine with the embedded model and an HTTP front end, each with a profile function in all of its threads that
notes the code of every call while a switch is on. After a first chat it is on twice: for three seconds of an idle
service, then for one chat over Server-Sent Events, from before its request to `[DONE]`. Counted are files and functions
of `inferengine/` and `frontends/`; comprehensions and generator expressions belong to the function around them.

How many ticks of the service fall into the chat differs from run to run. So two more numbers leave them out: files and
functions without the functions that an idle service calls, and files that an idle service does not enter at all. A file
that idle ticks alone enter is one in which the chat called nothing that an idle service does not call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.ports import free_port, wait_ready
from inferengine.bench.environment import write_result

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("inferengine", "frontends")
TIMEOUT_S = 120.0
SETTLE_S = 1.0  # after the first chat, for what follows its end
IDLE_S = 3.0
Calls = dict[str, set[str]]  # thread's name: "FILE:LINE FUNCTION"


class Recorder:
    """Notes each call of this process while it is on."""

    def __init__(self) -> None:
        self._on = False
        self._codes: dict[str, set[CodeType]] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Be the profile function of a thread."""
        if self._on and event == "call":
            self._codes.setdefault(threading.current_thread().name, set()).add(frame.f_code)

    def serve(self, commands: int, answers: int) -> None:
        """Follow `on` and `off` on a pipe; the answer to `off` is the calls since `on`."""
        for line in os.fdopen(commands):
            self._on = line == "on\n"
            noted: dict[str, list[str]] = {}
            if not self._on:
                noted = {thread: named(codes) for thread, codes in self._codes.items()}
                self._codes = {}
            os.write(answers, json.dumps(noted).encode() + b"\n")


def named(codes: set[CodeType]) -> list[str]:
    """Name the functions of ours among these codes: file, line and qualified name."""
    found = set()
    for code in list(codes):
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PARTS:
            if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
                continue
            found.add(f"{path.relative_to(ROOT)}:{code.co_firstlineno} {code.co_qualname}")
    return sorted(found)


def run_recorded(commands: int, answers: int, words: list[str]) -> int:
    """Be the command `inferengine WORDS`, recorded."""
    recorder = Recorder()
    threading.Thread(target=recorder.serve, args=(commands, answers), daemon=True).start()
    threading.setprofile(recorder.note)
    sys.setprofile(recorder.note)
    from inferengine.cli.main import main as run

    sys.argv[1:] = words
    return run()


class Recorded:
    """A process of the service and the two pipes to its recorder."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        theirs, commands = os.pipe()
        answers, theirs_too = os.pipe()
        command = [sys.executable, "-m", "benchmarks.chat_path", "--recorded", str(theirs), str(theirs_too), *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=(theirs, theirs_too), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(theirs_too)
        self._commands = os.fdopen(commands, "w")
        self._answers = os.fdopen(answers)

    def switch(self, word: str) -> Calls:
        """Send `on` or `off`; returns the calls by thread."""
        self._commands.write(word + "\n")
        self._commands.flush()
        return {thread: set(calls) for thread, calls in json.loads(self._answers.readline()).items()}

    def stop(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(TIMEOUT_S)


def measure(num_tokens: int) -> dict[str, Any]:
    """Start the service, record an idle while and one chat, and stop it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        processes = {
            "engine": Recorded(["engine"], environment),
            "http": Recorded(["http", "--http.port", str(port), "--http.workers", "1"], environment),
        }
        try:
            wait_ready(
                port, TIMEOUT_S, is_running=lambda: all(each.process.poll() is None for each in processes.values())
            )
            _chat(port, num_tokens)
            time.sleep(SETTLE_S)
            idle = _recorded(processes, lambda: time.sleep(IDLE_S))
            chat = _recorded(processes, lambda: _chat(port, num_tokens))
        finally:
            for process in processes.values():
                process.stop()
    return report(chat, idle)


def report(chat: dict[str, Calls], idle: dict[str, Calls]) -> dict[str, Any]:
    """Count the files and functions that a chat entered, and those among them that an idle service enters too."""
    functions = {call for calls in chat.values() for found in calls.values() for call in found}
    idle_functions = {call for calls in idle.values() for found in calls.values() for call in found}
    files = _files(functions)
    own = _files(functions - idle_functions)
    return {
        "files": len(files),
        "functions": len(functions),
        "files_without_idle": len(own),
        "functions_without_idle": len(functions - idle_functions),
        "files_of_chat_alone": len(files - _files(idle_functions)),
        "threads": {
            f"{place} {thread}": {"files": len(_files(calls)), "functions": len(calls)}
            for place, found in chat.items()
            for thread, calls in sorted(found.items())
            if calls
        },
        "entered": {
            path: {
                "idle_alone": path not in own,
                "functions": sorted(call.partition(" ")[2] for call in functions if call.startswith(path + ":")),
            }
            for path in sorted(files)
        },
    }


def lines(results: dict[str, Any]) -> list[str]:
    """Return lines for people: each file with the number of its functions, then the totals."""
    shown = [
        f"{len(found['functions']):>5}  {path}{'  (idle ticks alone)' if found['idle_alone'] else ''}"
        for path, found in results["entered"].items()
    ]
    for thread, counts in results["threads"].items():
        shown.append(f"{thread}: {counts['files']} files, {counts['functions']} functions")
    shown.append(f"total: {results['files']} files, {results['functions']} functions")
    without = f"{results['files_without_idle']} files, {results['functions_without_idle']} functions"
    shown.append(f"without the functions that an idle service calls too: {without}")
    return [*shown, f"without the files that an idle service enters too: {results['files_of_chat_alone']} files"]


def main() -> int:
    if sys.argv[1:2] == ["--recorded"]:
        return run_recorded(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="length of the answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.tokens)
    print("\n".join(lines(results)))
    if arguments.json:
        write_result(arguments.json, {"benchmark": "chat_path", "tokens": arguments.tokens, **results})
    return 0


# -- inside ----------------------------------------------------------------------------------------------------------


def _files(calls: set[str]) -> set[str]:
    return {call.partition(":")[0] for call in calls}


def _recorded(processes: dict[str, Recorded], run: Callable[[], None]) -> dict[str, Calls]:
    for process in processes.values():
        process.switch("on")
    run()
    return {name: process.switch("off") for name, process in processes.items()}


def _chat(port: int, num_tokens: int) -> None:
    """Stream one answer of exactly this many tokens, to its end."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        if not answer.read().endswith(b"data: [DONE]\n\n"):
            raise SystemExit("the chat did not end with [DONE]")


if __name__ == "__main__":
    sys.exit(main())
