"""Tool calls, structure and reasoning over the websocket: OpenAI's fields in, OpenAI's deltas in the frames."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.engine.builders import address_of, make_card, run_service
from tests.frontends.websocket.builders import Reading, make_engine, open_socket, serving, wait_until

HELLO = [{"role": "user", "content": "How is the weather?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
TWO_CALLS = (
    'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🎉"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, Paris 🎉.\n</think>\n\n"


def answering(folder, text, **options):
    return make_engine(folder, lambda prompt, choice: text, **options)


def ask(client, name="r1", **fields):
    client.send(type="generate", id=name, **{"messages": HELLO, **fields})


def ask_and_read(client, **fields):
    ask(client, **fields)
    return client.read("r1")["r1"]


def take(reading, client):
    """Read one frame, and take it in if it is of the request."""
    frame = client.next()
    if frame.get("id") == "r1":
        reading.take(frame)


def refusal(client, **fields):
    ask(client, "bad", **fields)
    return client.until("error", id="bad")["error"]


def prompt_of(engine):
    return engine.tokenizer.decode([*memoryview(engine.submits[-1].prompt).cast("I")], False)


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
def test_tool_calls_are_separated_from_the_text(tmp_path, binary):
    with (
        answering(tmp_path, TWO_CALLS) as engine,
        serving(engine) as server,
        open_socket(server, binary=binary) as client,
    ):
        engine.hold()
        engine.release(len(engine.tokenizer.encode(TWO_CALLS[: TWO_CALLS.index("aris")], False)))
        ask(client, tools=TOOLS)
        reading = Reading()
        while not reading.calls:  # a call is shown while it is written
            take(reading, client)
        assert reading.calls[0]["function"]["name"] == "weather"
        assert not reading.ended
        engine.release()
        while not reading.ended:
            take(reading, client)
    assert (reading.text[0], reading.done[0]["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [call["function"]["name"] for call in reading.calls] == ["weather", "now"]
    assert [json.loads(call["function"]["arguments"]) for call in reading.calls] == [{"city": "Paris 🎉"}, {}]
    assert len({call["id"] for call in reading.calls}) == 2


def test_without_tools_the_text_is_not_parsed(tmp_path):
    with answering(tmp_path, TWO_CALLS) as engine, serving(engine) as server, open_socket(server) as client:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            reading = ask_and_read(client, **fields)
            assert (reading.text[0], reading.calls) == (TWO_CALLS, [])
            assert reading.done[0]["finish_reason"] == "stop"


def test_each_choice_has_its_own_calls(tmp_path):
    with answering(tmp_path, TWO_CALLS) as engine, serving(engine) as server, open_socket(server) as client:
        ask(client, tools=TOOLS, params={"n": 2, "temperature": 1.0})
        assert client.until("accepted")["n"] == 2
        readings = [Reading(), Reading()]
        while not all(reading.done for reading in readings):
            frame = client.until("delta", "done")
            readings[frame["choice"]].take(frame)
    names = [[call["function"]["name"] for call in reading.calls] for reading in readings]
    assert names == [["weather", "now"]] * 2
    assert readings[0].calls[0]["id"] != readings[1].calls[0]["id"]


def test_a_conversation_with_calls_and_results_reaches_the_model(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with answering(tmp_path, "Sunny.") as engine, serving(engine) as server, open_socket(server) as client:
        assert ask_and_read(client, messages=history, tools=TOOLS).text[0] == "Sunny."
        prompt = prompt_of(engine)
    assert json.dumps(WEATHER) in prompt
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<user><tool_response>\nsunny\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, "lark"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "lark"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "lark"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {}}, None),
    ],
)
def test_a_forced_format_is_a_grammar_for_the_engine(tmp_path, fields, kind):
    with answering(tmp_path, "yes") as engine, serving(engine) as server, open_socket(server) as client:
        ask_and_read(client, **fields)
        grammar = engine.submits[0].grammar
    assert (None if grammar is None else grammar[0]) == kind


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a\0"}}, "structured_outputs"),
        ({"response_format": {"type": "what"}}, "response_format.type"),
        ({"messages": None, "prompt": "hello", "tools": TOOLS}, "tools"),
    ],
)
def test_an_unsupported_field_is_named_and_other_requests_continue(tmp_path, fields, field):
    with answering(tmp_path, "yes") as engine, serving(engine) as server, open_socket(server) as client:
        error = refusal(client, **fields)
        assert (error["field"], error["retryable"]) == (field, False)
        assert ask_and_read(client).text[0] == "yes"
        assert len(engine.submits) == 1


def test_reasoning_is_separated_from_the_text(tmp_path):
    with (
        answering(tmp_path, THOUGHT + TWO_CALLS) as engine,
        serving(engine, http={"reasoning_parser": "think"}) as server,
        open_socket(server) as client,
    ):
        reading = ask_and_read(client, tools=TOOLS)
        assert (reading.reasoning, reading.text[0]) == ("Hm, Paris 🎉.", "Let me see.")
        assert [call["function"]["name"] for call in reading.calls] == ["weather", "now"]
        hidden = ask_and_read(client, include_reasoning=False)
        assert (hidden.reasoning, hidden.text[0]) == ("", TWO_CALLS)
        assert hidden.done[0]["usage"]["completion_tokens"] == reading.done[0]["usage"]["completion_tokens"]


def test_token_ids_are_sent_beside_their_text(tmp_path):
    with answering(tmp_path, TWO_CALLS) as engine, serving(engine) as server, open_socket(server) as client:
        reading = ask_and_read(client, tools=TOOLS, return_token_ids=True)
        assert engine.tokenizer.decode(reading.token_ids, True) == TWO_CALLS
        assert len(reading.calls) == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_tool_call_cut_anywhere_resumes_at_another_front_end(tmp_path, seed):
    """The new front end knows of the request what the engine has kept."""
    draw = random.Random(seed)
    settings = {"http": {"reasoning_parser": "think"}}
    reading = Reading()
    with answering(tmp_path, THOUGHT + TWO_CALLS) as engine:
        with serving(engine, **settings) as server, open_socket(server) as client:
            ask(client, tools=TOOLS, detached=True)
            for _ in range(draw.randint(1, 60)):
                reading.take(client.until("accepted", "delta", "done"))
                if reading.done:
                    break
            client.drop()
        cursors = [reading.cursors.get(0, 0)]
        with serving(engine, **settings) as server, open_socket(server) as client:
            client.send(type="resume", id="r1", request_id=reading.accepted["request_id"], cursors=cursors)
            reading.done.clear()
            while not reading.done:
                reading.take(client.until("accepted", "delta", "done", "error"))
                assert reading.error is None
            ask(client, "whole", tools=TOOLS)
            whole = client.read("whole")["whole"]
    assert (reading.reasoning, reading.text) == (whole.reasoning, whole.text)
    functions = [[call["function"] for call in one.calls] for one in (reading, whole)]
    assert functions[0] == functions[1]
    assert reading.done[0]["finish_reason"] == "tool_calls"


def test_a_named_tool_is_called_with_arguments_of_its_schema():
    """The real engine: its simulated device draws any token that the mask allows."""
    with (
        run_service(card=replace(make_card(), eos_token_ids=(1,))) as engine,
        serving(address_of(engine)) as server,
    ):
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        with open_socket(server) as client:
            named = {"type": "function", "function": {"name": "weather"}}
            reading = ask_and_read(client, tools=TOOLS, tool_choice=named, params={"max_tokens": 400})
    assert reading.error is None
    assert reading.done[0]["finish_reason"] == "tool_calls"
    (call,) = reading.calls
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
