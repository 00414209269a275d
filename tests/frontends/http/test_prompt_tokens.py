"""Which tokens a prompt becomes over HTTP, with a tokenizer that has a token for the beginning."""

from __future__ import annotations

from tests.frontends.http.embedded import Embedded

HELLO = [{"role": "user", "content": "hi"}]


def test_special_tokens_are_added_to_a_text_unless_refused_and_to_a_chat_when_asked_for(embedded: Embedded) -> None:
    """A chat template writes them itself."""

    def of_text(**body: bool) -> list[int]:
        document = embedded.ask("/v1/completions", prompt="hi", max_tokens=1, return_token_ids=True, **body)
        return list(document["choices"][0]["prompt_token_ids"])

    def of_chat(**body: bool) -> list[int]:
        document = embedded.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, return_token_ids=True, **body)
        return list(document["prompt_token_ids"])

    begin, *text = of_text()
    assert of_text(add_special_tokens=True) == [begin, *text]
    assert of_text(add_special_tokens=False) == text
    assert of_chat(add_special_tokens=False) == of_chat()
    assert of_chat(add_special_tokens=True) == [begin, *of_chat()]
