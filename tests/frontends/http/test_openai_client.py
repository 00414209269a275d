"""The official client of OpenAI, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import openai
import pydantic
import pytest

from tests.frontends.http.builders import House, ids, says
from tests.frontends.http.embedded import Embedded
from tests.frontends.http.test_tools import TOOLS, TWO_CALLS, writes
from tests.frontends.scripted_engine import Script

TEXT = "the quick brown fox 🎉"


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    served.script = says(TEXT, pause_s=0.001)
    with openai.OpenAI(base_url=f"{served.front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_reads_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="say", max_tokens=5)
    assert answer.choices[0].text == TEXT
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(ids("say")) + len(ids(TEXT))
    stream = client.completions.create(model="tiny", prompt="say", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_the_sdk_reads_chat_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "length"
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids(TEXT))


def test_chat_logprobs(client: openai.OpenAI, served: House) -> None:
    rows = [[-0.25, 1, [token], [-0.25]] for token in ids("fox")]
    served.script = lambda submit, choice: Script(ids("fox"), logprobs=rows)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.25] * len(rows)


def test_the_sdk_lists_and_retrieves_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "inferengine"


def test_errors_are_its_own_exceptions(client: openai.OpenAI, served: House) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="say")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="say", temperature=9)
    assert bad.value.param == "temperature"
    served.script = says(TEXT, reason="error", detail=["engine_error", "it failed"])
    with pytest.raises(openai.APIError, match="it failed"):
        list(client.completions.create(model="tiny", prompt="say", stream=True))


def test_tools_are_called_and_answered(client: openai.OpenAI, served: House) -> None:
    served.script = writes(TWO_CALLS)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    message = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls if call.type == "function"] == ["weather", "now"]
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
    client.chat.completions.create(model="tiny", messages=[*messages, message, *results], tools=TOOLS)
    with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in message.tool_calls if call.type == "function"
    ]


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]


def test_a_class_is_parsed_from_the_answer(embedded: Embedded) -> None:
    """Its schema is the grammar: whatever the model draws, the class can be built."""
    with openai.OpenAI(base_url=f"{embedded.front.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Who is Ada?"}]
        for seed in range(3):
            parsed = client.chat.completions.parse(
                model="", messages=messages, response_format=Person, seed=seed, temperature=1.2, max_tokens=200
            )
            assert isinstance(parsed.choices[0].message.parsed, Person)
        with client.chat.completions.stream(model="", messages=messages, response_format=Person, seed=5) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
        response = client.responses.parse(model="", input="Who is Ada?", text_format=Person, max_output_tokens=200)
        assert isinstance(response.output_parsed, Person)
