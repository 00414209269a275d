"""POST /v1/embeddings, as OpenAI's client and those built on it ask for vectors."""

from __future__ import annotations

import base64
import json
import math
import time
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from inferengine.client import Client
from inferengine.simulation.simulated_executor import simulated_embedding
from inferengine.wire.messages import Reject
from tests.engine.builders import address_of
from tests.frontends.http.builders import House, house, ids, open_request, wait_until
from tests.frontends.http.embedded import Embedded
from tests.frontends.scripted_engine import EMBEDDING_SIZE, Script

PATH = "/v1/embeddings"
TEXTS = ["The cat sat on the mat.", "A queue is a line of people who wait.", "one"]


def floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def embed(served: House | Embedded, **body: Any) -> dict[str, Any]:
    response = served.post(PATH, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def vectors(served: House | Embedded, **body: Any) -> list[list[float]]:
    document = embed(served, **body)
    assert [entry["index"] for entry in document["data"]] == list(range(len(document["data"])))
    return [entry["embedding"] for entry in document["data"]]


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


# -- what is asked of the engine, and what comes back -----------------------------------------------------------------


def test_the_document_is_openais(served: House) -> None:
    document = embed(served, input="say", model="tiny", user="ada")
    tokens = len(ids("say"))
    assert (document["object"], document["model"]) == ("list", "tiny")
    assert document["data"] == [
        {"object": "embedding", "index": 0, "embedding": floats(simulated_embedding(tokens, False, EMBEDDING_SIZE))}
    ]
    assert (document["usage"]["prompt_tokens"], document["usage"]["total_tokens"]) == (tokens, tokens)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("say", [ids("say")]),
        (["say", "the quick"], [ids("say"), ids("the quick")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
    ],
)
def test_every_shape_of_input_reaches_the_engine(served: House, given: Any, prompts: list[list[int]]) -> None:
    found = vectors(served, input=given)
    asked = [array("I", submit.prompt or b"").tolist() for submit in served.engine.submits]
    assert asked == prompts
    assert found == [floats(simulated_embedding(len(prompt), False, EMBEDDING_SIZE)) for prompt in prompts]
    assert {(submit.reply, submit.pooling) for submit in served.engine.submits} == {("embedding", "")}


def test_base64_is_little_endian_f32(served: House) -> None:
    (encoded,) = vectors(served, input="say", encoding_format="base64")
    assert base64.b64decode(encoded) == simulated_embedding(len(ids("say")), False, EMBEDDING_SIZE)


def test_fewer_dimensions_are_the_first_ones_of_length_one_again(served: House) -> None:
    (whole,), (short,) = vectors(served, input="say"), vectors(served, input="say", dimensions=3)
    norm = math.hypot(*whole[:3])
    assert short == pytest.approx([value / norm for value in whole[:3]], rel=1e-6)
    assert vectors(served, input="say", dimensions=EMBEDDING_SIZE) == [whole]
    (encoded,) = vectors(served, input="say", dimensions=3, encoding_format="base64")
    assert floats(base64.b64decode(encoded)) == short


def test_the_requests_own_pooling_and_options_reach_the_engine(served: House) -> None:
    found = vectors(served, input=[5, 6], pooling="mean", priority=-3, cache_salt="s", request_id="mine")
    (submit,) = served.engine.submits
    assert (submit.pooling, submit.priority, submit.salt, submit.label) == ("mean", -3, b"s", "mine")
    assert found == [floats(simulated_embedding(2, True, EMBEDDING_SIZE))]


@pytest.mark.parametrize(("keep", "length"), [(2, 2), (-1, 512), (700, 600)])
def test_long_inputs_are_cut_as_asked(served: House, keep: int, length: int) -> None:
    embed(served, input=[1] * 300 + [2] * 300, truncate_prompt_tokens=keep)
    prompt = array("I", served.engine.submits[0].prompt or b"").tolist()
    assert prompt == ([1] * 300 + [2] * 300)[-length:]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "input", "invalid_request"),
        ({"input": ""}, 400, "input", "invalid_request"),
        ({"input": []}, 400, "input", "invalid_request"),
        ({"input": ["a", ""]}, 400, "input[1]", "invalid_request"),
        ({"input": ["a", 5]}, 400, "input[1]", "invalid_request"),
        ({"input": [[1], []]}, 400, "input[1]", "invalid_request"),
        ({"input": [1, -1]}, 400, "input", "invalid_request"),
        ({"input": {"text": "a"}}, 400, "input", "invalid_request"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "invalid_request"),
        ({"input": "a", "dimensions": 9}, 400, "dimensions", "invalid_request"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "invalid_request"),
        ({"input": "a", "pooling": "max"}, 400, "pooling", "invalid_request"),
        ({"input": "a", "user": 7}, 400, "user", "invalid_request"),
        ({"input": "a", "model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"input": "a", "normalize": False}, 400, "normalize", "unsupported"),
        ({"input": "a", "detached": True}, 400, "detached", "unsupported"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "invalid_request"),
        ({"input": ["a"] * 2049}, 400, "input", "invalid_request"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    served: House, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    assert error_of(served.post(PATH, **body)) == (status, param, code)
    assert served.engine.submits == []


def test_the_input_that_the_engine_refuses_is_named(served: House) -> None:
    refusal = Reject(None, None, "context_length_exceeded", "too long", "prompt")
    served.script = lambda submit, choice: Script(refusal=refusal if len(submit.prompt or b"") > 8 else None)
    response = served.post(PATH, input=[[1], [1, 2], [1, 2, 3], [4]])
    assert error_of(response) == (400, "input[2]", "context_length_exceeded")


def test_an_engine_without_embeddings_says_so() -> None:
    with house(running=False) as built:
        built.engine.info = built.engine.info.replace(embedding_size=0, pooling="")
        built.start_engine()
        assert error_of(built.post(PATH, input="say")) == (400, None, "unsupported")


def test_a_failure_is_the_calls_and_the_others_are_cancelled(served: House) -> None:
    detail = ["engine_error", "It failed."]

    def script(submit: Any, choice: int) -> Script:
        return Script(reason="error", detail=detail) if len(submit.prompt) == 4 else Script([1], stop_after=0)

    served.script = script
    assert error_of(served.post(PATH, input=[[1], [1, 2], [1, 2, 3]])) == (500, None, "engine_error")
    wait_until(lambda: not served.engine.num_running)


def test_a_client_that_leaves_cancels_its_inputs(served: House) -> None:
    served.script = lambda submit, choice: Script([1], stop_after=0, reason="stop")
    with open_request(served.front.port, PATH, input=[[1], [2]]):
        wait_until(lambda: served.engine.num_running == 2)
    wait_until(lambda: not served.engine.num_running)


def test_a_thousand_inputs_go_out_a_batch_at_a_time(served: House) -> None:
    """As LangChain sends them: 1,000 lists of token ids in one call."""
    waiting: list[int] = []
    served.script = lambda submit, choice: waiting.append(served.engine.num_running) or Script(pause_s=0.05)
    found = vectors(served, input=[[7] * (1 + place % 5) for place in range(1000)])
    assert found == [floats(simulated_embedding(1 + place % 5, False, EMBEDDING_SIZE)) for place in range(1000)]
    assert 20 < max(waiting) < 256


def test_an_engine_that_takes_few_at_a_time_gets_few(served: House) -> None:
    """As with scheduler.max_tenant_requests below the number of inputs."""
    busy = Reject(None, None, "rate_limited", "too many", "tenant", True, 1000)
    refused: list[bool] = []

    def script(submit: Any, choice: int) -> Script:
        refused.append(served.engine.num_running >= 5)
        return Script(refusal=busy if refused[-1] else None, pause_s=0.02)

    served.script = script
    found = vectors(served, input=[[7] * (1 + place % 5) for place in range(100)])
    assert found == [floats(simulated_embedding(1 + place % 5, False, EMBEDDING_SIZE)) for place in range(100)]
    assert 0 < sum(refused) < 100


def test_an_engine_that_takes_none_sends_the_caller_away(served: House) -> None:
    busy = Reject(None, None, "rate_limited", "too many", "tenant", True, 3000)
    served.script = lambda submit, choice: Script(refusal=busy)
    response = served.post(PATH, input=[[1]] * 20)
    assert error_of(response) == (429, "tenant", "rate_limited")
    assert response.headers["retry-after"] == "3"


def test_a_key_pays_for_its_own_salt_and_tenant(served: House) -> None:
    """Whatever a generation carries of its sender, an embedding carries as well."""
    served.complete(prompt="say")
    embed(served, input="say")
    generated, embedded = served.engine.submits
    assert (generated.tenant, generated.salt, generated.priority) == (
        embedded.tenant,
        embedded.salt,
        embedded.priority,
    )
    assert embedded.deadline_ms is not None


def test_the_route_is_counted(served: House) -> None:
    embed(served, input="say")
    counted = 'http_requests_total{handler="/v1/embeddings",status="2xx"}'
    wait_until(lambda: counted in served.http.get("/metrics").text)


# -- the official client ----------------------------------------------------------------------------------------------


@pytest.fixture
def client(embedded: Embedded) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded.front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(answer: Any, expected: list[list[float]]) -> None:
    for entry, values in zip(answer.data, expected, strict=True):
        assert entry.embedding == pytest.approx(values, abs=1e-6)


def test_openais_client_and_the_engines_own_agree(client: openai.OpenAI, embedded: Embedded) -> None:
    """The SDK asks for base64 by itself."""
    answer = client.embeddings.create(model="", input=TEXTS)
    with Client(address_of(embedded.engine)) as direct:
        expected = [embedding.values for embedding in direct.embed(TEXTS)]
    check(answer, expected)
    assert [len(entry.embedding) for entry in answer.data] == [384] * 3
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model="", input=TEXTS, encoding_format="float")
    check(plain, expected)


def test_token_ids_give_what_their_text_gives(client: openai.OpenAI, embedded: Embedded) -> None:
    tokens = [embedded.ask("/tokenize", prompt=text)["tokens"] for text in TEXTS]
    text = client.embeddings.create(model="", input=TEXTS, dimensions=64)
    listed = client.embeddings.create(model="", input=tokens, dimensions=64)
    single = client.embeddings.create(model="", input=tokens[0], dimensions=64)
    for one, other in zip(text.data, listed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.isclose(math.hypot(*one.embedding), 1.0, rel_tol=1e-5)
    assert single.data[0].embedding == pytest.approx(text.data[0].embedding, abs=1e-6)


def test_pooling_chosen_by_the_request(client: openai.OpenAI) -> None:
    last, mean = (
        client.embeddings.create(model="", input=TEXTS[0], extra_body={"pooling": pooling}).data[0].embedding
        for pooling in ("last", "mean")
    )
    assert sum(one * other for one, other in zip(last, mean, strict=True)) < 0.999
    assert last == pytest.approx(client.embeddings.create(model="", input=TEXTS[0]).data[0].embedding, abs=1e-6)


def test_what_the_client_cannot_have_is_told_by_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="384 values") as refused:
        client.embeddings.create(model="", input="a", dimensions=385)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
        client.embeddings.create(model="", input=[[5] * 1025, [5]])
    assert too_long.value.param == "input[0]"
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.embeddings.create(model="", input=[[5], [4096]])


def test_beside_a_stream_that_generates(client: openai.OpenAI, embedded: Embedded) -> None:
    stream = client.completions.create(model="", prompt="Once", max_tokens=60, stream=True, temperature=0, seed=1)
    alone = client.embeddings.create(model="", input=TEXTS)
    text = "".join(chunk.choices[0].text for chunk in stream)
    again = client.completions.create(model="", prompt="Once", max_tokens=60, temperature=0, seed=1)
    assert text == again.choices[0].text
    assert len(alone.data) == 3


def test_the_engine_counts_embeddings(embedded: Embedded) -> None:
    def given() -> float:
        lines = embedded.http.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("inferengine_embeddings_total{")]
        return float(line.rsplit(" ", 1)[1])

    before = given()
    vectors(embedded, input=TEXTS)
    deadline = time.monotonic() + 10.0
    while given() != before + len(TEXTS):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_long_answer_comes_in_parts_that_make_one_document(embedded: Embedded) -> None:
    found = vectors(embedded, input=[[place] for place in range(100)])
    assert {len(vector) for vector in found} == {384}
    assert len({tuple(vector) for vector in found}) == 100


def test_numbers_are_json_that_any_reader_takes(embedded: Embedded) -> None:
    response = embedded.post(PATH, input=TEXTS[0])
    assert response.headers["content-type"] == "application/json"

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    json.loads(response.content, parse_constant=refuse)
