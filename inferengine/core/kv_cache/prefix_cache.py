"""PrefixCache: finds the blocks that already hold the KV of a prefix.

A full block is known by SHA-256 over (the hash of the block before it, its token ids); the chain starts from a salt, so
tenants with different salts never share a block and cannot probe for each other's prompts. The map holds one block per
hash; a second block with the same content stays private to its sequence.

KVEvent: changes of the cache for cache-aware routers, in the fields that vLLM publishes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple


def root_hash(salt: bytes, adapter: int = 0) -> bytes:
    """Return the first hash of a chain. An adapter has a chain of its own, which no salt can lead to."""
    if adapter:
        return hashlib.sha256(b"inferengine prefix cache of adapter %d\0" % adapter + salt).digest()
    return hashlib.sha256(b"inferengine prefix cache\0" + salt).digest()


def block_hash(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Return the hash of a full block: of its tokens and, through `parent`, of everything before them."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class PrefixCache:
    """Hash -> block of one KV group. Knows nothing about who holds the blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_by_hash

    def block_ids(self) -> list[int]:
        """Return every block with cached content."""
        return list(self._block_by_hash.values())

    def get(self, digest: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._block_by_hash.get(digest)

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Remember the block. False when another block already holds this content."""
        if digest in self._block_by_hash:
            return False
        self._block_by_hash[digest] = block_id
        self._hash_by_block[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Forget a block whose content is about to be overwritten. Returns the hash that is gone."""
        digest = self._hash_by_block[block_id]
        if digest is None:
            raise RuntimeError(f"block {block_id} was evicted but is not cached")
        self._hash_by_block[block_id] = None
        del self._block_by_hash[digest]
        return digest

    def clear(self) -> int:
        """Forget everything. Returns the number of blocks forgotten."""
        count = len(self._block_by_hash)
        for block_id in self._block_by_hash.values():
            self._hash_by_block[block_id] = None
        self._block_by_hash.clear()
        return count


class BlockStored(NamedTuple):
    """A block with these tokens, after `parent_block_hash` (None at the beginning), can be reused by requests with the
    same LoRA adapter (0: none)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    adapter: int = 0


class BlockRemoved(NamedTuple):
    """These blocks can no longer be reused."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """No block can be reused any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
