"""Workloads: what arrives, when, and how long it is. Seeded: the same arguments give the same requests.

Arrivals: poisson (independent users), steady (a clock), gamma (bursty where the coefficient of variation is above 1),
burst (groups at a time), at_once. Prompts may share prefixes (a few system prompts, popularity after Zipf) and come in
conversations, where each turn repeats the turns before it and waits for the answer.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from inferengine.errors import ConfigError

ARRIVALS = ("poisson", "steady", "gamma", "burst", "at_once")
_RESERVOIR = 1 << 16  # random tokens that prompts are cut from


class Arrival(NamedTuple):
    """One request. Its output will be `num_output` times the token `seed`."""

    uid: int
    arrival_s: float
    prompt_ids: array[int]
    num_output: int
    seed: int
    tenant: str = ""
    salt: bytes = b""
    priority: int = 0
    deadline_s: float | None = None  # from arrival
    turn: int = 0


class Workload(Protocol):
    """Arrivals in order of time, and the next turn of a conversation when one has been answered."""

    def arrivals(self) -> Iterator[Arrival]: ...

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None: ...


Length = Callable[[random.Random], int]
Number = TypeVar("Number", int, float)


def parse_length(name: str, text: str) -> Length:
    """A distribution of lengths: `128`, `uniform:64-256`, `exponential:200`, `lognormal:200:0.8` (median, sigma).
    Raises ConfigError naming the option."""
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            value = _positive(int(kind))
            return lambda generator: value
        if kind == "uniform":
            low, high = (_positive(int(part)) for part in rest.split("-"))
            if low > high:
                raise ValueError
            return lambda generator: generator.randint(low, high)
        if kind == "exponential":
            mean = _positive(float(rest))
            return lambda generator: max(1, round(generator.expovariate(1.0 / mean)))
        if kind == "lognormal":
            median, sigma = (_positive(float(part)) for part in rest.split(":"))
            location = math.log(median)
            return lambda generator: max(1, round(generator.lognormvariate(location, sigma)))
    except ValueError:
        pass
    raise ConfigError(
        name, f"'{text}' is no length: give 128, uniform:64-256, exponential:200 or lognormal:200:0.8 (median, sigma)"
    )


@dataclass(frozen=True)
class WorkloadOptions:
    """What a synthetic workload is made of. Rates per second."""

    num_requests: int
    arrivals: str = "poisson"
    rate: float = 10.0
    variation: float = 2.0  # gamma: standard deviation of the gaps over their mean
    burst_size: int = 100
    prompt_tokens: str = "lognormal:200:0.8"
    output_tokens: str = "lognormal:100:0.8"
    max_tokens: int = 8192  # most of prompt and output together
    num_prefixes: int = 0
    prefix_tokens: int = 512
    turns: int = 1
    think_s: float = 5.0
    num_tenants: int = 1
    deadline_s: float | None = None
    vocab_size: int = 32000
    seed: int = 0


class SyntheticWorkload:
    """Implements `Workload`. `num_requests` counts conversations' first turns and their follow-ups alike."""

    def __init__(self, options: WorkloadOptions) -> None:
        self.options = options
        self._random = random.Random(options.seed)
        self._prompt_length = parse_length("--prompt-tokens", options.prompt_tokens)
        self._output_length = parse_length("--output-tokens", options.output_tokens)
        draw = random.Random(options.seed + 1).randrange
        self._reservoir = array("I", (draw(options.vocab_size) for _ in range(_RESERVOIR)))
        self._prefixes = [self._cut(options.prefix_tokens) for _ in range(options.num_prefixes)]
        weights = [1.0 / (rank + 1) for rank in range(options.num_prefixes)]
        self._prefix_weights = [sum(weights[: rank + 1]) for rank in range(options.num_prefixes)]
        self._next_uid = 1

    def arrivals(self) -> Iterator[Arrival]:
        options = self.options
        first_turns = -(-options.num_requests // options.turns)
        for time_s in arrival_times(options, first_turns, self._random):
            prefix = self._prefix()
            yield self._make(time_s, prefix + self._cut(self._prompt_length(self._random)), turn=1)

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """The next turn: everything so far, the answer, and a new question, after a pause for thought."""
        options = self.options
        if arrival.turn >= options.turns:
            return None
        answer = array("I", [arrival.seed]) * arrival.num_output
        prompt = arrival.prompt_ids + answer + self._cut(self._prompt_length(self._random))
        if len(prompt) >= options.max_tokens:
            return None
        time_s = now + self._random.expovariate(1.0 / options.think_s) if options.think_s > 0 else now
        return self._make(time_s, prompt, turn=arrival.turn + 1, tenant=arrival.tenant)

    def _make(self, time_s: float, prompt: array[int], *, turn: int, tenant: str | None = None) -> Arrival:
        options, uid = self.options, self._next_uid
        self._next_uid += 1
        if len(prompt) >= options.max_tokens:
            prompt = prompt[: options.max_tokens - 1]
        return Arrival(
            uid=uid,
            arrival_s=time_s,
            prompt_ids=prompt,
            num_output=min(self._output_length(self._random), options.max_tokens - len(prompt)),
            seed=uid % options.vocab_size,
            tenant=f"tenant-{uid % options.num_tenants}" if tenant is None else tenant,
            deadline_s=options.deadline_s,
            turn=turn,
        )

    def _prefix(self) -> array[int]:
        if not self._prefixes:
            return array("I")
        return self._random.choices(self._prefixes, cum_weights=self._prefix_weights)[0]

    def _cut(self, length: int) -> array[int]:
        """Random tokens that no other cut begins with: a slice of the reservoir behind two drawn ones."""
        generator, vocab = self._random, self.options.vocab_size
        ids = array("I", (int(generator.random() * vocab), int(generator.random() * vocab)))
        begin = int(generator.random() * _RESERVOIR)
        ids += self._reservoir[begin : begin + length]
        while len(ids) < length:
            ids += self._reservoir[: length - len(ids)]
        return ids[:length]


def arrival_times(options: WorkloadOptions, count: int, generator: random.Random) -> Iterator[float]:
    """`count` times in order. Raises ConfigError for a process that does not exist or a rate that is none."""
    if options.arrivals not in ARRIVALS:
        raise ConfigError("--arrivals", f"must be one of {', '.join(ARRIVALS)}; got '{options.arrivals}'")
    if options.arrivals != "at_once" and options.rate <= 0:
        raise ConfigError("--rate", "must be above 0 requests per second")
    return _times(options, count, generator)


def _times(options: WorkloadOptions, count: int, generator: random.Random) -> Iterator[float]:
    time_s, rate = 0.0, options.rate
    shape = 1.0 / (options.variation * options.variation)
    for index in range(count):
        yield time_s
        if options.arrivals == "poisson":
            time_s += generator.expovariate(rate)
        elif options.arrivals == "steady":
            time_s += 1.0 / rate
        elif options.arrivals == "gamma":
            time_s += generator.gammavariate(shape, 1.0 / (rate * shape))
        elif options.arrivals == "burst" and (index + 1) % options.burst_size == 0:
            time_s += options.burst_size / rate


def _positive(value: Number) -> Number:
    if not value > 0 or not math.isfinite(value):
        raise ValueError
    return value
