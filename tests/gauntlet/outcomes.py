"""What came of a request, as its client saw it. The same for the engine's answer and for the reference's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Row(NamedTuple):
    """Log-probabilities at one position. `top`: alternatives by token id."""

    logprob: float
    rank: int | None
    top: dict[int, float]


@dataclass
class Choice:
    """One output. None means: this way of asking does not tell."""

    tokens: list[int] | None = None
    text: str | None = None
    reason: str | None = None  # stop, length, abort, error; None: its client left before the end
    detail: Any = None  # of stop: token id, string, "" or None; of error and abort the code
    logprobs: list[Row] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    ends: int = 0  # terminal events


@dataclass
class Outcome:
    """One request. `refused`: the code of a refusal, before anything came."""

    refused: str | None = None
    message: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    prompt_logprobs: list[Row | None] | None = None
    embedding: list[float] | None = None
    left: bool = False  # its client went away, or cancelled
    problems: list[str] = field(default_factory=list)  # what no client may ever see
    begun_s: float = 0.0
    ended_s: float = 0.0
    longest_gap_s: float = 0.0
