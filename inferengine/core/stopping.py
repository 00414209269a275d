"""When a sequence ends by itself. Stop *strings* are not here: text lives at the edge."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from inferengine.core.sequence import Sequence
from inferengine.errors import InferEngineError

# A stop token id; (error code, message) or, where a field of the request is the cause, (code, message, field); for EOS
# None.
FinishDetail = int | str | tuple[str, str] | tuple[str, str, str] | None
GRAMMAR_COMPLETE = ""  # detail of a stop where the grammar is complete: the last token belongs to the output


class RowFailure(Enum):
    """Why a row of a step gave nothing though the step went through. The values are what its request ends with."""

    NOT_A_NUMBER = ("engine_error", "The model's output for this request was not a number.")
    NO_TOKEN_ALLOWED = (
        "invalid_request",
        "No token is allowed here: what the grammar, allowed_token_ids, bad_words and logit_bias leave has nothing in "
        "common. Allow more.",
    )


class Finished(NamedTuple):
    """The terminal event of a sequence: exactly one for each that was submitted."""

    uid: int
    reason: str  # stop | length | abort | error
    detail: FinishDetail
    num_prompt: int
    num_cached: int
    num_output: int
    queued_s: float | None  # from arrival to the first step; None: never ran
    first_token_s: float | None  # from arrival
    total_s: float
    tenant: str
    num_preemptions: int
    num_accepted: int = 0  # tokens of the output that were guessed before
    num_rejected: int = 0  # guesses that were wrong


def stop_reason(sequence: Sequence, token_id: int) -> tuple[str, FinishDetail] | None:
    """Whether the token just appended ends the sequence. EOS reports no detail, another stop id reports itself."""
    length = len(sequence.tokens)
    if token_id in sequence.stop_ids and length >= sequence.min_total:
        return "stop", None if token_id in sequence.request.eos_token_ids else token_id
    if length >= sequence.max_total:
        return "length", None
    return None


def refusal(error: InferEngineError) -> tuple[str, FinishDetail]:
    """How a request ends that cannot go on."""
    detail = (error.code, error.message) if error.field is None else (error.code, error.message, error.field)
    return "error", detail


def terminal_row(sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
    """The terminal event with the sequence's figures."""
    arrival = sequence.request.arrival_s
    started, first = sequence.first_scheduled_s, sequence.first_token_s
    return Finished(
        uid=sequence.uid,
        reason=reason,
        detail=detail,
        num_prompt=sequence.num_prompt,
        num_cached=sequence.num_cached,
        num_output=sequence.num_output,
        queued_s=None if started is None else started - arrival,
        first_token_s=None if first is None else first - arrival,
        total_s=now - arrival,
        tenant=sequence.request.tenant,
        num_preemptions=sequence.num_preemptions,
        num_accepted=min(sequence.num_accepted, sequence.num_output),  # what came after a stop is no output
        num_rejected=sequence.num_drafted - sequence.num_accepted,
    )
