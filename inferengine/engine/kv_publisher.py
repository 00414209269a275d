"""KV events for cache-aware routers, as vLLM publishes them: `[topic, sequence number, msgpack [time, events, rank]]`.

The sequence number is 8 bytes, big-endian, from 0; each event is an array that begins with its tag. Source:
vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from inferengine.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from inferengine.wire.codec import Frames, pack

REPLAY_BATCHES = 10_000


class KVPublisher:
    """Numbers batches and keeps the latest for replay. Only the I/O thread comes here."""

    def __init__(
        self, engine: str, model: str, publish: Callable[[Frames], None], clock: Callable[[], float] = time.time
    ) -> None:
        self.topic = f"kv@{engine}@{model}".encode()
        self._publish = publish
        self._clock = clock
        self._next = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """One batch: what one step changed."""
        payload = pack([self._clock(), [_to_array(event) for event in events], None])
        number, self._next = self._next, self._next + 1
        self._batches.append((number, payload))
        self._publish([self.topic, number.to_bytes(8, "big"), payload])

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Batches from `start` on, as far as they are kept."""
        return [(number, payload) for number, payload in self._batches if number >= start]


def _to_array(event: KVEvent) -> list[Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, block_size):
            return ["BlockStored", hashes, parent, token_ids, block_size, None, "GPU"]
        case BlockRemoved(hashes):
            return ["BlockRemoved", hashes, "GPU"]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]
