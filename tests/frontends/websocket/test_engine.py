"""The front end on the real engine service: real scheduler, cache and wire, with a simulated device."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.engine.builders import address_of, check_idle, make_card, run_service
from tests.frontends.websocket.builders import Reading, open_socket, serving, wait_until

STEP_S = 0.004


@pytest.fixture
def engine():
    with run_service(step_s=STEP_S) as engine:
        yield engine


@pytest.fixture
def server(engine):
    with serving(address_of(engine)) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        yield server


def test_sixty_four_requests_on_one_socket_free_everything(engine, server):
    with open_socket(server) as client:
        names = [f"r{number}" for number in range(64)]
        for name in names:
            client.generate(name, f"the quick brown fox {name}", params={"max_tokens": 20})
        readings = client.read(*names)
        assert {reading.done[0]["finish_reason"] for reading in readings.values()} == {"length"}
        assert {reading.done[0]["usage"]["completion_tokens"] for reading in readings.values()} == {20}
    check_idle(engine)


@pytest.mark.parametrize("phase", ["just sent", "accepted", "decode"])
@pytest.mark.parametrize("way", ["cancel", "drop"])
def test_disconnecting_in_any_phase_frees_every_block(engine, server, phase, way):
    with open_socket(server) as client:
        for number in range(24):  # more than run at once: some are queued
            client.generate(f"r{number}", "the quick brown fox " * 10, params={"max_tokens": 800})
        if phase != "just sent":
            client.until("accepted" if phase == "accepted" else "delta")
        if way == "drop":
            client.drop()
        else:
            for number in range(24):
                client.send(type="cancel", id=f"r{number}")
            for _ in range(24):
                assert client.until("done")["finish_reason"] == "cancelled"
    check_idle(engine)


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_resumed_many_times_equals_an_uninterrupted_one(engine, server, seed):
    generator = random.Random(seed)
    request = {"request_id": generator.randbytes(16).hex(), "detached": True, "return_token_ids": True}
    params = {"max_tokens": 150, "seed": seed, "stop": ["never in this text"]}
    reading = Reading()
    with open_socket(server) as client:
        client.generate("r1", "the quick", params=params, **request)
        take(client, reading, generator.randint(1, 20))
        client.drop()
    while not reading.done:
        with open_socket(server, binary=generator.random() < 0.5) as client:
            client.send(
                type="resume", id="again", request_id=request["request_id"], cursors=[reading.cursors.get(0, 0)],
                context_ids=reading.accepted["context_ids"], params=params, detached=True, return_token_ids=True,
            )  # fmt: skip
            take(client, reading, generator.randint(1, 40))
            if not reading.done:
                client.drop()
    with open_socket(server) as client:  # the log as it stands at the end
        client.send(type="resume", id="whole", request_id=request["request_id"], params=params, return_token_ids=True)
        whole = client.read("whole")["whole"]
    assert reading.text == whole.text
    assert reading.token_ids == whole.token_ids
    assert len(reading.token_ids) == 150


def test_a_front_end_that_dies_loses_no_generation(engine):
    reading, uncut = Reading(), {"max_tokens": 120, "seed": 3}
    with serving(address_of(engine)) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        with open_socket(server) as client:
            client.generate("r1", "the quick", params=uncut, detached=True)
            take(client, reading, 12)
    with serving(address_of(engine)) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        with open_socket(server) as client:
            client.send(
                type="resume", id="r1", request_id=reading.accepted["request_id"], cursors=[reading.cursors[0]],
                context_ids=reading.accepted["context_ids"], params=uncut,
            )  # fmt: skip
            take(client, reading, 10_000)
            client.generate("r2", "the quick", params=uncut)
            assert client.read("r2")["r2"].text == reading.text
    check_idle(engine)


def test_a_slow_reader_delays_no_other(engine, server):
    with open_socket(server) as slow, open_socket(server) as quick:
        slow.send(type="hello", window=1)
        slow.until("window")
        slow.generate("slow", params={"max_tokens": 100})
        slow.until("delta")
        quick.generate("quick", params={"max_tokens": 100})
        assert quick.read("quick")["quick"].done[0]["usage"]["completion_tokens"] == 100
        slow.send(type="ack", frames=1)
        done = slow.until("done", "delta")
        assert done["cursor"] >= 99  # one frame with all that came meanwhile


def test_stats_frames_have_the_engines_figures(engine, server):
    with open_socket(server) as client:
        client.send(type="stats", interval_s=0.25)
        client.generate(params={"max_tokens": 900})
        while True:
            stats = client.until("stats")
            if stats["running"] and stats["tokens_per_s"]:
                break
        assert stats["state"] == "READY"
        assert stats["kv_usage"] > 0
        assert stats["waiting"] == stats["preemptions"] == 0
        assert stats["uptime_s"] > 0


def test_a_refusal_of_the_engine_names_its_field(engine, server):
    with open_socket(server) as client:
        client.send(type="generate", id="long", prompt_ids=[5] * 5000)
        error = client.until("error")["error"]
        assert error["code"] in ("context_length_exceeded", "prompt_never_fits")
        client.send(type="generate", id="unknown", prompt_ids=[999_999])
        assert client.until("error", id="unknown")["error"]["code"] == "invalid_request"
        client.generate("good", params={"max_tokens": 2})
        assert client.read("good")["good"].done
    check_idle(engine)


def take(client, reading, num_frames):
    """Take so many frames, or all until the end."""
    for _ in range(num_frames):
        frame = client.until("accepted", "delta", "done", "error")
        assert frame["type"] != "error", frame
        reading.take(frame)
        if reading.done:
            return


def test_an_answer_matches_its_format():
    """OpenAI's response_format; the simulated device draws any token that the mask allows."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with (
        run_service(card=replace(make_card(), eos_token_ids=(1,))) as engine,
        serving(address_of(engine)) as server,
    ):
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        with open_socket(server) as client:
            client.generate("a", response_format=wanted, params={"max_tokens": 400})
            reading = client.read("a")["a"]
            assert reading.error is None
            assert json.loads(reading.text[0]) in ({"a": 1}, {"a": 2})
            assert reading.done[0]["finish_reason"] == "stop"
            for bad in ({"type": "what"}, {"type": "json_schema"}, []):
                client.generate("b", response_format=bad)
                assert client.until("error", id="b")["error"]["field"].startswith("response_format")


def test_an_impossible_format_is_refused_under_its_name(server):
    """This model has no token to end with."""
    with open_socket(server) as client:
        client.generate("a", response_format={"type": "json_object"})
        error = client.until("error", id="a")["error"]
        assert (error["code"], error["field"]) == ("unsupported", "response_format")
