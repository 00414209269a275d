"""Experts in the block formats of GGUF files: multiplied packed, against the numbers that the package `gguf` makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.block_codes import BlockWeight, numbers, read_blocks
from inferengine.kernels.cuda.moe import mixture
from inferengine.kernels.cuda.moe.blocks import block_matrix, multiply_blocks
from inferengine.kernels.cuda.moe.configurations import RULES, GroupedConfig, PairConfig, configurations
from inferengine.kernels.cuda.moe.grouped import Pairs
from inferengine.kernels.cuda.moe.routing import group_pairs
from inferengine.kernels.experts import ExpertBlocks, ExpertCodes, Gating, Routing, expert_numbers
from inferengine.kernels.reference import moe as reference
from inferengine.layers.moe import ExpertLinear
from inferengine.quantization.gguf_experts import StoredRows, read_mxfp4, stored_experts
from tests.kernels.builders import relative_error
from tests.models.gguf_files import random_blocks

NUM_EXPERTS, CHOSEN = 4, 2
SILU, CLAMPED = Gating("silu"), Gating("swiglu_clamped", 1.702, 1.0)
ROWS = 12  # of an expert: no multiple of a tile
FEW, SOME, MANY = 2, 30, 60  # tokens: pairs by themselves, tiles of 16 or 32 pairs of an expert, of 64
CPU = torch.device("cpu")


def make(name: str, rows: int, columns: int) -> tuple[BlockWeight, torch.Tensor]:
    """Return a weight in planes, and its numbers by the package."""
    raw = random_blocks(name, rows, columns, seed=int(torch.randint(1 << 30, ())))
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))
    return read_blocks(name, torch.from_numpy(raw)), expected


def moved(weight: ExpertBlocks, device: torch.device, first: int = 0, count: int = NUM_EXPERTS) -> ExpertBlocks:
    """Return some of the experts, on a device."""

    def part(plane: torch.Tensor) -> torch.Tensor:
        return plane.unflatten(0, (NUM_EXPERTS, -1))[first : first + count].flatten(0, 1).to(device)

    return ExpertBlocks(tuple(each.tensors(part) for each in weight.parts))


class Layer:
    """The experts of a layer, packed and as numbers, of each expert the gates before the ups."""

    def __init__(self, gate: str, up: str, down: str, *, width: int = 256, inner: int = 32, bias: bool = False) -> None:
        (gates, gate_numbers), (ups, up_numbers) = (make(kind, NUM_EXPERTS * inner, width) for kind in (gate, up))
        back, back_numbers = make(down, NUM_EXPERTS * width, inner)
        both = torch.cat([each.view(NUM_EXPERTS, inner, width) for each in (gate_numbers, up_numbers)], 1)
        self.packed = ExpertBlocks((gates, ups)), ExpertBlocks((back,))
        self.numbers = both.flatten(0, 1), back_numbers
        self.biases = [torch.randn(len(each)) if bias else None for each in self.numbers]
        self.width, self.gating = width, CLAMPED if bias else SILU

    def pack(self, module: Any, weights: Any, device: torch.device, dtype: torch.dtype) -> Any:
        biases = [None if each is None else each.to(device, dtype) for each in self.biases]
        return module.pack_experts(*weights, *biases, NUM_EXPERTS, self.gating, interleaved=False)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("tuned", [PairConfig(16, 32, 4), GroupedConfig(16, 32, 32, 4, 2)], ids=["pairs", "grouped"])
def test_the_kernel_multiplies_every_format(kind: str, tuned: Any, device: torch.device) -> None:
    """One projection, and gate and up at once; pairs by themselves, or those of an expert together."""
    (gate, gate_numbers), (up, up_numbers) = (make(kind, NUM_EXPERTS * ROWS, 256), make(kind, NUM_EXPERTS * ROWS, 256))
    ids = torch.tensor([[3, 1], [0, 3]], dtype=torch.int32, device=device)
    is_grouped = isinstance(tuned, GroupedConfig)
    order, starts = group_pairs(ids, NUM_EXPERTS) if is_grouped else (None, None)
    places = order.tolist() if order is not None else range(4)
    x, of_pair = torch.randn(2, 256), torch.randn(4, 256)
    chosen = ids.flatten().long().cpu()

    def products(numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("prk,pk->pr", numbers.view(NUM_EXPERTS, ROWS, 256)[chosen].double(), rows.double())

    pairs = Pairs(ids, order, starts)
    both = block_matrix(moved(ExpertBlocks((gate, up)), device), None, NUM_EXPERTS)
    found = multiply_blocks(x.to(device), both, pairs, tuned, gating=SILU)
    rows = x.repeat_interleave(2, 0)
    expected = functional.silu(products(gate_numbers, rows)) * products(up_numbers, rows)
    assert relative_error(found.cpu(), expected[list(places)]) < 1e-5
    one = block_matrix(moved(ExpertBlocks((up,)), device), None, NUM_EXPERTS)
    found = multiply_blocks(of_pair[list(places)].to(device), one, pairs, tuned)
    assert relative_error(found.cpu(), products(up_numbers, of_pair)) < 1e-5


def compare(layer: Layer, tokens: int, device: torch.device, *, deterministic: bool = False) -> None:
    """Assert that a CPU's products in fp32 and the kernels' in fp16 are those of the numbers."""
    x, logits = torch.randn(tokens, layer.width), torch.randn(tokens, NUM_EXPERTS)
    residual, routing = torch.randn(tokens, layer.width), Routing(CHOSEN, True)
    plain = layer.pack(reference, layer.numbers, CPU, torch.float32)
    expected = reference.add_experts(x, logits, routing, plain, residual.clone())
    on_cpu = layer.pack(reference, layer.packed, CPU, torch.float32)
    found = reference.add_experts(x, logits, routing, on_cpu, residual.clone())
    assert relative_error(found, expected.double()) < 1e-6
    own = layer.pack(mixture, [moved(each, device) for each in layer.packed], device, torch.float16)
    kernels = mixture.MoeKernels(deterministic=deterministic)
    rows = (x.to(device).half(), logits.to(device), routing, own, residual.to(device).half())
    assert relative_error(kernels.add_experts(*rows).cpu(), expected.double()) < 3e-3


@pytest.mark.parametrize("tokens", [FEW, SOME, MANY])
def test_gate_up_and_down_may_each_be_of_another_format(tokens: int, device: torch.device) -> None:
    compare(Layer("Q4_K", "Q5_K", "Q8_0", bias=True), tokens, device)


def test_formats_of_blocks_of_32_in_rows_that_are_no_multiple_of_256(device: torch.device) -> None:
    compare(Layer("Q4_0", "Q5_1", "Q4_1", width=96, inner=64), SOME, device)


def test_a_row_of_the_deterministic_kernels_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    layer = Layer("Q8_0", "Q4_0", "Q8_0", width=64)
    compare(layer, 9, device, deterministic=True)
    own = layer.pack(mixture, [moved(each, device) for each in layer.packed], device, torch.float16)
    kernels, routing = mixture.MoeKernels(deterministic=True), Routing(CHOSEN, True)
    x, logits = torch.randn(9, 64).to(device).half(), torch.randn(9, NUM_EXPERTS).to(device)
    whole = kernels.add_experts(x, logits, routing, own, torch.zeros_like(x))
    alone = kernels.add_experts(x[7:8], logits[7:8], routing, own, torch.zeros_like(x[:1]))
    assert torch.equal(whole[7:8], alone)


@pytest.mark.parametrize("tokens", [FEW, SOME])
def test_ranks_that_hold_some_of_the_experts_sum_to_all(tokens: int, device: torch.device) -> None:
    layer = Layer("Q8_0", "Q4_0", "Q8_0", width=64)
    x, logits = torch.randn(tokens, 64), torch.randn(tokens, NUM_EXPERTS)
    logits[0, 0] = -9.0  # the first token takes none of the first rank's
    plain = layer.pack(reference, layer.numbers, CPU, torch.float32)
    whole = reference.add_experts(x, logits, Routing(CHOSEN, True), plain, torch.zeros_like(x))
    total = torch.zeros(tokens, 64)
    for held in ((0, 1), (1, 3)):
        parts = [moved(weight, device, *held) for weight in layer.packed]
        packed = mixture.pack_experts(*parts, None, None, held[1], SILU, interleaved=False)
        rows = x.to(device).half()
        own = mixture.MoeKernels().add_experts(
            rows, logits.to(device), Routing(CHOSEN, True, held), packed, torch.zeros_like(rows)
        )
        assert held != (0, 1) or not own[0].any()
        total += own.cpu()
    assert relative_error(total, whole.double()) < 3e-3


def test_the_row_counts_of_these_tests_take_every_rule() -> None:
    met = {configurations("blocks", CHOSEN * tokens, NUM_EXPERTS) for tokens in (FEW, 20, SOME, MANY)}
    assert {rule for rule, _ in met} == {*RULES["blocks"].pairs, *RULES["blocks"].grouped}


def test_mxfp4_blocks_are_the_packages_numbers() -> None:
    values = torch.randn(5, 96).numpy()
    raw = quants.quantize(values, GGMLQuantizationType.MXFP4)
    codes = read_mxfp4(torch.from_numpy(raw))
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType.MXFP4))
    assert torch.equal(expert_numbers(codes), expected)


def projection(kinds: list[str], *, random: bool = False) -> Any:
    """Return what takes the gates and ups of three experts [64, 256], of which gates are `kinds[0]` and ups
    `kinds[1]`."""
    with torch.device("meta"):
        module = ExpertLinear(256, [64, 64], 3, bias=False)
    found = {part: (f"experts.{part}", kinds[part % 2]) for part in range(6) if kinds[part % 2] != "F16"}
    return stored_experts(module, found, "experts.{}".format, CPU, torch.float32, random_weights=random)


def take(source: Any, kinds: list[str], order: list[int]) -> torch.Tensor:
    """Give the parts in an order, and return their numbers in that of the model."""
    made = {}
    for part in order:
        kind, seed = kinds[part % 2], part
        if kind == "F16":
            made[part] = torch.randn(64, 256).half().float()
            source.take(part, "weight", made[part].half())
            continue
        raw = (
            quants.quantize(torch.randn(64, 256).numpy(), GGMLQuantizationType.MXFP4)
            if kind == "MXFP4"
            else random_blocks(kind, 64, 256, seed=seed)
        )
        made[part] = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
        source.take(part, "weight", StoredRows(kind, torch.from_numpy(raw), 0))
    return torch.cat([made[part] for part in range(6)])


@pytest.mark.parametrize("kinds", [["Q4_K", "Q6_K"], ["MXFP4", "MXFP4"], ["Q4_K", "F16"], ["MXFP4", "Q8_0"]])
def test_parts_come_in_any_order_and_cost_what_is_counted(kinds: list[str]) -> None:
    source = projection(kinds)
    expected, num_bytes = take(source, kinds, [5, 0, 3, 1, 4, 2]), source.num_bytes()
    assert source.missing() is None
    found = source.assemble()
    if isinstance(found, ExpertBlocks):
        planes = [plane for part in found.parts for plane in part if isinstance(plane, torch.Tensor)]
        read = torch.cat([numbers(part, 0, 192).view(3, 1, 64, 256) for part in found.parts], 1).flatten(0, 2)
    elif isinstance(found, ExpertCodes):
        planes, read = [found.codes, found.scales], expert_numbers(found)
    else:
        planes, read = [found], found
    assert torch.equal(read, expected)
    assert sum(plane.nbytes for plane in planes) == pytest.approx(num_bytes, rel=0.03)


@pytest.mark.parametrize("kinds", [["Q4_K", "Q6_K"], ["MXFP4", "MXFP4"], ["Q4_K", "F16"]])
def test_random_weights_are_small_and_of_the_files_formats(kinds: list[str]) -> None:
    found = projection(kinds, random=True).assemble()
    if isinstance(found, ExpertBlocks):
        read = torch.cat([numbers(part, 0, 192) for part in found.parts])
    else:
        read = expert_numbers(found) if isinstance(found, ExpertCodes) else found
    assert read.shape == (384, 256)
    assert 0 < float(read.abs().max()) < 0.2


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    raw = random_blocks("Q4_K", 32, 256, seed=0)
    with pytest.raises(ConfigError) as error:
        projection(["Q4_K", "Q4_K"]).take(3, "weight", StoredRows("Q4_K", torch.from_numpy(raw), 0))
    assert "the tensor experts.3 has shape [32, 256] where the model asks for [64, 256]" in error.value.message
