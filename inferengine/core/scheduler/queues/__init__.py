"""The order in which waiting sequences are admitted: one policy is a class and a line in POLICIES."""

from __future__ import annotations

from collections.abc import Callable

from inferengine.core.scheduler.queues.fair_share import FairShare
from inferengine.core.scheduler.queues.fcfs import FirstComeFirstServed, StaticBatch
from inferengine.core.scheduler.queues.priority import OrderedQueue, deadline_key, priority_key, shortest_key
from inferengine.core.scheduler.queues.waiting_queue import WaitingQueue

__all__ = ["POLICIES", "WaitingQueue"]

POLICIES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
    "priority": lambda: OrderedQueue(priority_key),
    "shortest": lambda: OrderedQueue(shortest_key),
    "deadline": lambda: OrderedQueue(deadline_key),
    "fair": FairShare,
    "static": StaticBatch,
}
