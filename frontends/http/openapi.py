"""GET /openapi.json: the routes, their bodies, answers and errors.

Made of the route table and of the Structs that read the bodies (frontends.http.bodies and SamplingParams), with the
limits of the running configuration. The Structs of answers are here: nothing is encoded with them, and a test validates
the answers of a running app against their schemas. An answer may have further keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Union

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontends.common.chat import Conversation, SpecialTokens
from frontends.http.bodies import (
    BadWordsFields,
    ChatFields,
    CompletionFields,
    ConversationFields,
    DetokenizeFields,
    EmbeddingsFields,
    ExtraFields,
    GenerateFields,
    GenerateTextFields,
    InferFields,
    MessagesFields,
    MessagesPromptFields,
    ModelFields,
    PromptFields,
    PromptLogprobsFields,
    PromptsFields,
    RecoveryFields,
    RerankFields,
    ResponsesFields,
    SchedulingFields,
    ScoreFields,
    SessionFields,
    StreamingFields,
    StructureFields,
    TokenizeFields,
    TruncationFields,
)
from frontends.http.ollama import (
    OllamaChatFields,
    OllamaEmbeddingsFields,
    OllamaEmbedFields,
    OllamaFields,
    OllamaGenerateFields,
    OllamaModelFields,
    OllamaPullFields,
)
from frontends.http.openai.batch_routes import BatchFields, FileListFields, ListFields, UploadFields
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine import __version__
from inferengine.config import LimitsConfig
from inferengine.errors import KINDS
from inferengine.fields import field_docs, json_schema, refusals
from inferengine.sampling_params import SamplingParams

Schema = dict[str, Any]


class Field(NamedTuple):
    """`schema` bounds what is accepted for itself; other fields and the model may bound it further. `refusals` are the
    words of its errors."""

    name: str
    schema: Schema
    meaning: str
    required: bool
    refusals: tuple[str, ...]


ONE_CHOICE = {"n"}  # what routes that give one choice do not take
OWN = {"max_tokens", "logprobs", "prompt_logprobs", "bad_words_ids"}  # of SamplingParams; each route reads its own way
SAMPLING: tuple[Any, ...] = ((SamplingParams, OWN), (BadWordsFields, set()))
ALONE: tuple[Any, ...] = ((SamplingParams, OWN | ONE_CHOICE), (BadWordsFields, set()))
COMMON = (
    ModelFields,
    StreamingFields,
    TruncationFields,
    PromptLogprobsFields,
    SchedulingFields,
    SessionFields,
    RecoveryFields,
    ExtraFields,
    SpecialTokens,
    StructureFields,
)
# The Structs of each route's body, by its path; with the fields that the route does not take.
BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/rerank": (RerankFields, ModelFields, SchedulingFields),
    "/v1/score": (ScoreFields, ModelFields, SchedulingFields),
    "/v1/embeddings": (EmbeddingsFields, ModelFields, TruncationFields, SchedulingFields, SpecialTokens),
    "/v1/completions": (PromptsFields, CompletionFields, *SAMPLING, *COMMON),
    "/v1/chat/completions": (Conversation, ChatFields, *SAMPLING, *COMMON),
    "/v1/responses": (ResponsesFields, SessionFields, *ALONE),
    "/v1/responses/input_tokens": (ResponsesFields,),
    "/v1/conversations": (ConversationFields,),
    "/v1/messages": (
        MessagesFields,
        MessagesPromptFields,
        (SamplingParams, OWN | ONE_CHOICE | {"stop"}),
        BadWordsFields,
        SessionFields,
    ),
    "/v1/messages/count_tokens": (MessagesPromptFields,),
    "/v1/generate": (GenerateFields, *ALONE),
    "/generate": (PromptFields, GenerateTextFields, *ALONE),
    "/infer/v1/completions": (InferFields, StructureFields, *ALONE),
    "/tokenize": (TokenizeFields, Conversation, SpecialTokens),
    "/detokenize": (DetokenizeFields,),
    "/api/chat": (OllamaModelFields, OllamaChatFields, OllamaFields),
    "/api/generate": (OllamaModelFields, OllamaGenerateFields, OllamaFields),
    "/api/embed": (OllamaModelFields, OllamaEmbedFields),
    "/api/embeddings": (OllamaModelFields, OllamaEmbeddingsFields),
    "/api/show": (OllamaModelFields,),
    "/api/pull": (OllamaPullFields,),
}
# Bodies that name something made before, and a form: media type and Struct.
STORED_BODIES: dict[str, tuple[str, type[Any]]] = {
    "/v1/files": ("multipart/form-data", UploadFields),
    "/v1/batches": ("application/json", BatchFields),
}
QUERIES: dict[str, type[Any]] = {"/v1/files": FileListFields, "/v1/batches": ListFields}  # of GET
REQUIRED = {"/v1/chat/completions": {"messages"}}  # what only some routes of a Struct require

_QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
# A body of each route that works as it stands: what the API pages send when a reader tries the route.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["What is a KV cache?"], "encoding_format": "float"},
    "/v1/rerank": {"query": "What is a KV cache?", "documents": ["Keys and values of tokens.", "A small bird."]},
    "/v1/score": {"text_1": "What is a KV cache?", "text_2": ["Keys and values of tokens.", "A small bird."]},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 40},
    "/v1/chat/completions": {"messages": _QUESTION, "max_completion_tokens": 60},
    "/v1/responses": {"input": "What is a KV cache?", "max_output_tokens": 60},
    "/v1/responses/input_tokens": {"input": "What is a KV cache?"},
    "/v1/conversations": {"metadata": {"topic": "caches"}},
    "/v1/messages": {"max_tokens": 60, "messages": _QUESTION},
    "/v1/messages/count_tokens": {"messages": _QUESTION},
    "/v1/generate": {"prompt": "Once upon a time", "max_new_tokens": 16},
    "/generate": {"prompt": "Once upon a time", "max_tokens": 16},
    "/infer/v1/completions": {"model": "embedded", "prompt": "Once upon a time", "max_tokens": 16},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [40, 41, 42]},
    "/api/chat": {"messages": _QUESTION, "options": {"num_predict": 60}},
    "/api/generate": {"prompt": "Once upon a time", "options": {"num_predict": 16}},
    "/api/embed": {"input": ["What is a KV cache?"]},
    "/api/embeddings": {"prompt": "What is a KV cache?"},
    "/api/show": {},
    "/api/pull": {"model": "embedded"},
}


def bodies(limits: LimitsConfig) -> dict[str, list[Field]]:
    """Return the fields of each route that reads a body, by its path."""
    return {path: list(_fields(path, structs, limits)) for path, structs in BODIES.items()}


def _fields(path: str, structs: Iterable[Any], limits: LimitsConfig) -> Iterator[Field]:
    for item in structs:
        kind, without = item if isinstance(item, tuple) else (item, set())
        for doc in field_docs(kind).values():
            if doc.name not in without:
                required = doc.required or doc.name in REQUIRED.get(path, ())
                schema = json_schema(doc.node, limits)
                yield Field(doc.name, schema, doc.meaning, required, tuple(refusals(doc.node, limits)))


CLOSED = frozenset({"/infer/v1/completions"})  # routes that refuse a field they do not know
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"enum": [*sorted(KINDS), "method_not_allowed"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


# Needed where the service has keys; the empty requirement stands for a service without.
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


async def openapi(request: Request) -> Response:
    """Describe every route, its fields and their ranges, as OpenAPI."""
    service: HttpState = request.app.state.service
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]
    return JsonBytes(describe(routes, service.config.limits))


def describe(routes: list[Route], limits: LimitsConfig) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    tables, answers = bodies(limits), schemas()
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, tables, answers)
    return {
        "openapi": "3.1.0",
        "info": {"title": "InferEngine", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, **answers.components}, "securitySchemes": SECURITY},
        "security": [{}, *({name: []} for name in SECURITY)],
    }


def _answer(method: str, path: str, answers: AnswerSchemas) -> dict[str, Any]:
    content = {}
    if (whole := answers.answers.get((method, path))) is not None:
        content["application/json"] = {"schema": whole}
    if (event := answers.events.get((method, path))) is not None:
        content["text/event-stream"] = {"schema": event}
    if (line := answers.lines.get((method, path))) is not None:
        content["application/x-ndjson"] = {"schema": line}
    return {"description": "The answer.", **({"content": content} if content else {})}


def body_schema(fields: list[Field], *, closed: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a body. Every field may also be null, which counts as absent."""
    properties = {
        field.name: {**field.schema, "description": field.meaning}
        if field.required
        else {"anyOf": [field.schema, {"type": "null"}], "description": field.meaning}
        for field in fields
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in fields if field.required],
        "additionalProperties": not closed,
    }


def _operation(
    route: Route, path: str, method: str, tables: dict[str, list[Field]], answers: AnswerSchemas
) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").strip().split("\n")[0]
    failed = {
        "description": "What is wrong, and with which field.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        **({"summary": summary} if summary else {}),
        "responses": {"200": _answer(method, path, answers), "4XX": failed, "5XX": failed},
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "GET" and (query := QUERIES.get(path)) is not None:
        operation["parameters"] = [
            {
                "name": doc.name,
                "in": "query",
                "description": doc.meaning,
                "schema": json_schema(doc.node),
            }
            for doc in field_docs(query).values()
        ]
    if method == "POST" and path in STORED_BODIES:
        media_type, kind = STORED_BODIES[path]
        fields = [
            Field(doc.name, json_schema(doc.node), doc.meaning, doc.required, ()) for doc in field_docs(kind).values()
        ]
        operation["requestBody"] = {"required": True, "content": {media_type: {"schema": body_schema(fields)}}}
    if method == "POST" and route.path in tables:
        schema = body_schema(tables[route.path], closed=route.path in CLOSED)
        content = {"schema": schema, "example": EXAMPLES[route.path]}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


# -- answers -----------------------------------------------------------------------------------------------------------


class UsageAnswer(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct):
    """One text."""

    index: int
    text: str
    finish_reason: FinishReason | None
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


class CompletionChunkChoice(msgspec.Struct):
    """What a chunk adds to one text."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None
    stop_reason: str | int | None = None


class CompletionChunk(msgspec.Struct):
    """One event of a streamed /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageAnswer | None = None


class ToolCallFunction(msgspec.Struct):
    """The function to call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallCustom(msgspec.Struct):
    """The custom tool to call, with a text."""

    name: str
    input: str


class ToolCallAnswer(msgspec.Struct):
    """A call that the client is to make: of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: ToolCallFunction | None = None
    custom: ToolCallCustom | None = None


class AssistantMessage(msgspec.Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None
    function_call: ToolCallFunction | None = None


class ChatChoice(msgspec.Struct):
    """One message."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
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
    function_call: dict[str, str] | None = None


class ChunkChoice(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None


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


class RerankDocument(msgspec.Struct):
    """A text that was ranked."""

    text: str


class RerankResult(msgspec.Struct):
    """A document, by its place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct):
    """Answer of /v1/rerank: the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class ScoreEntry(msgspec.Struct):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(msgspec.Struct):
    """Answer of /v1/score."""

    id: str
    object: Literal["list"]
    model: str
    data: list[ScoreEntry]
    usage: EmbeddingUsage


class ModelAnswer(msgspec.Struct):
    """Answer of /v1/models/{model}."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    implementation: str
    without: list[str]


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
    stop_details: dict[str, Any] | None
    container: dict[str, Any] | None
    usage: dict[str, Any]


class TokensAnswer(msgspec.Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextAnswer(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str


def _union_of_events(fields_by_type: dict[str, list[tuple[str, Any]]], common: Sequence[tuple[str, Any]] = ()) -> Any:
    """Make a union of Structs that `type` tells apart, from the fields of each type and those that all have."""
    kinds = []
    for kind, fields in fields_by_type.items():
        name = "".join(word.capitalize() for word in re.split("[._]", kind)) + "Event"
        kinds.append(msgspec.defstruct(name, [*common, *fields], tag=kind, tag_field="type"))
    return Union[tuple(kinds)]  # noqa: UP007  (the members are known only here)


_IN_ITEM: list[tuple[str, Any]] = [("item_id", str), ("output_index", int)]
_IN_CONTENT: list[tuple[str, Any]] = [*_IN_ITEM, ("content_index", int)]
_LOGPROBS: tuple[str, Any] = ("logprobs", list[dict[str, Any]])
RESPONSE_EVENTS: dict[str, list[tuple[str, Any]]] = {
    "response.created": [("response", ResponseAnswer)],
    "response.in_progress": [("response", ResponseAnswer)],
    "response.output_item.added": [("output_index", int), ("item", dict[str, Any])],
    "response.content_part.added": [*_IN_CONTENT, ("part", dict[str, Any])],
    "response.output_text.delta": [*_IN_CONTENT, ("delta", str), _LOGPROBS],
    "response.output_text.done": [*_IN_CONTENT, ("text", str), _LOGPROBS],
    "response.content_part.done": [*_IN_CONTENT, ("part", dict[str, Any])],
    "response.reasoning_text.delta": [*_IN_CONTENT, ("delta", str)],
    "response.reasoning_text.done": [*_IN_CONTENT, ("text", str)],
    "response.function_call_arguments.delta": [*_IN_ITEM, ("delta", str)],
    "response.function_call_arguments.done": [*_IN_ITEM, ("name", str), ("arguments", str)],
    "response.custom_tool_call_input.delta": [*_IN_ITEM, ("delta", str)],
    "response.custom_tool_call_input.done": [*_IN_ITEM, ("input", str)],
    "response.output_item.done": [("output_index", int), ("item", dict[str, Any])],
    "response.completed": [("response", ResponseAnswer)],
    "response.incomplete": [("response", ResponseAnswer)],
    "response.cancelled": [("response", ResponseAnswer)],
    "response.failed": [("response", ResponseAnswer)],
}


class AnthropicError(msgspec.Struct):
    """Why a stream of /v1/messages could not go on."""

    type: str
    message: str


class AnthropicStop(msgspec.Struct):
    """Why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None
    stop_details: dict[str, Any] | None
    container: dict[str, Any] | None


MESSAGE_EVENTS: dict[str, list[tuple[str, Any]]] = {
    "message_start": [("message", AnthropicMessage)],
    "ping": [],
    "content_block_start": [("index", int), ("content_block", dict[str, Any])],
    "content_block_delta": [("index", int), ("delta", dict[str, Any])],
    "content_block_stop": [("index", int)],
    "message_delta": [("delta", AnthropicStop), ("usage", dict[str, Any])],
    "message_stop": [],
    "error": [("error", AnthropicError)],
}


class OllamaToolCall(msgspec.Struct):
    """A call that the client is to make; `function` has its index, name and arguments (an object)."""

    function: dict[str, Any]
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """What the model said, or a line's share of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaEnd(msgspec.Struct, kw_only=True):
    """What the last line, and a whole answer, say besides; durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: FinishReason | Literal["load"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_cached_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaEnd, kw_only=True):
    """Answer of /api/chat, and a line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaEnd, kw_only=True):
    """Answer of /api/generate, and a line of its stream."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaErrorLine(msgspec.Struct):
    """The last line of a stream that could not go on."""

    error: str


class OllamaEmbedAnswer(msgspec.Struct):
    """Answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingAnswer(msgspec.Struct):
    """Answer of /api/embeddings."""

    embedding: list[float]


class OllamaModelAnswer(msgspec.Struct):
    """A model; `size` is not known and told as 0. The last three: of /api/ps alone."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModels(msgspec.Struct):
    """Answer of /api/tags and /api/ps."""

    models: list[OllamaModelAnswer]


class OllamaShowAnswer(msgspec.Struct):
    """Answer of /api/show."""

    parameters: str
    template: str
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modelfile: str = ""
    thinking: dict[str, Any] | None = None


class OllamaStatus(msgspec.Struct):
    """Answer of /api/pull, and a line of its stream."""

    status: Literal["pulling manifest", "success"]


class OllamaVersion(msgspec.Struct):
    """Answer of /api/version: of Ollama whose API this is, and of this program."""

    version: str
    inferengine: str


class FileAnswer(msgspec.Struct):
    """A file; `batch_output` is the purpose of what a batch wrote."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FilesAnswer(msgspec.Struct):
    """Answer of GET /v1/files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct):
    """Answer of DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchCounts(msgspec.Struct):
    """Lines in all, and those that have ended."""

    total: int
    completed: int
    failed: int


class BatchUsageAnswer(msgspec.Struct):
    """Tokens of the lines that were answered so far."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchAnswer(msgspec.Struct):
    """A batch. Times are Unix seconds, null for what did not happen."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None
    metadata: dict[str, str] | None
    request_counts: BatchCounts
    usage: BatchUsageAnswer
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None


class BatchesAnswer(msgspec.Struct):
    """Answer of GET /v1/batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


ANSWERS: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/completions"): CompletionAnswer,
    ("POST", "/v1/chat/completions"): ChatCompletion,
    ("POST", "/v1/embeddings"): EmbeddingsAnswer,
    ("POST", "/v1/rerank"): RerankAnswer,
    ("POST", "/v1/score"): ScoreAnswer,
    ("POST", "/v1/responses"): ResponseAnswer,
    ("POST", "/v1/messages"): AnthropicMessage,
    ("POST", "/tokenize"): TokensAnswer,
    ("POST", "/detokenize"): TextAnswer,
    ("GET", "/v1/models"): Models,
    ("GET", "/v1/models/{model}"): ModelAnswer,
    ("POST", "/v1/files"): FileAnswer,
    ("GET", "/v1/files"): FilesAnswer,
    ("GET", "/v1/files/{id}"): FileAnswer,
    ("DELETE", "/v1/files/{id}"): FileDeleted,
    ("POST", "/v1/batches"): BatchAnswer,
    ("GET", "/v1/batches"): BatchesAnswer,
    ("GET", "/v1/batches/{id}"): BatchAnswer,
    ("POST", "/v1/batches/{id}/cancel"): BatchAnswer,
    ("POST", "/api/chat"): OllamaChatAnswer,
    ("POST", "/api/generate"): OllamaGenerateAnswer,
    ("POST", "/api/embed"): OllamaEmbedAnswer,
    ("POST", "/api/embeddings"): OllamaEmbeddingAnswer,
    ("POST", "/api/show"): OllamaShowAnswer,
    ("POST", "/api/pull"): OllamaStatus,
    ("GET", "/api/tags"): OllamaModels,
    ("GET", "/api/ps"): OllamaModels,
    ("GET", "/api/version"): OllamaVersion,
}
# One event of the stream, where the route streams: a Struct, or a union of Structs.
EVENTS: dict[tuple[str, str], Any] = {
    ("POST", "/v1/completions"): CompletionChunk,
    ("POST", "/v1/chat/completions"): ChatCompletionChunk,
    ("POST", "/v1/responses"): _union_of_events(RESPONSE_EVENTS, [("sequence_number", int)]),
    ("POST", "/v1/messages"): _union_of_events(MESSAGE_EVENTS),
}
# One line of the stream, where the route streams lines of JSON, or the line of an error.
LINES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/api/chat"): OllamaChatAnswer,
    ("POST", "/api/generate"): OllamaGenerateAnswer,
    ("POST", "/api/pull"): OllamaStatus,
}


class AnswerSchemas(NamedTuple):
    """JSON schemas of answers, events and lines by method and path, and the `components` that they refer to by name."""

    answers: dict[tuple[str, str], dict[str, Any]]
    events: dict[tuple[str, str], dict[str, Any]]
    lines: dict[tuple[str, str], dict[str, Any]]
    components: dict[str, Any]


def schemas() -> AnswerSchemas:
    """Return the JSON schemas of all answers, events and lines, for #/components/schemas."""
    tables: list[dict[tuple[str, str], Any]] = [ANSWERS, EVENTS, LINES]
    kinds = [*(kind for table in tables for kind in table.values()), OllamaErrorLine]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    rest = iter(found)
    answers, events, lines = ({name: next(rest) for name in table} for table in tables)
    lines = {name: {"anyOf": [line, found[-1]]} for name, line in lines.items()}
    return AnswerSchemas(answers, events, lines, components)
