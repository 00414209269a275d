"""Text for producers that have no tokenizer: prompts are tokenized here, off the loop and off the I/O thread.

The same code as the front ends': `inferengine.text`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from inferengine.engine.output_log import Submission
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text import ChatTemplate, TextStream, Tokenizer, check_messages

logger = logging.getLogger(__name__)

NUM_THREADS = 2  # encoding releases the GIL
CONTEXT_TOKENS = 4  # of the prompt, for decoders that look at what precedes a text

TokenizeDone = Callable[[list[int] | InferEngineError], None]


class TextService:
    """`deliver` takes a call to the I/O thread."""

    def __init__(self, files: Mapping[str, bytes], deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="inferengine-text")
        self._model: Future[tuple[Tokenizer, ChatTemplate | None]] = self._pool.submit(_load, dict(files))

    @property
    def available(self) -> bool:
        """Whether text can be read and written: false without a usable tokenizer."""
        return self._model.done() and self._model.exception() is None

    def wait(self) -> None:
        """Until the tokenizer is loaded, or cannot be."""
        error = self._model.exception()
        if error is not None:
            logger.warning("the engine serves token ids only: %s", error)

    def tokenize(self, text: str | None, messages: list[dict[str, Any]] | None, done: TokenizeDone) -> None:
        """`done` gets the ids, or why there are none, in the I/O thread."""
        future = self._pool.submit(self._encode, text, messages)
        future.add_done_callback(lambda finished: self._deliver(partial(done, _outcome(finished))))

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

    def _encode(self, text: str | None, messages: list[dict[str, Any]] | None) -> list[int]:
        tokenizer, template = self._model.result()
        if text is not None:
            ids = tokenizer.encode(text)
        else:
            if template is None:
                raise InvalidRequest("messages", "the model has no chat template: send 'text'", code="unsupported")
            ids = tokenizer.encode(template.render(check_messages(messages)), add_special_tokens=False)
        if not ids:
            raise InvalidRequest("prompt", "must hold at least one token")
        return ids


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
