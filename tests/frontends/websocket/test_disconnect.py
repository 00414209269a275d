"""Cancelling and leaving in every phase: the engine is free of it, and what is told is told once."""

from __future__ import annotations

import pytest

from tests.frontends.websocket.builders import ANSWER, make_engine, open_socket, serving

LONG = ANSWER * 50


def bring_to(phase, engine, client):
    """Bring one request to the named phase."""
    engine.hold()
    if phase == "queued":
        engine.accepting = False
    client.generate("r1")
    if phase == "queued":
        engine.wait_for(lambda: len(engine.submits) == 1)
        return
    client.until("accepted")
    if phase == "decode":
        engine.release(10)
        client.until("delta")


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_socket_that_closes_frees_the_engine(tmp_path, phase):
    with make_engine(tmp_path, lambda prompt, choice: LONG) as engine, serving(engine) as server:
        with open_socket(server) as client:
            bring_to(phase, engine, client)
            client.drop()
        engine.accepting = True
        engine.wait_for(lambda: engine.cancelled == [engine.submits[0].id])


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancel_ends_the_answer_as_cancelled(tmp_path, phase):
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        bring_to(phase, engine, client)
        client.send(type="cancel", id="r1")
        engine.accepting = True
        done = client.until("done", id="r1")
        assert done["finish_reason"] == "cancelled"
        client.send(type="ping", nonce=1)
        assert client.next()["type"] == "pong"  # nothing more of the request


def test_a_cancel_right_after_its_request_works(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: LONG) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        engine.hold()
        client.generate("r1", "word " * 600)
        client.send(type="cancel", id="r1")
        assert client.until("done", "error")["finish_reason"] == "cancelled"
        assert engine.num_running == 0


def test_cancelling_an_unknown_id_is_ignored(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.send(type="cancel", id="nothing")
        client.generate()
        assert client.read("r1")["r1"].text == {0: ANSWER}


def test_cancelling_one_request_does_not_affect_the_others(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        engine.hold()
        for name in ("kept", "dropped"):
            client.generate(name)
            client.until("accepted", id=name)
        client.send(type="cancel", id="dropped")
        client.until("done", id="dropped")
        engine.release()
        assert client.until("done", id="kept")["finish_reason"] == "stop"


def test_a_detached_request_runs_on_without_its_socket(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server:
        engine.hold()
        with open_socket(server) as client:
            client.generate(detached=True)
            client.until("accepted")
        engine.release()
        engine.wait_for(lambda: engine.num_running == 0)
        assert engine.cancelled == []


def test_a_lost_engine_ends_requests_without_resubmit_with_a_retryable_error(tmp_path):
    with (
        make_engine(tmp_path, lease_s=1.0) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        engine.hold()
        client.generate(resubmit=False)
        client.until("accepted")
        engine.__exit__()
        while client.until("state")["engine"]["state"] != "UNAVAILABLE":
            continue
        frame = client.until("error")
        assert frame["id"] == "r1"
        assert (frame["error"]["code"], frame["error"]["retryable"]) == ("engine_unavailable", True)


def test_without_an_engine_a_request_is_answered_at_once(tmp_path):
    with serving(f"ipc://{tmp_path}/nobody.sock") as server, open_socket(server) as client:
        assert client.hello["engine"]["state"] == "UNAVAILABLE"
        assert client.hello["model"] is None
        client.generate()
        assert client.next()["error"]["code"] == "engine_unavailable"
