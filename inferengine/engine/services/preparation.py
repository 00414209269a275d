"""What a submission needs before it can be accepted, done off the loop and off the I/O thread: the tokens of its
prompt, and its grammar.

TextService: tokenize the prompts of clients that have no tokenizer, by the front ends' code (`inferengine.text`).

GrammarService: compile the grammars of requests, so that one that makes no sense is answered by a REJECT. GrammarReplay
then takes the grammar of a resumed request to the end of its output so far.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from inferengine.config import LimitsConfig
from inferengine.core.constraints import Grammar, num_mask_threads, token_rules
from inferengine.engine.io.publisher import PriorOutputs, SubmittedRequest
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import give_back
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text import ChatTemplate, TextStream, Tokenizer, check_messages
from inferengine.text.tokenizer import PIECE_CHARACTERS

if TYPE_CHECKING:
    from inferengine.structured_output.compiler import GrammarCompiler, Ticket
    from inferengine.structured_output.matcher import TokenMatcher

logger = logging.getLogger(__name__)

NUM_THREADS = 2  # encoding releases the GIL
MOST_WAITING_CHARACTERS = 64 * 1024 * 1024
BUSY_S = 5.0

TokenizeDone = Callable[[list[int] | InferEngineError], None]


class TextService:
    """`deliver` takes a call to the I/O thread, for its next turn."""

    def __init__(self, files: Mapping[str, bytes], deliver: Callable[[Callable[[], None]], None]) -> None:
        self.deliver = deliver
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
            future.add_done_callback(lambda finished: self.deliver(partial(done, _outcome(finished))))
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
        future.add_done_callback(lambda finished: self.deliver(partial(deliver, _outcome(finished))))

    def stream(self, submission: SubmittedRequest, search: bool) -> TextStream:
        """Return a detokenizer for one choice, which finds its stop strings where `search` is set."""
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
        """Stop: what waits is not done any more."""
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
    """Count the characters of a text, or of what messages say."""
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


# -- grammars ----------------------------------------------------------------------------------------------------------


LARGE_VOCABULARY = 16_384  # below, the first grammar costs some ten milliseconds more than the others
TOKENS_PER_LOOK = 256  # replayed between two checks whether the request is still wanted

GrammarsDone = Callable[[list[Grammar] | InferEngineError], None]


class GrammarService:
    """`deliver` takes a call to the I/O thread. The compiler's library is imported when the first grammar comes."""

    def __init__(
        self, files: Mapping[str, bytes], deliver: Callable[[Callable[[], None]], None], limits: LimitsConfig
    ) -> None:
        self._tokenizer_json = files.get("tokenizer.json")
        self._deliver = deliver
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._prepared: Future[Any] | None = None

    def prepare(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Begin, while the engine starts, with what a large vocabulary needs before its first grammar. It holds the
        interpreter's lock for a second, which would pause all streams later."""
        if vocab_size >= LARGE_VOCABULARY:
            with contextlib.suppress(InferEngineError):  # the first request with a grammar reports it
                self._compiler = self._make_compiler(vocab_size, eos_token_ids)
                self._prepared = self._compiler.prepare()

    def flush(self) -> None:
        """Drop cached grammars."""
        if self._compiler is not None:
            self._compiler.forget()

    def wait(self) -> None:
        """Wait until `prepare` is done in this process. The compiling process may take longer."""
        if self._prepared is not None and (error := self._prepared.exception()) is not None:
            logger.warning("grammars will be refused: %s", error)

    def compile(
        self,
        spec: GrammarSpec,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: list[int],
        done: GrammarsDone,
        *,
        tenant: str,
    ) -> Ticket:
        """Compile a grammar. `done` gets one for each choice, at its beginning, or the error, in the I/O thread. Raises
        `unsupported` where this engine cannot compile any."""
        compiler = self._compiler or self._make_compiler(vocab_size, eos_token_ids)
        self._compiler = compiler
        end_ids = {*params.stop_token_ids, *eos_token_ids}  # EOS ends a grammar whatever `ignore_eos` says

        def deliver(found: Sequence[TokenMatcher] | InferEngineError) -> None:
            outcome: list[Grammar] | InferEngineError
            try:
                if isinstance(found, InferEngineError):
                    raise found
                _check_first_token(found[0], params, end_ids, vocab_size)
                outcome = list(found)
            except InferEngineError as error:
                outcome = error
            self._deliver(partial(done, outcome))

        return compiler.submit(spec, deliver, count=params.n, tenant=tenant)

    def cancel(self, ticket: Ticket) -> None:
        """Stop compiling: the request does not wait for it any more."""
        if self._compiler is not None:
            self._compiler.cancel(ticket)

    def is_slow(self, ticket: Ticket) -> bool:
        """Return whether the grammar itself takes long; False while it waits for those of others."""
        return self._compiler is not None and self._compiler.is_slow(ticket)

    @property
    def is_starting(self) -> bool:
        """Whether the compiling process has not started yet, so that grammars wait for it."""
        return self._compiler is not None and self._compiler.process.is_starting

    def close(self) -> None:
        """Stop the compiler. Grammars that wait are not compiled."""
        if self._compiler is not None:
            self._compiler.close()

    def _make_compiler(self, vocab_size: int, eos_token_ids: list[int]) -> GrammarCompiler:
        if self._tokenizer_json is None:
            raise InferEngineError("unsupported", "The model has no tokenizer: grammars need one.", field="grammar")
        if not eos_token_ids:
            message = (
                "The model has no end-of-text token, so a grammar could not end: name eos_token_id in config.json."
            )
            raise InferEngineError("unsupported", message, field="grammar")
        try:
            from inferengine.structured_output.compiler import GrammarCompiler
        except ImportError as error:
            logger.warning("grammars are refused: %s", error)
            message = "This engine runs without its grammar library."
            raise InferEngineError("unsupported", message, field="grammar") from None
        return GrammarCompiler(
            self._tokenizer_json.decode(),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            limits=self._limits,
            max_lexers=num_mask_threads(),
        )


class GrammarReplay:
    """Replays the output so far through grammars, in a thread of its own. `deliver` takes a call to the I/O thread."""

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inferengine-replay")

    def advance(
        self, grammars: list[Grammar], outputs: PriorOutputs, done: GrammarsDone, is_wanted: Callable[[], bool]
    ) -> None:
        """Replay the outputs; `done` gets the grammars of the choices that go on, each at the end of its output, or the
        error.

        `is_wanted` is asked in this thread; a replay that is not wanted any more is given up."""
        self._pool.submit(self._work, grammars, outputs, done, is_wanted)

    def close(self) -> None:
        """Drop the replays that wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(
        self, grammars: list[Grammar], outputs: PriorOutputs, done: GrammarsDone, is_wanted: Callable[[], bool]
    ) -> None:
        outcome: list[Grammar] | InferEngineError
        try:
            outcome = advance(grammars, outputs, is_wanted)
        except InferEngineError as error:
            outcome = error
        except Exception as error:  # a grammar library may fail in any way
            outcome = InferEngineError("engine_error", f"The grammar failed: {error}")
        self._deliver(partial(done, outcome))


def advance(
    grammars: list[Grammar], outputs: PriorOutputs, is_wanted: Callable[[], bool] = lambda: True
) -> list[Grammar]:
    """Advance one grammar for each choice that goes on to the end of its output. Raises InvalidRequest."""
    live = [(choice, output) for choice, output in enumerate(outputs) if output is not None]
    for grammar, (choice, output) in zip(grammars, live, strict=True):
        for place, token_id in enumerate(output):
            if not place % TOKENS_PER_LOOK and not is_wanted():
                raise InferEngineError("cancelled", "The request was cancelled.")
            if grammar.is_terminated() or not grammar.accept(token_id):
                raise InvalidRequest(f"resume[{choice}]", f"the grammar does not allow its token {place}")
    return grammars


def _check_first_token(grammar: Grammar, params: SamplingParams, stop_ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequest where the other fields of a request leave no token that its grammar allows."""
    rules = token_rules(params, stop_ids)
    if rules is None:
        return
    mask = bytearray(4 * -(-vocab_size // 32))
    grammar.fill_bitmask(memoryview(mask))
    if not rules.allowed(int.from_bytes(mask, "little"), 0, ()):
        raise InvalidRequest("grammar", rules.no_token_message(0, has_grammar=True))
