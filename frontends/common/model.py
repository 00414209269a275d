"""The model of a front end: tokenizer, chat template and generation defaults, fetched from the engine.

A front end has no model files of its own. It fetches them once, and again when an engine announces another fingerprint.

Short texts are tokenized on the event loop. Long ones are tokenized in a thread, piece by piece
(`inferengine.text.tokenizer`), one piece at a time over all texts: so memory is that of one piece, and a short
prompt never waits for a long one. A text that cannot fit is refused by its length, or as soon as there are too many
tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from inferengine.client import ModelFiles, ModelInfo, Welcome
from inferengine.config import LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import give_back
from inferengine.text import ChatTemplate, Tokenizer
from inferengine.text.tokenizer import PIECE_CHARACTERS, read_json

# Up to this many characters are tokenized on the event loop, in well under a millisecond, less than a thread costs.
SHORT_TEXT_CHARACTERS = 2000
# Keys of generation_config.json that are defaults of requests, as in vLLM.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MEDIUM_AT_ONCE = 4  # texts of one piece
MOST_WAITING_CHARACTERS = 64 * 1024 * 1024
BUSY_S = 5.0


class TooManyTokens(Exception):
    """A text has more tokens than allowed."""

    def __init__(self, least: int) -> None:
        """`least`: a lower bound of the number of tokens."""
        super().__init__(f"at least {least} tokens")
        self.least = least


class LongTexts:
    """Tokenizes long texts in threads, for one event loop."""

    def __init__(self) -> None:
        self._medium = asyncio.Semaphore(MEDIUM_AT_ONCE)
        self._turn = asyncio.Lock()
        self._num_characters = 0

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, *, most: int, last: int | None = None
    ) -> Sequence[int]:
        """Return the token ids of a text; with `last` at least its last `last` tokens. Raises TooManyTokens for more
        than `most`, and `overloaded`."""
        takes_end = last is not None and last <= most
        if not takes_end and (least := tokenizer.least_tokens(text)) > most:
            raise TooManyTokens(least)
        if len(text) <= PIECE_CHARACTERS:
            async with self._medium:
                ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
            if len(ids) > most and not takes_end:
                raise TooManyTokens(len(ids))
            return ids
        if self._num_characters and self._num_characters + len(text) > MOST_WAITING_CHARACTERS:
            raise InferEngineError("overloaded", "Too many long texts are being tokenized.", retry_after_s=BUSY_S)
        self._num_characters += len(text)
        try:
            return await self._in_turns(tokenizer, text, add_special_tokens, most, last if takes_end else None)
        finally:
            self._num_characters -= len(text)
            if not self._num_characters:
                asyncio.get_running_loop().run_in_executor(None, give_back)

    async def _in_turns(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int, last: int | None
    ) -> Sequence[int]:
        """Tokenize one part at a time, until there are `last` tokens or too many."""
        source = tokenizer.parts if last is None else tokenizer.last_parts
        parts = _packed(source(text, add_special_tokens))
        found: list[array[int]] = []
        count = 0
        while last is None or count < last:
            async with self._turn:
                part = await asyncio.to_thread(next, parts, None)
            if part is None:
                break
            found.append(part)
            count += len(part)
            if last is None and count > most:
                raise TooManyTokens(count)
        if last is not None:
            found.reverse()
        ids = array("I")
        for part in found:
            ids.extend(part)
        return ids


def _packed(parts: Iterable[list[int]]) -> Iterator[array[int]]:
    """Pack token ids into 4 bytes each; a list takes nine times as much memory."""
    return (array("I", part) for part in parts)


class ModelSource(Protocol):
    """What ModelContext needs of an AsyncClient or EnginePool."""

    @property
    def welcome(self) -> Welcome:
        """The engine's latest WELCOME. Raises engine_unavailable before the first."""
        ...

    @property
    def connected(self) -> bool:
        """Whether an engine is connected."""
        ...

    async def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        """Fetch the model's tokenizer, template and configuration files: all, or the named ones."""
        ...


def _num_characters(message: Mapping[str, Any]) -> int:
    """Return about how much of a message is to be rendered: its content, and arguments of calls that are texts, which
    were cut and are read piece by piece."""
    calls = [call["function"].get("arguments") for call in message.get("tool_calls") or ()]
    return len(str(message.get("content") or "")) + sum(len(text) for text in calls if isinstance(text, str))


@dataclass(frozen=True)
class ServedModel:
    """A model's tokenizer, chat template and defaults. Shared by all requests."""

    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: dict[str, Any] = field(default_factory=dict)
    long_texts: LongTexts = field(default_factory=LongTexts)

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.info.name

    @property
    def scores_pairs(self) -> bool:
        """Whether its vectors are no embeddings but scores of pairs of texts, one number each."""
        return "embeddings" in self.info.without and self.info.embedding_size == 1

    def adapter_of(self, name: str | None) -> str | None:
        """Return the LoRA adapter of a model name, "" for the model itself, None for a name that is not served."""
        if not name or name == self.name:
            return ""
        return name if name in self.info.adapters else None

    async def encode(self, text: str, limits: LimitsConfig, **options: Any) -> list[int]:
        """Return the token ids of a prompt as a list; see `tokenize`."""
        ids = await self.tokenize(text, limits, **options)
        return ids if isinstance(ids, list) else list(ids)

    async def tokenize(
        self,
        text: str,
        limits: LimitsConfig,
        *,
        name: str,
        add_special_tokens: bool = True,
        last: int | None = None,
        most: int | None = None,
    ) -> Sequence[int]:
        """Return the token ids of a text. Long ones are tokenized in a thread. `last`: only so many tokens from the end
        are needed. `most`: a long text of more tokens is refused; None: the model's maximum length."""
        if len(text) > limits.max_text_characters:
            message = f"must have at most {limits.max_text_characters} characters"
            raise InvalidRequest(name, message, code="request_too_large")
        if len(text) <= SHORT_TEXT_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        most_tokens = self.info.max_model_len if most is None else most
        try:
            return await self.long_texts.encode(self.tokenizer, text, add_special_tokens, most=most_tokens, last=last)
        except TooManyTokens as error:
            if most is not None:
                raise InvalidRequest(name, f"has more than {most} tokens", code="request_too_large") from None
            message = (
                f"This model's maximum context length is {most_tokens} tokens; the prompt has at least {error.least}. "
                "Shorten the prompt."
            )
            raise InvalidRequest(name, message, code="context_length_exceeded") from None

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt text of a conversation, made by the model's chat template. Raises InvalidRequest, also for
        a model without one."""
        if self.template is None:
            raise InvalidRequest(
                "messages", "this model has no chat template: use /v1/completions with a prompt", code="unsupported"
            )
        template, size = self.template, sum(map(_num_characters, messages))
        if size <= SHORT_TEXT_CHARACTERS and len(messages) <= 32:
            return template.render(messages, **options)
        return await asyncio.to_thread(lambda: template.render(messages, **options))


class ModelContext:
    """Fetches the model of the engine, and again when the engine announces another one."""

    def __init__(self, engine: ModelSource) -> None:
        self._engine = engine
        self._info: ModelInfo | None = None
        self._served: ServedModel | None = None
        self._unusable: tuple[str, InferEngineError] | None = None  # the fingerprint of files that cannot be read
        self._lock = asyncio.Lock()
        self._long_texts = LongTexts()

    @property
    def served(self) -> ServedModel | None:
        """The model as last fetched, also while no engine is connected; None before the first."""
        return self._served

    @property
    def info(self) -> ModelInfo:
        """What the engine announces of its model; while no engine is connected, what was announced last. Needs none of
        the model's files. Raises engine_unavailable while nothing has been announced."""
        return self._announced() if self._info is None or self._engine.connected else self._info

    async def get(self) -> ServedModel:
        """Return the current model; fetch it if the engine announces a new one. Raises engine_unavailable while there
        is no engine or it is still loading, and `unsupported` for a model without a tokenizer."""
        info = self._announced()
        served = self._served
        if served is not None and served.info == info:
            return served
        async with self._lock:
            info = self._announced()
            served = self._served
            if served is not None and served.info.fingerprint == info.fingerprint:
                self._served = replace(served, info=info)
                return self._served
            if self._unusable is not None and self._unusable[0] == info.fingerprint:  # do not fetch the files again
                raise InferEngineError(self._unusable[1].code, self._unusable[1].message)
            files = (await self._engine.model_files()).files
            try:
                loaded = await asyncio.to_thread(load_model, info, files)
            except InferEngineError as error:
                self._unusable = (info.fingerprint, error)
                raise
            self._served = replace(loaded, long_texts=self._long_texts)
            return self._served

    def _announced(self) -> ModelInfo:
        if not self._engine.connected:
            raise InferEngineError("engine_unavailable", "The engine is not reachable.", retry_after_s=1.0)
        welcome = self._engine.welcome
        if welcome.model is None:
            raise InferEngineError("engine_unavailable", "The engine is still loading the model.", retry_after_s=2.0)
        self._info = welcome.model
        return welcome.model


def load_model(info: ModelInfo, files: dict[str, bytes]) -> ServedModel:
    """Load a model from the files that an engine sent. Raises `unsupported` without a tokenizer.json, and
    engine_error for files that cannot be read."""
    if "tokenizer.json" not in files:
        raise InferEngineError(
            "unsupported", "This model has no tokenizer.json: it takes and gives token ids only, over the wire."
        )
    wanted = read_json(files, "generation_config.json")
    defaults = {name: wanted[name] for name in GENERATION_DEFAULTS if isinstance(wanted.get(name), int | float)}
    return ServedModel(info, Tokenizer.from_files(files), ChatTemplate.from_files(files), defaults)
