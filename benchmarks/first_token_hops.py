"""Where the time of a first token over HTTP goes, hop by hop: from the request's leaving to the arrival of its event.

python -m benchmarks.first_token_hops [--cost small | --shape NAME] [--prompt 256] [--runs 200] [--pause-ms 5]
    [--json FILE] [--section.key VALUE ...]

Starts an engine and an HTTP front end, each with a recorder that notes when functions on the path are entered or left
(a third of a microsecond for each), and sends one request after the other, with pauses, for one token each. `--cost`: a
simulated device that takes as long as this cost model says (benchmarks/http_burst.py). `--shape`: the real executor,
with random weights of this shape, or the embedded model. A hop's time is from the point before it to its own; the
medians of hops do not add up to the median of the whole exactly.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ports import free_port, wait_ready
from benchmarks.shapes import SHAPES, servable_model
from inferengine.bench.environment import write_result
from inferengine.config import parse_flags

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S, START_S = 60.0, 300.0
WARM_UP = 5
FIRST_ID, LAST_ID = 10, 250  # in every vocabulary
FRONT_END_FLAGS = ("--http.workers", "1", "--log.level", "error")  # a worker of several would lack the recorder
Notes = list[tuple[str, float]]


class Point(NamedTuple):
    """A place on the path: the entry of a function, or its end."""

    name: str
    function: str
    at_end: bool = False


# The module of a function must be imported before its name is copied anywhere: methods alone are safe.
FRONT_END = (
    Point("HTTP request read and parsed", "frontends.common.server:HttpProtocol.on_message_complete"),
    Point("application begins", "frontends.http.state:HttpState.served"),
    Point("body read and checked", "frontends.common.generation:RequestOutput.__init__"),
    Point("SUBMIT encoded", "inferengine.client.session:Session.submit", at_end=True),
    Point("STEP received", "inferengine.client.session:Session.receive"),
    Point("event written", "frontends.http.respond:Relay._write"),
)
ENGINE = (
    Point("SUBMIT received", "inferengine.engine.io.connections:Connections.receive"),
    Point("SUBMIT decoded and admitted", "inferengine.engine.loop:EngineLoop.submit"),
    Point("loop's thread awake", "inferengine.engine.loop:EngineLoop._run_command"),
    Point("step begins", "inferengine.engine.core:EngineCore.step"),
    Point("step planned", "inferengine.core.scheduler.scheduler:Scheduler.schedule", at_end=True),
    Point("step launched", "inferengine.executor.torch_executor:TorchExecutor.execute", at_end=True),
    Point("step launched", "inferengine.simulation.simulated_executor:SimulatedExecutor.execute", at_end=True),
    Point("token known", "inferengine.core.scheduler.scheduler:Scheduler.commit"),
    Point("step committed", "inferengine.engine.io.engine_io:EngineIO.post"),
    Point("I/O thread awake", "inferengine.engine.io.publisher:Publisher.publish"),
    Point("STEP encoded", "inferengine.engine.io.engine_io:IOThread.send"),
)
SENT, READ = "request sent", "event read"
_NAMES = [SENT, *(point.name for point in (*FRONT_END[:4], *ENGINE, *FRONT_END[4:])), READ]
PATH = list(dict.fromkeys(_NAMES))  # in the order of the path


class Recorder:
    """Notes when each point of this process is passed."""

    def __init__(self, points: tuple[Point, ...]) -> None:
        self._notes: Notes = []
        for point in points:
            self._watch(point)

    def _watch(self, point: Point) -> None:
        module, _, path = point.function.partition(":")
        if module.startswith("inferengine.executor") and "--cost" in sys.argv:
            return  # no torch where the device is simulated
        class_name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), class_name)
        function, note, name, at_end = getattr(owner, method), self._notes.append, point.name, point.at_end

        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            if not at_end:
                note((name, time.monotonic()))
            try:
                return function(*arguments, **named)
            finally:
                if at_end:
                    note((name, time.monotonic()))

        setattr(owner, method, watched)

    def serve(self, commands: int, answers: int) -> None:
        """Answer each line on a pipe with the notes since the last."""
        for _ in os.fdopen(commands):
            notes = self._notes[:]
            del self._notes[: len(notes)]
            with os.fdopen(os.dup(answers), "wb") as out:
                out.write(json.dumps(notes).encode() + b"\n")


class Recorded:
    """A process of the service and the two pipes to its recorder."""

    def __init__(self, part: str, words: list[str], environment: dict[str, str]) -> None:
        theirs, commands = os.pipe()
        answers, theirs_too = os.pipe()
        command = [
            sys.executable,
            "-m",
            "benchmarks.first_token_hops",
            "--recorded",
            part,
            str(theirs),
            str(theirs_too),
        ]
        self.process = subprocess.Popen(
            [*command, *words], cwd=ROOT, env=environment, pass_fds=(theirs, theirs_too), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(theirs_too)
        self._commands, self._answers = os.fdopen(commands, "w"), os.fdopen(answers)

    def take(self) -> Notes:
        """Return the notes since the last call."""
        self._commands.write("take\n")
        self._commands.flush()
        return [(name, at) for name, at in json.loads(self._answers.readline())]

    def stop(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(TIMEOUT_S)


def run_recorded(part: str, commands: int, answers: int, words: list[str]) -> int:
    """Be an engine or a front end, recorded. Words: of the command line, or `--cost NAME ADDRESS`."""
    recorder = Recorder(FRONT_END if part == "http" else ENGINE)
    threading.Thread(target=recorder.serve, args=(commands, answers), daemon=True).start()
    if words[0] == "--cost":
        from benchmarks.http_burst import run_engine

        run_engine(words[2], words[1], {})
        return 0
    from inferengine.cli.main import main as run

    sys.argv[1:] = [part, *words]
    return run()


def ask(connection: socket.socket, request: bytes) -> tuple[float, float]:
    """Send a request for one streamed token; returns when it was sent and when the token's event was read."""
    sent = time.monotonic()
    connection.sendall(request)
    read, received = 0.0, b""
    while not received.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        if not part:
            raise SystemExit(f"the front end closed the connection: {received!r}")
        received += part
        if not received.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the front end refused: {received!r}")
        if not read and b"data: {" in received:
            read = time.monotonic()
    assert b'"choices"' in received, received
    return sent, read


def hops(sent: float, read: float, notes: Notes) -> list[float] | None:
    """Return the milliseconds of each hop of one request, from the notes of all processes; None where a point is
    missing."""
    times, at = [], sent
    for name in PATH[1:-1]:
        found = min((when for noted, when in notes if noted == name and at <= when <= read), default=None)
        if found is None:
            return None
        times.append(1e3 * (found - at))
        at = found
    return [*times, 1e3 * (read - at)]


def measure(port: int, processes: list[Recorded], length: int, runs: int, pause_s: float) -> list[dict[str, Any]]:
    """Ask `runs` times; returns a row for each hop and one for the whole."""
    rng = random.Random(length)
    rows: list[list[float]] = []
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(-WARM_UP, runs):
            prompt = [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]
            body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            time.sleep(pause_s)
            for process in processes:
                process.take()
            sent, read = ask(connection, f"{head}\r\n\r\n{body}".encode())
            found = hops(sent, read, [note for process in processes for note in process.take()])
            if number >= 0 and found is not None:
                rows.append([*found, 1e3 * (read - sent)])
    return [
        {
            "hop": name,
            "p50_ms": round(statistics.median(times), 3),
            "p90_ms": round(sorted(times)[int(0.9 * (len(times) - 1))], 3),
            "least_ms": round(min(times), 3),
        }
        for name, times in zip([*PATH[1:], "whole"], zip(*rows, strict=True), strict=True)
    ]


def main() -> None:
    if sys.argv[1:2] == ["--recorded"]:
        part, commands, answers, *words = sys.argv[2:]
        raise SystemExit(run_recorded(part, int(commands), int(answers), words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cost", help="a simulated device: small, or a cost model of the simulator")
    device.add_argument("--shape", choices=sorted(SHAPES), default="embedded")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    arguments, words = parser.parse_known_args()
    flags, rest = parse_flags(words)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    with tempfile.TemporaryDirectory() as scratch:
        address, port = f"ipc://{scratch}/engine.sock", free_port()
        if arguments.cost:
            engine = ["--cost", arguments.cost, address]
        else:
            model, load_flags = servable_model(arguments.shape, Path(scratch))
            words = [word for key, value in (flags | load_flags).items() for word in (f"--{key}", value)]
            engine = [model, *words, "--wire.socket", address]
        environment = {**os.environ, "XDG_RUNTIME_DIR": scratch}
        processes = [
            Recorded("engine", engine, environment),
            Recorded("http", ["--wire.socket", address, "--http.port", str(port), *FRONT_END_FLAGS], environment),
        ]
        try:
            wait_ready(port, START_S, is_running=lambda: all(each.process.poll() is None for each in processes))
            rows = measure(port, processes, arguments.prompt, arguments.runs, arguments.pause_ms / 1e3)
        finally:
            for process in reversed(processes):
                process.stop()
    for row in rows:
        print(f"{row['p50_ms']:8.3f} {row['p90_ms']:8.3f} {row['least_ms']:8.3f}  {row['hop']}")
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        write_result(arguments.json, {"benchmark": "first_token_hops", "options": options, "rows": rows})


if __name__ == "__main__":
    main()
