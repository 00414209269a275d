"""Request: one accepted request, frozen. Sequence holds everything that changes while it runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One choice of one accepted submission. The intake has validated every field.

    `uid` is the engine's own number of it, unique for the life of the process. `choice` numbers the `n` choices
    of one submission; they share everything but their draws. `deadline_s` is on the engine's clock.
    """

    uid: int
    prompt_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int  # resolved: never None, never past the model's context; 0 where there is no output
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0  # resolved: the client's, or drawn by the intake
    choice: int = 0
    fork_of: int | None = None  # uid of the first choice of the same submission, whose prompt blocks this one shares
    priority: int = 0  # lower runs first
    tenant: str = ""
    cache_salt: bytes = b""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    grammar: GrammarSpec | None = None
    request_id: str = ""  # as the client names it, for logs only
    adapter: int = 0  # LoRA adapter on the device; 0: the model as it is
    emitted_ids: SequenceOf[int] = ()  # output of an engine before this one, which this request continues
    pooling: str | None = None  # "last" or "mean": an embedding request, which has max_tokens 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)
