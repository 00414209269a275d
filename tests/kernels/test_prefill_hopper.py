"""Prompt attention of Hopper cards. It needs one; without, it is compiled for one, and that is all."""

import random
import types
from typing import Any

import pytest
import torch

from inferengine.kernels.cuda.attention import prefill_hopper, row_tiles
from inferengine.kernels.cuda.attention.prefill_hopper import PrefillShape, fits, prefill_attention
from inferengine.kernels.cuda.dispatch import HopperPrefillConfig, hopper_prefill_config
from inferengine.kernels.cuda.split_k import Scratch
from tests.kernels.builders import (
    make_paged_case,
    make_scratch,
    reference_attention,
    relative_error,
    tolerance,
)

# heads, kv heads, head dim, block size, window, softcap, dtype
SHAPES = [
    (32, 8, 128, 64, None, None, torch.bfloat16),
    (16, 8, 128, 64, 70, 30.0, torch.bfloat16),
    (8, 1, 128, 128, 200, None, torch.bfloat16),
    (4, 4, 64, 64, None, 20.0, torch.float16),
    (16, 1, 64, 128, None, None, torch.bfloat16),
    (14, 2, 128, 64, None, None, torch.bfloat16),
    (14, 2, 64, 64, None, None, torch.bfloat16),
    (12, 2, 128, 64, 70, None, torch.bfloat16),
    (9, 3, 128, 64, None, None, torch.bfloat16),
    (6, 2, 96, 64, 300, None, torch.bfloat16),
    (5, 1, 80, 64, None, None, torch.bfloat16),
    (4, 2, 256, 64, 200, 50.0, torch.bfloat16),
    (4, 1, 192, 64, None, None, torch.float16),
]
ROW_LENS, COUNTS = [30, 17, 50, 1000, 300, 5, 513, 128], [1, 1, 50, 400, 300, 5, 513, 128]


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def groups_of(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of computing groups of the kernel for such heads."""
    return (2, 3) if head_dim == 64 else (2,)


def tuned(head_dim: int, groups: int, *, packs: bool = False) -> HopperPrefillConfig:
    return hopper_prefill_config(head_dim, 1)._replace(num_groups=groups, packs=packs)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


hopper = pytest.mark.skipif(not on_hopper(), reason="needs a CUDA device: Hopper")


@hopper
@pytest.mark.parametrize("spare", [0, 500], ids=["exact", "upper bound"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype", "groups", "packs"),
    [
        (*shape, groups, packs)
        for shape in SHAPES
        for groups in groups_of(shape[2])
        for packs in ((False,) if is_power_of_two(shape[0] // shape[1]) else (False, True))
    ],
)
def test_rows_of_all_lengths_equal_the_definition(
    heads, kv_heads, head_dim, block_size, window, softcap, dtype, groups, packs, spare, device
):
    case = make_paged_case(ROW_LENS, COUNTS, kv_heads, head_dim, block_size, dtype, device)
    q = torch.randn(sum(COUNTS), heads, head_dim, device=device).to(dtype)
    assert fits(q, case.kv)
    expected = reference_attention(q, case, 0.1, window, softcap)
    scratch = make_scratch(device)
    for first_row in (0, 2):
        skipped = sum(COUNTS[:first_row])
        out = torch.full((sum(COUNTS), heads * head_dim), float("nan"), device=device, dtype=dtype)
        prefill_attention(
            q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.1, window, softcap,
            first_row=first_row, num_tokens=sum(COUNTS) - skipped + spare, out=out, scratch=scratch,
            tuning=tuned(head_dim, groups, packs=packs),
        )  # fmt: skip
        assert relative_error(out[skipped:], expected[skipped:]) < tolerance(dtype)
        assert out[:skipped].isnan().all(), "decode rows belong to the decode kernel"
        assert not scratch.arrived.any(), "a launch must leave the counters at zero"


@hopper
@pytest.mark.parametrize(("counts", "lengths"), [(COUNTS, ROW_LENS), ([40, 3], [6040, 9003])], ids=["whole", "shared"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (128, None), (None, 20.0)])
@pytest.mark.parametrize("groups", groups_of(64))
def test_sinks_take_their_share(groups, window, softcap, counts, lengths, device):
    case = make_paged_case(lengths, counts, 8, 64, 64, torch.bfloat16, device)
    q = torch.randn(sum(counts), 64, 64, device=device, dtype=torch.bfloat16)
    sinks = torch.linspace(-5, 6, 64, device=device)
    out = torch.empty(sum(counts), 64 * 64, device=device, dtype=torch.bfloat16)
    prefill_attention(
        q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.1, window, softcap,
        first_row=0, num_tokens=sum(counts), out=out, scratch=Scratch(device), sinks=sinks, tuning=tuned(64, groups),
    )  # fmt: skip
    assert relative_error(out, reference_attention(q, case, 0.1, window, softcap, sinks)) < tolerance(torch.bfloat16)


@hopper
def test_more_tiles_than_programs_and_fewer_tokens_than_a_tile(device):
    for lengths in ([900] * 40, [3]):
        case = make_paged_case(lengths, lengths, 2, 128, 64, torch.bfloat16, device)
        q = torch.randn(sum(lengths), 8, 128, device=device, dtype=torch.bfloat16)
        out = torch.full((sum(lengths), 8 * 128), float("nan"), device=device, dtype=torch.bfloat16)
        prefill_attention(
            q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.1, None, None, first_row=0,
            num_tokens=sum(lengths), out=out,
        )  # fmt: skip
        assert relative_error(out, reference_attention(q, case, 0.1, None, None)) < tolerance(torch.bfloat16)


@hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "groups"),
    [(32, 8, 128, 2), (8, 2, 64, 2), (8, 2, 64, 3), (10, 2, 64, 3), (7, 1, 128, 2), (6, 1, 128, 2), (4, 2, 256, 2)],
)
@pytest.mark.parametrize("counts", [[40, 3], [1, 200, 2], [33]])
def test_few_queries_over_a_long_context_are_shared_by_programs(heads, kv_heads, head_dim, groups, counts, device):
    lengths = [9000 + 3 * count for count in counts]
    case = make_paged_case(lengths, counts, kv_heads, head_dim, 64, torch.bfloat16, device)
    q = torch.randn(sum(counts), heads, head_dim, device=device, dtype=torch.bfloat16)
    expected = reference_attention(q, case, 0.1, None, None)
    scratch = Scratch(device)
    results = []
    for _ in range(3):
        out = torch.full((sum(counts), heads * head_dim), float("nan"), device=device, dtype=torch.bfloat16)
        prefill_attention(
            q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.1, None, None, first_row=0,
            num_tokens=sum(counts), out=out, scratch=scratch, tuning=tuned(head_dim, groups),
        )  # fmt: skip
        results.append(out)
    assert relative_error(results[0], expected) < tolerance(torch.bfloat16)
    assert all(torch.equal(out, results[0]) for out in results), "the sums are added in their order"
    assert not scratch.arrived.any()


class Numbers:
    """A pointer into numbers, as a kernel's functions read them."""

    def __init__(self, numbers: list[int], at: int = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, offset: int) -> "Numbers":
        return Numbers(self.numbers, self.at + offset)

    @staticmethod
    def load(pointer: "Numbers") -> int:
        return pointer.numbers[pointer.at]


def as_python(kernel: Any, **more: Any) -> Any:
    """A kernel's function on Python's numbers."""
    language = types.SimpleNamespace(
        load=Numbers.load, maximum=max, minimum=min, cdiv=lambda a, b: -(-a // b), constexpr=object
    )
    names = {"gl": language, "tl": language, "LEAST_BLOCKS": prefill_hopper.LEAST_BLOCKS.value, **more}
    return types.FunctionType(kernel.fn.__code__, names)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 12, 16])
@pytest.mark.parametrize(("groups", "splits", "window"), [(2, 1, 0), (3, 1, 0), (2, 4, 0), (3, 5, 0), (2, 1, 100)])
def test_each_head_of_each_query_is_computed_once_with_all_its_keys(groups, splits, window, group, packs):
    draw = random.Random(f"{groups} {splits} {window} {group}")
    packs = packs or is_power_of_two(group)
    shape = PrefillShape(2, group, 128, 64, 128, 2, groups, bool(window), False, most_splits=splits, packs=packs)
    tile_at = as_python(prefill_hopper.tile_at, find_row=as_python(row_tiles.find_row))
    rows_of = as_python(prefill_hopper.rows_of)
    counts = [draw.choice([0, 1, 15, 64, 65, 130, 300]) for _ in range(5)] + [1]
    starts = [draw.choice([0, 7, 1000, 4000]) for _ in counts]
    begins = [sum(counts[:row]) for row in range(len(counts) + 1)]
    num_tiles = begins[-1] // (groups * shape.tokens) + len(counts)
    rows = (Numbers(starts), Numbers(begins), 0, len(counts), num_tiles, window, splits)
    keys: dict[tuple[int, int, int], list[int]] = {}  # of a row, a query and a head
    for place in range(num_tiles * shape.tiles_of_tokens * splits):
        valid, kv_head, row, first_query, count, start, *_, first_block, last_block, _, _, _, first_rows = tile_at(
            place, rows, shape
        )
        for part in range(groups if valid else 0):
            token, head = rows_of(first_rows, kv_head, part, shape)
            assert (first_query, count, start) == (begins[row], counts[row], starts[row])
            for i in range(64):
                if token + i // shape.packed_group < count and i % shape.packed_group < group:
                    at = (row, token + i // shape.packed_group, head + i % shape.packed_group)
                    keys.setdefault(at, []).extend(range(first_block, last_block + 1))
    heads = range(2 * group)
    assert set(keys) == {(row, t, h) for row, count in enumerate(counts) for t in range(count) for h in heads}
    for (row, token, _), blocks in keys.items():
        position = starts[row] + token
        needed = range(max(0, position - window + 1) // 128 if window else 0, position // 128 + 1)
        assert len(blocks) == len(set(blocks)), "a key would count twice"
        assert set(needed) <= set(blocks)


COMPILE = """
import sys
import torch
from inferengine.kernels.cuda.attention.prefill_hopper import attention_kernel
from inferengine.kernels.cuda.attention.prefill_hopper import descriptors
from inferengine.kernels.cuda.attention.prefill_hopper import PrefillShape

shape = PrefillShape(
    1, 2, 64, 64, block_tokens=64, stages=2, groups=int(sys.argv[1]), window=False, softcap=sys.argv[2] == "softcap",
    sinks=True, most_splits=2,
)
q, kv = torch.zeros(64, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 1, 64, 64, dtype=torch.bfloat16)
i32, f32 = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
kernel = attention_kernel.warmup(
    *descriptors(q, kv, shape), i32, i32, i32, i32, q, f32, f32, i32, f32, 2, 0, 1, 1, 1, 0.1, 1.0, 0.0, 0, SHAPE=shape,
    PDL=True, num_warps=4, launch_pdl=True, grid=(1,),
)
print("wgmma" in kernel.asm["ptx"], "cp.async.bulk.tensor" in kernel.asm["ptx"], "setmaxnreg" in kernel.asm["ptx"])
"""


@pytest.mark.parametrize(("groups", "scores"), [(2, "softcap"), (3, "plain")])
def test_the_kernel_compiles_for_hopper_without_a_card(groups, scores, compile_program):
    done = compile_program(COMPILE, str(groups), scores)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr[-2000:]
