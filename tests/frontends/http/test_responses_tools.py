"""Tools of /v1/responses as coding agents send them: namespaces, custom tools, and those of OpenAI's own servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontends.http.builders import House
from tests.frontends.http.embedded import Embedded
from tests.frontends.http.test_responses import WEATHER, client_of, prompt_of
from tests.frontends.http.test_tools import writes

AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}],
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}}
SEARCH: Any = {"type": "web_search", "external_web_access": False}
TEXT = '*** Begin "patch"\n+ 日本\n'


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def test_a_namespace_is_flat_for_the_model_and_not_for_the_client(client: openai.OpenAI, served: House) -> None:
    served.script = writes(call_of("agents__close", {}))
    response = client.responses.create(model="tiny", input="hi", tools=[AGENTS, WEATHER])
    assert '"agents__close"' in prompt_of(served)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("close", "agents")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "closed"}
    client.responses.create(model="tiny", input=[call.to_dict(), output], tools=[AGENTS])  # type: ignore[list-item]
    assert '{"name": "agents__close"' in prompt_of(served)


def test_a_custom_tool_takes_a_text(client: openai.OpenAI, served: House) -> None:
    served.script = writes(call_of("apply_patch", {"input": TEXT}))
    response = client.responses.create(model="tiny", input="hi", tools=[PATCH])
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", TEXT)
    events = list(client.responses.create(model="tiny", input="hi", tools=[PATCH], stream=True))
    kinds = [event.type for event in events]
    assert kinds.index("response.custom_tool_call_input.delta") < kinds.index("response.custom_tool_call_input.done")
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == TEXT
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    client.responses.create(model="tiny", input=[call.to_dict(), output], tools=[PATCH])  # type: ignore[list-item]
    assert "<tool_response>\ndone\n</tool_response>" in prompt_of(served)


def test_a_custom_tool_keeps_its_regular_expression(embedded: Embedded) -> None:
    tool: Any = {
        "type": "custom",
        "name": "when",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-2][0-9]:[0-5][0-9]"},
    }
    with client_of(embedded) as client:
        response = client.responses.create(
            model="", input="When?", tools=[tool], tool_choice={"type": "custom", "name": "when"}
        )
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch("[0-2][0-9]:[0-5][0-9]", call.input)


def test_a_servers_own_tools_are_left_out_where_the_model_may_choose(client: openai.OpenAI, served: House) -> None:
    response = client.responses.create(model="tiny", input="hi", tools=[SEARCH, WEATHER], tool_choice="auto")
    assert [tool.type for tool in response.tools] == ["function"]
    assert "web_search" not in prompt_of(served)
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(model="tiny", input="hi", tools=[WEATHER], tool_choice={"type": "web_search"})  # type: ignore[arg-type]


def test_allowed_tools_of_a_namespace(client: openai.OpenAI, served: House) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "close", "namespace": "agents"}, {"type": "web_search"}],
    }
    client.responses.create(model="tiny", input="hi", tools=[AGENTS, WEATHER], tool_choice=choice)
    grammar = served.engine.submits[-1].grammar
    assert grammar is not None
    assert "agents__close" in grammar[1]
    assert "weather" not in grammar[1]
