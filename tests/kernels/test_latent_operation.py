"""The operation of latent attention, of every table, against attention over whole keys and values of every head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inferengine.kernels import cpu, cpu_latent
from inferengine.kernels.batch import Batch, SlotMapping
from inferengine.kernels.cuda.table import CudaKernels
from tests.kernels.builders import PagedCase, make_paged_case, reference_norm, reference_rope, relative_error
from tests.kernels.test_cpu_attention import batch_of

HEADS, RANK, TURNING, PLAIN, VALUE, EPS, SCALE = 6, 24, 8, 12, 10, 1e-6, 0.3
ROWS = {  # tokens of each row after the step, and how many of them are new
    "decodes": ([1, 90, 64], [1, 1, 1]),
    "a prompt": ([40], [40]),
    "decodes, drafts and a chunk": ([12, 50, 33, 70], [1, 1, 4, 20]),
}
PROMPTS = {
    "decodes, drafts and a chunk": ROWS["decodes, drafts and a chunk"],
    "a long chunk": ([700], [400]),
    "short prompts and a long one": ([5, 40, 70, 30, 300, 90], [1, 40, 30, 17, 300, 90]),
    "chunks behind long contexts": ([600, 300, 20], [18, 290, 20]),
}


class Layer:
    """Random weights of one layer, and a step's queries and latents."""

    def __init__(self, num_tokens: int) -> None:
        self.q = torch.randn(num_tokens, HEADS * (PLAIN + TURNING))
        self.new = torch.randn(num_tokens, RANK + TURNING)
        self.gain, self.cos_sin = torch.randn(RANK), torch.randn(1024, TURNING)
        self.key_up, self.value_up = torch.randn(HEADS, PLAIN, RANK) * 0.2, torch.randn(HEADS, RANK, VALUE) * 0.2

    def run(self, operation: Any, case: PagedCase, batch: Batch, device: torch.device) -> torch.Tensor:
        tensors = [self.q, self.new, self.gain, self.key_up, self.value_up, self.cos_sin]
        q, new, gain, key_up, value_up, cos_sin = (tensor.to(device, copy=True) for tensor in tensors)
        return operation(q, new, gain, EPS, key_up, value_up, cos_sin, case.kv, batch, 0, SCALE)

    def expected(self, case: PagedCase) -> torch.Tensor:
        """Return [T, H * V] float64 of a case whose cache holds the step's latents already."""
        positions = batch_of(case, 0).columns.positions  # type: ignore[union-attr]
        queries = self.q.view(len(self.q), HEADS, -1).double()
        turned = reference_rope(queries[..., PLAIN:], self.cos_sin, torch.from_numpy(positions))
        queries = torch.cat((queries[..., :PLAIN], turned), -1)
        out = []
        for row in range(len(case.row_len)):
            at = torch.arange(int(case.row_len[row]))
            blocks = case.block_table[int(case.row_slot[row])][at // case.kv.shape[3]].long()
            held = case.kv[blocks, 0, 0, at % case.kv.shape[3]].double()
            keys = torch.einsum("hnr,tr->htn", self.key_up.double(), held[:, :RANK])
            keys = torch.cat((keys, held[:, RANK:].expand(HEADS, -1, -1)), -1)
            values = torch.einsum("hrv,tr->htv", self.value_up.double(), held[:, :RANK])
            own = queries[int(case.query_start[row]) : int(case.query_start[row + 1])]
            scores = torch.einsum("qhd,htd->hqt", own, keys) * SCALE
            query = int(case.row_start[row]) + torch.arange(len(own))[:, None]
            weights = scores.masked_fill(at[None, :] > query, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqt,htv->qhv", weights, values).flatten(1))
        return torch.cat(out)


def made(rows: str, device: torch.device) -> tuple[PagedCase, Batch]:
    row_lens, counts = {**ROWS, **PROMPTS}[rows]
    cpu_case = make_paged_case(row_lens, counts, 1, RANK + TURNING, 16, torch.float32, torch.device("cpu"))
    num_decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
    batch = batch_of(cpu_case, num_decodes)
    columns: Any = batch.columns
    case = PagedCase(
        cpu_case.kv[:, :1].to(device).contiguous(), *(part.to(device) for part in list(vars(cpu_case).values())[1:])
    )
    batch.positions = torch.from_numpy(columns.positions).to(device)
    batch.row_slot, batch.row_len, batch.row_start = case.row_slot, case.row_len, case.row_start
    batch.query_start, batch.block_tables = case.query_start, [case.block_table]
    batch.token_slot = case.row_slot[torch.from_numpy(columns.token_row).long().to(device)]
    batch.slot_mapping = SlotMapping(batch.block_tables, batch.token_slot, batch.positions, 16)
    return case, batch


def on_cpu(case: PagedCase) -> PagedCase:
    return PagedCase(*(part.cpu() for part in vars(case).values()))


@pytest.mark.parametrize("rows", ROWS)
def test_the_cpu_operation_equals_the_definition(rows):
    case, batch = made(rows, torch.device("cpu"))
    layer = Layer(batch.num_tokens)
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, None)]
    out = layer.run(cpu_latent.latent_attention, case, batch, torch.device("cpu"))
    assert relative_error(out, layer.expected(case)) < 1e-5


@pytest.mark.parametrize("up_projects", [False, True])
@pytest.mark.parametrize("rows", PROMPTS)
def test_prompts_of_the_reference_absorbed_and_up_projected(rows, up_projects, monkeypatch):
    """Whichever takes fewer multiplications."""
    monkeypatch.setattr(cpu_latent, "_should_up_project", lambda *_: up_projects)
    case, batch = made(rows, torch.device("cpu"))
    layer = Layer(batch.num_tokens)
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, None)]
    out = layer.run(cpu_latent.latent_attention, case, batch, torch.device("cpu"))
    assert relative_error(out, layer.expected(case)) < 1e-5
    parts = batch.plans[0].latent_parts
    assert parts[-1].end == batch.num_tokens
    assert [isinstance(part, cpu_latent.UpProjected) for part in parts if not getattr(part, "decodes", ())] == [
        up_projects
    ] * (len(parts) - (batch.num_decodes > 0))


@pytest.mark.parametrize(
    ("context", "new", "up_projects"),
    [(0, 17, True), (0, 2000, True), (100_000, 170, False), (100_000, 171, True), (512, 100, False), (16, 100, True)],
)
def test_a_prompt_of_the_published_sizes_is_computed_with_fewer_multiplications(context, new, up_projects):
    """A pair of tokens takes 1,088 with latents, 320 with keys and values; these take 131,072 of each token of the
    context, and latents as many of each new token."""
    last_key = np.arange(context, context + new)
    part = cpu_latent.UpProjected(0, new, torch.empty(context + new), np.zeros(new, dtype=int), last_key)
    weights = cpu_latent.Weights(torch.empty(16, 128, 512), torch.empty(16, 512, 128))
    pairs = new * context + new * (new + 1) // 2
    assert up_projects == (pairs * 320 + (context + new) * 131_072 < pairs * 1_088 + new * 131_072)
    assert cpu_latent._should_up_project(part, weights, 576) == up_projects


@pytest.mark.parametrize("isolated", [False, True])
def test_what_is_no_number_stays_in_its_row(isolated):
    """Rows side by side share products; computed apart they share none."""
    case, batch = made("short prompts and a long one", torch.device("cpu"))
    layer = Layer(batch.num_tokens)
    layer.new[60] = float("nan")  # of the second prompt
    batch.isolated = isolated
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, None)]
    out = layer.run(cpu_latent.latent_attention, case, batch, torch.device("cpu"))
    spoiled = out.isnan().any(1)
    assert spoiled[60:71].all()
    assert not spoiled[[0, *range(88, batch.num_tokens)]].any()
    if isolated:
        assert not spoiled[:41].any()
        assert not spoiled[71:].any()


def test_memory_does_not_grow_with_the_context(monkeypatch):
    """Keys and values exist of one block of the context at a time."""
    seen = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: seen.append(bmm(*args)) or seen[-1])
    case, batch = made("a long chunk", torch.device("cpu"))
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, None)]
    layer = Layer(batch.num_tokens)
    layer.run(cpu_latent.latent_attention, case, batch, torch.device("cpu"))
    assert isinstance(batch.plans[0].latent_parts[0], cpu_latent.UpProjected)
    assert max(made.numel() for made in seen) <= HEADS * cpu_latent.KEYS_AT_ONCE * cpu_latent.QUERIES_AT_ONCE


def test_what_the_cache_holds_is_the_normed_latent_and_the_rotated_key():
    case, batch = made("a prompt", torch.device("cpu"))
    layer = Layer(batch.num_tokens)
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, None)]
    layer.run(cpu_latent.latent_attention, case, batch, torch.device("cpu"))
    held = case.kv.view(-1, RANK + TURNING)[batch.slot_mapping[0]].double()
    turned = reference_rope(layer.new[:, None, RANK:], layer.cos_sin, batch.positions)[:, 0]
    expected = torch.cat((reference_norm(layer.new[:, :RANK], layer.gain, EPS), turned), 1)
    torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_the_kernels_equal_the_definition(rows, deterministic, device):
    case, batch = made(rows, device)
    layer = Layer(batch.num_tokens)
    out = layer.run(CudaKernels(device, deterministic=deterministic).latent_attention, case, batch, device)
    assert relative_error(out.cpu(), layer.expected(on_cpu(case))) < 1e-5


@pytest.mark.parametrize("rows", ["decodes", "a long chunk"])
def test_an_fp8_cache_of_the_reference_is_scaled(rows):
    case, batch = made(rows, torch.device("cpu"))
    codes = (case.kv / 0.25).to(torch.float8_e4m3fn)
    layer = Layer(batch.num_tokens)
    batch.plans = [cpu.prepare_attention(batch, 0, codes, None)]
    out = cpu_latent.latent_attention(
        layer.q, layer.new, layer.gain, EPS, layer.key_up, layer.value_up, layer.cos_sin, codes, batch, 0, SCALE, 0.25
    )
    rounded = PagedCase(codes.float() * 0.25, *list(vars(case).values())[1:])
    assert relative_error(out, layer.expected(rounded)) < 1e-5
