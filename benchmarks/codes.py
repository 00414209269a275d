"""Products with codes of 4 and 8 bits at 16 to 128 rows on one GPU: each kernel's configurations beside those in use.

    python -m benchmarks.codes [--only rule] [--seconds S] [--experts gpt-oss-20b:mxfp4 ...] [--dense int4 int8 ...]

Every product is first compared with the same weights as fp32 numbers (relative error of the whole result), then timed:
microseconds of one launch in a CUDA graph, over weights that together exceed the L2 cache. `rule` is what the
dispatcher takes where nothing was measured. Experts: the product with gate and up, and the one back, with tokens spread
evenly over the experts and with a popularity that falls as 1 / rank; sorting the pairs is not part of the time. Dense:
a layer's four products, beside cuBLAS with the weights as bf16. `share`: of the time in which a read of the codes and
scales at --bandwidth would take, what the product reaches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.bench.environment import write_result
from inferengine.kernels.cuda.compilation import compile_workers, compiling_ahead
from inferengine.kernels.cuda.dispatch import W4TileConfig, W8TileConfig
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight
from inferengine.kernels.cuda.gemm.w4_tiles import nibble_tile_product
from inferengine.kernels.cuda.gemm.w8 import tile_product
from inferengine.kernels.cuda.moe.configurations import FragmentConfig, GroupedConfig, rule_choice
from inferengine.kernels.cuda.moe.fragments import multiply_fragments, reads
from inferengine.kernels.cuda.moe.grouped import ExpertMatrix, Pairs, multiply
from inferengine.kernels.cuda.moe.mixture import OPERANDS, matrix
from inferengine.kernels.cuda.moe.routing import group_pairs
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.kernels.experts import ExpertCodes, Gating, expert_numbers
from inferengine.kernels.ops import REFERENCE
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE
from inferengine.quantization.weight import dequantize

RING_BYTES = 200 << 20  # of weights that take turns
LAUNCHES = 12  # in a graph
REPEATS = 5
DEVICE = torch.device("cuda")
Call = Callable[[int], torch.Tensor]


class Experts(NamedTuple):
    """Experts of a layer, each [2 * inner, hidden] and [hidden, inner]."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    gating: Gating


EXPERTS = {
    "gpt-oss-20b": Experts(32, 4, 2880, 2880, Gating("swiglu_clamped", 1.702, 7.0)),
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768, Gating("silu")),
}
FRAGMENTS_FEW = [
    FragmentConfig(1, 2, 2, 2, 1, 96),
    FragmentConfig(1, 2, 2, 2, 2, None),
    FragmentConfig(1, 1, 2, 4, 2, 96),
]
FRAGMENTS_SOME = [FragmentConfig(2, 2, 4, 1, 1, 128), FragmentConfig(2, 2, 4, 1, 2, None)]
NIBBLE_TILES = [W4TileConfig(0, 64, 1, 4, 3), W4TileConfig(0, 64, 4, 4, 3), W4TileConfig(0, 128, 2, 8, 3)]
BYTE_TILES = [W8TileConfig(0, 64, 128, 1, 4, 4), W8TileConfig(0, 64, 128, 4, 4, 4), W8TileConfig(0, 128, 64, 2, 8, 4)]
DENSE = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # of Llama 3.1 8B


class Variant(NamedTuple):
    """A way to compute a product: call(i) uses the i-th copy of the weight."""

    name: str
    call: Call


def microseconds(call: Call, copies: int) -> float:
    """Return the time of one launch: the fastest of some replays of a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            call(index % copies)
    graph.replay()
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return best


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a whole result."""
    return float((found.float() - expected).norm() / expected.norm())


# -- experts -----------------------------------------------------------------------------------------------------------


def random_codes(scheme: str, rows: int, columns: int) -> ExpertCodes:
    """Draw the codes of a weight [rows, columns] themselves: rounding gigabytes of numbers would take longer."""
    if scheme == "int8":
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=DEVICE)
        return ExpertCodes(codes, torch.rand(rows, 1, device=DEVICE) * 1e-3 + 1e-4, columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    if scheme == "mxfp4":
        scales = torch.randint(118, 123, (rows, columns // 32), dtype=torch.uint8, device=DEVICE)
        return ExpertCodes(codes, scales, 32)
    groups = -(-columns // 128)
    scales = torch.rand(rows, groups, device=DEVICE) * 1e-2 + 1e-3
    return ExpertCodes(codes, scales, 128, zeros=torch.randint(4, 12, (rows, groups), device=DEVICE).float())


def chosen_experts(shape: Experts, rows: int, routing: str) -> torch.Tensor:
    """Return each token's experts [rows, chosen]."""
    generator = torch.Generator().manual_seed(rows)
    rank = torch.randperm(shape.num_experts, generator=generator) + 1.0
    weights = (1.0 / rank if routing == "skewed" else torch.ones(shape.num_experts)).expand(rows, -1)
    return torch.multinomial(weights, shape.num_chosen, generator=generator).int().to(DEVICE)


def expert_variants(
    x: torch.Tensor, weights: list[ExpertMatrix], pairs: Pairs, gating: Gating | None, rule: Any, only_rule: bool
) -> Iterator[Variant]:
    """Yield the configuration in use, then others of every kernel that reads the weight."""
    tried: dict[Any, None] = {rule: None}
    if not only_rule:
        mean = pairs.ids.numel() / weights[0].num_experts
        block = 16 if mean <= 4 else 32
        tried |= dict.fromkeys((GroupedConfig(block, 128, 128, 4, 3, True), GroupedConfig(block, 64, 128, 4, 4, True)))
        if reads(x, weights[0]):
            tried |= dict.fromkeys(FRAGMENTS_FEW if mean <= 4 else FRAGMENTS_SOME)
    for config in tried:
        compute = multiply if isinstance(config, GroupedConfig) else multiply_fragments

        def call(index: int, config: Any = config, compute: Any = compute) -> torch.Tensor:
            result: torch.Tensor = compute(x, weights[index], pairs, config, gating=gating)
            return result

        kernel = "grouped" if compute is multiply else "fragments"
        yield Variant(f"{'rule ' if config is rule else ''}{kernel} {' '.join(map(str, config))}", call)


def expected_pairs(x: torch.Tensor, numbers: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return [T * k, rows] fp32 by pair: x's row pair // k times the numbers [experts, rows, columns] of its expert."""
    out = torch.empty(ids.numel(), numbers.shape[1], device=DEVICE)
    for expert in range(len(numbers)):
        mine = (ids.flatten() == expert).nonzero().flatten()
        out[mine] = x[mine // k].float() @ numbers[expert].t()
    return out


def expert_products(
    name: str, scheme: str, rows: int, routing: str, only_rule: bool, made: Callable[[], Any]
) -> Iterator[Any]:
    """Yield each product's name, bytes of the experts that it reads, variants, copies and expected result."""
    shape, weights = EXPERTS[name], made()
    ids = chosen_experts(shape, rows, routing)
    kind = OPERANDS[weights["down"][0][0].kind]
    is_grouped = rule_choice(kind, ids.numel(), shape.num_experts).is_grouped
    order, starts = group_pairs(ids, shape.num_experts) if is_grouped else (None, None)
    pairs = Pairs(ids, order, starts)
    places = torch.arange(ids.numel(), device=DEVICE) if order is None else order.long()  # of the pairs
    for product, (matrices, numbers) in weights.items():
        choice = rule_choice(kind, ids.numel(), shape.num_experts)
        generator = torch.Generator(DEVICE).manual_seed(rows)
        read = sum(t.numel() * t.element_size() for t in matrices[0][1:3]) / shape.num_experts * len(ids.unique())
        if product == "gate_up":
            x = torch.randn(rows, shape.hidden, device=DEVICE, generator=generator).bfloat16()
            halves = expected_pairs(x, numbers, ids, shape.num_chosen).unflatten(1, (-1, 2))
            gate, up = halves.unbind(-1)
            if shape.gating.activation == "silu":
                expected = functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=shape.gating.limit), up.clamp(-shape.gating.limit, shape.gating.limit)
                expected = gate * torch.sigmoid(shape.gating.alpha * gate) * (up + 1)
            expected = expected[places]
            every = expert_variants(x, matrices, pairs, shape.gating, choice.gate_up, only_rule)
        else:
            x = torch.randn(ids.numel(), shape.inner, device=DEVICE, generator=generator).bfloat16()
            by_pair = torch.empty_like(x)
            by_pair[places] = x
            expected = expected_pairs(by_pair, numbers, ids, 1)
            every = expert_variants(x, matrices, pairs, None, choice.down, only_rule)
        labels = {"of": name, "scheme": scheme, "product": product, "rows": rows, "routing": routing}
        yield labels, read, list(every), len(matrices), expected


def expert_weights(name: str, scheme: str) -> dict[str, tuple[list[ExpertMatrix], torch.Tensor]]:
    """Return each product's copies of the packed weight, and its numbers [experts, rows, columns]."""
    shape, found = EXPERTS[name], {}
    for product, rows, columns in (
        ("gate_up", 2 * shape.inner, shape.hidden),
        ("down", shape.hidden, shape.inner),
    ):
        codes = random_codes(scheme, shape.num_experts * rows, columns)
        first = matrix(codes, None, shape.num_experts, None)
        num_bytes = first.codes.numel() * first.codes.element_size()
        copies = [first] + [
            first._replace(codes=first.codes.clone()) for _ in range(max(1, -(-RING_BYTES // num_bytes) - 1))
        ]
        found[product] = copies, expert_numbers(codes).view(shape.num_experts, rows, columns)
    return found


# -- dense -------------------------------------------------------------------------------------------------------------


def copied(weight: Any) -> Any:
    """Return the packed weight with memory of its own."""
    parts = (part.clone() if isinstance(part, torch.Tensor) else part for part in weight.weight)
    return weight._replace(weight=type(weight.weight)(*parts))


def plain_product(x: torch.Tensor, weights: list[torch.Tensor], index: int) -> torch.Tensor:
    """Multiply by a bf16 weight."""
    return functional.linear(x, weights[index % len(weights)])


def chosen_product(products: cuda.CudaProducts, x: torch.Tensor, weights: list[Any], index: int) -> torch.Tensor:
    """Multiply by a packed weight as the dispatcher chooses."""
    return products.linear(x, weights[index])


def dense_products(scheme: str, product: str, row_counts: list[int], only_rule: bool) -> Iterator[Any]:
    """Yield the same as expert_products, of one product of a dense layer, cuBLAS among the variants."""
    scratch, products = Scratch(DEVICE), cuda.CudaProducts(REFERENCE, lambda weight: weight, DEVICE)
    width, columns = DENSE[product]
    made = MADE[scheme](torch.randn(width, columns, device=DEVICE) * columns**-0.5)
    numbers = dequantize(made).float()
    read = width * columns * (0.5 + 4 / 128 if scheme == "int4" else 1.0)
    first = cuda.pack(made)
    copies = [first, *(copied(first) for _ in range(max(1, int(RING_BYTES // read))))]
    plain = [numbers.bfloat16() for _ in range(max(2, int(RING_BYTES // (2 * width * columns)) + 1))]
    for rows in row_counts:
        x = torch.randn(rows, columns, device=DEVICE).bfloat16()
        every = [
            Variant("cublas bf16", partial(plain_product, x, plain)),
            Variant("rule", partial(chosen_product, products, x, copies)),
        ]
        if not only_rule:
            every += dense_variants(x, [copy.weight for copy in copies], scratch)
        labels = {"of": "llama-8b", "scheme": scheme, "product": product, "rows": rows, "routing": ""}
        yield labels, read, every, len(copies), x.float() @ numbers.t()


def dense_variants(x: torch.Tensor, weights: list[Any], scratch: Scratch) -> Iterator[Variant]:
    """Yield the tiles for x's rows."""
    block = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
    for config in NIBBLE_TILES if isinstance(weights[0], NibbleWeight) else BYTE_TILES:
        config = config._replace(block_m=block)
        product = nibble_tile_product if isinstance(config, W4TileConfig) else tile_product

        def call(index: int, config: Any = config, product: Any = product) -> torch.Tensor:
            result: torch.Tensor = product(x, weights[index], config, scratch)
            return result

        yield Variant(f"tiles {' '.join(map(str, config))}", call)


# -- all ---------------------------------------------------------------------------------------------------------------


def measure(labels: dict[str, Any], read: float, variants: list[Variant], copies: int, expected: torch.Tensor,
            bandwidth: float) -> dict[str, Any]:  # fmt: skip
    """Return the times and errors of a product's variants, the fastest first."""
    times = []
    for variant in variants:
        try:
            error = error_of(variant.call(0), expected)
            times.append((round(microseconds(variant.call, copies), 2), float(f"{error:.1e}"), variant.name))
        except Exception as failure:  # too many registers or too much shared memory: no candidate
            times.append((float("inf"), 0.0, f"{variant.name}: {type(failure).__name__}"))
    times.sort()
    floor = read / bandwidth / 1e6
    row = {**labels, "floor_us": round(floor, 2), "times": times}
    used = {name.split()[0]: us for us, _, name in reversed(times)}
    best = next((entry for entry in times if not entry[2].startswith(("rule", "cublas"))), times[0])
    print(
        f"{labels['of']:14}{labels['scheme']:6}{labels['product']:8}{labels['rows']:4} {labels['routing']:7}"
        f" floor {floor:6.1f} cublas {used.get('cublas', 0):6.1f} rule {used.get('rule', 0):6.1f}"
        f" best {best[0]:6.1f} ({best[2]}) worst error {max(error for _, error, _ in times):.1e}",
        flush=True,
    )
    return row


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rule",), help="rule: what is in use alone")
    parser.add_argument("--experts", nargs="*", default=["gpt-oss-20b:mxfp4"], help="model:scheme")
    parser.add_argument("--dense", nargs="*", default=["int4", "int8"])
    parser.add_argument("--expert-rows", nargs="*", type=int, default=[16, 64, 128])
    parser.add_argument("--int4-rows", nargs="*", type=int, default=[32, 64, 128])
    parser.add_argument("--int8-rows", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--bandwidth", type=float, default=4.45, help="TB/s that the device reads")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case is begun")
    parser.add_argument("--json", type=Path, help="written after each row")
    arguments = parser.parse_args()
    only_rule = arguments.only == "rule"

    begin = time.perf_counter()

    def cases() -> Iterator[tuple[str, Callable[[], Iterator[Any]]]]:
        """Yield each case's name and what makes its products: they are made where there is time."""
        for named in arguments.experts:
            name, scheme = named.split(":")
            weights = cache(partial(expert_weights, name, scheme))
            for rows in arguments.expert_rows:
                for routing in ("even", "skewed"):
                    label = f"{named} {rows} {routing}"
                    yield label, partial(expert_products, name, scheme, rows, routing, only_rule, weights)
        for scheme in arguments.dense:
            counts = arguments.int4_rows if scheme == "int4" else arguments.int8_rows
            for product in DENSE:
                yield f"{scheme} {product}", partial(dense_products, scheme, product, counts, only_rule)

    found: list[dict[str, Any]] = []
    left_out = []
    with compile_workers():
        for label, make in cases():
            if time.perf_counter() - begin > arguments.seconds:
                left_out.append(label)
                continue
            every = list(make())
            with compiling_ahead(ignore_errors=True):
                for _, _, variants, _, _ in every:
                    for variant in variants:
                        variant.call(0)
            for product in every:
                found.append(measure(*product, arguments.bandwidth))
                if arguments.json:
                    result = {"benchmark": "codes", "device": torch.cuda.get_device_name(), "rows": found}
                    write_result(arguments.json, result)
            del every
            torch.cuda.empty_cache()
    print(json.dumps({"rows": len(found), "left out": left_out}))


if __name__ == "__main__":
    main()
