import pytest
import torch

from inferengine.kernels.cuda import table
from inferengine.kernels.cuda.activation import GELU_TANH, SILU
from inferengine.kernels.cuda.dispatch import Kernel, Operands, Product, TmaTileConfig, candidates, rule
from inferengine.kernels.cuda.gemm.dense_tma import tma_fits, tma_parts, tma_tiled
from inferengine.kernels.cuda.norm import add_parts_rms_norm
from tests.kernels.builders import dtypes, make_scratch, prefer_rule, reference_norm, relative_error, tolerance

DTYPE = dtypes()[-1]


def make_operands(rows: int, columns: int, width: int, device: torch.device):
    x = torch.randn(rows, columns, device=device).to(DTYPE)
    return x, (torch.randn(width, columns, device=device) / columns**0.5).to(DTYPE)


@pytest.mark.parametrize("weight_left", [False, True])
@pytest.mark.parametrize(("rows", "columns", "splits"), [(64, 128, 1), (70, 320, 2), (1, 200, 3)])
def test_product_with_bias_and_residual(rows, columns, splits, weight_left, device):
    x, weight = make_operands(rows, columns, 128, device)
    bias, residual = torch.randn(128, device=device).to(DTYPE), torch.randn(rows, 128, device=device).to(DTYPE)
    tuned, scratch = TmaTileConfig(64, 64, 64, splits, 4, 3, weight_left), make_scratch(device)
    expected = x.double() @ weight.double().T
    assert relative_error(tma_tiled(x, weight, tuned, scratch), expected) < tolerance(DTYPE)
    stored = residual.clone()
    actual = tma_tiled(x, weight, tuned, scratch, bias=bias, residual=stored)
    assert actual.data_ptr() == stored.data_ptr()
    assert relative_error(stored, expected + bias.double() + residual.double()) < tolerance(DTYPE)
    assert not scratch.arrived.any(), "a launch must leave the arrival counters at zero"


@pytest.mark.parametrize("weight_left", [False, True])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gated_product(activation, weight_left, device):
    x, weight = make_operands(70, 192, 2 * 128, device)
    bias = torch.randn(256, device=device).to(DTYPE)
    left, right = (x.double() @ weight.double().T + bias.double()).chunk(2, -1)
    act = torch.nn.functional.silu(left) if activation == SILU else torch.nn.functional.gelu(left, approximate="tanh")
    tuned = TmaTileConfig(64, 64, 64, 1, 4, 3, weight_left)
    actual = tma_tiled(x, weight, tuned, make_scratch(device), bias=bias, gated=activation)
    assert relative_error(actual, act * right) < tolerance(DTYPE)


def test_chunks_without_room_to_meet_are_summed_by_one_program(device):
    x, weight = make_operands(200, 256, 128, device)
    scratch = make_scratch(device)
    scratch.partial = scratch.partial[:1024]
    actual = tma_tiled(x, weight, TmaTileConfig(64, 64, 64, 2, 4, 3), scratch)
    assert relative_error(actual, x.double() @ weight.double().T) < tolerance(DTYPE)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_of_a_product_are_added_to_the_residual_and_normed(splits, device):
    x, weight = make_operands(70, 320, 128, device)
    residual, gain = torch.randn(70, 128, device=device).to(DTYPE), torch.randn(128, device=device).to(DTYPE)
    expected = residual.double() + x.double() @ weight.double().T
    parts = tma_parts(x, weight, TmaTileConfig(64, 64, 64, splits, 4, 3), make_scratch(device))
    assert parts.shape == (splits, 70, 128)
    normed, summed = add_parts_rms_norm(parts, residual, gain, 1e-5)
    assert summed is residual
    assert relative_error(residual, expected) < tolerance(DTYPE)
    assert relative_error(normed, reference_norm(expected, gain, 1e-5)) < tolerance(DTYPE)


def test_an_exact_sum_leaves_the_norm_to_the_next_product(device, monkeypatch):
    parts = rule(Kernel.TMA_PARTS, TmaTileConfig(64, 64, 64, 2, 4, 3))
    prefer_rule(monkeypatch, Operands.DENSE, Product.PARTS, parts)
    x, weight = make_operands(20, 128, 128, device)
    gain = torch.randn(128, device=device).to(DTYPE)
    for kernels, operands in (
        (table.CudaKernels(device, deterministic=True), (x, weight, None)),
        (table.CudaKernels(device), (x.float(), weight.float(), None)),
        (table.CudaKernels(device), (x, weight, torch.zeros(128, device=device, dtype=DTYPE))),
    ):
        residual = torch.zeros(20, 128, device=device, dtype=operands[0].dtype)
        summed, normed = kernels.linear_add_norm(*operands, residual, gain.to(residual.dtype), 1e-5)
        assert normed is None
        assert relative_error(summed, x.double() @ weight.double().T) < tolerance(DTYPE)
    residual = torch.zeros(20, 128, device=device, dtype=DTYPE)
    assert table.CudaKernels(device).linear_add_norm(x, weight, None, residual, gain, 1e-5)[1] is not None


def test_what_the_tensor_memory_accelerator_cannot_read(device):
    tuned = TmaTileConfig(64, 64, 64, 1, 4, 3)
    x, weight = make_operands(64, 128, 128, device)
    assert tma_fits(x, weight, tuned, gated=True)
    assert not tma_fits(x, weight[:96], tuned, gated=False), "a tile that is not whole"
    assert not tma_fits(x[:, 4:], weight[:, 4:], tuned, gated=False), "rows that begin between 16 bytes"
    assert tma_fits(torch.cat([x, x], 1)[:, :128], weight, tuned, gated=False), "rows may lie apart"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("width", "columns"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
)
def test_tiles_of_the_table_fit_a_multiprocessor(width, columns, gated):
    for rows in range(1, 513):
        products = (Product.GATED,) if gated else (Product.LINEAR, Product.PARTS)
        choices = [
            choice for product in products for choice in candidates(Operands.DENSE, product, rows, width, columns)
        ]
        tuned = next((choice.config for choice in choices if isinstance(choice.config, TmaTileConfig)), None)
        for choice in choices:
            if choice.kernel is Kernel.TMA_PARTS:
                tuned = choice.config
                assert tuned.splits * rows * width <= 8 << 20, "room in the scratch memory"
        if tuned is None:
            continue
        outputs = tuned.block_n * (2 if gated else 1)
        staged = (tuned.block_m + outputs) * tuned.block_k * 2 * tuned.num_stages
        assert staged <= 220 << 10, "shared memory"
        assert tuned.block_m * outputs <= 128 * 32 * tuned.num_warps, "accumulators in registers"
        assert -(-rows // tuned.block_m) * tuned.block_m < 2 * rows, "tiles that are mostly padding"
        assert columns % (tuned.block_k * tuned.splits) == 0
