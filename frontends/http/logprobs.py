"""Log-probabilities as the two dialects show them. Knows nothing of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inferengine.client import TokenLogprobs
from inferengine.text import Tokenizer

LEAST = -9999.0  # JSON has no infinity; vLLM writes this


def as_completion(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], offset: int, as_ids: bool
) -> dict[str, Any]:
    """The parallel lists of /v1/completions. `offset`: characters of output before these tokens."""
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, row in zip(token_ids, rows, strict=False):
        text = token_text(tokenizer, token_id, as_ids)
        top = {text: _finite(row.logprob)}
        for other, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
            top.setdefault(token_text(tokenizer, other, as_ids), _finite(logprob))
        shown["text_offset"].append(offset)
        shown["token_logprobs"].append(_finite(row.logprob))
        shown["tokens"].append(text)
        shown["top_logprobs"].append(top)
        offset += len(text)
    return shown


def as_chat(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """The list of objects of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id, as_ids)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    content = []
    for token_id, row in zip(token_ids, rows, strict=False):
        alternatives = list(zip(row.top_ids, row.top_logprobs, strict=True))[:num_top]
        content.append({**entry(token_id, row.logprob), "top_logprobs": [entry(*item) for item in alternatives]})
    return {"content": content, "refusal": None}


def token_text(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    """One token as a string of its own; part of a character shows as U+FFFD, its bytes are told beside it."""
    return f"token_id:{token_id}" if as_ids else tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # false for NaN too
