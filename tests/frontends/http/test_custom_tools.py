"""Custom tools in chat: tools that take a text, which the model is shown as functions with one string."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from frontends.common.chat import OutputParser, parser_from_map, parser_to_map
from inferengine.text.output_parser import FORMATS
from tests.frontends.http.builders import House
from tests.frontends.http.embedded import Embedded
from tests.frontends.http.test_tools import HELLO, PATH, TWO_CALLS, WEATHER, chat, prompt_of, writes

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Edit files.", "format": {"type": "text"}}}
TEXT = '*** Begin\n"quoted" \\ 🎉\n'
CALL = f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': TEXT}})}\n</tool_call>"
WHEN: Any = {
    "type": "custom",
    "custom": {
        "name": "when",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-2][0-9]:[0-5][0-9]"}},
    },
}


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_call_has_the_text_that_the_model_wrote(client: openai.OpenAI, served: House) -> None:
    served.script = writes(CALL)
    messages: Any = [{"role": "user", "content": "Edit it."}]
    (choice,) = client.chat.completions.create(model="tiny", messages=messages, tools=[PATCH]).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", TEXT)
    history: Any = [*messages, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    client.chat.completions.create(model="tiny", messages=history, tools=[PATCH])
    prompt = prompt_of(served)
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in prompt
    assert "<tool_response>\ndone\n</tool_response>" in prompt


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_stream_tells_the_text_at_the_end_of_its_call(served: House, chunk: int) -> None:
    served.script = writes(f"Well.\n{CALL}\n{TWO_CALLS.partition(chr(10))[2]}", chunk=chunk)
    body: dict[str, Any] = {"messages": HELLO, "tools": [PATCH, WEATHER, WHEN], "request_id": "same"}
    whole = chat(served, **body)["message"]["tool_calls"]
    calls: list[dict[str, Any]] = []
    documents = served.stream(PATH, **body)
    for document in documents[:-1]:
        for entry in document["choices"][0]["delta"].get("tool_calls", ()):
            if entry["index"] == len(calls):
                calls.append({name: value for name, value in entry.items() if name != "index"})
            elif "custom" in entry:
                calls[entry["index"]]["custom"]["input"] += entry["custom"]["input"]
            else:
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    assert calls == whole
    assert calls[0]["custom"] == {"name": "patch", "input": TEXT}
    assert [call["type"] for call in calls[:2]] == ["custom", "function"]
    assert documents[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off_is_told_as_far_as_it_was_written(served: House) -> None:
    served.script = writes('<tool_call>\n{"name": "patch", "arguments": {"input": "*** Beg')
    (call,) = chat(served, tools=[PATCH])["message"]["tool_calls"]
    assert call["custom"]["input"] == '{"input": "*** Beg'


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "when"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "when"}}]},
        },
    ],
    ids=lambda choice: choice["type"],
)
def test_a_regular_expression_is_kept_where_a_call_is_forced(embedded: Embedded, choice: dict[str, Any]) -> None:
    body = {"tools": [PATCH, WHEN], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.2, "seed": 3}
    (call,) = chat(embedded, **body)["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert re.fullmatch("[0-2][0-9]:[0-5][0-9]", call["custom"]["input"])


def test_a_lark_grammar_is_described_to_the_model(served: House) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
    chat(served, tools=[{"type": "custom", "custom": {"name": "x", "format": grammar}}])
    assert "must match this lark grammar" in prompt_of(served)


@pytest.mark.parametrize(
    ("custom", "param"),
    [
        ({"name": "no space"}, "tools[0].custom.name"),
        ({"name": "x", "format": {"type": "json"}}, "tools[0].custom.format"),
        ({"name": "x", "format": {"type": "grammar", "grammar": {"syntax": "peg"}}}, "tools[0].custom.format"),
        ("x", "tools[0]"),
    ],
)
def test_what_a_custom_tool_may_not_be_is_refused_by_name(served: House, custom: Any, param: str) -> None:
    response = served.post(PATH, messages=HELLO, tools=[{"type": "custom", "custom": custom}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_call_in_the_history_needs_its_text(served: House) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch"}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    response = served.post(PATH, messages=history, tools=[PATCH])
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].custom"


def test_a_parser_that_a_websocket_resumes_knows_its_custom_tools() -> None:
    parser = OutputParser(FORMATS["hermes"], custom=frozenset({"patch"}))
    assert parser_from_map(json.loads(json.dumps(parser_to_map(parser)))) == parser
