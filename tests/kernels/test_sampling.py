from dataclasses import dataclass, field

import pytest
import torch
import triton.language as tl

from inferengine.kernels.cuda.sampling import sample as sampling
from inferengine.kernels.cuda.sampling.sample import CANDIDATES, sample
from inferengine.kernels.reference import ops as reference
from inferengine.kernels.reference.ops import ALLOWED, BIAS, FILTER, MIN_TOKENS, PENALTY, RANDOM

VOCAB = 5000


@dataclass
class SlotState:
    """The columns of executor/slots.py that sampling reads."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    num_prompt: torch.Tensor
    min_tokens: torch.Tensor
    seed: torch.Tensor
    tokens: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    stop_ids: torch.Tensor
    allowed: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def make_slots(num_slots: int, device: torch.device, vocab_size: int = VOCAB) -> SlotState:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_slots,), value, dtype=dtype, device=device)

    words = -(-vocab_size // 32)
    return SlotState(
        temperature=full(1.0), top_k=full(0, torch.int32), top_p=full(1.0), min_p=full(0.0),
        repetition_penalty=full(1.0), presence_penalty=full(0.0), frequency_penalty=full(0.0),
        num_prompt=full(3, torch.int32), min_tokens=full(0, torch.int32),
        seed=torch.randint(-(2**62), 2**62, (num_slots,), device=device),
        tokens=torch.randint(0, vocab_size, (num_slots, 64), dtype=torch.int32, device=device),
        bias_ids=torch.full((num_slots, 4), -1, dtype=torch.int32, device=device),
        bias_values=torch.zeros(num_slots, 4, device=device),
        stop_ids=torch.full((num_slots, 2), -1, dtype=torch.int32, device=device),
        allowed=torch.full((num_slots, words), -1, dtype=torch.int32, device=device),
    )  # fmt: skip


def with_padding(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits as the head leaves them: a view that leaves out columns, which would win every draw here."""
    num_rows, vocab_size = logits.shape
    product = logits.new_full((num_rows, (vocab_size // 64 + 1) * 64), 1e4)
    product[:, :vocab_size] = logits
    return product[:, :vocab_size]


def draw_both(
    logits: torch.Tensor, slots: SlotState, needs: int, repeats: int = 4 if torch.cuda.is_available() else 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (kernel's ids, reference's ids) over several positions, on the rows of slots in reverse. The kernel's logits
    are a view of a padded product, the reference's lie end to end."""
    num_rows, padded = logits.shape[0], with_padding(logits)
    rows = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=logits.device)
    actual, expected = [], []
    for repeat in range(repeats):
        positions = torch.full((num_rows,), 10 + repeat, dtype=torch.int32, device=logits.device)
        before = slots.tokens.clone()
        expected.append(reference.sample(logits.clone(), slots, rows, positions, needs))
        written = slots.tokens.clone()
        slots.tokens.copy_(before)
        actual.append(sample(padded, slots, rows, positions, needs))
        assert torch.equal(slots.tokens[rows.long(), positions.long()], actual[-1].clamp_min(0))
        slots.tokens.copy_(written)
    return torch.cat(actual), torch.cat(expected)


@pytest.fixture
def logits(device):
    return torch.randn(6, VOCAB, device=device) * 3


def test_greedy_takes_the_lowest_of_equal_ids(device):
    slots = make_slots(3, device)
    slots.temperature.zero_()
    logits = torch.zeros(3, VOCAB, device=device)
    logits[0, [70, 4000]] = 1.0
    logits[1, 4999] = 1.0
    rows, positions = torch.arange(3, device=device).int(), torch.full((3,), 9, device=device).int()
    assert sample(logits, slots, rows, positions, 0).tolist() == [70, 4999, 0]


def test_draws_agree_with_the_definition(logits, device):
    slots = make_slots(6, device)
    slots.temperature[0], slots.temperature[1] = 0.0, 0.3
    actual, expected = draw_both(logits, slots, RANDOM)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("spread", [0.0, 0.3, 60.0])
def test_noise_is_left_out_only_where_it_cannot_matter(spread, device):
    """Rows of bf16 with scores far apart or all equal, with few tokens allowed, cold and hot."""
    vocab_size = 2100
    slots = make_slots(6, device, vocab_size)
    slots.temperature.copy_(torch.tensor([1.0, 0.05, 7.0, 0.9, 1.0, 1.0], device=device))
    logits = (torch.randn(6, vocab_size, device=device) * spread - 40.0).bfloat16()
    logits[4, 3:] = float("-inf")
    logits[5, : vocab_size - 2] = float("-inf")
    actual, expected = draw_both(logits, slots, RANDOM)
    assert torch.equal(actual, expected)


def test_rows_of_bf16_with_filters_of_every_kind_are_drawn_beside_each_other(device):
    slots = make_slots(6, device)
    slots.temperature.copy_(torch.tensor([0.7, 1.0, 1.6, 0.0, 1.0, 0.9], device=device))
    slots.top_k[0], slots.top_p[1], slots.min_p[2], slots.top_k[3], slots.top_p[5] = 300, 0.8, 0.02, 9, 0.3
    actual, expected = draw_both((torch.randn(6, VOCAB, device=device) * 2).bfloat16(), slots, RANDOM | FILTER)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (50, 0.5, 0.02), (4990, 0.99, 0.0), (0, 1e-6, 0.0)],
)
@pytest.mark.parametrize("spread", [0.05, 3.0, 40.0] if torch.cuda.is_available() else [3.0])
def test_filters_agree_with_the_definition(top_k, top_p, min_p, spread, device):
    num_rows = 6 if device.type == "cuda" else 4  # the interpreter takes half a second for a row
    slots = make_slots(num_rows, device)
    slots.top_k.fill_(top_k)
    slots.top_p.fill_(top_p)
    slots.min_p.fill_(min_p)
    slots.temperature[2] = 0.0
    slots.top_k[1], slots.top_p[1], slots.min_p[1] = 0, 1.0, 0.0  # a row without filters among them
    logits = torch.randn(num_rows, VOCAB, device=device) * spread
    actual, expected = draw_both(logits, slots, RANDOM | FILTER)
    assert (actual == expected).float().mean() > 0.95, "only a token at the very edge of top-p may differ"


def test_a_flat_distribution_does_not_fit_the_candidates_and_is_exact_too(device):
    num_rows = 6 if device.type == "cuda" else 2
    slots = make_slots(num_rows, device)
    slots.top_k.fill_(4500)
    assert CANDIDATES < 4500 < VOCAB
    actual, expected = draw_both(torch.randn(num_rows, VOCAB, device=device) * 0.01, slots, RANDOM | FILTER, repeats=1)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 0.02, 1.5])
def test_flat_rows_are_drawn_without_a_threshold(spread, dtype, device):
    """More tokens than fit the candidates are at or above each level that holds enough. Rows of bf16 have ties."""
    filters = [(0.02, 0.0), (0.6, 0.0), (0.95, 0.0), (0.9999, 0.0), (0.95, 0.9), (1.0, 0.9)]
    vocab_size = 3 * CANDIDATES + 100
    slots = make_slots(len(filters), device, vocab_size)
    slots.top_p.copy_(torch.tensor([top_p for top_p, _ in filters]))
    slots.min_p.copy_(torch.tensor([min_p for _, min_p in filters]))
    slots.temperature[2] = 2.0
    logits = (torch.randn(len(filters), vocab_size, device=device) * spread).to(dtype)
    actual, expected = draw_both(logits, slots, RANDOM | FILTER)
    assert torch.equal(actual, expected)


def test_a_draw_that_top_p_does_not_keep_is_drawn_again_above_it(device, monkeypatch):
    """With one draw a row the first one stays, so most of the tokens that top-p leaves out would be drawn."""
    slots = make_slots(4, device, 2 * CANDIDATES)
    slots.top_p.fill_(0.02)
    logits = torch.randn(4, 2 * CANDIDATES, device=device) * 0.02
    actual, expected = draw_both(logits, slots, RANDOM | FILTER)
    assert torch.equal(actual, expected)
    if device.type == "cpu":  # an interpreted kernel reads it at each launch
        monkeypatch.setattr(sampling, "DRAWS", tl.constexpr(1))
        actual, expected = draw_both(logits, slots, RANDOM | FILTER)
        assert not torch.equal(actual, expected)


@pytest.mark.parametrize("spread", [0.01, 2.0])
def test_a_short_list_gives_the_draws_of_the_whole_vocabulary_sorted(
    monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    """Filters of every kind, which end in lists of every length."""
    generator, vocab_size = torch.Generator().manual_seed(5), 20_000
    filters = [(0, 0.9, 0.0), (0, 1.0, 0.05), (700, 0.95, 0.01), (3000, 1.0, 0.0), (40, 0.5, 0.0), (0, 1.0, 0.0)]
    scaled = torch.randn(len(filters), vocab_size, generator=generator) * spread
    scaled[:, 0::5] = scaled[:, 1::5]  # ties
    slots = make_slots(len(filters), torch.device("cpu"), vocab_size)
    for row, (top_k, top_p, min_p) in enumerate(filters):
        slots.top_k[row], slots.top_p[row], slots.min_p[row] = top_k, top_p, min_p
    rows = torch.arange(len(filters))
    for row in rows:  # each alone, so that no other row makes its list longer
        drawn = []
        for first in (reference.FIRST_CANDIDATES, vocab_size):
            monkeypatch.setattr(reference, "FIRST_CANDIDATES", first)
            one = scaled[row : row + 1], slots, rows[row : row + 1]
            found = [reference.draw(*one, torch.tensor([at]), RANDOM | FILTER) for at in range(5)]
            drawn.append(torch.cat([ids for _, ids in found]))
            monkeypatch.undo()
        assert torch.equal(*drawn), filters[row]


def test_ties_at_the_edge_of_top_k_stand_together(device):
    slots = make_slots(1, device)
    slots.top_k.fill_(2)
    slots.temperature.fill_(2.0)
    logits = torch.full((1, VOCAB), -20.0, device=device)
    logits[0, [5, 900, 4000]] = torch.tensor([3.0, 2.0, 2.0], device=device)
    actual, expected = draw_both(logits, slots, RANDOM | FILTER, repeats=30 if device.type == "cuda" else 8)
    assert torch.equal(actual, expected)
    assert set(actual.tolist()) <= {5, 900, 4000}
    assert len(set(actual.tolist())) > 1


def test_penalties_bias_and_masks_agree_with_the_definition(logits, device):
    slots = make_slots(6, device)
    slots.temperature[:3] = 0.0
    slots.tokens[:, 2:9] = slots.tokens[:, 1:2]  # a token of the prompt that the output repeats
    best = logits.flip(0).argmax(-1).int()
    slots.tokens[:, 5] = best
    slots.repetition_penalty[1:] = 1.8
    slots.presence_penalty[2:] = 0.7
    slots.frequency_penalty[3:] = 1.1
    slots.bias_ids[:, 0] = 77
    slots.bias_values[::2, 0] = 9.0
    slots.stop_ids[:, 0] = 77
    slots.min_tokens[4:] = 30
    slots.allowed[1] = 0x0F0F0F0F
    needs = RANDOM | PENALTY | BIAS | ALLOWED | MIN_TOKENS
    actual, expected = draw_both(logits, slots, needs)
    assert torch.equal(actual, expected)


def test_a_row_without_a_winner_fails_alone(logits, device):
    slots = make_slots(6, device)
    slots.top_k[3] = 5
    logits[0] = float("-inf")
    logits[1, 33] = float("nan")
    logits[2, 44] = float("nan")
    rows, positions = torch.arange(6, device=device).int(), torch.full((6,), 9, device=device).int()
    slots.top_k[2] = 5
    ids = sample(logits, slots, rows, positions, RANDOM | FILTER)
    assert ids[:3].tolist() == [-2, -1, -1]
    assert bool((ids[3:] >= 0).all())
    assert slots.tokens[:3, 9].tolist() == [0, 0, 0]


@pytest.mark.parametrize("needs", [RANDOM, RANDOM | FILTER])
def test_the_only_token_left_is_drawn_whatever_its_noise(needs, device):
    """This seed's word for token 428 at position 9 rounds to 2^32, for which the formula of the noise gives -inf."""
    slots = make_slots(1, device)
    slots.seed.fill_(364)
    slots.top_k.fill_(1 if needs & FILTER else 0)
    logits = torch.full((1, VOCAB), float("-inf"), device=device)
    logits[0, 428] = 1.0
    rows, positions = torch.zeros(1, device=device).int(), torch.full((1,), 9, device=device).int()
    assert reference.sample(logits.clone(), slots, rows, positions, needs).tolist() == [428]
    assert sample(logits, slots, rows, positions, needs).tolist() == [428]
