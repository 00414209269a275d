"""Admission: whether a request may join the queue, decided at once, before any work for it.

Pure: the caller (the intake) passes what waits now. An unlimited queue would only turn overload into timeouts.
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
    max_tenant_requests: int = 0  # 0: no limit of its own


def check_prompt(num_prompt: int, limits: AdmissionLimits) -> None:
    """Check a prompt without output, which may take the whole context. Raises InvalidRequest."""
    if num_prompt == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    if num_prompt > limits.max_model_len:
        raise InvalidRequest(
            "prompt",
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}. "
            "Shorten the prompt.",
            code="context_length_exceeded",
        )
    if num_prompt > limits.num_kv_tokens:
        raise InvalidRequest(
            "prompt",
            f"The KV cache holds {limits.num_kv_tokens} tokens; the prompt has {num_prompt}.",
            code="prompt_never_fits",
        )


def resolve_max_tokens(num_prompt: int, max_tokens: int | None, limits: AdmissionLimits, *, min_tokens: int = 0) -> int:
    """Return the output length to run with. None is resolved to what context and pool allow.

    An explicit one is never cut. Raises InvalidRequest if it does not fit, or if `min_tokens` does not.
    """
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
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}, so "
            f"max_tokens may be at most {max(1, min(room, limits.num_kv_tokens - num_prompt))}; got {max_tokens}.",
            code="context_length_exceeded",
        )
    needed = num_prompt + (max_tokens or 1)
    if needed > limits.num_kv_tokens:
        raise InvalidRequest(
            "prompt" if max_tokens is None else "max_tokens",
            f"The KV cache holds {limits.num_kv_tokens} tokens; prompt and output need {needed}.",
            code="prompt_never_fits",
        )
    found = min(room, limits.num_kv_tokens - num_prompt) if max_tokens is None else max_tokens
    if min_tokens > found:
        message = f"The prompt leaves room for {found} tokens; min_tokens is {min_tokens}."
        raise InvalidRequest("min_tokens", message, code="context_length_exceeded")
    return found


def admit(
    num_prompt: int,
    num_choices: int,
    *,
    queued_requests: int,
    queued_tokens: int,
    tokens_per_s: float,
    limits: AdmissionLimits,
    ahead: tuple[int, int] | None = None,
    tenant_requests: int = 0,
    time_left_s: float | None = None,
) -> None:
    """Raise `overloaded`, `rate_limited` or `deadline_exceeded`, each with a time to retry after, or return.

    `tokens_per_s` is the measured rate at which prompts are taken in (0: not known yet), `ahead` the requests and
    prompt tokens that are admitted before this one (None: all that wait), `tenant_requests` how many requests of the
    same tenant have not ended. An empty queue takes any request of a tenant below its limit. A full queue still takes
    requests of a tenant with less than its share of it, up to twice its limits. A deadline that the wait in the queue
    would exceed is refused now: the request would only delay others.
    """
    requests_ahead, tokens_ahead = (queued_requests, queued_tokens) if ahead is None else ahead
    cap = limits.max_tenant_requests
    if cap and tenant_requests + num_choices > cap:
        message = f"This tenant has {tenant_requests} unfinished requests; at most {cap} may be."
        raise InferEngineError("rate_limited", message, field="tenant", retry_after_s=1.0)
    wait_s = tokens_ahead / tokens_per_s if tokens_per_s > 0 else 0.0
    if time_left_s is not None:
        needed_s = wait_s + (num_prompt / tokens_per_s if tokens_per_s > 0 else 0.0)
        if needed_s > time_left_s or time_left_s <= 0:
            message = f"The first token is about {needed_s:.2f} s away, the deadline {max(0.0, time_left_s):.2f} s."
            raise InferEngineError("deadline_exceeded", message, field="deadline", retry_after_s=max(1.0, wait_s))
    if queued_requests == 0:
        return
    tokens = num_prompt * num_choices
    most_requests, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if queued_requests + num_choices <= most_requests and queued_tokens + tokens <= most_tokens:
        return
    if requests_ahead + num_choices <= most_requests and tokens_ahead + tokens <= most_tokens:
        most_requests, most_tokens = 2 * most_requests, 2 * most_tokens
    over_requests = queued_requests + num_choices > most_requests
    if not over_requests and queued_tokens + tokens <= most_tokens:
        return
    what = f"{queued_requests} requests" if over_requests else f"{queued_tokens} prompt tokens"
    retry_after_s = min(60.0, max(1.0, wait_s if wait_s else 1.0))
    raise InferEngineError("overloaded", f"The queue is full: {what} wait.", retry_after_s=retry_after_s)
