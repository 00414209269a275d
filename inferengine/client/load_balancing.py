"""Chooses the engine for each request. Pure: no sockets, no clock; the caller passes loads and a random generator.

EnginePool and the simulator's fleets use the same object, so results in virtual time hold for the service.

- round_robin: the engines in turn, whatever their load.
- power_of_two (Mitzenmacher, "The power of two choices in randomized load balancing", 2001): of two engines drawn at
  random the one with fewer waiting prompt tokens, then fewer requests.
- prefix_affinity: the engine with the fewest prompt tokens to compute before the first output: those waiting there, and
  those of this prompt that it has not cached. The candidates are the engines that recently got the longest known
  beginning of the prompt, and two drawn at random. So a conversation stays at its engine, and a document at the engines
  that have read it. A cached token counts as COMPUTE_WEIGHT waiting tokens, because computing it again would take time
  from all requests. A prompt with an unknown beginning has a home engine that every front end computes alike, by
  multi-probe consistent hashing of its first tokens (Appleton and O'Reilly, "Multi-probe consistent hashing", 2015): an
  engine that is added or removed moves only its own share of prompts. Loads are bounded (Mirrokni, Thorup and
  Zadimoghaddam, "Consistent hashing with bounded loads", 2018): an engine with more than LOAD_FACTOR times the average
  number of requests gets no more, unless it has fewer than LOAD_FLOOR.

With every policy a request that names its session goes to the engine that served the session last (SessionEngines).

Each engine tells all front ends which prompts and sessions it got, and they pass that to `learn`. So several front ends
choose consistently.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

AFFINITY_TOKENS = 256  # leading prompt tokens that decide an unknown prompt's home
LOAD_FACTOR = 1.5  # an engine's most requests, as a multiple of the average
LOAD_FLOOR = 4  # an engine with fewer requests is never overloaded
NUM_PROBES = 21  # with so many the largest share of unknown prompts is about 1.05 times the average
MAX_REPLICAS = 4  # engines remembered for one beginning
COMPUTE_WEIGHT = 4.0  # waiting tokens to which one cached token is equivalent
RATIO_MEMORY = 256  # requests over which the ratio of uncached tokens is averaged
REMEMBERED_BEGINNINGS = 1 << 18
REMEMBERED_SESSIONS = 1 << 16
CHARACTERS_PER_TOKEN = 4
# Lengths, in tokens, of the beginnings by which prompts are remembered; denser for short prompts.
BOUNDARIES = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256), *range(4096, 32_769, 1024))
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: multiples of it spread evenly over 64 bits


class EngineLoads:
    """The load of each engine: its last STATUS, plus what was sent to it since."""

    def __init__(self, names: Sequence[str]) -> None:
        self.keys = [_hash64(name.encode()) for name in names]
        self.waiting_tokens = [0] * len(names)
        self.sent_tokens = [0] * len(names)  # of `waiting_tokens`, what was sent since the last STATUS
        self.num_requests = [0] * len(names)
        self.available = list(range(len(names)))  # ascending
        self._members = frozenset(self.available)
        self.total_requests = 0  # of the available engines
        self.version = 0  # grows when `available` changes

    def add(self, name: str) -> None:
        """Add an engine after the others. It is not available yet."""
        self.keys.append(_hash64(name.encode()))
        self.waiting_tokens.append(0)
        self.sent_tokens.append(0)
        self.num_requests.append(0)

    def report(self, engine: int, waiting_tokens: int, num_requests: int) -> None:
        """Set an engine's load from its STATUS. What was sent before is included in it."""
        if self.is_available(engine):
            self.total_requests += num_requests - self.num_requests[engine]
        self.waiting_tokens[engine] = waiting_tokens
        self.sent_tokens[engine] = 0
        self.num_requests[engine] = num_requests

    def sent(self, engine: int, num_tokens: int) -> None:
        """Add a request that was just sent, with so many prompt tokens to compute; the next STATUS will include it."""
        if self.is_available(engine):
            self.total_requests += 1
        self.waiting_tokens[engine] += num_tokens
        self.sent_tokens[engine] += num_tokens
        self.num_requests[engine] += 1

    def set_available(self, engines: Collection[int]) -> None:
        """Set which engines take new requests."""
        wanted = sorted(engines)
        if wanted != self.available:
            self.available = wanted
            self._members = frozenset(wanted)
            self.total_requests = sum(self.num_requests[engine] for engine in wanted)
            self.version += 1

    def is_available(self, engine: int) -> bool:
        """Return whether an engine takes new requests."""
        return engine in self._members

    def bound(self, candidates: Sequence[int]) -> float:
        """Return the number of requests at which an engine counts as overloaded. Some candidate is always below it."""
        if candidates is self.available:
            total = self.total_requests
        else:
            total = sum(self.num_requests[engine] for engine in candidates)
        return max(LOAD_FLOOR, LOAD_FACTOR * (total + 1) / len(candidates))


class PromptHashes(NamedTuple):
    """What a policy sees of a prompt.

    `keys[i]` is a 64-bit hash of its first BOUNDARIES[i] tokens; empty if the policy needs none. `home` is a hash of
    its first AFFINITY_TOKENS. `session` is a hash of the session's name, or None.
    """

    num_tokens: int = 0
    home: int = 0
    keys: Sequence[int] = ()
    session: int | None = None


class ChosenEngine(NamedTuple):
    """The chosen engine, and how many prompt tokens it is expected to compute."""

    engine: int
    num_new_tokens: int


class Policy(Protocol):
    """Chooses among `candidates`, which are not empty."""

    wants_keys: bool

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the chosen one of `candidates`."""

    def learn(self, engine: int, beginnings: Iterable[int]) -> None:
        """Record that some front end sent prompts with these beginnings to an engine. By default this does nothing."""


class RoundRobin(Policy):
    """The engines in turn."""

    wants_keys = False

    def __init__(self, generator: random.Random) -> None:
        self._next = generator.randrange(1 << 16)  # front ends must not all start with the same engine

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the next candidate in turn."""
        self._next += 1
        return ChosenEngine(candidates[self._next % len(candidates)], prompt.num_tokens)


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random."""

    wants_keys = False

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the less loaded of two candidates drawn at random."""
        one, other = two_of(candidates, self._random)
        tokens, requests = loads.waiting_tokens, loads.num_requests
        is_less = (tokens[one], requests[one]) <= (tokens[other], requests[other])
        return ChosenEngine(one if is_less else other, prompt.num_tokens)


class PrefixAffinity(Policy):
    """The engine with the fewest prompt tokens to compute before the first output, within the load bound."""

    wants_keys = True

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random
        self._engines: dict[int, tuple[int, ...]] = {}  # by key: engines that got this beginning, the latest first
        self._uncached_ratio = 1.0  # average ratio of a prompt's tokens that is not cached
        self._ring: list[tuple[int, int]] = []  # (point, engine) of the available engines
        self._version = -1

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the best of the engines that know the prompt's beginning and of two others, and remember it."""
        requests, waiting, sent = loads.num_requests, loads.waiting_tokens, loads.sent_tokens
        over = 1.0 - self._uncached_ratio  # STATUS counts whole prompts, so this part of it is cached and costs nothing
        is_all = candidates is loads.available
        bound = loads.bound(candidates)
        num_known, known = self._known(loads, prompt)
        best = -1
        least, fewest = 0.0, 0
        for engine in known:
            if requests[engine] < bound and (loads.is_available(engine) if is_all else engine in candidates):
                tokens = waiting[engine] - over * (waiting[engine] - sent[engine]) - COMPUTE_WEIGHT * num_known
                if best < 0 or (tokens, requests[engine]) < (least, fewest):
                    best, least, fewest = engine, tokens, requests[engine]
        num_cached = num_known if best >= 0 else 0
        for engine in two_of(candidates, self._random):
            tokens = waiting[engine] - over * (waiting[engine] - sent[engine])
            if requests[engine] < bound and (best < 0 or (tokens, requests[engine]) < (least, fewest)):
                best, least, fewest, num_cached = engine, tokens, requests[engine], 0
        if best < 0:
            best = min(candidates, key=requests.__getitem__)  # the least loaded is never above the bound
        self._remember(prompt.keys, best)
        num_new = max(1, prompt.num_tokens - num_cached)
        self._uncached_ratio += (num_new / max(1, prompt.num_tokens) - self._uncached_ratio) / RATIO_MEMORY
        return ChosenEngine(best, num_new)

    def _known(self, loads: EngineLoads, prompt: PromptHashes) -> tuple[int, tuple[int, ...]]:
        """Return the longest known beginning's length in tokens, and the engines that got it.

        For an unknown prompt these are AFFINITY_TOKENS and its home.
        """
        engines = self._engines
        for place in range(len(prompt.keys) - 1, -1, -1):
            if (found := engines.get(prompt.keys[place])) is not None:
                return BOUNDARIES[place], found
        return min(AFFINITY_TOKENS, prompt.num_tokens), (self._home(loads, prompt.home),)

    def learn(self, engine: int, beginnings: Iterable[int]) -> None:
        """Note that a front end has sent prompts with these beginnings to an engine."""
        engines = self._engines
        for key in beginnings:
            found = engines.pop(key, ())
            if engine not in found:
                found = (engine, *found)[:MAX_REPLICAS]
            engines[key] = found  # now the youngest entry
        self._forget_oldest()

    def _remember(self, keys: Sequence[int], engine: int) -> None:
        """Remember the engine for the prompt's beginnings."""
        engines = self._engines
        for key in remembered_beginnings(keys):
            found = engines.pop(key, ())
            if not found or found[0] != engine:
                found = (engine, *(other for other in found if other != engine))[:MAX_REPLICAS]
            engines[key] = found  # now the youngest entry
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        engines = self._engines
        while len(engines) > REMEMBERED_BEGINNINGS:
            del engines[next(iter(engines))]

    def _home(self, loads: EngineLoads, key: int) -> int:
        """Return the engine whose point on the ring is the closest after any of the key's probes."""
        if self._version != loads.version:
            self._ring = sorted((mix(loads.keys[engine]), engine) for engine in loads.available)
            self._version = loads.version
        ring = self._ring
        home, nearest = ring[0][1], 1 << 64
        for _ in range(NUM_PROBES):
            key = key + _GOLDEN & _MASK
            probe = mix(key)
            place = bisect_left(ring, (probe,))
            point, engine = ring[place] if place < len(ring) else ring[0]
            distance = point - probe & _MASK
            if distance < nearest:
                home, nearest = engine, distance
        return home


def remembered_beginnings(keys: Sequence[int]) -> list[int]:
    """Return the keys under which a prompt is remembered.

    These are the key of its longest beginning, and of some shorter ones, which other prompts may share. Their distances
    double, so even a long prompt has few.
    """
    remembered, index, distance = [], len(keys) - 1, 1
    while index >= 0:
        remembered.append(keys[index])
        index -= distance
        distance *= 2
    return remembered


def two_of(candidates: Sequence[int], draw: Callable[[], float]) -> tuple[int, int]:
    """Return two different candidates drawn at random, each pair equally likely; a single candidate twice."""
    count = len(candidates)
    if count == 1:
        return candidates[0], candidates[0]
    first = int(draw() * count)
    second = int(draw() * (count - 1))
    second += second >= first
    return candidates[first], candidates[second]


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
}


class SessionEngines:
    """The engine that served each of the REMEMBERED_SESSIONS latest sessions last."""

    def __init__(self) -> None:
        self._engines: dict[int, int] = {}  # by key, the oldest use first

    def remember(self, key: int, engine: int) -> None:
        """Remember that the session is at this engine now."""
        self._engines.pop(key, None)
        self._engines[key] = engine
        if len(self._engines) > REMEMBERED_SESSIONS:
            del self._engines[next(iter(self._engines))]

    def engine_of(self, prompt: PromptHashes, loads: EngineLoads, candidates: Sequence[int]) -> int | None:
        """Return the engine of the prompt's session.

        Returns None if the session is unknown, or if its engine is overloaded or not among `candidates`.
        """
        engine = None if prompt.session is None else self._engines.get(prompt.session)
        if engine is None or not loads.is_available(engine):
            return None
        if candidates is not loads.available and engine not in candidates:
            return None
        is_full = loads.num_requests[engine] >= loads.bound(candidates)
        # With so much waiting, another engine computes the whole prompt sooner.
        is_slow = loads.waiting_tokens[engine] > COMPUTE_WEIGHT * max(prompt.num_tokens, AFFINITY_TOKENS)
        return None if is_full or is_slow else engine


class LoadBalancer:
    """Chooses an engine for each request: a policy over the engines' loads."""

    def __init__(
        self,
        names: Sequence[str],
        policy: str | Policy = "power_of_two",
        *,
        generator: random.Random | None = None,
    ) -> None:
        """`names`: the engines' names or addresses. Homes are computed from them, so they must stay the same over
        restarts and between front ends. `policy`: a name in POLICIES, or a Policy."""
        self.loads = EngineLoads(names)
        self._sessions = SessionEngines()
        self._policy = POLICIES[policy](generator or random.Random()) if isinstance(policy, str) else policy

    def choose(
        self,
        prompt_ids: Sequence[int] | str | None = None,
        salt: bytes = b"",
        *,
        session: int | None = None,
        avoid: Collection[int] = (),
    ) -> ChosenEngine | None:
        """Return the engine for a request, or None where none is available. `session`: the key of its session, see
        `session_key`. `avoid`: engines that refused it."""
        return self.place(self.read(prompt_ids or (), salt, session), avoid=avoid)

    def read(self, prompt_ids: Sequence[int] | str, salt: bytes = b"", session: int | None = None) -> PromptHashes:
        """Return what the policy needs of a prompt, for `place`."""
        if len(self.loads.available) <= 1:
            return PromptHashes(_length(prompt_ids))  # nothing is to be chosen, and nothing to be remembered
        if self._policy.wants_keys:
            return make_prompt(prompt_ids, salt, session)
        return PromptHashes(_length(prompt_ids), session=session)

    def place(self, prompt: PromptHashes, *, avoid: Collection[int] = ()) -> ChosenEngine | None:
        """Choose an engine for a prompt that `read` returned; see `choose`.

        A session stays at its engine while that is available and not overloaded, whatever the policy. Otherwise the
        policy chooses, and the session stays at the new engine.
        """
        candidates: Sequence[int] = self.loads.available
        if avoid:
            candidates = [engine for engine in candidates if engine not in avoid]
        if not candidates:
            return None
        if prompt.session is None:
            return self._policy.pick(self.loads, candidates, prompt)
        engine = self._sessions.engine_of(prompt, self.loads, candidates)
        choice = self._policy.pick(self.loads, candidates if engine is None else (engine,), prompt)
        self.note_session(prompt, choice.engine)
        return choice

    def note_session(self, prompt: PromptHashes, engine: int) -> None:
        """Remember where the prompt's session is now, if it has one."""
        if prompt.session is not None:
            self._sessions.remember(prompt.session, engine)

    def learn(self, engine: int, beginnings: Iterable[int], sessions: Iterable[int]) -> None:
        """Record what some front end sent to an engine: keys from `remembered_beginnings`, and keys of sessions."""
        self._policy.learn(engine, beginnings)
        for key in sessions:
            self._sessions.remember(key, engine)


def make_prompt(prompt: Sequence[int] | str, salt: bytes, session: int | None = None) -> PromptHashes:
    """Hash the beginnings of a prompt and its cache salt for a policy. `session`: the key of its session."""
    size = CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 4
    if isinstance(prompt, str):
        data = prompt[: size * BOUNDARIES[-1]].encode()
    else:
        head = prompt[: BOUNDARIES[-1]]
        data = (head if isinstance(head, array) else array("I", head)).tobytes()
    begun = hashlib.blake2b(len(salt).to_bytes(4, "little") + salt, digest_size=8)
    view, keys, start = memoryview(data), [], 0
    for boundary in BOUNDARIES:
        end = size * boundary
        if end > len(data):
            break
        begun.update(view[start:end])
        keys.append(int.from_bytes(begun.copy().digest(), "little"))
        start = end
    return PromptHashes(_length(prompt), prefix_key(prompt, salt), keys, session)


def session_key(session: str, tenant: str = "") -> int | None:
    """Return a 64-bit hash of a tenant's session name; None if the name is empty."""
    if not session:
        return None
    owner = tenant.encode()
    name = session.encode("utf-8", "surrogatepass")  # JSON may hold lone surrogates
    return _hash64(b"session" + len(owner).to_bytes(4, "little") + owner + name)


def prefix_key(prompt: Sequence[int] | str, salt: bytes, num_tokens: int = AFFINITY_TOKENS) -> int:
    """Return a 64-bit hash of a prompt's first `num_tokens` and its cache salt."""
    if isinstance(prompt, str):
        beginning = prompt[: CHARACTERS_PER_TOKEN * num_tokens].encode()
    else:
        head = prompt[:num_tokens]
        beginning = (head if isinstance(head, array) else array("I", head)).tobytes()
    return _hash64(len(salt).to_bytes(4, "little") + salt + beginning)


def _length(prompt: Sequence[int] | str) -> int:
    """Return the number of tokens of a prompt; of text an estimate."""
    return -(-len(prompt) // CHARACTERS_PER_TOKEN) if isinstance(prompt, str) else len(prompt)


def mix(value: int) -> int:
    """Mix 64 bits with the finalizer of MurmurHash3 (Appleby): every output bit depends on every input bit."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
