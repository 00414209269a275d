"""A request whose numbers go bad ends alone: its neighbours of the same step, and whoever has its blocks next, do not
notice. What provokes it is a token whose embedding is not a number."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from inferengine.core.sequence import RowFailure, Sequence
from tests.executor.engine import Engine
from tests.models.checkpoints import make_model, save

POISON = 7
NEVER: dict[str, Any] = {"logit_bias": ((POISON, -100.0),)}  # a sound request does not draw it either
NAMES = ["llama", "gemma3"]  # full attention; sliding windows, too


@pytest.fixture(scope="module", params=NAMES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the checkpoint as it is, and with one broken row of its embedding."""
    model = make_model(request.param, tie_word_embeddings=False)
    sound = save(model, tmp_path_factory.mktemp("sound"))
    model.get_input_embeddings().weight.data[POISON] = float("nan")
    return sound, save(model, tmp_path_factory.mktemp("broken"))


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(10, 300) for _ in range(length)] for length in lengths]


def poisoned(length: int, at: int) -> list[int]:
    prompt = prompts_of(length)[0]
    prompt[at] = POISON
    return prompt


def failed(engine: Engine, uid: int) -> bool:
    return engine.finished[uid].reason == "error" and engine.finished[uid].detail == RowFailure.NOT_A_NUMBER.value


@pytest.mark.parametrize(("budget", "at"), [(200, 0), (200, -1), (24, 5)])  # in one step; in chunks
def test_prompts_of_the_same_step_are_not_disturbed(folders, budget, at):
    sound, broken = folders
    good = prompts_of(20, 18, 25)
    expected = Engine(sound, budget=budget).generate(good, 12, **NEVER)
    engine = Engine(broken, budget=budget)
    uids = [engine.submit(good[0], 12, **NEVER)]
    culprit = engine.submit(poisoned(40, at), 12)
    uids += [engine.submit(prompt, 12, **NEVER) for prompt in good[1:]]
    engine.run()
    assert [engine.outputs[uid] for uid in uids] == expected
    assert failed(engine, culprit)
    assert engine.outputs[culprit] == []


def test_requests_that_run_are_not_disturbed(folders):
    sound, broken = folders
    good = prompts_of(20, 18, 25)
    expected = Engine(sound, budget=64).generate(good, 30, **NEVER)
    engine = Engine(broken, budget=64)
    uids = [engine.submit(prompt, 30, **NEVER) for prompt in good]
    for _ in range(8):
        engine.step()
    culprit = engine.submit(poisoned(40, 5), 12)
    engine.run()
    assert [engine.outputs[uid] for uid in uids] == expected
    assert failed(engine, culprit)


def test_the_next_owner_of_its_blocks_is_not_disturbed(folders):
    sound, broken = folders
    good = prompts_of(9, 21, 13)
    options = {"num_blocks": 12, "prefix_caching": False}
    expected = Engine(sound, **options).generate(good, 12, **NEVER)
    engine = Engine(broken, **options)
    for prompt, output in zip(good, expected, strict=True):
        culprits = [engine.submit(poisoned(40, 2), 12), engine.submit(poisoned(40, 39), 12)]
        engine.run()
        assert all(failed(engine, culprit) for culprit in culprits)
        assert engine.generate([prompt], 12, **NEVER) == [output]


def test_a_cached_prefix_of_it_fails_again(folders):
    engine = Engine(folders[1])
    for _ in range(2):
        culprit = engine.submit(poisoned(40, 2), 12)
        engine.run()
        assert failed(engine, culprit)


class Poisoner:
    """Proposes what the model never draws, and what nobody can compute with."""

    on_device = False

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return [POISON, 11, 12][:max_tokens]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: it remembers nothing."""


def test_a_rejected_draft_token_that_gives_nan_disturbs_no_request_not_even_its_own(folders):
    sound, broken = folders
    good = prompts_of(20, 18, 25)
    expected = Engine(sound, budget=64).generate(good, 12, **NEVER)
    engine = Engine(broken, budget=64, proposer=Poisoner(), max_drafts=3, max_running_to_draft=4)
    assert engine.generate(good, 12, **NEVER) == expected
    snapshot = engine.core.scheduler.snapshot()
    assert snapshot.num_drafted > 0
    assert snapshot.num_drafts_accepted == 0


@pytest.mark.parametrize("values", [{"top_k": 2**40}, {"top_k": 2**62}, {"min_tokens": 2**40}, {"min_tokens": 2**62}])
def test_a_number_beyond_32_bits_asks_for_all_there_is_and_disturbs_nobody(folders, values):
    sound, _ = folders
    prompts = prompts_of(9, 12)
    enough = dict.fromkeys(values, 300)  # the vocabulary has 301 tokens, the outputs 12
    sampled = {"temperature": 1.0, "seed": 3, "eos": (5,)}
    engine, other = Engine(sound), Engine(sound)
    for each, asked in ((engine, values), (other, enough)):
        each.submit(prompts[0], 12)
        each.submit(prompts[1], 12, **sampled, **asked)
        each.run()
    assert engine.outputs == other.outputs
    assert {row.reason for row in engine.finished.values()} == {"length"}
