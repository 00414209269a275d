"""A span for each choice that ends, under its client's span, with the times of queueing, prefill and decoding.

Attributes follow OpenTelemetry's gen_ai conventions; `gen_ai.latency.*` are vLLM's names, in seconds."""

from __future__ import annotations

from typing import Any

from inferengine.core.sequence import Finished
from inferengine.engine.io.output_log import OutputLog
from inferengine.observability.tracing import PROVIDER, Tracing, unix_ns
from inferengine.wire.messages import Done


def record_choice(tracing: Tracing, model: str, log: OutputLog, row: Finished, ended: Done) -> None:
    """Record the span of a choice that ends now. `ended`: its end as clients see it."""
    submission, params = log.submission, log.submission.params
    operation = "text_completion" if submission.pooling is None else "embeddings"
    end_ns = unix_ns()
    start_ns = end_ns - _ns(row.total_s)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "inferengine.request_id": submission.label or submission.id.hex(),
        "inferengine.stream": submission.id.hex(),
        "inferengine.choice": log.choice,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.response.finish_reasons": [ended.reason],
        "inferengine.preemptions": row.num_preemptions,
        "gen_ai.latency.e2e": row.total_s,
        **_phases(row),
    }
    span = tracing.begin(f"{operation} {model}", {"traceparent": submission.traceparent}, attributes, start_ns)
    if row.queued_s is not None:
        span.event("scheduled", start_ns + _ns(row.queued_s))
    if row.first_token_s is not None:
        span.event("first token", start_ns + _ns(row.first_token_s))
    if ended.reason == "error":
        code, message = ended.detail[:2] if isinstance(ended.detail, list) else ("engine_error", "")
        span.set("error.type", code)
        span.fail(message)
    span.end(end_ns)


def _phases(row: Finished) -> dict[str, Any]:
    """As far as the choice has come."""
    if row.queued_s is None:
        return {"gen_ai.latency.time_in_queue": row.total_s}
    phases = {
        "gen_ai.latency.time_in_queue": row.queued_s,
        "gen_ai.latency.time_in_model_inference": row.total_s - row.queued_s,
    }
    if row.first_token_s is not None:
        phases["gen_ai.latency.time_to_first_token"] = row.first_token_s
        phases["gen_ai.latency.time_in_model_prefill"] = row.first_token_s - row.queued_s
        phases["gen_ai.latency.time_in_model_decode"] = row.total_s - row.first_token_s
    return phases


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
