"""Kernels of a mixture of experts against the reference, for every number format and each way of computing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferengine.kernels.cuda.moe import configurations
from inferengine.kernels.cuda.moe import mixture as experts
from inferengine.kernels.cuda.moe.routing import choose_experts, group_pairs
from inferengine.kernels.experts import ExpertCodes, Gating, Routing, mxfp4_numbers
from inferengine.kernels.reference import moe as reference
from inferengine.quantization.experts import EXPERT_CODES, expert_codes, mxfp4_codes
from inferengine.quantization.schemes import int4_groups

MAKE = {
    "numbers": None,
    "mxfp4": mxfp4_codes,
    **EXPERT_CODES,
    "int4 by 32": lambda weight: expert_codes(int4_groups(weight, 32)),
    "int4 by 96": lambda weight: expert_codes(int4_groups(weight, 96)),
}
NUM_EXPERTS, CHOSEN = 4, 2
PLAIN, CLAMPED = Gating("silu"), Gating("swiglu_clamped", 1.702, 3.0)
FEW, SOME = 2, 33  # tokens: pairs by themselves, pairs grouped by expert


def compare(
    device: torch.device,
    tokens: int,
    kind: str = "numbers",
    *,
    inner: int = 32,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
    gating: Gating = PLAIN,
    bias: bool = False,
    interleaved: bool = False,
    deterministic: bool = False,
    renormalized: bool = True,
    tolerance: float = 1e-5,
) -> None:
    """Compare with the reference in fp32, and assert that the kernels that add and norm give the same sum."""
    shapes = ((NUM_EXPERTS * 2 * inner, width), (NUM_EXPERTS * width, inner))
    weights: list[Any] = [torch.randn(shape) * 0.1 for shape in shapes]
    if (make := MAKE[kind]) is not None:
        weights = [make(weight) for weight in weights]
    biases = [torch.randn(shape[0]) if bias else None for shape in shapes]

    def moved(value: Any) -> Any:
        if isinstance(value, ExpertCodes):
            zeros = None if value.zeros is None else value.zeros.to(device)
            return value._replace(codes=value.codes.to(device), scales=value.scales.to(device), zeros=zeros)
        return None if value is None else value.to(device, dtype, copy=True)

    x, logits, residual = torch.randn(tokens, width), torch.randn(tokens, NUM_EXPERTS), torch.randn(tokens, width)
    routing = Routing(CHOSEN, renormalized)
    packed = reference.pack_experts(*weights, *biases, NUM_EXPERTS, gating, interleaved=interleaved)
    expected = reference.add_experts(x, logits, routing, packed, residual.clone())
    own = experts.pack_experts(*map(moved, (*weights, *biases)), NUM_EXPERTS, gating, interleaved=interleaved)
    kernels = experts.MoeKernels(deterministic=deterministic)
    arguments = (moved(x), logits.to(device), routing, own)
    found = kernels.add_experts(*arguments, moved(residual)).float().cpu()
    assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())
    total, normed = kernels.add_experts_norm(*arguments, moved(residual), moved(torch.full((width,), 2.0)), 1e-6)
    again = kernels.add_experts(*arguments, moved(residual))
    assert torch.equal(total, again)
    scale = again.float().square().mean(-1, keepdim=True).rsqrt()
    torch.testing.assert_close(normed.float(), again.float() * scale * 2.0, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["numbers", "fp8", "fp8_block", "mxfp4", "int8", "int4 by 32"])
@pytest.mark.parametrize("tokens", [FEW, SOME])
def test_every_number_format_few_and_some_tokens(kind, tokens, device):
    compare(device, tokens, kind)


@pytest.mark.parametrize("tokens", [FEW, 50])
@pytest.mark.parametrize("kind", ["numbers", "mxfp4"])
def test_biases_rows_in_turn_and_the_clamped_gate(kind, tokens, device):
    settings: dict[str, Any] = {"gating": CLAMPED, "bias": True, "interleaved": True, "dtype": torch.float16}
    compare(device, tokens, kind, tolerance=3e-3, **settings)


@pytest.mark.parametrize("kind", ["mxfp4", "int4 by 32"])
def test_few_pairs_of_an_expert_in_bf16_go_straight_from_registers(kind, device, monkeypatch):
    seen = []
    product = experts.fragments.multiply_fragments
    monkeypatch.setattr(experts.fragments, "multiply_fragments", lambda *a, **b: seen.append(1) or product(*a, **b))
    compare(device, 5, kind, dtype=torch.bfloat16, bias=True, tolerance=3e-2)
    assert seen


def test_fp16_takes_tiles_where_the_rule_says_registers(device):
    compare(device, 5, "mxfp4", dtype=torch.float16, tolerance=3e-3)


def test_sizes_that_are_no_multiple_of_a_tile(device):
    for tokens in (FEW, SOME):
        compare(device, tokens, inner=20, width=40, dtype=torch.float16, tolerance=3e-3, renormalized=False)


@pytest.mark.parametrize(("kind", "width"), [("int4", 160), ("int4 by 96", 192)])
def test_a_width_that_is_no_multiple_of_a_word_of_codes(kind, width, device):
    compare(device, FEW, kind, inner=40 if kind == "int4" else 96, width=width, bias=True)


def test_squares_of_scales_that_a_tile_shares(device):
    compare(device, 1, "fp8_block", inner=128, width=128)


def test_deterministic_rows_do_not_depend_on_their_neighbours(device):
    compare(device, SOME, deterministic=True, dtype=torch.float16, tolerance=3e-3)
    gating, routing = PLAIN, Routing(CHOSEN, True)
    weights = [torch.randn(NUM_EXPERTS * 2 * 48, 64), torch.randn(NUM_EXPERTS * 64, 48)]
    on_device = [weight.to(device, torch.float16) for weight in weights]
    own = experts.pack_experts(*on_device, None, None, NUM_EXPERTS, gating, interleaved=False)
    kernels = experts.MoeKernels(deterministic=True)
    x, logits = torch.randn(SOME, 64).to(device, torch.float16), torch.randn(SOME, NUM_EXPERTS).to(device)
    whole = kernels.add_experts(x, logits, routing, own, torch.zeros_like(x))
    alone = kernels.add_experts(x[7:8], logits[7:8], routing, own, torch.zeros_like(x[:1]))
    assert torch.equal(whole[7:8], alone)


def test_all_tokens_of_one_expert_fit_the_grid(device):
    logits = torch.zeros(SOME, NUM_EXPERTS)
    logits[:, 3], logits[:, 1] = 5.0, 4.0
    ids, weights = choose_experts(logits.to(device), NUM_EXPERTS, Routing(CHOSEN, True))
    order, starts = group_pairs(ids, NUM_EXPERTS)
    assert ids.tolist() == [[3, 1]] * SOME
    assert starts.tolist() == [0, 0, SOME, SOME, 2 * SOME]
    assert order.tolist() == [*range(1, 2 * SOME, 2), *range(0, 2 * SOME, 2)]
    assert float(weights.sum(-1).sub(1).abs().max()) < 1e-6


@pytest.mark.parametrize(("kind", "tokens"), [("numbers", 1), ("numbers", SOME), ("mxfp4", FEW), ("mxfp4", SOME)])
def test_what_ranks_make_of_their_own_experts_sums_to_what_all_make(kind, tokens, device):
    """Of four experts one rank has the first, another the other three. The first token takes none of the first's."""
    inner, width, gating = 32, 64, PLAIN
    weights: list[Any] = [torch.randn(NUM_EXPERTS, 2 * inner, width), torch.randn(NUM_EXPERTS, width, inner)]
    x, logits = torch.randn(tokens, width), torch.randn(tokens, NUM_EXPERTS)
    logits[0, 0] = -9.0

    def made(module: Any, place: torch.device, held: tuple[int, int] | None) -> torch.Tensor:
        first, count = held or (0, NUM_EXPERTS)
        parts = [(MAKE[kind] or torch.clone)(weight[first : first + count].flatten(0, 1)) for weight in weights]
        if kind == "mxfp4":
            parts = [part._replace(codes=part.codes.to(place), scales=part.scales.to(place)) for part in parts]
        else:
            parts = [part.to(place) for part in parts]
        packed = module.pack_experts(*parts, None, None, count, gating, interleaved=False)
        add = module.add_experts if module is reference else module.MoeKernels().add_experts
        routing, out = Routing(CHOSEN, True, held), torch.zeros(tokens, width, device=place)
        return add(x.to(place), logits.to(place), routing, packed, out).cpu()

    cpu = torch.device("cpu")
    whole = made(reference, cpu, None)
    for module, place in ((reference, cpu), (experts, device)):
        one, other = (made(module, place, held) for held in ((0, 1), (1, 3)))
        torch.testing.assert_close(one + other, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert not one[0].any()


def test_experts_are_chosen_where_scores_are_nan(device):
    ids, _ = choose_experts(torch.full((2, 7), float("nan"), device=device), 7, Routing(3, False))
    assert 0 <= int(ids.min()) <= int(ids.max()) < 7


def test_mxfp4_numbers_are_the_formats_own():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16) * 17  # both halves alike
    numbers = mxfp4_numbers(codes, torch.tensor([[128]], dtype=torch.uint8))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert numbers[0, ::2].tolist() == [2 * value for value in (*values, *(-value for value in values))]
    assert torch.equal(numbers[:, ::2], numbers[:, 1::2])


def test_warm_up_runs_every_configuration():
    for operands, rules in configurations.RULES.items():
        tokens = (*configurations.token_classes(128, 8), 8192)
        met = {configurations.configurations(operands, 8 * count, 128) for count in tokens}
        assert {rule for rule, _ in met} == {*rules.pairs, *rules.grouped}


ROUTINGS = {
    "groups": Routing(3, False, groups=(3, 2), factor=1.5),
    "groups, renormalized": Routing(3, True, groups=(3, 1)),
    "sigmoid": Routing(3, False, sigmoid=True, factor=2.5),
    "sigmoid, groups, corrected": Routing(3, True, sigmoid=True, groups=(3, 2), factor=2.5),
    "sigmoid, a part of the experts": Routing(3, True, sigmoid=True, held=(4, 5)),
    "gains": Routing(3, True),
    "gains, a part of the experts": Routing(3, False, held=(4, 5)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_of_deepseek_and_gemma(name, device):
    routing, logits = ROUTINGS[name], torch.randn(7, 12)
    if "gains" in name:
        routing = routing._replace(gains=torch.randn(12))
    if "corrected" in name:
        routing = routing._replace(correction=torch.randn(12))
    expected, wanted = reference.route(logits, routing)
    correction, gains = (None if each is None else each.to(device) for each in (routing.correction, routing.gains))
    moved = routing._replace(correction=correction, gains=gains)
    ids, weights = choose_experts(logits.to(device), 12, moved)
    if routing.held is not None:
        here = (expected >= 4) & (expected < 9)
        expected, wanted = torch.where(here, expected - 4, 5), wanted * here
    assert torch.equal(ids.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=1e-6)


def test_a_correction_chooses_experts_and_does_not_weigh_them():
    correction = torch.tensor([0.0, 5.0, 0.0])
    experts, weights = reference.route(torch.zeros(1, 3), Routing(1, False, sigmoid=True, correction=correction))
    assert (experts.tolist(), weights.tolist()) == ([[1]], [[0.5]])
