"""Products with quantized weights, tiling by tiling: microseconds in a CUDA graph, over more weights than the L2 holds.

python benchmarks/quantized.py --shapes 6144x4096 28672x4096g --schemes fp8 int4 --rows 1 16 64 [--json FILE]

A shape is outputs x inputs; "g" marks a gated one (outputs count gate and up). For each scheme and number of rows every
candidate tiling is timed and the best are printed, with the share of `--bandwidth` that reading the codes alone takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

from inferengine.bench.environment import write_result
from inferengine.kernels.cuda.gemm import w8
from inferengine.kernels.cuda.gemm.gemv_hopper import stream_product, stream_shape
from inferengine.kernels.cuda.gemm.w4_small_m import W4SmallMConfig, small_m_product
from inferengine.kernels.cuda.gemm.w4_tiles import W4TileConfig, nibble_tile_product
from inferengine.kernels.cuda.gemm.w8 import W8GemvConfig, W8TileConfig
from inferengine.kernels.cuda.norm import rms_norm
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE
from inferengine.quantization.weight import INT4

RING_BYTES = 256 << 20


def microseconds(call: Callable[[int], Any], ring: int, repeats: int = 3) -> float:
    """Measure one call, `call(i)` taking weight i of the ring: the fastest of a few replays of a graph of many."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = max(ring, 16)
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index % ring)
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / count)
    return best


def candidates(rows: int, nibbles: bool) -> list[W8GemvConfig | W8TileConfig | W4SmallMConfig | W4TileConfig]:
    if nibbles and rows > 16:
        every_nibble_tile = itertools.product((64, 128), (1, 2, 4, 8), (4, 8), (2, 3, 4))
        block_m = 32 if rows <= 32 else 64 if rows <= 64 else 128
        return [W4TileConfig(block_m, *values) for values in every_nibble_tile if values[0] > 64 or values[2] == 4]
    if nibbles:
        every_fragment = itertools.product((1, 2), (2, 4, 8, 16), (1, 2, 4))
        return [W4SmallMConfig(*values) for values in every_fragment if values[1] * values[2] <= 32]
    if rows == 1:
        every = itertools.product((2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8))
        return [W8GemvConfig(n, k, warps) for n, k, warps in every if warps * 128 <= n * k <= 4096 * warps]
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    every_tile = itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (4, 8), (2, 4))
    return [W8TileConfig(block_m, n, k, c, w, s) for n, k, c, w, s in every_tile if w == 4 or n * k >= 64 * 128]


def sweep(shape: str, scheme: str, rows: int, bandwidth: float, budget: int) -> dict[str, Any]:
    gated = shape.endswith("g")
    width, columns = map(int, shape.rstrip("g").split("x"))
    device = torch.device("cuda")
    scratch = Scratch(device)
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    gain = torch.ones(columns, device=device, dtype=torch.bfloat16)
    residual = torch.zeros(rows, width, device=device, dtype=torch.bfloat16)
    first = MADE[scheme](torch.randn(width, columns, device=device) * 0.02)
    code_bytes = width * columns // (2 if first.kind == INT4 else 1)
    ring = max(2, min(64, RING_BYTES // code_bytes))
    packed = [cuda.pack(first).weight]
    packed += [
        type(packed[0])(*(v.clone() if isinstance(v, torch.Tensor) else v for v in packed[0])) for _ in range(ring - 1)
    ]
    found = []
    every = candidates(rows, first.kind == INT4)
    step = max(1, len(every) // budget)
    for tuned in every[::step]:
        surroundings: dict[str, Any] = {"gated": 0} if gated else {"residual": residual} if width <= columns else {}
        if isinstance(tuned, W4SmallMConfig):

            def call(index: int, tuned: Any = tuned, surroundings: dict[str, Any] = surroundings) -> None:
                normed = x if "residual" in surroundings else rms_norm(x, gain, 1e-5)
                small_m_product(normed, packed[index], tuned, **({} if rows > 1 and gated else surroundings))
        elif isinstance(tuned, W4TileConfig):

            def call(index: int, tuned: Any = tuned, surroundings: dict[str, Any] = surroundings) -> None:
                nibble_tile_product(x, packed[index], tuned, scratch)
        elif isinstance(tuned, W8GemvConfig):

            def call(index: int, tuned: Any = tuned, surroundings: dict[str, Any] = surroundings) -> None:
                normed = x if "residual" in surroundings else rms_norm(x, gain, 1e-5)
                w8.vector_product(normed, packed[index], tuned, **surroundings)
        else:

            def call(index: int, tuned: Any = tuned, surroundings: dict[str, Any] = surroundings) -> None:
                w8.tile_product(x, packed[index], tuned, scratch)

        try:
            found.append((microseconds(call, ring), list(tuned)))
        except Exception as error:  # out of shared memory or registers: no candidate
            found.append((float("inf"), [*tuned, type(error).__name__]))
    adds = not gated and width <= columns
    streamed = stream_shape(x, packed[0], gated=gated, adds=adds)
    if streamed is not None:
        inside: dict[str, Any] = {"residual": residual} if adds else {"gain": gain, "eps": 1e-5}
        inside |= {"gated": 0} if gated else {}
        found.append(
            (microseconds(lambda index: stream_product(x, packed[index], streamed, **inside), ring), ["streamed"])
        )
    found.sort(key=lambda item: item[0])
    plain = [torch.randn(width, columns, device=device, dtype=torch.bfloat16) for _ in range(max(2, ring // 2))]
    cublas = microseconds(lambda index: functional.linear(x, plain[index % len(plain)]), ring)
    row = {
        "shape": shape, "scheme": scheme, "rows": rows, "bf16_cublas_us": round(cublas, 2),
        "floor_us": round(code_bytes / bandwidth / 1e6, 2),
        "best": [[round(us, 2), *tuned] for us, tuned in found[:4]],
        "failed": sum(us == float("inf") for us, _ in found),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["6144x4096", "4096x4096", "28672x4096g", "4096x14336"])
    parser.add_argument("--schemes", nargs="+", default=["fp8", "int8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--bandwidth", type=float, default=4.45, help="TB/s that the device reads")
    parser.add_argument("--candidates", type=int, default=24, help="most tilings to time of each")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        sweep(shape, scheme, count, arguments.bandwidth, arguments.candidates)
        for count in arguments.rows
        for scheme in arguments.schemes
        for shape in arguments.shapes
    ]
    if arguments.json:
        write_result(arguments.json, {"benchmark": "quantized", "rows": rows})


if __name__ == "__main__":
    main()
