"""Log-probabilities of drawn tokens: torch's log-softmax and top-k, equal tokens by lower id."""

import pytest
import torch

from inferengine.kernels.cuda.sampling import logprobs
from inferengine.kernels.reference import ops as reference

VOCAB = 3000


def unpacked(packed: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Return (log-probability, rank, top ids, top log-probabilities)."""
    values = packed.view(torch.float32)
    return values[:, 0], packed[:, 1], packed[:, 2 : 2 + most], values[:, 2 + most :]


def by_torch(logits: torch.Tensor, ids: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    rows = logits.float().log_softmax(-1)
    chosen = rows.gather(1, ids.long().unsqueeze(1))
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :most]
    ranks = (logits > logits.gather(1, ids.long().unsqueeze(1))).sum(-1) + 1
    return chosen.squeeze(1), ranks.int(), order.int(), rows.gather(1, order)


@pytest.fixture(params=[logprobs.token_logprobs, reference.token_logprobs], ids=["kernel", "reference"])
def compute(request):
    return request.param


@pytest.mark.parametrize("most", [0, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_ranks_and_alternatives_equal_torchs(compute, dtype: torch.dtype, most: int, device) -> None:
    logits = (torch.randn(3, VOCAB, device=device) * 4).to(dtype)  # bf16: many equal ones
    ids = torch.tensor([7, 2999, int(logits[2].argmax())], dtype=torch.int32, device=device)
    counts = torch.full((4,), most, dtype=torch.int32, device=device)
    rows = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
    padded = torch.cat((logits, torch.full_like(logits[:, :8], 1e4)), 1)[:, :VOCAB]  # a view, as the head leaves them
    actual = unpacked(compute(padded, counts, rows, ids, most), most)
    expected = by_torch(logits, ids, most)
    assert torch.allclose(actual[0], expected[0], atol=1e-5)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
    assert torch.allclose(actual[3], expected[3], atol=1e-5)


def test_equal_tokens_come_by_lower_id_across_tiles(compute, device) -> None:
    logits = torch.zeros(1, 3 * logprobs.BLOCK, device=device)
    logits[0, [5000, 17, 2048]] = 1.0
    logits[0, 40] = -0.0
    count = torch.tensor([6], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    _, rank, ids, _ = unpacked(compute(logits, count, zero, zero, 6), 6)
    assert ids.tolist() == [[17, 2048, 5000, 0, 1, 2]]
    assert rank.tolist() == [4]


def test_every_slot_gets_as_many_as_it_asked_for(compute, device) -> None:
    logits = torch.randn(4, VOCAB, device=device)
    counts = torch.tensor([5, -1, 0, 2], dtype=torch.int32, device=device)
    rows = torch.arange(4, dtype=torch.int32, device=device)
    ids = torch.full((4,), 9, dtype=torch.int32, device=device)
    packed = compute(logits, counts, rows, ids, 5)
    expected = by_torch(logits, ids, 5)
    for row, count in ((0, 5), (2, 0), (3, 2)):
        chosen, rank, top_ids, top = unpacked(packed[row : row + 1], 5)
        assert float(chosen) == pytest.approx(float(expected[0][row]), abs=1e-5)
        assert int(rank) == int(expected[1][row])
        assert torch.equal(top_ids[0, :count], expected[2][row, :count])
        assert torch.allclose(top[0, :count], expected[3][row, :count], atol=1e-5)


def test_tokens_of_no_chance_are_counted_and_may_be_alternatives(compute, device) -> None:
    logits = torch.full((1, 300), float("-inf"), device=device)
    logits[0, [200, 3]] = torch.tensor([2.0, 1.0], device=device)
    count = torch.tensor([4], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    chosen, rank, ids, top = unpacked(compute(logits, count, zero, zero + 7, 4), 4)
    assert chosen.tolist() == [float("-inf")]
    assert rank.tolist() == [3]
    assert ids.tolist() == [[200, 3, 0, 1]]
    assert top[0, :2].exp().sum().item() == pytest.approx(1.0)
