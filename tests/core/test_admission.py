"""Admission: a request is refused at once with the field's name, or accepted."""

from __future__ import annotations

import pytest

from inferengine.core.scheduler.queues import AdmissionLimits, admit, resolve_max_tokens
from inferengine.errors import InferEngineError, InvalidRequest

LIMITS = AdmissionLimits(max_model_len=100, num_kv_tokens=80, max_queued_requests=4, max_queued_tokens=1000)


def test_an_open_length_is_cut_to_what_context_and_pool_allow() -> None:
    assert resolve_max_tokens(30, None, LIMITS) == 50


def test_an_explicit_length_is_honoured() -> None:
    assert resolve_max_tokens(30, 20, LIMITS) == 20


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "code", "field"),
    [
        (0, 5, "invalid_request", "prompt"),
        (100, None, "context_length_exceeded", "prompt"),
        (90, None, "prompt_never_fits", "prompt"),
        (40, 50, "prompt_never_fits", "max_tokens"),
        (30, 71, "context_length_exceeded", "max_tokens"),  # no pool would help
    ],
)
def test_what_cannot_run_is_refused_by_name(num_prompt: int, max_tokens: int | None, code: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_max_tokens(num_prompt, max_tokens, LIMITS)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_a_context_too_long_says_how_much_is_left() -> None:
    with pytest.raises(InvalidRequest, match="at most 50"):  # what the pool leaves of it
        resolve_max_tokens(30, 71, LIMITS)
    roomy = AdmissionLimits(max_model_len=100, num_kv_tokens=1000, max_queued_requests=4, max_queued_tokens=1000)
    with pytest.raises(InvalidRequest, match="at most 60"):
        resolve_max_tokens(40, 61, roomy)


def test_an_empty_queue_takes_any_request() -> None:
    admit(5000, 9, queued_requests=0, queued_tokens=0, tokens_per_s=0.0, limits=LIMITS)
    with pytest.raises(InferEngineError):
        admit(5000, 9, queued_requests=1, queued_tokens=5, tokens_per_s=0.0, limits=LIMITS)


@pytest.mark.parametrize(("queued_requests", "queued_tokens"), [(4, 10), (1, 995)])
def test_a_full_queue_says_when_to_come_back(queued_requests: int, queued_tokens: int) -> None:
    with pytest.raises(InferEngineError) as caught:
        admit(10, 1, queued_requests=queued_requests, queued_tokens=queued_tokens, tokens_per_s=100.0, limits=LIMITS)
    assert caught.value.code == "overloaded"
    assert caught.value.retry_after_s is not None
    assert 1.0 <= caught.value.retry_after_s <= 60.0


@pytest.mark.parametrize("queued", [(4, 10), (1, 995), (7, 10)])
def test_a_queue_that_others_have_filled_takes_a_tenant_with_less_than_its_share(queued: tuple[int, int]) -> None:
    def is_refused(ahead: tuple[int, int]) -> bool:
        try:
            admit(
                10,
                1,
                queued_requests=queued[0],
                queued_tokens=queued[1],
                tokens_per_s=0.0,
                limits=LIMITS,
                ahead=ahead,
            )
        except InferEngineError:
            return True
        return False

    assert is_refused(queued)
    assert not is_refused((0, 0))


@pytest.mark.parametrize(("queued", "ahead"), [((8, 10), (0, 0)), ((4, 1995), (0, 0)), ((4, 10), (4, 10))])
def test_twice_the_limit_is_the_most_and_ones_share_is_ones_share(
    queued: tuple[int, int], ahead: tuple[int, int]
) -> None:
    with pytest.raises(InferEngineError, match="full"):
        admit(10, 1, queued_requests=queued[0], queued_tokens=queued[1], tokens_per_s=0.0, limits=LIMITS, ahead=ahead)


def test_a_deadline_is_held_against_what_is_admitted_before() -> None:
    """Others' prompts that come later by fair share take nothing from it."""
    queued = {"queued_requests": 3, "queued_tokens": 900, "tokens_per_s": 10.0, "limits": LIMITS, "time_left_s": 5.0}
    with pytest.raises(InferEngineError, match="deadline"):
        admit(10, 1, **queued)  # type: ignore[arg-type]
    admit(10, 1, **queued, ahead=(0, 0))  # type: ignore[arg-type]
