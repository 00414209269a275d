"""One row streamed on Hopper. It needs such a card; without, shapes are found and the kernel is compiled."""

import pytest
import torch

from inferengine.kernels.cuda import activation
from inferengine.kernels.cuda.gemm.gemv_hopper import (
    E4M3,
    FEWEST_STAGES,
    INT8,
    NIBBLES,
    find_shape,
    stream_product,
    stream_shape,
)
from inferengine.kernels.cuda.gemm.w4_layout import to_numbers
from inferengine.quantization.cuda import pack
from inferengine.quantization.schemes import MADE
from tests.kernels.builders import relative_error

SCHEMES = ["fp8", "int8", "int4"]
MULTIPROCESSORS = 132


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


hopper = pytest.mark.skipif(not on_hopper(), reason="needs a CUDA device: Hopper")


def make_weight(scheme: str, rows: int, columns: int, device: torch.device):
    """Return (what the kernel reads, the same as float32)"""
    packed = pack(MADE[scheme](torch.randn(rows, columns, device=device) * 0.05)).weight
    if scheme == "int4":
        return packed, to_numbers(packed, torch.float32)
    return packed, packed.codes.float() * packed.scales[:, None]


def make_row(columns: int, device: torch.device) -> torch.Tensor:
    """Make a row with numbers far above the rest, as activations have them, and a group of zeros."""
    x = torch.randn(1, columns, device=device)
    x[0, 5::97] *= 300
    x[0, 128:256] = 0
    return x.bfloat16()


def normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean() + eps) * gain.float()


# rows and columns: shapes of an 8B; tiles that do not divide by the programs; many rounds; few columns
SHAPES = [(6144, 4096), (4096, 14336), (4128, 4096), (64, 1024), (151936, 1024), (2560, 9728), (4608, 3584)]


@hopper
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_is_that_of_numbers(scheme, rows, columns, device):
    weight, numbers = make_weight(scheme, rows, columns, device)
    x = make_row(columns, device)
    shape = stream_shape(x, weight)
    assert shape is not None
    assert relative_error(stream_product(x, weight, shape), x.float() @ numbers.t()) < 3e-3


@hopper
@pytest.mark.parametrize("scheme", SCHEMES)
def test_norm_bias_and_residual_are_taken_along(scheme, device):
    weight, numbers = make_weight(scheme, 4096, 4096, device)
    x, gain = make_row(4096, device), (torch.rand(4096, device=device) + 0.5).bfloat16()
    bias, residual = torch.randn(4096, device=device).bfloat16(), torch.randn(1, 4096, device=device).bfloat16()
    expected = normed(x, gain, 1e-5) @ numbers.t() + bias.float() + residual.float()
    out = residual.clone()
    shape = stream_shape(x, weight, adds=True)
    result = stream_product(x, weight, shape, bias=bias, gain=gain, eps=1e-5, residual=out)
    assert result.data_ptr() == out.data_ptr()
    assert relative_error(out, expected) < 4e-3


@hopper
@pytest.mark.parametrize("rows", [28672, 1056, 96])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gated_product(scheme, rows, device):
    weight, numbers = make_weight(scheme, rows, 4096, device)
    x, bias = make_row(4096, device) * 0.1, torch.randn(rows, device=device).bfloat16()
    left, right = (x.float() @ numbers.t() + bias.float()).chunk(2, dim=1)
    shape = stream_shape(x, weight, gated=True)
    for kind, function in (
        (activation.SILU, torch.nn.functional.silu),
        (activation.GELU_TANH, lambda t: torch.nn.functional.gelu(t, approximate="tanh")),
    ):
        result = stream_product(x, weight, shape, bias=bias, gated=kind)
        assert relative_error(result, function(left) * right) < 5e-3


@hopper
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_that_follow_each_other_in_a_graph_see_each_other(scheme, device):
    """Each fills its ring while the one before computes; only its input has to wait."""
    weights = [make_weight(scheme, 4096, 4096, device) for _ in range(6)]
    x = make_row(4096, device) * 0.01
    gain = torch.ones(4096, device=device, dtype=torch.bfloat16)
    kept = []

    def run() -> None:
        y = x
        for weight, _ in weights:
            y = stream_product(y, weight, stream_shape(y, weight), gain=gain, eps=1e-5)
        kept[:] = [y]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
    expected = x.float()
    for _, numbers in weights:
        expected = (normed(expected, gain, 1e-5) @ numbers.t()).bfloat16().float()
    assert relative_error(kept[0], expected) < 2e-2


# rows, columns, gated, adds to a residual: the products of a layer of an 8B
LAYER = [(6144, 4096, False, False), (4096, 4096, False, True), (28672, 4096, True, False), (4096, 14336, False, True)]
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10


def used_bytes(shape) -> int:
    return shape.fixed_bytes + shape.stages * shape.stage_bytes + RESERVED_BYTES


@pytest.mark.parametrize("kind", [E4M3, INT8, NIBBLES])
@pytest.mark.parametrize(("rows", "columns", "gated", "adds"), [*LAYER, (4608, 3584, False, False)])
def test_a_shape_covers_the_weight_with_a_ring_of_some_stages(kind, rows, columns, gated, adds):
    shape = find_shape(kind, rows, columns, gated, adds, MULTIPROCESSORS)
    assert shape.stages >= FEWEST_STAGES
    assert shape.steps * shape.units * shape.num_warps * shape.unit_columns == columns
    assert shape.tiles * shape.outputs == shape.width == (rows // 2 if gated else rows)


@pytest.mark.parametrize("kind", [E4M3, INT8, NIBBLES])
def test_the_next_kernel_of_a_layer_fits_beside_but_never_two_programs_of_one_that_adds(kind):
    shapes = [find_shape(kind, *product, MULTIPROCESSORS) for product in LAYER]
    for shape, following in zip(shapes, shapes[1:] + shapes[:1], strict=True):
        assert used_bytes(shape) + used_bytes(following) <= MULTIPROCESSOR_BYTES
    for shape, (*_, adds) in zip(shapes, LAYER, strict=True):
        assert not adds or 2 * used_bytes(shape) > MULTIPROCESSOR_BYTES


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4000), (4100, 4096), (4096, 200), (4096, 131072)])
def test_what_does_not_divide_or_fit_is_left_to_other_kernels(rows, columns):
    assert find_shape(E4M3, rows, columns, False, False, MULTIPROCESSORS) is None


def test_the_kernel_refuses_devices_without_hopper():
    weight, _ = make_weight("fp8", 256, 512, torch.device("cpu"))
    assert stream_shape(torch.zeros(1, 512, dtype=torch.bfloat16), weight) is None


COMPILE = """
import torch
from inferengine.kernels.cuda.gemm.gemv_hopper import find_shape
from inferengine.kernels.cuda.gemm.gemv_hopper import stream_kernel

number, word, scale = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32), torch.zeros(64)
for kind, gated, instruction in ((1, True, "m16n8k16"), (2, False, "s32.s8.s8"), (3, True, "s32.u8.s8")):
    shape = find_shape(kind, 4096, 1024, gated, not gated, 132)
    kernel = stream_kernel.warmup(
        number, number, word, word, scale, number, number, 1e-5, SHAPE=shape, NORM=gated, ADD=not gated, BIAS=False,
        ACTIVATION=0, PDL=True, num_warps=shape.num_warps, launch_pdl=True, grid=(132,),
    )
    ptx = kernel.asm["ptx"]
    said = shape.fixed_bytes + shape.stages * shape.stage_bytes
    print(instruction in ptx, "cp.async.cg.shared.global" in ptx, kernel.metadata.shared <= said)
"""


def test_the_kernel_compiles_for_hopper_without_a_card_within_its_shared_memory(compile_program):
    done = compile_program(COMPILE)
    assert done.stdout.split() == ["True"] * 9, done.stderr[-2000:]
    assert "error" not in done.stderr
