"""A connection that asks and reads nothing: what waits for it takes bounded memory."""

from __future__ import annotations

import re
import time
from pathlib import Path

import zmq

from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.engine_io import IOThread
from inferengine.engine.io.publisher import MAX_BACKLOG_BYTES, Connection, SendResult
from inferengine.engine.lifecycle import Lifecycle
from inferengine.wire import messages
from inferengine.wire.messages import Ping
from tests.engine.builders import make_config, wait_until

MIB = 1024 * 1024
ANSWERS = 400


def test_the_files_of_a_model_wait_in_a_pipe_once_however_often_they_are_asked_for(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    thread = IOThread(Endpoint(config), Lifecycle(engine="e", epoch=bytes(8), clock=time.monotonic))
    file = b"\x01" * MIB
    sent: list[SendResult] = []

    def answer(frames: list[bytes], now: float) -> None:
        sent.extend(thread.send(frames[0], [b"header", b"body", file]) for _ in range(ANSWERS))

    thread.start(answer, lambda now: now + 3600.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVHWM, 1)  # the rest stays with the engine
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(config.wire.socket)
    before = _resident_mb()
    reader.send_multipart(messages.encode(Ping(1)))
    wait_until(lambda: len(sent) == ANSWERS, 60.0)
    grown = _resident_mb() - before
    reader.close(0)
    context.term()
    thread.stop()
    assert set(sent) == {SendResult.OK}
    assert grown < ANSWERS // 4


def test_a_connection_is_dropped_when_too_many_bytes_of_answers_wait_for_it() -> None:
    connection = Connection(b"p", lambda routing_id, frames: SendResult.FULL, window=4, now=0.0)
    for _ in range(MAX_BACKLOG_BYTES // MIB):
        connection.answer([bytes(MIB)], 0.0)
    assert not connection.overflowed
    connection.answer([b"x"], 0.0)
    assert connection.overflowed


def test_answers_that_went_out_wait_no_more() -> None:
    results = [SendResult.FULL]
    connection = Connection(b"p", lambda routing_id, frames: results[-1], window=4, now=0.0)
    connection.answer([bytes(MAX_BACKLOG_BYTES)], 0.0)
    results.append(SendResult.OK)
    connection.flush_backlog(0.0)
    results.append(SendResult.FULL)
    connection.answer([bytes(MAX_BACKLOG_BYTES)], 0.0)
    assert not connection.overflowed


def _resident_mb() -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024
