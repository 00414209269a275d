import pytest
import torch

from inferengine.kernels.batch import NewKeys
from inferengine.kernels.cuda.activation import gelu_tanh_and_mul, silu_and_mul, softcap
from inferengine.kernels.cuda.norm import add_rms_norm, norm_queries_keys, rms_norm, rms_norm_add
from inferengine.kernels.cuda.rope_kv_write import qkv_rope_write
from tests.kernels.builders import reference_norm, reference_rope, relative_error, tolerance

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_rms_norm(width, dtype, device):
    x = torch.randn(3, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    assert relative_error(rms_norm(x, weight, 1e-5), reference_norm(x, weight, 1e-5)) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place(dtype, device):
    x, residual = torch.randn(2, 3, 320, device=device).to(dtype).unbind()
    residual = residual.clone()
    weight = torch.randn(320, device=device).to(dtype)
    expected_sum = (x.double() + residual.double()).to(dtype)
    normed, returned = add_rms_norm(x, residual, weight, 1e-5)
    assert returned.data_ptr() == residual.data_ptr()
    assert relative_error(residual, expected_sum.double()) < tolerance(dtype)
    assert relative_error(normed, reference_norm(expected_sum, weight, 1e-5)) < tolerance(dtype)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [64, 1000])
def test_a_norm_that_is_added_gives_the_numbers_of_its_parts(width, dtype, follows, device):
    x = torch.randn(5, 2 * width, device=device).to(dtype)[:, width:]
    weight, next_weight = torch.randn(2, width, device=device).to(dtype)
    residual = torch.randn(5, width, device=device).to(dtype)
    expected = residual + rms_norm(x.contiguous(), weight, 1e-5)
    normed = rms_norm_add(x, weight, 1e-5, residual, (next_weight, 1e-3) if follows else None)
    rounding = 1e-6 if dtype == torch.float32 else 0.0  # a card fuses product and sum: one rounding less
    torch.testing.assert_close(residual, expected, rtol=rounding, atol=rounding)
    assert (normed is not None) == follows
    if normed is not None:
        torch.testing.assert_close(normed, rms_norm(expected, next_weight, 1e-3), rtol=rounding, atol=2 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(256, 64), (96, 96), (1000, 40)])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_queries_and_keys_are_normed_as_each_alone(num_tokens, queries, keys, dtype, device):
    qkv = torch.randn(num_tokens, queries + 2 * keys, device=device).to(dtype)
    q_weight, k_weight = torch.randn(queries, device=device).to(dtype), torch.randn(keys, device=device).to(dtype)
    q, k, values = (part.clone() for part in qkv.split([queries, keys, keys], dim=1))
    norm_queries_keys(qkv, q_weight, k_weight, 1e-5)
    expected = torch.cat((rms_norm(q, q_weight, 1e-5), rms_norm(k, k_weight, 1e-5), values), dim=1)
    rounding = 1e-6 if dtype == torch.float32 else 0.0  # two kernels may sum a row's squares in another order
    torch.testing.assert_close(qkv, expected, rtol=rounding, atol=rounding)


def test_a_norm_that_is_added_of_no_tokens(device):
    x, residual = torch.empty(2, 0, 64, device=device).unbind()
    weight = torch.ones(64, device=device)
    assert rms_norm_add(x, weight, 1e-5, residual) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 5000])
def test_a_softcap_limits_logits_of_any_size_in_place(width, dtype, device):
    sizes = torch.logspace(-5, 3, width, device=device)
    x = torch.stack((sizes, -sizes, torch.zeros_like(sizes))).to(dtype)
    expected = 30.0 * (x.double() / 30.0).tanh()
    capped = softcap(x, 30.0)
    assert capped is x
    torch.testing.assert_close(capped.double(), expected, rtol=tolerance(dtype), atol=1e-6)


def test_norm_of_a_strided_view(device):
    x = torch.randn(4, 256, device=device)[:, 64:192]
    weight = torch.randn(128, device=device)
    assert relative_error(rms_norm(x, weight, 1e-5), reference_norm(x, weight, 1e-5)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_gated_activations(width, dtype, device):
    x = torch.randn(3, 2 * width, device=device).to(dtype)
    left, right = x.double().chunk(2, -1)
    silu = torch.nn.functional.silu(left) * right
    gelu = torch.nn.functional.gelu(left, approximate="tanh") * right
    assert relative_error(silu_and_mul(x), silu) < tolerance(dtype)
    assert relative_error(gelu_tanh_and_mul(x), gelu) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (7, 1, 24)])
def test_qkv_rope_write(heads, kv_heads, head_dim, rope, qk_norm, dtype, device):
    tokens, block_size = 5, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    positions = torch.tensor([0, 3, 17, 40, 2], device=device, dtype=torch.int32)
    slots = torch.tensor([5, 47, 16, -1, 0], device=device)
    cos_sin = torch.randn(64, head_dim, device=device) if rope else None
    norms = torch.randn(2, head_dim, device=device).to(dtype) if qk_norm else (None, None)
    q, k, v = qkv.view(tokens, -1, head_dim).double().split([heads, kv_heads, kv_heads], 1)
    if qk_norm:
        q, k = reference_norm(q, norms[0], 1e-6), reference_norm(k, norms[1], 1e-6)
    if cos_sin is not None:
        q, k = reference_rope(q, cos_sin, positions), reference_rope(k, cos_sin, positions)
    kv = torch.zeros(3, 2, kv_heads, block_size, head_dim, device=device, dtype=dtype)
    expected = kv.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:  # a negative slot is a padding token
            expected[slot // block_size, 0, :, slot % block_size] = k[token]
            expected[slot // block_size, 1, :, slot % block_size] = v[token]
    actual = qkv_rope_write(qkv, norms[0], norms[1], 1e-6, cos_sin, positions, slots, kv, heads, kv_heads)
    assert relative_error(actual, q) < tolerance(dtype)
    assert relative_error(kv, expected) < tolerance(dtype)


@pytest.mark.parametrize("new_keys", [NewKeys(value_norm=True), NewKeys(has_values=False, value_norm=True),
                                      NewKeys(has_values=False), NewKeys(has_keys=False)])  # fmt: skip
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(7, 1, 24), (4, 2, 512)])
def test_values_may_be_normed_or_the_keys_or_there_is_nothing_new(heads, kv_heads, head_dim, new_keys, device):
    packed = heads + kv_heads * (new_keys.has_keys + (new_keys.has_keys and new_keys.has_values))
    qkv = torch.randn(3, packed * head_dim, device=device)
    positions = torch.tensor([0, 17, 40], device=device, dtype=torch.int32)
    slots = torch.tensor([5, 16, 47], device=device)
    cos_sin, (q_norm, k_norm) = torch.randn(64, head_dim, device=device), torch.randn(2, head_dim, device=device)
    kv = torch.randn(3, 2, kv_heads, 16, head_dim, device=device)
    expected = kv.double()
    q, *new = (
        qkv.view(3, packed, head_dim).double().split(heads, 1)
        if packed == heads
        else qkv.view(3, packed, head_dim).double().split([heads, *[kv_heads] * ((packed - heads) // kv_heads)], 1)
    )
    if new_keys.has_keys:
        values = reference_norm(new[-1], torch.ones(head_dim, device=device), 1e-6) if new_keys.value_norm else new[-1]
        keys = reference_rope(reference_norm(new[0], k_norm, 1e-6), cos_sin, positions)
        for token, slot in enumerate(slots.tolist()):
            expected[slot // 16, :, :, slot % 16] = torch.stack((keys[token], values[token]))
    wanted = reference_rope(reference_norm(q, q_norm, 1e-6), cos_sin, positions)
    actual = qkv_rope_write(
        qkv, q_norm, k_norm if new_keys.has_keys else None, 1e-6, cos_sin, positions, slots, kv, heads, kv_heads,
        new_keys=new_keys,
    )  # fmt: skip
    assert relative_error(actual, wanted) < 1e-5
    assert relative_error(kv, expected) < 1e-5
