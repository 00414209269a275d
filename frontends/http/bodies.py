"""Read the bodies of HTTP requests, within limits of size and time, and state each of their fields once.

A Struct states fields that are read together: type, range, default and meaning. A route's body has the fields of
several Structs. `read_fields` checks a body with a Struct; /openapi.json and docs/parameters.md are generated from it.
The fields of sampling are in SamplingParams, those of a conversation in `frontends.common.chat.Conversation`.

The fields of OpenAI's API, with vLLM's and SGLang's extensions, become SamplingParams (`read_params`) and Options
(`read_options`).

Fields of type Any are checked where they are used, because their shape differs between APIs; `schema` describes them.

A known field either works or is refused by name (REFUSED). Unknown fields are ignored, because clients of other servers
send fields of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from frontends.common.chat import (
    BOOLEAN,
    FUNCTION,
    MESSAGES,
    OBJECT,
    STRING,
    TEXT,
    TEXT_PARTS,
    TOKEN_ID,
    TOOL_CHOICE,
    Schema,
    array,
)
from frontends.common.generation import Options
from frontends.common.json import OffLoop, parse_object, read_fields, read_flag, read_mapping, read_string
from frontends.common.model import ServedModel
from inferengine.config import Config, LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import about, field_docs
from inferengine.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    NAMES,
    POOLINGS,
    Alternatives,
    Count,
    Positive,
    SamplingParams,
    from_map,
    validate,
)
from inferengine.structured_output.spec import (
    STRUCTURED_KINDS,
    GrammarSpec,
    grammar_field,
    read_grammar,
    validate_grammar,
)
from inferengine.text import Tokenizer
from inferengine.wire.messages import MAX_NAME_CHARACTERS, MAX_SALT_BYTES

MAX_METADATA = 16
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
DEFAULT_NEW_TOKENS = 64  # of /v1/generate
MAX_GENERATE_CHARACTERS, MAX_GENERATE_TOKENS = 8000, 512  # of /v1/generate, as the server has it that it comes from
INFER_MAX_TOKENS = 128  # of /infer/v1/completions

MAX_SESSION_CHARACTERS = 1024
STRUCTURE_ONLY = "cannot be combined with guided_regex"


def texts_or_ids(limit: str) -> Schema:
    """Return the JSON schema of a text, a list of texts, a list of token ids, or a list of such lists."""
    ids = array(TOKEN_ID, least=1)
    most = {"limit": limit}
    return {"anyOf": [TEXT, array(TEXT, least=1, most=most), ids, array(ids, least=1, most=most)]}


CONVERSATION_ID: Schema = {"anyOf": [STRING, {"type": "object", "properties": {"id": STRING}, "required": ["id"]}]}
PREDICTION: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["content"]},
        "content": {"anyOf": [STRING, array({"type": "object", "properties": {"text": STRING}, "required": ["text"]})]},
    },
    "required": ["type", "content"],
}
_CUT_TO = "must be -1 or at least 1"
_IN_32_BITS = Meta(ge=-(2**31), le=2**31 - 1)


class ModelFields(msgspec.Struct, frozen=True):
    """The model that the request is for."""

    model: Annotated[str, about("the name that /v1/models lists; empty or absent: that one")] = ""


class PromptsFields(msgspec.Struct, frozen=True):
    """The prompts of /v1/completions."""

    prompt: Annotated[
        Any,
        about(
            "text, list of texts, token ids, list of lists of token ids",
            schema=texts_or_ids("max_prompts"),
            also=[
                "must hold whole numbers only",
                "must not be empty",
                "must be a text or a list of token ids, or a list of either, not empty",
                "at most 256 in one call",
            ],
        ),
    ]


class CompletionFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/completions has."""

    max_tokens: Annotated[
        Count,
        about(
            "most tokens of the output, within the model's length; 0 with echo: the prompt alone",
            also=["must be at least 1; 0 only with echo, for the prompt alone"],
        ),
    ] = COMPLETION_MAX_TOKENS
    echo: Annotated[
        bool, about("the prompt's text before each output; with logprobs its tokens too (not streamed)")
    ] = False
    logprobs: Annotated[
        Alternatives | None, about("alternatives per token, from the model's own logits; 0: the token's own alone")
    ] = None


class MetadataFields(msgspec.Struct, frozen=True):
    """Metadata that is stored with an answer."""

    metadata: Annotated[Annotated[dict[str, str], Meta(max_length=MAX_METADATA)], about("returned as it is")] = {}


class ChatFields(MetadataFields, frozen=True):
    """Fields that only /v1/chat/completions has."""

    max_tokens: Annotated[Positive | None, about("most tokens of the output, within the model's length")] = None
    max_completion_tokens: Annotated[Positive | None, about("the newer name of max_tokens; goes before it")] = None
    logprobs: Annotated[bool, about("log-probabilities of the output's tokens, from the model's own logits")] = False
    top_logprobs: Annotated[
        Alternatives | None, about("alternatives per token; needs logprobs", also=["needs logprobs to be true"])
    ] = None
    include_reasoning: Annotated[bool, about("show what the model thought")] = True
    functions: Annotated[
        Any,
        about(
            "the older name of tools: functions with name and parameters",
            schema=array(FUNCTION),
            also=["must be a list of objects with name and parameters", "must be an object with a name"],
        ),
    ] = None
    function_call: Annotated[
        Any,
        about(
            "the older name of tool_choice",
            schema={"anyOf": [{"enum": ["none", "auto"]}, OBJECT]},
            also=['must be none, auto or {"name": …}', "needs functions to choose from"],
        ),
    ] = None
    prediction: Annotated[
        dict[str, Any] | None,
        about(
            "type content: what the output will probably be, to draft tokens from; it never changes it",
            schema=PREDICTION,
        ),
    ] = None
    store: Annotated[bool, about("keep the answer for GET /v1/chat/completions/{id}")] = False


class BadWordsFields(msgspec.Struct, frozen=True):
    """Bad words as texts; SamplingParams.bad_words_ids has them as token ids."""

    bad_words: Annotated[
        Any,
        about(
            "words that must not come, at the start or after a space: the last token of each is forbidden wherever "
            "the others just came",
            schema=array(TEXT, most=MAX_BAD_WORDS // 2),
            also=["must be a list of words, none of them empty", f"at most {MAX_BAD_WORDS // 2} words"],
        ),
    ] = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Which chunks of a stream carry the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StreamingFields(msgspec.Struct, frozen=True):
    """Whether, and how, the answer is streamed."""

    stream: Annotated[bool, about("answer as Server-Sent Events")] = False
    stream_options: Annotated[
        StreamOptions | None,
        about(
            "only with stream: a last chunk with the usage, or the usage in every chunk",
            also=["is only allowed when stream is true"],
        ),
    ] = None

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TruncationFields(msgspec.Struct, frozen=True):
    """How a prompt that is too long is truncated."""

    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None,
        about("keep the prompt's last tokens; -1: as many as leave room; not 0", also=[_CUT_TO]),
    ] = None


class PromptLogprobsFields(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt's tokens."""

    prompt_logprobs: Annotated[
        Alternatives | None,
        about(
            "alternatives per token of the prompt; not with stream or detached",
            also=["cannot be streamed or detached: leave stream and detached out"],
        ),
    ] = None


class SchedulingFields(msgspec.Struct, frozen=True):
    """Priority, deadline and name of the request."""

    priority: Annotated[Annotated[int, _IN_32_BITS], about("lower is sooner, where the engine goes by priority")] = 0
    cache_salt: Annotated[
        str | None,
        about(
            "requests share cached prefixes only with those of the same salt",
            schema={"minLength": 1, "maxLength": MAX_SALT_BYTES},
            also=[f"must have 1 to {MAX_SALT_BYTES} bytes"],
        ),
    ] = None
    request_id: Annotated[
        str | None,
        about(
            "part of the answer's id and logs",
            schema={"maxLength": MAX_NAME_CHARACTERS // 2},
            also=[f"must have at most {MAX_NAME_CHARACTERS // 2} printable characters"],
        ),
    ] = None


SessionName = Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)]


class SessionFields(msgspec.Struct, frozen=True):
    """The session of the request. The header X-Session-ID names it if the body does not."""

    prompt_cache_key: Annotated[
        SessionName | None, about("OpenAI's: requests with the same key go to one engine where there are several")
    ] = None
    session_id: Annotated[SessionName | None, about("vLLM's name for it; goes before prompt_cache_key")] = None

    @property
    def session(self) -> str:
        """The session's name; empty for none."""
        return self.session_id or self.prompt_cache_key or ""


class RecoveryFields(msgspec.Struct, frozen=True):
    """What happens to the request when a connection is lost."""

    detached: Annotated[bool, about("go on when the connection is lost; the stream can be read on")] = False
    resubmit: Annotated[
        bool, about("go on when the engine is lost (the default); false: end with engine_restarted")
    ] = True


class ExtraFields(msgspec.Struct, frozen=True):
    """What each choice has beside its text."""

    return_token_ids: Annotated[bool, about("token ids of prompt and output beside the text")] = False
    return_tokens_as_token_ids: Annotated[bool, about("in logprobs, tokens as token_id:N")] = False


class StructureFields(msgspec.Struct, frozen=True):
    """The grammar that the output must match: at most one of these. Read by structured_output.spec."""

    response_format: Annotated[
        Any,
        about(
            "OpenAI's name for what the output must match",
            schema={
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                    "json_schema": {"type": "object", "properties": {"schema": OBJECT}},
                },
            },
            also=["must be an object with a type"],
        ),
    ] = None
    structured_outputs: Annotated[
        Any,
        about(
            f"vLLM's: exactly one of {', '.join(STRUCTURED_KINDS)}; grammar is Lark or EBNF",
            schema={
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
            also=[f"must be an object with one of {', '.join(STRUCTURED_KINDS)}"],
        ),
    ] = None
    guided_json: Annotated[
        Any,
        about(
            "vLLM's older name: a JSON schema",
            schema={"anyOf": [OBJECT, STRING, {"enum": [True]}]},
            also=["must be a JSON schema that allows something: an object, or true"],
        ),
    ] = None
    guided_regex: Annotated[
        Any,
        about(
            "vLLM's older name: a regular expression",
            schema=STRING,
            also=["must be a string that is not empty", STRUCTURE_ONLY],
        ),
    ] = None
    guided_choice: Annotated[
        Any,
        about(
            "vLLM's older name: one of these texts",
            schema=array(STRING, least=1),
            also=["must be a list of strings, none of them empty"],
        ),
    ] = None
    guided_grammar: Annotated[
        Any,
        about(
            "vLLM's older name: a grammar in Lark or EBNF",
            schema=STRING,
            also=["must be a string that is not empty"],
        ),
    ] = None
    json_whitespace: Annotated[
        Literal["compact", "any"] | None,
        about("space in JSON output: at most one after , and :, or any; absent: limits.json_whitespace"),
    ] = None


class EmbeddingsFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/embeddings has."""

    input: Annotated[
        Any,
        about(
            "text, list of texts, token ids, list of lists of token ids", schema=texts_or_ids("max_embedding_inputs")
        ),
    ]
    encoding_format: Annotated[Literal["float", "base64"], about("numbers, or little-endian f32 in base64")] = "float"
    dimensions: Annotated[
        Positive | None, about("keep so many values, of length 1 again; at most what the model has")
    ] = None
    pooling: Annotated[
        Literal[POOLINGS] | None, about("of the final hidden states the last token's, the first's (cls), or the mean")  # type: ignore[valid-type]
    ] = None
    user: Annotated[str | None, about("accepted and ignored")] = None


_TEXTS = {"anyOf": [TEXT, array(TEXT, least=1)]}


class RerankFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/rerank has."""

    query: Annotated[str, about("what the documents are to answer")]
    documents: Annotated[
        list[Any], about("texts, or objects with a text", schema=array({"anyOf": [TEXT, OBJECT]}, least=1))
    ]
    top_n: Annotated[Positive | None, about("how many of the best are told; absent: all")] = None
    return_documents: Annotated[bool, about("whether results have their texts")] = True
    instruction: Annotated[str | None, about("what a reranker is to judge; absent: whether a passage answers")] = None


class ScoreFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/score has."""

    text_1: Annotated[Any, about("a text, or as many as text_2 has", schema=_TEXTS)]
    text_2: Annotated[Any, about("a text or a list of texts", schema=_TEXTS)]
    instruction: Annotated[str | None, about("what a reranker is to judge; absent: whether a passage answers")] = None


class ResponsesFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/responses has."""

    input: Annotated[Any, about("a text, or items", schema={"anyOf": [TEXT, array(OBJECT, least=1)]})]
    instructions: Annotated[str | None, about("the system message")] = None
    previous_response_id: Annotated[str | None, about("continue that conversation")] = None
    max_output_tokens: Annotated[Positive | None, about("most tokens of the output")] = None
    text: Annotated[
        dict[str, Any],
        about(
            "format: what the output must match",
            schema={"type": "object", "properties": {"format": OBJECT}},
        ),
    ] = {}
    conversation: Annotated[
        Any,
        about("a conversation, by id: its items come before, and this answer's are added", schema=CONVERSATION_ID),
    ] = None
    tools: Annotated[
        Any, about("tools of type function, custom and namespace that may be called", schema=array(OBJECT))
    ] = None
    tool_choice: Annotated[Any, about("whether, or which", schema=TOOL_CHOICE)] = None
    parallel_tool_calls: Annotated[bool, about("more than one call in an answer")] = True
    max_tool_calls: Annotated[
        Positive | None, about("most calls of the server's own tools, of which there are none")
    ] = None
    reasoning: Annotated[dict[str, Any], about("effort: given to the chat template")] = {}
    truncation: Annotated[
        Literal["auto", "disabled"], about("auto: drop the beginning of a conversation that is too long")
    ] = "disabled"
    metadata: Annotated[Annotated[dict[str, str], Meta(max_length=MAX_METADATA)], about("returned as it is")] = {}
    store: Annotated[bool, about("keep the response for GET")] = True
    background: Annotated[bool, about("answer at once, make the response later")] = False
    stream: Annotated[bool, about("answer as events")] = False
    include: Annotated[tuple[str, ...], about("message.output_text.logprobs")] = ()
    top_logprobs: Annotated[Alternatives, about("alternatives per token")] = 0


class ConversationFields(MetadataFields, frozen=True):
    """Fields of /v1/conversations."""

    items: Annotated[Any, about("what it begins with", schema=array(OBJECT))] = None


class ConversationItemsFields(msgspec.Struct, frozen=True):
    """Fields of /v1/conversations/{id}/items."""

    items: Annotated[Any, about("messages, calls and their outputs", schema=array(OBJECT, least=1))]


class MessagesPromptFields(msgspec.Struct, frozen=True):
    """Fields of /v1/messages and /v1/messages/count_tokens."""

    messages: Annotated[Any, about("strings or blocks of text, tool_use, tool_result, thinking", schema=MESSAGES)]
    model: Annotated[str, about("the name that /v1/models lists")] = ""
    system: Annotated[Any, about("the system message", schema={"anyOf": [STRING, TEXT_PARTS]})] = None
    tools: Annotated[Any, about("the client's own tools", schema=array(OBJECT))] = None
    tool_choice: Annotated[dict[str, Any], about("type: auto, any, tool or none")] = {}
    thinking: Annotated[dict[str, Any], about("type: enabled or disabled, for templates that know it")] = {}
    output_config: Annotated[
        dict[str, Any],
        about(
            "format: a JSON schema; effort: given to the chat template",
            schema={"type": "object", "properties": {"format": OBJECT, "effort": STRING}},
        ),
    ] = {}


class MessagesFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/messages has."""

    max_tokens: Annotated[Positive, about("most tokens of the output")]
    stop_sequences: Annotated[
        Any,
        about("texts that end the output", schema=array(TEXT, most={"limit": "max_stop_strings"})),
    ] = None
    stream: Annotated[bool, about("answer as events")] = False


class PromptFields(msgspec.Struct, frozen=True):
    """The prompt of routes that take a single text."""

    prompt: Annotated[str, about("the text to continue", min_length=1)]


class GenerateFields(msgspec.Struct, frozen=True):
    """Fields that only /v1/generate has."""

    prompt: Annotated[str, about("the text to continue", min_length=1, max_length=MAX_GENERATE_CHARACTERS)]
    max_new_tokens: Annotated[
        int,
        about(
            f"exactly so many tokens, whatever the model says (default {DEFAULT_NEW_TOKENS})",
            ge=1,
            le=MAX_GENERATE_TOKENS,
        ),
    ] = DEFAULT_NEW_TOKENS


class GenerateTextFields(msgspec.Struct, frozen=True):
    """Fields that only /generate has."""

    max_tokens: Annotated[Positive, about("most tokens of the output")]


class InferFields(msgspec.Struct, frozen=True):
    """Fields that only /infer/v1/completions has."""

    model: Annotated[str, about("the name of the model, as /v1/models tells it")]
    prompt: Annotated[Any, about("a text or a list of token ids", schema={"anyOf": [TEXT, array(TOKEN_ID)]})]
    max_tokens: Annotated[Positive, about("most tokens of the output, within the model's length")] = INFER_MAX_TOKENS
    stream: Annotated[bool, about("taken for other servers' sake: the answer is events, whatever it says")] = True


class TokenizeFields(msgspec.Struct, frozen=True):
    """Fields that only /tokenize has."""

    prompt: Annotated[str | None, about("the text; or messages")] = None
    return_token_strs: Annotated[bool, about("the tokens as texts too")] = False


class DetokenizeFields(msgspec.Struct, frozen=True):
    """Fields of /detokenize."""

    tokens: Annotated[Any, about("the token ids", schema=array(TOKEN_ID))]
    skip_special_tokens: Annotated[bool, about("leave special tokens out")] = False


# -- reading -----------------------------------------------------------------------------------------------------------


async def read_json(request: Request, most_bytes: int) -> dict[str, Any]:
    """Read a request's body as a JSON object.

    Raises request_too_large, request_timeout, invalid_request, and `cancelled` if the client disconnects meanwhile.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(
            "Content-Type", "The Content-Type must be application/json (curl: -H 'Content-Type: application/json')."
        )
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise InvalidRequest(
            "Content-Encoding", f"{coding[:40]} is not read here: send the body as it is", code="unsupported"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(request.app.state.service.config.http.body_timeout_s):
            body = await _read(request, most_bytes)
    except TimeoutError:
        raise InferEngineError("request_timeout", "The body did not arrive within http.body_timeout_s.") from None
    except ClientDisconnect:
        raise InferEngineError("cancelled", "The client went away.") from None
    off_loop: OffLoop = request.app.state.service.off_loop
    document = await off_loop.run(len(body), parse_object, body)
    request.scope["body"], request.scope["document"] = body, document  # for limits of the key and detached requests
    return document


async def _read(request: Request, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise _too_large(most_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(most_bytes: int) -> InferEngineError:
    return InferEngineError("request_too_large", f"The body must have at most {most_bytes} bytes.")


# -- as sampling parameters and options --------------------------------------------------------------------------------


MAX_BAD_WORD_CHARACTERS = 256

# What these fields ask for does not exist here. Values listed ask for nothing, and null never does.
REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logprob_token_ids": ([],),
    "stream_interval": (1,),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    "prompt_embeds": (),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "audio": (),
    "modalities": (["text"], []),
    "web_search_options": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "lora_path": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
}
_OWN = {"max_tokens", "logprobs", "prompt_logprobs"}  # of SamplingParams, those that each route reads its own way
SAMPLING = tuple("bad_words" if name == "bad_words_ids" else name for name in NAMES if name not in _OWN)
STRUCTURE = tuple(field_docs(StructureFields))


def refuse_unsupported(body: dict[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    """Raise InvalidRequest for the first field that asks for something unsupported."""
    for name in body.keys() & refused.keys():
        value = body[name]
        if name == "best_of" and value == body.get("n") and type(value) is int:
            continue  # the best n of n are all n
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in refused[name]):
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")


def check_model(body: dict[str, Any], served: ServedModel) -> None:
    """Raise model_not_found for a model that is not served. A body without `model` means the served one."""
    name = read_string(body, "model")
    if name and served.adapter_of(name) is None:
        raise InferEngineError(
            "model_not_found", f"The model `{name[:200]}` does not exist. It is called `{served.name}`.", field="model"
        )


def read_streaming(body: dict[str, Any]) -> StreamingFields:
    """Read whether, and how, the answer is streamed. Raises InvalidRequest naming the field."""
    streaming = read_fields(StreamingFields, body)
    if streaming.stream_options not in (None, StreamOptions()) and not streaming.stream:
        raise InvalidRequest("stream_options", "is only allowed when stream is true")
    return streaming


def read_extras(body: dict[str, Any]) -> ExtraFields:
    """Read what each choice has beside its text. Raises InvalidRequest naming the field."""
    return read_fields(ExtraFields, body)


def read_params(
    body: dict[str, Any], served: ServedModel, config: Config, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Read the sampling parameters: the model's defaults, replaced by those of the request. Raises InvalidRequest.

    The engine validates them again.
    """
    wanted = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    read_mapping(wanted, "logit_bias")  # as OpenAI writes it; the wire takes pairs too
    if "bad_words" in wanted:
        wanted["bad_words_ids"] = read_bad_words(wanted.pop("bad_words"), served.tokenizer)
    params = from_map({**served.defaults, **wanted, "max_tokens": max_tokens, "logprobs": logprobs}, path="")
    validate(params, vocab_size=served.info.vocab_size, limits=config.limits, path="")
    return params


def read_prompt_logprobs(body: dict[str, Any], streaming: StreamingFields, limits: LimitsConfig) -> int | None:
    """Read how many alternatives to report for each prompt token; None: no log-probabilities of the prompt.

    Raises InvalidRequest if the request is streamed or detached.
    """
    wanted = read_fields(PromptLogprobsFields, body, limits).prompt_logprobs
    if wanted is not None:
        refuse_beside_prompt_logprobs(body, streaming, "prompt_logprobs")
    return wanted


def check_prompt_logprobs(
    prompts: Sequence[Sequence[int]], params: SamplingParams, limits: LimitsConfig, field: str
) -> None:
    """Raise InvalidRequest for more log-probabilities of prompt tokens than one answer may hold in memory."""
    if params.prompt_logprobs is None:
        return
    values = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * params.n
    if values > limits.max_prompt_logprobs:
        raise InvalidRequest(
            field,
            f"the answer would hold {values} log-probabilities of prompt tokens (tokens x (1 + alternatives) x n); at "
            f"most {limits.max_prompt_logprobs}: ask for fewer alternatives, choices or prompts",
        )


def refuse_beside_prompt_logprobs(body: dict[str, Any], streaming: StreamingFields, field: str) -> None:
    """Raise InvalidRequest naming `field` if the request is streamed or detached."""
    if streaming.stream or read_flag(body, "detached"):
        raise InvalidRequest(field, "cannot be streamed or detached: leave stream and detached out", code="unsupported")


def read_bad_words(value: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each bad word, both at the start of a text and after a space. Raises InvalidRequest.

    vLLM leaves out the second form if it has another number of tokens than the first, and then lets the word through:
    in many vocabularies " there" is one token and "there" two.
    """
    if not isinstance(value, list) or not all(isinstance(word, str) and word.strip() for word in value):
        raise InvalidRequest("bad_words", "must be a list of words, none of them empty")
    if len(value) > MAX_BAD_WORDS // 2:
        raise InvalidRequest("bad_words", f"at most {MAX_BAD_WORDS // 2} words")
    sequences = []
    for word in value:
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest("bad_words", f"at most {MAX_BAD_WORD_CHARACTERS} characters each")
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        if not alone:
            raise InvalidRequest("bad_words", f"{word[:40]!r} has no tokens")
        sequences.append(alone)
        if spaced[0] != alone[0]:
            sequences.append(spaced)
    if any(len(sequence) > MAX_BAD_WORD_TOKENS for sequence in sequences):
        raise InvalidRequest("bad_words", f"at most {MAX_BAD_WORD_TOKENS} tokens each")
    return sequences


def read_options(body: dict[str, Any], config: Config, *, label: str, continues_prompt: bool) -> Options:
    """Read structure, scheduling and recovery fields into the request's options. Raises InvalidRequest."""
    grammar, grammar_field = read_structure(body, config)
    scheduling = read_fields(SchedulingFields, body)
    salt = scheduling.cache_salt
    if salt is not None and not 1 <= len(salt.encode()) <= MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"must have 1 to {MAX_SALT_BYTES} bytes")
    return Options(
        priority=scheduling.priority,
        salt=(salt or "").encode(),
        session=read_fields(SessionFields, body).session,
        deadline_s=config.http.request_timeout_s,
        label=label,
        continues_prompt=continues_prompt,
        grammar=grammar,
        grammar_field=grammar_field,
        prompt_field="prompt" if continues_prompt else "messages",
        resubmit=read_fields(RecoveryFields, body).resubmit,
    )


def read_structure(body: dict[str, Any], config: Config) -> tuple[GrammarSpec | None, str]:
    """Read the grammar that the output must match, and the name of the request's field that has it."""
    spec, field = read_grammar(body), grammar_field(body)
    if spec is not None:
        validate_grammar(spec, config.limits, path=field)
    return spec, field


def read_label(body: dict[str, Any], request_id: str) -> str:
    """Return the request's name in ids and logs: the body's `request_id`, else the id of the HTTP request. Raises
    InvalidRequest."""
    label = read_fields(SchedulingFields, body).request_id or request_id
    if len(label) > MAX_NAME_CHARACTERS // 2 or not label.isprintable():
        raise InvalidRequest("request_id", f"must have at most {MAX_NAME_CHARACTERS // 2} printable characters")
    return label


def read_truncation(body: dict[str, Any], served: ServedModel, max_tokens: int | None) -> int | None:
    """Read `truncate_prompt_tokens`: how many tokens from its end a prompt keeps; None: all.

    -1 keeps as many as leave room for the output. Raises InvalidRequest.
    """
    keep = read_fields(TruncationFields, body).truncate_prompt_tokens
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens", "must be -1 or at least 1")
    if keep == -1:
        keep = max(1, served.info.max_model_len - (1 if max_tokens is None else max_tokens))
    return keep


def truncate(prompt_ids: list[int], keep: int | None) -> list[int]:
    """Return the last `keep` tokens of a prompt; all of them for None."""
    return prompt_ids if keep is None else prompt_ids[-keep:]
