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


def as_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's list with an entry for each prompt token: nothing for the first, which nothing precedes, then the token
    itself and the likeliest others by their ids."""
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], rows, strict=False):
        entry: dict[str, Any] = {}
        others = zip(row.top_ids[:num_top], range(1, num_top + 1), row.top_logprobs, strict=False)
        for one, rank, logprob in ((token_id, row.rank, row.logprob), *others):
            text = token_text(tokenizer, one, False)
            entry.setdefault(str(one), {"logprob": _finite(logprob), "rank": rank, "decoded_token": text})
        shown.append(entry)
    return shown


def of_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, list[Any]]:
    """The lists of /v1/completions for the prompt's tokens, which in an echo come before those of the output."""
    first = token_text(tokenizer, prompt_ids[0], as_ids)
    rows = [row._replace(top_ids=row.top_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]) for row in rows]
    prompt = as_completion(tokenizer, prompt_ids[1:], rows, len(first), as_ids)
    prompt["text_offset"] = _offsets(tokenizer, prompt_ids)[1:]
    begin = {"text_offset": [0], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return {name: begin[name] + prompt[name] for name in begin}


def _offsets(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Where each token of a prompt begins in its echo, which does not show special tokens."""
    offsets, place = [], 0
    for token_id in prompt_ids:
        offsets.append(place)
        place += 0 if tokenizer.is_special(token_id) else len(token_text(tokenizer, token_id, False))
    return offsets


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
