"""Decode attention of rows that share a prefix: what each row gives by itself, whatever the groups."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
import triton

from inferengine.kernels.batch import MOST_GROUPS, SharedPrefixColumns
from inferengine.kernels.cuda.attention import shared_prefix
from inferengine.kernels.cuda.attention.shared_prefix import shared_decode_attention
from inferengine.kernels.cuda.dispatch import PrefixConfig, prefix_attention_config
from tests.kernels.builders import (
    PagedCase,
    make_paged_case,
    make_scratch,
    reference_attention,
    relative_error,
    tolerance,
    with_dtypes,
)

Group = tuple[list[int], int]  # rows, blocks of their prefix
SMALL = PrefixConfig(block_m=16, block_tokens=32, num_splits=4, num_warps=4, num_stages=2)


def sharing(case: PagedCase, groups: Sequence[Group]) -> SharedPrefixColumns:
    """Let the rows of each group begin with the blocks of its first row."""
    block_size, device = case.kv.shape[3], case.kv.device
    lengths = torch.zeros(len(case.row_len), dtype=torch.int32)
    members, table = [], torch.zeros(3, MOST_GROUPS, dtype=torch.int32)
    for number, (rows, blocks) in enumerate(groups):
        slots = case.row_slot[rows].long()
        case.block_table[slots, :blocks] = case.block_table[slots[:1], :blocks]
        lengths[rows] = blocks * block_size
        table[:, number] = torch.tensor([len(members), len(rows), blocks * block_size])
        members += rows
    members += [7777] * (len(lengths) - len(members))  # never read
    return SharedPrefixColumns(
        lengths.to(device), torch.tensor(members, dtype=torch.int32, device=device), table.to(device)
    )


def compare(case: PagedCase, groups: Sequence[Group], heads: int, dtype: torch.dtype, **options) -> None:
    num_rows, head_dim = len(case.row_len), case.kv.shape[4]
    scale, softcap, sinks = 0.2, options.pop("softcap", None), options.pop("sinks", None)
    shared = sharing(case, groups)
    q = torch.randn(num_rows, heads, head_dim, device=case.kv.device).to(dtype)
    scratch = options.pop("scratch", None) or make_scratch(case.kv.device)
    expected = reference_attention(q, case, scale, None, softcap, sinks)
    out = shared_decode_attention(
        q, case.kv, case.row_slot, case.row_len, case.block_table, shared, scale, softcap, scratch, sinks=sinks,
        **{"config": SMALL, **options},
    )  # fmt: skip
    assert relative_error(out, expected) < tolerance(dtype)
    for row in range(num_rows):
        assert relative_error(out[row], expected[row]) < 4 * tolerance(dtype), row
    assert not scratch.arrived.any(), "a launch must leave the arrival counters at zero"


# heads, kv heads, head dim, block size, softcap
SHAPES = [
    (8, 2, 32, 16, None),
    (4, 4, 64, 32, None),
    (7, 1, 16, 16, 20.0),
    (6, 2, 80, 16, None),
    (4, 2, 24, 64, 20.0),
    (2, 1, 256, 64, None),
    (2, 1, 512, 16, None),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "softcap", "dtype"), with_dtypes(SHAPES))
def test_rows_in_groups_give_what_each_gives_by_itself(heads, kv_heads, head_dim, block_size, softcap, dtype, device):
    row_lens = [129, 200, 40, 0, 65, 131, 1, 300]
    case = make_paged_case(row_lens, [1] * len(row_lens), kv_heads, head_dim, block_size, dtype, device)
    groups = [([1, 5, 0, 7], 128 // block_size), ([4, 2], 1 if block_size < 40 else 0)]
    for num_splits in (1, 4):
        compare(case, groups, heads, dtype, softcap=softcap, num_splits=num_splits)


@pytest.mark.parametrize("seed", range(4))
def test_any_grouping_of_rows_of_any_lengths(seed, device):
    rng = random.Random(seed)
    row_lens = [rng.choice((0, 1, rng.randrange(2, 400))) for _ in range(rng.randrange(2, 14))]
    case = make_paged_case(row_lens, [1] * len(row_lens), 1, 16, 16, torch.float32, device)
    rows = [row for row, length in enumerate(row_lens) if length > 16]
    rng.shuffle(rows)
    groups: list[Group] = []
    while len(rows) > 1 and rng.random() < 0.9:
        members = [rows.pop() for _ in range(rng.randint(1, len(rows)))]
        groups.append((members, rng.randint(1, (min(row_lens[row] for row in members) - 1) // 16)))
    compare(case, groups, 4, torch.float32, num_splits=rng.choice((1, 3)))


def test_more_rows_than_a_tile_has_room_for_and_as_many_groups_as_there_may_be(device):
    row_lens = [33 + row for row in range(22)]
    case = make_paged_case(row_lens, [1] * len(row_lens), 2, 16, 16, torch.float32, device)
    compare(case, [(list(range(22)), 2)], 8, torch.float32)
    pairs = [([2 * number, 2 * number + 1], 1 + number % 2) for number in range(MOST_GROUPS)]
    compare(case, pairs, 8, torch.float32)


def test_rows_without_a_group_equal_the_definition(device):
    case = make_paged_case([70, 1, 0], [1, 1, 1], 1, 16, 16, torch.float32, device)
    compare(case, [], 2, torch.float32)


def test_sinks_count_once(device):
    case = make_paged_case([70, 90, 64], [1, 1, 1], 2, 16, 16, torch.float32, device)
    sinks = torch.tensor([-40.0, -3.0, 0.0, 300.0], device=device)
    for num_splits in (1, 4):
        compare(case, [([0, 1], 4)], 4, torch.float32, sinks=sinks, num_splits=num_splits)


def test_scales_of_a_cache_apply_to_both_parts(device):
    case = make_paged_case([70, 90, 64], [1, 1, 1], 2, 16, 16, torch.float32, device)
    shared = sharing(case, [([0, 1], 4)])
    q = torch.randn(3, 4, 16, device=device)
    out = shared_decode_attention(
        q, case.kv, case.row_slot, case.row_len, case.block_table, shared, 0.2, None, make_scratch(device),
        kv_scales=(0.5, 3.0), config=SMALL,
    )  # fmt: skip
    assert relative_error(out, 3.0 * reference_attention(q, case, 0.1, None, None)) < 1e-5


@pytest.mark.parametrize(("floats", "launches"), [(1 << 17, 1), (3 * 4 * 17 * 2 + 32, 1), (3 * 4 * 17, 0)])
def test_prefixes_take_as_much_scratch_memory_as_there_is(floats, launches, device, monkeypatch):
    found = []
    inner = shared_prefix._attend_prefixes
    monkeypatch.setattr(shared_prefix, "_attend_prefixes", lambda *a: found.append(a) or inner(*a))
    case = make_paged_case([170, 190, 64], [1, 1, 1], 2, 16, 16, torch.float32, device)
    compare(case, [([0, 1], 10)], 4, torch.float32, scratch=make_scratch(device, num_floats=floats))
    assert len(found) == launches


def test_heads_of_512_fit_but_in_fp32_or_in_large_groups():
    for heads, kv_heads in ((8, 2), (16, 1), (32, 4)):
        config = prefix_attention_config(64, heads, kv_heads, 512, is_fp32=False)
        assert config is not None
        assert config.block_m == 32
    assert prefix_attention_config(64, 8, 2, 512, is_fp32=True) is None
    assert prefix_attention_config(64, 64, 1, 512, is_fp32=False) is None


def test_configurations_have_room_for_whole_rows():
    for heads, kv_heads in ((32, 8), (32, 32), (14, 2), (71, 1), (128, 8)):
        for num_rows, head_dim, is_fp32 in itertools.product((2, 16, 64, 512), (64, 80, 128, 256), (False, True)):
            config = prefix_attention_config(num_rows, heads, kv_heads, head_dim, is_fp32=is_fp32)
            assert config is not None
            assert config.block_m % triton.next_power_of_2(heads // kv_heads) == 0
            assert config.num_splits & (config.num_splits - 1) == 0


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "dtype"),
    with_dtypes(
        [(24, 8, 2, 16), *(((64, 32, 8, 128), (16, 14, 2, 64), (48, 16, 8, 256)) if torch.cuda.is_available() else ())]
    ),
)
def test_launches_as_of_steps_of_so_many_rows(rows, heads, kv_heads, head_dim, dtype, device):
    rng = random.Random(rows)
    row_lens = [rng.randrange(200, 500) for _ in range(rows)]
    case = make_paged_case(row_lens, [1] * rows, kv_heads, head_dim, 64, dtype, device)
    half = rows // 2
    compare(case, [(list(range(half)), 3), (list(range(half + 2, rows)), 2)], heads, dtype,
            config=prefix_attention_config(rows, heads, kv_heads, head_dim, is_fp32=dtype == torch.float32),
            scratch=make_scratch(device, num_floats=1 << 22))  # fmt: skip


def test_more_heads_than_a_tile_has_room_for_are_attended_row_by_row(device):
    assert prefix_attention_config(16, 129, 1, 64, is_fp32=False) is None
    case = make_paged_case([40, 50], [1, 1], 1, 16, 16, torch.float32, device)
    compare(case, [], 129, torch.float32, config=None)
