"""Embeddings as clients ask for them and get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from inferengine.client.streams import Delta, error_from
from inferengine.client.submitting import SubmitOptions
from inferengine.errors import InferEngineError
from inferengine.vectors import to_floats
from inferengine.wire.messages import EMBEDDINGS, Welcome

Prompt = str | Sequence[int]


class Embedding(NamedTuple):
    """A vector of length 1, as it travelled: f32, little-endian."""

    data: bytes
    prompt_tokens: int
    cached_tokens: int

    @property
    def values(self) -> list[float]:
        return to_floats(self.data)


def require_embeddings(welcome: Welcome) -> None:
    """Raise `unsupported` for an engine that gives none."""
    if EMBEDDINGS not in welcome.features:
        raise InferEngineError("unsupported", "This engine gives no embeddings: its version is too old.", field="reply")


def to_submits(
    prompts: Prompt | Sequence[Prompt], options: SubmitOptions
) -> Iterator[tuple[Sequence[int] | None, SubmitOptions]]:
    """What `submit` gets for one prompt or several: text is for the engine to tokenize."""
    asked: SubmitOptions = {**options, "reply": "embedding"}
    for prompt in _listed(prompts):
        if isinstance(prompt, str):
            yield None, {**asked, "text": prompt}
        else:
            yield prompt, asked


def from_deltas(deltas: Sequence[Delta]) -> Embedding:
    """The vector that came with a stream's end. Raises the InferEngineError that it ended with instead."""
    last = deltas[-1] if deltas else None
    if last is None or last.finish is None:
        raise InferEngineError("engine_error", "The stream was read already.")
    finish = last.finish
    if finish.reason == "stop" and last.embedding is not None:
        return Embedding(last.embedding, finish.prompt_tokens, finish.cached_tokens)
    code, message = "engine_error", "The engine gave no embedding."
    if isinstance(finish.detail, list | tuple) and len(finish.detail) >= 2:
        code, message = map(str, finish.detail[:2])
    raise error_from(code, message)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
