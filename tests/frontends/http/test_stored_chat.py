"""Chat completions with `store`, through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.frontends.http.builders import House


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_kept_read_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], store=True, metadata={"topic": "a"}
    )
    kept = client.chat.completions.retrieve(made.id)
    assert kept.choices == made.choices
    (message,) = client.chat.completions.messages.list(made.id).data
    assert (message.role, message.content) == ("user", "hi")
    client.chat.completions.update(made.id, metadata={"topic": "b"})
    assert [one.id for one in client.chat.completions.list(metadata={"topic": "b"})] == [made.id]
    assert client.chat.completions.list(metadata={"topic": "a"}).data == []
    assert client.chat.completions.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)


def test_parts_of_a_message_are_listed_beside_its_content(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        store=True,
    )
    told, asked = (message.to_dict() for message in client.chat.completions.messages.list(made.id))
    assert (told["content"], told["content_parts"]) == ("Be brief.", None)
    assert (asked["content"], asked["content_parts"]) == (None, [{"type": "text", "text": "hi"}])
    client.chat.completions.delete(made.id)


def test_a_streamed_answer_is_kept_whole(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], store=True, stream=True, n=2, temperature=1.0
        )
    )
    kept = client.chat.completions.retrieve(chunks[0].id)
    for choice in kept.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    client.chat.completions.delete(kept.id)


def test_without_store_nothing_is_kept(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)


def test_a_list_comes_in_pages(client: openai.OpenAI) -> None:
    made = [
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], store=True).id
        for _ in range(3)
    ]
    assert [one.id for one in client.chat.completions.list(limit=2, order="desc")] == made[::-1]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.chat.completions.list(limit=0)
