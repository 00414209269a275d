"""Small tasks on words: repeat, sort, list, count, upper case, first and last. The key is the words."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from collections.abc import Callable
from random import Random

from .example import Exchange, Split, admits
from .grammar import spin
from .words import ANIMALS, CITIES, COLOURS, FIRST_NAMES, FRUITS, JOBS, PRODUCTS, VEGETABLES, first_name

KINDS: dict[str, tuple[str, ...]] = {
    "fruits": FRUITS, "vegetables": VEGETABLES, "animals": ANIMALS, "colors": COLOURS, "cities": CITIES, "names": FIRST_NAMES,
    "jobs": JOBS,
}  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_VERBS = (
    "Name ",
    "List ",
    "Give ",
    "Tell ",
    "Can ",
    "Write ",
    "Repeat",
    "Say ",
    "Please ",
    "Sort ",
    "Put ",
    "What ",
    "Which ",
    "How ",
)
Task = Callable[[Random], tuple[str, str, tuple[str, ...]]]


def draw(random: Random, split: Split) -> Exchange:
    """Draw one task of the given split."""
    while True:
        question, answer, required = random.choice(TASKS)(random)
        if admits(split, f"task {question.lower()}"):
            return Exchange("tasks", question, _typed(random, question), answer, required)


def _typed(random: Random, question: str) -> str:
    """Write the task as typed, without slips of keys: the answer repeats the words."""
    if random.random() < 0.25:
        question = question.rstrip(".?")
    return question[0].lower() + question[1:] if question.startswith(_VERBS) and random.random() < 0.25 else question


def _some_words(random: Random, least: int, most: int) -> list[str]:
    pool = random.choice((FRUITS, VEGETABLES, ANIMALS, COLOURS, PRODUCTS, CITIES))
    return random.sample(pool, random.randint(least, most))


def _listing(random: Random) -> tuple[str, str, tuple[str, ...]]:
    kind = random.choice(sorted(KINDS))
    count = random.choice((2, 3, 3, 3, 4, 5))
    shown = random.choice((str(count), NUMBERS[count]))
    pattern = "[Name {n} {kind}.|List {n} {kind}.|Give me {n} {kind}.|Tell me {n} {kind}.|Can you name {n} {kind}?|Write down {n} {kind}.|I need {n} {kind}.]"
    chosen = (
        list(KINDS[kind][:count]) if random.random() < 0.8 else random.sample(KINDS[kind], count)
    )  # one likely answer
    answer = ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
    return spin(random, pattern, {"n": shown, "kind": kind}), answer[0].upper() + answer[1:], (" and ",)


def _repeat(random: Random) -> tuple[str, str, tuple[str, ...]]:
    words = " ".join(
        random.choice((first_name(random), *_some_words(random, 1, 1))) for _ in range(random.randint(1, 4))
    )
    pattern = "[Repeat after me: {w}|Repeat: {w}|Say {w}.|Please say: {w}|Repeat the words {w}.|Say this: {w}|Echo {w}]"
    return spin(random, pattern, {"w": words}), f"{words}.", (words,)


def _thrice(random: Random) -> tuple[str, str, tuple[str, ...]]:
    count = random.randint(2, 5)
    word = random.choice(("hello", "yes", "no", "hi", "thanks", *FRUITS, *COLOURS))
    times = {2: "[twice|two times|2 times]", 3: "[three times|3 times]"}.get(
        count, f"[{NUMBERS[count]} times|{count} times]"
    )
    question = spin(random, f"[Say|Write|Repeat] [{word}|the word {word}] {times}.")
    answer = ", ".join([word] * count) + "."
    return question, answer, (answer,)


def _sort_numbers(random: Random) -> tuple[str, str, tuple[str, ...]]:
    numbers = random.sample(range(random.choice((10, 100))), random.randint(3, 5))
    pattern = "[Sort {l}.|Sort these numbers: {l}|Put these numbers in order: {l}|Order the numbers {l}.|Sort the numbers {l}]"
    answer = ", ".join(map(str, sorted(numbers))) + "."
    return spin(random, pattern, {"l": ", ".join(map(str, numbers))}), answer, (answer,)


def _first_last(random: Random) -> tuple[str, str, tuple[str, ...]]:
    words = _some_words(random, 3, 5)
    which = random.choice(("first", "last"))
    word = words[0] if which == "first" else words[-1]
    pattern = "[What is the {which} word of this list: {l}?|Which is the {which} of {l}?|Tell me the {which} item of: {l}|{l}: which one comes {which}?]"
    return (
        spin(random, pattern, {"which": which, "l": ", ".join(words)}),
        f"The {which} one is {word}.",
        (f"is {word}",),
    )


def _how_many(random: Random) -> tuple[str, str, tuple[str, ...]]:
    words = _some_words(random, 2, 8)
    pattern = "[How many words are in this list: {l}?|How many items are there: {l}?|Count the words: {l}|How many things are these: {l}?]"
    return spin(random, pattern, {"l": ", ".join(words)}), f"There are {NUMBERS[len(words)]}.", (NUMBERS[len(words)],)


def _upper(random: Random) -> tuple[str, str, tuple[str, ...]]:
    word = random.choice((*FRUITS, *ANIMALS, *COLOURS, *PRODUCTS, *VEGETABLES))
    pattern = "[Write {w} in upper case.|Put {w} into capital letters.|{w} in capitals, please.|Write the word {w} in capitals.|Make {w} upper case.]"
    return spin(random, pattern, {"w": word}), f"{word.upper()}.", (word.upper(),)


def _category(random: Random) -> tuple[str, str, tuple[str, ...]]:
    kind, pool = random.choice(
        (("fruit", FRUITS), ("vegetable", VEGETABLES), ("animal", ANIMALS), ("color", COLOURS), ("city", CITIES))
    )
    word = random.choice(pool)
    article = "an" if kind == "animal" else "a"
    pattern = "[Is {w} a fruit, a vegetable, an animal, a color or a city?|What kind of thing is {w}?|What sort of thing is {w}?|{w}: fruit, animal or city?|What is {w}, a fruit or an animal?]"
    if word in ("orange",) or (kind == "city" and word == "Sofia"):
        return _category(random)
    return spin(random, pattern, {"w": word}), f"{word[0].upper()}{word[1:]} is {article} {kind}.", (kind,)


def _odd_one_out(random: Random) -> tuple[str, str, tuple[str, ...]]:
    first, second = random.sample((FRUITS[:5], ANIMALS, CITIES, VEGETABLES, JOBS[:30]), 2)
    words = [*random.sample(first, 3), odd := random.choice(second)]
    random.shuffle(words)
    pattern = "[Which word does not belong: {l}?|Which one is the odd one out: {l}?|Find the odd one out: {l}]"
    return (
        spin(random, pattern, {"l": ", ".join(words)}),
        f"{odd[0].upper()}{odd[1:]} does not belong.",
        (f"{odd[0].upper()}{odd[1:]}",),
    )


def _poem(random: Random) -> tuple[str, str, tuple[str, ...]]:
    topic = random.choice(
        (*TOPICS, *TOPICS, random.choice(FRUITS) + "s", random.choice(ANIMALS) + "s", random.choice(CITIES))
    )
    pattern = "[Write|Write me|Make|Compose|Tell me|Give me|I would like|Can you write|Please write] a [poem|short poem|little poem|rhyme] about {t}[.|?|]"
    poem = random.choice(
        (
            "I thought of {t} late at night,\nmy candle gave a little light.\nThe clock went on, the moon was clear,\nand {t} felt very near.",
            "Oh {t}, you are always new,\nthe morning sings a song of you.\nThe evening comes, the day is done,\nand still I love you, everyone.",
            "A word for {t}, soft and slow,\na word that only poets know.\nI write it down, I let it stay,\nand carry it through all the day.",
        )
    )
    return spin(random, pattern, {"t": topic}), poem.replace("{t}", topic), (topic,)


TOPICS = (
    "the sea", "the moon", "love", "winter", "spring", "summer", "autumn", "friendship", "rain", "the stars", "the sun", "the night",
    "a river", "a garden", "time", "hope", "music", "snow", "the wind", "home", "a cat", "a dog", "flowers", "computers", "the mountains",
)  # fmt: skip
TASKS: tuple[Task, ...] = (
    _poem, _listing, _listing, _repeat, _repeat, _thrice, _sort_numbers, _first_last, _how_many, _upper, _category, _odd_one_out,
)  # fmt: skip
