"""Requests over one socket, against an engine that speaks the real wire."""

from __future__ import annotations

import itertools
import math

import pytest

from inferengine.client.load_balancing import session_key
from inferengine.wire.messages import to_u64
from tests.frontends.scripted_engine import EOS, Script
from tests.frontends.websocket.builders import ANSWER, make_engine, open_socket, serving


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
def test_an_answer_is_complete_in_both_codecs(tmp_path, binary):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server, binary=binary) as client:
        client.generate("mine", "hello")
        reading = client.read("mine")["mine"]
    assert reading.text == {0: ANSWER}
    assert reading.accepted["prompt_tokens"] == len(engine.tokenizer.encode("hello"))
    done = reading.done[0]
    assert (done["finish_reason"], done["stop"]) == ("stop", EOS)
    assert done["usage"]["completion_tokens"] == done["cursor"] == len(engine.tokenizer.encode(ANSWER, False)) + 1
    assert done["timings"]["total_ms"] == 30.0


def test_hello_has_model_limits_and_state(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        assert client.hello["type"] == "hello"
        assert client.hello["protocol"] == 1
        assert client.hello["engine"]["state"] == "READY"
        assert client.hello["model"]["name"] == "scripted-model"
        assert client.hello["model"]["defaults"] == {"temperature": 0.6, "top_k": 20}
        assert client.hello["limits"]["max_requests"] == 64


def test_many_requests_run_interleaved(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: f"answer to {prompt} " * 5) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        names = [f"r{number}" for number in range(50)]
        for name in names:
            client.generate(name, f"question {name}")
        client.generate("broken", params={"temperature": "hot"})
        order = []
        readings = {}
        while len(readings) < 51:
            frame = client.until("accepted", "delta", "done", "error")
            order.append(frame["id"])
            if frame["type"] in ("done", "error"):
                readings[frame["id"]] = frame
        assert readings["broken"]["error"]["field"] == "params.temperature"
        assert all(readings[name]["finish_reason"] == "stop" for name in names)
    switches = sum(before != after for before, after in itertools.pairwise(order))
    assert switches > 200  # not one after the other


def test_each_of_many_interleaved_answers_is_exact(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: f"answer to {prompt} naïve 🎉 " * 5) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        names = [f"r{number}" for number in range(20)]
        for name in names:
            client.generate(name, f"question {name}")
        readings = client.read(*names)
    assert {name: reading.text[0] for name, reading in readings.items()} == {
        name: f"answer to question {name} naïve 🎉 " * 5 for name in names
    }


def test_choices_of_one_request_are_separate(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: f"answer number {choice}") as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        client.generate(params={"n": 3, "temperature": 1.0})
        assert client.read("r1")["r1"].text == {choice: f"answer number {choice}" for choice in range(3)}


def test_messages_go_through_the_chat_template(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: prompt) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        client.send(type="generate", id="r1", messages=[{"role": "user", "content": "Hi"}])
        assert client.read("r1")["r1"].text[0] == "<user>Hi\n<assistant>"


def test_token_ids_can_be_given_and_returned(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.send(type="generate", id="r1", prompt_ids=[5, 6, 7], return_token_ids=True)
        reading = client.read("r1")["r1"]
        assert reading.token_ids == [*engine.tokenizer.encode(ANSWER, False), EOS]
        assert reading.accepted["prompt_tokens"] == 3


def test_a_stop_string_ends_the_answer_and_is_never_sent(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate(params={"stop": ["jumps over"]})
        reading = client.read("r1")["r1"]
        assert reading.text[0] == ANSWER[: ANSWER.index("jumps over")]
        assert (reading.done[0]["finish_reason"], reading.done[0]["stop"]) == ("stop", "jumps over")


def test_a_stop_string_frees_the_engine(tmp_path):
    with (
        make_engine(tmp_path, lambda prompt, choice: "STOP " + ANSWER * 40) as engine,
        serving(engine) as server,
        open_socket(server) as client,
    ):
        client.generate(params={"stop": "STOP"})
        client.read("r1")
        engine.wait_for(lambda: engine.cancelled == [engine.submits[0].id])


def test_max_tokens_ends_with_length(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate(params={"max_tokens": 3})
        done = client.read("r1")["r1"].done[0]
        assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", 3)


def test_fields_of_a_request_reach_the_engine(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate(
            priority=-3, cache_salt="tenant", session="s", deadline_s=2.5, detached=True, label="mine",
            params={"seed": 7, "top_p": 0.5}, request_id="00112233445566778899aabbccddeeff",
        )  # fmt: skip
        client.read("r1")
        (message,) = engine.submits
        assert message.id.hex() == "00112233445566778899aabbccddeeff"
        assert (message.priority, message.salt, message.deadline_ms) == (-3, b"tenant", 2500)
        assert (message.detached, message.label) == (True, "mine")
        assert message.session == to_u64([session_key("s") or 0])
        assert message.params == {"temperature": 0.6, "top_k": 20, "seed": 7, "top_p": 0.5}


def test_each_socket_has_a_share_of_its_address_and_a_session_one_of_its_own(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server:
        for fields in ({}, {}, {"session": "s"}, {"session": "s"}):
            with open_socket(server) as socket:
                socket.generate("a", **fields)
                socket.read("a")
        shares = [submit.share for submit in engine.submits]
    assert {address for address, _ in shares} == {"127.0.0.1"}
    assert len({name for _, name in shares}) == 3
    assert shares[2] == shares[3]


def test_an_id_sent_twice_runs_once(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        for name in ("first", "second"):
            client.generate(name, request_id="ab" * 16)
        readings = client.read("first", "second")
        assert readings["first"].text == readings["second"].text == {0: ANSWER}
        assert len(engine.submits) == 1


def test_a_stats_subscription_shows_the_live_figures_and_ends(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        engine.hold()
        client.generate()
        client.until("accepted")
        client.send(type="stats", interval_s=0.25)
        while client.until("stats")["running"] != 1:
            continue
        client.send(type="stats", subscribe=False)
        client.send(type="ping", nonce=1)
        client.until("pong")
        with pytest.raises(TimeoutError):
            client.next(0.6)


def test_a_ping_is_answered_with_its_nonce(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.send(type="ping", nonce="are you there")
        assert client.next() == {"type": "pong", "nonce": "are you there"}


def test_a_change_of_the_engine_is_sent_to_every_socket(tmp_path):
    with (
        make_engine(tmp_path) as engine,
        serving(engine) as server,
        open_socket(server) as first,
        open_socket(server) as second,
    ):
        engine.set_state("DRAINING")
        for client in (first, second):
            states = [client.until("state")["engine"]["state"]]
            while len(states) < 3 and states[-1] != "DRAINING":
                states.append(client.until("state")["engine"]["state"])
            assert states[-1] == "DRAINING"


def test_logprobs_name_tokens_by_text_and_stay_valid_json(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        token_ids = engine.tokenizer.encode("the fox", False)
        rows = [[-0.5, 1, [token_id, 40], [-0.5, -math.inf]] for token_id in token_ids]
        engine.script = lambda submit, choice: Script(token_ids, logprobs=rows)
        client.generate(params={"logprobs": 2})
        shown = []
        while (frame := client.until("delta", "done"))["type"] != "done":
            shown += frame["logprobs"]
        shown += frame["logprobs"]
    assert "".join(each["token"] for each in shown) == "the fox"
    assert shown[0]["top"] == [[token_ids[0], -0.5], [40, -9999.0]]
    assert shown[0]["top_tokens"] == [shown[0]["token"], engine.tokenizer.decode([40])]


def test_hello_lists_the_adapters(tmp_path):
    with make_engine(tmp_path) as engine:
        engine.info = engine.info.replace(adapters=("pirate", "poet"))
        with serving(engine) as server, open_socket(server) as client:
            assert client.hello["model"]["adapters"] == ["pirate", "poet"]
