"""Kernel times on one GPU, each beside its floor and, for matrix products, beside cuBLAS. Prints one JSON object.

    python -m benchmarks.kernels [--models llama-8b,qwen-0.6b] [--rows 1,8,32,64,128,256] [--out FILE]

Every figure is the median of CUDA graph replays, divided by the launches in the graph; weights and caches rotate over
copies that together exceed the L2 cache. A "step" is all layers, the final norm and the head, without sampling:
`cublas` is the same step with every matrix product left to cuBLAS, `matrix_only` without attention. The floor is the
larger of bytes / read bandwidth and operations / sustained bf16 rate, as measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

from inferengine.bench.environment import write_result
from inferengine.kernels.cuda import activation, norm, rope_kv_write
from inferengine.kernels.cuda.attention.prefill import prefill_attention
from inferengine.kernels.cuda.sampling import sample
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.kernels.cuda.table import CudaKernels
from inferengine.kernels.reference.ops import FILTER, RANDOM

READ_BYTES_PER_S = 4.45e12
OPERATIONS_PER_S = 696e12
L2_BYTES = 60e6
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    qk_norm: bool

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """[out, in] of a layer's products, and of the head."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


MODELS = {
    "llama-8b": Shape(4096, 32, 8, 128, 14336, 128256, 32, False),
    "qwen-0.6b": Shape(1024, 16, 8, 128, 3072, 151936, 28, True),
}


class CublasKernels(CudaKernels):
    """The same table with every matrix product left to cuBLAS."""

    def linear_add_norm(self, x: Any, weight: Any, bias: Any, residual: Any, gain: Any, eps: float) -> tuple[Any, None]:
        return self.linear_add(x, weight, bias, residual), None

    def _choose(self, x: torch.Tensor, weight: torch.Tensor, product: Any) -> None:
        return None


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE) * scale


def graph_us(launch: Callable[[int], Any], count: int = 1) -> float:
    """Return the microseconds of one launch out of `count` in a CUDA graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                launch(index)
        graph.replay()
        times = []
        for _ in range(7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[3] / count * 1e3


def figure(us: float, num_bytes: float, operations: float = 0.0) -> dict[str, float]:
    floor = max(num_bytes / READ_BYTES_PER_S, operations / OPERATIONS_PER_S) * 1e6
    return {
        "us": round(us, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / us, 3),
        "tb_per_s": round(num_bytes / us / 1e6, 3),
        "tflop_per_s": round(operations / us / 1e6, 1),
    }


def bench_products(shape: Shape, rows: int) -> dict[str, Any]:
    """Measure each weight alone, launched back to back: as a decoder layer calls it, and with cuBLAS."""
    result = {}
    for name, (width, columns) in shape.weights.items():
        copies = 1 + int(3 * L2_BYTES // (width * columns * 2))
        weights = [randn(width, columns, scale=columns**-0.5) for _ in range(copies)]
        x, gain, residual = randn(rows, columns), randn(columns), randn(rows, width)
        per_kind = {}
        for kind, kernels in (("ours", CudaKernels(x.device)), ("cublas", CublasKernels(x.device))):
            if name in ("out", "down"):
                call = lambda i, k=kernels: k.linear_add(x, weights[i % copies], None, residual)  # noqa: E731, B023
            elif name == "gate_up":
                call = lambda i, k=kernels: k.norm_gated_linear(x, gain, 1e-5, weights[i % copies])  # noqa: E731, B023
            else:
                call = lambda i, k=kernels: k.norm_linear(x, gain, 1e-5, weights[i % copies])  # noqa: E731, B023
            us = graph_us(call, max(4, min(32, 4 * copies)))
            per_kind[kind] = figure(us, width * columns * 2, 2 * rows * width * columns)
        bare = lambda i: torch.mm(x, weights[i % copies].t())  # noqa: E731, B023
        per_kind["cublas_bare"] = figure(graph_us(bare, 8), width * columns * 2, 2 * rows * width * columns)
        result[name] = per_kind
    return result


def make_batch(shape: Shape, rows: int, context: int, copies: int, block_size: int) -> tuple[Any, list[torch.Tensor]]:
    """Make `rows` decodes at `context` tokens, blocks in random order, and `copies` layers of cache."""
    per_row = -(-context // block_size)
    caches = [randn(rows * per_row, 2, shape.kv_heads, block_size, shape.head_dim) for _ in range(copies)]
    table = torch.randperm(rows * per_row, device="cuda").int().view(rows, per_row)
    last = context - 1
    batch = SimpleNamespace(
        num_tokens=rows, num_decodes=rows, block_tables=[table],
        row_slot=torch.arange(rows, device="cuda", dtype=torch.int32),
        row_len=torch.full((rows,), context, device="cuda", dtype=torch.int32),
        row_start=torch.full((rows,), last, device="cuda", dtype=torch.int32),
        query_start=torch.arange(rows + 1, device="cuda", dtype=torch.int32),
        positions=torch.full((rows,), last, device="cuda", dtype=torch.int32),
        slot_mapping=[table[:, last // block_size].long() * block_size + last % block_size],
        shared_prefixes=None,
    )  # fmt: skip
    return batch, caches


def bench_attention(shape: Shape, rows: int, context: int, block_size: int) -> dict[str, float]:
    """Measure rotation, KV write and decode attention of one layer."""
    num_bytes = rows * context * 2 * shape.kv_heads * shape.head_dim * 2
    batch, caches = make_batch(shape, rows, context, 1 + int(3 * L2_BYTES // num_bytes) % 64, block_size)
    kernels = CudaKernels(caches[0].device)
    qkv = randn(rows, shape.weights["qkv"][0])
    gain = randn(shape.head_dim) if shape.qk_norm else None
    cos_sin = torch.randn(context, shape.head_dim, device="cuda")

    def launch(index: int) -> None:
        kernels.attention_qkv(
            qkv, gain, gain, 1e-6, cos_sin, caches[index % len(caches)], batch, 0, shape.heads, shape.kv_heads, 0.088
        )

    return figure(graph_us(launch, 16), num_bytes)


def bench_small(shape: Shape, rows: int) -> dict[str, Any]:
    x, residual, gain = randn(rows, shape.hidden), randn(rows, shape.hidden), randn(shape.hidden)
    gate_up = randn(rows, 2 * shape.intermediate)
    batch, caches = make_batch(shape, rows, 64, 1, 64)
    qkv = randn(rows, shape.weights["qkv"][0])
    cos_sin = torch.randn(64, shape.head_dim, device="cuda")
    return {
        "add_rms_norm": figure(
            graph_us(lambda _: norm.add_rms_norm(x, residual, gain, 1e-5), 16), rows * shape.hidden * 8
        ),
        "silu_and_mul": figure(graph_us(lambda _: activation.silu_and_mul(gate_up), 16), rows * shape.intermediate * 6),
        "qkv_rope_write": figure(
            graph_us(
                lambda _: rope_kv_write.qkv_rope_write(
                    qkv, None, None, 1e-6, cos_sin, batch.positions, batch.slot_mapping[0], caches[0], shape.heads,
                    shape.kv_heads,
                ),
                16,
            ),
            qkv.numel() * 4,
        ),
    }  # fmt: skip


def bench_sampling(shape: Shape, rows: int) -> dict[str, float]:
    """Measure microseconds by what the rows ask for; logits with a spread as of a real model."""
    full = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device="cuda")  # noqa: E731
    slots = SimpleNamespace(
        temperature=full(1.0), top_p=full(1.0), min_p=full(0.0), top_k=full(0, torch.int32),
        seed=torch.arange(rows, device="cuda"), tokens=torch.zeros(rows, 16, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    row, position = torch.arange(rows, device="cuda").int(), full(8, torch.int32)
    logits = randn(rows, shape.vocab, scale=4.0)
    result = {}
    for name, needs, top_k, top_p in (
        ("greedy", 0, 0, 1.0),
        ("temperature", RANDOM, 0, 1.0),
        ("top_k_50", RANDOM | FILTER, 50, 1.0),
        ("top_p_0.9", RANDOM | FILTER, 0, 0.9),
    ):
        slots.top_k.fill_(top_k)
        slots.top_p.fill_(top_p)
        result[name] = round(graph_us(lambda _, n=needs: sample.sample(logits, slots, row, position, n), 4), 1)
    return result


def bench_step(shape: Shape, rows: int, context: int, block_size: int) -> dict[str, float]:
    """Measure a whole decode step, each layer with its own weights and cache."""
    make = lambda name: randn(*shape.weights[name], scale=0.02)  # noqa: E731
    layers = [{name: make(name) for name in ("qkv", "out", "gate_up", "down")} for _ in range(shape.layers)]
    head, gain, gain_head = make("head"), randn(shape.hidden), randn(shape.head_dim) if shape.qk_norm else None
    batch, caches = make_batch(shape, rows, context, shape.layers, block_size)
    cos_sin, hidden = torch.randn(context, shape.head_dim, device="cuda"), randn(rows, shape.hidden)
    mixed = randn(rows, shape.heads * shape.head_dim)

    def step(kernels: CudaKernels, attention: bool) -> None:
        x, normed = hidden, None
        for layer, cache in zip(layers, caches, strict=True):
            if normed is None:
                qkv = kernels.norm_linear(x, gain, 1e-5, layer["qkv"])
            else:
                qkv = kernels.linear(normed, layer["qkv"])
            out = mixed
            if attention:
                out = kernels.attention_qkv(
                    qkv, gain_head, gain_head, 1e-6, cos_sin, cache, batch, 0, shape.heads, shape.kv_heads, 0.088
                )
            x, normed = kernels.linear_add_norm(out, layer["out"], None, x, gain, 1e-5)
            source, first = (x, gain) if normed is None else (normed, None)
            inner = kernels.norm_gated_linear(source, first, 1e-5, layer["gate_up"])
            x, normed = kernels.linear_add_norm(inner, layer["down"], None, x, gain, 1e-5)
        kernels.norm_linear(x, gain, 1e-5, head)

    device = hidden.device
    ours, cublas = CudaKernels(device), CublasKernels(device)
    exact = CudaKernels(device, deterministic=True)
    num_bytes = sum(w.numel() * 2 for layer in layers for w in layer.values()) + head.numel() * 2
    operations = num_bytes * rows
    num_bytes += rows * context * 4 * shape.kv_heads * shape.head_dim * shape.layers
    floor = max(num_bytes / READ_BYTES_PER_S, operations / OPERATIONS_PER_S) * 1e3
    result = {
        "ours": graph_us(lambda _: step(ours, True)) / 1e3,
        "ours_matrix_only": graph_us(lambda _: step(ours, False)) / 1e3,
        "cublas": graph_us(lambda _: step(cublas, True)) / 1e3,
        "cublas_matrix_only": graph_us(lambda _: step(cublas, False)) / 1e3,
        "deterministic": graph_us(lambda _: step(exact, True)) / 1e3,
        "floor": floor,
    }
    return {f"{name}_ms": round(value, 3) for name, value in result.items()}


def bench_prefill(shape: Shape, prompts: int, length: int, block_size: int) -> dict[str, float]:
    """Measure causal attention of whole prompts, one layer."""
    batch, (cache,) = make_batch(shape, prompts, length, 1, block_size)
    q = randn(prompts * length, shape.heads, shape.head_dim)
    out = torch.empty(prompts * length, shape.heads * shape.head_dim, device="cuda", dtype=DTYPE)
    starts, bounds = torch.zeros_like(batch.row_len), batch.query_start * length
    scratch = Scratch(q.device)

    def launch(_: int) -> None:
        prefill_attention(
            q, cache, batch.row_slot, starts, bounds, batch.block_tables[0], 0.088, None, None, first_row=0,
            num_tokens=prompts * length, out=out, scratch=scratch,
        )  # fmt: skip

    return figure(graph_us(launch, 3), q.numel() * 4, 2 * prompts * shape.heads * shape.head_dim * length * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "context": options.context, "block_size": options.block_size,
        "read_bytes_per_s": READ_BYTES_PER_S, "operations_per_s": OPERATIONS_PER_S, "models": {},
    }  # fmt: skip
    for name in options.models.split(","):
        shape = MODELS[name]
        per_rows = {}
        for rows in map(int, options.rows.split(",")):
            per_rows[rows] = {
                "step": bench_step(shape, rows, options.context, options.block_size),
                "products": bench_products(shape, rows),
                "attention": bench_attention(shape, rows, options.context, options.block_size),
                "attention_4096": bench_attention(shape, min(rows, 64), 4096, options.block_size),
                "small": bench_small(shape, rows),
                "sampling_us": bench_sampling(shape, rows),
            }
            torch.cuda.empty_cache()
        prefill = {
            f"{prompts}x{length}": bench_prefill(shape, prompts, length, options.block_size)
            for prompts, length in ((1, 128), (1, 1024), (1, 8192), (4, 4096), (16, 4096))
        }
        result["models"][name] = {"rows": per_rows, "prefill_attention": prefill}
    if options.out:
        write_result(Path(options.out), result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
