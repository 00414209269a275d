"""POST /v1/rerank and /v1/score: cosines of embeddings, and the yes and no of a reranker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from frontends.http.openai.embeddings import IN_FLIGHT
from inferengine.client.requests import TokenLogprobs
from inferengine.simulation.simulated_executor import simulated_embedding
from inferengine.text import Tokenizer
from inferengine.wire.messages import Reject, Submit
from tests.frontends.http.builders import House, house, ids
from tests.frontends.scripted_engine import EMBEDDING_SIZE, FILES, Script, ScriptedEngine, model_info

TEXTS = ["The cat sat on the mat.", "one", "A queue of people."]


def vector(text: str) -> list[float]:
    return array("f", simulated_embedding(len(ids(text)), False, EMBEDDING_SIZE)).tolist()


def cosine(one: str, other: str) -> float:
    return sum(a * b for a, b in zip(vector(one), vector(other), strict=True))


def ask(served: House, path: str, **body: Any) -> dict[str, Any]:
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_documents_are_sorted_by_the_cosine_of_their_embeddings(served: House) -> None:
    answer = ask(served, "/v1/rerank", query="say", documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], model="tiny")
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert found == pytest.approx({place: cosine("say", text) for place, text in enumerate(TEXTS)})
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(result["document"]["text"] == TEXTS[result["index"]] for result in answer["results"])
    assert answer["usage"]["total_tokens"] == sum(len(ids(text)) for text in ("say", *TEXTS))


def test_the_best_may_be_told_without_their_texts(served: House) -> None:
    whole = ask(served, "/v2/rerank", query="say", documents=TEXTS)["results"]
    best = ask(served, "/v1/rerank", query="say", documents=TEXTS, top_n=2, return_documents=False)["results"]
    assert best == [{key: result[key] for key in ("index", "relevance_score")} for result in whole[:2]]


def test_one_text_or_pairs_of_texts_are_scored(served: House) -> None:
    answer = ask(served, "/v1/score", text_1="say", text_2=TEXTS)
    assert [one["score"] for one in answer["data"]] == pytest.approx([cosine("say", text) for text in TEXTS])
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    pairs = ask(served, "/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])
    expected = [cosine(*both) for both in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"documents": TEXTS}, "query"),
        ("/v1/rerank", {"query": "say", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "say", "documents": ["one", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "say", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "say", "documents": TEXTS, "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "say", "documents": TEXTS, "instruction": "judge"}, "instruction"),
        ("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS}, "text_1"),
        ("/v1/score", {"text_1": "say"}, "text_2"),
        ("/v1/score", {"text_1": "say", "text_2": ["one", 5]}, "text_2[1]"),
        ("/v1/score", {"text_1": "say", "text_2": ["one", "the " * 3000]}, "text_2[1]"),
    ],
)
def test_bad_input_is_named(served: House, path: str, body: dict[str, Any], field: str) -> None:
    response = served.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


# -- a reranker --------------------------------------------------------------------------------------------------------

YES, NO = 302, 303  # added to the vocabulary


def reranker_files() -> dict[str, bytes]:
    tokenizer = json.loads(FILES["tokenizer.json"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": YES, "content": "yes", **plain}, {"id": NO, "content": "no", **plain}]
    return {**FILES, "tokenizer.json": json.dumps(tokenizer).encode()}


def judge(submit: Submit, choice: int) -> Script:
    """Say yes to what has a cat in it. To a mat say no so surely that yes is not among the likeliest."""
    prompt = Tokenizer.from_files(reranker_files()).decode(array("I", submit.prompt or b"").tolist())
    allowed = dict(submit.params)["allowed_token_ids"]
    if len(allowed) == 1:
        return Script([allowed[0]], logprobs=[TokenLogprobs(-9.0, 40, [NO], [-0.5])])
    if "mat" in prompt:
        return Script([NO], logprobs=[TokenLogprobs(-0.5, 1, [NO], [-0.5])])
    best, other = (YES, NO) if "cat" in prompt else (NO, YES)
    return Script([best], logprobs=[TokenLogprobs(-0.1, 1, [best, other], [-0.1, -2.5])])


@pytest.fixture
def reranker() -> Iterator[House]:
    files = reranker_files()
    with house(running=False) as built:
        built.engine = ScriptedEngine(
            built.address, judge, files=files, info=model_info(files, name="my-Reranker-0.6B")
        )
        built.engine.start()
        yield built


def test_a_reranker_is_asked_for_yes_or_no(reranker: House) -> None:
    texts = ["a dog", "a cat", "a mat"]
    answer = ask(reranker, "/v1/rerank", query="pets", documents=texts, instruction="Is it a pet?")
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert found == pytest.approx({0: sigmoid(-2.4), 1: sigmoid(2.4), 2: sigmoid(-8.5)})
    assert [result["index"] for result in answer["results"]] == [1, 0, 2]
    decode = Tokenizer.from_files(reranker_files()).decode
    prompt = decode(array("I", reranker.engine.submits[0].prompt or b"").tolist())
    assert "<Instruct>: Is it a pet?\n<Query>: pets\n<Document>: a dog" in prompt


def pair_files() -> dict[str, bytes]:
    """Return the tokenizer's files with special tokens before, between and after the texts of a pair."""
    document = json.loads(FILES["tokenizer.json"])
    ids_of = document["model"]["vocab"]
    first, last = "A", "B"
    special = {name: {"id": name, "ids": [ids_of[name]], "tokens": [name]} for name in (first, last)}
    begin, end = {"SpecialToken": {"id": first, "type_id": 0}}, {"SpecialToken": {"id": last, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, texts[0], end],
        "pair": [begin, texts[0], end, end, texts[1], end],
        "special_tokens": special,
    }
    return {**FILES, "tokenizer.json": json.dumps(document).encode()}


@pytest.fixture
def cross_encoder() -> Iterator[House]:
    files = pair_files()
    with house(running=False) as built:
        info = model_info(files, embedding_size=1, without=("embeddings", "generation"))
        built.engine = ScriptedEngine(built.address, lambda submit, choice: Script([]), files=files, info=info)
        built.engine.start()
        yield built


def test_a_cross_encoder_reads_both_texts_at_once(cross_encoder: House) -> None:
    answer = ask(cross_encoder, "/v1/score", text_1="say", text_2=TEXTS)
    vocabulary = json.loads(pair_files()["tokenizer.json"])["model"]["vocab"]
    first, last = vocabulary["A"], vocabulary["B"]
    prompts = [array("I", submit.prompt or b"").tolist() for submit in cross_encoder.engine.submits]
    assert prompts == [[first, *ids("say"), last, last, *ids(text), last] for text in TEXTS]
    numbers = [array("f", simulated_embedding(len(prompt), False, 1))[0] for prompt in prompts]
    assert [one["score"] for one in answer["data"]] == pytest.approx([sigmoid(number) for number in numbers])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": "a"}, "scores pairs of texts: ask /v1/rerank"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "trained without"),
    ],
)
def test_what_a_cross_encoder_cannot_is_refused(
    cross_encoder: House, path: str, body: dict[str, Any], words: str
) -> None:
    response = cross_encoder.post(path, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_query_that_leaves_no_place_for_a_document_is_named(cross_encoder: House) -> None:
    longest = cross_encoder.engine.info.max_model_len
    response = cross_encoder.post("/v1/rerank", query="a " * longest, documents=["b"])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("query", "context_length_exceeded")
    assert not cross_encoder.engine.submits


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_a_model_without_the_words_is_no_reranker() -> None:
    with house(http={"rerank": "yes_no"}) as built:
        response = built.post("/v1/score", text_1="a", text_2="b")
        assert response.status_code == 400
        assert "set http.rerank = cosine" in response.json()["error"]["message"]


# -- many texts --------------------------------------------------------------------------------------------------------


class Tokenized:
    """Counts the texts that are tokenized on the event loop: in all, and the most in one turn of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_texts = self.most_in_a_turn = self._in_this_turn = 0
        encode = Tokenizer.encode

        def counted(tokenizer: Tokenizer, text: str, *arguments: Any, **options: Any) -> list[int]:
            with contextlib.suppress(RuntimeError):  # no loop: the engine's thread
                asyncio.get_running_loop().call_soon(self._end_turn)
                self.num_texts += 1
                self._in_this_turn += 1
                self.most_in_a_turn = max(self.most_in_a_turn, self._in_this_turn)
            return encode(tokenizer, text, *arguments, **options)

        monkeypatch.setattr(Tokenizer, "encode", counted)

    def _end_turn(self) -> None:
        self._in_this_turn = 0


DOCUMENTS = [f"{number}" for number in range(2 * IN_FLIGHT)]


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("served", "/v1/rerank", {"query": "say", "documents": DOCUMENTS}),
        ("cross_encoder", "/v1/rerank", {"query": "say", "documents": DOCUMENTS}),
        ("cross_encoder", "/v1/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}),
        ("reranker", "/v1/rerank", {"query": "a cat", "documents": DOCUMENTS}),
        ("served", "/v1/embeddings", {"input": DOCUMENTS}),
        ("served", "/api/embed", {"model": "tiny", "input": DOCUMENTS}),
    ],
)
def test_other_requests_run_between_the_texts_of_a_call(
    model: str, path: str, body: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: House = request.getfixturevalue(model)
    tokenized = Tokenized(monkeypatch)
    ask(asked, path, **body)
    assert tokenized.num_texts >= len(DOCUMENTS)
    assert tokenized.most_in_a_turn == 1


@pytest.mark.parametrize("model", ["cross_encoder", "reranker"])
def test_the_query_is_not_repeated_in_memory_for_every_document(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused call has made no more prompts than may be in flight."""
    asked: House = request.getfixturevalue(model)
    asked.engine.refuse = Reject(None, None, "invalid_request", "No.")
    tokenized = Tokenized(monkeypatch)
    response = asked.post("/v1/rerank", query="say", documents=DOCUMENTS)
    assert response.status_code == 400
    assert tokenized.num_texts <= IN_FLIGHT + 1
