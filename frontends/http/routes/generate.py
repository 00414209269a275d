"""Serve routes of other servers, with their fields, status codes and messages; greedy by default.

POST /v1/generate: a prompt in, a text of exactly max_new_tokens tokens out. POST /generate answers with the prompt and
its continuation. POST /infer/v1/completions draws with the model's defaults and answers with events of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.errors import as_unprocessable, error_object, name_default, rename_field
from frontends.common.generation import ChoiceOutput, Output, Piece, RequestOutput, Usage
from frontends.common.json import event, read_fields
from frontends.http.bodies import (
    INFER_MAX_TOKENS,
    SAMPLING,
    STRUCTURE,
    GenerateFields,
    GenerateTextFields,
    InferFields,
    PromptFields,
    read_json,
    read_label,
    read_options,
    read_params,
)
from frontends.http.openai.completion_formats import usage_object
from frontends.http.openai.completions import read_prompts
from frontends.http.respond import JsonBytes, answer
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import FieldError, read


async def generate(request: Request) -> Response:
    """Continue `prompt` by exactly `max_new_tokens` tokens; greedy by default.

    400 beyond the model's length, 422 for a field of the wrong type or range, 429 when no KV cache could hold it.
    """
    service: HttpState = request.app.state.service
    started = time.monotonic()
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    try:
        fields = read_fields(GenerateFields, body)
        prompt, max_tokens = fields.prompt, fields.max_new_tokens
        wanted = {"temperature": 0.0, "ignore_eos": True, **{k: v for k, v in body.items() if v is not None}}
        if wanted.get("n", 1) != 1:
            raise InvalidRequest("n", "must be 1 on this route")
        params = read_params(wanted, served, service.config, max_tokens=max_tokens, logprobs=None)
        label = read_label(body, request.scope["request_id"])
        options = read_options(body, service.config, label=label, continues_prompt=True)
        prompt_ids = await served.encode(prompt, service.config.limits, name="prompt")
    except InvalidRequest as error:
        raise as_unprocessable(error) from None
    generation = RequestOutput(service.engines_for(request, served), served.tokenizer, [prompt_ids], params, options)
    try:
        with service.call(generation, request.receive):
            await generation.accepted()
            (output,) = await generation.collect()
    except InferEngineError as error:
        rename_field(error, {"max_tokens": "max_new_tokens"})
        if error.code == "prompt_never_fits":
            raise InferEngineError("rate_limited", error.message, field=error.field) from None
        raise
    return JsonBytes(
        {
            "request_id": label,
            "text": output.text,
            "generated_tokens": output.choice.num_tokens,
            "latency_ms": round((time.monotonic() - started) * 1000, 3),
            "finish_reason": output.finish_reason,
            "model": served.name,
        }
    )


INFER_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "priority",
        "cache_salt",
        "detached",
        "resubmit",
        *STRUCTURE,
        *SAMPLING,
    }
)


async def generate_text(request: Request) -> Response:
    """Return `prompt` with its continuation of at most `max_tokens`, both required; greedy by default."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    try:
        given = {name: value for name, value in body.items() if value is not None}
        prompt, max_tokens = read(PromptFields, given).prompt, read(GenerateTextFields, given).max_tokens
    except FieldError as error:  # a wrong type is a 422 on this route, a wrong value a 400
        if error.is_type:
            raise InferEngineError("unprocessable", error.message, field=error.field) from None
        raise InvalidRequest(error.field, error.message) from None
    if not prompt.strip():
        raise InvalidRequest("prompt", "must not be only white space")
    params = read_params(
        {"temperature": 0.0, **given, "n": None}, served, service.config, max_tokens=max_tokens, logprobs=None
    )
    label = read_label(body, request.scope["request_id"])
    options = read_options(body, service.config, label=label, continues_prompt=True)
    prompt_ids = await served.encode(prompt, service.config.limits, name="prompt")
    generation = RequestOutput(service.engines_for(request, served), served.tokenizer, [prompt_ids], params, options)
    with service.call(generation, request.receive):
        await generation.accepted()
        (output,) = await generation.collect()
    return JsonBytes(
        {
            "request_id": label,
            "prompt": prompt,
            "generated_text": prompt + output.text,
            "token_count": output.choice.num_tokens,
            "stop_reason": _stop_sentence(output),
            "finish_reason": output.finish_reason,
        }
    )


def _stop_sentence(output: Output) -> str:
    """Return why the output ended, in words."""
    match output.finish_reason, output.stop_reason:
        case "length", _:
            return f"The maximum of {output.choice.num_tokens} tokens was reached."
        case "stop", None:
            return "The model ended its text."
        case "stop", reason:
            return f"The stop {'text' if isinstance(reason, str) else 'token'} {reason!r} was generated."
    return f"The request ended with {output.finish_reason}."


async def infer(request: Request) -> Response:
    """Complete `prompt` as events `token`, then `done` or `error`.

    Status 422 for another model or none, unknown fields, and a prompt that is too long; 400 for an empty prompt."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    try:
        for name in body:
            if name not in INFER_FIELDS:
                raise InvalidRequest(name[:64], "is not a field of this route")
        fields = read_fields(InferFields, body)
        if fields.model != served.name:
            raise InvalidRequest("model", f"must be {served.name}")
        if body.get("n") not in (None, 1):
            raise InvalidRequest("n", "must be 1 on this route")
        if body.get("top_k") == 0:
            raise InvalidRequest("top_k", "must be -1 (all tokens) or at least 1")
        params = read_params(body, served, service.config, max_tokens=fields.max_tokens, logprobs=None)
        options = read_options(body, service.config, label=request.scope["request_id"], continues_prompt=True)
        if fields.prompt in ("", []):
            raise InferEngineError("invalid_request", "must not be empty", field="prompt")  # 400, unlike the others
        if isinstance(fields.prompt, list) and not all(isinstance(item, int) for item in fields.prompt):
            raise InvalidRequest("prompt", "must be a text or a list of token ids")
        (prompt_ids,) = await read_prompts(body, served, service.config.limits, most=1)
    except InvalidRequest as error:
        raise _too_long_as_unprocessable(as_unprocessable(error)) from None
    generation = RequestOutput(service.engines_for(request, served), served.tokenizer, [prompt_ids], params, options)
    try:
        return await answer(service, request, generation, InferFormat(), stream=True)
    except InferEngineError as error:
        if body.get("max_tokens") is None:
            name_default(error, "max_tokens", INFER_MAX_TOKENS)
        raise _too_long_as_unprocessable(error) from None


def _too_long_as_unprocessable(error: InferEngineError) -> InferEngineError:
    if error.code != "context_length_exceeded":
        return error
    return InferEngineError("unprocessable", error.message, field=error.field)


class InferFormat:
    """Writes one event for each token, also for tokens without text."""

    ends_with_usage = False  # `end` tells it

    def __init__(self) -> None:
        self._finish_reason: str | None = None

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write one `token` event for each token; a piece's text goes with its last token."""
        parts = []
        for piece in pieces:
            is_eos = piece.finish_reason == "stop" and piece.stop_reason is None
            self._finish_reason = "eos" if is_eos else piece.finish_reason
            for place, token_id in enumerate(piece.token_ids):
                is_last = place == len(piece.token_ids) - 1
                parts.append(event({"token": piece.text if is_last else "", "token_id": token_id}, "token"))
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: each event carries its token's id beside the text."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Write the `done` event with the finish reason and usage."""
        return event({"finish_reason": self._finish_reason, "usage": usage_object(generation.usage())}, "done")

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an `error` event."""
        return event({"error": error_object(error)}, "error")

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the text, finish reason and usage of the only output."""
        (output,) = outputs
        return {"text": output.text, "finish_reason": output.finish_reason, "usage": usage_object(usage)}
