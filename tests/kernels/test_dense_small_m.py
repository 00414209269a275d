import pytest
import torch

from inferengine.kernels.cuda.activation import GELU_TANH, SILU
from inferengine.kernels.cuda.dispatch import GemvConfig, Operands, Product, TileConfig, candidates
from inferengine.kernels.cuda.gemm.dense_small_m import gemv, tiled
from tests.kernels.builders import dtypes, make_scratch, reference_norm, relative_error, tolerance


def make_operands(rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device):
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = (torch.randn(width, columns, device=device) / columns**0.5).to(dtype)
    return x, weight


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(("columns", "width"), [(64, 40), (320, 33), (1000, 8)])
def test_gemv_norms_its_input_and_adds_bias_and_residual(columns, width, dtype, device):
    x, weight = make_operands(1, columns, width, dtype, device)
    gain, bias = torch.randn(columns, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
    residual = torch.randn(1, width, device=device).to(dtype)
    tuned = GemvConfig(4, 128, 4, 0)
    plain = x.double() @ weight.double().T
    assert relative_error(gemv(x, weight, tuned), plain) < tolerance(dtype)
    normed = reference_norm(x, gain, 1e-5) @ weight.double().T + bias.double() + residual.double()
    stored = residual.clone()
    actual = gemv(x, weight, tuned, gain=gain, eps=1e-5, bias=bias, residual=stored)
    assert actual.data_ptr() == stored.data_ptr()
    assert relative_error(actual, normed) < tolerance(dtype)


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("rows", [1, 5])
def test_gated_products(rows, activation, dtype, device):
    x, weight = make_operands(rows, 192, 2 * 48, dtype, device)
    left, right = (x.double() @ weight.double().T).chunk(2, -1)
    act = torch.nn.functional.silu(left) if activation == SILU else torch.nn.functional.gelu(left, approximate="tanh")
    tiled_out = tiled(x, weight, TileConfig(16, 16, 64, 1, 4, 2, 0), make_scratch(device), gated=activation)
    assert relative_error(tiled_out, act * right) < tolerance(dtype)
    if rows == 1:
        assert relative_error(gemv(x, weight, GemvConfig(4, 128, 4, 0), gated=activation), act * right) < tolerance(
            dtype
        )


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 64, 48), (16, 384, 64), (33, 200, 50)])
def test_tiled_product(rows, columns, width, chunks, dtype, device):
    x, weight = make_operands(rows, columns, width, dtype, device)
    bias, residual = torch.randn(width, device=device).to(dtype), torch.randn(rows, width, device=device).to(dtype)
    tuned, scratch = TileConfig(16, 32, 32, chunks, 4, 2, 0), make_scratch(device)
    expected = x.double() @ weight.double().T
    assert relative_error(tiled(x, weight, tuned, scratch), expected) < tolerance(dtype)
    stored = residual.clone()
    tiled(x, weight, tuned, scratch, bias=bias, residual=stored)
    assert relative_error(stored, expected + bias.double() + residual.double()) < tolerance(dtype)
    assert not scratch.arrived.any(), "a launch must leave the arrival counters at zero"


@pytest.mark.parametrize("gated", [None, SILU])
def test_a_row_does_not_depend_on_the_rows_beside_it(gated, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = make_operands(300, 512, 256, dtype, device)
    scratch = make_scratch(device)

    def run(rows: int) -> torch.Tensor:
        product = Product.LINEAR if gated is None else Product.GATED
        (choice,) = candidates(Operands.DENSE_EXACT, product, rows, 256, 512)
        return tiled(x[:rows], weight, choice.config, scratch, gated=gated)

    whole = run(300)
    for rows in (1, 16, 33, 65, 200):
        if device.type == "cuda":
            assert torch.equal(run(rows), whole[:rows]), "deterministic mode stands on equal bits"
        else:  # the interpreter multiplies with numpy, whose rounding depends on the shape
            torch.testing.assert_close(run(rows), whole[:rows])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_preloaded_first_tile_is_the_same_product(rows, device):
    x, weight = make_operands(rows, 256, 64, dtypes()[-1], device)
    for chunks in (1, 2):
        tuned = TileConfig(16, 32, 64, chunks, 4, 2, 0, preload=True)
        expected = x.double() @ weight.double().T
        assert relative_error(tiled(x, weight, tuned, make_scratch(device)), expected) < tolerance(x.dtype)
