import pytest
import torch

from inferengine.kernels.batch import NewKeys
from inferengine.kernels.cuda.attention.decode import decode_attention, decode_attention_qkv
from inferengine.kernels.cuda.attention.prefill import prefill_attention
from inferengine.kernels.cuda.dispatch import PrefillConfig, decode_rule
from tests.kernels.builders import (
    make_paged_case,
    make_scratch,
    reference_attention,
    reference_norm,
    reference_rope,
    relative_error,
    tolerance,
    with_dtypes,
)

# heads, kv heads, head dim, block size, window, softcap
SHAPES = [
    (8, 2, 32, 16, None, None),
    (4, 4, 64, 32, None, None),
    (7, 1, 16, 16, 20, None),
    (4, 2, 24, 64, None, 20.0),
    (2, 1, 128, 64, 70, 30.0),
]
WIDE = (4, 1, 512, 16)  # heads, kv heads, head dim, block size: Gemma 4's layers with full attention


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype"), with_dtypes(SHAPES)
)
def test_decode_attention(heads, kv_heads, head_dim, block_size, window, softcap, dtype, device):
    row_lens = [1, 150, 0, 64]
    case = make_paged_case(row_lens, [1] * len(row_lens), kv_heads, head_dim, block_size, dtype, device)
    q = torch.randn(len(row_lens), heads, head_dim, device=device).to(dtype)
    expected = reference_attention(q, case, 0.2, window, softcap)
    scratch = make_scratch(device)
    for num_splits in (1, 4):
        out = torch.full((len(row_lens), heads * head_dim), float("nan"), device=device, dtype=dtype)
        decode_attention(
            q, case.kv, case.row_slot, case.row_len, case.block_table, 0.2, window, softcap, scratch, out=out,
            num_splits=num_splits,
        )  # fmt: skip
        assert relative_error(out, expected) < tolerance(dtype)
        assert not scratch.arrived.any(), "a launch must leave the arrival counters at zero"


@pytest.mark.parametrize("rows", [16, 64, 256])
def test_launches_for_so_many_rows_of_very_unequal_lengths(rows, device):
    row_lens = [1, 65, 1100]
    case = make_paged_case(row_lens, [1] * len(row_lens), 1, 16, 64, torch.float32, device)
    q = torch.randn(len(row_lens), 4, 16, device=device)
    tuned = decode_rule(rows, num_kv_heads=8, head_dim=128)
    scratch = make_scratch(device)
    out = decode_attention(
        q, case.kv, case.row_slot, case.row_len, case.block_table, 0.2, None, None, scratch, tuning=tuned
    )
    assert relative_error(out, reference_attention(q, case, 0.2, None, None)) < tolerance(torch.float32)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "softcap"), SHAPES[::2])
def test_decode_attention_from_packed_qkv_writes_the_new_token(
    heads, kv_heads, head_dim, block_size, window, softcap, qk_norm, device
):
    row_lens = [1, 150, 0, 64]
    case = make_paged_case(row_lens, [1] * len(row_lens), kv_heads, head_dim, block_size, torch.float32, device)
    qkv = torch.randn(len(row_lens), (heads + 2 * kv_heads) * head_dim, device=device)
    cos_sin = torch.randn(256, head_dim, device=device)
    q_norm = torch.randn(head_dim, device=device) if qk_norm else None
    k_norm = torch.randn(head_dim, device=device) if qk_norm else None

    q, k, v = qkv.view(len(row_lens), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    positions = (case.row_len - 1).clamp_min(0)
    if q_norm is not None and k_norm is not None:
        q, k = reference_norm(q, q_norm, 1e-6), reference_norm(k, k_norm, 1e-6)
    q, k = reference_rope(q, cos_sin, positions), reference_rope(k, cos_sin, positions)
    expected_kv = case.kv.clone()
    for row, length in enumerate(row_lens):
        if length:
            block = int(case.block_table[int(case.row_slot[row]), (length - 1) // block_size])
            expected_kv[block, 0, :, (length - 1) % block_size] = k[row].float()
            expected_kv[block, 1, :, (length - 1) % block_size] = v[row]
    scratch = make_scratch(device)
    actual_kv = case.kv.clone()
    for num_splits in (1, 4):
        actual_kv.copy_(case.kv)
        out = decode_attention_qkv(
            qkv, q_norm, k_norm, 1e-6, cos_sin, actual_kv, case.row_slot, case.row_len, case.block_table, heads, 0.2,
            window, softcap, scratch, num_splits=num_splits,
        )  # fmt: skip
        torch.testing.assert_close(actual_kv, expected_kv, rtol=1e-4, atol=1e-4)
        case.kv.copy_(expected_kv)
        expected = reference_attention(q, case, 0.2, window, softcap)
        assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype"), with_dtypes(SHAPES)
)
def test_prefill_attention(heads, kv_heads, head_dim, block_size, window, softcap, dtype, device):
    row_lens, counts = [30, 17, 50, 100, 5], [1, 1, 50, 30, 5]
    case = make_paged_case(row_lens, counts, kv_heads, head_dim, block_size, dtype, device)
    q = torch.randn(sum(counts), heads, head_dim, device=device).to(dtype)
    expected = reference_attention(q, case, 0.2, window, softcap)
    for first_row in (0, 2):
        skipped = sum(counts[:first_row])
        out = torch.zeros(sum(counts), heads * head_dim, device=device, dtype=dtype)
        prefill_attention(
            q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.2, window, softcap,
            first_row=first_row, num_tokens=sum(counts) - skipped, out=out,
            tuning=PrefillConfig(32, 32, 4, 2),
        )  # fmt: skip
        assert relative_error(out[skipped:], expected[skipped:]) < tolerance(dtype)
        assert not out[:skipped].any(), "decode rows belong to the decode kernel"


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_512(dtype, num_splits, device):
    heads, kv_heads, head_dim, block_size = WIDE
    row_lens, counts = [70, 1, 40], [1, 1, 9]
    case = make_paged_case(row_lens, counts, kv_heads, head_dim, block_size, dtype, device)
    q = torch.randn(sum(counts), heads, head_dim, device=device).to(dtype)
    expected, scratch = reference_attention(q, case, 0.05, None, None), make_scratch(device)
    out = torch.empty(sum(counts), heads * head_dim, device=device, dtype=dtype)
    decode_attention(
        q[:2], case.kv, case.row_slot[:2], case.row_len[:2], case.block_table, 0.05, None, None, scratch, out=out[:2],
        num_splits=num_splits,
    )  # fmt: skip
    prefill_attention(
        q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.05, None, None, first_row=2,
        num_tokens=9, out=out, scratch=scratch,
    )  # fmt: skip
    assert relative_error(out, expected) < tolerance(dtype)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("new_keys", [NewKeys(value_norm=True), NewKeys(has_values=False, value_norm=True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 24, 16), WIDE])
def test_packed_values_may_be_normed_and_may_be_the_keys(heads, kv_heads, head_dim, block_size, new_keys, device):
    row_lens, scratch = [1, 70, 0], make_scratch(device)
    case = make_paged_case(row_lens, [1] * 3, kv_heads, head_dim, block_size, torch.float32, device)
    qkv = torch.randn(3, (heads + (1 + new_keys.has_values) * kv_heads) * head_dim, device=device)
    cos_sin, (q_norm, k_norm) = torch.randn(128, head_dim, device=device), torch.randn(2, head_dim, device=device)
    q, k, v = (qkv.view(3, -1, head_dim)[:, first : first + count] for first, count in (
        (0, heads), (heads, kv_heads), (heads + new_keys.has_values * kv_heads, kv_heads)))  # fmt: skip
    positions = (case.row_len - 1).clamp_min(0)
    q, k = (reference_rope(reference_norm(x, gain, 1e-6), cos_sin, positions) for x, gain in ((q, q_norm), (k, k_norm)))
    v = reference_norm(v, torch.ones(head_dim, device=device), 1e-6)
    expected_kv = case.kv.clone()
    for row, length in enumerate(row_lens[:2]):
        block = int(case.block_table[int(case.row_slot[row]), (length - 1) // block_size])
        expected_kv[block, :, :, (length - 1) % block_size] = torch.stack((k[row], v[row])).float()
    actual_kv = case.kv.clone()
    out = decode_attention_qkv(
        qkv, q_norm, k_norm, 1e-6, cos_sin, actual_kv, case.row_slot, case.row_len, case.block_table, heads, 0.1,
        None, None, scratch, num_splits=2, new_keys=new_keys,
    )  # fmt: skip
    torch.testing.assert_close(actual_kv, expected_kv, rtol=1e-4, atol=1e-4)
    case.kv.copy_(expected_kv)
    assert relative_error(out, reference_attention(q, case, 0.1, None, None)) < 1e-4


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share_of_attention(window, device):
    row_lens, counts = [1, 90, 64, 40], [1, 1, 1, 30]
    case = make_paged_case(row_lens, counts, 2, 16, 16, torch.float32, device)
    q = torch.randn(sum(counts), 8, 16, device=device)
    sinks = torch.tensor([-40.0, -3.0, 0.0, 1.0, 2.0, 3.0, 60.0, 300.0], device=device)
    expected = reference_attention(q, case, 0.2, window, None, sinks)
    out, scratch = torch.zeros(sum(counts), 8 * 16, device=device), make_scratch(device)
    prefill_attention(
        q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.2, window, None,
        first_row=0, num_tokens=sum(counts), out=out, tuning=PrefillConfig(32, 32, 4, 2), sinks=sinks,
    )  # fmt: skip
    assert relative_error(out, expected) < 1e-5
    for num_splits in (1, 4):
        out = decode_attention(
            q[:3], case.kv, case.row_slot[:3], case.row_len[:3], case.block_table, 0.2, window, None, scratch,
            num_splits=num_splits, sinks=sinks,
        )  # fmt: skip
        assert relative_error(out, expected[:3]) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "softcap"), [
    (4, 2, 16, None, None), (7, 1, 24, None, 20.0), (2, 2, 32, 150, None), (3, 1, 64, None, None),
])  # fmt: skip
def test_programs_share_the_keys_of_few_queries(heads, kv_heads, head_dim, window, softcap, device):
    row_lens, counts = [40, 300, 290, 310, 3, 5], [1, 1, 9, 3, 3, 0]
    case = make_paged_case(row_lens, counts, kv_heads, head_dim, 16, torch.float32, device)
    q = torch.randn(sum(counts), heads, head_dim, device=device)
    expected = reference_attention(q, case, 0.2, window, softcap)
    scratch = make_scratch(device)
    for first_row, fill in ((0, 264), (2, 64), (2, 1)):
        skipped = sum(counts[:first_row])
        out = torch.zeros(sum(counts), heads * head_dim, device=device)
        prefill_attention(
            q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, 0.2, window, softcap,
            first_row=first_row, num_tokens=sum(counts) - skipped, out=out, scratch=scratch,
            tuning=PrefillConfig(32, 16, 4, 2, fill=fill),
        )  # fmt: skip
        assert relative_error(out[skipped:], expected[skipped:]) < tolerance(torch.float32)
        assert not out[:skipped].any()
        assert not scratch.arrived.any(), "a launch must leave the arrival counters at zero"


@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), pytest.param(128, 64, marks=pytest.mark.gpu)])
def test_prefill_attention_does_not_depend_on_chunking(head_dim, block_size, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = make_paged_case([190], [190], 2, head_dim, block_size, dtype, device)
    q = torch.randn(190, 4, head_dim, device=device).to(dtype)

    def run(first: int, last: int) -> torch.Tensor:
        out = torch.zeros(last - first, 4 * head_dim, device=device, dtype=dtype)
        bounds = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        start = torch.tensor([first], dtype=torch.int32, device=device)
        prefill_attention(
            q[first:last], case.kv, case.row_slot, start, bounds, case.block_table, 0.2, None, None, first_row=0,
            num_tokens=last - first, out=out, deterministic=True,
        )  # fmt: skip
        return out

    chunks = torch.cat([run(0, 33), run(33, 34), run(34, 130), run(130, 190)])
    if device.type == "cuda":
        assert torch.equal(chunks, run(0, 190)), "deterministic mode stands on equal bits"
    else:  # the interpreter multiplies with numpy, whose rounding depends on the shape
        torch.testing.assert_close(chunks, run(0, 190))
