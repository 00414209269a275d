"""Forks: the further choices of an `n > 1` request wait until the first one has computed the prompt that they share."""

from __future__ import annotations

from collections.abc import Iterator

from inferengine.core.sequence import Sequence


class ForkRoom:
    """Holds sequences that are not yet in the waiting queue, by the uid of the sequence they wait for."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[Sequence]] = {}
        self._num_held = 0

    def hold(self, parent_uid: int, sequence: Sequence) -> None:
        sequence.leader = parent_uid
        self._by_parent.setdefault(parent_uid, []).append(sequence)
        self._num_held += 1

    def holds(self, sequence: Sequence) -> bool:
        parent = sequence.leader
        return parent is not None and sequence in self._by_parent.get(parent, ())

    def release(self, parent_uid: int) -> list[Sequence]:
        """The sequences that waited for this one, in order."""
        released = self._by_parent.pop(parent_uid, [])
        self._num_held -= len(released)
        return released

    def remove(self, sequence: Sequence) -> None:
        parent = sequence.leader
        if parent is None:
            raise RuntimeError(f"{sequence} is no fork")
        self._by_parent[parent].remove(sequence)
        self._num_held -= 1
        if not self._by_parent[parent]:
            del self._by_parent[parent]

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_parent.values():
            yield from sequences
