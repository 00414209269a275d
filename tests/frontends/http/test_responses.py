"""/v1/responses through OpenAI's own client: whole, streamed, in the background, continued; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.frontends.http.builders import TOKENIZER, House, prompt_of, says, wait_until
from tests.frontends.http.embedded import Embedded
from tests.frontends.http.test_tools import CITY, THOUGHT, TWO_CALLS, writes
from tests.frontends.scripted_engine import Script

PATH = "/v1/responses"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


def client_of(house: House | Embedded) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{house.front.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def test_a_response_with_text_has_the_fields_that_the_sdk_reads(client: openai.OpenAI, served: House) -> None:
    served.script = writes("It is sunny 🎉.")
    response = client.responses.create(
        model="tiny", input="How is it?", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}
    )
    assert response.output_text == "It is sunny 🎉."
    assert (response.status, response.model, response.metadata) == ("completed", "tiny", {"a": "b"})
    assert response.usage is not None
    assert response.usage.output_tokens == len(TOKENIZER.encode("It is sunny 🎉.")) + 1
    assert prompt_of(served) == "<system>Be brief.<user>How is it?<assistant>"
    served.script = says("too long")
    cut = client.responses.create(model="tiny", input=[{"role": "user", "content": "more"}])
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("reason", "detail", "status"),
    [
        ("length", None, "incomplete"),
        ("abort", ["cancelled", "An operator cancelled all requests."], "cancelled"),
        ("error", ["engine_error", "the step failed"], "failed"),
    ],
)
def test_an_item_that_was_cut_is_incomplete(
    client: openai.OpenAI, served: House, reason: str, detail: Any, status: str
) -> None:
    served.script = says("too long", reason=reason, detail=detail)
    *_, done, last = client.responses.create(model="tiny", input="hi", stream=True)
    assert done.type == "response.output_item.done"
    assert last.type == f"response.{status}"
    response = last.to_dict()["response"]  # the client has no class for response.cancelled
    assert response["status"] == status
    assert [done.item.status, *(item["status"] for item in response["output"])] == ["incomplete"] * 2


def test_usage_has_draft_tokens_where_there_were_any(client: openai.OpenAI, served: House) -> None:
    def details() -> dict[str, Any]:
        usage = client.responses.create(model="tiny", input="Say.").usage
        assert usage is not None
        return usage.output_tokens_details.model_dump()

    served.script = says("fox")
    assert details() == {"reasoning_tokens": 0}
    served.script = says("fox", draft_counts=(3, 1))
    assert details() == {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}


def test_events_build_the_response(client: openai.OpenAI, served: House) -> None:
    served.script = writes(TWO_CALLS)
    events = list(client.responses.create(model="tiny", input="hi", tools=[WEATHER, NOW], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    final = events[-1]
    assert final.type == "response.completed"
    kinds = [item.type for item in final.response.output]
    assert kinds == ["message", "function_call", "function_call"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.response.output_text == "Let me see."
    for index, item in enumerate(final.response.output[1:], 1):
        assert item.type == "function_call"
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == index
        ]
        assert "".join(deltas) == item.arguments
    with client.responses.stream(model="tiny", input="hi", tools=[WEATHER, NOW]) as stream:
        assert stream.get_final_response().output_text == "Let me see."


def test_a_function_is_called_and_answered(client: openai.OpenAI, served: House) -> None:
    served.script = writes(TWO_CALLS)
    first = client.responses.create(model="tiny", input="hi", tools=[WEATHER, NOW])
    _, weather, now = first.output
    assert weather.type == now.type == "function_call"
    assert json.loads(weather.arguments) == {"city": "Paris 🎉", "days": 3}
    served.script = writes("Sunny.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in ((weather, "sun"), (now, "noon"))
    ]
    by_reference = client.responses.create(
        model="tiny", previous_response_id=first.id, input=outputs, tools=[WEATHER, NOW]
    )
    referred = prompt_of(served)
    items: Any = [{"role": "user", "content": "hi"}, *first.output, *outputs]
    client.responses.create(model="tiny", input=items, tools=[WEATHER, NOW])
    assert prompt_of(served) == referred
    assert "<user><tool_response>\nsun\n</tool_response><user><tool_response>\nnoon" in referred
    assert by_reference.output_text == "Sunny."
    assert by_reference.previous_response_id == first.id


def test_a_schema_and_a_named_function_hold(embedded: Embedded) -> None:
    with client_of(embedded) as client:
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
        response = client.responses.create(model="", input="Paris", text=form, max_output_tokens=200)
        jsonschema.validate(json.loads(response.output_text), CITY)
        response = client.responses.create(
            model="", input="Paris", tools=[WEATHER, NOW], tool_choice={"type": "function", "name": "weather"}
        )
        (call,) = response.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), CITY)


def test_reasoning_is_an_item_of_its_own(thinker: House) -> None:
    thinker.script = writes(THOUGHT)
    with client_of(thinker) as client:
        response = client.responses.create(model="tiny", input="hi")
        reasoning, message = response.output
        assert reasoning.type == "reasoning"
        assert message.type == "message"
        assert reasoning.content is not None
        assert (reasoning.content[0].text, response.output_text) == ("Hm, Paris.", "It is sunny 🎉.")
        events = list(client.responses.create(model="tiny", input="hi", stream=True))
        thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert thought == "Hm, Paris."


def test_logprobs_come_when_included(client: openai.OpenAI, served: House) -> None:
    tokens = [*TOKENIZER.encode("fox"), 1]
    rows = [[-0.5, 1, [token], [-0.5]] for token in tokens]
    served.script = writes("fox", logprobs=rows)
    response = client.responses.create(
        model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    (message,) = response.output
    assert message.type == "message"
    (content,) = message.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert [entry.logprob for entry in content.logprobs] == [-0.5] * len(tokens)


def test_a_response_is_kept_until_deleted(client: openai.OpenAI, served: House) -> None:
    response = client.responses.create(model="tiny", input="hi")
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    forgotten = client.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="more", previous_response_id=forgotten.id)


def test_a_background_response_is_queued_and_can_be_retrieved(client: openai.OpenAI, served: House) -> None:
    served.script = writes("a story", pause_s=0.02)
    queued = client.responses.create(model="tiny", input="hi", background=True)
    assert (queued.status, queued.output) == ("queued", [])
    wait_until(lambda: client.responses.retrieve(queued.id).status == "completed")
    assert client.responses.retrieve(queued.id).output_text == "a story"


def test_a_background_response_is_cancelled(client: openai.OpenAI, served: House) -> None:
    served.script = writes("a very long story " * 5, pause_s=0.05)
    queued = client.responses.create(model="tiny", input="hi", background=True)
    cancelled = client.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    wait_until(lambda: served.engine.num_running == 0)
    assert client.responses.retrieve(queued.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model="tiny", input="hi", max_output_tokens=2).id)


def test_a_failure_is_an_error_of_the_call_and_an_event_of_the_stream(client: openai.OpenAI, served: House) -> None:
    served.script = lambda submit, choice: Script(
        TOKENIZER.encode("x"), reason="error", detail=["engine_error", "it failed"]
    )
    with pytest.raises(openai.InternalServerError, match="it failed"):
        client.responses.create(model="tiny", input="hi")
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "it failed"
    queued = client.responses.create(model="tiny", input="hi", background=True)
    wait_until(lambda: client.responses.retrieve(queued.id).status == "failed")


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_request"),
        ({"input": None}, "input", "invalid_request"),
        ({"input": [{"type": "message", "content": "x"}]}, "input", "invalid_request"),
        ({"input": [{"type": "file_search_call"}]}, "input[0]", "unsupported"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0]", "unsupported"),
        ({"input": [{"type": {"a": 1}}]}, "input[0]", "unsupported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "unsupported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"temperature": 5}, "temperature", "invalid_request"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]", "unsupported"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0]", "unsupported"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0]", "invalid_request"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
            "tools[0].format",
            "invalid_request",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_request"),
        (
            {"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]},
            "tools[0].parameters",
            "invalid_request",
        ),
        ({"tool_choice": "any"}, "tool_choice", "invalid_request"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "invalid_request"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0]", "invalid_request"),
        ({"input": [{"type": "custom_tool_call", "name": "a"}]}, "input[0].input", "invalid_request"),
        ({"conversation": 5}, "conversation", "invalid_request"),
        ({"max_tool_calls": 0}, "max_tool_calls", "invalid_request"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        ({"truncation": "some"}, "truncation", "invalid_request"),
        ({"background": True, "store": False}, "store", "invalid_request"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_request"),
    ],
)
def test_what_is_wrong_is_named(served: House, change: dict[str, Any], param: str, code: str) -> None:
    response = served.post(PATH, **{"model": "tiny", "input": "hi", **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert served.engine.submits == []


def test_a_call_that_was_cut_may_stand_in_the_input(served: House) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"city": "Par'}
    result = {"type": "function_call_output", "call_id": "1", "output": "The arguments were cut."}
    response = served.post("/v1/responses", model="tiny", input=[{"role": "user", "content": "hi"}, call, result])
    assert response.status_code == 200


def test_broken_arguments_of_a_call_are_told_as_such(served: House) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "\\ud800"}'}
    response = served.post("/v1/responses", model="tiny", input=[{"role": "user", "content": "hi"}, call])
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (
        "input",
        "input: the arguments of a function_call have half of a surrogate pair, which is no character: "
        "send both halves or none",
    )
