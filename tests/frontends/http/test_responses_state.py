"""What /v1/responses remembers: events in the background, input items, references to items, conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from frontends.http.openai.response_store import make_database
from tests.frontends.http.builders import FrontEnd, House, house, wait_until
from tests.frontends.http.test_responses import PATH, WEATHER, client_of, prompt_of
from tests.frontends.http.test_tools import TWO_CALLS, writes


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def stream_of(client: openai.OpenAI, name: str, after: int) -> list[Any]:
    return list(client.responses.retrieve(name, stream=True, starting_after=after))


def test_a_stream_in_the_background_is_read_on_from_any_event(client: openai.OpenAI, served: House) -> None:
    served.script = writes(TWO_CALLS, pause_s=0.001)
    events = list(client.responses.create(model="tiny", input="hi", tools=[WEATHER], background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    name = events[-1].response.id
    for after in (-1, 0, len(events) // 2, len(events) - 2):
        assert stream_of(client, name, after) == events[after + 1 :]
    assert client.responses.retrieve(name).output_text == "Let me see."


def test_a_reader_that_leaves_changes_nothing(client: openai.OpenAI, served: House) -> None:
    served.script = writes("a very long story " * 3, pause_s=0.003)
    stream = client.responses.create(model="tiny", input="hi", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    rest = stream_of(client, first.response.id, first.sequence_number)  # while it is made
    assert rest[-1].type == "response.completed"
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].response.output_text == "a very long story " * 3


def test_a_cancelled_stream_ends_for_its_readers(client: openai.OpenAI, served: House) -> None:
    served.script = writes("a very long story " * 5, pause_s=0.05)
    stream = client.responses.create(model="tiny", input="hi", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    assert stream_of(client, first.response.id, 0)[-1].type == "response.cancelled"
    stream.close()
    wait_until(lambda: served.engine.num_running == 0)


def test_another_worker_streams_what_one_makes(tmp_path: Path) -> None:
    database = make_database(tmp_path)
    with house(running=False) as built:
        config = built.front.service.config
        workers = [FrontEnd(config, responses_path=database) for _ in range(2)]
        try:
            built.start_engine()
            built.script = writes("a very long story " * 3, pause_s=0.003)
            maker, reader = (
                openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=3) for worker in workers
            )
            with maker, reader:
                stream = maker.responses.create(model="tiny", input="hi", background=True, stream=True)
                first = next(iter(stream))
                assert first.type == "response.created"
                elsewhere = stream_of(reader, first.response.id, -1)
                assert [event.to_dict() for event in [first, *stream]] == [event.to_dict() for event in elsewhere]
        finally:
            for worker in workers:
                worker.stop()


def test_only_streams_in_the_background_are_streamed_again(client: openai.OpenAI, served: House) -> None:
    response = client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        stream_of(client, response.id, 0)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(response.id, stream=True, starting_after="x")  # type: ignore[call-overload]


def test_input_items_are_told_with_those_before(client: openai.OpenAI, served: House) -> None:
    served.script = writes("Hello.")
    first = client.responses.create(model="tiny", input="hi")
    second = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "and?"}], previous_response_id=first.id
    )
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert [item.id for item in items][1] == first.output[0].id
    assert len({item.id for item in items}) == 3
    assert [item.id for item in client.responses.input_items.list(second.id, limit=1)] == [item.id for item in items][
        ::-1
    ]


def test_a_message_is_listed_with_its_text_in_a_part(client: openai.OpenAI, served: House) -> None:
    said: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    listed = client.responses.input_items.list(client.responses.create(model="tiny", input=said).id, order="asc")
    asked, answered = (item.to_dict()["content"] for item in listed)
    assert asked == [{"type": "input_text", "text": "hi"}]
    assert answered == [{"type": "output_text", "text": "Hello.", "annotations": []}]
    conversation = client.conversations.create(items=said)
    kept = client.conversations.items.list(conversation.id, order="asc")
    assert [item.to_dict()["content"] for item in kept] == [asked, answered]


def test_listed_items_have_a_status(client: openai.OpenAI, served: House) -> None:
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "incomplete"}
    response = client.responses.create(model="tiny", input=[{"role": "user", "content": "hi"}, call, output])
    items = client.responses.input_items.list(response.id, order="asc")
    assert [item.to_dict()["status"] for item in items] == ["completed", "incomplete", "completed"]
    response = client.responses.create(model="tiny", input="hi")
    assert [item.to_dict()["status"] for item in client.responses.input_items.list(response.id)] == ["completed"]


def test_an_item_is_sent_by_its_id(client: openai.OpenAI, served: House) -> None:
    served.script = writes(TWO_CALLS)
    first = client.responses.create(model="tiny", input="hi", tools=[WEATHER])
    (asked,) = client.responses.input_items.list(first.id)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in first.output
        if item.type == "function_call"
    ]
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in (asked, *first.output)]
    client.responses.create(model="tiny", input=[*references, *results], tools=[WEATHER])
    by_reference = prompt_of(served)
    client.responses.create(model="tiny", input=results, previous_response_id=first.id, tools=[WEATHER])
    assert prompt_of(served) == by_reference


def test_input_is_counted_without_a_model(client: openai.OpenAI, served: House) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "hi", "instructions": "Be brief.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**body)
    assert served.engine.submits == []
    usage = client.responses.create(**body).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


def test_a_conversation_grows_with_its_responses(client: openai.OpenAI, served: House) -> None:
    start: Any = [{"type": "message", "role": "system", "content": "Be brief."}]
    conversation = client.conversations.create(items=start, metadata={"a": "b"})
    assert client.conversations.retrieve(conversation.id) == conversation
    served.script = writes("Hello.")
    first = client.responses.create(model="tiny", input="hi", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    list(client.responses.create(model="tiny", input="and?", conversation={"id": conversation.id}, stream=True))
    assert prompt_of(served) == "<system>Be brief.<user>hi<assistant>Hello.<user>and?<assistant>"
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert len(items) == 5
    assert client.conversations.items.retrieve(items[1].id, conversation_id=conversation.id).id == items[1].id


def test_a_conversation_is_changed_and_deleted(client: openai.OpenAI, served: House) -> None:
    conversation = client.conversations.create()
    user: Any = {"type": "message", "role": "user", "content": "hi"}
    added = client.conversations.items.create(conversation.id, items=[user, user]).data
    client.conversations.items.delete(str(added[0].id), conversation_id=conversation.id)
    assert [item.id for item in client.conversations.items.list(conversation.id)] == [added[1].id]
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="hi", conversation=conversation.id)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/conversations", {"items": {}}, "items"),
        ("/v1/conversations", {"items": False}, "items"),
        ("/v1/conversations", {"items": [{"type": "image"}]}, "items[0]"),
        ("/v1/conversations", {"items": [{"role": "user"}] * 21}, "items"),
        ("/v1/conversations", {"items": [{"content": "hi"}]}, "items[0].role"),
        (
            "/v1/conversations",
            {"items": [{"role": "user", "content": "hi"}, {"role": "x", "content": "hi"}]},
            "items[1].role",
        ),
        ("/v1/conversations", {"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items[0]"),
        ("/v1/conversations", {"items": [{"role": "user", "content": "hi", "id": 5}]}, "items[0].id"),
        ("/v1/conversations", {"items": [{"type": "function_call", "arguments": "{}"}]}, "items[0]"),
        ("/v1/conversations", {"metadata": {"a": 1}}, "metadata"),
        (PATH, {"input": "hi", "conversation": "", "previous_response_id": "resp_x"}, "conversation"),
    ],
)
def test_what_is_wrong_is_named(served: House, path: str, body: dict[str, Any], param: str) -> None:
    response = served.post(path, **body)
    assert (response.status_code in (400, 404), response.json()["error"]["param"]) == (True, param)
