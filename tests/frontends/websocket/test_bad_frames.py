"""Whatever a client sends: an error that names the field, and the socket goes on."""

from __future__ import annotations

import json

import msgpack
import pytest
from websockets.exceptions import ConnectionClosed

from inferengine.wire.messages import Reject
from tests.frontends.websocket.builders import ANSWER, make_engine, open_socket, serving

GENERATE = {"type": "generate", "id": "r1", "prompt": "hello"}
RESUME = {"type": "resume", "id": "r1", "request_id": "ab" * 16}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with make_engine(tmp_path_factory.mktemp("engine")) as engine, serving(engine) as server:
        yield server


@pytest.mark.parametrize(
    ("frame", "code", "field"),
    [
        ([], "protocol_error", None),
        ("generate", "protocol_error", None),
        ({}, "protocol_error", "type"),
        ({"type": "genrate"}, "protocol_error", "type"),
        ({"type": ["generate"]}, "protocol_error", "type"),
        ({"type": "generate", "prompt": "hello"}, "invalid_request", "id"),
        ({**GENERATE, "id": ""}, "invalid_request", "id"),
        ({**GENERATE, "id": 7}, "invalid_request", "id"),
        ({**GENERATE, "id": "x" * 129}, "invalid_request", "id"),
        ({"type": "generate", "id": "r1"}, "invalid_request", "prompt"),
        ({**GENERATE, "prompt": ""}, "invalid_request", "prompt"),
        ({**GENERATE, "prompt": 5}, "invalid_request", "prompt"),
        ({**GENERATE, "prompt_ids": [1]}, "invalid_request", "prompt"),
        ({"type": "generate", "id": "r1", "prompt_ids": []}, "invalid_request", "prompt_ids"),
        ({"type": "generate", "id": "r1", "prompt_ids": [-1]}, "invalid_request", "prompt_ids"),
        ({"type": "generate", "id": "r1", "prompt_ids": [1.5]}, "invalid_request", "prompt_ids"),
        ({"type": "generate", "id": "r1", "messages": []}, "invalid_request", "messages"),
        ({"type": "generate", "id": "r1", "messages": [{"content": "x"}]}, "invalid_request", "messages[0].role"),
        ({**GENERATE, "params": []}, "invalid_request", "params"),
        ({**GENERATE, "params": {"temperature": 3}}, "invalid_request", "params.temperature"),
        ({**GENERATE, "params": {"temperature": True}}, "invalid_request", "params.temperature"),
        ({**GENERATE, "params": {"max_tokens": 0}}, "invalid_request", "params.max_tokens"),
        ({**GENERATE, "params": {"n": 99, "temperature": 1}}, "invalid_request", "params.n"),
        ({**GENERATE, "params": {"stop": ""}}, "invalid_request", "params.stop"),
        ({**GENERATE, "params": {"logit_bias": {"999999": 1}}}, "invalid_request", "params.logit_bias"),
        ({**GENERATE, "params": {"temprature": 1}}, "invalid_request", "params.temprature"),
        ({**GENERATE, "params": {"prompt_logprobs": 1}}, "unsupported", "params.prompt_logprobs"),
        ({**GENERATE, "max_tokens": 5}, "invalid_request", "max_tokens"),
        ({**GENERATE, "model": "gpt-5"}, "model_not_found", "model"),
        ({**GENERATE, "request_id": "ABC"}, "invalid_request", "request_id"),
        ({**GENERATE, "deadline_s": -1}, "invalid_request", "deadline_s"),
        ({**GENERATE, "detached": "yes"}, "invalid_request", "detached"),
        ({"type": "resume", "id": "r1"}, "invalid_request", "request_id"),
        ({**RESUME, "cursors": [-1]}, "invalid_request", "cursors[0]"),
        ({**RESUME, "context_ids": [1] * 17}, "invalid_request", "context_ids"),
        ({"type": "cancel"}, "invalid_request", "id"),
        ({"type": "ack"}, "invalid_request", "frames"),
        ({"type": "ack", "frames": 10**6}, "invalid_request", "frames"),
        ({"type": "hello", "window": -1}, "invalid_request", "window"),
        ({"type": "ping", "nonce": []}, "invalid_request", "nonce"),
        ({"type": "ping", "nonce": 2**64}, "invalid_request", "nonce"),
        ({"type": "stats", "interval_s": 0}, "invalid_request", "interval_s"),
    ],
    ids=lambda value: json.dumps(value)[:50] if not isinstance(value, str) else value,
)  # fmt: skip
def test_a_bad_frame_names_its_field_and_the_socket_stays_open(server, frame, code, field):
    with open_socket(server) as client:
        client.send_raw(json.dumps(frame))
        answer = client.until("error")
        assert (answer["error"]["code"], answer["error"]["field"]) == (code, field)
        assert answer["error"]["message"]
        client.generate("good")
        assert client.read("good")["good"].text == {0: ANSWER}


@pytest.mark.parametrize(
    "message",
    ["", "{", "nonsense", "[" * 100_000, '{"type":"ping","nonce":NaN}', "1" * 5000, b"\x00\x01"],
)
def test_invalid_json_is_refused(server, message):
    with open_socket(server) as client:
        client.send_raw(message)
        assert client.until("error")["error"]["code"] == "protocol_error"
        client.send(type="ping", nonce=1)
        assert client.next()["type"] == "pong"


@pytest.mark.parametrize(
    "message",
    [b"", b"\xc1", b"\x81", msgpack.packb({1: 2}), msgpack.packb(msgpack.ExtType(4, b"x")), b"\x91" * 5000, "text"],
)
def test_invalid_msgpack_is_refused(server, message):
    with open_socket(server, binary=True) as client:
        client.send_raw(message)
        assert client.until("error")["error"]["code"] == "protocol_error"
        client.send(type="ping", nonce=1)
        assert client.next()["type"] == "pong"


def test_numbers_as_keys_are_refused_with_the_remedy(server):
    with open_socket(server, binary=True) as client:
        client.send_raw(msgpack.packb({"type": "generate", "id": "a", "params": {"logit_bias": {5: 1.0}}}))
        assert "write numbers as strings" in client.until("error")["error"]["message"]


@pytest.mark.parametrize(
    ("rest", "field"),
    [
        ('"prompt": "\\udc00"', "prompt"),
        ('"prompt": "x", "params": {"stop": ["a", "\\ud800"]}', "params.stop[1]"),
        ('"messages": [{"role": "user", "content": "a\\ud83c!"}]', "messages[0].content"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_place_and_its_request(server, rest, field):
    with open_socket(server) as client:
        client.send_raw(f'{{"type": "generate", "id": "r1", {rest}}}')
        frame = client.until("error")
        assert (frame["id"], frame["error"]["code"], frame["error"]["field"]) == ("r1", "invalid_request", field)


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
def test_a_frame_of_very_many_lists_is_refused_and_the_socket_stays_open(server, binary):
    pack = msgpack.packb if binary else json.dumps
    with open_socket(server, binary=binary) as client:
        client.send_raw(pack({**GENERATE, "messages": [[]] * 300_000}))
        error = client.until("error")["error"]
        assert (error["code"], error["message"]) == (
            "request_too_large",
            "the frame has more than 100000 lists and objects",
        )
        client.generate("good")
        assert client.read("good")["good"].text == {0: ANSWER}


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
def test_a_large_frame_is_handled_before_later_frames(server, binary):
    pack = msgpack.packb if binary else json.dumps
    with open_socket(server, binary=binary) as client:
        client.send_raw(pack({"type": "generate", "id": "large", "prompt_ids": [*[5] * 300_000, -1]}))
        client.send(type="ping", nonce=1)
        frame = client.next()
        assert (frame["type"], frame["id"], frame["error"]["field"]) == ("error", "large", "prompt_ids")
        assert client.next()["type"] == "pong"


def test_the_remedy_of_a_broken_frame_is_the_documentation(server):
    with open_socket(server) as client:
        client.send_raw('{"type": "nope", "n": ' + "9" * 5000 + "}")
        error = client.until("error")["error"]
        assert "docs/websocket.md" in error["remedy"]
        assert error["message"] == "not valid JSON: a number has thousands of digits"


def test_a_prompt_that_does_not_fit_is_refused_under_its_field(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        asked = {
            "prompt": ({"prompt": "hello"}, "prompt"),
            "messages": ({"messages": [{"role": "user", "content": "hello"}]}, "prompt"),
            "prompt_ids": ({"prompt_ids": [5]}, "prompt"),
            "params.max_tokens": ({"prompt": "hello"}, "max_tokens"),
        }
        for field, (frame, named) in asked.items():
            engine.refuse = Reject(b"", 0, "context_length_exceeded", "It is too long.", named, False, None)
            client.send(type="generate", id="r1", **frame)
            assert client.until("error")["error"]["field"] == field


def test_a_misspelt_parameter_gets_a_suggestion(server):
    with open_socket(server) as client:
        client.generate(params={"temprature": 1})
        assert "temperature" in client.until("error")["error"]["message"]


def test_an_id_in_use_is_refused_and_its_request_continues(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        engine.hold()
        client.generate()
        client.until("accepted")
        client.generate()
        frame = client.until("error")
        assert (frame["id"], frame["error"]["code"], frame["error"]["field"]) == (None, "conflict", "id")
        engine.release()
        assert client.until("done")["finish_reason"] == "stop"


def test_too_many_requests_on_a_socket_are_refused_with_retry_after(tmp_path):
    with (
        make_engine(tmp_path) as engine,
        serving(engine, ws={"max_requests": 2}) as server,
        open_socket(server) as client,
    ):
        engine.hold()
        for name in ("r1", "r2", "r3"):
            client.generate(name)
        error = client.until("error", id="r3")["error"]
        assert (error["code"], error["retryable"], error["retry_after_s"]) == ("rate_limited", True, 1.0)


def test_a_message_over_the_limit_closes_the_socket_with_1009(tmp_path):
    with (
        make_engine(tmp_path) as engine,
        serving(engine, ws={"max_message_bytes": 2048}) as server,
        open_socket(server) as client,
    ):
        client.generate(prompt="x" * 4000)
        with pytest.raises(ConnectionClosed) as closed:
            client.until("never")
        assert closed.value.rcvd.code == 1009


def test_the_engines_refusal_arrives_with_its_remedy(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        engine.refuse = Reject(b"", 0, "overloaded", "The queue is full.", None, True, 2500)
        client.generate()
        error = client.until("error")["error"]
        assert (error["code"], error["retry_after_s"]) == ("overloaded", 2.5)
        assert "Retry-After" in error["remedy"]
        engine.refuse = None
        client.generate("again")
        assert client.read("again")["again"].text == {0: ANSWER}
