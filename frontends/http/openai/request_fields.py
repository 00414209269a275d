"""Fields of OpenAI's API (with vLLM's and SGLang's extensions) as sampling parameters and options.

Every field either works, or is refused by name when it asks for something: the table below. Unknown ones are ignored,
because clients of other servers send their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frontends.common.generation import Options
from frontends.common.json import read_fields, read_flag, read_mapping, read_string
from frontends.common.model import ServedModel
from frontends.http.bodies import (
    ExtraFields,
    PromptLogprobsFields,
    RecoveryFields,
    SchedulingFields,
    StreamingFields,
    StreamOptions,
    StructureFields,
    TruncationFields,
)
from inferengine.config import Config, LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import field_docs
from inferengine.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    NAMES,
    SamplingParams,
    from_map,
    validate,
)
from inferengine.structured_output.spec import GrammarSpec, read_grammar, validate_grammar
from inferengine.text import Tokenizer
from inferengine.wire.codec import MAX_NAME_CHARACTERS, MAX_SALT_BYTES

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
    """Raise for the first field that asks for what cannot be had."""
    for name in body.keys() & refused.keys():
        value = body[name]
        if name == "best_of" and value == body.get("n") and type(value) is int:
            continue  # the best n of n are all of them
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in refused[name]):
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")


def check_model(body: dict[str, Any], served: ServedModel) -> None:
    """Raise model_not_found for a name that is not served; none at all means the only one there is."""
    name = read_string(body, "model")
    if name and served.adapter_of(name) is None:
        raise InferEngineError(
            "model_not_found", f"The model `{name[:200]}` does not exist. It is called `{served.name}`.", field="model"
        )


def read_streaming(body: dict[str, Any]) -> StreamingFields:
    """Read how the answer travels. Raises InvalidRequest naming the field."""
    streaming = read_fields(StreamingFields, body)
    if streaming.stream_options not in (None, StreamOptions()) and not streaming.stream:
        raise InvalidRequest("stream_options", "is only allowed when stream is true")
    return streaming


def read_extras(body: dict[str, Any]) -> ExtraFields:
    """Read what each choice carries beside its text."""
    return read_fields(ExtraFields, body)


def read_params(
    body: dict[str, Any], served: ServedModel, config: Config, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The model's own defaults, overlaid with what the request says, validated as the engine will do again."""
    wanted = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    read_mapping(wanted, "logit_bias")  # as OpenAI writes it; the wire takes pairs too
    if "bad_words" in wanted:
        wanted["bad_words_ids"] = read_bad_words(wanted.pop("bad_words"), served.tokenizer)
    params = from_map({**served.defaults, **wanted, "max_tokens": max_tokens, "logprobs": logprobs}, path="")
    validate(params, vocab_size=served.info.vocab_size, limits=config.limits, path="")
    return params


def read_prompt_logprobs(body: dict[str, Any], streaming: StreamingFields, limits: LimitsConfig) -> int | None:
    """Alternatives for each token of the prompt. They come with the whole answer."""
    wanted = read_fields(PromptLogprobsFields, body, limits).prompt_logprobs
    if wanted is not None:
        refuse_beside_prompt_logprobs(body, streaming, "prompt_logprobs")
    return wanted


def check_prompt_logprobs(
    prompts: Sequence[Sequence[int]], params: SamplingParams, limits: LimitsConfig, field: str
) -> None:
    """One answer tells them for each choice of each prompt, and is held in memory as a whole."""
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
    """The token sequences of each word at the start of a text and after a space. vLLM leaves the second out where it
    has another number of tokens, and then lets the word through: " there" is one token of many vocabularies in which
    "there" is two."""
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
        deadline_s=config.http.request_timeout_s,
        label=label,
        continues_prompt=continues_prompt,
        grammar=grammar,
        grammar_field=grammar_field,
        prompt_field="prompt" if continues_prompt else "messages",
        resubmit=read_fields(RecoveryFields, body).resubmit,
    )


def read_structure(body: dict[str, Any], config: Config) -> tuple[GrammarSpec | None, str]:
    """What the output must match, and the name of the field that says so."""
    if body.get("structured_outputs") == {}:  # asks for nothing, as clients send that fill in every field
        body = {**body, "structured_outputs": None}
    spec = read_grammar(body)
    field = next((name for name in STRUCTURE if body.get(name) is not None), "grammar")
    if spec is not None:
        validate_grammar(spec, config.limits, path=field)
    return spec, field


def read_label(body: dict[str, Any], request_id: str) -> str:
    """The request's name in ids and logs: its own, or the one of the HTTP exchange."""
    label = read_fields(SchedulingFields, body).request_id or request_id
    if len(label) > MAX_NAME_CHARACTERS // 2 or not label.isprintable():
        raise InvalidRequest("request_id", f"must have at most {MAX_NAME_CHARACTERS // 2} printable characters")
    return label


def read_truncation(body: dict[str, Any], served: ServedModel, max_tokens: int | None) -> int | None:
    """How many tokens from its end a prompt keeps: `truncate_prompt_tokens`; -1 keeps what leaves room for the output.
    None: all."""
    keep = read_fields(TruncationFields, body).truncate_prompt_tokens
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens", "must be -1 or at least 1")
    if keep == -1:
        keep = max(1, served.info.max_model_len - (1 if max_tokens is None else max_tokens))
    return keep


def truncate(prompt_ids: list[int], keep: int | None) -> list[int]:
    """Return the last `keep` tokens of a prompt; all of them for None."""
    return prompt_ids if keep is None else prompt_ids[-keep:]
