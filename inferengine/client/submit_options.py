"""The options of a request, and the SUBMIT message made of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, Unpack

from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec, grammar_to_list
from inferengine.wire.codec import to_u32
from inferengine.wire.messages import EMBEDDINGS, ID_BYTES, Submit, Welcome

Prompt = str | Sequence[int]


class SubmitOptions(TypedDict, total=False):
    """Keywords of every client's `submit`. None is required beside a prompt."""

    text: str  # the prompt, for the engine to tokenize
    messages: list[dict[str, Any]]  # a chat, for the engine's template
    request_id: bytes  # 16 bytes, the key under which it runs once and can be attached to; random without
    priority: int
    tenant: str
    salt: bytes  # of the prefix cache: only requests with the same salt share prefixes
    deadline_s: float | None  # from now
    detached: bool  # runs on when its clients are gone
    reply: str  # tokens, text, both or embedding
    pooling: str  # of an embedding: last or mean; the engine's without
    label: str  # for the logs
    grammar: GrammarSpec | None
    note: bytes  # kept by the engine, and sent to every client that attaches
    adapter: str  # LoRA adapter, by name
    traceparent: str  # W3C's, of the caller's span
    resubmit: bool  # true: resumes at another engine, or at this one's successor, when its engine is lost


def make_submit(
    prompt_ids: Sequence[int] | None, params: SamplingParams | None, **options: Unpack[SubmitOptions]
) -> Submit:
    """Make a SUBMIT without a stream number. Exactly one of `prompt_ids`, `text` and `messages` is required. With reply
    "tokens" the caller matches the stop *strings* of `params`, because only it has the text; the engine matches them
    for "text" and "both". Raises InvalidRequest, and TypeError for an unknown option."""
    if unknown := options.keys() - SubmitOptions.__annotations__.keys():
        raise TypeError(f"submit() has no option {', '.join(sorted(unknown))}")
    text, messages = options.get("text"), options.get("messages")
    if (prompt_ids is not None) + (text is not None) + (messages is not None) != 1:
        raise InvalidRequest("prompt", "give exactly one of prompt_ids, text and messages")
    values = (params or SamplingParams()).to_map()
    reply = options.get("reply", "tokens")
    if reply == "tokens":
        values.pop("stop", None)
    deadline_s, grammar = options.get("deadline_s"), options.get("grammar")
    return Submit(
        id=options.get("request_id") or secrets.token_bytes(ID_BYTES),
        stream=0,
        prompt=None if prompt_ids is None else _prompt_frame(prompt_ids),
        text=text,
        messages=messages,
        params=values,
        reply=reply,
        priority=options.get("priority", 0),
        tenant=options.get("tenant", ""),
        salt=options.get("salt", b""),
        deadline_ms=None if deadline_s is None else max(1, int(deadline_s * 1000)),
        detached=options.get("detached", False),
        label=options.get("label", ""),
        grammar=None if grammar is None else tuple(grammar_to_list(grammar)),
        note=options.get("note", b""),
        adapter=options.get("adapter", ""),
        pooling=options.get("pooling", ""),
        traceparent=options.get("traceparent", ""),
    )


def require_embeddings(welcome: Welcome) -> None:
    """Raise `unsupported` where the engine makes no embeddings."""
    if EMBEDDINGS not in welcome.features:
        raise InferEngineError("unsupported", "This engine gives no embeddings: its version is too old.", field="reply")


def embedding_submits(
    prompts: Prompt | Sequence[Prompt], options: SubmitOptions
) -> Iterator[tuple[Sequence[int] | None, SubmitOptions]]:
    """Yield the prompt ids and options of a SUBMIT for each prompt. The engine tokenizes text."""
    embed_options: SubmitOptions = {**options, "reply": "embedding"}
    for prompt in _as_list(prompts):
        if isinstance(prompt, str):
            yield None, {**embed_options, "text": prompt}
        else:
            yield prompt, embed_options


def _prompt_frame(prompt_ids: Sequence[int]) -> bytes:
    if not prompt_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    try:
        return to_u32(prompt_ids)
    except (OverflowError, TypeError):
        raise InvalidRequest("prompt", "token ids are whole numbers from 0 to 2^32 - 1") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
