"""Write one choice to a socket: new output becomes a frame in the callback, without a task switch for each token.

A task runs only to wait: for room in the socket or in the client's window, and for the end. The text of a conversation
is split into the answer, the reasoning and the tool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from frontends.common.chat import finish_reason
from frontends.common.generation import Choice, Piece, finite_logprob, token_text
from frontends.common.resumable import ChoiceLog
from frontends.websocket.generate_params import OutputOptions
from frontends.websocket.send_channel import SendChannel
from inferengine.client import Finish, TokenLogprobs
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream, Tokenizer
from inferengine.text.tool_parsers.base import CallDelta, Content


class ChoiceOptions(NamedTuple):
    """How the choices of a request are written."""

    name: str  # the request's id on this socket
    request_id: str
    params: SamplingParams
    context_ids: Sequence[int]
    output: OutputOptions
    return_token_ids: bool


class ChoiceEnd(NamedTuple):
    """The end of a choice, for its done frame. `finish` is None where a stop string ended it here."""

    piece: Piece
    extra: dict[str, Any]
    finish: Finish | None


class ChoiceWriter:
    """Writes a choice's delta frames. `run` returns the content of its done frame."""

    def __init__(
        self,
        options: ChoiceOptions,
        index: int,
        cursor: int,
        log: ChoiceLog,
        channel: SendChannel,
        tokenizer: Tokenizer,
    ) -> None:
        """`cursor`: tokens that the client has already; their text is not sent."""
        params, output = options.params, options.output
        text = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens and not output.parser.keeps_special_tokens,
            min_tokens=params.min_tokens,
            context_ids=options.context_ids,
        )
        self.index = index
        self._options = options
        self._tokenizer = tokenizer
        self._log = log
        self._view = log.view(cursor)
        self._choice = Choice(index, (), self._view, text)
        self._channel = channel
        self._head = channel.delta_head(options.name, index)
        self._message = None if output.parser.is_plain else MessageText(output, options.request_id, index)
        self._repeats = cursor > 0  # the first piece ends at the cursor: the client has its text
        self._has_extras = options.return_token_ids or params.logprobs is not None or self._message is not None
        self._is_plain = not self._has_extras and self._choice.is_plain
        self._last: ChoiceEnd | None = None
        self._failure: BaseException | None = None
        self._done = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> ChoiceEnd:
        """Write until the end of the choice. Raises the error that ended it, and SocketGone."""
        loop = asyncio.get_running_loop()
        try:
            while self._last is None:
                self._waiter = loop.create_future()
                if self._view.has_news:
                    self._wake()
                else:
                    self._log.when_news(self._on_news)
                await self._waiter
                if self._failure is not None:
                    raise self._failure
                if self._last is None:  # there was no room
                    await self._channel.wait_for_room()
                    self._log.catch_up()
                    if self._view.has_news:
                        self._write()
        finally:
            self._done = True
        return self._last

    def _on_news(self) -> None:
        """Write new output, in the callback of the message that brought it."""
        if self._done:
            return
        if self._channel.is_full:
            self._wake()
            return
        try:
            while self._last is None and self._view.has_news:  # twice where the first piece ends at the cursor
                self._write()
        except Exception as error:
            self._failure = error
        if self._last is None and self._failure is None:
            self._log.when_news(self._on_news)
        else:
            self._wake()

    def _write(self) -> None:
        """Write all new output as one frame. Only when there is output and room."""
        if self._is_plain and not self._repeats and (token_id := self._view.take_one()) is not None:
            text = self._choice.read_plain(token_id)
            if text:
                self._channel.delta(self._head, self._choice.num_tokens, text)
            return
        (piece,) = self._choice.read(self._view.take(), per_token=False)
        if piece.error is not None:
            raise piece.error
        fields: dict[str, Any] = {}
        if self._message is not None:
            piece, fields = self._message.read(piece)
        if self._repeats:
            self._repeats, piece, fields = False, piece._replace(text="", token_ids=[], logprobs=None), {}
            if not piece.is_last:
                return
        extra = self._extra(piece, fields) if self._has_extras else {}
        if piece.is_last:
            self._last = ChoiceEnd(piece, extra, self._choice.finish)
        elif extra:
            self._channel.delta_with(self._options.name, self.index, piece.num_tokens, piece.text, extra)
        elif piece.text:
            self._channel.delta(self._head, piece.num_tokens, piece.text)

    def _extra(self, piece: Piece, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the frame's fields beside the text."""
        extra = dict(fields)
        if self._options.return_token_ids:
            extra["token_ids"] = list(piece.token_ids)
        if piece.logprobs is not None:
            extra["logprobs"] = [
                _logprob(self._tokenizer, *each) for each in zip(piece.token_ids, piece.logprobs, strict=False)
            ]
        return extra

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class MessageText:
    """Splits one choice's text. `answer_id`: the request's id; ids of tool calls are made from it, so that a resumed
    answer has the same ids."""

    def __init__(self, output: OutputOptions, answer_id: str, choice: int) -> None:
        self._output = output
        self._answer_id = answer_id
        self._choice = choice
        self._reader = output.parser.make_reader()

    def read(self, piece: Piece) -> tuple[Piece, dict[str, Any]]:
        """Return the piece with the answer's text alone, and the other fields of the frame: `reasoning_content` and
        `tool_calls`, as in OpenAI's streamed deltas."""
        text = reasoning = ""
        calls = []
        for part in self._reader.push(piece.text, piece.is_last):
            if isinstance(part, Content):
                text += part.text
            elif isinstance(part, CallDelta):
                calls.append(self._output.parser.call_entry(self._answer_id, self._choice, part))
            elif self._output.include_reasoning:
                reasoning += part.text
        extra: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            extra["tool_calls"] = calls
        reason = finish_reason(piece.finish_reason, self._reader.num_calls)
        return piece._replace(text=text, finish_reason=reason), extra


def _logprob(tokenizer: Tokenizer, token_id: int, row: TokenLogprobs) -> dict[str, Any]:
    top = zip(row.top_ids, map(finite_logprob, row.top_logprobs), strict=True)
    return {
        "logprob": finite_logprob(row.logprob),
        "rank": row.rank,
        "token": token_text(tokenizer, token_id),
        "top": [*top],
        "top_tokens": [token_text(tokenizer, other) for other in row.top_ids],
    }
