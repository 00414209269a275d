"""Tool calls and reasoning in chat: what the model writes, as OpenAI's clients read it, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from inferengine.text.output_parser import MAX_CALLS
from inferengine.wire.messages import Submit, to_u32
from tests.frontends.http.builders import House, ids, prompt_of, says
from tests.frontends.http.embedded import Embedded
from tests.frontends.scripted_engine import MAX_MODEL_LEN, Script

EOS = 1
PATH = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"$ref": "#/$defs/n"}},
        "required": ["city", "days"], "additionalProperties": False,
        "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🎉", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def writes(text: str, **script: Any) -> Callable[[Submit, int], Script]:
    """Return a script with which the model writes this and stops."""
    return lambda submit, choice: Script([*ids(text), EOS], reason="stop", **script)


def chat(house: House | Embedded, **body: Any) -> dict[str, Any]:
    response = house.post(PATH, **{"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    (choice, *_) = response.json()["choices"]
    return dict(choice)


def joined(documents: list[Any], index: int = 0) -> dict[str, Any]:
    """Return one choice of a stream, put together as the clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for document in documents:
        for choice in document["choices"] if isinstance(document, dict) else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
                else:
                    assert set(call["function"]) == {"arguments"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def test_a_whole_answer_has_its_tool_calls(served: House) -> None:
    served.script = writes(TWO_CALLS)
    choice = chat(served, tools=TOOLS)
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    names = [(call["type"], call["function"]["name"]) for call in message["tool_calls"]]
    assert names == [("function", "weather"), ("function", "now")]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris 🎉", "days": 3}
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_a_stream_puts_together_what_the_document_says(served: House, chunk: int) -> None:
    served.script = writes(TWO_CALLS, chunk=chunk)
    whole = chat(served, tools=TOOLS, request_id="same")
    documents = served.stream(PATH, messages=HELLO, tools=TOOLS, request_id="same")
    message = joined(documents)
    assert message["tool_calls"] == whole["message"]["tool_calls"]
    assert message["content"] == whole["message"]["content"]
    assert message["finish_reason"] == "tool_calls"
    assert documents[-1] == "[DONE]"


def test_arguments_are_streamed_while_they_are_written(served: House) -> None:
    served.script = writes(TWO_CALLS)
    documents = served.stream(PATH, messages=HELLO, tools=TOOLS)
    deltas = [call for d in documents[:-1] for c in d["choices"] for call in c["delta"].get("tool_calls", ())]
    assert len(deltas) > 8


def test_without_tools_nothing_is_read_into_the_text(served: House) -> None:
    served.script = writes(TWO_CALLS)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = chat(served, **body)
        assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")
        assert "tool_calls" not in choice["message"]


def test_a_cut_call_ends_for_its_length(served: House) -> None:
    served.script = says(TWO_CALLS[:60], reason="length")
    choice = chat(served, tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_cut_before_its_name_is_no_text(served: House, choice: Any) -> None:
    served.script = says(TWO_CALLS[len("Let me see.\n") :][:25], reason="length")
    answer = chat(served, tools=TOOLS, tool_choice=choice)
    assert (answer["finish_reason"], answer["message"].get("content")) == ("length", "")
    assert not answer["message"].get("tool_calls")
    served.script = says(TWO_CALLS[len("Let me see.\n") :][:25], reason="length")
    documents = served.stream(PATH, messages=HELLO, tools=TOOLS, tool_choice=choice)
    deltas = [one["delta"] for document in documents[:-1] for one in document["choices"]]
    assert not any(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    assert [one["finish_reason"] for document in documents[:-1] for one in document["choices"]][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "tools": [{"name": "weather", "input_schema": CITY}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}),
        ("/api/chat", {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}),
    ],
)
def test_other_apis_leave_out_a_call_that_was_cut_off(
    served: House, path: str, body: dict[str, Any], stream: bool
) -> None:
    served.script = says("So:\n" + TWO_CALLS[len("Let me see.\n") :][:25], reason="length")
    response = served.post(path, **body, stream=stream, **({"max_tokens": 9} if path == "/v1/messages" else {}))
    assert response.status_code == 200
    shown = "".join(re.findall(r'"(?:text|content|delta)": ?"((?:[^"\\]|\\.)*)"', response.text))
    assert shown.startswith("So:")
    assert "tool_call>" not in shown


def test_the_text_of_a_call_that_the_model_ended_itself_is_shown(served: House) -> None:
    served.script = writes('<tool_call>\n{"name": "we')
    assert chat(served, tools=TOOLS)["message"]["content"] == '<tool_call>\n{"name": "we'


def test_a_call_that_was_cut_may_stand_in_the_history(served: House) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Par'}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "The arguments were cut."}]  # fmt: skip
    chat(served, messages=history, tools=TOOLS)
    assert '"arguments": {"city": "Par"}' in prompt_of(served)


def test_tools_reach_a_model_whose_template_knows_none(served: House) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]  # fmt: skip
    chat(served, messages=history, tools=TOOLS)
    prompt = prompt_of(served)
    assert prompt.startswith("<system>You may call")
    assert json.dumps(WEATHER) in prompt
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<user><tool_response>\nsunny\n</tool_response>" in prompt


def test_auto_leaves_the_model_free_and_the_others_do_not(served: House) -> None:
    chat(served, tools=TOOLS)
    assert served.engine.submits[-1].grammar is None
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        chat(served, tools=TOOLS, tool_choice=choice)
        grammar = served.engine.submits[-1].grammar
        assert grammar is not None
        assert grammar[0] == "lark"


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_are_valid(embedded: Embedded, seed: int) -> None:
    choice = chat(embedded, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, temperature=1.2)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, CITY if call["function"]["name"] == "weather" else {"maxProperties": 0})


def test_the_named_tool_is_called(embedded: Embedded) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    body = {"tools": TOOLS, "tool_choice": named, "seed": 4, "n": 3, "temperature": 1.0}
    documents = embedded.stream(PATH, messages=HELLO, **body)
    for index in range(3):
        message = joined(documents, index)
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], message["finish_reason"]) == ("weather", "tool_calls")
        jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)


def test_parallel_calls_are_all_valid(embedded: Embedded) -> None:
    for seed in range(2):
        choice = chat(embedded, tools=TOOLS, tool_choice="required", seed=seed, temperature=1.5, max_tokens=600)
        assert choice["finish_reason"] == "tool_calls"
        assert 1 < len(choice["message"]["tool_calls"]) <= MAX_CALLS
        for call in choice["message"]["tool_calls"]:
            schema = CITY if call["function"]["name"] == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_a_call_or_an_answer_of_the_schema(embedded: Embedded) -> None:
    """With tools and a schema the model may choose, and whichever it chooses is valid."""
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(4):
        choice = chat(embedded, tools=TOOLS, response_format=form, seed=seed, temperature=1.5, max_tokens=300)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        else:
            assert choice["message"]["tool_calls"]
    response = embedded.post(PATH, messages=HELLO, tools=TOOLS, guided_regex="a+")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_a_schema_that_does_not_compile_leaves_the_arguments_free(
    embedded: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"properties": {"a": {"$ref": "#/x"}}, "required": ["a"]}
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}
    for _ in range(2):
        body = {"messages": HELLO, "tools": [bad], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
        message = embedded.post(PATH, **body).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]][:1] == ["f"]
    assert caplog.text.count("tool f: its arguments may be any JSON object") == 1


THOUGHT = "<think>\nHm, Paris.\n</think>\n\nIt is sunny 🎉."


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_reasoning_is_told_apart(thinker: House, chunk: int) -> None:
    thinker.script = writes(THOUGHT, chunk=chunk)
    message = chat(thinker)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, Paris.", "It is sunny 🎉.")
    streamed = joined(thinker.stream(PATH, messages=HELLO))
    assert (streamed["reasoning_content"], streamed["content"]) == ("Hm, Paris.", "It is sunny 🎉.")
    assert "reasoning_content" not in chat(thinker, include_reasoning=False)["message"]


def test_reasoning_then_calls(thinker: House) -> None:
    thinker.script = writes("<think>which?</think>" + TWO_CALLS)
    streamed = joined(thinker.stream(PATH, messages=HELLO, tools=TOOLS))
    assert (streamed["reasoning_content"], streamed["content"]) == ("which?", "Let me see.")
    assert [call["function"]["name"] for call in streamed["tool_calls"]] == ["weather", "now"]


def test_a_prompt_that_opens_the_thought_begins_inside_it(thinker: House) -> None:
    thinker.script = writes("Hm.</think>Yes.")
    body = {"messages": [{"role": "user", "content": "hi <think>"}], "add_generation_prompt": False}
    message = chat(thinker, **body)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_a_grammar_leaves_no_room_for_thought(thinker: House) -> None:
    thinker.script = writes('{"a": 1}')
    body = {"messages": [{"role": "user", "content": "hi <think>"}], "add_generation_prompt": False}
    message = chat(thinker, response_format={"type": "json_object"}, **body)["message"]
    assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    assert prompt_of(thinker).endswith("<think>\n\n</think>\n\n")


def test_logprobs_and_token_ids_of_calls(served: House) -> None:
    tokens = [*ids(TWO_CALLS), EOS]
    rows = [[-0.5, 1, [token], [-0.5]] for token in tokens]
    served.script = writes(TWO_CALLS, logprobs=rows)
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    documents = served.stream(PATH, **body)
    told = [token for d in documents[:-1] for c in d["choices"] for token in c.get("token_ids", ())]
    assert told == tokens
    entries = [e for d in documents[:-1] for c in d["choices"] for e in (c["logprobs"] or {}).get("content", ())]
    assert len(entries) == len(tokens)


FUNCTIONS = [tool["function"] for tool in TOOLS]


def test_functions_are_tools_by_their_older_name(served: House) -> None:
    served.script = writes(TWO_CALLS)
    choice = chat(served, functions=FUNCTIONS)
    call = choice["message"]["function_call"]
    assert (choice["finish_reason"], call["name"]) == ("function_call", "weather")
    assert "tool_calls" not in choice["message"]
    deltas = [event["choices"][0] for event in served.stream(PATH, messages=HELLO, functions=FUNCTIONS)[:-1]]
    parts = [delta["delta"]["function_call"] for delta in deltas if "function_call" in delta["delta"]]
    assert [part["name"] for part in parts if "name" in part] == ["weather"]
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert deltas[-1]["finish_reason"] == "function_call"
    said = {"role": "assistant", "content": None, "function_call": call}
    chat(served, messages=[*HELLO, said, {"role": "function", "name": "weather", "content": "sunny"}])
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(served)


def test_the_named_function_is_called(embedded: Embedded) -> None:
    choice = chat(embedded, functions=FUNCTIONS, function_call={"name": "weather"}, seed=4, temperature=1.0)
    jsonschema.validate(json.loads(choice["message"]["function_call"]["arguments"]), CITY)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_older_names_are_refused_by_their_names(served: House, body: dict[str, Any], param: str) -> None:
    response = served.post(PATH, messages=HELLO, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_allowed_tools_are_those_that_may_be_called(served: House) -> None:
    now = {"type": "function", "function": {"name": "now"}}

    def allow(mode: str) -> str:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}}
        chat(served, tools=TOOLS, tool_choice=choice)
        return prompt_of(served)

    assert '"weather"' not in allow("auto")
    assert served.engine.submits[-1].grammar is None
    assert '"weather"' in allow("required")  # the prompt stays the same, and the grammar has the one
    grammar = served.engine.submits[-1].grammar
    assert grammar is not None
    assert "now" in grammar[1]
    assert "weather" not in grammar[1]


def test_a_prediction_changes_nothing(served: House) -> None:
    for content in ("fox", [{"type": "text", "text": "fox"}]):
        chat(served, prediction={"type": "content", "content": content})
    first, second = (submit.params for submit in served.engine.submits)
    assert first == second
    assert [submit.prediction for submit in served.engine.submits] == [to_u32(ids("fox"))] * 2


def test_a_prediction_longer_than_any_output_is_refused(served: House) -> None:
    for length in (MAX_MODEL_LEN + 1, 9000):
        response = served.post(PATH, messages=HELLO, prediction={"type": "content", "content": "fox " * length})
        assert (response.status_code, response.json()["error"]["param"]) == (413, "prediction.content")


def test_the_usage_of_a_request_with_a_prediction_tells_what_came_of_it(served: House) -> None:
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    body = {"messages": HELLO, "prediction": {"type": "content", "content": ""}}
    assert served.post(PATH, **body).json()["usage"]["completion_tokens_details"] == none
    assert "completion_tokens_details" not in served.post(PATH, messages=HELLO).json()["usage"]
