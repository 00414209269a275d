"""What goes to one peer in one STEP: the news of its streams, from their cursors on, in columns."""

from __future__ import annotations

from array import array
from typing import Any

from inferengine.core.plan import TokenLogprobs
from inferengine.engine.output_log import Subscription
from inferengine.wire import codec
from inferengine.wire.messages import Done

ENOUGH_BYTES = 4 * 1024 * 1024  # in one message, of what is more than tokens: the others come in the next
BYTES_PER_ROW, BYTES_PER_ALTERNATIVE = 16, 13  # of log-probabilities at one position


class Outgoing:
    """Collects streams until it is full."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self.ends: list[int] = []  # of each: tokens that its reader has with this message
        self._streams, self._counts, self._tokens = array("I"), array("I"), array("I")
        self._done: list[Done] = []
        self._text: list[tuple[int, str]] = []
        self._logprobs: list[tuple[int, list[Any]]] = []
        self._prompts: list[tuple[int, list[Any]]] = []
        self._embeddings: list[tuple[int, bytes]] = []
        self._num_bytes = 0

    @property
    def full(self) -> bool:
        return self._num_bytes >= ENOUGH_BYTES

    def add(self, subscription: Subscription) -> None:
        """All that this stream has not been sent, as far as its log-probabilities have room."""
        log, stream = subscription.log, subscription.stream
        begin, end = subscription.cursor, len(log.tokens)
        if log.logprobs and end > begin:
            row_bytes = _size(log.logprobs[-1:])
            end = min(end, begin + 1 + max(0, ENOUGH_BYTES - self._num_bytes) // row_bytes)
        self.subscriptions.append(subscription)
        self.ends.append(end)
        if subscription.wants_tokens and end > begin:
            self._streams.append(stream)
            self._counts.append(end - begin)
            self._tokens.extend(log.tokens[begin:end])
        if log.logprobs is not None and (rows := log.logprobs[begin:end]):
            self._logprobs.append((stream, rows))
            self._num_bytes += _size(rows)
        if log.prompt_logprobs and not subscription.cursor:
            self._prompts.append((stream, log.prompt_logprobs))
            self._num_bytes += _size(log.prompt_logprobs)
        if end < len(log.tokens):
            return  # its text and its end come with its last tokens: a reader never has text without the tokens of it
        if subscription.ahead:
            pass  # the log has ended without the tokens that its reader holds
        elif subscription.wants_text and log.text is not None and (new := log.text.text[subscription.characters :]):
            self._text.append((stream, new))
            self._num_bytes += len(new)
        if log.ended is not None:
            self._done.append(subscription.terminal_row())
            if log.embedding is not None:
                self._embeddings.append((stream, log.embedding))
                self._num_bytes += len(log.embedding)

    def frames(self, seq: int, step: int) -> codec.Frames:
        extras: dict[str, Any] = {
            name: rows
            for name, rows in (
                ("text", self._text),
                ("logprobs", self._logprobs),
                ("prompt_logprobs", self._prompts),
                ("embedding", self._embeddings),
            )
            if rows
        }
        columns = (codec.to_u32(self._streams), codec.to_u32(self._counts), self._done, extras or None)
        return codec.step_frames(seq, step, *columns, codec.to_u32(self._tokens))


def _size(rows: list[TokenLogprobs]) -> int:
    """Bytes of log-probabilities in a message, about."""
    return len(rows) * (BYTES_PER_ROW + BYTES_PER_ALTERNATIVE * len(rows[-1].top_ids))
