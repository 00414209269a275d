"""StateSnapshots: which snapshot on the device holds the state after which prefix, of models with recurrences or
convolutions. The tensors are the executor's (models/recurrent.py).

A state is that of the latest token alone. So a prefix hit needs, beside the KV blocks of the prefix, a copy of the
state at its end. The device has room for a fixed number of copies. Each is taken at a block boundary and known by the
hash of the block that ends there (core/kv_cache.py). Where (Marconi, Pan et al. 2024, has the first two):

- at the last boundary that an equal prompt can go on from;
- where a prompt parts from the blocks that are cached: the end of a beginning that several requests share;
- at the last boundary of each other chunk of a prompt: evicted first, unless a request finds it;
- at each boundary of an output, of which a running request keeps the newest.

Else the least recently used is evicted. Nothing holds a snapshot that a request begins from: the device executes plans
in order, and within one it reads snapshots before it writes any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inferengine.core.sequence import Sequence


class Reservation(NamedTuple):
    """A snapshot of an output whose tokens the host does not know yet, so that it has no hash."""

    snapshot: int
    num_tokens: int


class StateSnapshots:
    """Snapshots 0 … num_snapshots - 1: each is free, known by a hash, or reserved for a running sequence."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_evictions = 0
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()  # the next to be evicted comes first
        self._hashes: dict[int, bytes] = {}
        self._reserved: dict[Sequence, Reservation] = {}
        self._newest: dict[Sequence, bytes] = {}  # of its output, until the next takes its place

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_hash

    @property
    def num_known(self) -> int:
        """Snapshots that a request can begin from."""
        return len(self._by_hash)

    @property
    def num_reserved(self) -> int:
        """Snapshots of running sequences that have no hash yet."""
        return len(self._reserved)

    def longest(self, digests: SequenceOf[bytes], count: int) -> int:
        """Return the most blocks, of the first `count`, after which there is a snapshot."""
        return next((length for length in range(count, 0, -1) if digests[length - 1] in self._by_hash), 0)

    def use(self, digest: bytes) -> int:
        """Return the snapshot of a hash that there is, which stays even if it is the newest of an output."""
        self._by_hash.move_to_end(digest)
        self._newest = {owner: newest for owner, newest in self._newest.items() if newest != digest}
        return self._by_hash[digest]

    def save(self, digest: bytes, *, is_lasting: bool) -> int | None:
        """Return the snapshot that the step being planned writes. None: there is one, or all are reserved.

        One that is not `is_lasting` is the next to be evicted."""
        if digest not in self._by_hash:
            snapshot = self._take()
            if snapshot is not None:
                self._insert(digest, snapshot)
                self._by_hash.move_to_end(digest, last=is_lasting)
            return snapshot
        if is_lasting:
            self._by_hash.move_to_end(digest)
        return None

    def reserve(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Return the snapshot for the state of a running sequence after so many tokens. None: it has one that waits for
        its hash, or all are reserved."""
        if sequence in self._reserved:
            return None
        snapshot = self._take()
        if snapshot is not None:
            self._reserved[sequence] = Reservation(snapshot, num_tokens)
        return snapshot

    def settle(self, sequence: Sequence, block_size: int) -> None:
        """Enter the reserved snapshot of a sequence whose blocks up to there are hashed; the one before is free."""
        reserved = self._reserved.get(sequence)
        if reserved is None or reserved.num_tokens > len(sequence.block_hashes) * block_size:
            return
        del self._reserved[sequence]
        if (before := self._newest.pop(sequence, None)) is not None:
            self.drop(before)
        digest = sequence.block_hashes[reserved.num_tokens // block_size - 1]
        if digest in self._by_hash:  # of another sequence with the same tokens
            self._free.append(reserved.snapshot)
        else:
            self._insert(digest, reserved.snapshot)
            self._newest[sequence] = digest

    def release(self, sequence: Sequence) -> None:
        """Free what is reserved for a sequence that no longer runs. Its newest snapshot stays until it is evicted."""
        reserved = self._reserved.pop(sequence, None)
        if reserved is not None:
            self._free.append(reserved.snapshot)
        self._newest.pop(sequence, None)

    def drop(self, digest: bytes) -> None:
        """Free the snapshot of a hash, if there is one."""
        snapshot = self._by_hash.pop(digest, None)
        if snapshot is not None:
            del self._hashes[snapshot]
            self._free.append(snapshot)

    def withdraw(self, snapshots: Iterable[int]) -> None:
        """Free those of these snapshots that have a hash: the step that wrote them has failed."""
        for snapshot in snapshots:
            if snapshot in self._hashes:
                self.drop(self._hashes[snapshot])

    def clear(self) -> None:
        """Free all snapshots that have a hash."""
        self.withdraw(list(self._hashes))

    def check(self) -> None:
        """Check that every snapshot is exactly one of free, known and reserved. Raises RuntimeError."""
        reserved = [each.snapshot for each in self._reserved.values()]
        if sorted([*self._free, *self._by_hash.values(), *reserved]) != list(range(self.num_snapshots)):
            raise RuntimeError(
                f"{len(self._free)} free, {len(self._by_hash)} known and {len(reserved)} reserved snapshots are not "
                f"all {self.num_snapshots}"
            )
        if {digest: snapshot for snapshot, digest in self._hashes.items()} != dict(self._by_hash):
            raise RuntimeError("the hashes of snapshots and the snapshots of hashes disagree")

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._by_hash:
            return None
        _, snapshot = self._by_hash.popitem(last=False)
        del self._hashes[snapshot]
        self.num_evictions += 1
        return snapshot

    def _insert(self, digest: bytes, snapshot: int) -> None:
        self._by_hash[digest] = snapshot
        self._hashes[snapshot] = digest
