"""What is drawn: the same for the same seed, over the whole feature space, and written to a file and back."""

from __future__ import annotations

import random
from pathlib import Path

from inferengine.config import Config, LimitsConfig
from inferengine.sampling_params import NAMES, from_map, validate
from inferengine.structured_output.spec import GRAMMAR_KINDS, grammar_from_list, validate_grammar
from tests.gauntlet import rounds
from tests.gauntlet.asks import ACTS, GRAMMARS, OPTIONS, SAMPLING, WAYS, Ask
from tests.gauntlet.rounds import SETTINGS, Round

VOCABULARY = 4096


def draw(seed: int, span_s: float = 30.0, device: str = "cpu") -> Round:
    return rounds.draw_round(
        random.Random(seed), model="embedded", adapters=("pirate",), vocab_size=VOCABULARY, device=device,
        span_s=span_s, rate=20.0, fixed={}, kills=True,
    )  # fmt: skip


def many_asks() -> list[Ask]:
    return [ask for seed in range(4) for ask in draw(seed).asks]


def test_a_seed_gives_the_same_round_again() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_a_round_comes_back_from_its_file(tmp_path: Path) -> None:
    one = draw(3, span_s=3.0)
    file = tmp_path / "round.json"
    file.write_text(one.to_json())
    assert rounds.read(file) == one


def test_every_sampling_field_is_in_the_table() -> None:
    assert set(NAMES) == set(SAMPLING)


def test_every_kind_of_grammar_is_drawn() -> None:
    assert {grammar[0] for grammar in GRAMMARS} == set(GRAMMAR_KINDS)
    for grammar in GRAMMARS:
        validate_grammar(grammar_from_list(grammar), LimitsConfig())


def test_every_feature_is_asked_for_sooner_or_later() -> None:
    asks = many_asks()
    params = {name for ask in asks for name in ask.params} | {"bad_words_ids"}
    assert params >= set(SAMPLING)
    assert {name for ask in asks for name in ask.options} >= {*OPTIONS, "adapter", "pooling", "tools", "bad"}
    assert {ask.way for ask in asks} == set(WAYS)
    assert {ask.reply for ask in asks} == {"tokens", "text", "both", "embedding"}
    assert {ask.act["kind"] for ask in asks if ask.act} >= set(ACTS)


def test_what_is_meant_to_be_taken_keeps_the_rules() -> None:
    meant = [ask for ask in many_asks() if "bad" not in ask.options and ask.reply != "embedding"]
    meant = [ask for ask in meant if ask.params.get("repetition_penalty", 1.0) >= 0.01]  # else it may be refused
    assert len(meant) > 1000
    for ask in meant:
        params = from_map({name: value for name, value in ask.params.items() if name != "bad_words"})
        validate(params, vocab_size=VOCABULARY, limits=LimitsConfig())


def test_every_setting_is_a_key_of_the_configuration() -> None:
    resolved = Config().resolved()
    for key in SETTINGS:
        section, name = key.split(".")
        assert name in resolved[section]


def test_clients_that_take_turns_ask_again_after_their_own_last_request() -> None:
    asked = rounds.in_turns(list(draw(1, span_s=1.0).asks), 2)
    assert [ask.after for ask in asked[:2]] == [None, None]
    assert all(ask.after == before.name for before, ask in zip(asked, asked[2:], strict=False))
