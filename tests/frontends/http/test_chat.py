"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.frontends.http.builders import TOKENIZER, House, ids, prompt_of, says, text_of
from tests.frontends.scripted_engine import Script

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
PATH = "/v1/chat/completions"


def chat(house: House, **body: Any) -> dict[str, Any]:
    response = house.post(PATH, **{"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_document_has_the_fields_of_openai(served: House) -> None:
    document = chat(served)
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", document["id"])
    assert document["object"] == "chat.completion"
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "the quick brown fox", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert document["usage"]["total_tokens"] == sum(
        document["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )


def test_a_stream_is_this_transcript(served: House) -> None:
    served.script = says("the fox")
    response = served.post(PATH, messages=HELLO, stream=True, request_id="r1")
    created = re.search('"created":([0-9]+)', response.text)
    assert created is not None
    head = (
        f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created[1]},"model":"tiny","choices":['
    )
    pieces = [TOKENIZER.decode([token]) for token in ids("the fox")]
    first = (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
    )
    middle = [
        f'{head}{{"index":0,"delta":{{"content":"{piece}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        for piece in pieces[:-1]
    ]
    counts = {"prompt_tokens": len(ids("<user>hello<assistant>")), "completion_tokens": len(pieces)}
    counts |= {"total_tokens": sum(counts.values()), "prompt_tokens_details": {"cached_tokens": 0}}
    usage = json.dumps(counts, separators=(",", ":"))
    last = (
        f'{head}{{"index":0,"delta":{{"content":"{pieces[-1]}"}},"logprobs":null,"finish_reason":"length",'
        f'"stop_reason":null}}],"usage":{usage}}}\n\n'
    )
    assert response.text == "".join([first, *middle, last, "data: [DONE]\n\n"])


def test_the_template_makes_the_prompt(served: House) -> None:
    chat(served, messages=[{"role": "system", "content": "be brief"}, *HELLO])
    assert prompt_of(served) == "<system>be brief<user>hello<assistant>"


def test_documents_and_effort_reach_the_template(served: House) -> None:
    chat(served, documents=[{"text": "the fox"}, {"text": "the dog"}], reasoning_effort="low")
    assert prompt_of(served) == "<effort>low<document>the fox<document>the dog<user>hello<assistant>"


def test_typed_text_parts_are_joined(served: House) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    chat(served, messages=[{"role": "user", "content": parts}])
    assert prompt_of(served) == "<user>hello\nyou<assistant>"


def test_the_final_message_can_be_continued(served: House) -> None:
    chat(served, messages=[*HELLO, {"role": "assistant", "content": "well"}], continue_final_message=True)
    assert prompt_of(served) == "<user>hello<assistant>well"


def test_max_completion_tokens_wins_over_max_tokens(served: House) -> None:
    chat(served, max_tokens=5, max_completion_tokens=7)
    assert served.engine.submits[0].params["max_tokens"] == 7


def test_without_a_limit_the_engine_decides(served: House) -> None:
    chat(served)
    assert "max_tokens" not in served.engine.submits[0].params


def test_logprobs_are_told_per_token(served: House) -> None:
    tokens = ids("the fox")
    rows = [[-0.5, 1, [token, 40], [-0.5, -2.0]] for token in tokens]
    served.script = lambda submit, choice: Script(tokens, logprobs=rows)
    content = chat(served, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [TOKENIZER.decode([token]) for token in tokens]
    assert content[0]["bytes"] == list(TOKENIZER.token_bytes(tokens[0]))
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(tokens)
    chosen_only = chat(served, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in chosen_only] == [[]] * len(tokens)
    by_id = chat(served, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert by_id[0]["token"] == f"token_id:{tokens[0]}"


def test_each_choice_begins_with_a_role(served: House) -> None:
    served.script = lambda submit, choice: Script(ids(["the", "fox"][choice]), pause_s=0.002)
    documents = served.stream(PATH, messages=HELLO, n=2, temperature=1.0)
    roles = [c["index"] for e in documents[:-1] for c in e["choices"] if c["delta"].get("role") == "assistant"]
    assert sorted(roles) == [0, 1]
    assert [text_of(documents, index) for index in range(2)] == ["the", "fox"]


def test_an_empty_answer_still_ends(served: House) -> None:
    served.script = lambda submit, choice: Script([1], reason="stop", detail=1)
    documents = served.stream(PATH, messages=HELLO)
    assert text_of(documents) == ""
    assert documents[-2]["choices"][0]["finish_reason"] == "stop"
    assert documents[-1] == "[DONE]"


def test_usage_is_told_at_the_end_unless_the_request_says_otherwise(served: House) -> None:
    """In the last chunk beside its choice, where clients that do not ask for it look."""

    def usages(**body: Any) -> list[Any]:
        documents = served.stream("/v1/chat/completions", messages=HELLO, **body)[:-1]
        return [document.get("usage") for document in documents if document.get("usage")]

    (usage,) = usages()
    assert usage["completion_tokens"] == len(ids("the quick brown fox"))
    (stopped,) = usages(stop="brown")
    assert 0 < stopped["completion_tokens"] < usage["completion_tokens"]
    assert usages(stream_options={"include_usage": False}) == []
    assert usages(n=2, temperature=1.0) == []
