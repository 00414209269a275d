"""A client that goes away frees what it held, in every phase."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from tests.frontends.http.builders import House, house, ids, open_request, says, wait_until
from tests.frontends.scripted_engine import Script

LONG = "the quick brown fox " * 50


def hang_up(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize(
    "script",
    [
        Script(ids(LONG), accept=False, stop_after=0),  # no answer of the engine yet
        Script(ids(LONG), stop_after=0),  # accepted, waiting or in prefill: no token yet
        Script(ids(LONG), pause_s=0.01),  # decode
        Script(ids(LONG), stop_after=5),  # decode, and the engine is silent now
    ],
    ids=["submitted", "queued", "decode", "stalled"],
)
def test_the_request_is_cancelled(served: House, script: Script, stream: bool, reset: bool) -> None:
    served.script = lambda submit, choice: script
    with open_request(served.front.port, "/v1/completions", prompt="say", stream=stream, max_tokens=400) as connection:
        wait_until(lambda: served.engine.num_running == 1)
        if stream and script.accept and script.stop_after != 0:
            assert connection.recv(1)
        hang_up(connection, reset=reset)
        wait_until(lambda: served.engine.submits[0].id in served.engine.cancelled)
        wait_until(lambda: served.front.service.num_calls == 0)
        assert served.engine.num_running == 0


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_a_request_with_another_behind_it_is_cancelled(served: House, stream: bool) -> None:
    served.script = lambda submit, choice: Script(ids(LONG), stop_after=5)
    with open_request(served.front.port, "/v1/completions", prompt="say", stream=stream) as connection:
        wait_until(lambda: served.engine.num_running == 1)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.1)  # it is read by itself, long after the first request
        connection.close()
        wait_until(lambda: served.engine.cancelled)
        wait_until(lambda: served.front.service.num_calls == 0)


def test_all_choices_are_cancelled(served: House) -> None:
    served.script = says(LONG, pause_s=0.01)
    body = {"prompt": ["say", "fox"], "n": 2, "temperature": 1.0, "max_tokens": 400}
    with open_request(served.front.port, "/v1/completions", **body) as connection:
        wait_until(lambda: served.engine.num_running == 4)
        connection.close()
        wait_until(lambda: served.engine.num_running == 0)
        assert len(served.engine.cancelled) == 4


def test_a_client_that_leaves_before_its_body_costs_nothing(served: House) -> None:
    connection = socket.create_connection(("127.0.0.1", served.front.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert served.complete()["choices"]
    assert len(served.engine.submits) == 1


def test_a_request_over_its_time_ends_with_504() -> None:
    with house(http={"request_timeout_s": 0.2}) as built:
        built.script = lambda submit, choice: Script(ids("fox"), reason="error", detail=["deadline_exceeded", "late"])
        response = built.post("/v1/completions", prompt="say")
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert built.engine.submits[0].deadline_ms == 200


def test_an_engine_that_ignores_the_deadline_does_not_hold_the_client() -> None:
    with house(running=False, http={"request_timeout_s": 0.1}) as built:
        built.engine.lease_s = 60.0  # it is there all the time, however slow this machine is
        built.start_engine()
        built.script = lambda submit, choice: Script(ids("fox"), stop_after=0)
        response = built.post("/v1/completions", prompt="say")
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(lambda: built.engine.cancelled)
