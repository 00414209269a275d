"""The least that still fails: fewer requests, then fewer features of each, then fewer settings.

What fails may depend on timing, so a smaller round counts as passed only after several tries. `runs` is whoever runs a
round and says what kinds of differences it had: the shrinker knows nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.gauntlet.asks import Ask
from tests.gauntlet.rounds import Round

Runs = Callable[[Round], set[str]]
TRIES = 4


def shrink(
    one: Round,
    kinds: set[str],
    runs: Runs,
    *,
    seconds: float,
    tries: int = TRIES,
    clock: Callable[[], float] = time.monotonic,
) -> Round:
    """Return the smallest round found in `seconds` that fails with one of `kinds`. `one` itself when it did not fail
    again."""
    deadline = clock() + seconds

    def fails(candidate: Round) -> bool:
        for _ in range(tries):
            if clock() > deadline:
                return False
            if runs(candidate) & kinds:
                return True
        return False

    best = _fewer_asks(one, fails, lambda: clock() > deadline)
    changed = True
    while changed and clock() < deadline:
        changed = False
        for candidate in _simpler(best):
            if clock() > deadline:
                break
            if fails(candidate):
                best, changed = candidate, True
                break
    return best


def _fewer_asks(one: Round, fails: Callable[[Round], bool], late: Callable[[], bool]) -> Round:
    """Shrink the requests by delta debugging (Zeller and Hildebrandt, 2002) over the requests."""
    asks, parts = list(one.asks), 2
    while len(asks) > 1 and not late():
        size = -(-len(asks) // parts)
        pieces = [asks[start : start + size] for start in range(0, len(asks), size)]
        candidates = (
            [*pieces, *([ask for ask in asks if ask not in piece] for piece in pieces)] if parts > 2 else pieces
        )
        for candidate in candidates:
            if candidate and len(candidate) < len(asks) and fails(replace(one, asks=tuple(candidate))):
                asks, parts = candidate, 2
                break
        else:
            if parts >= len(asks):
                break
            parts = min(2 * parts, len(asks))
    return replace(one, asks=tuple(asks))


def _simpler(one: Round) -> Iterator[Round]:
    """Yield rounds with one thing less, the largest first."""
    if one.kills_s:
        yield replace(one, kills_s=())
    for key in one.settings:
        if key not in ("cache.num_blocks", "cache.block_size", "cache.swap_gib"):
            yield replace(one, settings={name: value for name, value in one.settings.items() if name != key})
    for place, ask in enumerate(one.asks):
        for less in _less(ask):
            yield replace(one, asks=(*one.asks[:place], less, *one.asks[place + 1 :]))


def _less(ask: Ask) -> Iterator[Ask]:
    if ask.act is not None:
        yield replace(ask, act=None)
    if ask.grammar is not None:
        yield replace(ask, grammar=None)
    for name in ask.options:
        if name != "pooling":
            yield replace(ask, options={key: value for key, value in ask.options.items() if key != name})
    for name in ask.params:
        if name not in ("seed", "temperature", "max_tokens"):
            yield replace(ask, params={key: value for key, value in ask.params.items() if key != name})
    if ask.at_s:
        yield replace(ask, at_s=0.0)
    if ask.way != "wire" and not {"tools", "echo"} & ask.options.keys() and "bad_words" not in ask.params:
        yield replace(ask, way="wire", reply="both" if ask.reply != "embedding" else ask.reply)
    ids = ask.prompt.get("ids", ())
    if len(ids) > 1:
        yield replace(ask, prompt={"ids": ids[: len(ids) // 2]})
