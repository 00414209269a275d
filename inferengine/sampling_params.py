"""SamplingParams: what a request may say about its generation. Type, range, default and meaning are stated once.

Front ends validate with it before they submit, and the engine validates again before it accepts, because direct
producers skip the front ends. docs/parameters.md, /openapi.json and the browser client's types are made of it.
Definitions follow the OpenAI API and Hugging Face.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest
from inferengine.fields import FieldError, about, check, each, read

GREEDY_TEMPERATURE = 1e-5  # at or below this the argmax is taken
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_PROMPT_LOGPROBS = 400_000  # values for one prompt: they travel in one message
MAX_LISTED = 2**19  # entries of any list that are looked at one by one: more than the largest vocabulary
MAX_BIASED = MAX_LISTED // 8
STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": {"limit": "max_stop_characters"}}
_OUTSIDE = "token id N is outside the vocabulary of V"
POOLINGS = ("last", "mean", "cls")  # what final hidden states make an embedding: the last's, their mean, the first's

Count = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Positive = Annotated[int, Meta(ge=1, le=MAX_SEED)]
Seed = Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Alternatives = Annotated[int, about(ge=0, most="max_logprobs")]
# The upper bound is the vocabulary's size, which `validate` knows: its refusal names the id.
TokenId = Annotated[int, about(schema={"minimum": 0})]
TokenIds = Annotated[tuple[TokenId, ...], about(max_length=MAX_LISTED, expected="must be a list of token ids")]
BadWord = Annotated[
    tuple[TokenId, ...],
    about(min_length=1, max_length=MAX_BAD_WORD_TOKENS, expected="must be a list of token ids"),
]
StopString = Annotated[str, about(min_length=1, most="max_stop_characters")]
StopStrings = Annotated[
    tuple[StopString, ...],
    about(
        max_length=MAX_LISTED,
        most="max_stop_strings",
        expected="must be a string or a list of strings",
        whole=True,
        schema={
            "anyOf": [STOP_SCHEMA, {"type": "array", "items": STOP_SCHEMA, "maxItems": {"limit": "max_stop_strings"}}]
        },
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, Bias], ...],
    about(
        most="max_logit_bias",
        schema={
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": {"limit": "max_logit_bias"},
        },
    ),
]


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters of one request. `None` means: not asked for. Ranges are checked by `from_map` and `validate`."""

    max_tokens: Annotated[Positive | None, about("most tokens of the output, within the model's length")] = None
    min_tokens: Annotated[
        Count,
        about(
            "before so many tokens nothing but the end of a grammar ends the output; at most max_tokens",
            also=["must not exceed max_tokens"],
        ),
    ] = 0
    temperature: Annotated[
        float, about("logits are divided by it; at or below 1e-5 the likeliest token is taken", ge=0, le=2)
    ] = 1.0
    top_p: Annotated[float, about("draw from the smallest set whose probability reaches it (nucleus)", gt=0, le=1)] = (
        1.0
    )
    # Devices hold it in 32 bits.
    top_k: Annotated[int, about("draw from so many likeliest tokens; 0 or -1: off", ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[Share, about("leave out tokens less likely than this share of the likeliest")] = 0.0
    # Logits are divided by it: they must stay numbers in the device's 32 bits.
    repetition_penalty: Annotated[
        float,
        about(
            "logits of tokens in prompt or output are divided by it if positive, else multiplied (Keskar et al. 2019); "
            "1 changes nothing",
            ge=0.01,
            le=100,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        Penalty, about("subtracted once from the logits of tokens that the output has (OpenAI)")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, about("subtracted from a token's logit for each time the output has it (OpenAI)")
    ] = 0.0
    seed: Annotated[Seed | None, about("equal seeds give equal draws, whatever else runs in the batch")] = None
    n: Annotated[
        int,
        about(
            "choices; above 1 needs a temperature above 0",
            ge=1,
            most="max_n",
            also=["above 1 needs a temperature above 0"],
        ),
    ] = 1
    # Matched where the text is: front end, or the engine's text path.
    stop: Annotated[StopStrings, about("texts that end the output; not even the beginning of one is shown")] = ()
    include_stop_str_in_output: Annotated[bool, about("show the text or token that ended the output")] = False
    skip_special_tokens: Annotated[bool, about("leave special tokens out of the text")] = True
    stop_token_ids: Annotated[
        TokenIds,
        about("token ids that end the output, besides the model's own", most="max_logit_bias", also=[_OUTSIDE]),
    ] = ()
    ignore_eos: Annotated[bool, about("go on past the model's own end")] = False
    logit_bias: Annotated[
        LogitBias,
        about(
            "added to the logits of these token ids, before the temperature",
            expected="must be an object",
            also=[_OUTSIDE, "keys must be token ids, and 'the' is none"],
        ),
    ] = ()
    allowed_token_ids: Annotated[TokenIds, about("only these token ids may come", also=[_OUTSIDE])] = ()
    bad_words_ids: Annotated[
        tuple[BadWord, ...],
        about(
            "token sequences that must not come in the output",
            max_length=MAX_BAD_WORDS,
            expected="must be a list of lists of token ids",
            also=[_OUTSIDE],
        ),
    ] = ()
    logprobs: Annotated[
        Alternatives | None, about("alternatives per token, from the model's own logits; 0: the token's own alone")
    ] = None
    # Such a prompt takes nothing from the prefix cache.
    prompt_logprobs: Annotated[
        Alternatives | None, about("alternatives per token of the prompt; not with stream or detached")
    ] = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature <= GREEDY_TEMPERATURE

    def to_map(self) -> dict[str, Any]:
        """Return what differs from the defaults, as SUBMIT carries it."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}

    def replace(self, **changes: Any) -> SamplingParams:
        """Copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)


_DEFAULTS = tuple((field.name, field.default) for field in msgspec.structs.fields(SamplingParams))
NAMES = tuple(name for name, _ in _DEFAULTS)


def of_choice(params: SamplingParams, place: int) -> SamplingParams:
    """Return what one of a request's choices runs with. `place`: its place among those that run.

    Only the first of them answers `prompt_logprobs`: the others share its prompt and compute none of it."""
    return params if place == 0 or params.prompt_logprobs is None else params.replace(prompt_logprobs=None)


def from_map(values: Mapping[str, Any], *, path: str = "params") -> SamplingParams:
    """Read parameters from a decoded map (wire or JSON). Unknown keys are ignored so that new clients can talk to
    old engines, and None says nothing. Raises InvalidRequest naming the field."""
    given = {name: value for name in NAMES if (value := values.get(name)) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(_under(path, "logit_bias"), given["logit_bias"])
    try:
        return read(SamplingParams, given)
    except FieldError as error:
        raise _refusal(error, path) from None


def validate(params: SamplingParams, *, vocab_size: int, limits: LimitsConfig, path: str = "params") -> None:
    """Raise InvalidRequest naming the first field out of range. `vocab_size` bounds every token id of any field."""
    try:
        check(params, limits)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise _wrong("min_tokens", "must not exceed max_tokens")
        if params.n > 1 and params.is_greedy:
            raise _wrong("n", "above 1 needs a temperature above 0")
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
        if params.allowed_token_ids:
            if len(params.allowed_token_ids) > vocab_size:
                raise _wrong("allowed_token_ids", f"at most {vocab_size} entries")
            _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        for word in params.bad_words_ids:
            _check_ids("bad_words_ids", word, vocab_size)
        never = {word[0] for word in params.bad_words_ids if len(word) == 1}
        if params.allowed_token_ids and never.issuperset(params.allowed_token_ids):
            raise _wrong("allowed_token_ids", "bad_words forbid every one of them: allow another, or leave one out")
    except FieldError as error:
        raise _refusal(error, path) from None


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise _wrong(name, f"token id {token_id} is outside the vocabulary of {vocab_size}")


def _wrong(name: str, message: str) -> FieldError:
    return FieldError(name, message, is_type=False)


def _refusal(error: FieldError, path: str) -> InvalidRequest:
    """Return the error for a field: a range is refused under its field's name, a wrong type under its place in a
    list."""
    name, _, place = error.field.partition("[")
    if error.is_type or not place:
        return InvalidRequest(_under(path, error.field), error.message)
    return InvalidRequest(_under(path, name), each(error.message))


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _bias(path: str, value: Any) -> list[tuple[Any, Any]]:
    """Bring both spellings into pairs: OpenAI's {"token id": bias}, and the wire's [[id, bias], ...]."""
    if not isinstance(value, Mapping | list | tuple):
        raise InvalidRequest(path, "must be a map from token id to bias")
    if len(value) > MAX_BIASED:
        raise InvalidRequest(path, f"at most {MAX_BIASED} entries")
    pairs: list[tuple[Any, Any]] = []
    for item in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise InvalidRequest(path, "must be a map from token id to bias")
        token_id, bias = item
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() and len(token_id) < 10:
            token_id = int(token_id)
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(path, f"keys must be token ids, and {str(token_id)[:24]!r} is none")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not is_finite(bias):
            raise InvalidRequest(f"{path}.{token_id}", "must be a finite number")
        pairs.append((token_id, bias))
    return pairs


def is_finite(value: int | float) -> bool:
    """Return whether a float can hold it: not infinite, no NaN, no whole number of hundreds of digits."""
    return -sys.float_info.max <= value <= sys.float_info.max
