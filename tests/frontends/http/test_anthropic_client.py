"""The official client of Anthropic, unmodified, and the Messages dialect as it stands on the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.frontends.http.builders import TOKENIZER, House, prompt_of, says
from tests.frontends.http.embedded import Embedded
from tests.frontends.http.test_tools import CITY, THOUGHT, TWO_CALLS, writes

PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER: Any = {"name": "weather", "description": "The forecast.", "input_schema": CITY}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture
def client(served: House) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.front.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **body: Any) -> anthropic.types.Message:
    answer: anthropic.types.Message = client.messages.create(
        **{"model": "tiny", "max_tokens": 400, "messages": HELLO, **body}
    )
    return answer


def test_a_message_with_text_has_the_fields_that_the_sdk_reads(client: anthropic.Anthropic, served: House) -> None:
    served.script = writes("It is sunny 🎉.")
    message = ask(client, system="Be brief.", stop_sequences=["END"], extra_body={"temperature": 0.5, "top_k": 5})
    assert message.content[0].type == "text"
    assert message.content[0].text == "It is sunny 🎉."
    assert (message.role, message.type, message.stop_reason, message.model) == (
        "assistant",
        "message",
        "end_turn",
        "tiny",
    )
    assert message.usage.output_tokens == len(TOKENIZER.encode("It is sunny 🎉.")) + 1
    assert prompt_of(served) == "<system>Be brief.<user>How is the weather?<assistant>"
    params = served.engine.submits[-1].params
    assert (params["top_k"], params["max_tokens"]) == (5, 400)


def test_stop_reason_says_why_the_message_ended(client: anthropic.Anthropic, served: House) -> None:
    served.script = says("too long a story")
    assert ask(client).stop_reason == "max_tokens"
    served.script = says("one END two")
    message = ask(client, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content[0].type == "text"
    assert message.content[0].text == "one "


def test_a_cancelled_answer_is_an_error_and_no_turn_that_ended(client: anthropic.Anthropic, served: House) -> None:
    """As an operator cancels it: Anthropic has no stop reason for that."""
    served.script = says("too long", reason="abort", detail=["cancelled", "An operator cancelled all requests."])
    with pytest.raises(anthropic.APIStatusError, match="cancelled before it was complete") as document:
        ask(client)
    assert document.value.status_code == 499
    with (
        pytest.raises(anthropic.APIStatusError, match="cancelled before it was complete"),
        client.messages.stream(model="tiny", max_tokens=400, messages=HELLO) as stream,
    ):
        assert "".join(stream.text_stream) == "too long"


def test_usage_has_draft_tokens_where_there_were_any(client: anthropic.Anthropic, served: House) -> None:
    served.script = says("fox")
    assert "accepted_prediction_tokens" not in ask(client).usage.model_dump()
    served.script = says("fox", draft_counts=(3, 1))
    with client.messages.stream(model="tiny", max_tokens=400, messages=HELLO) as stream:
        (streamed,) = [event.usage.model_dump() for event in stream if event.type == "message_delta"]
    for usage in (ask(client).usage.model_dump(), streamed):
        assert (usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]) == (3, 1)


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic, served: House) -> None:
    served.script = writes(TWO_CALLS)
    whole = ask(client, tools=TOOLS)
    with client.messages.stream(model="tiny", max_tokens=400, messages=HELLO, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_the_events_of_a_text_are_these(served: House) -> None:
    served.script = writes("Hi")
    response = served.post(PATH, model="tiny", max_tokens=9, messages=HELLO, stream=True)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [one["type"] for one in data] == names
    nothing = {"stop_sequence": None, "stop_details": None, "container": None}
    assert data[-2]["delta"] == {"stop_reason": "end_turn", **nothing}
    assert data[0]["message"]["content"] == []


def test_tools_and_their_results(client: anthropic.Anthropic, served: House) -> None:
    served.script = writes(TWO_CALLS)
    message = ask(client, tools=TOOLS)
    text, weather, now = message.content
    assert text.type == "text"
    assert weather.type == now.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", {"city": "Paris 🎉", "days": 3})
    assert now.input == {}
    result = {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*HELLO, {"role": "assistant", "content": message.content},
               {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]}]  # fmt: skip
    ask(client, tools=TOOLS, messages=history)
    prompt = prompt_of(served)
    assert "<tool_response>\nsunny\n</tool_response><user>and now?" in prompt
    assert '<assistant>Let me see.\n<tool_call>\n{"name": "weather"' in prompt


def test_a_tool_that_must_be_called(embedded: Embedded) -> None:
    with anthropic.Anthropic(base_url=embedded.front.url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
            message = client.messages.create(
                model="", max_tokens=300, messages=HELLO, tools=TOOLS, tool_choice=choice, extra_body={"seed": 3}
            )
            (block,) = message.content
            assert block.type == "tool_use"
            assert message.stop_reason == "tool_use"
            jsonschema.validate(block.input, CITY if block.name == "weather" else {})


def test_thinking_is_a_block_of_its_own(thinker: House) -> None:
    thinker.script = writes(THOUGHT)
    with anthropic.Anthropic(base_url=thinker.front.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(model="tiny", max_tokens=400, messages=HELLO)
        with client.messages.stream(model="tiny", max_tokens=400, messages=HELLO) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text = message.content
        assert thinking.type == "thinking"
        assert text.type == "text"
        assert (thinking.thinking, text.text) == ("Hm, Paris.", "It is sunny 🎉.")


def test_a_prefilled_answer_is_continued(client: anthropic.Anthropic, served: House) -> None:
    ask(client, messages=[*HELLO, {"role": "assistant", "content": "The weather is"}])
    assert prompt_of(served).endswith("<assistant>The weather is")


def test_tokens_are_counted_without_a_model(client: anthropic.Anthropic, served: House) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.").input_tokens
    assert served.engine.submits == []
    assert counted == len(TOKENIZER.encode("<system>Be brief.<user>How is the weather?<assistant>"))


def test_what_must_be_said_is_said_though_it_is_null(client: anthropic.Anthropic, served: House) -> None:
    """The API's document requires these keys. The SDK's types would forgive their lack."""
    served.script = writes(TWO_CALLS)
    raw = client.messages.with_raw_response.create(model="tiny", max_tokens=400, messages=HELLO, tools=TOOLS)
    document = json.loads(raw.text())
    assert {"container", "stop_details", "stop_sequence"} <= document.keys()
    told = {"cache_creation", "cache_read_input_tokens", "server_tool_use", "service_tier", "inference_geo"}
    assert told <= document["usage"].keys()
    text, call, _ = document["content"]
    assert set(text) == {"type", "text"}  # the Vercel AI SDK refuses `citations` that are null
    assert call["caller"] == {"type": "direct"}
    assert raw.request_id == raw.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 1024}])
@pytest.mark.parametrize("variables", ["fast", 5, [1], [["a", 1]], True])
def test_template_variables_that_are_no_object_are_refused_by_name(
    served: House, path: str, thinking: dict[str, Any] | None, variables: Any
) -> None:
    response = served.post(path, max_tokens=8, messages=HELLO, thinking=thinking, chat_template_kwargs=variables)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "chat_template_kwargs" in response.json()["error"]["message"]
    assert served.engine.submits == []


def test_models_in_its_own_shape(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.display_name, model.type, model.lifecycle) == ("tiny", "tiny", "model", "active")
    assert model.created_at.year >= 2024
    assert client.models.retrieve("tiny") == model
    assert client.models.list(after_id="tiny").data == []
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.models.list(limit=0)


@pytest.mark.parametrize("path", ["/v1/messages/none", "/v1/nothing", "/v1/models/none"])
def test_an_error_has_its_shape_on_every_path(served: House, path: str) -> None:
    response = served.http.get(path, headers={"anthropic-version": "2023-06-01"})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["request_id"] == response.headers["request-id"]
    assert "error" in served.http.get("/v1/nothing").json()
    assert "request-id" not in served.http.get("/v1/nothing").headers


def test_one_stop_sequence_is_a_list_too(served: House) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": "0"}
    response = served.post("/v1/messages", **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "stop_sequences: must be a list of texts"


def test_errors_are_its_own_exceptions(client: anthropic.Anthropic, served: House) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        ask(client, model="claude")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": 9})
    served.script = says("x", reason="error", detail=["engine_error", "it failed"])
    with pytest.raises(anthropic.InternalServerError, match="it failed"):
        ask(client)
    with pytest.raises(anthropic.APIStatusError, match="it failed"):
        list(client.messages.create(model="tiny", max_tokens=4, messages=HELLO, stream=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_is_wrong_is_named(served: House, change: dict[str, Any], named: str) -> None:
    response = served.post(PATH, **{"model": "tiny", "max_tokens": 5, "messages": HELLO, **change})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(f"{named}: ")
    assert served.engine.submits == []
