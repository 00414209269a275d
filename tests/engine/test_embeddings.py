"""Embeddings over the wire: an ordinary request whose terminal row comes with a vector."""

from __future__ import annotations

import asyncio
import math
import secrets
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inferengine.client import AsyncClient, Client, Embedding, EnginePool
from inferengine.engine.service import EngineService
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor, simulated_embedding
from inferengine.text import Tokenizer
from inferengine.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Attach,
    Cancel,
    Credit,
    Reject,
    Step,
    Submit,
    to_u32,
)
from tests.engine.builders import RawClient, address_of, check_idle, make_card, run_service, small_capacity

PROMPT = to_u32([5, 6, 7, 8, 9])
ID = bytes(range(16))
SIZE = 8


@pytest.fixture(scope="module")
def service():
    with run_service() as built:
        yield built
        check_idle(built)


class Connection(RawClient):
    """A bare client that submits exactly what it is told."""

    def ask(self, stream: int = 1, prompt: bytes = PROMPT, **fields: Any) -> None:
        self.send(Submit(fields.pop("id", None) or secrets.token_bytes(16), stream, prompt, **fields))


@contextmanager
def raw_of(service: EngineService, **hello: Any) -> Iterator[Connection]:
    raw = Connection(address_of(service), **hello)
    try:
        yield raw
    finally:
        raw.close()


def read(raw: RawClient, stream: int) -> tuple[Any, bytes | None]:
    """Return the terminal row of a stream, and the vector that came with it."""
    while True:
        step = raw.expect(Step)
        vector = dict(step.embeddings).get(stream)
        for row in step.done:
            if row.stream == stream:
                return row, vector


@pytest.mark.parametrize(("pooling", "mean"), [("", False), ("last", False), ("mean", True)])
def test_the_vector_comes_with_the_terminal_row(service, pooling: str, mean: bool) -> None:
    with raw_of(service) as raw:
        raw.ask(reply="embedding", prompt=PROMPT, pooling=pooling, stream=3)
        row, vector = read(raw, 3)
    assert (row.reason, row.detail, row.prompt_tokens, row.completion_tokens) == ("stop", None, 5, 0)
    assert vector == simulated_embedding(5, mean, SIZE)


def test_welcome_says_that_there_are_embeddings_and_their_size(service) -> None:
    with raw_of(service) as raw:
        assert raw.welcome is not None
        assert raw.welcome.model is not None
        assert "embeddings" in raw.welcome.features
        assert (raw.welcome.model.embedding_size, raw.welcome.model.pooling) == (SIZE, "last")
        assert raw.welcome.protocol == (PROTOCOL_MAJOR, PROTOCOL_MINOR)


def test_the_configuration_chooses_the_pooling_of_requests_that_do_not() -> None:
    with run_service(model={"pooling": "mean"}) as built, Client(address_of(built)) as client:
        assert client.welcome.model is not None
        assert client.welcome.model.pooling == "mean"
        (mean, last) = client.embed([1, 2, 3]) + client.embed([1, 2, 3], pooling="last")
    assert mean.data == simulated_embedding(3, True, SIZE)
    assert last.data == simulated_embedding(3, False, SIZE)


def test_a_model_that_makes_embeddings_alone_generates_nothing() -> None:
    capacity = small_capacity()._replace(is_causal=False)
    with run_service(lambda: SimulatedExecutor(capacity)) as built, raw_of(built) as raw:
        assert raw.welcome is not None
        assert raw.welcome.model is not None
        assert "generation" in raw.welcome.model.without
        raw.ask()
        reject = raw.expect(Reject)
        assert (reject.code, reject.field) == ("unsupported", "model")
        assert "it makes embeddings alone: ask for those" in reject.message
        raw.ask(reply="embedding", stream=3)
        assert read(raw, 3)[1] == simulated_embedding(5, False, SIZE)
        check_idle(built)


@pytest.mark.parametrize(
    ("asked", "code", "field", "words"),
    [
        ({}, "unsupported", "model", "it makes scores of pairs (/v1/rerank, /v1/score) alone"),
        ({"reply": "embedding", "pooling": "mean"}, "invalid_request", "pooling", "made of the first token's state"),
    ],
)
def test_a_model_that_scores_pairs_is_asked_for_nothing_else(
    asked: dict[str, Any], code: str, field: str, words: str
) -> None:
    capacity = small_capacity()._replace(is_causal=False, scores=True, embedding_size=1)
    with run_service(lambda: SimulatedExecutor(capacity)) as built, raw_of(built) as raw:
        raw.ask(**asked)
        reject = raw.expect(Reject)
        assert (reject.code, reject.field) == (code, field)
        assert words in reject.message
        raw.ask(reply="embedding", pooling="cls", stream=3)
        assert read(raw, 3)[1] == simulated_embedding(5, False, 1)
        check_idle(built)


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"reply": "embedding", "pooling": "max"}, "invalid_request", "pooling"),
        ({"pooling": "mean", "params": {"max_tokens": 1}}, "invalid_request", "pooling"),
        ({"reply": "embedding", "params": {"temperature": 0.5}}, "invalid_request", "params"),
        ({"reply": "embedding", "params": {"n": 2}}, "invalid_request", "params"),
        ({"reply": "embedding", "grammar": ("regex", "a", None)}, "invalid_request", "grammar"),
        ({"reply": "embedding", "prompt": to_u32([1, 2**31])}, "invalid_request", "prompt"),
        ({"reply": "embedding", "prompt": to_u32([1] * 1025)}, "context_length_exceeded", "prompt"),
        ({"reply": "vector"}, "protocol_error", "reply"),
        ({"reply": "embedding", "adapter": "none"}, "model_not_found", "adapter"),
    ],
)
def test_what_cannot_be_is_refused_by_name(service, wrong: dict[str, Any], code: str, field: str) -> None:
    with raw_of(service) as raw:
        raw.ask(**{"prompt": PROMPT, **wrong})
        reject = raw.expect(Reject)
        assert (reject.code, reject.field) == (code, field)
        raw.ask(prompt=PROMPT, reply="embedding", stream=2)
        assert read(raw, 2)[1] is not None
    check_idle(service)


def test_the_longest_prompt_has_no_room_for_a_token_and_an_embedding(service) -> None:
    with raw_of(service) as raw:
        raw.ask(prompt=to_u32([1] * 1024), stream=1)
        assert raw.expect(Reject).code == "context_length_exceeded"
        raw.ask(prompt=to_u32([1] * 1024), stream=2, reply="embedding")
        assert read(raw, 2)[0].prompt_tokens == 1024


def test_an_engine_without_embeddings_says_so() -> None:
    capacity = small_capacity()._replace(embedding_size=0)
    with run_service(lambda: SimulatedExecutor(capacity)) as built, raw_of(built) as raw:
        raw.ask(prompt=PROMPT, reply="embedding")
        reject = raw.expect(Reject)
        assert (reject.code, reject.field) == ("unsupported", "reply")
        assert raw.welcome is not None
        assert raw.welcome.model is not None
        assert raw.welcome.model.embedding_size == 0


def test_the_same_id_runs_once_and_is_told_again(service) -> None:
    with raw_of(service) as first, raw_of(service) as second:
        first.ask(id=ID, prompt=PROMPT, reply="embedding", stream=1, detached=True)
        row, vector = read(first, 1)
        embedded = service.core.scheduler.stats.num_embeddings
        first.ask(id=ID, prompt=PROMPT, reply="embedding", stream=2)
        second.send(Attach(ID, 9))
        assert read(first, 2) == (row._replace(stream=2), vector)
        assert read(second, 9) == (row._replace(stream=9), vector)
    assert service.core.scheduler.stats.num_embeddings == embedded


def test_a_request_that_generates_is_not_read_as_an_embedding(service) -> None:
    with raw_of(service) as raw:
        raw.ask(id=bytes(16), prompt=PROMPT, params={"max_tokens": 2}, stream=1, detached=True)
        read(raw, 1)
        raw.send(Attach(bytes(16), 2, reply="embedding"))
        reject = raw.expect(Reject)
        assert (reject.code, reject.field) == ("invalid_request", "reply")


def test_cancelled_on_its_way_it_ends_once_and_without_a_vector() -> None:
    with run_service(step_s=0.2) as built, raw_of(built) as raw:
        raw.ask(prompt=to_u32([1] * 1000), reply="embedding", stream=1)
        raw.send(Cancel((1,)))
        row, vector = read(raw, 1)
        assert (row.reason, row.detail[0], vector) == ("abort", "cancelled", None)
        check_idle(built)


def test_a_deadline_holds_for_embeddings_too() -> None:
    with run_service(step_s=0.2) as built, raw_of(built) as raw:
        raw.ask(prompt=to_u32([1] * 1000), reply="embedding", stream=1, deadline_ms=50)
        row, vector = read(raw, 1)
        assert (row.reason, row.detail[0], vector) == ("error", "deadline_exceeded", None)


def test_text_is_tokenized_by_the_engine(service) -> None:
    with Client(address_of(service)) as client:
        (embedding,) = client.embed("hello there")
    assert embedding.prompt_tokens == len(Tokenizer.from_files(make_card().files).encode("hello there"))
    assert embedding.data == simulated_embedding(embedding.prompt_tokens, False, SIZE)
    assert math.isclose(math.hypot(*embedding.values), 1.0, rel_tol=1e-6)


def check_many(embeddings: list[Embedding], lengths: list[int]) -> None:
    assert [each.prompt_tokens for each in embeddings] == lengths
    for each in embeddings:
        assert each.data == simulated_embedding(each.prompt_tokens, False, SIZE)
        assert each.values == array("f", each.data).tolist()


def test_the_blocking_client_embeds_many_in_their_order_beside_one_that_generates(service) -> None:
    lengths = [1, 30, 7, 900, 2] * 20
    with Client(address_of(service)) as client:
        generating = client.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
        check_many(client.embed([[4] * length for length in lengths]), lengths)
        assert sum(len(delta.token_ids) for delta in generating.streams[0]) == 40


def test_the_async_clients_embed_too(service) -> None:
    async def run() -> None:
        lengths = [3, 1, 12]
        async with AsyncClient(address_of(service)) as client, EnginePool([address_of(service)]) as pool:
            check_many(await client.embed([[4] * length for length in lengths]), lengths)
            submission = pool.submit([1, 2, 3], reply="embedding")
            check_many([await submission.embedding()], [3])
            with pytest.raises(InferEngineError, match="maximum context length") as refused:
                await client.embed([[1], [1] * 2000])
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(run())


def test_an_older_engine_is_told_by_its_features() -> None:
    with run_service() as built, Client(address_of(built)) as client:
        client._session.welcome = client.welcome.replace(features=("text",))
        with pytest.raises(InferEngineError, match="no embeddings") as refused:
            client.embed([1, 2])
    assert refused.value.code == "unsupported"


def test_a_slow_reader_gets_all_vectors_later() -> None:
    """Without credit nothing is sent; what ended meanwhile comes when there is."""
    capacity = small_capacity()._replace(embedding_size=600_000)
    with run_service(lambda: SimulatedExecutor(capacity)) as built, raw_of(built, window=1) as raw:
        for stream in range(1, 6):
            raw.ask(prompt=PROMPT, reply="embedding", stream=stream)
        vectors: dict[int, bytes] = {}
        while len(vectors) < 5:
            step = raw.expect(Step)
            assert sum(len(vector) for _, vector in step.embeddings) <= 3 * 4 * 600_000
            vectors |= dict(step.embeddings)
            raw.send(Credit(step.seq))
        assert {len(vector) for vector in vectors.values()} == {4 * 600_000}


def test_operators_see_how_many_there_were(service) -> None:
    with Client(address_of(service)) as client:
        before = client.admin("stats")["embeddings"]
        client.embed([[1], [2]])
        assert client.admin("stats")["embeddings"] == before + 2
