"""The waiting queue: whether a request may join it, in which order waiting sequences are admitted, and how the request
that makes steps fail is found.

Admission is decided at once, before any work for the request. Pure: the caller (the intake) passes what waits now. An
unlimited queue would only turn overload into timeouts.

A policy is a class and a line in POLICIES:

- FirstComeFirstServed; and StaticBatch, the baseline that continuous batching is measured against.
- OrderedQueue: the sequence with the smallest key first. The key is fixed at arrival, so a heap is enough. Ageing
  without re-sorting: if a sequence's urgency grows by one unit per `ageing_s` of waiting, all waiting sequences gain at
  the same rate, and their order is that of (unaged key + arrival / ageing_s), which does not change with time. So no
  request starves: one that waits long enough is older than anything that can still arrive. Unaged keys are bounded,
  by the model's length or by MOST_LEVELS, so that this is minutes.
- FairShare: equal shares (Virtual Token Counter: Sheng et al., Fairness in Serving Large Language Models, 2024).
  Whose share a request uses is a path of names (`Request.share`): the tenant of its key, or the client's address; the
  address within a tenant, or the user within an address; and so on. The engine is divided between the first names, each
  one's part between the second names below it, and so on: who invents names divides its own part. Each name has a
  counter of its service: its prompt tokens when a request is admitted first, its output tokens as they are generated,
  an output token weighing more than a prompt token because it costs more. A waiting name of which nothing runs is
  admitted before those of which something does; among equals the smallest counter is next. A name that comes back after
  a pause starts no lower than the least served active one: idling earns nothing. Two names that always have work get
  service within a constant of each other. With one name this is first come, first served, in the same order.

FaultIsolationQueue finds the request that makes steps fail, where the executor does not know which one it is. It wraps
the policy's queue, because suspects wait: for their trial, or for the end of the others'. A failed step has lost its
work, not its requests: outputs are logs and a draw is a function of (seed, position), so computing it again gives the
same. All sequences with a row in the failed step are suspects. They run again, all together first (the failure may not
occur again), then in halves. A half that fails is halved again, and the request that fails alone is at fault. Meanwhile
no other request is computed: it would be a suspect, too. This costs at most log2(suspects) + 2 failed steps. If too
many trials in a row fail, no single request is at fault, and all suspects end.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

from inferengine.core.sequence import Sequence, SequenceStatus, Share
from inferengine.errors import InferEngineError, InvalidRequest

# -- admission ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What the engine can take. Lengths in tokens."""

    max_model_len: int
    num_kv_tokens: int  # what the KV pool holds when empty
    max_queued_requests: int
    max_queued_tokens: int
    max_tenant_requests: int = 0  # 0: no limit of its own


def check_prompt(num_prompt: int, limits: AdmissionLimits) -> None:
    """Check a prompt without output, which may take the whole context. Raises InvalidRequest."""
    if num_prompt == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    if num_prompt > limits.max_model_len:
        raise InvalidRequest(
            "prompt",
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}. "
            "Shorten the prompt.",
            code="context_length_exceeded",
        )
    if num_prompt > limits.num_kv_tokens:
        raise InvalidRequest(
            "prompt",
            f"The KV cache holds {limits.num_kv_tokens} tokens; the prompt has {num_prompt}.",
            code="prompt_never_fits",
        )


def resolve_max_tokens(num_prompt: int, max_tokens: int | None, limits: AdmissionLimits, *, min_tokens: int = 0) -> int:
    """Return the output length to run with. None is resolved to what context and pool allow.

    An explicit one is never cut. Raises InvalidRequest if it does not fit, or if `min_tokens` does not.
    """
    if num_prompt == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    room = limits.max_model_len - num_prompt
    if room < 1:
        raise InvalidRequest(
            "prompt",
            f"This model's maximum context length is {limits.max_model_len} tokens, of which one is needed for the "
            f"output; the prompt has {num_prompt}. Shorten the prompt.",
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {num_prompt}, so "
            f"max_tokens may be at most {max(1, min(room, limits.num_kv_tokens - num_prompt))}; got {max_tokens}.",
            code="context_length_exceeded",
        )
    needed = num_prompt + (max_tokens or 1)
    if needed > limits.num_kv_tokens:
        raise InvalidRequest(
            "prompt" if max_tokens is None else "max_tokens",
            f"The KV cache holds {limits.num_kv_tokens} tokens; prompt and output need {needed}.",
            code="prompt_never_fits",
        )
    found = min(room, limits.num_kv_tokens - num_prompt) if max_tokens is None else max_tokens
    if min_tokens > found:
        message = f"The prompt leaves room for {found} tokens; min_tokens is {min_tokens}."
        raise InvalidRequest("min_tokens", message, code="context_length_exceeded")
    return found


def admit(
    num_prompt: int,
    num_choices: int,
    *,
    queued_requests: int,
    queued_tokens: int,
    tokens_per_s: float,
    limits: AdmissionLimits,
    ahead: tuple[int, int] | None = None,
    tenant_requests: int = 0,
    time_left_s: float | None = None,
) -> None:
    """Raise `overloaded`, `rate_limited` or `deadline_exceeded`, each with a time to retry after, or return.

    `tokens_per_s` is the measured rate at which prompts are taken in (0: not known yet), `ahead` the requests and
    prompt tokens that are admitted before this one (None: all that wait), `tenant_requests` how many requests of the
    same tenant have not ended. An empty queue takes any request of a tenant below its limit. A full queue still takes
    requests of a tenant with less than its share of it, up to twice its limits. A deadline that the wait in the queue
    would exceed is refused now: the request would only delay others.
    """
    requests_ahead, tokens_ahead = (queued_requests, queued_tokens) if ahead is None else ahead
    cap = limits.max_tenant_requests
    if cap and tenant_requests + num_choices > cap:
        message = f"This tenant has {tenant_requests} unfinished requests; at most {cap} may be."
        raise InferEngineError("rate_limited", message, field="tenant", retry_after_s=1.0)
    wait_s = tokens_ahead / tokens_per_s if tokens_per_s > 0 else 0.0
    if time_left_s is not None:
        needed_s = wait_s + (num_prompt / tokens_per_s if tokens_per_s > 0 else 0.0)
        if needed_s > time_left_s or time_left_s <= 0:
            message = f"The first token is about {needed_s:.2f} s away, the deadline {max(0.0, time_left_s):.2f} s."
            raise InferEngineError("deadline_exceeded", message, field="deadline", retry_after_s=max(1.0, wait_s))
    if queued_requests == 0:
        return
    tokens = num_prompt * num_choices
    most_requests, most_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if queued_requests + num_choices <= most_requests and queued_tokens + tokens <= most_tokens:
        return
    if requests_ahead + num_choices <= most_requests and tokens_ahead + tokens <= most_tokens:
        most_requests, most_tokens = 2 * most_requests, 2 * most_tokens
    over_requests = queued_requests + num_choices > most_requests
    if not over_requests and queued_tokens + tokens <= most_tokens:
        return
    what = f"{queued_requests} requests" if over_requests else f"{queued_tokens} prompt tokens"
    retry_after_s = min(60.0, max(1.0, wait_s if wait_s else 1.0))
    raise InferEngineError("overloaded", f"The queue is full: {what} wait.", retry_after_s=retry_after_s)


# -- what the scheduler needs of a policy ------------------------------------------------------------------------------


class WaitingQueue(Protocol):
    """Holds WAITING and PREEMPTED sequences. Removal may be lazy, but `len` and `num_tokens` are exact."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting (the output of a preempted sequence may still grow)."""
        ...

    @property
    def shares(self) -> Shares | None:
        """How the engine is shared; None where the policy does not share it."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        ...

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence: it goes before all that were never admitted."""
        ...

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        ...

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence whose status has been set to FINISHED."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class Shares(Protocol):
    """What a queue that shares the engine does beyond the order of waiting."""

    def started(self, sequence: Sequence) -> None:
        """Count the sequence that `pop` returned as running."""
        ...

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as not running; if it waits again, it has been pushed back before."""
        ...

    def claims(self, now: float, num_slots: float, *, has_free_slot: bool) -> Iterator[Claim]:
        """Yield waiting sequences whose share has nothing running, or much less than its slots, while others run.
        Without a free slot only those for which another may give one up. Ask for the next one only while nothing has
        changed."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether more than one share is active."""
        ...

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Return which of these running sequences, in order of admission, is preempted next."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a sequence's share for generated tokens."""
        ...

    def charge_each(self, sequences: SequenceOf[Sequence], layout: int) -> None:
        """Charge one token for each sequence. Equal `layout` means the very same sequences."""
        ...

    def ahead_of(self, share: Share) -> tuple[int, int]:
        """Return about how many requests and prompt tokens are admitted before a new request of this share. In any
        thread."""
        ...


# -- policies ----------------------------------------------------------------------------------------------------------


FEW_REMOVED = 32  # removed entries that are kept in any case


def is_mostly_removed(num_removed: int, length: int) -> bool:
    """Return whether to drop removed entries now instead of at the head of the queue.

    Else cancelled requests would pile up while nothing is admitted. The cost is O(1) per removal, amortised.
    """
    return num_removed > FEW_REMOVED and 2 * num_removed > length


class FirstComeFirstServed:
    """Order of arrival. A removed sequence stays in the queue until it is its head, or most entries are removed."""

    shares = None

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._num_removed = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self._queue.append(sequence)
        self.num_tokens += sequence.num_prompt

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        self._queue.appendleft(sequence)
        self.num_tokens += sequence.num_prompt

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        while self._queue and self._queue[0].status is SequenceStatus.FINISHED:
            self._queue.popleft()
            self._num_removed -= 1
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        sequence = self._queue.popleft()
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        self._num_removed += 1
        self.num_tokens -= sequence.num_prompt
        if is_mostly_removed(self._num_removed, len(self._queue)):
            self._queue = deque(item for item in self if item is not sequence)
            self._num_removed = 0

    def __len__(self) -> int:
        return len(self._queue) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.status is not SequenceStatus.FINISHED)


class StaticBatch(FirstComeFirstServed):
    """Static batching: a batch runs to its last token before the next one is formed."""

    def __init__(self) -> None:
        super().__init__()
        self._formed_at = float("-inf")

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        if num_running == 0:
            self._formed_at = now
        head = super().peek(now, num_running)
        if head is None or head.num_preemptions or now == self._formed_at:
            return head
        return None


PRIORITY_AGEING_S = 10.0  # seconds of waiting that count as one level of priority
MOST_LEVELS = 30  # of priority that count, up and down: who asks for -2^31 is not ahead of all others for ever
TOKEN_AGEING_S = 0.01  # seconds of waiting that count as one token of length
DEFAULT_SLACK_S = 60.0  # assumed deadline, from arrival, of a request without one


def priority_key(sequence: Sequence) -> float:
    """Order by `priority`, lower first, with ageing. Every request is first once it is older than anything that can
    still arrive by 2 * MOST_LEVELS * PRIORITY_AGEING_S."""
    levels = min(max(sequence.request.priority, -MOST_LEVELS), MOST_LEVELS)
    return levels + sequence.request.arrival_s / PRIORITY_AGEING_S


def shortest_key(sequence: Sequence) -> float:
    """Order by the most work that a request can be (prompt + max_tokens), least first, with ageing."""
    work = sequence.num_prompt + sequence.request.max_tokens
    return work + sequence.request.arrival_s / TOKEN_AGEING_S


def deadline_key(sequence: Sequence) -> float:
    """Order by deadline, earliest first (Liu and Layland 1973)."""
    request = sequence.request
    return request.deadline_s if request.deadline_s is not None else request.arrival_s + DEFAULT_SLACK_S


class OrderedQueue:
    """A heap by `key`, ties by arrival. Preempted sequences come before all others, in the order of their keys."""

    shares = None

    def __init__(self, key: Callable[[Sequence], float]) -> None:
        self._key = key
        self._heap: list[tuple[bool, float, int, Sequence]] = []
        self._num_removed = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        heapq.heappush(self._heap, (True, self._key(sequence), sequence.uid, sequence))
        self.num_tokens += sequence.num_prompt

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        heapq.heappush(self._heap, (False, self._key(sequence), sequence.uid, sequence))
        self.num_tokens += sequence.num_prompt

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        while self._heap and self._heap[0][3].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_removed -= 1
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        sequence = heapq.heappop(self._heap)[3]
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        self._num_removed += 1
        self.num_tokens -= sequence.num_prompt
        if is_mostly_removed(self._num_removed, len(self._heap)):
            self._heap = [
                item for item in self._heap if item[3] is not sequence and item[3].status is not SequenceStatus.FINISHED
            ]
            heapq.heapify(self._heap)
            self._num_removed = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (item[3] for item in sorted(self._heap[:]) if item[3].status is not SequenceStatus.FINISHED)


PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CLAIMED_FRACTION = 0.25  # part of its share of slots that a name takes from others; with all of it two would alternate
MAX_IDLE_NAMES = 10_000  # counters kept of names with nothing waiting
MAX_IDLE_PARTS = 100  # the same for each name whose share is divided
FEW_STALE = 32  # outdated heap entries that are kept in any case


class OnlyShare(FirstComeFirstServed):
    """The queue of a name that has one share alone, in order of arrival. What was preempted goes to the head."""

    def __init__(self, share: Share, counter: float) -> None:
        """`counter`: that of the name now. What is added to it from now on is this share's service."""
        super().__init__()
        self.share = share
        self.first_counter = counter


class FairShare:
    """One level of the fair policy: shares what it has between names, and has one queue per name.

    Level `n` goes by the name `n` of `Request.share`. The queue of a name is the next level once it has several shares.
    With one it is in order of arrival: most engines have one share at a time, for which levels would cost time alone.
    """

    def __init__(self, level: int = 0) -> None:
        self._level = level
        self._queues: dict[str, OnlyShare | FairShare] = {}  # none of them is empty
        self._parts: dict[str, OnlyShare | FairShare] = {}  # queues of names with something waiting or running
        self._counters: dict[str, float] = {}
        self._resting: dict[str, None] = {}  # names with a counter and nothing waiting or running
        self._num_running: Counter[str] = Counter()  # names with something running
        self._idle: list[tuple[float, str]] = []  # heap of waiting names of which nothing runs, and of the others:
        self._busy: list[tuple[float, str]] = []  # an entry counts if it is in the right one and equals the counter
        self._floor = 0.0  # where a name starts when no other is active
        self._head: OnlyShare | FairShare | None = None
        self._first: str | None = None  # the next slot is for this name: it has given one up for a claim within it
        self._counts: dict[Share, int] = {}  # tokens by share of the steps of this layout:
        self._layout = -1
        self._length = 0
        self.num_tokens = 0

    @property
    def shares(self) -> FairShare:
        """How the engine is shared: by this queue."""
        return self

    # -- waiting -----------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self._length += 1
        self.num_tokens += sequence.num_prompt
        self._queue_of(sequence.request.share).push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        self._length += 1
        self.num_tokens += sequence.num_prompt
        self._queue_of(sequence.request.share).push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        if len(self._queues) == 1:
            (self._head,) = self._queues.values()
            return self._head.peek(now, num_running)
        if self._first is not None:
            if self._first in self._queues:
                self._head = self._queues[self._first]
                return self._head.peek(now, num_running)
            self._first = None
        name = self._least_served(self._idle, has_running=False)
        if name is None:
            name = self._least_served(self._busy, has_running=True)
        if name is None:
            return None
        self._head = self._queues[name]
        return self._head.peek(now, num_running)

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        if self._head is None:
            raise RuntimeError("pop without peek")
        sequence, self._head, self._first = self._head.pop(), None, None
        self._length -= 1
        self.num_tokens -= sequence.num_prompt
        name = sequence.request.share[self._level]
        if not len(self._queues[name]):
            del self._queues[name]
            if name not in self._num_running:
                self._resting[name] = None  # until `started`
        if not sequence.num_preemptions:
            num_prompt = sequence.num_prompt if sequence.leader is None else 1  # who shares a prompt computes one token
            self._counters[name] += PROMPT_WEIGHT * num_prompt * sequence.token_cost
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        self._length -= 1
        self.num_tokens -= sequence.num_prompt
        name = self._name(sequence)
        queue = self._queues[name]
        queue.remove(sequence)
        if not len(queue):  # only removed entries are left
            del self._queues[name]
            self._sweep()
            self._left(name)

    # -- running -----------------------------------------------------------------------------------------------------

    def started(self, sequence: Sequence) -> None:
        """Count a sequence as running."""
        share = sequence.request.share
        name = share[self._level]
        if name not in self._counters:  # dropped while the sequence waited for fault isolation, not here
            self._lift(name)
        self._resting.pop(name, None)
        part = self._part_of(share)
        num_running = self._num_running[name] = self._num_running[name] + 1
        if num_running == 1 and name in self._queues:
            self._enter(name)
        if isinstance(part, FairShare):
            part.started(sequence)

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as not running."""
        name = sequence.request.share[self._level]
        part = self._parts[name]
        if isinstance(part, FairShare):
            part.stopped(sequence)
        num_running = self._num_running[name] - 1
        if num_running:
            self._num_running[name] = num_running
            return
        del self._num_running[name]
        if name in self._queues:
            self._enter(name)
        else:
            self._left(name)

    def claims(self, now: float, num_slots: float, *, has_free_slot: bool) -> Iterator[Claim]:
        """Yield the next sequence if its name has nothing running or much less than its share, and then those that
        have so little within the share of their name, which gives up the slot itself."""
        if not self._queues or not self._num_running or not (has_free_slot or self.may_give_way):
            return
        fraction = self.fraction()
        if fraction < 1.0:
            sequence = self.peek(now, len(self._num_running))
            if sequence is not None:
                num_running = self._num_running[self._name(sequence)]
                if num_running == 0 or num_running < CLAIMED_FRACTION * fraction * num_slots:
                    yield Claim(sequence, fraction, num_slots, (self,))
        for name, num_running in list(self._num_running.items()):
            queue = self._queues.get(name)
            if isinstance(queue, FairShare) and (has_free_slot or num_running > 1):
                for claim in queue.claims(now, num_slots * fraction, has_free_slot=has_free_slot):
                    yield replace(claim, fraction=claim.fraction * fraction, nodes=(self, *claim.nodes))

    def fraction(self) -> float:
        """Return one over the number of active names."""
        return 1 / max(1, len(self._parts))

    @property
    def is_shared(self) -> bool:
        """Whether more than one share is active."""
        if len(self._parts) != 1:
            return len(self._parts) > 1
        (part,) = self._parts.values()
        return isinstance(part, FairShare) and part.is_shared

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Return the sequence admitted last of the name with the most running, at every level: who floods the engine
        must not preempt the others."""
        if len(self._num_running) > 1:
            count = Counter(map(self._name, candidates))
            heaviest = max(count, key=lambda name: (self._num_running[name], self._counters[name]))
            candidates = [sequence for sequence in candidates if self._name(sequence) == heaviest]
        last = candidates[-1]
        part = self._parts[self._name(last)]
        return part.victim(candidates) if isinstance(part, FairShare) else last

    @property
    def may_give_way(self) -> bool:
        """Whether any name has more than one running."""
        return max(self._num_running.values(), default=0) > 1

    def gives_way(self, sequence: Sequence, claimant: Sequence, num_slots: float) -> bool:
        """Return whether the name of this running sequence keeps its share without it."""
        name, claiming = self._name(sequence), self._name(claimant)
        num_running = self._num_running[name]
        if not self._num_running[claiming]:
            return num_running > 1
        # The less served one is admitted first: the victim must not get its slot back in the same step.
        is_after = (self._counters[claiming], claiming) < (self._counters[name], name)
        return is_after and num_running > self.fraction() * num_slots

    def admit_first(self, sequence: Sequence) -> None:
        """Give the next slot to the name of this sequence."""
        self._first = self._name(sequence)

    # -- counters ----------------------------------------------------------------------------------------------------

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a sequence's share for generated tokens."""
        self._charge(sequence.request.share, OUTPUT_WEIGHT * num_tokens)

    def charge_each(self, sequences: SequenceOf[Sequence], layout: int) -> None:
        """Charge one token for each sequence. Equal `layout` means the very same sequences."""
        if layout != self._layout:
            self._layout = layout
            first = sequences[0].request.share if sequences else None
            if first is not None and all(sequence.request.share == first for sequence in sequences):
                self._counts = {first: len(sequences)}  # half of the time that counting takes
            else:
                self._counts = Counter(sequence.request.share for sequence in sequences)
        for share, count in self._counts.items():
            self._charge(share, OUTPUT_WEIGHT * count)

    def service(self, name: str) -> float:
        """Return the name's counter: weighted tokens, counted from where it last joined."""
        return self._counters.get(name, 0.0)

    def ahead_of(self, share: Share) -> tuple[int, int]:
        """Return about how many requests and prompt tokens come before a new request of this share."""
        queue = self._queues.get(share[self._level])
        if queue is None:
            return 0, 0
        num_names = len(self._queues)
        if isinstance(queue, FairShare):
            num_requests, num_tokens = queue.ahead_of(share)
        else:
            num_requests, num_tokens = (len(queue), queue.num_tokens) if queue.share == share else (0, 0)
        return min(self._length, num_requests * num_names), min(self.num_tokens, num_tokens * num_names)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for name in sorted(self._queues, key=lambda name: (name in self._num_running, self._counters[name], name)):
            yield from self._queues[name]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _name(self, sequence: Sequence) -> str:
        return sequence.request.share[self._level]

    def _charge(self, share: Share, service: float) -> None:
        name = share[self._level]
        counter = self._counters.get(name)
        if counter is None:  # dropped before its last tokens came
            counter, self._resting[name] = 0.0, None
        if name in self._parts:
            part = self._part_of(share)
            if isinstance(part, FairShare):
                part._charge(share, service)
        self._counters[name] = counter + service

    def _queue_of(self, share: Share) -> OnlyShare | FairShare:
        """Return the queue for a new sequence of this share."""
        name = share[self._level]
        if name not in self._queues:
            if name not in self._num_running:
                self._lift(name)
            queue = self._queues[name] = self._part_of(share)
            self._enter(name)
            return queue
        return self._part_of(share)

    def _part_of(self, share: Share) -> OnlyShare | FairShare:
        """Return the queue of a share whose name is active, divided if it has been another share's alone."""
        name = share[self._level]
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = OnlyShare(share, self._counters[name])
        elif isinstance(part, OnlyShare) and part.share != share:
            part = self._divide(name, part)
        return part

    def _divide(self, name: str, only: OnlyShare) -> FairShare:
        """Make the next level for a name that had one share alone."""
        level = FairShare(self._level + 1)
        known = only.share[level._level]
        level._parts[known] = only
        level._counters[known] = self._counters[name] - only.first_counter
        only.first_counter = 0.0
        if name in self._num_running:
            level._num_running[known] = self._num_running[name]
        self._parts[name] = level
        if name in self._queues:
            level._length, level.num_tokens = len(only), only.num_tokens
            level._queues[known] = only
            level._enter(known)
            self._queues[name] = level  # last: another thread may ask `ahead_of`
        return level

    def _enter(self, name: str) -> None:
        """Put a waiting name into the heap that fits whether it has anything running."""
        heapq.heappush(self._busy if name in self._num_running else self._idle, (self._counters[name], name))
        self._sweep()

    def _sweep(self) -> None:
        """Drop outdated heap entries where they are the most: else they would pile up while nothing is admitted."""
        if len(self._idle) + len(self._busy) > FEW_STALE + 2 * len(self._queues):
            waiting = [(self._counters[name], name) for name in self._queues]
            self._idle = [entry for entry in waiting if entry[1] not in self._num_running]
            self._busy = [entry for entry in waiting if entry[1] in self._num_running]
            heapq.heapify(self._idle)
            heapq.heapify(self._busy)

    def _least_served(self, heap: list[tuple[float, str]], *, has_running: bool) -> str | None:
        """Return the waiting name of this heap with the smallest counter; outdated entries before it are dropped."""
        while heap:
            counter, name = heap[0]
            if name not in self._queues or (name in self._num_running) != has_running:
                heapq.heappop(heap)
            elif counter != self._counters[name]:
                heapq.heapreplace(heap, (self._counters[name], name))
            else:
                return name
        return None

    def _lift(self, name: str) -> None:
        """Raise the counter of a name that joins to that of the least served active one.

        Clients choose the names: this takes no longer where many wait.
        """
        active = [*self._num_running]
        if (waiting := self._least_served(self._idle, has_running=False)) is not None:
            active.append(waiting)
        floor = min((self._counters[one] for one in active), default=self._floor)
        self._counters[name] = max(self._counters.get(name, 0.0), floor)
        self._resting.pop(name, None)
        most_idle = MAX_IDLE_PARTS if self._level else MAX_IDLE_NAMES
        if len(self._resting) >= most_idle:  # drop those with the least service: joining again lifts them anyway
            for one in heapq.nsmallest(most_idle // 2, self._resting, key=self._counters.__getitem__):
                del self._counters[one], self._resting[one]

    def _left(self, name: str) -> None:
        """Note that nothing of this name waits or runs. Names that come to an empty engine start from its counter:
        service that it got alone does not count against it."""
        if name not in self._num_running:
            self._resting[name] = None
            self._floor = max(self._floor, self._counters[name])
            self._parts.pop(name, None)


@dataclass(frozen=True)
class Claim:
    """A waiting sequence that may take a slot from others, with the part of the engine that is its own.

    `nodes`: from the whole engine down to the level at which the claim is made. Only what has the same names above
    that level gives way.
    """

    sequence: Sequence
    fraction: float  # of the engine: that of its share
    num_slots: float  # of the node that the claim is made at
    nodes: tuple[FairShare, ...]

    def victim(self, running: SequenceOf[Sequence]) -> Sequence | None:
        """Return which of these sequences, in order of admission, gives way; None: none has more than its share."""
        node = self.nodes[-1]
        candidates = [sequence for sequence in running if self._concerns(sequence)] if node.may_give_way else []
        if not candidates:
            return None
        victim = node.victim(candidates)
        return victim if node.gives_way(victim, self.sequence, self.num_slots) else None

    def staying(self, running: SequenceOf[Sequence]) -> Iterator[Sequence]:
        """Yield those that stay in any case: the others, and of each name the sequence admitted first."""
        seen: set[str] = set()
        for sequence in running:
            name = sequence.request.share[len(self.nodes) - 1]
            if not self._concerns(sequence):
                yield sequence
            elif name not in seen:
                seen.add(name)
                yield sequence

    def admit_first(self) -> None:
        """Give the freed slot to this sequence, which may not be the next one of all."""
        for node in self.nodes[:-1]:
            node.admit_first(self.sequence)

    def _concerns(self, sequence: Sequence) -> bool:
        depth = len(self.nodes) - 1
        return sequence.request.share[:depth] == self.sequence.request.share[:depth]


POLICIES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
    "priority": lambda: OrderedQueue(priority_key),
    "shortest": lambda: OrderedQueue(shortest_key),
    "deadline": lambda: OrderedQueue(deadline_key),
    "fair": FairShare,
    "static": StaticBatch,
}


# -- fault isolation ---------------------------------------------------------------------------------------------------

MAX_UNEXPLAINED_FAILURES = 4  # more of them make a trial no longer: all other requests wait for its end
SPARE_TRIALS = 4  # failed trials in a row, beyond those that halving needs, after which no single one is at fault


class FaultIsolationQueue:
    """A WaitingQueue. Without suspects it behaves as the policy's queue inside."""

    def __init__(self, inner: WaitingQueue) -> None:
        self.inner = inner
        self._ends: dict[Sequence, int] = {}  # of suspects: tokens computed at the end of a successful trial
        self._groups: list[list[Sequence]] = []  # waiting for their trial, the next one last
        self._trial: list[Sequence] = []  # the group under trial
        self._ready: deque[Sequence] = deque()  # those of the trial that wait to be admitted
        self._cleared: list[Sequence] = []  # had a successful trial, and wait for the others
        self._max_trials = 0
        self._num_failed = 0  # failed trials in a row
        self._found = False  # whether any sequence was at fault since the first failure

    # -- suspects ----------------------------------------------------------------------------------------------------

    @property
    def is_isolating(self) -> bool:
        """Whether a trial is under way."""
        return bool(self._trial)

    def isolate(self, sequences: SequenceOf[Sequence], ends: SequenceOf[int]) -> list[Sequence]:
        """Take in a failed step of these running sequences, which would have computed them up to `ends`.

        Returns the sequences at fault. The caller ends them, and puts all others that run back into this queue.
        """
        if not self._trial:
            for sequence, end in zip(sequences, ends, strict=True):
                self._ends[sequence] = end + 4 ** min(sequence.num_unexplained_failures, MAX_UNEXPLAINED_FAILURES) - 1
            self._max_trials = len(sequences).bit_length() + SPARE_TRIALS
            self._num_failed, self._found = 0, False
            self._begin(list(sequences))
            return []
        # A failed trial says something only about the sequences that had a row in the step.
        rows = set(sequences)
        failed = [sequence for sequence in self._trial if sequence in rows]
        others = [sequence for sequence in _unfinished(self._trial) if sequence not in rows]
        self._num_failed += 1
        if others:
            self._groups.append(others)
        if len(failed) == 1 or self._num_failed > self._max_trials:
            self._found = True
            self._begin(failed)
            return failed if len(failed) == 1 else [*failed, *(one for group in self._groups for one in group)]
        half = (len(failed) + 1) // 2
        self._groups.append(failed[half:])
        self._begin(failed[:half])
        return []

    def next_trial(self) -> list[Sequence]:
        """Go on to the next trial if this one was successful. Call it between two steps, with none under way.

        Returns the sequences of the successful trial, for the caller to put back into this queue.
        """
        tried = _unfinished(self._trial)
        if self._ready or any(one.num_inflight or one.num_computed < self._ends[one] for one in tried):
            return []
        if tried:
            self._num_failed = 0
        is_last = not any(map(_unfinished, self._groups))
        if is_last and not self._found:
            for sequence in [*tried, *self._cleared]:
                # longer trials next time: the failure needs more tokens, or other requests
                sequence.num_unexplained_failures += 1
        self._trial = []
        self._try_next()
        return [] if is_last else tried

    # -- the queue ---------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting, of suspects and others."""
        return self.inner.num_tokens + sum(sequence.num_prompt for sequence in self._held())

    @property
    def shares(self) -> Shares | None:
        """The shares of the policy's queue."""
        return self.inner.shares

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self.inner.push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence: to its trial, to the cleared ones, or to the policy's queue."""
        if sequence in self._trial:
            self._ready.append(sequence)
        elif any(sequence in group for group in self._groups):
            pass  # it is in its group already
        elif sequence in self._ends:
            self._cleared.append(sequence)
        else:
            self.inner.push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the next sequence of the trial; without one, the policy's."""
        if self._trial:
            return self._ready[0] if self._ready else None
        return self.inner.peek(now, num_running)

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        return self._ready.popleft() if self._trial else self.inner.pop()

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        if sequence not in self._ends:
            self.inner.remove(sequence)
            return
        for held in (self._ready, self._cleared, *self._groups):
            if sequence in held:
                held.remove(sequence)

    def __len__(self) -> int:
        return len(self.inner) + sum(1 for _ in self._held())

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._held()
        yield from self.inner

    # -- inside ------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterator[Sequence]:
        yield from list(self._ready)  # a copy: the I/O thread iterates, too, and a deque must not change meanwhile
        for group in self._groups:
            yield from group
        yield from self._cleared

    def _begin(self, group: list[Sequence]) -> None:
        """Start the trial of these sequences, which the caller is about to put back."""
        self._trial, self._ready = group, deque()

    def _try_next(self) -> None:
        while self._groups:
            group = _unfinished(self._groups.pop())
            if group:
                self._trial, self._ready = group, deque(group)
                return
        cleared, self._cleared = self._cleared, []
        self._ends.clear()
        for sequence in reversed(cleared):
            self.inner.push_back(sequence)


def _unfinished(group: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in group if sequence.status is not SequenceStatus.FINISHED]
