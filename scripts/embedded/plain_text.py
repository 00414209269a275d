"""Texts without roles, so that a plain completion goes on sensibly: stories, questions with answers, articles, sums."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from random import Random

from . import arithmetic, extraction, knowledge, memory, stories, tasks
from .example import Exchange, Skill, Split
from .facts import serving
from .grammar import capitalized, spin
from .words import FIRST_NAMES, HOBBIES, JOBS, city, first_name

_ASKED: tuple[Skill, ...] = (
    knowledge.concept, knowledge.concept, knowledge.about_engine, knowledge.about_engine, knowledge.general, arithmetic.draw,
    arithmetic.draw, extraction.draw, memory.passage, tasks.draw, knowledge.small_talk, knowledge.small_talk,
)  # fmt: skip
_FORMS = (
    ("{q}\n{a}", "\n\n"), ("{q}\n{a}", "\n\n"), ("{q} {a}", "\n"), ("Question: {q}\nAnswer: {a}", "\n\n"), ("Q: {q}\nA: {a}", "\n"),
    ("User: {q}\nAssistant: {a}", "\n"), ("Q: {q}\nA: {a}", "\n\n"), ("{q}\n\n{a}", "\n\n"),
)  # fmt: skip


def draw(random: Random, split: Split) -> str:
    """Draw one text."""
    kind = random.random()
    if kind < 0.45:
        return stories.plain(random, split)
    if kind < 0.48:
        return _introduction(random)
    if kind < 0.53:
        return _dialogue(random, split)
    if kind < 0.87:
        return _asked(random, split)
    if kind < 0.95:
        return _article(random)
    return _sums(random, split)


def _asked(random: Random, split: Split) -> str:
    form, gap = random.choice(_FORMS)
    count = 1 if random.random() < 0.85 else random.choice((2, 3, 6))
    exchanges: list[Exchange] = [random.choice(_ASKED)(random, split) for _ in range(count)]
    return gap.join(form.replace("{q}", each.user).replace("{a}", each.assistant) for each in exchanges)


def _introduction(random: Random) -> str:
    """Write how somebody says who he or she is."""
    facts = {
        "name": first_name(random),
        "city": city(random),
        "job": random.choice(JOBS),
        "hobby": random.choice(HOBBIES),
    }
    text = "[Hello, my|Hello! My|Hi, my|My] name is {name}. [I live in {city} and work as {a job}.|I am {a job} from {city}.] [In my free time I like {hobby}.|My hobby is {hobby}.]"
    return spin(random, text, facts)


def _dialogue(random: Random, split: Split) -> str:
    """Write a dialogue: two people meet, and one of them asks about something the other knows."""
    first, second = random.sample(FIRST_NAMES, 2)
    exchange = random.choice((knowledge.concept, knowledge.general, knowledge.about_engine))(random, split)
    opening = spin(
        random,
        "[Hello, {second}! How are you?|Good morning, {second}.|Hi {second}, do you have a minute?]",
        {"second": second},
    )
    answer = spin(
        random, "[I am well, thank you. What can I do for you?|Good morning! How can I help?|Of course, what is it?]"
    )
    thanks = spin(random, "[Thank you, that helps.|Now I understand, thank you!|Thanks a lot!]")
    lines = (
        (first, opening),
        (second, answer),
        (first, exchange.user),
        (second, exchange.assistant),
        (first, thanks),
        (second, "You are welcome!"),
    )
    return "\n".join(f"{speaker}: {line}" for speaker, line in lines)


def _article(random: Random) -> str:
    """Write what is known of one concept, or of a few, as a text with or without a title."""
    chosen = random.sample(serving.CONCEPTS, 1 if random.random() < 0.8 else random.choice((2, 3, 5)))
    paragraphs = []
    for name, *answers in chosen:
        text = " ".join(knowledge.unmarked(answer) for answer in answers if answer)
        title = capitalized(name.split(" ", 1)[1] if name.startswith(("a ", "an ", "the ")) else name)
        opening = random.random()
        if opening < 0.3:
            text = f"{title}\n\n{text}"
        elif opening < 0.5:
            text = f"{capitalized(name)} is {random.choice(('easy to explain', 'quickly explained'))}. {text}"
        paragraphs.append(text)
    return "\n\n".join(paragraphs)


def _sums(random: Random, split: Split) -> str:
    lines = []
    for _ in range(1 if random.random() < 0.6 else random.randint(2, 12)):
        left, sign, right = arithmetic.operation(random, split)
        lines.append(f"{left} {sign} {right} = {arithmetic.result_of(left, sign, right)}")
    return "\n".join(lines)
