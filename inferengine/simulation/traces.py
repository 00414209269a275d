"""Synthetic traces for fleets: chat, rag, agents, batch. They are seeded, and scale with the number of engines.

A prompt is a chain of parts: a system prompt, a document, a question, an answer. Each part has a length in tokens and a
key that identifies its content and all before it. Two prompts share a beginning if their chains do. So a prompt of
10,000 tokens is a few tuples, and a light engine's cache (light_engine.py) holds parts instead of blocks. `arrival`
writes a prompt out as token ids, for the engine's own scheduler.

Lengths are in tokens. Lognormal lengths are given by median and sigma, and cut at 8 times the median. Geometric numbers
of turns are given by their mean, and cut at 5 times the mean. Popularity follows Zipf's law.

- chat: sessions of 4 turns (geometric), 8 s between them (exponential). 40 system prompts (Zipf 1.0) of 100
  to 1,500 (uniform), questions lognormal 60, 0.9, answers lognormal 220, 0.7.
- rag: one turn. A system prompt of 400, one of 20 documents per engine (Zipf 0.9), lognormal 2,500, 0.5, a question
  lognormal 40, 0.6; answers lognormal 150, 0.6.
- agents: sessions of 12 calls (geometric), tools answer after 2 s (exponential). 10 sets of tools (Zipf 1.0) of 3,000;
  results lognormal 400, 1.0; calls lognormal 80, 0.7.
- batch: jobs of 200 requests that arrive at once; jobs are a Poisson process. Each job has a template of its own,
  lognormal 800, 0.5; items lognormal 600, 0.6; answers lognormal 120, 0.5.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from inferengine.client.load_balancing import AFFINITY_TOKENS, BOUNDARIES, PromptHashes, mix
from inferengine.simulation.report import Objective
from inferengine.simulation.workload import Arrival

PromptPart = tuple[int, int]  # key, tokens
_MASK = (1 << 64) - 1
_TOKEN_IDS = 1 << 20


@dataclass(frozen=True)
class TraceKind:
    """The parameters of one trace; see the module. `rate`: sessions, or jobs, per second for each engine."""

    name: str
    rate: float
    objective: Objective
    answer: tuple[float, float]
    question: tuple[float, float]
    turns: float = 1.0
    pause_s: float = 0.0
    num_systems: int = 0
    system_tokens: tuple[int, int] = (0, 0)
    documents: float = 0.0  # per engine
    document_tokens: tuple[float, float] = (0.0, 0.0)
    job: int = 1


TRACES = {
    kind.name: kind
    for kind in (
        TraceKind(
            "chat",
            2.9,
            Objective(1.0, 0.06),
            answer=(220, 0.7),
            question=(60, 0.9),
            turns=4.0,
            pause_s=8.0,
            num_systems=40,
            system_tokens=(100, 1500),
        ),
        TraceKind(
            "rag",
            6.4,
            Objective(2.0, 0.08),
            answer=(150, 0.6),
            question=(40, 0.6),
            num_systems=1,
            system_tokens=(400, 400),
            documents=20.0,
            document_tokens=(2500, 0.5),
        ),
        TraceKind(
            "agents",
            0.6,
            Objective(2.0, 0.08),
            answer=(80, 0.7),
            question=(400, 1.0),
            turns=12.0,
            pause_s=2.0,
            num_systems=10,
            system_tokens=(3000, 3000),
        ),
        TraceKind(
            "batch",
            0.04,
            Objective(5.0, 0.1),
            answer=(120, 0.5),
            question=(600, 0.6),
            document_tokens=(800, 0.5),
            job=200,
        ),
    )
}


@dataclass(slots=True)
class TraceConversation:
    """A conversation: its prompt so far, and how many turns are left."""

    uid: int
    generator: random.Random
    turns_left: int
    chain: list[PromptPart] = field(default_factory=list)
    num_tokens: int = 0
    hash: int = 0  # of the chain's keys
    keys: list[int] = field(default_factory=list)  # of the boundaries that the chain has passed
    home: int = 0

    def add(self, key: int, num_tokens: int) -> None:
        """Append a part to the prompt."""
        before = self.num_tokens
        self.chain.append((key, num_tokens))
        self.num_tokens += num_tokens
        self.hash = mix(self.hash ^ key)
        while len(self.keys) < len(BOUNDARIES) and BOUNDARIES[len(self.keys)] <= self.num_tokens:
            self.keys.append(mix(self.hash + BOUNDARIES[len(self.keys)] & _MASK))
        if before < AFFINITY_TOKENS:
            self.home = mix(self.hash + min(AFFINITY_TOKENS, self.num_tokens) & _MASK)


class TraceRequest(NamedTuple):
    """One request. `answer` is the key of its output, which is a part of later prompts of the session."""

    uid: int
    arrival_s: float
    chain: tuple[PromptPart, ...]
    prompt: PromptHashes
    num_output: int
    answer: int
    session: TraceConversation

    def arrival(self) -> Arrival:
        """Return the request with its prompt as token ids. Its output repeats the token `seed`, as in `workload`."""
        prompt_ids = array("I")
        for key, num_tokens in self.chain:
            if key & 1:  # an answer
                prompt_ids.extend(array("I", [_seed(key)]) * num_tokens)
            else:
                begin = mix(key) % _TOKEN_IDS
                prompt_ids.extend((begin + 7 * place) % _TOKEN_IDS for place in range(num_tokens))
        return Arrival(self.uid, self.arrival_s, prompt_ids, self.num_output, seed=_seed(self.answer))


def _seed(answer: int) -> int:
    return mix(answer) % _TOKEN_IDS


class Trace:
    """The requests of a trace. `arrivals` yields first turns in order of time, `follow_up` returns the next turn."""

    def __init__(
        self, kind: TraceKind, *, num_engines: int, duration_s: float, load: float = 1.0, seed: int = 0
    ) -> None:
        """Sessions begin during `duration_s` seconds, at `load` times the kind's rate for each of `num_engines`."""
        self.kind = kind
        self.duration_s = duration_s
        self._rate = kind.rate * load * num_engines
        self._seed = seed
        self._uid = 0
        self._generator = random.Random(seed)
        self._systems = [
            (self._key(1, place), self._generator.randint(*kind.system_tokens)) for place in range(kind.num_systems)
        ]
        self._system_weights = _zipf(kind.num_systems, 1.0)
        num_documents = round(kind.documents * num_engines)
        self._document_weights = _zipf(num_documents, 0.9)
        self._documents = [
            (self._key(2, place), _lognormal(self._generator, *kind.document_tokens)) for place in range(num_documents)
        ]

    def arrivals(self) -> Iterator[TraceRequest]:
        """Yield the first turns in order of time."""
        kind, generator = self.kind, self._generator
        time_s, number = generator.expovariate(self._rate), 0
        while time_s < self.duration_s:
            template = (self._key(3, number), _lognormal(generator, *kind.document_tokens)) if kind.job > 1 else None
            for _ in range(kind.job):
                number += 1
                session = TraceConversation(number, random.Random(self._seed << 32 | number), self._turns())
                if self._systems:
                    session.add(*self._systems[_draw(self._system_weights, generator)])
                if self._documents:
                    key, num_tokens = self._documents[_draw(self._document_weights, generator)]
                    session.add(
                        mix(session.hash ^ key) & ~1, num_tokens
                    )  # its keys and values depend on the tokens before it
                if template is not None:
                    session.add(*template)
                yield self._ask(session, time_s)
            time_s += generator.expovariate(self._rate)

    def follow_up(self, request: TraceRequest, now: float) -> TraceRequest | None:
        """Return the turn after an answer that ended at `now`, or None."""
        session = request.session
        if session.turns_left <= 0:
            return None
        session.add(request.answer, request.num_output)
        time_s = now + session.generator.expovariate(1.0 / self.kind.pause_s)
        return None if time_s >= self.duration_s else self._ask(session, time_s)

    def _ask(self, session: TraceConversation, time_s: float) -> TraceRequest:
        kind, generator = self.kind, session.generator
        session.turns_left -= 1
        part = 2 * len(session.chain)
        session.add(self._key(4, session.uid << 12 | part), _lognormal(generator, *kind.question))
        prompt = PromptHashes(session.num_tokens, session.home, tuple(session.keys))
        self._uid += 1
        output = _lognormal(generator, *kind.answer)
        answer = self._key(5, session.uid << 12 | part) | 1
        return TraceRequest(self._uid, time_s, tuple(session.chain), prompt, output, answer, session)

    def _turns(self) -> int:
        mean = self.kind.turns
        if mean <= 1:
            return 1
        number = 1 + int(math.log(1.0 - self._generator.random()) / math.log(1.0 - 1.0 / mean))
        return min(number, round(5 * mean))

    def _key(self, what: int, number: int) -> int:
        """Return an even number that identifies a part; answers have odd ones."""
        return mix((self._seed << 56 | what << 48) + number & _MASK) & ~1


class WrittenTrace:
    """A trace as a workload of token ids, for the engine's own scheduler: implements `workload.Workload`."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._open: dict[int, TraceRequest] = {}

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first turns in order of time."""
        return map(self._write, self._trace.arrivals())

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return the turn after an answer that ended at `now`, or None."""
        following = self._trace.follow_up(self._open.pop(arrival.uid), now)
        return None if following is None else self._write(following)

    def _write(self, request: TraceRequest) -> Arrival:
        self._open[request.uid] = request
        return request.arrival()


def _lognormal(generator: random.Random, median: float, sigma: float) -> int:
    return max(1, min(round(generator.lognormvariate(math.log(median), sigma)), round(8 * median)))


def _zipf(count: int, exponent: float) -> list[float]:
    """Return the cumulative weights of a Zipf distribution; the last one is 1."""
    weights = [1.0 / (rank + 1) ** exponent for rank in range(count)]
    total = sum(weights)
    return [weight / total for weight in accumulate(weights)]


def _draw(cumulative: list[float], generator: random.Random) -> int:
    return min(bisect_right(cumulative, generator.random()), len(cumulative) - 1)
