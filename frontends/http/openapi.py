"""GET /openapi.json: the routes, their fields and their errors, made of the route table and the field table.

Every field of every body, once: its JSON schema with its range, and what it means.

/openapi.json is made of this table, and the tests go through it: each range is tried on both sides, each row of
docs/parameters.md must say the same. What a field does is decided where it is read; here is what may be sent.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine import __version__
from inferengine.config import LimitsConfig
from inferengine.errors import KINDS
from inferengine.fields import field_docs, json_schema
from inferengine.sampling_params import MAX_BAD_WORDS, POOLINGS, SamplingParams
from inferengine.wire.codec import MAX_NAME_CHARACTERS, MAX_SALT_BYTES

Schema = dict[str, Any]


class Field(NamedTuple):
    """`schema` bounds what is accepted for itself; other fields and the model may bound it further."""

    name: str
    schema: Schema
    meaning: str
    required: bool = False


BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def number(least: float | None = None, most: float | None = None, *, above: float | None = None) -> Schema:
    bounds = {"minimum": least, "maximum": most, "exclusiveMinimum": above}
    return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}


def integer(least: int | None = None, most: int | None = None) -> Schema:
    return {**number(least, most), "type": "integer"}


def array(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": least, **({} if most is None else {"maxItems": most})}


NOT_DRAWN = {"max_tokens", "logprobs", "prompt_logprobs"}  # of SamplingParams, those that each route has its own of


def sampling(limits: LimitsConfig) -> list[Field]:
    """How tokens are drawn and when the output ends: the same on every route that generates."""
    docs = [doc for name, doc in field_docs(SamplingParams).items() if name not in NOT_DRAWN]
    words = Field(
        "bad_words",
        array({"type": "string", "minLength": 1}, most=MAX_BAD_WORDS // 2),
        "words that must not come, at the start or after a space: the last token of each is forbidden wherever the "
        "others just came",
    )
    return [
        words if doc.name == "bad_words_ids" else Field(doc.name, json_schema(doc.node, limits), doc.meaning)
        for doc in docs
    ]


def common(limits: LimitsConfig) -> list[Field]:
    """Besides sampling, of both OpenAI routes."""
    return [
        Field("model", STRING, "the name that /v1/models lists; empty or absent: that one"),
        Field("stream", BOOLEAN, "answer as Server-Sent Events"),
        Field(
            "stream_options",
            {"type": "object", "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}},
            "only with stream: a last chunk with the usage, or the usage in every chunk",
        ),
        Field("truncate_prompt_tokens", integer(-1), "keep the prompt's last tokens; -1: as many as leave room; not 0"),
        Field(
            "prompt_logprobs",
            integer(0, limits.max_logprobs),
            "alternatives per token of the prompt; not with stream or detached",
        ),
        Field("priority", integer(-(2**31), 2**31 - 1), "lower is sooner, where the engine goes by priority"),
        Field(
            "cache_salt",
            {"type": "string", "minLength": 1, "maxLength": MAX_SALT_BYTES},
            "requests share cached prefixes only with those of the same salt",
        ),
        Field(
            "request_id", {"type": "string", "maxLength": MAX_NAME_CHARACTERS // 2}, "part of the answer's id and logs"
        ),
        Field("detached", BOOLEAN, "go on when the connection is lost; the stream can be read on"),
        Field("resubmit", BOOLEAN, "go on when the engine is lost (the default); false: end with engine_restarted"),
        Field("return_token_ids", BOOLEAN, "token ids of prompt and output beside the text"),
        Field("return_tokens_as_token_ids", BOOLEAN, "in logprobs, tokens as token_id:N"),
        Field("add_special_tokens", BOOLEAN, "let the tokenizer add its own, such as BOS"),
        *structure(),
    ]


def structure() -> list[Field]:
    """What the whole output must match; one of them at most."""
    return [
        Field(
            "response_format",
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                    "json_schema": {"type": "object", "properties": {"schema": OBJECT}},
                },
            },
            "OpenAI's name for what the output must match",
        ),
        Field(
            "structured_outputs",
            {
                "type": "object",
                "properties": {
                    "json": {"anyOf": [OBJECT, STRING]},
                    "json_object": BOOLEAN,
                    "regex": STRING,
                    "choice": array(STRING, least=1),
                    "grammar": STRING,
                    "structural_tag": OBJECT,
                },
            },
            "vLLM's: exactly one of json, json_object, regex, choice, grammar (Lark or EBNF), structural_tag",
        ),
        Field("guided_json", {"anyOf": [OBJECT, STRING]}, "vLLM's older name: a JSON schema"),
        Field("guided_regex", STRING, "vLLM's older name: a regular expression"),
        Field("guided_choice", array(STRING, least=1), "vLLM's older name: one of these texts"),
        Field("guided_grammar", STRING, "vLLM's older name: a grammar in Lark or EBNF"),
    ]


TEXT_PARTS = array({"type": "object", "properties": {"type": {"enum": ["text"]}, "text": STRING}, "required": ["text"]})
MESSAGES = array(
    {
        "type": "object",
        "properties": {"role": STRING, "content": {"anyOf": [STRING, TEXT_PARTS]}},
        "required": ["role", "content"],
    },
    least=1,
)
FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": r"^[\w.-]{1,128}$"}, "parameters": OBJECT},
    "required": ["name"],
}
TOOL = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "function": FUNCTION},
    "required": ["function"],
}
PROMPT: Schema = {"type": "string", "minLength": 1}


def bodies(limits: LimitsConfig) -> dict[str, list[Field]]:
    """The fields of each route that reads a body, by its path."""
    draws = sampling(limits)
    alone = [field for field in draws if field.name != "n"]  # routes that give one choice
    logprobs = integer(0, limits.max_logprobs)
    prompts = {
        "anyOf": [
            PROMPT,
            array(PROMPT, least=1, most=limits.max_prompts),
            array(TOKEN_ID, least=1),
            array(array(TOKEN_ID, least=1), least=1, most=limits.max_prompts),
        ]
    }
    prompt = Field("prompt", PROMPT, "the text to continue", required=True)
    conversation = [
        Field("messages", MESSAGES, "the conversation, through the model's chat template", required=True),
        Field("tools", array(TOOL, most=128), "functions that may be called"),
        Field("tool_choice", {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]}, "whether, or which, to call"),
        Field("parallel_tool_calls", BOOLEAN, "more than one call in an answer"),
        Field("add_generation_prompt", BOOLEAN, "end the prompt where the assistant begins"),
        Field("continue_final_message", BOOLEAN, "end the prompt inside the last message"),
        Field("chat_template_kwargs", OBJECT, "variables for the chat template"),
        Field("documents", array(OBJECT), "given to the chat template"),
        Field("reasoning_effort", STRING, "given to the chat template"),
    ]
    max_tokens = Field("max_tokens", integer(1), "most tokens of the output, within the model's length")
    inputs = {
        "anyOf": [
            PROMPT,
            array(PROMPT, least=1, most=limits.max_embedding_inputs),
            array(TOKEN_ID, least=1),
            array(array(TOKEN_ID, least=1), least=1, most=limits.max_embedding_inputs),
        ]
    }
    shared = {field.name: field for field in common(limits)}
    return {
        "/v1/embeddings": [
            Field("input", inputs, "text, list of texts, token ids, list of lists of token ids", required=True),
            shared["model"],
            Field("encoding_format", {"enum": ["float", "base64"]}, "numbers, or little-endian f32 in base64"),
            Field("dimensions", integer(1), "keep so many values, of length 1 again; at most what the model has"),
            Field("pooling", {"enum": list(POOLINGS)}, "of the final hidden states the last token's, or the mean"),
            Field("user", STRING, "taken, and not looked at"),
            Field("truncate_prompt_tokens", integer(-1), "keep each input's last tokens; -1: as many as fit; not 0"),
            *(shared[name] for name in ("priority", "cache_salt", "request_id", "add_special_tokens")),
        ],
        "/v1/completions": [
            Field("prompt", prompts, "text, list of texts, token ids, list of lists of token ids", required=True),
            max_tokens,
            Field("echo", BOOLEAN, "the prompt's text before each output; with logprobs its tokens too (not streamed)"),
            Field(
                "logprobs", logprobs, "alternatives per token, from the model's own logits; 0: the token's own alone"
            ),
            *draws,
            *common(limits),
        ],
        "/v1/chat/completions": [
            *conversation,
            max_tokens,
            Field("max_completion_tokens", integer(1), "the newer name of max_tokens; goes before it"),
            Field("logprobs", BOOLEAN, "log-probabilities of the output's tokens, from the model's own logits"),
            Field("top_logprobs", logprobs, "alternatives per token; needs logprobs"),
            Field("include_reasoning", BOOLEAN, "show what the model thought"),
            *draws,
            *common(limits),
        ],
        "/v1/responses": [
            Field("input", {"anyOf": [PROMPT, array(OBJECT, least=1)]}, "a text, or items", required=True),
            Field("instructions", STRING, "the system message"),
            Field("previous_response_id", STRING, "continue that conversation"),
            Field("max_output_tokens", integer(1), "most tokens of the output"),
            Field("text", {"type": "object", "properties": {"format": OBJECT}}, "format: what the output must match"),
            Field("tools", array(OBJECT), "functions that may be called"),
            Field("tool_choice", {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]}, "whether, or which"),
            Field("parallel_tool_calls", BOOLEAN, "more than one call in an answer"),
            Field("reasoning", OBJECT, "effort: given to the chat template"),
            Field("truncation", {"enum": ["auto", "disabled"]}, "auto: drop the beginning of a conversation too long"),
            Field("metadata", {"type": "object", "additionalProperties": STRING, "maxProperties": 16}, "kept as it is"),
            Field("store", BOOLEAN, "keep the response for GET"),
            Field("background", BOOLEAN, "answer at once, make the response later"),
            Field("stream", BOOLEAN, "answer as events"),
            Field("include", array(STRING), "message.output_text.logprobs"),
            Field("top_logprobs", logprobs, "alternatives per token"),
            *alone,
        ],
        "/v1/messages": [
            Field("max_tokens", integer(1), "most tokens of the output", required=True),
            *_anthropic(),
            Field("stop_sequences", array({"type": "string", "minLength": 1}, most=16), "texts that end the output"),
            Field("stream", BOOLEAN, "answer as events"),
            *(field for field in alone if field.name != "stop"),
        ],
        "/v1/messages/count_tokens": _anthropic(),
        "/v1/generate": [
            prompt,
            Field("max_new_tokens", integer(1), "exactly so many tokens, whatever the model says (default 64)"),
            *alone,
        ],
        "/generate": [
            prompt,
            Field("max_tokens", integer(1), "most tokens of the output", required=True),
            *alone,
        ],
        "/infer/v1/completions": [prompt, max_tokens, Field("stream", BOOLEAN, "events (the default)"), *alone],
        "/tokenize": [
            Field("prompt", STRING, "the text; or messages"),
            *(field._replace(required=False) for field in conversation),
            Field("add_special_tokens", BOOLEAN, "let the tokenizer add its own"),
            Field("return_token_strs", BOOLEAN, "the tokens as texts too"),
        ],
        "/detokenize": [
            Field("tokens", array(TOKEN_ID), "the token ids", required=True),
            Field("skip_special_tokens", BOOLEAN, "leave special tokens out"),
        ],
    }


def _anthropic() -> list[Field]:
    return [
        Field("messages", MESSAGES, "strings or blocks of text, tool_use, tool_result, thinking", required=True),
        Field("model", STRING, "the name that /v1/models lists"),
        Field("system", {"anyOf": [STRING, TEXT_PARTS]}, "the system message"),
        Field("tools", array(OBJECT), "the client's own tools"),
        Field("tool_choice", OBJECT, "type: auto, any, tool or none"),
        Field("thinking", OBJECT, "type: enabled or disabled, for templates that know it"),
        Field("output_config", {"type": "object", "properties": {"format": OBJECT}}, "format: a JSON schema"),
    ]


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


async def openapi(request: Request) -> Response:
    """Every route, its fields and their ranges."""
    service: HttpState = request.app.state.service
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return JsonBytes(describe(routes, service.config.limits))


def describe(routes: list[Route], limits: LimitsConfig) -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    tables = bodies(limits)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, tables)
    return {
        "openapi": "3.1.0",
        "info": {"title": "InferEngine", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}},
    }


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


def _operation(route: Route, path: str, method: str, tables: dict[str, list[Field]]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").strip().split("\n")[0]
    failed = {
        "description": "What is wrong, and with which field.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        **({"summary": summary} if summary else {}),
        "responses": {"200": {"description": "The answer."}, "4XX": failed, "5XX": failed},
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST" and route.path in tables:
        schema = body_schema(tables[route.path], closed=route.path in CLOSED)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
