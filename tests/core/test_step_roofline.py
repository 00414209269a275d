"""The share of the roofline: what steps must read and compute at least, over the time they took."""

from __future__ import annotations

import random

import pytest

from inferengine.core.executor import StepPlan
from inferengine.core.step_time import AttentionGroup, DevicePeaks, ModelWork, Roofline, decode_keys, phase_of

ONE_BYTE_A_SECOND = DevicePeaks(1.0, 1e30, "test")
ONE_OPERATION_A_SECOND = DevicePeaks(1e30, 1.0, "test")


def make_plan(
    decodes: list[int] = [],  # noqa: B006
    chunks: list[tuple[int, int]] = [],  # noqa: B006
    *,
    draws: bool = True,
    drafts: list[int] | None = None,
) -> StepPlan:
    """Make a plan of `decodes` by position and `chunks` by (start, count)."""
    starts, counts = [*decodes, *(start for start, _ in chunks)], [1] * len(decodes) + [count for _, count in chunks]
    return StepPlan(
        step=0,
        slots=list(range(len(starts))),
        starts=starts,
        counts=counts,
        samples=[True] * len(decodes) + [draws] * len(chunks),
        num_decodes=len(decodes),
        num_tokens=sum(counts),
        admitted=[],
        block_updates=[],
        num_drafts=drafts or [],
    )


def make_work(window: int | None = None, **changes: float) -> ModelWork:
    sizes = {"layer_bytes": 1000.0, "head_bytes": 100.0, "operations_per_token": 2000.0, "operations_per_draw": 200.0}
    return ModelWork(**{**sizes, **changes}, groups=(AttentionGroup(2.0, 5.0, window),))


def test_prompts_of_latents_count_keys_and_values_where_these_are_less() -> None:
    """A pair takes 5 with latents and 2 with keys and values, which take 9 of each token before the chunk: 10 new
    tokens are worth making those of 4 before, 2 not those of 90."""
    plain = Roofline(make_work(), ONE_OPERATION_A_SECOND)
    latents = Roofline(make_work()._replace(groups=(AttentionGroup(2.0, 5.0, None, 2.0, 9.0),)), ONE_OPERATION_A_SECOND)

    def saved(plan: StepPlan) -> float:
        return plain.work_of(plan).operations - latents.work_of(plan).operations

    assert saved(make_plan([7, 200])) == 0, "decodes are computed on latents"
    assert saved(make_plan([], [(0, 10)])) == 55 * 3
    assert saved(make_plan([7], [(4, 10), (0, 3)])) == 95 * 3 - 4 * 9 + 6 * 3
    assert saved(make_plan([], [(90, 2)])) == 0


def test_the_totals_are_of_all_steps_and_count_quantized_products_in_full() -> None:
    work = make_work(product_speed=2.0)
    roofline = Roofline(work, ONE_BYTE_A_SECOND)
    for plan in (make_plan([9]), make_plan([], [(0, 4)])):
        roofline.observe(plan, 1.0)
    found = roofline.to_map()
    assert found["read_bytes"] == 2 * (1000 + 100) + 2 * (10 + 4)
    assert found["operations"] == 5 * 2 * 2000 + 2 * 200 + 5 * (10 + 1 + 2 + 3 + 4)
    assert found["written_bytes"] == 5 * 2


def test_a_decode_reads_the_weights_once_and_the_context_of_every_row() -> None:
    least = Roofline(make_work(), ONE_BYTE_A_SECOND).least_s(make_plan([9, 19]))
    assert least == 1000 + 100 + 2 * (10 + 20)


def test_a_decode_computes_for_every_row() -> None:
    least = Roofline(make_work(), ONE_OPERATION_A_SECOND).least_s(make_plan([9, 19]))
    assert least == 2 * 2000 + 2 * 200 + 5 * (10 + 20)


def test_a_chunk_that_draws_nothing_needs_no_head() -> None:
    plan = make_plan([], [(4, 3)], draws=False)
    assert Roofline(make_work(), ONE_BYTE_A_SECOND).least_s(plan) == 1000 + 2 * 7
    assert Roofline(make_work(), ONE_OPERATION_A_SECOND).least_s(plan) == 3 * 2000 + 5 * (5 + 6 + 7)


def test_whichever_takes_longer_decides() -> None:
    work, plan = make_work(), make_plan([], [(0, 64)])
    peaks = DevicePeaks(1e3, 1e3, "test")
    both = [
        Roofline(work, peaks._replace(**one)).least_s(plan)
        for one in ({"bytes_per_s": 1e30}, {"operations_per_s": 1e30})
    ]
    assert Roofline(work, peaks).least_s(plan) == max(both)
    assert both[0] > both[1], "64 tokens of a prompt are arithmetic"


def test_what_ranks_send_each_other_comes_on_top() -> None:
    plan, alone = make_plan([], [(0, 64)]), Roofline(make_work(), ONE_BYTE_A_SECOND)
    shared = Roofline(make_work(sent_bytes_per_token=6.0), ONE_BYTE_A_SECOND._replace(sent_bytes_per_s=3.0))
    assert shared.least_s(plan) == alone.least_s(plan) + 64 * 2
    assert Roofline(shared.work, ONE_BYTE_A_SECOND).least_s(plan) == alone.least_s(plan), "the link is not known"


DECODE, PROMPT = make_plan([9]), make_plan([], [(0, 64)])  # 1,120 bytes; 138,600 operations


def test_peaks_that_were_measured_too_low_are_raised_by_steps_that_take_less_time() -> None:
    roofline = Roofline(make_work(), DevicePeaks(1000.0, 1e5, "test", is_measured=True))
    for _ in range(3):  # at 2,240 bytes and 277,200 operations a second
        roofline.observe(DECODE, 0.5)
        roofline.observe(PROMPT, 0.5)
    assert roofline.peaks.bytes_per_s == pytest.approx(2240, rel=0.01)
    assert roofline.peaks.operations_per_s == pytest.approx(277_200, rel=0.01)
    assert roofline.shares() == {"decode": pytest.approx(1.0, abs=0.01), "prefill": pytest.approx(1.0, abs=0.01)}
    roofline.observe(DECODE, 5.0)
    assert roofline.peaks.bytes_per_s == pytest.approx(2240, rel=0.01), "slow steps lower nothing"


@pytest.mark.parametrize(
    ("is_measured", "seconds"),
    [
        pytest.param(False, 0.5, id="a data sheet"),
        pytest.param(True, 0.05, id="a moment"),
        pytest.param(True, 2.0, id="slow"),
    ],
)
def test_other_peaks_stay(is_measured: bool, seconds: float) -> None:
    peaks = DevicePeaks(1000.0, 1e30, "test", is_measured=is_measured)
    roofline = Roofline(make_work(), peaks)
    for _ in range(10):
        roofline.observe(DECODE, seconds)
    assert roofline.peaks == peaks


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
def test_pairs_and_keys_are_those_inside_the_window(window: int | None) -> None:
    generator = random.Random(0)
    for _ in range(50):
        decodes = [generator.randrange(12) for _ in range(generator.randrange(4))]
        chunks = [(generator.randrange(12), generator.randrange(1, 12)) for _ in range(generator.randrange(1, 4))]
        rows = [range(start, start + 1) for start in decodes] + [range(s, s + c) for s, c in chunks]
        reach = [[range(max(0, at - window + 1) if window else 0, at + 1) for at in row] for row in rows]
        keys = sum(len(set().union(*map(set, row))) for row in reach)
        pairs = sum(len(seen) for row in reach for seen in row)
        nothing = {"layer_bytes": 0, "head_bytes": 0, "operations_per_token": 0, "operations_per_draw": 0}
        plan, work = make_plan(decodes, chunks), make_work(window, **nothing)
        assert Roofline(work, ONE_BYTE_A_SECOND).least_s(plan) == 2 * keys
        assert Roofline(work, ONE_OPERATION_A_SECOND).least_s(plan) == 5 * pairs
        assert decode_keys(plan.starts, len(decodes), window) == sum(len(row[0]) for row in reach[: len(decodes)])


@pytest.mark.parametrize(
    ("plan", "phase"),
    [
        (make_plan([3, 4]), "decode"),
        (make_plan([], [(0, 8)]), "prefill"),
        (make_plan([3], [(0, 8)]), "mixed"),
        (make_plan([3], [(5, 4)], drafts=[0, 3]), "decode"),
        (make_plan([], [(5, 4)], drafts=[3]), "decode"),
        (make_plan([], [(5, 4), (0, 8)], drafts=[3, 0]), "mixed"),
    ],
)
def test_rows_with_draft_tokens_are_decodes(plan: StepPlan, phase: str) -> None:
    assert phase_of(plan) == phase


def test_the_share_is_the_least_time_over_the_time_taken_and_follows_the_latest_steps() -> None:
    roofline, plan = Roofline(make_work(layer_bytes=0.0, head_bytes=0.0), ONE_BYTE_A_SECOND), make_plan([1])
    assert roofline.shares() == {}
    roofline.observe(plan, 8.0)
    assert roofline.shares() == {"decode": 0.5}
    for _ in range(40):
        roofline.observe(plan, 4.0)
    assert roofline.shares()["decode"] == pytest.approx(1.0, abs=1e-3)
    stats = roofline.to_map()
    assert (stats["steps"], stats["least_seconds"], stats["step_seconds"]) == (
        {"decode": 41},
        {"decode": 164.0},
        {"decode": 168.0},
    )
    assert stats["peak_source"] == "test"
