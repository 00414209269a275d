"""Stop strings in a stream: found wherever the tokens cut them, and never shown, not even their first half.

One automaton (Aho and Corasick, 1975) for all strings of a request: a state is the longest end of the text so far that
begins some stop string, so its depth is exactly the number of characters to hold back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """`text` may be given out now; `stop` is the string that ended the output, or None."""

    text: str
    stop: str | None


class StopStrings:
    """Matcher of one output. The match that completes first wins, of several that end together the longest, so the
    result does not depend on how the text was cut."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._links()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take more text; after a match nothing more may be pushed."""
        state = self._state
        for position, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            stop = self._match[state]
            if stop is not None:
                seen, self._held = self._held + text[: position + 1], ""
                return StopMatch(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._state = state
        seen = self._held + text
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def flush(self) -> str:
        """What is held back, once it is known that the output ended otherwise."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _links(self) -> list[int]:
        """For each state the longest proper end of it that is a state too, breadth first."""
        fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for character, child in self._next[state].items():
                link = fail[state]
                while link and character not in self._next[link]:
                    link = fail[link]
                fail[child] = self._next[link].get(character, 0)
                queue.append(child)
        return fail
