"""Load-balancing policies of other systems, for comparison only: they implement `client.load_balancing.Policy`.

- random: any engine.
- least_loaded: the engine with the fewest requests, by the same reports that our policies see.
- cache_aware: SGLang's router, after its published description (README and documentation of sgl-router, 2024 to 2026).
  It keeps a radix tree of what it has sent to each worker, and counts its open requests at each as the load. If loads
  are unequal (the largest more than `balance_abs_threshold` above the smallest, and more than `balance_rel_threshold`
  times it), the worker with the fewest gets the request. Otherwise it goes to the worker with the longest matching
  beginning if the match is more than `cache_threshold` of the prompt, else to the worker with the smallest tree. The
  defaults are SGLang's. Here the tree is approximated by hashes at BOUNDARIES. It never evicts, because the real limit
  is larger than these runs need.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from inferengine.client.load_balancing import BOUNDARIES, POLICIES, ChosenEngine, EngineLoads, Policy, PromptHashes


class RandomChoice(Policy):
    """Any engine."""

    wants_keys = False

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return one of the candidates."""
        return ChosenEngine(candidates[int(self._random() * len(candidates))], prompt.num_tokens)


class LeastLoaded(Policy):
    """The engine with the fewest requests."""

    wants_keys = False

    def __init__(self, generator: random.Random) -> None:
        self._random = generator.random

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the candidate with the fewest requests; among equals the first after a random position."""
        begin = int(self._random() * len(candidates))
        turned = [*candidates[begin:], *candidates[:begin]]
        counts = list(map(loads.num_requests.__getitem__, turned))
        return ChosenEngine(turned[counts.index(min(counts))], prompt.num_tokens)


class CacheAware(Policy):
    """SGLang's router; see the module. Call `ended` when a request ends."""

    wants_keys = True

    def __init__(
        self,
        generator: random.Random,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._abs_threshold, self._rel_threshold = balance_abs_threshold, balance_rel_threshold
        self._tree: dict[int, dict[int, None]] = {}  # by key: the workers that got this beginning, in order
        self._sizes: list[int] = []
        self._open: list[int] = []

    def ended(self, engine: int) -> None:
        """Count that an open request of this worker has ended."""
        self._open[engine] -= 1

    def pick(self, loads: EngineLoads, candidates: Sequence[int], prompt: PromptHashes) -> ChosenEngine:
        """Return the worker that the published rules choose."""
        while len(self._open) < len(loads.num_requests):
            self._open.append(0)
            self._sizes.append(0)
        opened = list(map(self._open.__getitem__, candidates))
        most, fewest = max(opened), min(opened)
        if most - fewest > self._abs_threshold and most > self._rel_threshold * fewest:
            engine = candidates[opened.index(fewest)]
        else:
            engine = self._by_tree(candidates, prompt)
        known = self._insert(engine, prompt)
        self._open[engine] += 1
        return ChosenEngine(engine, max(1, prompt.num_tokens - known))

    def _by_tree(self, candidates: Sequence[int], prompt: PromptHashes) -> int:
        allowed = frozenset(candidates)
        for place in range(len(prompt.keys) - 1, -1, -1):
            if BOUNDARIES[place] <= self._cache_threshold * prompt.num_tokens:
                break
            for engine in self._tree.get(prompt.keys[place], ()):
                if engine in allowed:
                    return engine
        sizes = list(map(self._sizes.__getitem__, candidates))
        return candidates[sizes.index(min(sizes))]

    def _insert(self, engine: int, prompt: PromptHashes) -> int:
        """Add a prompt to a worker's tree. Returns how many of its tokens the tree had already."""
        known, last = 0, 0
        for place, key in enumerate(prompt.keys):
            workers = self._tree.setdefault(key, {})
            if engine in workers:
                known = BOUNDARIES[place]
            else:
                workers[engine] = None
                self._sizes[engine] += BOUNDARIES[place] - last
            last = BOUNDARIES[place]
        self._sizes[engine] += prompt.num_tokens - last
        return known


COMPARED: dict[str, Callable[[random.Random], Policy]] = {
    **POLICIES,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "cache_aware": CacheAware,
}
