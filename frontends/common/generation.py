"""The generations of one API call: submit its prompts, read its choices as text, and end them together.

Turns token deltas into pieces of text: detokenizes, finds stop strings, and reports how each choice ended. Does not
depend on HTTP, JSON or a dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inferengine.client import Delta, Finish, Submission, TokenLogprobs
from inferengine.client.requests import error_of
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text import CONTEXT_TOKENS, TextStream, Tokenizer

logger = logging.getLogger(__name__)

USAGE_WAIT_S = 1.0  # for the engine's usage of a choice that a stop string ended here
# Tokens and log-probabilities of one delta that are read at a time. The text of a token takes up to some 1 us, one that
# is a piece or an event of its own some 13 us.
MOST_AS_TEXT, MOST_AS_PIECES = 4096, 256
LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this


class Submitter(Protocol):
    """What a generation needs of an AsyncClient or EnginePool."""

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """Submit one prompt, given as token ids or as one of `arguments`."""
        ...


class TokenSource(Protocol):
    """The source of a choice's tokens: a Stream, or a view of a log that several readers share."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at the stop string `text`, after `num_tokens` tokens."""
        ...


class Piece(NamedTuple):
    """New output of one choice. The last piece has `finish_reason` (stop, length, abort) and `stop_reason` (the stop
    string or token id), or `error` when the choice failed."""

    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprobs] | None
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: InferEngineError | None = None

    @property
    def is_last(self) -> bool:
        """Whether the choice ends with this piece."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_cut(self) -> bool:
        """Whether the choice ends with this piece, and neither the model nor a stop string ended it."""
        return self.is_last and self.finish_reason != "stop"


def split_delta(delta: Delta, most: int) -> tuple[Delta, Delta | None]:
    """Return the part of a delta that is read now, at most `most` values, and the rest or None: much may have arrived
    while its reader waited, and reading all at once would make other streams wait."""
    token_ids, rows = delta.token_ids, delta.logprobs
    if rows:
        most = max(1, most // (1 + len(rows[-1].top_ids)))
    if len(token_ids) <= most:
        return delta, None
    now = delta._replace(token_ids=token_ids[:most], logprobs=rows and rows[:most], finish=None)
    return now, Delta(token_ids[most:], "", rows and rows[most:], delta.finish)


class Usage(NamedTuple):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_tokens: int = 0  # draft tokens in the completion
    rejected_tokens: int = 0  # other draft tokens
    has_prediction: bool = False  # the request predicts its output: the two are told though they may be 0


def draft_token_counts(counted: Usage | Finish) -> dict[str, int]:
    """Return the counts of draft tokens under OpenAI's names; empty without any, and without a prediction."""
    is_asked = isinstance(counted, Usage) and counted.has_prediction
    if not counted.accepted_tokens and not counted.rejected_tokens and not is_asked:
        return {}
    return {
        "accepted_prediction_tokens": counted.accepted_tokens,
        "rejected_prediction_tokens": counted.rejected_tokens,
    }


@dataclass(frozen=True)
class Options:
    """Options of a call that are submitted with every prompt, beside the sampling parameters."""

    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    session: str = ""  # requests of one session go to one engine where there are several
    deadline_s: float | None = None
    label: str = ""
    continues_prompt: bool = True  # true: completions; false: the output is a text of its own (chat)
    grammar: GrammarSpec | None = None
    grammar_field: str = "grammar"  # the request's name of the grammar, for errors
    prompt_field: str = "prompt"  # the request's name of the prompt, for errors
    prediction_ids: Sequence[int] | None = None  # what the output will probably be, empty or not; None: not said
    resubmit: bool = True  # continue at another engine when this one is lost


class ChoiceOutput:
    """One output: reads its tokens and turns them into text."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        stream: TokenSource,
        text: TextStream,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: the request's names of the engine's fields, where they differ, for errors."""
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._usage_wait_s = USAGE_WAIT_S
        self.prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after the first
        self._stream = stream
        self._text = text
        self._names = names or {}
        self._ended = False

    async def pieces(self, *, per_token: bool) -> AsyncIterator[list[Piece]]:
        """Yield new output until the last piece: one piece for each token, or one for all that has arrived; a long
        output in parts, between which the event loop serves others."""
        most = MOST_AS_PIECES if per_token else MOST_AS_TEXT
        async for delta in self._stream:
            now, rest = split_delta(delta, most)
            while True:
                pieces = self.read(now, per_token=per_token, rest=rest)
                if pieces:
                    yield pieces
                if self._ended:
                    return
                if rest is None:
                    break
                await asyncio.sleep(0)
                now, rest = split_delta(rest, most)

    @property
    def source(self) -> TokenSource:
        """The source of deltas, for callers that pass them to `read` themselves. Drop those after the last piece."""
        return self._stream

    def read(self, delta: Delta, *, per_token: bool, rest: Delta | None = None) -> list[Piece]:
        """Return the pieces of one delta. After a stop string what follows is dropped and the stream is ended. `rest`:
        what has arrived behind this delta, perhaps with the end."""
        pieces = self._read(delta, per_token=per_token)
        if self._ended and rest is not None:
            self.finish = self.finish or rest.finish  # the end may come after a stop string
        return pieces

    def _read(self, delta: Delta, *, per_token: bool) -> list[Piece]:
        token_ids, finish = delta.token_ids, delta.finish
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if per_token and len(token_ids) > 1:
            logprobs = delta.logprobs
            pieces = [
                self._piece(token_ids[place : place + 1], logprobs and logprobs[place : place + 1], None)
                for place in range(len(token_ids) - 1)
                if not self._ended
            ]
            if not self._ended:
                pieces.append(self._piece(token_ids[-1:], logprobs and logprobs[len(token_ids) - 1 :], finish))
            self.finish = self.finish or finish  # the end may come after a stop string in the same delta
            return pieces
        return [self._piece(token_ids, delta.logprobs, finish)]

    @property
    def lacks_usage(self) -> bool:
        """Whether a stop string ended it here and the engine's usage is not known."""
        return self._ended and self.finish is None

    async def settle(self) -> None:
        """Wait for the engine's usage of a choice that a stop string ended here, at most USAGE_WAIT_S in all."""
        if not self.lacks_usage:
            return
        wait_s, self._usage_wait_s = self._usage_wait_s, 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                async for delta in self._stream:
                    if delta.finish is not None:  # an error has no usage
                        self.finish = delta.finish if delta.finish.reason != "error" else None
                        return

    @property
    def is_plain(self) -> bool:
        """Whether `read_plain` may be used: no stop strings have to be found."""
        return self._text.is_plain

    def read_plain(self, token_id: int) -> str:
        """Return the text of one token that is not the last of a plain choice, faster than `read`."""
        self.num_tokens += 1
        return self._text.push_plain(token_id)

    def _piece(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None, finish: Finish | None) -> Piece:
        before = self.num_tokens
        stop_token = finish is not None and finish.reason == "stop" and not isinstance(finish.detail, str)
        text, stop, self.num_tokens = self._text.push(token_ids, finish is not None, stop_token)
        self.finish = finish
        if stop is not None:
            self._ended = True
            if finish is None:
                self._stream.stop(self.num_tokens, stop)
            used = self.num_tokens - before
            return Piece(text, token_ids[:used], logprobs and logprobs[:used], self.num_tokens, "stop", stop)
        if finish is None:
            return Piece(text, token_ids, logprobs, self.num_tokens)
        self._ended = True
        if finish.reason in ("stop", "length"):
            detail = None if finish.detail == "" else finish.detail  # "": the grammar was complete, no token stopped it
            return Piece(text, token_ids, logprobs, self.num_tokens, finish.reason, detail)
        error = error_of(finish)
        error.field = self._names.get(error.field or "", error.field)
        if error.code == "cancelled":
            return Piece(text, token_ids, logprobs, self.num_tokens, "abort")
        return Piece(text, token_ids, logprobs, self.num_tokens, error=error)


class RequestOutput:
    """The choices of one API call: `n` for each prompt, numbered over all prompts."""

    def __init__(
        self,
        engine: Submitter,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: Options,
    ) -> None:
        """Submit all prompts. Raises InferEngineError when there is no engine, after cancelling those submitted."""
        self.prompts = prompts
        self._names = {"grammar": options.grammar_field, "prompt": options.prompt_field}
        self.has_prediction = options.prediction_ids is not None
        self.submissions: list[Submission] = []
        self.choices: list[ChoiceOutput] = []
        self.error: InferEngineError | None = None
        try:
            for prompt_ids in prompts:
                submission = engine.submit(
                    prompt_ids,
                    params,
                    priority=options.priority,
                    tenant=options.tenant,
                    salt=options.salt,
                    session=options.session,
                    deadline_s=options.deadline_s,
                    label=options.label,
                    grammar=options.grammar,
                    resubmit=options.resubmit,
                    prediction_ids=options.prediction_ids or (),
                )
                self.submissions.append(submission)
                for stream in submission.streams:
                    text = TextStream(
                        tokenizer,
                        stop=params.stop,
                        include_stop=params.include_stop_str_in_output,
                        skip_special_tokens=params.skip_special_tokens,
                        min_tokens=params.min_tokens,
                        context_ids=prompt_ids[-CONTEXT_TOKENS:] if options.continues_prompt else (),
                    )
                    self.choices.append(ChoiceOutput(len(self.choices), prompt_ids, stream, text, self._names))
        except BaseException:
            self.cancel()
            raise

    async def accepted(self) -> None:
        """Wait until the engine has accepted all prompts. Raises its refusal, after cancelling the others."""
        try:
            for submission in self.submissions:
                await submission.accepted()
        except InferEngineError as error:
            self.cancel()
            error.field = self._names.get(error.field or "", error.field)
            raise self.error or error from None

    async def collect(self) -> list[Output]:
        """Return the outputs of all choices. Raises InferEngineError when one fails, after cancelling the others."""
        outputs: list[Output] = []
        for choice in self.choices:  # one after the other: the output of the others is collected meanwhile
            output = Output(choice)
            async for pieces in choice.pieces(per_token=False):
                output.add(pieces)
            outputs.append(output)
            if output.error is not None:
                self.cancel()
                raise self.error or output.error
        return outputs

    async def settle(self) -> None:
        """Wait for the engine's usage of all choices at once. Call after the last piece and before `usage`."""
        if late := [choice for choice in self.choices if choice.lacks_usage]:
            await asyncio.gather(*(choice.settle() for choice in late))

    async def merged(self) -> AsyncIterator[tuple[ChoiceOutput, list[Piece]]]:
        """Yield the pieces of all choices, one for each token, in the order of their arrival."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            async for pieces in choice.pieces(per_token=True):
                yield choice, pieces
            return
        arrived: asyncio.Queue[tuple[ChoiceOutput, list[Piece]]] = asyncio.Queue()

        async def forward(choice: ChoiceOutput) -> None:
            try:
                async for pieces in choice.pieces(per_token=True):
                    arrived.put_nowait((choice, pieces))
            except Exception:
                logger.exception("reading a choice failed")
                error = InferEngineError("engine_error", "The server failed on this request.")
                arrived.put_nowait((choice, [Piece("", [], None, choice.num_tokens, error=error)]))

        tasks = [asyncio.create_task(forward(choice)) for choice in self.choices]
        try:
            open_choices = len(tasks)
            while open_choices:
                choice, pieces = await arrived.get()
                open_choices -= pieces[-1].is_last
                yield choice, pieces
        finally:
            for task in tasks:
                task.cancel()

    def usage(self) -> Usage:
        """Return the token counts of the call so far."""
        firsts = self.choices[
            :: len(self.choices) // len(self.prompts)
        ]  # choices of one prompt share its cached tokens
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        return Usage(
            sum(map(len, self.prompts)),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.finish.cached_tokens for choice in firsts if choice.finish is not None),
            sum(finish.accepted_tokens for finish in ends),
            sum(finish.rejected_tokens for finish in ends),
            self.has_prediction,
        )

    def cancel(self) -> None:
        """Cancel all choices in the engine; readers get the finish reason `abort`. Idempotent."""
        for submission in self.submissions:
            submission.cancel()

    def abandon(self, error: InferEngineError) -> None:
        """End the call here at once, without waiting for the engine. Readers get `error`."""
        self.error = error
        for submission in self.submissions:
            submission.abandon(error)


class Output:
    """The whole output of one choice."""

    def __init__(self, choice: ChoiceOutput) -> None:
        self.choice = choice
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: InferEngineError | None = None
        self._parts: list[str] = []

    @property
    def is_cut(self) -> bool:
        """Whether neither the model nor a stop string ended it."""
        return self.finish_reason != "stop"

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append pieces of the choice; the last one sets `text`, the finish and stop reasons and `error`."""
        for piece in pieces:
            self._parts.append(piece.text)
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs or ()
            if piece.is_last:
                self.text = "".join(self._parts)
                self.finish_reason, self.stop_reason, self.error = piece.finish_reason, piece.stop_reason, piece.error


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return one token as a string of its own. Part of a character becomes U+FFFD."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def finite_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can hold: at least LEAST_LOGPROB, also for NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # false for NaN too
