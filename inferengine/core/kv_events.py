"""What a cache-aware router wants to know: which prefixes this engine holds. Shaped as vLLM publishes them."""

from __future__ import annotations

from typing import NamedTuple


class BlockStored(NamedTuple):
    """A block with these tokens, after `parent_block_hash` (None at the beginning), can be reused by requests with the
    same LoRA adapter (0: none)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    adapter: int = 0


class BlockRemoved(NamedTuple):
    """These blocks are gone."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """Every block is gone."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
