"""Which proposer a configuration asks for. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from inferengine.config import Config
from inferengine.core.executor import Capacity
from inferengine.core.sequence import Sequence
from inferengine.core.speculation.controller import Proposer
from inferengine.core.speculation.ngram import NgramProposer


class DraftModelProposer:
    """The guesses are made on the device, by the executor's draft model: here only their number is known."""

    on_device = True

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return [0] * max_tokens

    def forget(self, sequence: Sequence) -> None:
        """It remembers nothing."""


PROPOSERS: dict[str, Callable[[], Proposer | None]] = {
    "none": lambda: None,
    "ngram": NgramProposer,
    "draft": DraftModelProposer,
}


def guess_method(config: Config, capacity: Capacity) -> str:
    """`speculation.method`, where `auto` is what the executor has come to: it has loaded a draft model, or not."""
    method = config.speculation.method
    if method == "auto":
        return "draft" if capacity.has_draft_model else "none"
    return method


def build_proposer(config: Config, capacity: Capacity) -> Proposer | None:
    """The proposer that guesses ahead; None where nobody does."""
    return PROPOSERS[guess_method(config, capacity)]()
