"""Sampling through the whole engine and by its definition: filters, penalties, masks, seeds, log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inferengine.core.executor import SlotInit
from inferengine.core.sequence import RowFailure
from inferengine.executor.sampler import apply_masks
from inferengine.executor.slots import Slots
from inferengine.kernels import ops
from inferengine.kernels.reference import ops as reference_sampling
from inferengine.kernels.reference.ops import gumbel, philox, philox_by_numpy, sample
from inferengine.sampling_params import SamplingParams
from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, make_model, save

VOCAB = 301
PROMPT = [5, 17, 99, 3, 250, 17]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = make_model("llama")
    return save(model, tmp_path_factory.mktemp("llama")), model


def make_slots(*params: SamplingParams, prompt: list[int] = PROMPT, output: list[int] = (), stops=()) -> Slots:
    slots = Slots(
        num_slots=len(params), max_model_len=64, block_size=8, group_blocks=[8], vocab_size=VOCAB,
        device=torch.device("cpu"),
    )  # fmt: skip
    tokens = [*prompt, *output]
    slots.admit([SlotInit(slot, tokens, len(prompt), item, 100 + slot, stops) for slot, item in enumerate(params)])
    return slots


def draw(slots: Slots, logits: torch.Tensor) -> list[int]:
    """Draw once per slot, for the position after the tokens known."""
    rows = torch.arange(slots.num_slots, dtype=torch.int32)
    length = int((slots.tokens[0] != 0).sum())
    positions = torch.full_like(rows, length)
    needs = slots.needs(rows.numpy(), positions.numpy())
    return sample(logits.clone(), slots, rows, positions, needs).tolist()


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_philox_matches_the_published_vectors():
    """Random123's known answers for philox4x32-10."""
    ones = torch.tensor([-1])
    words = philox(torch.tensor([0]), torch.tensor([0]), torch.tensor([[0]]))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in philox(ones, torch.tensor([0]), torch.tensor([[0]]))] != [int(word) for word in words]


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (5, 300), (5, 1)])
def test_the_noise_of_the_cpu_is_the_definition_bit_by_bit(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    positions = torch.randint(0, 100_000, (5,), generator=generator)
    blocks = torch.randint(0, 40_000, shape, generator=generator)
    expected = torch.stack(philox(seeds, positions, blocks), -1).float()
    assert torch.equal(torch.from_numpy(philox_by_numpy(seeds, positions, blocks)), expected)


@pytest.mark.parametrize("num_blocks", [1, 5, 64])
def test_philox_in_parts_gives_the_same_words(num_blocks, monkeypatch):
    seeds, positions = torch.arange(9) * 3**25, torch.arange(9) + 2**20
    blocks = torch.arange(num_blocks).unsqueeze(0)
    of_rows = blocks + torch.arange(9).unsqueeze(1)
    whole = [philox_by_numpy(seeds, positions, each) for each in (blocks, of_rows)]
    monkeypatch.setattr(reference_sampling, "BLOCKS_AT_ONCE", 20)
    for each, expected in zip((blocks, of_rows), whole, strict=True):
        assert np.array_equal(philox_by_numpy(seeds, positions, each), expected)


def test_noise_for_some_tokens_is_that_of_the_whole_vocabulary():
    seeds, positions = torch.tensor([7, -3]), torch.tensor([4, 90])
    ids = torch.tensor([[0, 5, 300], [1, 2, 3]])
    assert torch.equal(gumbel(seeds, positions, ids), gumbel(seeds, positions, VOCAB).gather(1, ids))


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 40_000
    noise = gumbel(torch.arange(count), torch.full((count,), 3), 4)
    shares = (logits + noise).argmax(-1).bincount(minlength=4) / count
    assert (shares - logits.softmax(-1)).abs().max() < 0.01


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
        {"top_k": 280},
        {"top_p": 0.999},
    ],
)
def test_draws_stay_within_the_filters(params):
    params = SamplingParams(temperature=0.7, **params)
    logits = random_logits(1)
    allowed = filtered_by_hand(logits[0] / 0.7, params)
    drawn = {draw(seeded(params, seed), logits)[0] for seed in range(200)}
    assert drawn <= allowed
    assert len(drawn) > min(3, len(allowed) - 1)


def seeded(params: SamplingParams, seed: int) -> Slots:
    slots = make_slots(params)
    slots.seed.fill_(seed)
    return slots


def filtered_by_hand(scaled: torch.Tensor, params: SamplingParams) -> set[int]:
    order = scaled.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    probabilities = scaled[order].softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    best = probabilities[0]
    return {
        token
        for token, mass, probability in zip(order, before, probabilities, strict=True)
        if mass < params.top_p and probability >= params.min_p * best
    }


def test_a_row_is_drawn_alike_alone_and_among_others():
    params = [
        SamplingParams(temperature=0.9, top_p=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.4),
    ]
    logits = random_logits(len(params))
    together = draw(make_slots(*params), logits)
    for index, item in enumerate(params):
        slots = make_slots(item)
        slots.seed.fill_(100 + index)
        assert draw(slots, logits[index : index + 1]) == [together[index]]


def test_a_row_without_filters_keeps_the_whole_vocabulary_beside_rows_with_some():
    """The masses of all tokens may add up to more than 1: top_p of 1 must not leave out the last ones."""
    scores = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 8
    values, _ = reference_sampling.candidates(scores, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert values.shape == scores.shape
    assert bool(values.isfinite().all())


@pytest.mark.parametrize("params", [{"top_k": 1}, {"allowed_token_ids": (141,)}, {"top_p": 0.01}])
def test_the_only_token_left_is_drawn_whatever_its_noise(params):
    """This seed's word for token 141 at position 6 rounds to 2^32, for which the formula of the noise gives -inf."""
    slots = seeded(SamplingParams(temperature=0.7, **params), 614_524)
    logits = random_logits(1)
    logits[0, 141] = 30.0
    assert draw(slots, logits) == [141]


def test_penalties_by_their_formulas():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
    output = [42, 42, 7]
    logits = random_logits(1)
    expected = logits.clone()[0]
    for token in {*PROMPT, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.3 * output.count(token) + 0.7
    slots = make_slots(params, output=output)
    scores = logits.clone()
    positions = torch.tensor([len(PROMPT) + len(output)])
    reference_sampling.process(scores, slots, torch.tensor([0]), positions, reference_sampling.PENALTY)
    assert torch.allclose(scores[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "feature",
    [
        {"temperature": 0.0, "repetition_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 0.0, "bad_words_ids": ((42, 43),)},
        {"temperature": 0.0, "min_tokens": 2},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    ],
    ids=lambda feature: "+".join(feature),
)
def test_several_positions_of_a_sequence_are_drawn_as_one_after_the_other(feature):
    """Verification: the draw after the k-th draft token sees all draft tokens before it, and none after."""
    drafts = [42, 43, 42, 43]
    logits = random_logits(1).repeat(len(drafts), 1)
    logits[:, [42, 43, 98]] = torch.tensor([20.0, 20.5, 19.8])  # the token drafted last would be the likeliest
    length = len(PROMPT)
    positions = torch.arange(length, length + len(drafts)) + 1

    def drawn(rows: slice) -> list[int]:
        slots = make_slots(SamplingParams(**feature), output=drafts, stops=(43,))
        scores, at = logits[rows].clone(), positions[rows]
        index = torch.zeros(len(at), dtype=torch.int32)
        needs = slots.needs(index.numpy(), at.numpy())
        if needs & reference_sampling.BAD_WORDS:
            slots.bad_words.forbid(scores, slots.tokens, slots.num_prompt, index, at)
        return sample(scores, slots, index, at, needs).tolist()

    together = drawn(slice(None))
    assert together == [drawn(slice(row, row + 1))[0] for row in range(len(drafts))]
    assert len(set(together)) > 1


def test_bias_moves_the_argmax_and_only_of_its_row():
    logits = random_logits(2)
    plain = SamplingParams(temperature=0.0)
    biased = SamplingParams(temperature=0.0, logit_bias=((11, 100.0), (12, -100.0)))
    assert draw(make_slots(plain, biased), logits) == [int(logits[0].argmax()), 11]


def test_allowed_token_ids_are_the_only_ones():
    logits = random_logits(2)
    allowed = (3, 77, 300)
    params = SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    best = max(allowed, key=lambda token: float(logits[0, token]))
    assert draw(make_slots(params, SamplingParams(temperature=0.0)), logits) == [best, int(logits[1].argmax())]


def test_stop_tokens_wait_for_min_tokens(checkpoint):
    folder, _ = checkpoint
    free = Engine(folder).generate([PROMPT], 20)[0]
    stop = free[2]
    engine = Engine(folder)
    early = engine.submit(PROMPT, 20, eos=[stop])
    late = engine.submit(PROMPT, 20, eos=[stop], min_tokens=9)
    engine.run()
    assert engine.outputs[early] == free[:3]
    assert stop not in engine.outputs[late][:9]
    assert len(engine.outputs[late]) >= 9


def test_a_row_that_is_not_a_number_fails_alone():
    logits = random_logits(3)
    logits[1] = float("nan")
    slots = make_slots(*[SamplingParams(temperature=0.0)] * 3)
    drawn = draw(slots, logits)
    assert drawn[1] == -1
    assert drawn[0] == int(logits[0].argmax())
    assert drawn[2] == int(logits[2].argmax())
    assert slots.tokens[1, len(PROMPT)] == 0


BAD_ROWS = {
    "a NaN": ({300: float("nan")}, -1),
    "all NaN": (dict.fromkeys(range(VOCAB), float("nan")), -1),
    "an infinity": ({7: float("inf")}, -1),
    "nothing allowed": (dict.fromkeys(range(VOCAB), float("-inf")), -2),
}
FEATURES = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.9},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
    "top_k and min_p": {"temperature": 0.9, "top_k": 5, "min_p": 0.1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "allowed ids": {"temperature": 0.7, "allowed_token_ids": (3, 7, 300)},
    "bias": {"temperature": 0.7, "logit_bias": ((7, 3.0),)},
}


@pytest.mark.parametrize("beside", ["greedy", "top_p"])
@pytest.mark.parametrize("own", FEATURES)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_row_without_a_winner_fails_alone_whatever_it_and_its_neighbours_ask_for(bad, own, beside):
    others = SamplingParams(**FEATURES[beside])
    slots = make_slots(others, SamplingParams(**FEATURES[own]), others)
    logits = random_logits(3)
    good = draw(slots, logits)
    slots.tokens[:, len(PROMPT)] = 0  # not drawn yet
    values, expected = BAD_ROWS[bad]
    for token, value in values.items():
        logits[1, token] = value
    drawn = draw(slots, logits)
    assert drawn[1] == expected
    assert (drawn[0], drawn[2]) == (good[0], good[2])
    assert slots.tokens[1, len(PROMPT)] == 0


def test_a_penalty_that_the_device_cannot_hold_fails_its_own_row():
    """The front ends and the engine refuse it; this is what would come of it."""
    slots = make_slots(
        SamplingParams(temperature=0.9, top_p=0.9),
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1e-308),
    )
    logits = random_logits(2)
    logits[1, PROMPT] = 1.0
    drawn = draw(slots, logits)
    assert drawn[0] >= 0
    assert drawn[1] == -1


def test_a_mask_that_leaves_nothing_fails_its_own_row_for_that_reason(checkpoint):
    engine = Engine(checkpoint[0])
    head = engine.executor.model.logits

    def forbidding(x: torch.Tensor) -> torch.Tensor:
        logits = head(x)
        logits[0, 3] = float("-inf")
        return logits

    engine.executor.model.logits = forbidding
    culprit = engine.submit(PROMPT, 4, temperature=0.9, allowed_token_ids=(3,))
    other = engine.submit(PROMPT[:3], 4)
    engine.run()
    assert engine.finished[culprit].detail == RowFailure.NO_TOKEN_ALLOWED.value
    assert engine.finished[other].reason == "length"


def test_failed_rows_end_their_request_and_no_other(checkpoint):
    folder, _ = checkpoint
    expected = Engine(folder).generate([PROMPT, PROMPT[:3]], 8)
    engine = Engine(folder)
    head = engine.executor.model.logits
    calls = []

    def broken_once(x: torch.Tensor) -> torch.Tensor:
        logits = head(x)
        calls.append(len(logits))
        if len(calls) == 4:
            logits[0] = float("nan")
        return logits

    engine.executor.model.logits = broken_once
    outputs = engine.generate([PROMPT, PROMPT[:3]], 8)
    reasons = [engine.finished[uid].reason for uid in (1, 2)]
    assert reasons == ["error", "length"]
    assert outputs[1] == expected[1]
    assert engine.core.scheduler.snapshot().num_blocks_held == 0


def test_seeded_requests_do_not_depend_on_their_neighbours(checkpoint):
    folder, _ = checkpoint
    alone = Engine(folder).generate([PROMPT], 24, temperature=1.0, seed=11)[0]
    engine = Engine(folder, budget=9)
    for other in range(3):
        engine.submit([8, 9, other], 30, temperature=1.2, seed=other)
    uid = engine.submit(PROMPT, 24, temperature=1.0, seed=11)
    engine.run()
    assert engine.outputs[uid] == alone


def test_logprobs_are_the_models_own(checkpoint):
    folder, model = checkpoint
    engine = Engine(folder)
    uid = engine.submit(PROMPT, 6, temperature=0.0, logprobs=4, repetition_penalty=1.3)
    plain = engine.submit(PROMPT, 6, temperature=0.0)
    engine.run()
    output = engine.outputs[uid]
    expected = logits_reference(model, PROMPT + output[:-1])[len(PROMPT) - 1 :].log_softmax(-1)
    assert engine.logprobs[plain] == []
    for token, row, item in zip(output, expected, engine.logprobs[uid], strict=True):
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert item.rank == int((row > row[token]).sum()) + 1
        assert item.top_ids == row.topk(4).indices.tolist()
        assert item.top_logprobs == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_masks_forbid_all_but_their_bits():
    logits = random_logits(3)
    words = np.zeros((2, -(-VOCAB // 32)), dtype=np.int32)
    for row, tokens in enumerate([(0, 31), (300,)]):
        for token in tokens:
            words[row, token // 32] |= np.int32(np.uint32(1 << (token % 32)).astype(np.int32))
    masked = logits.clone()
    apply_masks(ops.REFERENCE, masked, [0, 2], bytearray(words.tobytes()))
    assert torch.isfinite(masked[0]).nonzero().flatten().tolist() == [0, 31]
    assert torch.equal(masked[1], logits[1])
    assert torch.isfinite(masked[2]).nonzero().flatten().tolist() == [300]


@pytest.mark.parametrize("num_left", [[0, 1, 5], [18, 19, 200], [301, 301, 301], [2, 0, 0], [1, 301, 18]])
def test_a_row_with_few_tokens_left_is_drawn_as_from_the_whole_vocabulary(num_left, monkeypatch):
    """Masks leave any number of tokens; one row beside them is greedy, one is no number."""
    monkeypatch.setattr(reference_sampling, "LEAST_SAVED", 1)
    slots = make_slots(*[SamplingParams(temperature=0.9)] * 3, SamplingParams(temperature=0.0), SamplingParams())
    logits = random_logits(5)
    order = torch.rand(5, VOCAB, generator=torch.Generator().manual_seed(1)).argsort(1)
    for row, count in enumerate(num_left):
        logits[row, order[row, count:]] = -torch.inf
    logits[3, order[3, 4:]] = -torch.inf
    logits[4, 7] = torch.nan
    rows, positions = torch.arange(5, dtype=torch.int32), torch.arange(6, 11, dtype=torch.int32)
    needs = reference_sampling.RANDOM
    found = sample(logits.clone(), slots, rows, positions, needs | reference_sampling.MASKED).tolist()
    assert found == sample(logits.clone(), slots, rows, positions, needs).tolist()
    assert [token >= 0 for token in found] == [*[count > 0 for count in num_left], True, False]


def test_needs_name_only_what_the_rows_of_a_step_use():
    slots = make_slots(
        SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, top_k=4, min_tokens=3), stops=(1,)
    )
    first, both = np.array([0]), np.array([0, 1])
    assert slots.needs(first, np.array([6])) == 0
    early = slots.needs(both, np.array([6, 6]))
    assert early & reference_sampling.MIN_TOKENS
    assert not slots.needs(both, np.array([9, 9])) & reference_sampling.MIN_TOKENS
    assert early & reference_sampling.FILTER


def test_slots_are_forgotten_when_they_are_given_away():
    slots = make_slots(SamplingParams(temperature=0.0, logit_bias=((11, 100.0),), allowed_token_ids=(11, 12)))
    slots.admit([SlotInit(0, PROMPT, len(PROMPT), SamplingParams(temperature=0.0), 0, ())])
    logits = random_logits(1)
    state = SimpleNamespace(bias=slots.bias_ids[0].tolist(), allowed=slots.allowed[0].tolist())
    assert set(state.bias) == {-1}
    assert set(state.allowed) == {-1}
    assert draw(slots, logits) == [int(logits.argmax())]


@pytest.mark.parametrize("neighbours", [0, 1])
def test_top_p_is_a_share_of_what_a_long_top_k_leaves_whoever_is_beside(neighbours: int) -> None:
    """1,000 tokens of 4,096 stay; of their mass the largest eighth, not of the vocabulary's."""
    vocab_size, top_k, top_p = 4096, 1000, 0.125
    scores = torch.linspace(2.0, 0.0, vocab_size).repeat(1 + neighbours, 1)
    mass = scores[0].double()[:top_k].softmax(-1)
    expected = int(((mass.cumsum(-1) - mass) < top_p).sum())
    limits = torch.tensor([top_k, vocab_size][: 1 + neighbours])
    shares, floors = torch.tensor([top_p, 0.99][: 1 + neighbours]), torch.zeros(1 + neighbours)
    values, _ = reference_sampling.candidates(scores, limits, shares, floors)
    assert int((values[0] > float("-inf")).sum()) == expected
