"""POST /v1/completions: documents, streams, and what reaches the engine."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import pytest

from inferengine.client.load_balancing import session_key
from inferengine.wire.messages import to_u64
from tests.frontends.http.builders import TOKENIZER, House, ids, says, text_of, wait_until
from tests.frontends.scripted_engine import MAX_MODEL_LEN, Script

EMOJI = "a 🎉 b 你好世界 ü再见 c"


def test_a_document_has_the_fields_of_openai(served: House) -> None:
    document = served.complete(max_tokens=4)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", document.pop("id"))
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "the quick brown fox",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(ids("say")),
            "completion_tokens": len(ids("the quick brown fox")),
            "total_tokens": len(ids("say")) + len(ids("the quick brown fox")),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream_is_this_transcript(served: House) -> None:
    served.script = says("the fox")
    response = served.post(
        "/v1/completions",
        prompt="say",
        stream=True,
        stream_options={"include_usage": True},
        request_id="r1",
    )
    created = re.search('"created":([0-9]+)', response.text)
    assert created is not None
    head = f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created[1]},"model":"tiny","choices":['
    pieces = [TOKENIZER.decode([token]) for token in ids("the fox")]
    middle = [
        f'{head}{{"index":0,"text":"{piece}","logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        for piece in pieces[:-1]
    ]
    last = (
        f'{head}{{"index":0,"text":"{pieces[-1]}","logprobs":null,"finish_reason":"length","stop_reason":null}}],'
        '"usage":null}\n\n'
    )
    usage = (
        f'{head}],"usage":{{"prompt_tokens":{len(ids("say"))},"completion_tokens":{len(pieces)},'
        f'"total_tokens":{len(ids("say")) + len(pieces)},"prompt_tokens_details":{{"cached_tokens":0}}}}}}\n\n'
    )
    assert response.text == "".join([*middle, last, usage, "data: [DONE]\n\n"])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_split_characters_arrive_whole(served: House, chunk: int) -> None:
    """Emoji and CJK cut into bytes by the vocabulary: no U+FFFD in any event, and the sum is the text."""
    served.script = says(EMOJI, chunk=chunk)
    documents = served.stream()
    assert text_of(documents) == EMOJI
    assert not any("\ufffd" in choice["text"] for document in documents[:-1] for choice in document["choices"])


def test_a_stop_string_never_leaks(served: House) -> None:
    served.script = says("the quick brown fox", pause_s=0.002)
    documents = served.stream(stop=["brown", "zebra"])
    assert text_of(documents) == "the quick "
    final = documents[-2]["choices"][0]
    assert (final["finish_reason"], final["stop_reason"]) == ("stop", "brown")
    assert served.complete(stop="brown", include_stop_str_in_output=True)["choices"][0]["text"] == "the quick brown"


def test_a_stop_string_cancels_the_rest_in_the_engine(served: House) -> None:
    words = ids("the fox " * 40)
    served.script = lambda submit, choice: Script(words, stop_after=len(words) - 1)  # only a cancel ends it
    served.complete(stop="fox")
    # told to the engine as the answer leaves: it may arrive after the client has read all
    wait_until(lambda: served.engine.submits[0].id in served.engine.cancelled)


def test_a_stop_token_is_named(served: House) -> None:
    served.script = lambda submit, choice: Script([*ids("the fox"), 1], reason="stop", detail=1)
    choice = served.complete()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the fox", "stop", 1)


def test_choices_are_numbered_through_prompts_and_n(served: House) -> None:
    served.script = lambda submit, choice: Script(ids(f"{len(submit.prompt or b'')} {'the fox'[choice]}"))
    document = served.complete(prompt=["say", "say that"], n=2, temperature=0.5)
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    lengths = [4 * len(ids("say")), 4 * len(ids("say that"))]
    expected = [f"{length} {letter}" for length in lengths for letter in "th"]
    assert [choice["text"] for choice in document["choices"]] == expected
    documents = served.stream(prompt=["say", "say that"], n=2, temperature=0.5)
    assert [text_of(documents, index) for index in range(4)] == expected
    assert documents[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the fox", [ids("the fox")]),
        (["the", "fox"], [ids("the"), ids("fox")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_in_all_four_shapes(served: House, prompt: object, expected: list[list[int]]) -> None:
    served.complete(prompt=prompt)
    assert [list(array("I", submit.prompt or b"")) for submit in served.engine.submits] == expected


def test_parameters_reach_the_engine(served: House) -> None:
    wanted = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 42,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "allowed_token_ids": [3, 4],
    }
    served.complete(**wanted, logit_bias={"5": -1}, priority=3, cache_salt="tenant", request_id="mine")
    submit = served.engine.submits[0]
    values = {name: list(value) if isinstance(value, tuple | list) else value for name, value in submit.params.items()}
    assert [list(pair) for pair in values.pop("logit_bias")] == [[5, -1.0]]
    assert values == wanted
    assert (submit.priority, submit.salt, submit.label) == (3, b"tenant", "mine")
    assert submit.deadline_ms == 600_000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_session_is_named_by_the_body_or_the_header(served: House, path: str) -> None:
    prompt = {"prompt": [5, 6]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"input": "hi"} if path == "/v1/responses" else prompt
    header = {"x-session-id": "mine"}
    asked = [
        ({}, {}),
        ({}, header),
        ({"prompt_cache_key": "mine"}, {}),
        ({"session_id": "mine", "prompt_cache_key": "other"}, {}),
        ({"prompt_cache_key": "other"}, header),
        ({"session_id": "mine", "detached": path == "/v1/completions"}, {}),
    ]
    for fields, headers in asked:
        answer = served.http.post(path, json={"max_tokens": 4, **body, **fields}, headers=headers)
        assert answer.status_code == 200
    mine, other = (to_u64([session_key(name) or 0]) for name in ("mine", "other"))
    assert [submit.session for submit in served.engine.submits] == [b"", mine, mine, mine, other, mine]


def test_max_tokens_is_sixteen_unless_given(served: House) -> None:
    served.complete()
    assert served.engine.submits[0].params["max_tokens"] == 16


def test_fields_that_ask_for_nothing_are_fine(served: House) -> None:
    served.complete(suffix="", best_of=1, tools=[], response_format={"type": "text"}, user="u", unknown_field=[1])
    served.complete(**dict.fromkeys(("suffix", "tools", "logit_bias", "stop", "seed", "temperature", "stream")))
    assert len(served.engine.submits) == 2


def test_echo_puts_the_prompt_before_each_choice(served: House) -> None:
    document = served.complete(prompt=["say ", ids("fox ")], echo=True)
    assert [choice["text"] for choice in document["choices"]] == ["say the quick brown fox", "fox the quick brown fox"]
    assert text_of(served.stream(prompt="say ", echo=True)) == "say the quick brown fox"


def test_logprobs_lie_beside_the_text(served: House) -> None:
    tokens = ids("the fox")
    rows = [[-0.5, 1, [token, 40], [-0.5, -2.0]] for token in tokens]
    served.script = lambda submit, choice: Script(tokens, logprobs=rows)
    shown = served.complete(logprobs=2)["choices"][0]["logprobs"]
    pieces = [TOKENIZER.decode([token]) for token in tokens]
    assert shown["tokens"] == pieces
    assert shown["token_logprobs"] == [-0.5] * len(tokens)
    assert shown["text_offset"] == [len("".join(pieces[:place])) for place in range(len(pieces))]
    assert shown["top_logprobs"][0] == {pieces[0]: -0.5, TOKENIZER.decode([40]): -2.0}
    streamed = [event["choices"][0]["logprobs"] for event in served.stream(logprobs=2)[:-1]]
    assert [offset for one in streamed for offset in one["text_offset"]] == shown["text_offset"]
    assert [token for one in streamed for token in one["tokens"]] == shown["tokens"]


@pytest.mark.parametrize("text", ["日本.", "a 🎉 b", "سلام دنیا", "नमस्ते", "한국어 x", "e\u0301 ü"])
def test_offsets_are_places_in_the_text_of_any_script(served: House, text: str) -> None:
    """All tokens of a character that takes several begin where it does, in a document and in a stream."""
    tokens = ids(text)
    served.script = lambda submit, choice: Script(tokens, logprobs=[[-0.5, 1, [token], [-0.5]] for token in tokens])
    document = served.complete(prompt="日", logprobs=1)["choices"][0]
    whole = [len(TOKENIZER.decode(tokens[:place]).rstrip("\ufffd")) for place in range(len(tokens))]
    assert document["text"] == text
    assert document["logprobs"]["text_offset"] == whole
    streamed = [event["choices"][0]["logprobs"] for event in served.stream(prompt="日", logprobs=1)[:-1]]
    assert [offset for one in streamed for offset in one["text_offset"]] == whole


def test_an_echo_shows_what_was_kept_of_a_longer_prompt(served: House) -> None:
    """The offsets of the prompt's tokens are places in it."""
    cut = served.complete(prompt="the quick brown fox", echo=True, max_tokens=0, truncate_prompt_tokens=3)
    kept = TOKENIZER.decode(ids("the quick brown fox")[-3:])
    assert cut["choices"][0]["text"] == kept != "the quick brown fox"
    whole = served.complete(prompt="fox", echo=True, max_tokens=0, truncate_prompt_tokens=300)
    assert whole["choices"][0]["text"] == "fox"


def test_no_tokens_and_an_echo_tell_the_prompt_alone(served: House) -> None:
    document = served.complete(prompt=["say 日", "fox"], echo=True, max_tokens=0, n=2, temperature=1.0)
    assert [choice["text"] for choice in document["choices"]] == ["say 日", "say 日", "fox", "fox"]
    assert {choice["finish_reason"] for choice in document["choices"]} == {"length"}
    assert document["usage"]["completion_tokens"] == 0
    assert document["usage"]["total_tokens"] == document["usage"]["prompt_tokens"]
    events = served.stream(prompt="say", echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert text_of(events) == "say"
    assert events[-2]["usage"]["completion_tokens"] == 0
    refused = served.post("/v1/completions", prompt="say", max_tokens=0).json()["error"]
    assert (refused["param"], refused["code"]) == ("max_tokens", "invalid_request")


def test_infinite_logprobs_stay_json(served: House) -> None:
    """What allowed_token_ids shuts out has probability zero, and may still be among the best alternatives."""
    served.script = lambda submit, choice: Script([40], logprobs=[[0.0, 1, [40, 41], [0.0, float("-inf")]]])
    shown = served.complete(logprobs=2)["choices"][0]["logprobs"]
    assert shown["top_logprobs"] == [{TOKENIZER.decode([40]): 0.0, TOKENIZER.decode([41]): -9999.0}]


def test_token_ids_on_request(served: House) -> None:
    choice = served.complete(return_token_ids=True)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids("say"), ids("the quick brown fox"))
    documents = served.stream(return_token_ids=True)[:-1]
    assert [token for event in documents for token in event["choices"][0]["token_ids"]] == ids("the quick brown fox")
    assert ["prompt_token_ids" in event["choices"][0] for event in documents] == [True] + [False] * (len(documents) - 1)


@pytest.mark.parametrize("script", [{"pause_s": 0.005}, {"chunk": 3}], ids=["one by one", "together"])
@pytest.mark.parametrize("asked", [{}, {"messages": [{"role": "user", "content": "say"}]}], ids=["text", "chat"])
def test_chunks_with_token_ids_are_those_without_and_the_ids(
    served: House, asked: dict[str, Any], script: dict[str, Any]
) -> None:
    text = 'the "quick" 🎉 fox'
    served.script = says(text, **script)
    path = "/v1/chat/completions" if asked else "/v1/completions"
    response = served.post(path, **{"prompt": "say", **asked, "stream": True, "return_token_ids": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    shown = [json.loads(line) for line in lines]
    assert [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in shown] == lines
    told = [choice for event in shown for choice in event["choices"] if "token_ids" in choice]
    assert [choice["token_ids"] for choice in told] == [[token_id] for token_id in ids(text)]
    parts = [choice["delta"].get("content", "") if asked else choice["text"] for choice in told]
    assert ("".join(parts), "" in parts) == (text, True)
    usual = ["index", "delta" if asked else "text", "logprobs", "finish_reason"]
    assert {tuple(choice) for choice in told[1:-1]} == {(*usual, "token_ids")}


def test_continuous_usage_counts_along(served: House) -> None:
    served.script = says("the fox", pause_s=0.005)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in served.stream(stream_options=options)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids("the fox"))
    served.script = says("the fox", chunk=3)  # several tokens in one message of the engine: each event counts its own
    counts = [event["usage"]["completion_tokens"] for event in served.stream(stream_options=options)[:-2]]
    assert counts == [*range(1, len(ids("the fox")) + 1)]


def test_the_best_n_of_n_are_all_of_them(served: House) -> None:
    assert len(served.complete(n=2, best_of=2, temperature=1.0)["choices"]) == 2


def test_whole_numbers_may_be_written_as_others_write_them(served: House) -> None:
    served.complete(seed=7.0, top_k=40.0, n=1.0, min_tokens=1.0, stop_token_ids=[5.0])
    params = served.engine.submits[-1].params
    assert (params["seed"], params["top_k"], params["min_tokens"], params["stop_token_ids"]) == (7, 40, 1, [5])
    assert type(params["seed"]) is int


def test_cached_tokens_are_told(served: House) -> None:
    served.script = says("fox", cached_tokens=1)
    assert served.complete()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_usage_has_the_draft_tokens_of_all_choices_together(served: House) -> None:
    served.script = says("fox", draft_counts=(3, 1))
    details = served.complete(n=2, temperature=1.0)["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}


def test_a_long_prompt_is_cut_from_the_left_on_request(served: House) -> None:
    served.complete(prompt=list(range(40, 60)), truncate_prompt_tokens=3)
    served.complete(prompt=[40] * 600, truncate_prompt_tokens=-1, max_tokens=12)
    prompts = [list(array("I", submit.prompt or b"")) for submit in served.engine.submits]
    assert prompts == [[57, 58, 59], [40] * (MAX_MODEL_LEN - 12)]


def test_the_request_id_goes_in_and_comes_out(served: House) -> None:
    response = served.http.post("/v1/completions", json={"prompt": "say"}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    forged = served.http.post("/v1/completions", json={"prompt": "say"}, headers={"x-request-id": "a b\tc"})
    assert re.fullmatch("[0-9a-f]{32}", forged.headers["x-request-id"])
