"""What a caller may say about a request, and the SUBMIT that says it on the wire."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from inferengine.errors import InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec, grammar_to_list
from inferengine.wire.codec import to_u32
from inferengine.wire.messages import ID_BYTES, Submit


class SubmitOptions(TypedDict, total=False):
    """Keywords of every client's `submit`; none of them is needed beside a prompt."""

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
    note: bytes  # the engine's to keep, and to give to whoever attaches
    adapter: str  # LoRA adapter, by name
    traceparent: str  # W3C's, of the caller's span
    resubmit: bool  # goes on when its engine is lost: at that engine's successor or at another; false: it ends then


def make_submit(
    prompt_ids: Sequence[int] | None, params: SamplingParams | None, **options: Unpack[SubmitOptions]
) -> Submit:
    """Without a stream yet. Exactly one of `prompt_ids`, `text` and `messages`. With reply "tokens" the stop *strings*
    of `params` are the caller's to match, because only it has the text; the engine matches them for "text" and "both".
    Raises InvalidRequest, and TypeError for an option that there is not."""
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


def _prompt_frame(prompt_ids: Sequence[int]) -> bytes:
    if not prompt_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    try:
        return to_u32(prompt_ids)
    except (OverflowError, TypeError):
        raise InvalidRequest("prompt", "token ids are whole numbers from 0 to 2^32 - 1") from None
