"""Short stories: a hero, a place, a wish or a trouble, a helper, an ending. The key is hero, place and plot."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from .example import Exchange, Split, admits
from .grammar import spin
from .phrasing import polite
from .plots import ENDINGS, OPENINGS, PLOTS, Plot
from .words import ANIMALS, FIRST_NAMES, FRUITS, JOBS, PRODUCTS, VEGETABLES, first_name

T = TypeVar("T")

PEOPLE = ("girl", "boy", "baker", "sailor", "gardener", "painter", "queen", "king", "farmer", "shepherd", "musician",
          "clockmaker", "librarian", "fisherman", "princess", "prince", "knight", "wizard", "witch", "child", "pilot",
          "astronaut", "teacher", "inventor", "pirate", "detective", "old man", "old woman", "grandmother", "doctor")  # fmt: skip
CREATURES = ("dragon", "robot", "ghost", "giant", "unicorn", "mermaid", "fairy", "dinosaur", "snowman", "scarecrow", "troll",
             "elf", "alien", "monster", "teddy bear", "wooden doll", "paper boat", "little train", "lighthouse", "kettle",
             "teapot", "cloud", "star", "snowflake", "little computer", "language model", "lantern", "kite", "tree",
             "raindrop", "little engine", "toy soldier", "clock", "bus", "moonbeam", "violin", "pebble")  # fmt: skip
HEROES = (*ANIMALS, *ANIMALS, *PEOPLE, *PEOPLE, *CREATURES, *CREATURES, *FRUITS, *VEGETABLES, *PRODUCTS, *JOBS)
PLACES = (
    "in a quiet forest", "at the edge of a small village", "by a wide river", "on a green hill", "near the sea",
    "in an old stone house", "in a busy harbour town", "under a tall oak tree", "at the foot of a mountain",
    "in a valley full of flowers", "on a little island", "in a town with red roofs", "beside a blue lake",
    "in a garden behind a mill", "in a land of snow", "at the end of a long road", "in a big city", "in the desert",
    "on a farm", "in a castle", "in a cave", "in the jungle", "on the moon", "in a small library",
)  # fmt: skip
TRAITS = ("small", "young", "curious", "shy", "brave", "kind", "clever", "cheerful", "quiet", "lonely", "gentle", "proud",
          "patient", "sleepy", "restless", "stubborn", "little", "clumsy", "dreamy", "careful")  # fmt: skip
HELPERS = ("owl", "mouse", "turtle", "sparrow", "beaver", "bee", "frog", "deer", "crow", "hedgehog", "goat", "duck", "squirrel",
           "rabbit", "otter", "cat")  # fmt: skip
TREASURES = ("silver key", "red scarf", "wooden flute", "glass marble", "golden bell", "blue lantern", "old map", "little drum",
             "pocket watch", "brass compass", "paper crown", "green umbrella", "shiny button", "music box", "seashell")  # fmt: skip
SKILLS = ("sing", "swim", "dance", "whistle", "paint", "bake bread", "play the flute", "climb", "read", "juggle", "skate",
          "build a boat", "tell jokes", "count the stars", "write letters", "cook soup", "row a boat")  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")

ASK = (
    "tell me a story about {a hero}", "tell me a story about {a hero}", "write a story about {a hero}", "tell a story about {a hero}",
    "tell me a {size} story about {a hero}", "write a {size} story about {a hero}", "tell me a tale about {a hero}",
    "write a short tale of {a hero} called {name}", "tell me a story about {a hero} named {name}",
    "tell me a story about {a hero} {place}", "make up a story about {a hero}", "tell me a bedtime story about {a hero}",
    "write a story about {a trait} {hero}", "tell me a story about {a trait} {hero} {place}", "invent a story with {a hero}",
    "write me a little story about {a hero} named {name}", "tell me something about {a hero}, as a story",
    "tell me a story with {a hero} and {a helper}", "write a fairy tale about {a hero}",
)  # fmt: skip
ASK_ANY = (
    "tell me a story", "tell me a short story", "write a story", "tell me a bedtime story", "write a short story",
    "tell me a long story", "can you tell stories? tell me one", "make up a story", "tell me something nice",
    "write something creative", "I am bored, tell me a story", "surprise me with a story",
)  # fmt: skip


def draw(random: Random, split: Split, hero: str | None = None) -> Exchange:
    """Draw a request for a story and the story, with questions about it as follow-ups."""
    slots, plot = _cast(random, split, hero)
    if hero is None and random.random() < 0.12:
        request = random.choice(ASK_ANY)
        size = "short" if "short" in request else "long" if "long" in request else random.choice(("", "", "long"))
    else:
        request = random.choice(ASK)
        size = (
            random.choice(("short", "short", "long", "very short"))
            if "{size}" in request
            else random.choice(("", "", "long"))
        )
        request = spin(random, request, {**slots, "size": size})
    story = compose(random, slots, plot, size)
    follow_ups = _follow_ups(random, slots, plot)
    key = _key(slots, plot)
    needed = (
        (slots["name"],)
        if slots["name"] in request
        else (slots["hero"].split()[-1],)
        if slots["hero"] in request
        else ()
    )
    return Exchange("story", key, polite(random, request), story, needed, follow_ups)


def plain(random: Random, split: Split) -> str:
    """Write a story as a text of its own, some with a title."""
    slots, plot = _cast(random, split, None)
    story = compose(random, slots, plot, random.choice(("short", "", "", "long")))
    if random.random() < 0.2:
        return (
            spin(random, "[The {Trait} {Hero}|{Name} the {Hero}|The {Hero} and the {Helper}|{Name}]\n\n", slots) + story
        )
    return story


def compose(random: Random, slots: dict[str, str], plot: Plot, size: str) -> str:
    """Write the sentences of the plot: the middle ones are told or left out by the size asked for."""
    opening = spin(random, random.choice(OPENINGS), slots)
    beats = [spin(random, beat, slots) for beat in plot.beats]
    ending = spin(random, random.choice((*plot.endings, *ENDINGS)), slots)
    if size == "very short":
        return f"{opening} {beats[0]} {spin(random, plot.summary_end, slots)}"
    if size == "short":
        return (
            f"{opening} {beats[0]} {beats[1]} {spin(random, plot.summary_end, slots)} {spin(random, ENDINGS[1], slots)}"
        )
    if size == "long":
        details = [spin(random, random.choice(part), slots) for part in (DETAILS[:3], DETAILS[3:])]
        half = (len(beats) + 1) // 2
        first = " ".join([opening, details[0], *beats[:half]])
        second = " ".join([*beats[half:-1], details[1], beats[-1]])
        return f"{first}\n\n{second} {spin(random, random.choice(plot.endings), slots)} {ending}"
    return " ".join([opening, *beats, ending])


DETAILS = (
    "[The days were long and the nights were full of stars.|In {season} the air smelled of [rain|grass|bread|honey].|Every "
    "morning began with a cup of tea and a look at the sky.]",
    "[Nobody in the whole [valley|land|neighbourhood] was as {trait} as {name}.|Everyone knew {name}, and everyone liked {name}.]",
    "[Small clouds moved across the sky like sheep.|A few drops of rain fell and stopped again.|The first lights were lit in the "
    "windows.]",
    "[The wind [sang|whispered] in the trees, and somewhere a bell rang.|Far away [thunder|a church bell|music] could be heard.]",
    "[For a moment it was so quiet that one could hear the leaves fall.|For a while nobody said a word.|The sun was already low.]",
    '["I must not give up," thought {name}.|"One step after the other," said {name} softly.|"This will be a day to remember," '
    "said {name}.]",
)


def _cast(random: Random, split: Split, hero: str | None) -> tuple[dict[str, str], Plot]:
    while True:
        who = hero or random.choice(HEROES)
        plot = _favoured(random, who, "plot", PLOTS)
        slots = {
            "hero": who,
            "place": _favoured(random, who, "place", PLACES),
            "trait": _favoured(random, who, "trait", TRAITS),
            "helper": _favoured(random, who, "helper", HELPERS),
            "thing": _favoured(random, who, "thing", TREASURES),
            "skill": random.choice(SKILLS),
            "season": random.choice(SEASONS),
            "name": _favoured(random, who, "name", FIRST_NAMES[::2]) if random.random() < 0.8 else first_name(random),
            "friend": _favoured(random, who, "friend", FIRST_NAMES[1::2])
            if random.random() < 0.8
            else first_name(random),
        }
        distinct = slots["helper"] != slots["hero"] and slots["name"] != slots["friend"]
        if distinct and admits(split, _key(slots, plot)):
            return slots, plot


def _favoured(random: Random, hero: str, what: str, options: Sequence[T]) -> T:
    """Draw an item, which each hero favours: a likely name, place and plot. With all of them equally likely, greedy
    decoding would tell the same story of everybody: the one whose tokens happen to come first."""
    if random.random() < 0.4:
        return options[zlib.crc32(f"{what} of {hero}".encode()) % len(options)]
    return random.choice(options)


def _key(slots: dict[str, str], plot: Plot) -> str:
    return f"story {slots['hero']} {slots['place']} {plot.name}"


def _follow_ups(random: Random, slots: dict[str, str], plot: Plot) -> tuple[tuple[str, str], ...]:
    pairs = [
        ("[What was the name of the {hero}?|What is the {hero} called?|Who was the {hero}?|what was its name?]",
         "[The {hero} was called {name}.|The name of the {hero} is {name}.]"),
        ("[Where did {name} live?|Where did the {hero} live?|Where does the story happen?]", "{Name} lived {place}."),
        ("[Who helped {name}?|Who was the helper?|Who helped the {hero}?]", "[The {helper} {friend} helped {name}.|It was the {helper} {friend}.]"),
        ("[Can you make it shorter?|Tell it in one sentence.|Summarize the story.|Can you sum it up?|Shorter, please.]", plot.summary),
        ("[What is the moral of the story?|What did {name} learn?|What can we learn from it?|What is the lesson?]", plot.moral),
    ]  # fmt: skip
    random.shuffle(pairs)
    count = random.choice((1, 1, 2, 3))
    return tuple((spin(random, asked, slots), spin(random, told, slots)) for asked, told in pairs[:count])
