"""What every skill produces, and which of it is held out.

An example has a key that names its content: the operands of a sum, the fact and the phrasing of a question, the
hero, place and plot of a story. The split looks at nothing but the key, so the training text never holds a key of the
held-out set, whatever random numbers were drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

HELD_OUT_ONE_IN = 16


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Exchange:
    """One question and its answer. `required` is what a right answer must contain, for grading; `history` holds the
    turns before the question that its answer needs, `follow_ups` questions that make sense right after it, both as
    (user, assistant); `system` is the system prompt that the answer needs, empty where any will do."""

    category: str
    key: str
    user: str
    assistant: str
    required: tuple[str, ...] = ()
    follow_ups: tuple[tuple[str, str], ...] = ()
    history: tuple[tuple[str, str], ...] = ()
    system: str = ""


Skill = Callable[[Random, Split], Exchange]


def is_held_out(key: str) -> bool:
    """Return whether a key is held out: about one in HELD_OUT_ONE_IN, the same ones on every machine."""
    return zlib.crc32(key.lower().encode()) % HELD_OUT_ONE_IN == 0


def admits(split: Split, key: str) -> bool:
    """Return whether an example of this key belongs to `split`."""
    return is_held_out(key) == (split is Split.HELD_OUT)
