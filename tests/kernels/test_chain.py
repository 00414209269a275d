from types import SimpleNamespace

import pytest
import torch

from inferengine.kernels.cuda import norm, rope_kv_write
from inferengine.kernels.cuda.attention import decode
from inferengine.kernels.cuda.dispatch import Kernel, Operands, Product, TmaTileConfig, rule
from inferengine.kernels.cuda.gemm import dense_small_m, dense_tma
from inferengine.kernels.cuda.table import CudaKernels
from tests.kernels.builders import make_paged_case, prefer_rule

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 512, 8, 2, 64, 1024, 6


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "parts"), [(1, None), (8, None), (48, None), (96, None), (48, 2), (96, 1)])
def test_a_chain_in_a_graph_with_early_launches_gives_the_bits_that_it_gives_without(rows, parts, device, monkeypatch):
    """`parts`: products as large weights have them, out and down in so many parts that the norm adds up."""
    dtype = torch.bfloat16
    if parts is not None:
        tile = rule(Kernel.TMA_TILE, TmaTileConfig(64, 64, 64, 1, 4, 3))
        prefer_rule(monkeypatch, Operands.DENSE, Product.LINEAR, tile)
        prefer_rule(monkeypatch, Operands.DENSE, Product.GATED, tile)
        parts_rule = rule(Kernel.TMA_PARTS, TmaTileConfig(64, 64, 64, parts, 4, 3))
        prefer_rule(monkeypatch, Operands.DENSE, Product.PARTS, parts_rule)
    case = make_paged_case([70 + row for row in range(rows)], [1] * rows, KV_HEADS, DIM, 64, dtype, device)
    last = case.row_len.long() - 1
    batch = SimpleNamespace(
        num_tokens=rows,
        num_decodes=rows,
        row_slot=case.row_slot,
        row_len=case.row_len,
        block_tables=[case.block_table],
        positions=case.row_len - 1,
        slot_mapping=[case.block_table[case.row_slot.long(), last // 64].long() * 64 + last % 64],
        shared_prefixes=None,
    )
    cos_sin = torch.randn(256, DIM, device=device)

    def weight(width: int, columns: int) -> torch.Tensor:
        return (torch.randn(width, columns, device=device) / columns**0.5).to(dtype)

    layers = [
        (
            weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), weight(HIDDEN, HEADS * DIM), weight(2 * INNER, HIDDEN),
            weight(HIDDEN, INNER), case.kv.clone(),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    gain = torch.ones(HIDDEN, device=device, dtype=dtype)
    start = torch.randn(rows, HIDDEN, device=device).to(dtype)
    kernels = CudaKernels(device)

    def run() -> torch.Tensor:
        x, normed = start.clone(), None
        for qkv, out, gate_up, down, kv in layers:
            packed = kernels.norm_linear(x, gain, 1e-5, qkv) if normed is None else kernels.linear(normed, qkv)
            mixed = kernels.attention_qkv(packed, None, None, 1e-6, cos_sin, kv, batch, 0, HEADS, KV_HEADS, 0.125)
            x, normed = kernels.linear_add_norm(mixed, out, None, x, gain, 1e-5)
            source, first = (x, gain) if normed is None else (normed, None)
            inner = kernels.norm_gated_linear(source, first, 1e-5, gate_up)
            x, normed = kernels.linear_add_norm(inner, down, None, x, gain, 1e-5)
        return x

    with monkeypatch.context() as patch:
        for module in (decode, dense_small_m, dense_tma, norm, rope_kv_write):
            patch.setattr(module, "supports_pdl", lambda device: False)
        expected = run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run()
    for _ in range(20):
        start.copy_(start)
        actual.fill_(float("nan"))
        graph.replay()
        assert torch.equal(actual, expected)
