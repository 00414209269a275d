"""KV events for cache-aware routers, as vLLM publishes them: `[topic, sequence number, msgpack [time, events, rank]]`.

The sequence number is 8 bytes, big-endian, from 0. Each event is a map whose `type` names it (an array before vLLM
0.28), and a block's hash is an integer of 64 bits, the low ones of its SHA-256: what vLLM sends unless told otherwise,
and what every reader takes. Replayed batches have their topic too, as vLLM 0.32 and llm-d's router have it. Source:
vllm/distributed/kv_events.py and v1/core/kv_cache_utils.py; llm-d-router pkg/kvevents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from inferengine.core.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from inferengine.wire.messages import Frames, pack

REPLAY_BATCHES = 10_000


class KVEventPublisher:
    """Numbers batches and keeps the latest for replay. Only the I/O thread comes here."""

    def __init__(
        self,
        engine: str,
        model: str,
        publish: Callable[[Frames], None],
        adapters: Mapping[str, int],
        clock: Callable[[], float] = time.time,
        *,
        topic: str = "",
    ) -> None:
        """`adapters`: the numbers of the LoRA adapters by name, kept up to date by its owner. `topic` empty: made of
        the names."""
        self._adapters = adapters
        self.topic = (topic or f"kv@{engine}@{model}").encode()
        self._publish = publish
        self._clock = clock
        self._next = 0
        self._batches: deque[Frames] = deque(maxlen=REPLAY_BATCHES)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish one batch: what one step changed."""
        payload = pack([self._clock(), [self._to_map(event) for event in events], 0])
        frames = [self.topic, self._next.to_bytes(8, "big"), payload]
        self._next += 1
        self._batches.append(frames)
        self._publish(frames)

    def replay(self, start: int) -> list[Frames]:
        """Return the batches from `start` on, as far as they are kept."""
        oldest = self._next - len(self._batches)
        return list(islice(self._batches, max(0, start - oldest), None))

    def _to_map(self, event: KVEvent) -> dict[str, Any]:
        match event:
            case BlockStored(hashes, parent, token_ids, block_size, adapter):
                return {
                    "type": "BlockStored",
                    "block_hashes": [_published(digest) for digest in hashes],
                    "parent_block_hash": None if parent is None else _published(parent),
                    "token_ids": token_ids,
                    "block_size": block_size,
                    "lora_id": adapter or None,
                    "medium": "GPU",
                    "lora_name": self._adapter_name(adapter),
                }
            case BlockRemoved(hashes):
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [_published(digest) for digest in hashes],
                    "medium": "GPU",
                }
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}

    def _adapter_name(self, adapter: int) -> str | None:
        if not adapter:
            return None
        return next((name for name, number in self._adapters.items() if number == adapter), f"adapter {adapter}")


def _published(digest: bytes) -> int:
    """Return the low 64 bits of a hash, as vllm.v1.core.kv_cache_utils.maybe_convert_block_hash does."""
    return int.from_bytes(digest[-8:], "big")
