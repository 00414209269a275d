"""What the routes answer with, as /openapi.json describes it.

Nothing is encoded with these Structs: a test validates the answers of a running app against their schemas. An answer
may have further keys.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Finish = Literal["stop", "length", "tool_calls"]


class UsageAnswer(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct):
    """One text."""

    index: int
    text: str
    finish_reason: Finish | None
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None


class CompletionAnswer(msgspec.Struct):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class ToolCallFunction(msgspec.Struct):
    """The function to call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AssistantMessage(msgspec.Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(msgspec.Struct):
    """One message."""

    index: int
    message: AssistantMessage
    finish_reason: Finish | None
    stop_reason: str | int | None
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChunkChoice(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None


class ChatCompletionChunk(msgspec.Struct):
    """One event of a streamed /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | None = None


class EmbeddingAnswer(msgspec.Struct):
    """One vector: numbers, or little-endian f32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingAnswer]
    usage: EmbeddingUsage


class ModelAnswer(msgspec.Struct):
    """Answer of /v1/models/{model}."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class ResponseAnswer(msgspec.Struct):
    """Answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]


class AnthropicMessage(msgspec.Struct):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class TokensAnswer(msgspec.Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextAnswer(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str


ANSWERS: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/completions"): CompletionAnswer,
    ("POST", "/v1/chat/completions"): ChatCompletion,
    ("POST", "/v1/embeddings"): EmbeddingsAnswer,
    ("POST", "/v1/responses"): ResponseAnswer,
    ("POST", "/v1/messages"): AnthropicMessage,
    ("POST", "/tokenize"): TokensAnswer,
    ("POST", "/detokenize"): TextAnswer,
    ("GET", "/v1/models"): Models,
    ("GET", "/v1/models/{model}"): ModelAnswer,
}
EVENTS: dict[tuple[str, str], type[msgspec.Struct]] = {("POST", "/v1/chat/completions"): ChatCompletionChunk}


def schemas() -> dict[str, Any]:
    """Return the JSON schemas of all answers, for #/components/schemas."""
    kinds = [*ANSWERS.values(), *EVENTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return components
