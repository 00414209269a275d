"""Compiled grammars and what is known of others, bounded in bytes.

Copies of a compiled grammar share the states of its lexer, which are made as they are needed: what is kept grows while
outputs are made under it. llguidance does not say by how much, so it is told from the processor time spent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from llguidance import LLMatcher

from inferengine.structure import GrammarSpec
from inferengine.structured.compile_process import Verdict
from inferengine.structured.matcher import Usage

CACHE_BYTES = 128 * 1024 * 1024
BYTES_PER_GRAMMAR = 64 * 1024  # measured resident cost of a small grammar
GROWTH_BYTES_PER_S = 256 * 1024 * 1024  # measured of one that makes new states all the time
MAX_GROWTH_BYTES = 32 * 1024 * 1024  # of MAX_LEXER_STATES small states
RETIRE_S = 1.0  # so much use may have made most of its states: the next request begins with fresh ones
MAX_VERDICTS = 4096


class Entry(NamedTuple):
    """A grammar at its beginning, and what its outputs have spent."""

    matcher: LLMatcher
    usage: Usage
    num_bytes: int

    @property
    def size(self) -> int:
        return self.num_bytes + min(MAX_GROWTH_BYTES, int(self.usage.seconds * GROWTH_BYTES_PER_S))


class GrammarCache:
    """Least recently used goes first. Not for several threads at once."""

    def __init__(self, num_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = num_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    def entry(self, key: bytes) -> Entry | None:
        """The compiled grammar, unless it is used up."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.usage.seconds > RETIRE_S or entry.usage.failure is not None:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry

    def verdict(self, key: bytes) -> Verdict | None:
        """What compiling it took, or why it is refused; None: nobody has tried."""
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return verdict

    def keep(self, key: bytes, entry: Entry) -> bool:
        """Whether others had to go for it."""
        self._entries[key] = entry
        is_full = self.size > self.max_bytes
        while self._entries and self.size > self.max_bytes:
            self._entries.popitem(last=False)
        return is_full

    def remember(self, key: bytes, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)


def cache_key(spec: GrammarSpec) -> bytes:
    """Equal for equal grammars, 32 bytes for any."""
    digest = hashlib.sha256()
    for part in (spec.kind, spec.source, "-" if spec.whitespace is None else f"={spec.whitespace}"):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
