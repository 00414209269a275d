"""Workloads: what arrives, when, and how long it is. Seeded: the same arguments give the same requests.

Arrivals: poisson (independent users), steady (a clock), gamma (bursty where the coefficient of variation is above 1),
burst (groups at a time), at_once. Prompts may share prefixes (a few system prompts, popularity after Zipf) and come in
conversations, where each turn repeats the turns before it and waits for the answer.

Traces: recorded requests, one JSON object a line, in one of two forms, which may carry more keys than these:
- `{"arrival_s": 0.25, "prompt_tokens": 128, "output_tokens": 40}`, with `tenant`, `priority`, `prefix` (any string:
  lines with the same one share their first `prefix_tokens` tokens) where known;
- Mooncake's (Qin et al., "Mooncake: a KVCache-centric disaggregated architecture", 2024):
  `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`, timestamps in
  milliseconds, each hash id naming the content of 512 tokens.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

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
    """Requests in order of time, and the next turns of conversations."""

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests in order of time."""
        ...

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return the next turn of a conversation that was answered at `now`, or None."""
        ...


Length = Callable[[random.Random], int]
Number = TypeVar("Number", int, float)


def parse_length(name: str, text: str) -> Length:
    """Parse a distribution of lengths: `128`, `uniform:64-256`, `exponential:200`, `lognormal:200:0.8` (median, sigma).
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
    """The parameters of a synthetic workload. Rates per second."""

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
        """Yield the first turns in order of time."""
        options = self.options
        first_turns = -(-options.num_requests // options.turns)
        for time_s in arrival_times(options, first_turns, self._random):
            prefix = self._prefix()
            yield self._make(time_s, prefix + self._cut(self._prompt_length(self._random)), turn=1)

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return the next turn: everything so far, the answer, and a new question, after a pause."""
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
        """Return random tokens that no other cut begins with: a slice of the reservoir behind two drawn ones."""
        generator, vocab = self._random, self.options.vocab_size
        ids = array("I", (int(generator.random() * vocab), int(generator.random() * vocab)))
        begin = int(generator.random() * _RESERVOIR)
        ids += self._reservoir[begin : begin + length]
        while len(ids) < length:
            ids += self._reservoir[: length - len(ids)]
        return ids[:length]


def arrival_times(options: WorkloadOptions, count: int, generator: random.Random) -> Iterator[float]:
    """Yield `count` times in order. Raises ConfigError for an unknown process or a rate that is not above 0."""
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


HASH_ID_TOKENS = 512
_MASK = 0x7FFFFFFF


class TraceWorkload:
    """Implements `Workload`. The file is read line by line: it may be larger than memory."""

    def __init__(self, path: Path, *, speed: float = 1.0, max_tokens: int = 1 << 31, limit: int = 0) -> None:
        """`speed` 2 lets everything arrive twice as fast; `limit` stops after so many requests (0: never). Prompts and
        outputs over `max_tokens` together are cut, as the engine would refuse them."""
        if speed <= 0:
            raise ConfigError("--speed", "must be above 0")
        if not path.is_file():
            raise ConfigError("--trace", f"no such file: {path}")
        self._path, self._speed, self._max_tokens, self._limit = path, speed, max_tokens, limit
        self.num_cut = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the recorded requests. Raises ConfigError naming a line that is no request, or goes back in time."""
        uid, last = 0, 0.0
        with self._path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                uid += 1
                if self._limit and uid > self._limit:
                    return
                arrival = self._read(line, number, uid)
                if arrival.arrival_s < last:
                    raise ConfigError("--trace", f"line {number} arrives before the line above it: sort the file")
                last = arrival.arrival_s
                yield arrival

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """Return None: a recorded trace contains every request."""
        return None

    def _read(self, line: str, number: int, uid: int) -> Arrival:
        try:
            item = json.loads(line)
            if "hash_ids" in item or "timestamp" in item:
                time_s, num_prompt = float(item["timestamp"]) / 1e3, int(item["input_length"])
                num_output = int(item["output_length"])
                prompt = _from_hash_ids(item.get("hash_ids", []), num_prompt, uid)
            else:
                time_s, num_prompt = float(item["arrival_s"]), int(item["prompt_tokens"])
                num_output = int(item["output_tokens"])
                prompt = _with_prefix(item, num_prompt, uid)
            if num_prompt < 1 or num_output < 1 or time_s < 0:
                raise ValueError("lengths must be at least 1 and times at least 0")
            priority = int(item.get("priority", 0))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError("--trace", f"line {number} is no request: {what}") from None
        if num_prompt + num_output > self._max_tokens:
            self.num_cut += 1
            prompt = prompt[: self._max_tokens - 1]
            num_output = min(num_output, self._max_tokens - len(prompt))
        return Arrival(
            uid=uid,
            arrival_s=time_s / self._speed,
            prompt_ids=prompt,
            num_output=num_output,
            seed=uid & _MASK,
            tenant=str(item.get("tenant", "")),
            priority=priority,
        )


def _from_hash_ids(hash_ids: list[int], length: int, uid: int) -> array[int]:
    ids = array("I")
    for hash_id in hash_ids:
        begin = (int(hash_id) * HASH_ID_TOKENS) & _MASK
        ids.extend(range(begin, begin + HASH_ID_TOKENS))
    return ids[:length] + _own(length - len(ids), uid)


def _with_prefix(item: Mapping[str, Any], length: int, uid: int) -> array[int]:
    shared = min(length, int(item.get("prefix_tokens", 0))) if "prefix" in item else 0
    return _own(shared, zlib.crc32(str(item.get("prefix", "")).encode()) | 1 << 32) + _own(length - shared, uid)


def _own(length: int, name: int) -> array[int]:
    """Return `length` tokens that only this name has."""
    if length <= 0:
        return array("I")
    begin = (name * 2654435761) & _MASK
    return array("I", range(begin, begin + length))
