"""Jobs: which grammar is compiled next, and for how long. New ones go first, for a short time.

A grammar that takes 5 ms must not wait for one that takes seconds, and a client that sends many slow ones must not
delay the others. So each is tried for a short time in a lane for first tries; what is not done by then starts over in a
slower lane with more time. Within a lane tenants take turns. Pure: no processes and no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

QUICK_S = 0.05  # of processor time; most grammars take less
SECOND_S = 0.3
QUICK_LANES = 1  # processes at once for first tries
SLOW_LANES = 2  # and for the others


class Job(NamedTuple):
    """A grammar to be tried out. `level`: how many times its time was not enough."""

    id: int
    tenant: str
    spec: list[Any]
    level: int = 0


class Jobs:
    """All that wait and all that run. `limit_s`: the processor time after which a grammar is given up."""

    def __init__(self, limit_s: float) -> None:
        self.slices = [*(short for short in (QUICK_S, SECOND_S) if short < limit_s), limit_s]
        self.running: dict[int, Job] = {}
        self._waiting: list[OrderedDict[str, deque[Job]]] = [OrderedDict() for _ in self.slices]

    def add(self, job: Job) -> None:
        """Queue a job at its level."""
        self._waiting[job.level].setdefault(job.tenant, deque()).append(job)

    def next(self) -> Job | None:
        """Take the one that should start now, if there is room for any."""
        num_slow = sum(job.level > 0 for job in self.running.values())
        has_quick_room = len(self.running) - num_slow < QUICK_LANES
        for level, waiting in enumerate(self._waiting):
            if not waiting or not (num_slow < SLOW_LANES if level else has_quick_room):
                continue
            tenant, queue = waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                waiting[tenant] = queue  # behind the others
            self.running[job.id] = job
            return job
        return None

    def out_of_time(self, id: int) -> Job | None:
        """It has used up its time: the job it waits as now, or None when that was all it gets."""
        job = self.running.pop(id)
        if job.level + 1 == len(self.slices):
            return None
        job = job._replace(level=job.level + 1)
        self.add(job)
        return job

    def done(self, id: int) -> None:
        """A running job has ended: its lane is free."""
        self.running.pop(id, None)

    def drop(self, id: int) -> None:
        """Nobody waits for it any more. One that runs stays until it is `done`."""
        for waiting in self._waiting:
            for tenant, queue in list(waiting.items()):
                kept = deque(job for job in queue if job.id != id)
                if kept:
                    waiting[tenant] = kept
                else:
                    del waiting[tenant]
