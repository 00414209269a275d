"""SamplingParams: what a client may ask of the generation, defined and validated once.

Front ends validate with it before they submit, the engine validates again before it accepts (a direct producer skips
the front ends). `docs/parameters.md` is the table for people. Definitions follow the OpenAI API and Hugging Face.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5  # at or below this the argmax is taken
LEAST_REPETITION_PENALTY = 0.01  # logits are divided by it: they must stay numbers in the device's 32 bits
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1  # devices hold it in 32 bits
MAX_BAD_WORDS = 256
MAX_PROMPT_LOGPROBS = 400_000  # values for one prompt: they travel in one message
MAX_BAD_WORD_TOKENS = 32
MAX_LISTED = 2**19  # entries of any list that are looked at one by one: more than the largest vocabulary
POOLINGS = ("last", "mean")  # which final hidden states make a prompt's embedding: the last token's, or the mean


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. `None` means: not asked for."""

    max_tokens: int | None = None  # None: up to the model's context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # Keskar et al. 2019, over prompt and output
    presence_penalty: float = 0.0  # OpenAI: over output
    frequency_penalty: float = 0.0  # OpenAI: over output
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()  # matched where the text is: front end, or the engine's text path
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not come in the output
    logprobs: int | None = None  # alternatives per output position; 0: the sampled token's only
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens; such a prompt takes nothing from the cache

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    def to_map(self) -> dict[str, Any]:
        """Only what differs from the defaults: what travels in SUBMIT."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}


def of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """What one of the `n` choices runs with. What is asked about their common prompt the first one answers: the others
    share its prompt, and compute none of it."""
    return params if choice == 0 or params.prompt_logprobs is None else replace(params, prompt_logprobs=None)


def from_map(values: Mapping[str, Any], *, path: str = "params") -> SamplingParams:
    """Read parameters from a decoded map (wire or JSON). Unknown keys are ignored so that new clients can talk to
    old engines; a wrong type is an InvalidRequest that names the field."""
    known: dict[str, Any] = {}
    for name, read in _READERS.items():
        value = values.get(name)
        if value is not None:
            known[name] = read(f"{path}.{name}" if path else name, value)
    return SamplingParams(**known)


def validate(params: SamplingParams, *, vocab_size: int, limits: LimitsConfig, path: str = "params") -> None:
    """Raise InvalidRequest naming the first field out of range. `vocab_size` bounds every token id of any field."""

    def check(good: bool, name: str, message: str) -> None:
        if not good:
            raise InvalidRequest(f"{path}.{name}" if path else name, message)

    check(params.max_tokens is None or params.max_tokens >= 1, "max_tokens", "must be at least 1")
    check(params.min_tokens >= 0, "min_tokens", "must not be negative")
    check(
        params.max_tokens is None or params.min_tokens <= params.max_tokens, "min_tokens", "must not exceed max_tokens"
    )
    check(0.0 <= params.temperature <= 2.0, "temperature", "must lie in [0, 2]")
    check(0.0 < params.top_p <= 1.0, "top_p", "must lie in (0, 1]")
    check(params.top_k >= -1, "top_k", "must be 0 or -1 (off) or at least 1")
    check(params.top_k <= MAX_TOP_K, "top_k", f"must be at most {MAX_TOP_K}")
    check(0.0 <= params.min_p <= 1.0, "min_p", "must lie in [0, 1]")
    check(
        LEAST_REPETITION_PENALTY <= params.repetition_penalty <= 100.0,
        "repetition_penalty",
        f"must lie in [{LEAST_REPETITION_PENALTY}, 100]; 1 changes nothing",
    )
    check(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "must lie in [-2, 2]")
    check(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "must lie in [-2, 2]")
    check(params.seed is None or -MAX_SEED <= params.seed <= MAX_SEED, "seed", "must fit in 64 bits")
    check(1 <= params.n <= limits.max_n, "n", f"must lie in [1, {limits.max_n}]")
    check(params.n == 1 or not params.is_greedy, "n", "above 1 needs a temperature above 0")
    check(len(params.stop) <= limits.max_stop_strings, "stop", f"at most {limits.max_stop_strings} strings")
    for text in params.stop:
        check(text != "", "stop", "a stop string must not be empty")
        check(len(text) <= limits.max_stop_characters, "stop", f"at most {limits.max_stop_characters} characters each")
    _check_ids(check, params.stop_token_ids, "stop_token_ids", vocab_size, limits.max_logit_bias)
    _check_ids(check, params.allowed_token_ids, "allowed_token_ids", vocab_size, vocab_size)
    _check_ids(check, tuple(item[0] for item in params.logit_bias), "logit_bias", vocab_size, limits.max_logit_bias)
    for _, bias in params.logit_bias:
        check(-100.0 <= bias <= 100.0, "logit_bias", "values must lie in [-100, 100]")
    check(len(params.bad_words_ids) <= MAX_BAD_WORDS, "bad_words_ids", f"at most {MAX_BAD_WORDS} sequences")
    for word in params.bad_words_ids:
        check(
            1 <= len(word) <= MAX_BAD_WORD_TOKENS, "bad_words_ids", f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens each"
        )
        _check_ids(check, word, "bad_words_ids", vocab_size, MAX_BAD_WORD_TOKENS)
    never = {word[0] for word in params.bad_words_ids if len(word) == 1}
    if params.allowed_token_ids and never.issuperset(params.allowed_token_ids):
        check(False, "allowed_token_ids", "bad_words forbid every one of them: allow another, or leave one out")
    check(
        params.logprobs is None or 0 <= params.logprobs <= limits.max_logprobs,
        "logprobs",
        f"must lie in [0, {limits.max_logprobs}]",
    )
    check(
        params.prompt_logprobs is None or 0 <= params.prompt_logprobs <= limits.max_logprobs,
        "prompt_logprobs",
        f"must lie in [0, {limits.max_logprobs}]",
    )


def _check_ids(check: Any, ids: tuple[int, ...], name: str, vocab_size: int, most: int) -> None:
    check(len(ids) <= most, name, f"at most {most} entries")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            check(False, name, f"token id {token_id} is outside the vocabulary of {vocab_size}")


def is_finite(value: int | float) -> bool:
    """Whether it is a float that is a number; whole numbers of hundreds of digits are none."""
    return -sys.float_info.max <= value <= sys.float_info.max


def _integer(path: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # some languages have no other numbers
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(path, "must be a whole number")
    if abs(value) > MAX_SEED:
        raise InvalidRequest(path, "must fit in 64 bits")
    return value


def _number(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise InvalidRequest(path, "must be a finite number")
    return float(value)


def _flag(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(path, "must be true or false")
    return value


def _strings(path: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(path, "must be a string or a list of strings")
    return tuple(value)


def _token_ids(path: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(path, "must be a list of token ids")
    _check_length(path, value, MAX_LISTED)
    if all(type(item) is int for item in value):
        return tuple(value)  # how large each may be `validate` knows
    return tuple(_integer(f"{path}[{place}]", item) for place, item in enumerate(value))


def _sequences(path: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(path, "must be a list of lists of token ids")
    _check_length(path, value, MAX_BAD_WORDS)
    return tuple(_token_ids(f"{path}[{place}]", item) for place, item in enumerate(value))


def _bias(path: str, value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI writes {"token id": bias}; on the wire also [[id, bias], ...]."""
    items = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        raise InvalidRequest(path, "must be a map from token id to bias")
    _check_length(path, value, MAX_LISTED // 8)
    pairs: list[tuple[int, float]] = []
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise InvalidRequest(path, "must be a map from token id to bias")
        raw_id, bias = item
        if isinstance(raw_id, str) and raw_id.isascii() and raw_id.isdigit() and len(raw_id) < 10:
            raw_id = int(raw_id)
        if isinstance(raw_id, bool) or not isinstance(raw_id, int):
            raise InvalidRequest(path, f"keys must be token ids, and {str(raw_id)[:24]!r} is none")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not is_finite(bias):
            raise InvalidRequest(f"{path}.{raw_id}", "must be a finite number")
        pairs.append((_integer(path, raw_id), float(bias)))
    return tuple(pairs)


def _check_length(path: str, value: Any, most: int) -> None:
    """Before its entries are looked at. What a request may really have `validate` says."""
    if len(value) > most:
        raise InvalidRequest(path, f"at most {most} entries")


_READERS = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _integer,
    "n": _integer,
    "stop": _strings,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "logit_bias": _bias,
    "allowed_token_ids": _token_ids,
    "bad_words_ids": _sequences,
    "logprobs": _integer,
    "prompt_logprobs": _integer,
}
