"""Standard output of a service: a full disk, a reader that is gone or asleep cost lines, never the service."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from inferengine.process import stdio
from inferengine.process.stdio import MOST_WAITING_BYTES, NonBlockingStream
from tests.engine.builders import wait_until

ROOT = Path(__file__).parents[2]


def read_all(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    found = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 1 << 20):
            found += chunk
    return found


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_lines_go_out_as_they_are_written(pipe: tuple[int, int]) -> None:
    stream = NonBlockingStream(pipe[1])
    print("one", file=stream)
    print("two", "three", file=stream)
    assert read_all(pipe[0]) == b"one\ntwo three\n"


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_is_written_on_when_somebody_does(pipe: tuple[int, int]) -> None:
    stream = NonBlockingStream(pipe[1])
    lines = [f"line {number} {'x' * 100}\n" for number in range(1500)]  # more than the pipe, less than what waits
    writing = threading.Thread(target=lambda: [stream.write(line) for line in lines], daemon=True)
    writing.start()
    writing.join(20)
    assert not writing.is_alive()
    assert stream.waits
    found = b""
    while stream.waits:
        found += read_all(pipe[0])
        stream.flush()
    assert (found + read_all(pipe[0])).decode() == "".join(lines)
    assert stream.num_lost == 0


def test_what_waits_is_bounded_and_the_rest_is_counted(pipe: tuple[int, int]) -> None:
    stream = NonBlockingStream(pipe[1])
    line, count = "x" * 1023 + "\n", 2 * MOST_WAITING_BYTES // 1024
    for _ in range(count):
        stream.write(line)
    found = b""
    while stream.waits:
        found += read_all(pipe[0])
        stream.flush()
    found += read_all(pipe[0])
    assert found.count(b"x\n") + stream.num_lost == count
    assert f"inferengine: {stream.num_lost} lines of this log could not be written: nobody reads it\n".encode() in found


def test_a_reader_that_is_gone_raises_nothing(pipe: tuple[int, int]) -> None:
    stream = NonBlockingStream(pipe[1])
    os.close(pipe[0])
    print("to nobody", file=stream)
    assert (stream.waits, stream.num_lost) == (False, 1)


def test_after_a_full_disk_it_goes_on_and_says_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for half of a line."""
    path = tmp_path / "log"
    write, room = os.write, 13

    def full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    with path.open("wb") as file:
        stream = NonBlockingStream(file.fileno())
        stream.json_lines = False
        monkeypatch.setattr(os, "write", full)
        for name in ("first", "second", "third"):
            print(name, "line", file=stream)
        monkeypatch.undo()
        print("fourth line", file=stream)
    lost = "inferengine: 2 lines of this log could not be written: No space left on device"
    assert path.read_text() == f"first line\nse\n{lost}\nfourth line\n"


def test_the_json_line_about_lost_lines_has_its_time(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream = NonBlockingStream(pipe[1])
    stream.json_lines = True
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        print('{"message": "lost"}', file=stream)
    print('{"message": "kept"}', file=stream)
    about, kept = (json.loads(line) for line in read_all(pipe[0]).splitlines())
    assert kept == {"message": "kept"}
    assert (about["level"], about["lost_lines"]) == ("warning", 1)
    assert datetime.fromisoformat(about["time"]).tzinfo is UTC


def test_streams_that_somebody_replaced_are_left_alone() -> None:
    before = sys.stdout, sys.stderr  # pytest's
    stdio.protect()
    assert (sys.stdout, sys.stderr) == before


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="ie-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def service(place: Path, command: str, stdout: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `inferengine COMMAND` with the embedded model and its output where the test wants it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "inferengine.cli", command, "--speculation.method", "none", *flags],
        cwd=ROOT,
        env={**os.environ, "INFERENGINE_WIRE_SOCKET": f"ipc://{place}/engine.sock"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stdout,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def up(place: Path, stdout: int):  # type: ignore[no-untyped-def]
    flags = ["--http.uds", str(place / "http.sock"), "--ws.port", "0", "--log.level", "debug"]
    return service(place, "up", stdout, *flags)


def ready_on(path: Path) -> bool:
    command = [
        "curl",
        "-s",
        "-m",
        "5",
        "--unix-socket",
        str(path),
        "http://localhost/ready",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
    ]
    return subprocess.run(command, capture_output=True, text=True).stdout == "200"


@pytest.mark.parametrize("kind", ["full disk", "no reader", "sleeping reader"])
def test_up_becomes_ready_and_stays_whatever_becomes_of_its_output(place: Path, kind: str) -> None:
    reader, writer = os.pipe()
    if kind == "full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    elif kind == "no reader":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, b"x" * 4096):
                pass
        os.set_blocking(writer, True)
    with up(place, writer) as process:
        os.close(writer)
        wait_until(lambda: ready_on(place / "http.sock"), 90.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_an_engine_whose_log_cannot_be_written_serves(place: Path) -> None:
    from inferengine.client import Client

    full = os.open("/dev/full", os.O_WRONLY)
    with service(place, "engine", full) as process:
        os.close(full)
        with contextlib.closing(Client(f"ipc://{place}/engine.sock")) as client:
            client.connect(90.0)
            client.wait_ready(90.0)
        assert process.poll() is None
