"""Questions of fact: concepts of serving, this engine, everyday things, small talk, and what the model cannot know.

In an answer the words in «» are what a right answer must contain; the marks are taken out before anyone sees it. The
key is the answer's subject and the phrasing, so held-out questions are phrasings that were never seen for that fact.
"""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

from inferengine import config, errors

from .example import Exchange, Split, admits
from .facts import engine, everyday, first, serving, talk
from .grammar import capitalized, spin, with_article
from .phrasing import as_typed
from .words import ANIMALS, CITIES, DAYS, FRUITS, MONTHS, PRODUCTS, city, company, full_name, invented_name

_MARKED = re.compile("«([^»]*)»")


def required_words(answer: str) -> tuple[str, ...]:
    """Return what stands between the marks."""
    return tuple(_MARKED.findall(answer))


def unmarked(answer: str) -> str:
    return answer.replace("«", "").replace("»", "")


def normal(question: str) -> str:
    """Return the question without what `as_typed` may change at its end and in its case."""
    return question.lower().rstrip("?.! ,")


def _belongs(split: Split, key: str, question: str) -> bool:
    """Return whether this question under this key is of `split`; what everybody asks first is always of the training
    text."""
    if normal(question) in ALWAYS_TAUGHT:
        return split is Split.TRAIN
    return admits(split, f"{key}|{normal(question)}")


ALWAYS_TAUGHT = first.TAUGHT | {normal(question) for question in talk.TAUGHT}


def concept(random: Random, split: Split) -> Exchange:
    """Draw a question such as what is it, what is it for, how does it work; or how two things differ."""
    while True:
        if random.random() < 0.12:
            pattern, answer = random.choice(serving.RELATED)
            question = spin(random, pattern)
            follow_ups: tuple[tuple[str, str], ...] = ()
        else:
            name, *answers = random.choice(serving.CONCEPTS)
            aspects, phrasings = random.choice(_ASPECTS)
            if not all(answers[aspect] for aspect in aspects):
                continue
            answer = " ".join(answers[aspect] for aspect in aspects)
            bare = re.sub("^(a|an|the) ", "", name)
            named = name if random.random() < 0.85 else random.choice((bare, f"the {bare}", with_article(bare)))
            question = spin(random, random.choice(phrasings), {"x": named, "bare": random.choice((bare, name))})
            follow_ups = _next_aspects(random, answers, aspects[-1])
        if _belongs(split, f"concept {answer[:20]}", question):
            break
    user = as_typed(random, question)
    return Exchange("concepts", normal(question), user, unmarked(answer), required_words(answer), follow_ups)


_ASPECTS: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((0,), serving.WHAT), ((0,), serving.WHAT), ((0,), serving.WHAT), ((1,), serving.WHY), ((2,), serving.HOW),
    ((0, 1), serving.WHAT_AND_WHY), ((0, 2), serving.WHAT_AND_HOW),
)  # fmt: skip


def _next_aspects(random: Random, answers: list[str], aspect: int) -> tuple[tuple[str, str], ...]:
    asked = {
        1: "[Why is that useful?|And why does one want it?|What is it good for?|why is it useful?|What is it for?|And why?]",
        2: "[How does it work?|And how does that work?|how does it work?|Can you explain how it works?|How is it done?]",
    }
    later = [
        (as_typed(random, spin(random, asked[index])), unmarked(answers[index]))
        for index in (1, 2)
        if index > aspect and answers[index]
    ]
    return tuple(later[: random.choice((1, 2))])


def about_engine(random: Random, split: Split) -> Exchange:
    """Draw a question about using this engine: commands, ports, endpoints, the wire, configuration keys, errors."""
    if split is Split.TRAIN and random.random() < 0.3:
        return _first_asked(random)
    while True:
        kind = random.random()
        if kind < 0.62:
            pattern, answer = random.choice(engine.ENGINE)
            question = spin(random, pattern)
        elif kind < 0.74:
            question, answer = _wire_kind(random)
        elif kind < 0.92:
            question, answer = _configuration_key(random)
        else:
            code, error = random.choice(tuple(errors.KINDS.items()))
            remedy = error.remedy
            question = spin(random, engine.ASK_ERROR, {"code": code})
            answer = f"The error {code} has HTTP status «{error.http_status}». {remedy}"
        if _belongs(split, f"engine {answer[:20]}", question):
            break
    user = as_typed(random, question, keep_case=kind > 0.62)
    return Exchange("engine", normal(question), user, unmarked(answer), required_words(answer))


def _first_asked(random: Random) -> Exchange:
    questions, answer = random.choice(first.FIRST)
    question = random.choice(first.phrasings(questions))
    user = as_typed(random, question)
    return Exchange("engine", normal(question), user, unmarked(answer), required_words(answer))


def _wire_kind(random: Random) -> tuple[str, str]:
    name, number, sender, meaning = random.choice(engine.WIRE_KINDS)
    slots = {"kind": name, "number": str(number)}
    other = "engine" if sender == "client" else "client"
    form = random.randrange(3)
    if form == 0:
        return spin(random, engine.ASK_KIND, slots), f"{name} is kind «{number}», sent by the «{sender}». {meaning}"
    if form == 1:
        return spin(random, engine.ASK_KIND_NUMBER, slots), f"{name} is kind «{number}»."
    return spin(random, engine.ASK_NUMBER_KIND, slots), f"Kind {number} is «{name}», from the {sender} to the {other}."


def _configuration_key(random: Random) -> tuple[str, str]:
    name, field = random.choice(tuple(config.keys().items()))
    default = field.default
    shown = "empty" if default == "" else str(default).lower() if isinstance(default, bool) else f"{default}"
    if random.random() < 0.6:
        question = spin(random, engine.ASK_KEY, {"key": name})
        return question, f"`{name}`: {field.metadata['help']}. The default is «{shown}»."
    return spin(random, engine.ASK_KEY_DEFAULT, {"key": name}), f"The default of `{name}` is «{shown}»."


def general(random: Random, split: Split) -> Exchange:
    """Draw everyday facts."""
    while True:
        question, answer = random.choice((_capital, _general, _general, _opposite, _animal, _calendar))(random)
        if _belongs(split, f"everyday {answer[:20]}", question):
            break
    user = as_typed(random, question)
    return Exchange("everyday", normal(question), user, unmarked(answer), required_words(answer))


def _capital(random: Random) -> tuple[str, str]:
    country, capital = random.choice(tuple(everyday.CAPITALS.items()))
    if random.random() < 0.3:
        return spin(random, everyday.ASK_CAPITAL_OF, {"city": capital}), f"{capital} is the capital of «{country}»."
    return spin(random, everyday.ASK_CAPITAL, {"country": country}), f"The capital of {country} is «{capital}»."


def _general(random: Random) -> tuple[str, str]:
    pattern, answer = random.choice(everyday.GENERAL)
    return spin(random, pattern), answer


def _opposite(random: Random) -> tuple[str, str]:
    pair = random.choice(everyday.OPPOSITES)
    word, other = pair if random.random() < 0.5 else (pair[1], pair[0])
    return spin(random, everyday.ASK_OPPOSITE, {"word": word}), f"The opposite of {word} is «{other}»."


def _animal(random: Random) -> tuple[str, str]:
    animal, sound, young = random.choice(everyday.ANIMALS)
    if random.random() < 0.5:
        return spin(random, everyday.ASK_SOUND, {"animal": animal}), f"{with_article(animal).capitalize()} «{sound}»."
    return spin(random, everyday.ASK_YOUNG, {"animal": animal}), f"A young {animal} is called a «{young}»."


def _calendar(random: Random) -> tuple[str, str]:
    names = random.choice((DAYS, MONTHS))
    index = random.randrange(len(names))
    word = "day" if names is DAYS else "month"
    step = random.choice((1, 1, -1))
    relation = "after" if step == 1 else "before"
    slots = {"word": word, "relation": relation, "name": names[index]}
    pattern = random.choice(
        (
            "[What|Which] {word} [comes {relation}|is {relation}] {name}?",
            "[Tell me|Name] the {word} {relation} {name}.",
            "What comes {relation} {name}?",
        )
    )
    question = spin(random, pattern, slots)
    other = names[(index + step) % len(names)]
    comes = "After" if step == 1 else "Before"
    return question, f"{comes} {names[index]} comes «{other}»."


def small_talk(random: Random, split: Split) -> Exchange:
    """Draw greetings, who the model is, jokes, poems."""
    while True:
        index = random.randrange(len(talk.TALK)) if random.random() > 0.25 else random.choice((0, 0, 4, 6, 7, 8))
        pattern, answers = talk.TALK[index]
        question = spin(random, pattern)
        if len(normal(question)) >= 8:
            belongs = _belongs(split, f"talk {index}", question)
        else:
            belongs = split is Split.TRAIN  # "hi" and "thanks" must not be missing from the training text
        if belongs:
            break
    answer = random.choice(answers)
    required = required_words(answer) if len(answers) == 1 else ()
    user = as_typed(random, question) if random.random() < 0.5 else question
    return Exchange("small talk", normal(question), user, unmarked(answer), required)


def unknown(random: Random, split: Split) -> Exchange:
    """Draw a question that a small model cannot know, answered honestly."""
    if random.random() < 0.07:  # keys hit at random
        text = "".join(
            random.choice("asdfghjklqwertyuiopzxcvbnm" if random.random() < 0.85 else "asdf jkl")
            for _ in range(random.randint(3, 14))
        )
        if split is Split.TRAIN:
            return Exchange("unknown", text, text.strip() or "asdf", unmarked(talk.NOT_UNDERSTOOD), ("not",))
    slots: Mapping[str, str] = {
        "country": random.choice(tuple(everyday.CAPITALS)),
        "person": full_name(random),
        "year": str(random.randrange(1900, 2031)),
        "company": company(random),
        "city": city(random) if random.random() < 0.5 else random.choice(CITIES),
        "thing": f"{capitalized(random.choice(('the ', 'my ', 'a ')))}{invented_name(random)}",
        "word": random.choice((*FRUITS, *PRODUCTS, *ANIMALS, invented_name(random).lower())),
    }
    while True:
        question = spin(random, random.choice(talk.UNKNOWN_ASK), slots)
        if admits(split, f"unknown {normal(question)}"):
            break
    answer = random.choice(talk.UNKNOWN_ANSWERS)
    user = as_typed(random, question, keep_case=True)
    return Exchange("unknown", normal(question), user, unmarked(answer), required_words(answer))
