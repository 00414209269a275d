"""Admission: whether a request may join the queue, decided at once, before anything is spent on it.

Pure: the caller (the link) passes what waits now. A queue without an end only turns overload into timeouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferengine.errors import InferEngineError, InvalidRequest


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What the engine can take. Lengths in tokens."""

    max_model_len: int
    num_kv_tokens: int  # what the KV pool holds when empty
    max_queued_requests: int
    max_queued_tokens: int


def resolve_max_tokens(num_prompt: int, max_tokens: int | None, limits: AdmissionLimits) -> int:
    """The output length to run with. An open one is cut to what context and pool allow; an explicit one is honoured or
    refused. Raises InvalidRequest."""
    if num_prompt == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    room = limits.max_model_len - num_prompt
    if room < 1:
        raise InvalidRequest(
            "prompt",
            f"This model's maximum context length is {limits.max_model_len} tokens, of which one is needed for the "
            f"output; the prompt has {num_prompt}. Shorten the prompt.",
            code="context_length_exceeded",
        )
    needed = num_prompt + (max_tokens or 1)
    if needed > limits.num_kv_tokens:
        raise InvalidRequest(
            "prompt" if max_tokens is None else "max_tokens",
            f"The KV cache holds {limits.num_kv_tokens} tokens; prompt and output need {needed}.",
            code="prompt_never_fits",
        )
    if max_tokens is None:
        return min(room, limits.num_kv_tokens - num_prompt)
    if max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}, so "
            f"max_tokens may be at most {room}; got {max_tokens}.",
            code="context_length_exceeded",
        )
    return max_tokens


def admit(
    num_prompt: int,
    num_choices: int,
    *,
    queued_requests: int,
    queued_tokens: int,
    tokens_per_s: float,
    limits: AdmissionLimits,
) -> None:
    """Raise `overloaded` with a hint when to come back, or return. An empty queue takes any request."""
    if queued_requests == 0:
        return
    over_requests = queued_requests + num_choices > limits.max_queued_requests
    over_tokens = queued_tokens + num_prompt * num_choices > limits.max_queued_tokens
    if not over_requests and not over_tokens:
        return
    what = f"{queued_requests} requests" if over_requests else f"{queued_tokens} prompt tokens"
    seconds = queued_tokens / tokens_per_s if tokens_per_s > 0 else 1.0
    raise InferEngineError("overloaded", f"The queue is full: {what} wait.", retry_after_s=min(60.0, max(1.0, seconds)))
