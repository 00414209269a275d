"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.chat import SpecialTokens
from frontends.common.generation import Generation
from frontends.common.json import read_fields, read_token_ids
from frontends.common.model import ServedModel
from frontends.http.bodies import CompletionFields, read_json
from frontends.http.openai.format import AnswerMetadata, CompletionFormat
from frontends.http.openai.request_fields import (
    check_model,
    check_prompt_logprobs,
    read_extras,
    read_label,
    read_options,
    read_params,
    read_prompt_logprobs,
    read_streaming,
    read_truncation,
    refuse_beside_prompt_logprobs,
    refuse_unsupported,
    truncate,
)
from frontends.http.respond import answer
from frontends.http.state import HttpState
from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest


async def completions(request: Request) -> Response:
    """OpenAI's completions: text or token ids in, text out, whole or as events."""
    service: HttpState = request.app.state.service
    config = service.config
    body = await read_json(request, config.http.max_body_bytes)
    served = await service.served()
    check_model(body, served)
    refuse_unsupported(body)
    streaming, extras = read_streaming(body), read_extras(body)
    completion = read_fields(CompletionFields, body, config.limits)
    echo, logprobs, max_tokens = completion.echo, completion.logprobs, completion.max_tokens
    prompt_logprobs = read_prompt_logprobs(body, streaming, config.limits)
    if echo and logprobs is not None:  # then the lists begin with the prompt's tokens
        refuse_beside_prompt_logprobs(body, streaming, "echo")
    prompt_only = max_tokens == 0
    if prompt_only:
        if not echo:
            raise InvalidRequest("max_tokens", "must be at least 1; 0 only with echo, for the prompt alone")
        max_tokens = 1  # an engine makes at least one token: it is not told
    params = read_params(body, served, config, max_tokens=max_tokens, logprobs=logprobs)
    if prompt_logprobs is not None or (echo and logprobs is not None):
        params = params.replace(prompt_logprobs=max(prompt_logprobs or 0, logprobs or 0 if echo else 0))
    label = read_label(body, request.scope["request_id"])
    options = read_options(body, config, label=label, continues_prompt=True)
    keep = read_truncation(body, served, max_tokens)
    prompts = await read_prompts(body, served, config.limits, keep=keep)
    check_prompt_logprobs(prompts, params, config.limits, "prompt_logprobs" if prompt_logprobs else "logprobs")
    texts = _echoed(body["prompt"], prompts, served) if echo else None
    num_choices = len(prompts) * params.n
    created = int(time.time())
    reply = AnswerMetadata(
        f"cmpl-{label}",
        created,
        body.get("model") or served.name,
        served.tokenizer,
        streaming,
        extras,
        logprobs,
        prompt_logprobs,
    )
    generation = Generation(service.engines_for(request, served), served.tokenizer, prompts, params, options)
    return await answer(
        service,
        request,
        generation,
        CompletionFormat(
            reply,
            texts,
            len(prompts),
            num_choices,
            prompt_only=prompt_only,
            skip_special_tokens=params.skip_special_tokens,
        ),
        stream=streaming.stream,
    )


async def read_prompts(
    body: dict[str, Any],
    served: ServedModel,
    limits: LimitsConfig,
    *,
    field: str = "prompt",
    most: int | None = None,
    keep: int | None = None,
) -> list[list[int]]:
    """`field` in its four shapes: a text, a list of texts, a list of token ids, a list of such lists; at most `most`
    (None: limits.max_prompts), of each the last `keep` tokens (None: all)."""
    prompt = body.get(field)
    add_special_tokens = read_fields(SpecialTokens, body).add_special_tokens is not False
    if prompt is None:
        raise InvalidRequest(field, "is required")
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        items = [prompt] if type(prompt[0]) is int else prompt
    else:
        raise InvalidRequest(field, "must be a text or a list of token ids, or a list of either, not empty")
    most = limits.max_prompts if most is None else most
    if len(items) > most:
        raise InvalidRequest(field, f"at most {most} in one call")
    prompts: list[list[int]] = []
    for name, item in zip(prompt_names(len(items), field), items, strict=True):
        if prompts:
            await asyncio.sleep(0)  # many short prompts are tokenized here: let other requests run in between
        if not isinstance(item, str | list):
            raise InvalidRequest(name, "must be a text or a list of token ids")
        if not isinstance(item, str):
            prompts.append(truncate(read_token_ids(item, name), keep))
            continue
        token_ids = await served.encode(item, limits, name=name, add_special_tokens=add_special_tokens, last=keep)
        if not token_ids or not item:
            raise InvalidRequest(name, "must not be empty")
        prompts.append(truncate(token_ids, keep))
    return prompts


def prompt_names(count: int, field: str) -> list[str]:
    """What each of so many prompts is called in errors."""
    return [field] if count == 1 else [f"{field}[{place}]" for place in range(count)]


def _echoed(prompt: Any, prompts: list[list[int]], served: ServedModel) -> list[str]:
    """The texts to repeat: as they were sent, token ids decoded."""
    if isinstance(prompt, str):
        return [prompt]
    return [
        item if isinstance(item, str) else served.tokenizer.decode(token_ids)
        for item, token_ids in zip([prompt] if type(prompt[0]) is int else prompt, prompts, strict=True)
    ]
