"""Kept: what has ended and waits for somebody who attaches, for a while and no more than so many bytes.

When it is too much, the tenant goes first that keeps the most, its oldest before its newer ones: one that asks for much
(log-probabilities of long prompts) costs the others nothing that they might come back for.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from inferengine.engine.output_log import Submission


class _Item(NamedTuple):
    due_s: float
    submission: Submission
    num_bytes: int


class Kept:
    """Ended submissions. They are added with a moment that is never before that of one added earlier."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, deque[_Item]] = {}
        self._sizes: dict[str, int] = {}
        self._due: deque[tuple[float, str]] = deque()  # one for each item; those of items dropped before are stale

    def add(self, submission: Submission, due_s: float) -> None:
        tenant = submission.tenant
        item = _Item(due_s, submission, submission.num_bytes)
        self._by_tenant.setdefault(tenant, deque()).append(item)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + item.num_bytes
        self.num_bytes += item.num_bytes
        self._due.append((due_s, tenant))

    def expire(self, now: float) -> list[Submission]:
        """What is kept no longer: it is due, or too much."""
        gone: list[Submission] = []
        while self._due and self._due[0][0] <= now:
            due_s, tenant = self._due.popleft()
            items = self._by_tenant.get(tenant)
            if items and items[0].due_s <= due_s:
                gone.append(self._drop(tenant))
        while self.num_bytes > self._max_bytes:
            gone.append(self._drop(max(self._sizes, key=self._sizes.__getitem__)))
        return gone

    def _drop(self, tenant: str) -> Submission:
        """The oldest of this tenant."""
        items = self._by_tenant[tenant]
        item = items.popleft()
        self.num_bytes -= item.num_bytes
        self._sizes[tenant] -= item.num_bytes
        if not items:
            del self._by_tenant[tenant], self._sizes[tenant]
        return item.submission
