"""Serve POST /v1/rerank (as Cohere and Jina) and POST /v1/score (as vLLM): score how well texts answer a query.

Of a reranker that is a causal model (Qwen3-Reranker) the score of a pair is how much likelier it finds "yes" than "no"
as the next token of a prompt that asks for it. A cross-encoder (BGE's rerankers) reads both texts at once and gives one
number, whose sigmoid is the score. Of any other model it is the cosine of the two texts' embeddings.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.generation import Options
from frontends.common.json import read_fields
from frontends.common.model import ServedModel
from frontends.http.bodies import RerankFields, ScoreFields, check_model, read_json, read_label, read_options
from frontends.http.openai.embeddings import Inputs, embedding_inputs
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine.client import Embedding, Submission
from inferengine.client.requests import error_of
from inferengine.config import Config
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.vectors import to_floats

# The prompt that Qwen3-Reranker was trained with, from its model card (Qwen team 2025, Apache License 2.0).
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MOST_ALTERNATIVES = 20


class Pair(NamedTuple):
    """A query and a text, each with its name in the request."""

    query: str
    text: str
    query_name: str
    text_name: str


class Scores(NamedTuple):
    """The scores of pairs in their order, and the number of prompt tokens that they took."""

    values: list[float]
    num_tokens: int


async def rerank(request: Request) -> Response:
    """Sort `documents` by how well each answers `query`."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    check_model(body, served)
    fields = read_fields(RerankFields, {"query": "", "documents": [], **body})
    if not fields.query:
        raise InvalidRequest("query", "must be a text, not empty")
    texts = [_text(item, f"documents[{place}]") for place, item in enumerate(_listed(fields.documents, "documents"))]
    pairs = [Pair(fields.query, text, "query", f"documents[{place}]") for place, text in enumerate(texts)]
    label = read_label(body, request.scope["request_id"])
    scores = await _score(request, body, served, pairs, fields.instruction, label)
    order = sorted(range(len(texts)), key=lambda place: -scores.values[place])[: fields.top_n]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores.values[place]} for place in order]
    if fields.return_documents:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return JsonBytes(
        {
            "id": f"rerank-{label}",
            "model": body.get("model") or served.name,
            "results": results,
            "usage": {"prompt_tokens": scores.num_tokens, "total_tokens": scores.num_tokens},
        }
    )


async def score(request: Request) -> Response:
    """Score `text_1` with `text_2`: one text with each of a list, or two lists of equal length pair by pair."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    check_model(body, served)
    fields = read_fields(ScoreFields, {"text_1": [], "text_2": [], **body})
    ones, others = _texts(fields.text_1, "text_1"), _texts(fields.text_2, "text_2")
    if len(ones) not in (1, len(others)):
        raise InvalidRequest("text_1", f"must be one text, or as many as text_2 has: {len(others)}")
    if len(ones) == 1:
        ones *= len(others)
    pairs = [Pair(*both, *names) for both, names in zip(zip(ones, others, strict=True), _names(others), strict=True)]
    label = read_label(body, request.scope["request_id"])
    scores = await _score(request, body, served, pairs, fields.instruction, label)
    return JsonBytes(
        {
            "id": f"score-{label}",
            "object": "list",
            "model": body.get("model") or served.name,
            "data": [{"index": place, "object": "score", "score": value} for place, value in enumerate(scores.values)],
            "usage": {"prompt_tokens": scores.num_tokens, "total_tokens": scores.num_tokens},
        }
    )


def _names(texts: list[str]) -> list[tuple[str, str]]:
    return [(f"text_1[{place}]", f"text_2[{place}]") for place in range(len(texts))]


def _texts(value: Any, field: str) -> list[str]:
    items = [value] if isinstance(value, str) else _listed(value, field)
    return [_text(item, f"{field}[{place}]") for place, item in enumerate(items)]


def _listed(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(field, "must be a list of texts, not empty")
    return value


def _text(item: Any, field: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str) or not text:
        raise InvalidRequest(field, "must be a text, not empty")
    return text


async def _score(
    request: Request,
    body: dict[str, Any],
    served: ServedModel,
    pairs: list[Pair],
    instruction: str | None,
    label: str,
) -> Scores:
    service: HttpState = request.app.state.service
    config = service.config
    if len(pairs) > config.limits.max_embedding_inputs:
        raise InvalidRequest(pairs[0].text_name.partition("[")[0], f"at most {config.limits.max_embedding_inputs}")
    options = read_options(body, config, label=label, continues_prompt=True)
    engines = service.engines_for(request, served, detachable=False)
    if served.scores_pairs:
        if instruction is not None:
            raise InvalidRequest("instruction", "this model was trained without: put it into the query")
        inputs = await _pair_inputs(engines, served, config, pairs, options)
        with service.call(inputs, request.receive):
            numbers = await inputs.collect()
        values = [_sigmoid(to_floats(one.data)[0]) for one in numbers]
        return Scores(values, sum(one.prompt_tokens for one in numbers))
    if _asks_yes_or_no(config, served):
        judgements = await _yes_no_inputs(engines, served, config, pairs, instruction or INSTRUCTION, options)
        with service.call(judgements, request.receive):
            found = await judgements.collect()
        return Scores([one.score for one in found], sum(one.num_tokens for one in found))
    if not served.info.embedding_size:
        raise InferEngineError("unsupported", "This engine gives no embeddings to compare.")
    if instruction is not None:
        raise InvalidRequest("instruction", "is for rerankers; put it into the query of an embedding model")
    names = {pair.query: pair.query_name for pair in pairs} | {pair.text: pair.text_name for pair in pairs}
    texts = list(names)

    async def prompt_of(place: int) -> list[int]:
        return await served.encode(texts[place], config.limits, name=names[texts[place]])

    vectors = embedding_inputs(engines, _in_turns(prompt_of), list(names.values()), "", options)
    with service.call(vectors, request.receive):
        embeddings = await vectors.collect()
    by_text = dict(zip(texts, (to_floats(one.data) for one in embeddings), strict=True))
    values = []
    for pair in pairs:
        values.append(sum(map(operator.mul, by_text[pair.query], by_text[pair.text])))
        await asyncio.sleep(0)
    return Scores(values, sum(one.prompt_tokens for one in embeddings))


def _in_turns(encode: Callable[[int], Awaitable[list[int]]]) -> Callable[[int], Awaitable[list[int]]]:
    """Let other requests run between the texts of a call: short ones are tokenized on the event loop."""
    turn = asyncio.Lock()

    async def prompt_of(place: int) -> list[int]:
        async with turn:
            await asyncio.sleep(0)
            return await encode(place)

    return prompt_of


def _asks_yes_or_no(config: Config, served: ServedModel) -> bool:
    mode = config.http.rerank
    return mode == "yes_no" or (mode == "auto" and "rerank" in served.name.lower())


async def _pair_inputs(
    engines: Any, served: ServedModel, config: Config, pairs: Sequence[Pair], options: Options
) -> Inputs[Embedding]:
    """Make a call that gives the number of each pair."""
    frame = served.tokenizer.pair_frame()
    if frame is None:
        raise InferEngineError("unsupported", "This model's tokenizer does not say how the texts of a pair are joined.")
    before, between, after = frame
    queries: dict[str, list[int]] = {}

    async def ids_of(text: str, name: str) -> list[int]:
        return await served.encode(text, config.limits, name=name, add_special_tokens=False)

    async def prompt_of(place: int) -> list[int]:
        pair = pairs[place]
        return [*before, *queries[pair.query], *between, *await ids_of(pair.text, pair.text_name), *after]

    for pair in pairs:
        if pair.query not in queries:
            await asyncio.sleep(0)
            ids = queries[pair.query] = await ids_of(pair.query, pair.query_name)
            if (count := len(before) + len(ids) + len(between) + len(after)) >= served.info.max_model_len:
                raise InvalidRequest(
                    pair.query_name,
                    f"This model's maximum context length is {served.info.max_model_len} tokens; this text alone makes "
                    f"{count} of a pair's prompt. Shorten it.",
                    code="context_length_exceeded",
                )
    return embedding_inputs(engines, _in_turns(prompt_of), [pair.text_name for pair in pairs], "", options)


# -- rerankers ---------------------------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """The probability of "yes" relative to "yes" and "no"; the score of a pair."""

    score: float
    num_tokens: int


async def _yes_no_inputs(
    engines: Any, served: ServedModel, config: Config, pairs: Sequence[Pair], instruction: str, options: Options
) -> Inputs[Judgement]:
    answers = [served.tokenizer.token_to_id(word) for word in ("yes", "no")]
    yes, no = answers
    if yes is None or no is None:
        raise InferEngineError("unsupported", 'This model has no tokens "yes" and "no": set http.rerank = cosine')

    async def prompt_of(place: int) -> list[int]:
        pair = pairs[place]
        text = f"{BEFORE}<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: {pair.text}{AFTER}"
        return await served.encode(text, config.limits, name=pair.text_name, add_special_tokens=False)

    def ask(prompt: Sequence[int], allowed: tuple[int, ...], **arguments: Any) -> Submission:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, allowed_token_ids=allowed, logprobs=MOST_ALTERNATIVES, ignore_eos=True
        )
        submission: Submission = engines.submit(prompt, params, **arguments)
        return submission

    async def judge(submission: Submission, prompt: Sequence[int], arguments: dict[str, Any]) -> Judgement:
        known, num_tokens = await _logprobs(submission)
        missing = yes if yes not in known else no if no not in known else None
        if missing is not None:  # not among the likeliest: asked for by itself, after the same prompt
            more, _ = await _logprobs(ask(prompt, (missing,), **arguments))
            known |= more
        return Judgement(_sigmoid(known[yes] - known[no]), num_tokens)

    return Inputs(
        lambda prompt, arguments: ask(prompt, (yes, no), **arguments),
        judge,
        _in_turns(prompt_of),
        [pair.text_name for pair in pairs],
        options,
    )


async def _logprobs(submission: Submission) -> tuple[dict[int, float], int]:
    """Return log-probabilities of the drawn token and the likeliest ones, by token id, and the prompt's length."""
    deltas = [delta async for delta in submission.streams[0]]
    await submission.accepted()  # a refusal says more than the end of the stream
    finish = deltas[-1].finish if deltas else None
    if finish is not None and finish.reason not in ("stop", "length"):
        raise error_of(finish)
    for delta in deltas:
        if delta.logprobs and delta.token_ids and finish is not None:
            (item, *_), (drawn, *_) = delta.logprobs, delta.token_ids
            return {
                **dict(zip(item.top_ids, item.top_logprobs, strict=True)),
                drawn: item.logprob,
            }, finish.prompt_tokens
    raise InferEngineError("engine_error", "The engine gave no log-probabilities.")


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))
