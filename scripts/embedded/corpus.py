"""The training text, in numbered chunks. A chunk is drawn from its number alone: any process can make any chunk."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from . import conversation, plain_text
from .conversation import Message
from .example import Split

SHARE_PLAIN = 0.22
DOCUMENTS_PER_CHUNK = 2000
Document = list[Message] | str  # a chat, or a text without roles


def document(random: Random, split: Split) -> Document:
    if random.random() < SHARE_PLAIN:
        return plain_text.draw(random, split)
    return conversation.draw(random, split)


def chunk(number: int, split: Split = Split.TRAIN, count: int = DOCUMENTS_PER_CHUNK) -> Iterator[Document]:
    """Return the documents of chunk `number`; the same on every machine and Python version."""
    random = Random(f"{split.value} {number}")
    return (document(random, split) for _ in range(count))
