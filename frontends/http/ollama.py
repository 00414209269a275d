"""Ollama's API, for programs that speak no other: /api/chat, generate, embed, embeddings, tags, show, ps and version.

A body is rewritten as one of OpenAI's chat API and read as such. The answer is one JSON document or, by default, lines
of JSON (application/x-ndjson), the last of which has the counts and the durations in nanoseconds. Reference: Ollama's
API documentation, of the version that /api/version names.

Models are the operator's: pulling the served one succeeds and does nothing, and every other change of models is refused
with what to do instead.

The served model is always loaded: `keep_alive` and options about loading are read and change nothing. A context is
never shifted or cut: a prompt longer than `num_ctx` is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from frontends.common.chat import MESSAGES, OBJECT, TOOL, OutputParser, Schema, array
from frontends.common.errors import rename_field, report, retry_after, sentence
from frontends.common.generation import ChoiceOutput, Options, Output, Piece, RequestOutput, Usage
from frontends.common.json import dumps, quote, read_fields, read_token_ids
from frontends.common.model import ServedModel
from frontends.http.anthropic import tool_input
from frontends.http.bodies import SAMPLING, read_json, read_options, read_params
from frontends.http.openai.completion_formats import chat_logprobs_object
from frontends.http.openai.completions import prompt_names, read_chat
from frontends.http.openai.embeddings import embedding_inputs, in_parts, made
from frontends.http.respond import EventStream, EventTemplate, JsonBytes, RouteHandler
from frontends.http.routes.tokenize import MAX_TOKENS
from frontends.http.state import HttpState
from frontends.http.telemetry import describe, describe_embeddings
from inferengine import __version__
from inferengine.client import Embedding, Finish
from inferengine.config import Config
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import about, field_docs, json_schema
from inferengine.sampling_params import Alternatives, Positive, SamplingParams
from inferengine.text.output_parser import reasoning_format
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning
from inferengine.vectors import shorten

OLLAMA_VERSION = "0.40.12"  # whose API this is; some programs refuse to work with an older one
TAG = ":latest"  # of a name without a tag
NEVER = "9999-12-31T23:59:59Z"  # when the model leaves memory
MS = 1_000_000  # nanoseconds
THINKING = Literal["low", "medium", "high", "max"]

# Sampling fields of the same name and meaning.
SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
PASSED_ON = tuple(name for name in SAMPLING if name not in ("n", "repetition_penalty"))
# Options that ask for what does not exist here; the values listed ask for nothing.
REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
REFUSED: dict[str, tuple[Any, ...]] = {"suffix": ("",), "template": ("",), "images": ([],)}


class OllamaOptions(msgspec.Struct, frozen=True):
    """Fields of `options` whose name or meaning differs from SamplingParams."""

    num_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=2**63 - 1)], about("most tokens of the output; 0 and below: as many as fit")
    ] = -1
    num_ctx: Annotated[
        Positive | None, about("most tokens of prompt and output; above the model's length: that length")
    ] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100)] | None, about("repetition_penalty of the other APIs")
    ] = None
    repeat_last_n: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)],
        about("tokens that repeat_penalty looks back at: -1, all of them, or 0, none"),
    ] = -1


def _options_schema() -> Schema:
    sampling = field_docs(SamplingParams)
    nodes = {name: sampling[name].node for name in SAME} | {
        name: doc.node for name, doc in field_docs(OllamaOptions).items()
    }
    return {
        "type": "object",
        "properties": {
            name: {
                **(node.schema if {"type", "anyOf"} & node.schema.keys() else json_schema(node)),
                "description": node.description,
            }
            for name, node in nodes.items()
        },
    }


OPTIONS = Annotated[dict[str, Any], about("sampling, and the lengths", schema=_options_schema())]
FORMAT: Schema = {"anyOf": [{"enum": ["", "json"]}, OBJECT]}
KEEP_ALIVE = Annotated[
    Any, about("read and ignored: the model stays loaded", schema={"anyOf": [{"type": "string"}, {"type": "number"}]})
]


class OllamaModelFields(msgspec.Struct, frozen=True):
    """The model that the request is for."""

    model: Annotated[str, about("a name that /api/tags lists; `:latest` may be left out")] = ""


class OllamaFields(msgspec.Struct, frozen=True):
    """Fields of /api/chat and /api/generate."""

    stream: Annotated[bool, about("answer in lines of JSON (the default)")] = True
    options: OPTIONS = {}
    format: Annotated[
        Any,
        about("json, or a JSON schema", schema=FORMAT, also=["must be json or a JSON schema"]),
    ] = None
    think: Annotated[
        bool | THINKING | None,
        about(
            "whether, or how much, the model thinks before it answers; null: its default",
            expected="must be true, false, low, medium, high or max",
            schema={"anyOf": [{"type": "boolean"}, {"enum": [*get_args(THINKING)]}]},
        ),
    ] = None
    logprobs: Annotated[bool, about("log-probabilities of the output's tokens")] = False
    top_logprobs: Annotated[Alternatives | None, about("alternatives per token; needs logprobs")] = None
    keep_alive: KEEP_ALIVE = None


class OllamaChatFields(msgspec.Struct, frozen=True):
    """Fields that only /api/chat has."""

    messages: Annotated[
        Any, about("the conversation; none: is the model loaded?", schema={**MESSAGES, "minItems": 0})
    ] = None
    tools: Annotated[Any, about("functions that may be called", schema=array(TOOL))] = None


class OllamaGenerateFields(msgspec.Struct, frozen=True):
    """Fields that only /api/generate has."""

    prompt: Annotated[str, about("what the user says; empty: is the model loaded?")] = ""
    system: Annotated[str, about("the system message")] = ""
    raw: Annotated[bool, about("continue the prompt as it stands, without the chat template")] = False
    context: Annotated[
        Any, about("token ids of an earlier answer, to go on from", schema=array({"type": "integer", "minimum": 0}))
    ] = None


class OllamaEmbedFields(msgspec.Struct, frozen=True):
    """Fields of /api/embed."""

    input: Annotated[
        Any,
        about(
            "a text or a list of texts",
            schema={"anyOf": [{"type": "string"}, array({"type": "string"}, most={"limit": "max_embedding_inputs"})]},
        ),
    ] = ""
    truncate: Annotated[bool, about("keep the beginning of an input that is too long; false: refuse it")] = True
    dimensions: Annotated[Positive | None, about("keep so many values, of length 1 again")] = None
    options: OPTIONS = {}
    keep_alive: KEEP_ALIVE = None


class OllamaPullFields(msgspec.Struct, frozen=True):
    """Fields of /api/pull."""

    model: Annotated[str, about("the served model or one of its adapters")] = ""
    name: Annotated[str, about("the older name of model")] = ""
    stream: Annotated[bool, about("answer in lines of JSON (the default)")] = True
    insecure: Annotated[bool, about("read and ignored: nothing is fetched")] = False


class OllamaEmbeddingsFields(msgspec.Struct, frozen=True):
    """Fields of /api/embeddings."""

    prompt: Annotated[str, about("the text")] = ""
    options: OPTIONS = {}
    keep_alive: KEEP_ALIVE = None


# -- routes ------------------------------------------------------------------------------------------------------------

# Fields of the chat API in errors, and what Ollama calls them.
NAMES = {name: f"options.{name}" for name in (*PASSED_ON, *field_docs(OllamaOptions))} | {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "response_format.json_schema": "format",
    "response_format.json_schema.schema": "format",
    "reasoning_effort": "think",
}


def as_ollama(endpoint: RouteHandler) -> RouteHandler:
    """Wrap a route so that its errors have Ollama's format and names of fields."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InferEngineError as error:
            if error.field is not None and error.field not in NAMES:
                error.field = NAMES.get(error.field.partition("[")[0], error.field)
            rename_field(error, NAMES)
            report(error, request.scope["request_id"])
            response = JsonBytes(error_line(error), error.http_status)
            if (wait := retry_after(error)) is not None:
                response.headers["Retry-After"] = wait
            return response

    return wrapped


@as_ollama
async def chat(request: Request) -> Response:
    """Answer a conversation with lines of JSON, or one document (Ollama's chat)."""
    ask = await _read(request)
    messages = read_fields(OllamaChatFields, ask.body).messages
    if messages is None or messages == []:
        return JsonBytes({**ask.head(), "message": {"role": "assistant", "content": ""}, **_loaded(ask.started_ns)})
    document = {**_to_chat(ask), "messages": _messages(messages), "tools": ask.body.get("tools")}
    prompt = await _chat_prompt(ask, document)
    return await _answer(ask, prompt, OllamaFormat(ask, prompt, "message"))


@as_ollama
async def generate(request: Request) -> Response:
    """Answer one prompt with lines of JSON, or one document; by the chat template unless `raw` (Ollama's generate)."""
    ask = await _read(request)
    fields = read_fields(OllamaGenerateFields, ask.body)
    if not fields.prompt:
        return JsonBytes({**ask.head(), "response": "", **_loaded(ask.started_ns)})
    document = _to_chat(ask)
    if fields.raw or ask.served.template is None:
        prompt = await _raw_prompt(ask, document, fields)
    else:
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        messages = [*system, {"role": "user", "content": fields.prompt}]
        prompt = await _chat_prompt(ask, {**document, "messages": messages})
    if fields.context is not None and fields.context != []:
        before = read_token_ids(fields.context, "context")
        if len(before) + len(prompt.ids) >= ask.served.info.max_model_len:
            raise InvalidRequest("context", "leaves no room for prompt and output", code="context_length_exceeded")
        prompt = prompt._replace(ids=[*before, *prompt.ids])
    return await _answer(ask, prompt, OllamaFormat(ask, prompt, "response", tells_context=not fields.raw))


@as_ollama
async def embed(request: Request) -> Response:
    """Embed texts as vectors of length 1 (Ollama's embed)."""
    ask = await _read(request, generates=False)
    fields = read_fields(OllamaEmbedFields, ask.body, ask.config.limits)
    inputs = [fields.input] if isinstance(fields.input, str) else fields.input
    if not isinstance(inputs, list) or not all(isinstance(text, str) for text in inputs):
        raise InvalidRequest("input", "must be a text or a list of texts")
    if len(inputs) > ask.config.limits.max_embedding_inputs:
        raise InvalidRequest("input", f"at most {ask.config.limits.max_embedding_inputs} in one call")
    size = ask.served.info.embedding_size
    if fields.dimensions is not None and fields.dimensions > size:
        raise InvalidRequest("dimensions", f"must be at most {size}: this model's embeddings have {size} values")
    found = await _embed(ask, inputs if fields.input else [], "input", truncate=fields.truncate)
    describe_embeddings(request.scope, found, fields.dimensions or size)
    dimensions = fields.dimensions or size
    tail = {
        "total_duration": time.monotonic_ns() - ask.started_ns,
        "load_duration": 0,
        "prompt_eval_count": sum(one.prompt_tokens for one in found),
    }
    vectors = (one._replace(data=shorten(one.data, dimensions)).values for one in found)
    document = in_parts({"model": ask.model}, "embeddings", vectors, tail)
    return StreamingResponse(document, media_type="application/json")


@as_ollama
async def embeddings(request: Request) -> Response:
    """Embed one text as a vector of length 1 (Ollama's older route)."""
    ask = await _read(request, generates=False)
    prompt = read_fields(OllamaEmbeddingsFields, ask.body).prompt
    found = await _embed(ask, [prompt] if prompt else [], "prompt", truncate=True)
    return JsonBytes({"embedding": found[0].values if found else []})


@as_ollama
async def tags(request: Request) -> Response:
    """List the models, in Ollama's format."""
    service: HttpState = request.app.state.service
    return JsonBytes({"models": _models(service)})


@as_ollama
async def running(request: Request) -> Response:
    """List the models in memory: all that are served, without an expiry."""
    service: HttpState = request.app.state.service
    length = service.model.info.max_model_len
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": length}
    return JsonBytes({"models": [{**model, **more} for model in _models(service)]})


@as_ollama
async def show(request: Request) -> Response:
    """Return a model's template, lengths and capabilities, in Ollama's format."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.model.get()
    _model_name({"model": body["name"], **body} if body.get("name") else body, served)
    thinks = _can_think(served, service.config)
    info = {
        "general.architecture": "transformer",
        "general.basename": served.name,
        "transformer.context_length": served.info.max_model_len,
        "transformer.embedding_length": served.info.embedding_size,
        "transformer.vocab_size": served.info.vocab_size,
    }
    return JsonBytes(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in served.defaults.items()),
            "template": "" if served.template is None else served.template.source,
            "modified_at": _time(service.started_s),
            "details": _details(served.info.dtype),
            "model_info": info,
            "capabilities": [
                "completion",
                *(["tools"] if served.template is not None else []),
                *(["thinking"] if thinks else []),
                *(["embedding"] if served.info.embedding_size else []),
            ],
            **({"thinking": {"values": [False, True], "default": True}} if thinks else {}),
        }
    )


@as_ollama
async def pull(request: Request) -> Response:
    """Succeed for the served model, which is here already; refuse any other (Ollama's pull)."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    fields = read_fields(OllamaPullFields, body)
    name = fields.model or fields.name
    if not name:
        raise InvalidRequest("model", "is required")
    try:
        _model_name({"model": name}, await service.model.get())
    except InferEngineError as error:
        if error.code != "model_not_found":
            raise
        remedy = f"on its machine `inferengine fetch {name[:200]}` fetches another, and `inferengine up` serves it"
        raise InvalidRequest("model", f"this server does not fetch models: {remedy}", code="unsupported") from None
    if not fields.stream:
        return JsonBytes({"status": "success"})
    lines = ({"status": "pulling manifest"}, {"status": "success"})
    return Response(b"".join(dumps(line) + b"\n" for line in lines), media_type="application/x-ndjson")


def _refused(action: str, remedy: str) -> RouteHandler:
    @as_ollama
    async def endpoint(request: Request) -> Response:
        await read_json(request, request.app.state.service.config.http.max_body_bytes)
        raise InferEngineError("unsupported", f"This server does not {action} models: {remedy}")

    endpoint.__doc__ = f"Refused: this server does not {action} models."
    return endpoint


# What Ollama does to its models, and who does it here.
CHANGES = {
    "create": "on its machine `inferengine up FOLDER` serves a checkpoint; an administrator loads LoRA adapters with "
    "POST /v1/load_lora_adapter.",
    "copy": "name the served one with `model.served_name` on its machine.",
    "delete": "on its machine they lie in the Hugging Face cache; an administrator unloads LoRA adapters with "
    "POST /v1/unload_lora_adapter.",
    "push": "`hf upload` takes a checkpoint to the Hugging Face hub.",
}
create, copy, delete, push = (_refused(action, remedy) for action, remedy in CHANGES.items())


@as_ollama
async def upload_blob(request: Request) -> Response:
    """Refuse an upload: this server accepts no model files."""
    if request.method == "HEAD":
        return Response(status_code=404)  # it is not here
    raise InferEngineError("unsupported", f"This server takes no files of models: {CHANGES['create']}")


async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is, and this program's own."""
    return JsonBytes({"version": OLLAMA_VERSION, "inferengine": __version__})


# -- reading -----------------------------------------------------------------------------------------------------------


class _Ask(NamedTuple):
    """A request that was read. `model`: the name as the client wrote it."""

    request: Request
    service: HttpState
    served: ServedModel
    body: dict[str, Any]
    fields: OllamaFields
    options: OllamaOptions
    model: str
    name: str
    started_ns: int

    @property
    def config(self) -> Config:
        return self.service.config

    def head(self) -> dict[str, Any]:
        """Return the fields that every line begins with."""
        return {"model": self.model, "created_at": _time(time.time())}


class _Prompt(NamedTuple):
    """The prompt and options for the engine, and the parser of the output."""

    ids: list[int]
    params: SamplingParams
    options: Options
    parser: OutputParser


async def _read(request: Request, *, generates: bool = True) -> _Ask:
    started_ns = time.monotonic_ns()
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    fields = read_fields(OllamaFields, body if generates else {}, service.config.limits)
    options = read_fields(OllamaOptions, _whole_numbers(read_fields(OllamaEmbeddingsFields, body).options))
    for values, refused, path in ((body, REFUSED, ""), (body.get("options") or {}, REFUSED_OPTIONS, "options.")):
        for name in refused.keys() & values.keys():
            if values[name] is not None and values[name] not in refused[name]:
                raise InvalidRequest(
                    f"{path}{name}", "is not supported by this engine: leave it out", code="unsupported"
                )
    keep_alive = body.get("keep_alive")
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, str | int | float | None):
        raise InvalidRequest("keep_alive", "must be a duration such as 5m, or seconds")
    served = await service.served()
    name = _model_name(body, served)
    request.scope["document"] = {"model": name}  # for the key's rights
    return _Ask(request, service, served, body, fields, options, body.get("model") or name, name, started_ns)


def _whole_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options such as 8.0 to 8: some languages have floats only."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in options.items()
    }


def _model_name(body: dict[str, Any], served: ServedModel) -> str:
    """Return a model's name as this server lists it. Raises model_not_found."""
    given = read_fields(OllamaModelFields, body).model
    for name in (given, given.removesuffix(TAG)):
        if not name or served.adapter_of(name) is not None:
            return name or served.name
    raise InferEngineError("model_not_found", f"model '{given[:200]}' not found: it is called '{served.name}'")


def _to_chat(ask: _Ask) -> dict[str, Any]:
    """Convert a body to one of the chat API, without the conversation."""
    fields, options = ask.fields, ask.options
    given = _whole_numbers(ask.body.get("options") or {})
    document: dict[str, Any] = {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    if document.get("seed") == -1:
        del document["seed"]  # Ollama's word for a random one
    if options.repeat_penalty is not None and options.repeat_last_n != 0:
        if 0 < options.repeat_last_n < ask.served.info.max_model_len and options.repeat_penalty != 1:
            raise InvalidRequest(
                "options.repeat_last_n",
                "repeat_penalty looks at the whole prompt and output here: leave it out, or send -1 or 0",
                code="unsupported",
            )
        document["repetition_penalty"] = options.repeat_penalty
    elif options.repeat_last_n == 0:
        document["repetition_penalty"] = 1.0
    document |= {"model": ask.name, "max_tokens": options.num_predict if options.num_predict > 0 else None}
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    document |= {"logprobs": fields.logprobs, "top_logprobs": fields.top_logprobs if fields.logprobs else None}
    if fields.format not in (None, ""):
        document["response_format"] = _response_format(fields.format)
    if fields.think is not None:
        if fields.think and not _can_think(ask.served, ask.config):
            raise InvalidRequest("think", f'"{ask.model}" does not support thinking: leave it out', code="unsupported")
        document["chat_template_kwargs"] = {"enable_thinking": bool(fields.think)}
        if isinstance(fields.think, str):
            document["reasoning_effort"] = fields.think
    return document


def _response_format(wanted: Any) -> dict[str, Any]:
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, dict):
        raise InvalidRequest("format", "must be json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": wanted}}


def _messages(messages: Any) -> list[Any]:
    """Convert the conversation to OpenAI's format. A tool's result belongs to the earliest open call of its name."""
    if not isinstance(messages, list):
        raise InvalidRequest("messages", "must be a list of messages")
    read: list[Any] = []
    waiting: dict[str, deque[str]] = {}  # ids of calls without a result, by the function's name
    num_calls = 0
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{place}]", "must be an object with role and content")
        if message.get("images"):
            raise InvalidRequest(f"messages[{place}].images", "this model reads text only", code="unsupported")
        turn: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
        if isinstance(message.get("thinking"), str):
            turn["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            turn["tool_calls"] = []
            for call in calls:
                function = call.get("function") if isinstance(call, dict) else None
                name = function.get("name") if isinstance(function, dict) else None
                given_id = call.get("id") if isinstance(call, dict) else None
                call_id = given_id if isinstance(given_id, str) and given_id else f"call_{num_calls}"
                num_calls += 1
                if isinstance(name, str):
                    waiting.setdefault(name, deque()).append(call_id)
                turn["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            name = name if isinstance(name, str) and name else next((one for one, ids in waiting.items() if ids), "")
            given_id = message.get("tool_call_id")
            open_ids = waiting.get(name)
            turn["tool_call_id"] = given_id or (open_ids.popleft() if open_ids else "")
            turn["name"] = name
        read.append(turn)
    return read


async def _chat_prompt(ask: _Ask, document: dict[str, Any]) -> _Prompt:
    chat = await read_chat(ask.service, document, ask.request.scope["request_id"])
    return _Prompt(chat.prompt.prompt_ids, chat.params, chat.options, chat.prompt.parser)


async def _raw_prompt(ask: _Ask, document: dict[str, Any], fields: OllamaGenerateFields) -> _Prompt:
    logprobs = (ask.fields.top_logprobs or 0) if ask.fields.logprobs else None
    params = read_params(document, ask.served, ask.config, max_tokens=document["max_tokens"], logprobs=logprobs)
    label = ask.request.scope["request_id"]
    options = read_options(document, ask.config, label=label, continues_prompt=True)
    prompt_ids = await ask.served.encode(fields.prompt, ask.config.limits, name="prompt")
    return _Prompt(prompt_ids, params, options, OutputParser())


def _within_context(ask: _Ask, prompt: _Prompt) -> SamplingParams:
    """Return the sampling parameters, with no more output than `num_ctx` leaves room for. Raises InvalidRequest."""
    num_ctx = ask.options.num_ctx
    if num_ctx is None or num_ctx >= ask.served.info.max_model_len:
        return prompt.params
    room = num_ctx - len(prompt.ids)
    if room < 1:
        raise InvalidRequest(
            "options.num_ctx",
            f"the prompt has {len(prompt.ids)} tokens: allow more than that, up to {ask.served.info.max_model_len}",
            code="context_length_exceeded",
        )
    return prompt.params.replace(max_tokens=min(prompt.params.max_tokens or room, room))


def _can_think(served: ServedModel, config: Config) -> bool:
    """Return whether reasoning is separated from the answer."""
    if served.template is None:
        return False
    return reasoning_format(config.http.reasoning_parser, served.template.source) is not None


async def _embed(ask: _Ask, texts: Sequence[str], field: str, *, truncate: bool) -> list[Embedding]:
    served, config = ask.served, ask.config
    if not served.info.embedding_size or served.scores_pairs:
        raise InferEngineError("unsupported", f'"{ask.model}" does not support embeddings')
    engines = ask.service.engines_for(ask.request, served, detachable=False)
    if not texts:
        return []
    label = ask.request.scope["request_id"]
    options = read_options({}, config, label=label, continues_prompt=True)
    names = prompt_names(len(texts), field)
    prompts = []
    for name, text in zip(names, texts, strict=True):
        await asyncio.sleep(0)  # short texts are tokenized here: let other requests run in between
        if not text:
            raise InvalidRequest(name, "must not be empty")
        most = MAX_TOKENS if truncate else None
        token_ids = await served.encode(text, config.limits, name=name, most=most)
        prompts.append(token_ids[: served.info.max_model_len] if truncate else token_ids)
    call = embedding_inputs(engines, made(prompts), names, "", options)
    with ask.service.call(call, ask.request.receive):
        return await call.collect()


# -- answers -----------------------------------------------------------------------------------------------------------


async def _answer(ask: _Ask, prompt: _Prompt, format: OllamaFormat) -> Response:
    """Wait until the engine has accepted the request, so that a refusal still has its HTTP status; then answer."""
    service, request = ask.service, ask.request
    params = _within_context(ask, prompt)
    engines = service.engines_for(request, ask.served, detachable=False)
    generation = RequestOutput(engines, ask.served.tokenizer, [prompt.ids], params, prompt.options)
    with contextlib.ExitStack() as stack:
        stack.callback(describe, request.scope, generation)
        call = stack.enter_context(service.call(generation, request.receive))
        await generation.accepted()
        if ask.fields.stream:
            return LineStream(service, generation, format, call, stack.pop_all())
        outputs = await generation.collect()
        await generation.settle()
        return JsonBytes(format.document(outputs, generation.usage()))


class LineStream(EventStream):
    """The ASGI application that relays a generation as lines of JSON."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. RunningCall notices when the client disconnects."""
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        with self._resources:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._relay(scope.get("plain_send", send), scope["request_id"])
            await send({"type": "http.response.body", "body": last})
            if self._call.client_gone and not self._complete:
                scope["status"] = 499


class OllamaFormat:
    """Writes one choice, in `message` (chat) or `response` (generate)."""

    ends_with_usage = False  # `end` tells it

    def __init__(
        self, ask: _Ask, prompt: _Prompt, kind: Literal["message", "response"], *, tells_context: bool = False
    ):
        """`tells_context`: the last line has `context`, the token ids of prompt and output."""
        self._ask = ask
        self._prompt = prompt
        self._is_chat = kind == "message"
        self._parser = prompt.parser
        self._reader = None if prompt.parser.is_plain else prompt.parser.make_reader()
        self._logprobs = prompt.params.logprobs
        self._token_ids: list[int] | None = [] if tells_context else None
        self._calls: dict[int, list[str]] = {}  # begun and not shown: name, then arguments
        self._last: Piece | None = None
        self._head = dumps(ask.head())[:-1]

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the lines of these pieces."""
        lines = []
        for piece in pieces:
            if self._token_ids is not None:
                self._token_ids += piece.token_ids
            if piece.is_last:
                self._last = piece
            shown = self._parts(piece)
            logprobs = self._rows(piece.token_ids, piece.logprobs)
            if logprobs and not shown:
                shown = [("", "", [])]
            for place, part in enumerate(shown):
                more = {"logprobs": logprobs} if logprobs and place == 0 else {}
                lines.append(self._line(*part, more))
        return b"".join(lines)

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of lines; None if lines carry more than text."""
        carries_more = self._reader is not None or self._logprobs is not None or self._token_ids is not None
        return None if carries_more else EventTemplate(*self._around())

    def end(self, generation: RequestOutput) -> bytes:
        """Write the last line: why it ended, the counts, and the durations."""
        reason = "stop" if self._last is None else self._last.finish_reason
        finish = generation.choices[0].finish
        ended = self._ended(reason, generation.usage(), finish, self._token_ids)
        return dumps({**self._ask.head(), **self._content("", "", []), **ended}) + b"\n"

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as a line."""
        return dumps(error_line(error)) + b"\n"

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole answer."""
        (output,) = outputs
        text, thinking, calls = output.text, "", list[dict[str, Any]]()
        if self._reader is not None:
            message = self._reader.read(output.text, cut=output.is_cut)
            text, thinking = message.content, message.reasoning
            calls = [self._call(place, name, arguments) for place, (name, arguments) in enumerate(message.calls)]
        rows = self._rows(output.token_ids, output.logprobs)
        token_ids = None if self._token_ids is None else output.token_ids
        return {
            **self._ask.head(),
            **self._content(text, thinking, calls),
            **({"logprobs": rows} if rows else {}),
            **self._ended(output.finish_reason, usage, output.choice.finish, token_ids),
        }

    def _parts(self, piece: Piece) -> list[tuple[str, str, list[dict[str, Any]]]]:
        """Split a piece into text, reasoning and whole calls, each for a line of its own."""
        if self._reader is None:
            return [(piece.text, "", [])] if piece.text else []
        shown: list[tuple[str, str, list[dict[str, Any]]]] = []
        for part in self._reader.push(piece.text, piece.is_last, cut=piece.is_cut):
            shown += self._part(part)
        return shown + (self._whole_calls() if piece.is_last else [])

    def _part(self, part: Part) -> list[tuple[str, str, list[dict[str, Any]]]]:
        match part:
            case Content(text):
                return [*self._whole_calls(), (text, "", [])]
            case Reasoning(text):
                return [("", text, [])]
            case CallDelta(call, name, arguments):
                before = [] if call in self._calls else self._whole_calls()
                begun = self._calls.setdefault(call, ["", ""])
                begun[0] += name or ""
                begun[1] += arguments
                return before

    def _whole_calls(self) -> list[tuple[str, str, list[dict[str, Any]]]]:
        """Return the calls that are complete: those before the last part, and at the end all."""
        calls = [self._call(place, *begun) for place, begun in self._calls.items()]
        self._calls.clear()
        return [("", "", calls)] if calls else []

    def _call(self, place: int, name: str, arguments: str) -> dict[str, Any]:
        call_id = self._parser.call_id(self._ask.request.scope["request_id"], 0, place)
        return {"id": call_id, "function": {"index": place, "name": name, "arguments": tool_input(arguments)}}

    def _line(self, text: str, thinking: str, calls: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        if not thinking and not calls and not more:
            before, after = self._around()
            return before + quote(text) + after
        return self._head + b"," + dumps({**self._content(text, thinking, calls), **more, "done": False})[1:] + b"\n"

    def _around(self) -> tuple[bytes, bytes]:
        """Return the template of a line with text only."""
        if self._is_chat:
            return self._head + b',"message":{"role":"assistant","content":', b'},"done":false}\n'
        return self._head + b',"response":', b',"done":false}\n'

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def _rows(self, token_ids: Sequence[int], rows: Any) -> list[dict[str, Any]]:
        if self._logprobs is None or not rows:
            return []
        found: list[dict[str, Any]] = chat_logprobs_object(
            self._ask.served.tokenizer, token_ids, rows, self._logprobs, False
        )["content"]
        return found

    def _ended(
        self, reason: str | None, usage: Usage, finish: Finish | None, token_ids: list[int] | None
    ) -> dict[str, Any]:
        """Return the fields of the last line. The load duration is the time in the engine's queue."""
        times = (finish.queued_ms, finish.first_token_ms, finish.total_ms) if finish is not None else (0.0, 0.0, 0.0)
        queued, first, total = times
        return {
            "done": True,
            "done_reason": reason,
            **({} if token_ids is None else {"context": [*self._prompt.ids, *token_ids]}),
            "total_duration": time.monotonic_ns() - self._ask.started_ns,
            "load_duration": int(queued * MS),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": int(max(0.0, first - queued) * MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(0.0, total - first) * MS),
        }


def error_line(error: InferEngineError) -> dict[str, str]:
    """Return an error as Ollama writes it. The message names the field at fault: there is no other place for it."""
    return {"error": sentence(error)}


def _loaded(started_ns: int) -> dict[str, Any]:
    """Answer a request without a prompt, by which clients load a model."""
    return {"done": True, "done_reason": "load", "total_duration": time.monotonic_ns() - started_ns, "load_duration": 0}


def _models(service: HttpState) -> list[dict[str, Any]]:
    """Describe the model and its adapters. Front ends do not know the size of the weights: it is 0."""
    info = service.model.info
    return [
        {
            "name": name if ":" in name else name + TAG,
            "model": name if ":" in name else name + TAG,
            "modified_at": _time(service.started_s),
            "size": 0,
            "digest": info.fingerprint,
            "details": {**_details(info.dtype), "parent_model": info.name if name != info.name else ""},
        }
        for name in (info.name, *info.adapters)
    ]


def _details(dtype: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": dtype,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embeddings, methods=["POST"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/tags", tags),
    Route("/api/ps", running),
    Route("/api/version", version),
    Route("/api/pull", pull, methods=["POST"]),
    Route("/api/create", create, methods=["POST"]),
    Route("/api/copy", copy, methods=["POST"]),
    Route("/api/delete", delete, methods=["DELETE"]),
    Route("/api/push", push, methods=["POST"]),
    Route("/api/blobs/{digest}", upload_blob, methods=["POST", "HEAD"]),
)
