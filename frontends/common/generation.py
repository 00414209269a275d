"""One API call's generations: submitted together, read as text, ended together.

Turns the wire's token deltas into pieces of text: detokenizes, finds stop strings, and says how each choice ended.
Knows nothing of HTTP, JSON or any dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inferengine.client import Delta, Finish, Submission, TokenLogprobs
from inferengine.client.output import error_of
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text import TextStream, Tokenizer

logger = logging.getLogger(__name__)

USAGE_WAIT_S = 1.0  # for the engine's account of a choice that a stop string ended here
CONTEXT_TOKENS = 4  # of the prompt, for decoders that look at what precedes a text


class Submitter(Protocol):
    """What a generation needs of an AsyncClient or EnginePool."""

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """Submit one prompt, given as token ids or as one of `arguments`."""
        ...


class TokenSource(Protocol):
    """Where a choice's tokens come from: a Stream, or a view on a log that several readers share."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at the stop string `text`, after `num_tokens` tokens."""
        ...


class Piece(NamedTuple):
    """What is new in one choice. `finish_reason` (stop, length, abort) and `stop_reason` (the stop string or token id)
    come with the last piece, `error` instead of them when the choice failed."""

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


class Usage(NamedTuple):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_tokens: int = 0  # of the completion, guessed before
    rejected_tokens: int = 0  # guesses that were wrong


def guess_counts(counted: Usage | Finish) -> dict[str, int]:
    """What guessing ahead brought, in OpenAI's words; empty where the engine did not guess."""
    if not counted.accepted_tokens and not counted.rejected_tokens:
        return {}
    return {
        "accepted_prediction_tokens": counted.accepted_tokens,
        "rejected_prediction_tokens": counted.rejected_tokens,
    }


@dataclass(frozen=True)
class Options:
    """What travels with every prompt of a call besides the sampling parameters."""

    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    deadline_s: float | None = None
    label: str = ""
    continues_prompt: bool = True  # the output goes on where the prompt ends (completions), or is a text of its own
    grammar: GrammarSpec | None = None
    grammar_field: str = "grammar"  # the request's name for it: a grammar that does not compile is refused under it
    prompt_field: str = "prompt"  # likewise for what the prompt was made of
    resubmit: bool = True  # goes on when its engine is lost


class Choice:
    """One stream of output tokens and the text made of it."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        stream: TokenSource,
        text: TextStream,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: what the request calls the engine's fields, where it calls them otherwise."""
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after the first
        self._stream = stream
        self._text = text
        self._names = names or {}
        self._ended = False

    async def pieces(self, *, per_token: bool) -> AsyncIterator[list[Piece]]:
        """Until the last piece: all that has arrived since the last time, one piece for each token or one in all."""
        async for delta in self._stream:
            pieces = self.read(delta, per_token=per_token)
            if pieces:
                yield pieces
            if self._ended:
                return

    @property
    def source(self) -> TokenSource:
        """Where its deltas come from, for who gives them to `read` himself; those after the last piece are dropped."""
        return self._stream

    def read(self, delta: Delta, *, per_token: bool) -> list[Piece]:
        """The pieces of one delta; after a stop string the rest is dropped and the stream ended."""
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
            self.finish = self.finish or finish  # its end came with what follows a stop string
            return pieces
        return [self._piece(token_ids, delta.logprobs, finish)]

    async def settle(self) -> None:
        """Of one that a stop string ended here: wait for the engine's own account, which has what was cached."""
        if not self._ended or self.finish is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(USAGE_WAIT_S):
                async for delta in self._stream:
                    self.finish = delta.finish

    @property
    def is_plain(self) -> bool:
        """No stop string is looked for: what a token says is settled by those before it."""
        return self._text.is_plain

    def read_plain(self, token_id: int) -> str:
        """The text of one token in the middle of a plain choice: `read` without its records, for the many."""
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


class Generation:
    """The choices of one API call: `n` for each prompt, numbered through."""

    def __init__(
        self,
        engine: Submitter,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: Options,
    ) -> None:
        """Submits everything at once. Raises InferEngineError when no engine can be asked; then nothing runs on."""
        self.prompts = prompts
        self._names = {"grammar": options.grammar_field, "prompt": options.prompt_field}
        self.submissions: list[Submission] = []
        self.choices: list[Choice] = []
        self.error: InferEngineError | None = None
        try:
            for prompt_ids in prompts:
                submission = engine.submit(
                    prompt_ids,
                    params,
                    priority=options.priority,
                    tenant=options.tenant,
                    salt=options.salt,
                    deadline_s=options.deadline_s,
                    label=options.label,
                    grammar=options.grammar,
                    resubmit=options.resubmit,
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
                    self.choices.append(Choice(len(self.choices), prompt_ids, stream, text, self._names))
        except BaseException:
            self.cancel()
            raise

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts. Raises its refusal, after cancelling the others."""
        try:
            for submission in self.submissions:
                await submission.accepted()
        except InferEngineError as error:
            self.cancel()
            error.field = self._names.get(error.field or "", error.field)
            raise self.error or error from None

    async def collect(self) -> list[Output]:
        """All choices to their end. Raises InferEngineError when one fails, after cancelling the others."""
        outputs: list[Output] = []
        for choice in self.choices:  # whichever order they end in: what arrives meanwhile waits in its collector
            output = Output(choice)
            async for pieces in choice.pieces(per_token=False):
                output.add(pieces)
            outputs.append(output)
            if output.error is not None:
                self.cancel()
                raise self.error or output.error
        return outputs

    async def settle(self) -> None:
        """After the last piece and before `usage`: see `Choice.settle`."""
        for choice in self.choices:
            await choice.settle()

    async def merged(self) -> AsyncIterator[tuple[Choice, list[Piece]]]:
        """Pieces of all choices, one for each token, in the order of their arrival."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            async for pieces in choice.pieces(per_token=True):
                yield choice, pieces
            return
        arrived: asyncio.Queue[tuple[Choice, list[Piece]]] = asyncio.Queue()

        async def forward(choice: Choice) -> None:
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
        """Tokens of the call as far as it has come."""
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]  # choices of one prompt share what was cached
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        return Usage(
            sum(map(len, self.prompts)),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.finish.cached_tokens for choice in firsts if choice.finish is not None),
            sum(finish.accepted_tokens for finish in ends),
            sum(finish.rejected_tokens for finish in ends),
        )

    def cancel(self) -> None:
        """End it in the engine; whoever reads sees `abort`. Any number of times."""
        for submission in self.submissions:
            submission.cancel()

    def abandon(self, error: InferEngineError) -> None:
        """End it on this side at once, whatever the engine does: readers get `error`."""
        self.error = error
        for submission in self.submissions:
            submission.abandon(error)


class Output:
    """The whole output of one choice."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: InferEngineError | None = None
        self._parts: list[str] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append pieces of the choice; the last one sets `text`, the finish and stop reasons and `error`."""
        for piece in pieces:
            self._parts.append(piece.text)
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs or ()
            if piece.is_last:
                self.text = "".join(self._parts)
                self.finish_reason, self.stop_reason, self.error = piece.finish_reason, piece.stop_reason, piece.error
