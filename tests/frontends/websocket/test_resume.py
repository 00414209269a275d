"""A client that lost its connection gets exactly the text it had not seen, whoever serves it then."""

from __future__ import annotations

import random

import pytest

from frontends.websocket import socket_request
from tests.frontends.websocket.builders import (
    Reading,
    make_engine,
    model_files,
    open_socket,
    serving,
    wait_until,
)

TEXT = "The quick brown fox 🎉 jumps over 你好 the lazy dog. " * 4


def take_some(client, reading, num_frames):
    """Take at most so many frames: tokens that a slow machine merged come in fewer frames."""
    for _ in range(num_frames):
        reading.take(client.until("accepted", "delta", "done"))
        if reading.ended:
            return


def resume(client, reading, **rest):
    accepted = reading.accepted
    cursors = [reading.cursors.get(choice, 0) for choice in range(accepted["n"])]
    client.send(
        type="resume", id="again", request_id=accepted["request_id"], cursors=cursors,
        context_ids=accepted["context_ids"], **rest,
    )  # fmt: skip
    while not reading.ended:
        frame = client.until("accepted", "delta", "done", "error")
        if not (frame.get("type") == "done" and frame["choice"] in reading.done):
            reading.take(frame)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("seed", range(4))
def test_a_dropped_connection_loses_and_repeats_nothing(tmp_path, kind, seed, monkeypatch):
    generator = random.Random(seed)
    if seed % 2:  # the output before the cursor is read in several pieces
        monkeypatch.setattr(socket_request, "MOST_AS_TEXT", 3)
    with (
        make_engine(tmp_path, lambda prompt, choice: TEXT, files=model_files(kind)) as engine,
        serving(engine) as server,
    ):
        reading = Reading()
        with open_socket(server) as client:
            client.generate("r1", "the quick", detached=True)
            take_some(client, reading, generator.randint(1, 60))
            client.drop()
        with open_socket(server) as client:
            resume(client, reading)
        with open_socket(server) as client:
            client.generate("whole", "the quick")
            whole = client.read("whole")["whole"]
    assert reading.text == whole.text
    assert reading.done[0]["usage"] == whole.done[0]["usage"]
    assert len(engine.submits) == 2


def test_frames_lost_in_flight_are_sent_again(tmp_path):
    """The server had sent more than the client handled."""
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine, serving(engine) as server:
        reading = Reading()
        engine.hold()
        with open_socket(server) as client:
            client.generate("r1", detached=True)
            engine.release(20)
            take_some(client, reading, 2)
            engine.release()
            engine.wait_for(lambda: engine.num_running == 0)
            client.drop()
        assert not reading.ended
        with open_socket(server) as client:
            resume(client, reading)
    assert reading.text[0] == TEXT


def test_accepted_says_whether_the_request_existed_before(tmp_path):
    """The same front end has it, so that the engine is not asked again."""
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine, serving(engine) as server:
        engine.hold()
        with open_socket(server) as client:
            client.generate("r1", detached=True, request_id="ab" * 16)
            assert client.until("accepted")["attached"] is False
            client.drop()
        for again in ({"type": "resume"}, {"type": "generate", "prompt": "the quick"}):
            with open_socket(server) as client:
                client.send(id="again", request_id="ab" * 16, detached=True, **again)
                assert client.until("accepted", "error")["attached"] is True
                client.drop()
        engine.release()
    assert len(engine.submits) == 1


def test_another_front_end_resumes_after_the_first_one_died(tmp_path):
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine:
        reading = Reading()
        engine.hold()
        with serving(engine) as server, open_socket(server) as client:
            client.generate("r1", detached=True)
            engine.release(20)
            take_some(client, reading, 8)
        engine.release()
        with serving(engine) as server, open_socket(server) as client:
            resume(client, reading)
        assert reading.text[0] == TEXT
        assert len(engine.submits) == len(engine.attached) == 1


def test_choices_are_resumed_each_from_its_own_cursor(tmp_path):
    with make_engine(tmp_path, lambda prompt, choice: TEXT[choice * 40 :]) as engine, serving(engine) as server:
        reading = Reading()
        with open_socket(server) as client:
            client.generate("r1", detached=True, params={"n": 3, "temperature": 1})
            take_some(client, reading, 40)
            client.drop()
        with open_socket(server) as client:
            resume(client, reading)
    assert reading.text == {choice: TEXT[choice * 40 :] for choice in range(3)}


def test_a_resume_waits_for_a_restarted_front_end_to_connect(tmp_path):
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine:
        reading = Reading()
        with serving(engine) as server, open_socket(server) as client:
            client.generate("r1", detached=True)
            take_some(client, reading, 5)
            client.drop()
        with serving(f"ipc://{tmp_path}/later.sock") as server, open_socket(server) as client:
            client.send(type="ping", nonce=1)
            client.until("pong")
            accepted = reading.accepted
            client.send(type="resume", id="r1", request_id=accepted["request_id"], cursors=[reading.cursors[0]])
            client.send(type="ping", nonce=2)
            assert client.until("pong", "error")["type"] == "pong"
            (tmp_path / "later.sock").symlink_to(tmp_path / "engine.sock")
            while not reading.ended:
                reading.take(client.until("accepted", "delta", "done", "error"))
    assert reading.text[0] == TEXT


def test_a_stop_string_across_the_cursor_still_ends_the_answer(tmp_path):
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine, serving(engine) as server:
        reading = Reading()
        engine.hold()
        with open_socket(server) as client:
            client.generate("r1", detached=True, params={"stop": ["the lazy dog"]})
            engine.release(len(engine.tokenizer.encode(TEXT[: TEXT.index("lazy") + 2], False)))
            while "over" not in reading.text.get(0, ""):
                take_some(client, reading, 1)
            client.drop()
        engine.release()
        with open_socket(server) as client:
            resume(client, reading, params={"stop": ["the lazy dog"]})
    assert reading.text[0] == TEXT[: TEXT.index("the lazy dog")]
    assert reading.done[0]["stop"] == "the lazy dog"


def test_a_finished_answer_can_be_read_again_within_the_window(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server:
        with open_socket(server) as client:
            client.generate("r1", detached=True)
            whole = client.read("r1")["r1"]
        fresh = Reading()
        fresh.accepted = whole.accepted
        with open_socket(server) as client:
            resume(client, fresh)
    assert fresh.text == whole.text


def test_two_sockets_may_read_one_request(tmp_path):
    with make_engine(tmp_path, lambda prompt, choice: TEXT) as engine, serving(engine) as server:
        first, second = Reading(), Reading()
        with open_socket(server) as one, open_socket(server) as two:
            one.generate("r1", detached=True)
            take_some(one, first, 6)
            second.accepted = first.accepted
            resume(two, second)
            while not first.ended:
                take_some(one, first, 1)
    assert first.text == second.text == {0: TEXT}


def test_a_request_not_resumed_within_the_window_is_cancelled(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine, wire={"resume_ttl_s": 0.3}) as server:
        engine.hold()
        with open_socket(server) as client:
            client.generate("r1", detached=True)
            client.until("accepted")
        engine.wait_for(lambda: engine.cancelled == [engine.submits[0].id])


def test_an_unknown_request_is_refused_with_its_field(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.send(type="resume", id="r1", request_id="ab" * 16, cursors=[3])
        frame = client.until("error")
        assert (frame["id"], frame["error"]["code"]) == ("r1", "not_found")


def test_a_cursor_beyond_the_end_is_refused_with_its_field(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate("r1", detached=True)
        accepted = client.read("r1")["r1"].accepted
        client.send(type="resume", id="r2", request_id=accepted["request_id"], cursors=[100_000])
        error = client.until("error")["error"]
        assert (error["code"], error["field"]) == ("invalid_request", "cursors")


def test_a_restarted_engine_ends_with_engine_restarted(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        engine.hold()
        client.generate("r1", detached=True)
        engine.release(5)
        client.until("delta")
        engine.restart()
        error = client.until("error")["error"]
        assert (error["code"], error["retryable"]) == ("engine_restarted", True)
        engine.release()
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        client.generate("r2")
        assert client.read("r2")["r2"].done[0]["finish_reason"] == "stop"


def test_a_request_without_output_survives_a_restarted_engine(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: TEXT) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        engine.hold()
        client.generate()
        client.until("accepted")
        engine.restart()
        engine.wait_for(lambda: len(engine.submits) == 2)
        engine.release()
        reading = Reading()
        while not reading.done:
            reading.take(client.until("accepted", "delta", "done"))
        assert reading.text[0] == TEXT
