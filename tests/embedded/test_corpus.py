"""The text generator: the same text everywhere, and a held-out split that the training text never touches."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from random import Random

import pytest

from scripts.embedded import arithmetic, conversation, corpus, knowledge, memory, tasks
from scripts.embedded.conversation import SKILLS
from scripts.embedded.example import Exchange, Skill, Split, admits
from scripts.embedded.facts import engine, everyday, first, serving, talk
from scripts.embedded.grammar import spin
from scripts.embedded.phrasing import as_typed

KEYED = (knowledge.concept, knowledge.about_engine, knowledge.general, arithmetic.draw, tasks.draw)


@functools.cache
def source(skill: Skill, split: Split) -> tuple[Random, list[Exchange]]:
    return Random(1), []


def drawn(skill: Skill, split: Split, count: int) -> list[Exchange]:
    """Return the first of a skill's exchanges: drawn once, however many tests look at them."""
    random, exchanges = source(skill, split)
    exchanges.extend(skill(random, split) for _ in range(count - len(exchanges)))
    return exchanges[:count]


def digest(number: int, split: Split) -> str:
    return hashlib.sha256(json.dumps(list(corpus.chunk(number, split, 200))).encode()).hexdigest()


def test_a_chunk_is_the_same_whenever_it_is_drawn() -> None:
    assert digest(3, Split.TRAIN) == digest(3, Split.TRAIN)


def test_chunks_and_splits_differ() -> None:
    assert len({digest(0, Split.TRAIN), digest(1, Split.TRAIN), digest(0, Split.HELD_OUT)}) == 3


@pytest.mark.parametrize("skill", KEYED, ids=lambda skill: f"{skill.__module__.rsplit('.', 1)[-1]}.{skill.__name__}")
def test_no_held_out_key_is_in_the_training_text(skill: Skill) -> None:
    held_out = {exchange.key for exchange in drawn(skill, Split.HELD_OUT, 300)}
    trained = {exchange.key for exchange in drawn(skill, Split.TRAIN, 2000)}
    assert held_out
    assert not held_out & trained


@pytest.mark.parametrize("skill", [skill for skill, _ in SKILLS if skill is not memory.untold])
def test_every_skill_can_be_graded_on_the_held_out_split(skill: Skill) -> None:
    exchanges = [exchange for exchange in drawn(skill, Split.HELD_OUT, 60) if exchange.required]
    assert exchanges
    for exchange in exchanges:
        for word in exchange.required:
            assert word.lower() in exchange.assistant.lower()


def test_what_a_new_user_asks_first_is_never_held_out() -> None:
    asked = {exchange.key for exchange in drawn(knowledge.about_engine, Split.TRAIN, 1000)}
    assert len(asked & first.TAUGHT) > 100
    taught = {"how do i start the server", "what is the default port", "how do i stream", "who are you"}
    assert taught <= knowledge.ALWAYS_TAUGHT
    for skill in (knowledge.about_engine, knowledge.small_talk):
        assert not knowledge.ALWAYS_TAUGHT & {exchange.key for exchange in drawn(skill, Split.HELD_OUT, 600)}


def test_a_first_question_has_one_answer_wherever_it_is_asked() -> None:
    answers = {question.lower(): answer for questions, answer in first.FIRST for question in questions}
    assert len(answers) == sum(len(questions) for questions, _ in first.FIRST)
    patterns = (*engine.ENGINE, *serving.RELATED, *everyday.GENERAL, *((asked, told[0]) for asked, told in talk.TALK))
    random = Random(1)
    for pattern, answer in patterns:
        for question in {knowledge.normal(spin(random, pattern)) for _ in range(150)} & answers.keys():
            assert answers[question] == answer, question


@pytest.mark.parametrize("name", ["_percent", "_three", "_square"])
def test_further_sums_are_right(name: str) -> None:
    for exchange in drawn(getattr(arithmetic, name), Split.TRAIN, 200):
        left, result = exchange.assistant.rstrip(".").replace(" = ", " is ").split(" is ")
        numbers = [int(word.rstrip("%")) for word in left.split() if word.rstrip("%").isdigit()]
        if name == "_three":
            assert int(result) == sum(numbers)
        elif name == "_percent":
            assert int(result) == numbers[0] * numbers[1] / 100
        else:
            assert int(result) == (math.isqrt(numbers[0]) if "root" in left else numbers[0] ** 2)


def test_about_one_key_in_sixteen_is_held_out() -> None:
    held_out = sum(admits(Split.HELD_OUT, f"key {number}") for number in range(16_000))
    assert 800 < held_out < 1200


@pytest.mark.parametrize(
    "answer",
    [
        *(answer for _, *answers in serving.CONCEPTS for answer in answers if answer),
        *(answer for _, answer in (*serving.RELATED, *engine.ENGINE, *everyday.GENERAL, *first.FIRST)),
        *(answer for _, answers in talk.TALK for answer in answers),
        *talk.UNKNOWN_ANSWERS,
    ],
)
def test_every_answer_marks_what_a_right_one_must_contain(answer: str) -> None:
    words = knowledge.required_words(answer)
    assert words
    assert all(word in knowledge.unmarked(answer) for word in words)
    assert "«" not in knowledge.unmarked(answer)


def test_no_pattern_leaks_into_the_text() -> None:
    for document in corpus.chunk(5, Split.TRAIN, 1500):
        for text in [document] if isinstance(document, str) else [content for _, content in document]:
            assert "«" not in text
            assert "{name}" not in text
            assert "{Name}" not in text
            assert "|" not in text.replace("<|", "").replace("|>", "")


def test_an_extraction_is_valid_json_and_its_values_stand_in_the_text() -> None:
    from scripts.embedded import extraction

    for exchange in drawn(extraction.draw, Split.HELD_OUT, 300):
        record = json.loads(exchange.assistant)
        assert record
        for value in record.values():
            assert value is None or str(value) in exchange.user


def test_a_sum_is_right() -> None:
    for exchange in drawn(arithmetic.draw, Split.TRAIN, 500):
        if " + " in exchange.assistant and " = " in exchange.assistant:
            terms, result = exchange.assistant.split(" = ", 1)
            assert sum(map(int, terms.split(" + "))) == int(result.split(".")[0].split(",")[0])


def test_a_chat_never_contradicts_what_was_told_in_it() -> None:
    for seed in range(400):
        messages = conversation.draw(Random(seed), Split.TRAIN)
        roles = [role for role, _ in messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        told = any(content.startswith(("Your name is", "You live in", "Your favorite")) for _, content in messages)
        assert not (told and any(content.startswith("You have not told me") for _, content in messages))


def test_nested_choices_and_articles() -> None:
    texts = {spin(Random(seed), "[one [red|blue] {a thing}|two]", {"thing": "owl"}) for seed in range(40)}
    assert texts == {"one red an owl", "one blue an owl", "two"}


def test_typing_never_changes_a_number_or_a_name() -> None:
    for seed in range(300):
        text = as_typed(Random(seed), "What does Kafligra say about 4711 today?", keep_case=True)
        assert "Kafligra" in text
        assert "4711" in text
