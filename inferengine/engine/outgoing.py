"""What goes to one peer in one STEP: the news of its streams, from their cursors on, in columns."""

from __future__ import annotations

from array import array
from typing import Any

from inferengine.engine.output_log import Subscription
from inferengine.wire import codec
from inferengine.wire.messages import Done

ENOUGH_BYTES = 4 * 1024 * 1024  # of embeddings in one message: what ends beside them comes in the next


class Outgoing:
    """Collects streams until it is full."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._streams, self._counts, self._tokens = array("I"), array("I"), array("I")
        self._done: list[Done] = []
        self._text: list[tuple[int, str]] = []
        self._logprobs: list[tuple[int, list[Any]]] = []
        self._prompts: list[tuple[int, list[Any]]] = []
        self._embeddings: list[tuple[int, bytes]] = []
        self._embedding_bytes = 0

    @property
    def full(self) -> bool:
        return self._embedding_bytes >= ENOUGH_BYTES

    def add(self, subscription: Subscription) -> None:
        """All that this stream has not been sent."""
        log, stream = subscription.log, subscription.stream
        self.subscriptions.append(subscription)
        if subscription.wants_tokens and (count := len(log.tokens) - subscription.cursor) > 0:
            self._streams.append(stream)
            self._counts.append(count)
            self._tokens.extend(log.tokens[subscription.cursor :])
        if log.logprobs is not None and (rows := log.logprobs[subscription.cursor :]):
            self._logprobs.append((stream, rows))
        if log.prompt_logprobs and not subscription.cursor:
            self._prompts.append((stream, log.prompt_logprobs))
        if subscription.wants_text and log.text is not None and (new := log.text.text[subscription.characters :]):
            self._text.append((stream, new))
        if log.ended is not None:
            self._done.append(subscription.terminal_row())
            if log.embedding is not None:
                self._embeddings.append((stream, log.embedding))
                self._embedding_bytes += len(log.embedding)

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
