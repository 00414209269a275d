"""GET /openapi.json: the routes, their bodies, answers and errors.

Made of the route table and of the Structs that read the bodies (frontends.http.bodies and SamplingParams), with the
limits of the running configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontends.common.chat import Conversation, SpecialTokens
from frontends.http.answers import AnswerSchemas, schemas
from frontends.http.batches.batch_routes import BatchFields, FileListFields, ListFields, UploadFields
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
    "/v1/responses": (ResponsesFields, *ALONE),
    "/v1/responses/input_tokens": (ResponsesFields,),
    "/v1/conversations": (ConversationFields,),
    "/v1/messages": (
        MessagesFields,
        MessagesPromptFields,
        (SamplingParams, OWN | ONE_CHOICE | {"stop"}),
        BadWordsFields,
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
    """Every route, its fields and their ranges."""
    service: HttpState = request.app.state.service
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]
    return JsonBytes(describe(routes, service.config.limits))


def describe(routes: list[Route], limits: LimitsConfig) -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
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
    """A JSON schema of a body; every field may also be null, which says nothing."""
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
