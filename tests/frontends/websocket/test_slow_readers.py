"""A reader that is slower than the engine: its frames grow, its memory does not, and nobody else waits."""

from __future__ import annotations

import socket

from tests.frontends.websocket.builders import Reading, make_engine, open_socket, serving, wait_until

LONG = "all work and no play makes jack a dull boy. " * 60


def test_unacknowledged_frames_stop_at_the_window(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        client.send(type="hello", window=4)
        assert client.until("window") == {"type": "window", "window": 4}
        client.generate()
        engine.wait_for(lambda: len(engine.submits) == 1 and engine.num_running == 0)
        reading, num_frames = Reading(), 0
        while not reading.ended:
            frame = client.until("accepted", "delta", "done")
            reading.take(frame)
            if frame["type"] == "accepted":
                continue
            num_frames += 1
            if num_frames == 4:
                client.send(type="ping", nonce="end of the window")
                # no fifth frame before an acknowledgement
                assert client.until("pong", "delta", "done")["type"] == "pong"
                client.send(type="ack", frames=4)
    assert reading.text[0] == LONG
    assert num_frames <= 7  # the rest came merged


def test_the_window_holds_over_all_requests_of_a_socket(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        client.send(type="hello", window=6)
        for number in range(12):
            client.generate(f"r{number}")
        engine.wait_for(lambda: len(engine.submits) == 12 and engine.num_running == 0)
        for _ in range(6):
            client.until("delta", "done")
        client.send(type="ping", nonce=1)
        assert client.until("delta", "done", "pong")["type"] == "pong"


def test_a_window_larger_than_allowed_is_reduced(tmp_path):
    with (
        make_engine(tmp_path) as engine,
        serving(engine, ws={"send_queue_messages": 8}) as server,
        open_socket(server) as client,
    ):
        assert client.hello["limits"]["window"] == 8
        client.send(type="hello", window=1000)
        assert client.until("window")["window"] == 8


def test_a_reader_that_never_acknowledges_is_closed_and_its_requests_end(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG * 20) as engine,
        serving(engine, wire={"stall_limit_s": 0.3}) as server,
        open_socket(server) as client,
    ):
        client.send(type="hello", window=2)
        client.generate()
        assert client.until("error")["error"]["code"] == "client_stalled"
        engine.wait_for(lambda: engine.cancelled == [engine.submits[0].id])
        wait_until(lambda: server.front_end.num_requests == 0)


def test_a_socket_that_reads_nothing_holds_no_memory_and_delays_no_other(tmp_path):
    """It does not even acknowledge: the transport's own buffer is the brake."""
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG) as engine,
        serving(engine) as server,
        socket.create_connection(("127.0.0.1", server.port)) as raw,
    ):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
        with open_socket(server, sock=raw, max_queue=1) as frozen, open_socket(server) as lively:
            for number in range(40):
                frozen.generate(f"r{number}", return_token_ids=True)
            engine.wait_for(lambda: len(engine.submits) == 40 and engine.num_running == 0, 20)
            wait_until(lambda: server.is_blocked)
            lively.generate("mine")
            assert lively.read("mine")["mine"].text[0] == LONG
            readings = frozen.read(*(f"r{number}" for number in range(40)))
        assert {reading.text[0] for reading in readings.values()} == {LONG}
