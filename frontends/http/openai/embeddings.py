"""Serve POST /v1/embeddings: a limited number of inputs of a call is in flight at a time; answers keep their order."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontends.common.generation import Options, Submitter
from frontends.common.json import dumps, read_fields
from frontends.common.model import ServedModel
from frontends.http.bodies import (
    EmbeddingsFields,
    check_model,
    read_json,
    read_label,
    read_options,
    read_truncation,
    refuse_unsupported,
)
from frontends.http.openai.completions import prompt_names, read_prompts
from frontends.http.state import HttpState
from frontends.http.telemetry import describe_embeddings
from inferengine.client import Embedding, Submission
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.vectors import shorten

PART_BYTES = 64 * 1024
# Fields of vLLM that change the values: only these values are accepted, because they are what is done anyway.
REFUSED: dict[str, tuple[Any, ...]] = {
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "stream": (False,),
    "detached": (False,),
    "truncation_side": ("left",),
}


async def embeddings(request: Request) -> Response:
    """Embed `input` (text, list of texts, token ids, list of lists of token ids) as vectors of length 1."""
    service: HttpState = request.app.state.service
    config = service.config
    body = await read_json(request, config.http.max_body_bytes)
    served = await service.served()
    check_model(body, served)
    refuse_unsupported(body, REFUSED)
    if not served.info.embedding_size:
        raise InferEngineError("unsupported", "This engine gives no embeddings.")
    if served.scores_pairs:
        raise InferEngineError("unsupported", "This model scores pairs of texts: ask /v1/rerank or /v1/score.")
    fields = read_fields(EmbeddingsFields, {"input": body.get("input", ""), **body})
    encoding, pooling = fields.encoding_format, fields.pooling or ""
    dimensions = _dimensions(fields.dimensions, served)
    label = read_label(body, request.scope["request_id"])
    options = read_options(body, config, label=label, continues_prompt=True)
    keep = read_truncation(body, served, 0)
    most = config.limits.max_embedding_inputs
    prompts = await read_prompts(body, served, config.limits, field="input", most=most, keep=keep)
    names = prompt_names(len(prompts), "input")
    engines = service.engines_for(request, served, detachable=False)
    call = embedding_inputs(engines, made(prompts), names, pooling, options)
    with service.call(call, request.receive):
        found = await call.collect()
    describe_embeddings(request.scope, found, dimensions)
    document = _document(body, served, label, found, encoding, dimensions)
    return StreamingResponse(document, media_type="application/json")


def _dimensions(wanted: int | None, served: ServedModel) -> int:
    size = served.info.embedding_size
    if wanted is not None and wanted > size:
        raise InvalidRequest("dimensions", f"must be at most {size}: this model's embeddings have {size} values")
    return wanted or size


def _document(
    body: dict[str, Any], served: ServedModel, label: str, found: list[Embedding], encoding: str, dimensions: int
) -> AsyncIterator[bytes]:
    """Return the answer, written a few vectors at a time."""
    head = {"object": "list", "id": f"embd-{label}", "model": body.get("model") or served.name}

    def vectors() -> Iterator[object]:
        for index, embedding in enumerate(found):
            shortened = embedding._replace(data=shorten(embedding.data, dimensions))
            value = base64.b64encode(shortened.data).decode() if encoding == "base64" else shortened.values
            yield {"object": "embedding", "index": index, "embedding": value}

    tokens = sum(embedding.prompt_tokens for embedding in found)
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": sum(embedding.cached_tokens for embedding in found)},
    }
    return in_parts(head, "data", vectors(), {"usage": usage})


async def in_parts(
    head: dict[str, Any], name: str, items: Iterable[object], tail: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Write an object of `head`, a list `name` of these items and `tail`, some items at a time: thousands of vectors
    take a while and, as decimal numbers, 100 MB. `head` and `tail` must not be empty."""
    part = dumps(head)[:-1] + b"," + dumps(name) + b":["
    for index, item in enumerate(items):
        part += b"," * (index > 0) + dumps(item)
        if len(part) >= PART_BYTES:
            yield part
            part = b""
            await asyncio.sleep(0)  # a send that does not have to wait lets no other request run
    yield part + b"]," + dumps(tail)[1:]


IN_FLIGHT = 256  # inputs of one call: a whole batch of an engine, and not a long queue before other requests
BUSY = ("overloaded", "rate_limited")


Answer = TypeVar("Answer")


class Inputs(Generic[Answer]):
    """Runs the inputs of one call, at most IN_FLIGHT at a time.

    If the engine has less room, fewer are in flight: a worker whose input is refused returns it to the queue and ends.
    Only the refusal of the last worker ends the call.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[int], dict[str, Any]], Submission],
        read: Callable[[Submission, Sequence[int], dict[str, Any]], Awaitable[Answer]],
        prompt_of: Callable[[int], Awaitable[Sequence[int]]],
        names: Sequence[str],
        options: Options,
    ) -> None:
        """`ask` submits a prompt with further arguments, `read` waits for its answer. `prompt_of` makes the prompt of
        an input when its turn comes: those of all together may be far larger than the body. `names[i]`: the request's
        name of input i, for errors."""
        self._ask = ask
        self._read = read
        self._prompt_of = prompt_of
        self._names = names
        self._options = options
        self._waiting = deque(range(len(names)))
        self._found: dict[int, Answer] = {}
        self._open: set[Submission] = set()
        self._num_workers = min(IN_FLIGHT, len(names))
        self._began_s = 0.0
        self._error: InferEngineError | None = None

    async def collect(self) -> list[Answer]:
        """Return all answers. If one input fails, the others are cancelled. Raises its InferEngineError."""
        self._began_s = asyncio.get_running_loop().time()
        workers = [asyncio.create_task(self._work()) for _ in range(self._num_workers)]
        try:
            await asyncio.gather(*workers)
        except InferEngineError as error:
            raise self._error or error from None
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self.cancel()
        return [self._found[index] for index in range(len(self._names))]

    def cancel(self) -> None:
        """Cancel all inputs in the engines. May be called repeatedly."""
        for submission in self._open:
            submission.cancel()

    def abandon(self, error: InferEngineError) -> None:
        """End the call at once, without waiting for the engines: `collect` raises `error`."""
        self._error = error
        for submission in list(self._open):
            submission.abandon(error)

    async def _work(self) -> None:
        """Run one input after the other until none is left."""
        while self._waiting:
            index, alone = self._waiting.popleft(), self._num_workers == 1
            try:
                self._found[index] = await self._answer(index)
            except InferEngineError as error:
                if alone or error.code not in BUSY:
                    raise
                self._waiting.appendleft(index)
                if self._num_workers > 1:
                    break
        self._num_workers -= 1

    async def _answer(self, index: int) -> Answer:
        prompt = await self._prompt_of(index)
        if self._error is not None:
            raise self._error
        options, deadline_s = self._options, self._options.deadline_s
        if deadline_s is not None:
            deadline_s -= asyncio.get_running_loop().time() - self._began_s
        arguments = {
            "priority": options.priority,
            "tenant": options.tenant,
            "salt": options.salt,
            "deadline_s": deadline_s,
            "label": options.label,
        }
        submission = self._ask(prompt, arguments)
        self._open.add(submission)
        try:
            answer = await self._read(submission, prompt, arguments)
        except InferEngineError as error:
            if error.field == "prompt":
                error.field = self._names[index]
            self._open.discard(submission)
            raise
        self._open.discard(submission)
        return answer


def made(prompts: Sequence[Sequence[int]]) -> Callable[[int], Awaitable[Sequence[int]]]:
    """Return what gives prompts that are made already to Inputs."""

    async def prompt_of(index: int) -> Sequence[int]:
        return prompts[index]

    return prompt_of


def embedding_inputs(
    engine: Submitter,
    prompt_of: Callable[[int], Awaitable[Sequence[int]]],
    names: Sequence[str],
    pooling: str,
    options: Options,
) -> Inputs[Embedding]:
    """Make a call that embeds the prompts of `names`. `pooling` empty: the engine's default."""
    return Inputs(
        lambda prompt, arguments: engine.submit(prompt, None, reply="embedding", pooling=pooling, **arguments),
        lambda submission, prompt, arguments: submission.embedding(),
        prompt_of,
        names,
        options,
    )
