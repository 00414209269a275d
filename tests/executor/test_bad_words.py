"""Words that must not come: the engine's greedy output is that of a plain loop which forbids them step by step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from inferengine.executor.slots import BadWordsTable
from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, make_model, save

PROMPT = [5, 17, 99, 3, 250, 17]
LENGTH = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = make_model("llama")
    return save(model, tmp_path_factory.mktemp("llama")), model


LOOPS: dict[tuple[object, ...], list[int]] = {}  # of the one checkpoint; each is wanted for several engines


def plain_loop(model, prompt: list[int], words: list[list[int]], length: int) -> list[int]:
    key = (tuple(prompt), tuple(map(tuple, words)), length)
    if key not in LOOPS:
        LOOPS[key] = compute_loop(model, prompt, words, length)
    return LOOPS[key]


def compute_loop(model, prompt: list[int], words: list[list[int]], length: int) -> list[int]:
    output: list[int] = []
    for _ in range(length):
        scores = logits_reference(model, [*prompt, *output])[-1].clone()
        for word in words:
            if len(word) == 1 or (len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == word[:-1]):
                scores[word[-1]] = -torch.inf
        output.append(int(scores.argmax()))
    return output


def words_of(output: list[int], prompt: list[int]) -> list[list[list[int]]]:
    """Return sets of words that the free output contains: single tokens, pairs, long ones, and what the prompt ends
    with."""
    return [
        [[output[0]]],
        [[output[3]], [output[7]]],
        [output[2:4]],
        [output[0:5], output[4:6], [output[9]]],
        [[prompt[-1], output[0]]],  # its first token is the prompt's: nothing is forbidden
        [[*output[5:13]]],
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 64])
def test_the_output_is_that_of_a_plain_loop(checkpoint, overlap: bool, budget: int) -> None:
    folder, model = checkpoint
    free = plain_loop(model, PROMPT, [], LENGTH)
    engine = Engine(folder, overlap=overlap, budget=budget, max_num_seqs=8)
    uids = {}
    for words in words_of(free, PROMPT):
        frozen = tuple(map(tuple, words))
        uids[engine.submit(PROMPT, LENGTH, bad_words_ids=frozen)] = words
    beside = engine.submit(PROMPT, LENGTH)
    engine.run()
    for uid, words in uids.items():
        assert engine.outputs[uid] == plain_loop(model, PROMPT, words, LENGTH), words
    assert engine.outputs[beside] == free


def test_a_preempted_request_remembers_its_words(checkpoint) -> None:
    folder, model = checkpoint
    free = plain_loop(model, PROMPT, [], LENGTH)
    words = (tuple(free[4:6]), (free[1],))
    engine = Engine(folder, num_blocks=6, max_num_seqs=3)
    outputs = engine.generate([PROMPT] * 3, LENGTH, bad_words_ids=words)
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert outputs == [plain_loop(model, PROMPT, [list(word) for word in words], LENGTH)] * 3


def test_a_slot_given_away_forbids_nothing(checkpoint) -> None:
    folder, model = checkpoint
    engine = Engine(folder, max_num_seqs=1)
    free = plain_loop(model, PROMPT, [], 4)
    assert engine.generate([PROMPT], 4, bad_words_ids=((free[0],),)) != [free]
    assert engine.generate([PROMPT], 4) == [free]


def test_what_is_sampled_never_has_a_bad_word(checkpoint) -> None:
    folder, _ = checkpoint
    engine = Engine(folder, max_num_seqs=8)
    words = tuple((first, second) for first in range(0, 30) for second in range(0, 8))[:200]
    outputs = engine.generate([PROMPT] * 8, 40, temperature=2.0, top_k=20, bad_words_ids=words, seed=3)
    pairs = {pair for output in outputs for pair in pairwise(output)}
    assert not pairs & set(words)


def test_the_table_grows_and_keeps_what_it_had() -> None:
    table = BadWordsTable(3, torch.device("cpu"))
    table.admit(torch.tensor([0]), [((1, 2),)], torch.from_numpy)
    table.admit(torch.tensor([1]), [((3,), (4, 5, 6), (7,))], torch.from_numpy)
    rows = table.table.numpy()
    assert rows.shape == (3, 4, 4)
    kept = [[int(token) for token in word if token >= 0] for word in rows[0] if (word >= 0).any()]
    assert kept == [[1, 2]]
    assert np.all(rows[2] == -1)
