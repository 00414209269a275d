"""One choice on its way to a socket: from the log's news to a frame, without a task's turn for each token.

A task comes in only where something has to be waited for: room in the socket or the client's window, and the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from frontends.common.generation import Choice, Piece
from frontends.common.resumable.request_log import ChoiceLog
from frontends.websocket.generate_params import MessageText, Told
from frontends.websocket.send_channel import Channel
from inferengine.client import Finish, TokenLogprobs
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream, Tokenizer


class Wanted(NamedTuple):
    """What a client asked to be told of each choice of a request."""

    name: str  # of the request on this socket
    request_id: str
    params: SamplingParams
    context_ids: Sequence[int]
    told: Told
    return_token_ids: bool


class LastPiece(NamedTuple):
    """The end of a choice, which the done frame tells. `finish` is None where a stop string came first."""

    piece: Piece
    extra: dict[str, Any]
    finish: Finish | None


class ChoiceWriter:
    """Writes one choice's delta frames. `run` returns what the done frame has to tell."""

    def __init__(
        self, wanted: Wanted, index: int, cursor: int, log: ChoiceLog, channel: Channel, tokenizer: Tokenizer
    ) -> None:
        """`cursor`: tokens that the client has already; their text is made and dropped."""
        params, told = wanted.params, wanted.told
        text = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens and not told.reading.keeps_special_tokens,
            min_tokens=params.min_tokens,
            context_ids=wanted.context_ids,
        )
        self.index = index
        self._wanted = wanted
        self._log = log
        self._view = log.view(cursor)
        self._choice = Choice(index, (), self._view, text)
        self._channel = channel
        self._head = channel.delta_head(wanted.name, index)
        self._message = None if told.reading.is_plain else MessageText(told, wanted.request_id, index)
        self._repeats = cursor > 0  # the first piece ends at the cursor: the client has its text
        self._has_extras = wanted.return_token_ids or params.logprobs is not None or self._message is not None
        self._is_plain = not self._has_extras and self._choice.is_plain
        self._last: LastPiece | None = None
        self._failure: BaseException | None = None
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> LastPiece:
        """Until the last piece. Raises the error that ended the choice, and SocketGone."""
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
                    await self._channel.room()
                    self._log.catch_up()
                    if self._view.has_news:
                        self._write()
        finally:
            self._left = True
        return self._last

    def _on_news(self) -> None:
        """In the turn of the engine's news."""
        if self._left:
            return
        if self._channel.is_braked:
            self._wake()
            return
        try:
            while self._last is None and self._view.has_news:  # twice, where the first piece ends at the cursor
                self._write()
        except Exception as error:
            self._failure = error
        if self._last is None and self._failure is None:
            self._log.when_news(self._on_news)
        else:
            self._wake()

    def _write(self) -> None:
        """All that is new, as one frame. Only when there is news and room."""
        if self._is_plain and not self._repeats and (token_id := self._view.take_one()) is not None:
            text = self._choice.read_plain(token_id)
            if text:
                self._channel.delta(self._head, self._choice.num_tokens, text)
            return
        (piece,) = self._choice.read(self._view.take(), per_token=False)
        if piece.error is not None:
            raise piece.error
        beside: dict[str, Any] = {}
        if self._message is not None:
            piece, beside = self._message.read(piece)
        if self._repeats:
            self._repeats, piece, beside = False, piece._replace(text="", token_ids=[], logprobs=None), {}
            if not piece.is_last:
                return
        extra = self._extra(piece, beside) if self._has_extras else {}
        if piece.is_last:
            self._last = LastPiece(piece, extra, self._choice.finish)
        elif extra:
            self._channel.delta_with(self._wanted.name, self.index, piece.num_tokens, piece.text, extra)
        elif piece.text:
            self._channel.delta(self._head, piece.num_tokens, piece.text)

    def _extra(self, piece: Piece, beside: dict[str, Any]) -> dict[str, Any]:
        """What a frame has beside the text."""
        extra = dict(beside)
        if self._wanted.return_token_ids:
            extra["token_ids"] = list(piece.token_ids)
        if piece.logprobs is not None:
            extra["logprobs"] = [_logprob(row) for row in piece.logprobs]
        return extra

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _logprob(row: TokenLogprobs) -> dict[str, Any]:
    return {"logprob": row.logprob, "rank": row.rank, "top": [*zip(row.top_ids, row.top_logprobs, strict=True)]}
