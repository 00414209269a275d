"""The span of a request over HTTP, and what of it travels on to the engine. Attributes follow OpenTelemetry's http and
gen_ai conventions. Only where `trace.enabled` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Scope

from frontends.common.generation import Generation, Submitter
from inferengine.client import Embedding, Submission
from inferengine.observability.tracing import PROVIDER, Span, Tracing
from inferengine.sampling_params import SamplingParams

CARRIED = (b"traceparent", b"tracestate")
OPERATIONS = {  # of the routes that do not generate a plain text
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def begin_request(tracing: Tracing, scope: Scope) -> Span:
    """Under the client's own span, if it sent one. It is left in the scope for `traced` and `describe`."""
    carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in CARRIED}
    client = scope.get("client")
    span = tracing.begin(
        scope["method"],
        carrier,
        {
            "http.request.method": scope["method"],
            "url.path": scope["path"][:200],
            "client.address": client[0] if client else None,
            "inferengine.request_id": scope["request_id"],
        },
    )
    scope["span"] = span
    return span


def end_request(span: Span, scope: Scope, status: int) -> None:
    """End a request's span with its route and HTTP status; 500 and above mark it as failed."""
    if (path := getattr(scope.get("route"), "path", None)) is not None:
        span.rename(f"{scope['method']} {path}")
        span.set("http.route", path)
    span.set("http.response.status_code", status)
    if status >= 500:
        span.set("error.type", str(status))
        span.fail("")
    span.end()


class TracedSubmitter:
    """Has the engine make its span under this request's."""

    def __init__(self, engines: Submitter, span: Span, model: str, path: str) -> None:
        self._engines = engines
        self._span = span
        self._model = model
        self._operation = OPERATIONS.get(path, "text_completion")

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """Submit to the engine with this span as the parent of the engine's, and note operation and model on it."""
        span = self._span
        span.set("gen_ai.operation.name", self._operation)
        span.set("gen_ai.provider.name", PROVIDER)
        span.set("gen_ai.request.model", self._model)
        return self._engines.submit(prompt_ids, params, traceparent=span.traceparent, **arguments)


def describe_embeddings(scope: Scope, found: Sequence[Embedding], dimensions: int) -> None:
    """What a call's inputs came to."""
    span: Span | None = scope.get("span")
    if span is None:
        return
    span.set("gen_ai.usage.input_tokens", sum(embedding.prompt_tokens for embedding in found))
    span.set("gen_ai.usage.cache_read.input_tokens", sum(embedding.cached_tokens for embedding in found))
    span.set("gen_ai.embeddings.dimension.count", dimensions)


def describe(scope: Scope, generation: Generation) -> None:
    """How a generation ended, once it has."""
    span: Span | None = scope.get("span")
    if span is None:
        return
    usage = generation.usage()
    span.set("gen_ai.usage.input_tokens", usage.prompt_tokens)
    span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    span.set("gen_ai.usage.output_tokens", usage.completion_tokens)
    reasons = [choice.finish.reason for choice in generation.choices if choice.finish is not None]
    span.set("gen_ai.response.finish_reasons", reasons)
