"""TextService: tokenize the prompts of clients that have no tokenizer, off the loop and off the I/O thread.

The same code as the front ends': `inferengine.text`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from inferengine.engine.io.output_log import Submission
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import give_back
from inferengine.text import ChatTemplate, TextStream, Tokenizer, check_messages
from inferengine.text.token_bounds import PIECE_CHARACTERS

logger = logging.getLogger(__name__)

NUM_THREADS = 2  # encoding releases the GIL
MOST_WAITING_CHARACTERS = 64 * 1024 * 1024
BUSY_S = 5.0
CONTEXT_TOKENS = 4  # of the prompt, for decoders that look at what precedes a text

TokenizeDone = Callable[[list[int] | InferEngineError], None]


class TextService:
    """`deliver` takes a call to the I/O thread."""

    def __init__(self, files: Mapping[str, bytes], deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="inferengine-text")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="inferengine-long-text")
        self._num_characters = 0  # that wait in it; the I/O thread's
        self._model: Future[tuple[Tokenizer, ChatTemplate | None]] = self._pool.submit(_load, dict(files))

    @property
    def available(self) -> bool:
        """Whether text can be read and written: false without a usable tokenizer."""
        return self._model.done() and self._model.exception() is None

    def wait(self) -> None:
        """Wait until the tokenizer is loaded or has failed to load."""
        error = self._model.exception()
        if error is not None:
            logger.warning("the engine serves token ids only: %s", error)

    def tokenize(self, text: str | None, messages: list[dict[str, Any]] | None, most: int, done: TokenizeDone) -> None:
        """Tokenize. `done` gets the ids or the error, in the I/O thread; a text of more than `most` tokens is an error.
        Long texts are done one after the other, so that short ones never wait for them. Raises `overloaded`."""
        size = num_characters(text, messages)
        if size <= PIECE_CHARACTERS:
            future = self._pool.submit(self._encode, text, messages, most)
            future.add_done_callback(lambda finished: self._deliver(partial(done, _outcome(finished))))
            return
        if self._num_characters and self._num_characters + size > MOST_WAITING_CHARACTERS:
            raise InferEngineError("overloaded", "Too many long texts are being tokenized.", retry_after_s=BUSY_S)
        self._num_characters += size

        def deliver(result: list[int] | InferEngineError) -> None:
            self._num_characters -= size
            if not self._num_characters:
                self._long_pool.submit(give_back)
            done(result)

        future = self._long_pool.submit(self._encode, text, messages, most)
        future.add_done_callback(lambda finished: self._deliver(partial(deliver, _outcome(finished))))

    def stream(self, submission: Submission, search: bool) -> TextStream:
        """A detokenizer for one choice; `search` its stop strings."""
        params = submission.params
        return TextStream(
            self._model.result()[0],
            stop=params.stop if search else (),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            context_ids=submission.context_ids,
        )

    def close(self) -> None:
        """What waits is not done any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long_pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str | None, messages: list[dict[str, Any]] | None, most: int) -> list[int]:
        tokenizer, template = self._model.result()
        is_chat = text is None
        if text is None:
            if template is None:
                raise InvalidRequest("messages", "the model has no chat template: send 'text'", code="unsupported")
            text = template.render(check_messages(messages))
        if (least := tokenizer.least_tokens(text)) > most:
            raise _too_long(least, most)
        ids: list[int] = []
        for part in tokenizer.parts(text, add_special_tokens=not is_chat):
            ids += part
            if len(ids) > most:
                raise _too_long(len(ids), most)
        if not ids:
            raise InvalidRequest("prompt", "must hold at least one token")
        return ids


def num_characters(text: str | None, messages: list[dict[str, Any]] | None) -> int:
    """Of a text, or of what messages say."""
    return len(text or "") + sum(len(str(message.get("content") or "")) for message in messages or ())


def _too_long(least: int, most: int) -> InvalidRequest:
    return InvalidRequest(
        "prompt",
        f"This model's maximum context length is {most} tokens; the prompt has at least {least}. Shorten the prompt.",
        code="context_length_exceeded",
    )


def _load(files: dict[str, bytes]) -> tuple[Tokenizer, ChatTemplate | None]:
    return Tokenizer.from_files(files), ChatTemplate.from_files(files)


def _outcome(future: Future[list[int]]) -> list[int] | InferEngineError:
    if future.cancelled():
        return InferEngineError("engine_unavailable", "The engine is stopping.")
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, InferEngineError):
        return error
    logger.error("tokenizing failed", exc_info=error)
    return InferEngineError("engine_error", "The engine failed to tokenize the prompt.")
