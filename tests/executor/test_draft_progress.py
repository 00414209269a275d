"""How far a draft model has read: what it must read again, and what not."""

from __future__ import annotations

from inferengine.core.executor import BlockCopies, BlockUpdates, SlotInit, StepPlan
from inferengine.executor.draft_model import DraftProgress
from inferengine.sampling_params import SamplingParams

BLOCK = 4


def make_plan(
    slot: int,
    start: int,
    count: int = 1,
    *,
    admitted: bool = False,
    blocks: dict[int, int] | None = None,
    swap_in: list[int] | None = None,
) -> StepPlan:
    """Return a step of one row. `blocks` are new entries of its table, by index."""
    blocks = blocks or {}
    return StepPlan(
        step=1,
        slots=[slot],
        starts=[start],
        counts=[count],
        samples=[True],
        num_decodes=int(count == 1),
        num_tokens=count,
        admitted=[SlotInit(slot, [5] * (start + count), start + count, SamplingParams(), 0, ())] if admitted else [],
        block_updates=[BlockUpdates([slot] * len(blocks), list(blocks), list(blocks.values()))],
        swap_in=[BlockCopies(list(range(len(swap_in))), swap_in)] if swap_in else (),
    )


def make_progress() -> DraftProgress:
    return DraftProgress(num_slots=4, num_blocks=20, max_blocks=8, block_size=BLOCK)


def read_first(progress: DraftProgress) -> None:
    """Read slot 0 first: 10 tokens in blocks 7, 3 and 9, all read, with 3 draft tokens after them."""
    progress.begin(make_plan(0, 0, 9, admitted=True, blocks={0: 7, 1: 3, 2: 9}))
    progress.begin(make_plan(0, 9, 4))
    assert progress.num_read(0) == 0
    progress.has_read(0, 10, 3)


def test_rejected_draft_tokens_are_computed_again_and_accepted_ones_are_not() -> None:
    for start, read in ((10, 10), (12, 12), (13, 13), (14, 13)):
        progress = make_progress()
        read_first(progress)
        progress.begin(make_plan(0, start))
        assert progress.num_read(0) == read


def test_a_prefix_hit_is_read_as_far_as_its_blocks_were() -> None:
    progress = make_progress()
    read_first(progress)
    progress.begin(make_plan(1, 8, 3, admitted=True, blocks={0: 7, 1: 3, 2: 12}))
    assert progress.num_read(1) == 8
    progress.begin(make_plan(2, 12, 3, admitted=True, blocks={0: 7, 1: 3, 2: 9, 3: 13}))
    assert progress.num_read(2) == 8  # block 9 was not full


def test_a_block_that_was_given_away_has_to_be_read_again() -> None:
    progress = make_progress()
    read_first(progress)
    progress.begin(make_plan(1, 0, 4, admitted=True, blocks={0: 7}))
    progress.begin(make_plan(2, 8, 1, admitted=True, blocks={0: 7, 1: 3, 2: 11}))
    assert progress.num_read(2) == 0


def test_what_comes_back_from_the_host_has_to_be_read_again() -> None:
    progress = make_progress()
    read_first(progress)
    progress.begin(make_plan(1, 8, 1, admitted=True, blocks={0: 7, 1: 3, 2: 11}, swap_in=[7, 3]))
    assert progress.num_read(1) == 0
