"""Which engine takes the next request. Pure: no sockets, no clock; loads are reported, chance is injected.

EnginePool and the simulator's fleet use the same object, so results in virtual time hold for the service.

- round_robin: one after the other, whatever they do.
- power_of_two (Mitzenmacher, "The power of two choices in randomized load balancing", 2001): of two engines drawn at
  random the one with fewer waiting prompt tokens, then fewer requests.
- prefix_affinity: equal beginnings go to the same engine, where their KV is cached. Rendezvous hashing (Thaler and
  Ravishankar, "Using name-based mappings to increase hit rates", 1998): an engine that comes or goes moves only its own
  share of the prefixes. With bounded loads (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
  loads", 2018): no engine holds more than LOAD_FACTOR times the average; what is over goes to the next in its order.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

AFFINITY_TOKENS = 256  # leading prompt tokens that make the prefix key
LOAD_FACTOR = 1.25  # an engine's most requests, as a multiple of the average
_MASK = (1 << 64) - 1
_REMEMBERED_KEYS = 65_536


class EngineLoads:
    """The load of each engine: from its last STATUS, and what was sent there since."""

    def __init__(self, names: Sequence[str]) -> None:
        self.keys = [_hash64(name.encode()) for name in names]
        self.waiting_tokens = [0] * len(names)
        self.num_requests = [0] * len(names)
        self.available = list(range(len(names)))  # ascending
        self._members = frozenset(self.available)
        self.total_requests = 0  # of the available engines
        self.version = 0  # grows when `available` changes

    def add(self, name: str) -> None:
        """Add an engine after the others. It is not available yet."""
        self.keys.append(_hash64(name.encode()))
        self.waiting_tokens.append(0)
        self.num_requests.append(0)

    def report(self, engine: int, waiting_tokens: int, num_requests: int) -> None:
        """Set an engine's load from its STATUS. What was sent before is included in it."""
        if self._is_available(engine):
            self.total_requests += num_requests - self.num_requests[engine]
        self.waiting_tokens[engine] = waiting_tokens
        self.num_requests[engine] = num_requests

    def sent(self, engine: int, num_prompt: int) -> None:
        """Add a request that was just sent; the next STATUS will include it."""
        if self._is_available(engine):
            self.total_requests += 1
        self.waiting_tokens[engine] += num_prompt
        self.num_requests[engine] += 1

    def set_available(self, engines: Collection[int]) -> None:
        """Set which engines take new requests."""
        wanted = sorted(engines)
        if wanted != self.available:
            self.available = wanted
            self._members = frozenset(wanted)
            self.total_requests = sum(self.num_requests[engine] for engine in wanted)
            self.version += 1

    def _is_available(self, engine: int) -> bool:
        return engine in self._members


class Policy(Protocol):
    """Chooses among `candidates`, which are not empty. `key` is the prefix key, 0 where the policy wants none."""

    wants_key: bool

    def pick(self, loads: EngineLoads, candidates: Sequence[int], key: int) -> int:
        """Return the chosen one of `candidates`."""


class RoundRobin:
    """One after the other."""

    wants_key = False

    def __init__(self, generator: random.Random) -> None:
        self._next = generator.randrange(1 << 16)  # front ends must not all start with the same engine

    def pick(self, loads: EngineLoads, candidates: Sequence[int], key: int) -> int:
        """Return the next candidate in turn."""
        self._next += 1
        return candidates[self._next % len(candidates)]


class PowerOfTwo:
    """The less loaded of two drawn at random."""

    wants_key = False

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random

    def pick(self, loads: EngineLoads, candidates: Sequence[int], key: int) -> int:
        """Return the less loaded of two candidates drawn at random."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        second += second >= first  # a pair of different engines, each pair equally likely
        one, other = candidates[first], candidates[second]
        tokens, requests = loads.waiting_tokens, loads.num_requests
        return one if (tokens[one], requests[one]) <= (tokens[other], requests[other]) else other


class PrefixAffinity:
    """The first engine in the prefix's own order that is below the load bound."""

    wants_key = True

    def __init__(self, generator: random.Random, load_factor: float = LOAD_FACTOR) -> None:
        self._load_factor = load_factor
        self._homes: dict[int, int] = {}
        self._version = -1

    def pick(self, loads: EngineLoads, candidates: Sequence[int], key: int) -> int:
        """Return the first candidate below the load bound, in the prefix's own order."""
        num_requests = loads.num_requests
        is_all = candidates is loads.available
        total = loads.total_requests if is_all else sum(num_requests[engine] for engine in candidates)
        bound = self._load_factor * (total + 1) / len(candidates)
        if is_all:
            home = self._home(loads, key)
            if num_requests[home] < bound:
                return home
        open_engines = [engine for engine in candidates if num_requests[engine] < bound]
        return max(open_engines, key=lambda engine: mix(loads.keys[engine] ^ key))  # one is always below the average

    def _home(self, loads: EngineLoads, key: int) -> int:
        if self._version != loads.version or len(self._homes) >= _REMEMBERED_KEYS:
            self._homes.clear()
            self._version = loads.version
        home = self._homes.get(key)
        if home is None:
            keys = loads.keys
            home = self._homes[key] = max(loads.available, key=lambda engine: mix(keys[engine] ^ key))
        return home


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
}


class LoadBalancer:
    """Chooses an engine for each request: a policy over the engines' loads."""

    def __init__(
        self,
        names: Sequence[str],
        policy: str = "power_of_two",
        *,
        generator: random.Random | None = None,
        affinity_tokens: int = AFFINITY_TOKENS,
    ) -> None:
        """`names` are the engines' stable names: affinity follows them over restarts and between front ends."""
        self.loads = EngineLoads(names)
        self._policy = POLICIES[policy](generator or random.Random())
        self._affinity_tokens = affinity_tokens

    def choose(
        self, prompt_ids: Sequence[int] | str | None = None, salt: bytes = b"", *, avoid: Collection[int] = ()
    ) -> int | None:
        """Return the engine for a request, or None where none is available. `avoid`: engines that refused it."""
        candidates: Sequence[int] = self.loads.available
        if avoid:
            candidates = [engine for engine in candidates if engine not in avoid]
        if not candidates:
            return None
        key = prefix_key(prompt_ids or (), salt, self._affinity_tokens) if self._policy.wants_key else 0
        return self._policy.pick(self.loads, candidates, key)


def prefix_key(prompt: Sequence[int] | str, salt: bytes, num_tokens: int = AFFINITY_TOKENS) -> int:
    """Return 64 bits of the beginning of a prompt and its cache salt. Text counts as four characters per token."""
    if isinstance(prompt, str):
        beginning = prompt[: 4 * num_tokens].encode()
    else:
        head = prompt[:num_tokens]
        beginning = (head if isinstance(head, array) else array("I", head)).tobytes()
    return _hash64(len(salt).to_bytes(4, "little") + salt + beginning)


def mix(value: int) -> int:
    """Mix 64 bits with the finalizer of MurmurHash3 (Appleby): every bit depends on every other."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
