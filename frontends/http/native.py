"""POST /v1/generate: a prompt in, a text of exactly max_new_tokens tokens out. Greedy unless it says otherwise."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from frontends.common import fields
from frontends.common.errors import as_unprocessable, rename_field
from frontends.common.generation import Generation
from frontends.http import fields as dialect
from frontends.http.answer import JsonBytes
from frontends.http.body import read_json
from frontends.http.service import Service
from inferengine.errors import InferEngineError, InvalidRequest

DEFAULT_NEW_TOKENS = 64


async def generate(request: Request) -> Response:
    """`prompt` to exactly `max_new_tokens` tokens, greedy unless asked otherwise.

    400 past the model's length, 422 for a field of the wrong type or range, 429 when no pool could hold it."""
    service: Service = request.app.state.service
    started = time.monotonic()
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.served()
    try:
        prompt = fields.string(body, "prompt")
        if not prompt:
            raise InvalidRequest("prompt", "is required and must not be empty")
        max_tokens = fields.integer(body, "max_new_tokens", DEFAULT_NEW_TOKENS, least=1)
        wanted = {"temperature": 0.0, "ignore_eos": True, **{k: v for k, v in body.items() if v is not None}}
        if wanted.get("n", 1) != 1:
            raise InvalidRequest("n", "must be 1 on this route")
        params = dialect.read_params(wanted, served, service.config, max_tokens=max_tokens, logprobs=None)
        label = dialect.read_label(body, request.scope["request_id"])
        options = dialect.read_options(body, service.config, label=label, continues_prompt=True)
        prompt_ids = await served.encode(prompt, service.config.limits, name="prompt")
    except InvalidRequest as error:
        raise as_unprocessable(error) from None
    generation = Generation(service.engines_for(request, served), served.tokenizer, [prompt_ids], params, options)
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
