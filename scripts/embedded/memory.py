"""Copying from the context: what the user said of himself, what the system prompt says, what a passage says."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from collections.abc import Callable
from random import Random

from .example import Exchange, Split, admits
from .grammar import spin
from .phrasing import as_typed
from .words import COLOURS, FOODS, HOBBIES, JOBS, PETS, city, company, first_name, full_name, invented_name

UNTOLD = "untold"

# what is told, the reply, the question later, the answer to it
TOLD: dict[str, tuple[str, str, str, str, Callable[[Random], str]]] = {
    "name": ("[My name is {v}|I am {v}|I'm {v}|You can call me {v}|Hi, I am {v}|Hello, my name is {v}|This is {v}].", "Nice to meet you, {v}!",
             "[What is my name?|Do you remember my name?|Who am I?|What's my name?|Can you tell me my name?|How am I called?|Tell me my name.]", "Your name is {v}.", first_name),
    "city": ("[I live in {v}|I am from {v}|My home is {v}|I come from {v}|My city is {v}|I moved to {v}].", "{v} sounds like a good place to live.",
             "[Where do I live?|Where am I from?|In which city do I live?|Do you remember where I live?|What is my city?|Which city is my home?]", "You live in {v}.", city),
    "job": ("[I work as {a v}|I am {a v}|My job is {a v}|I have worked as {a v} for years].", "That is a fine job, {a v}!",
            "[What is my job?|What do I do for a living?|What do I work as?|Do you remember my job?|What's my profession?]", "You work as {a v}.", lambda random: random.choice(JOBS)),
    "color": ("[My favorite color is {v}|I like the color {v} best|The color I love most is {v}|I love {v}, it is my favorite color].", "{V} is a beautiful color.",
              "[What is my favorite color?|Which color do I like best?|What color do I like?|Do you remember my favorite color?|What's my favourite colour?]", "Your favorite color is {v}.", lambda random: random.choice(COLOURS)),
    "food": ("[My favorite food is {v}|I like {v} most of all|I love to eat {v}|The food I like best is {v}].", "I hear that {v} is delicious.",
             "[What is my favorite food?|What do I like to eat?|Which food do I like best?|Do you remember what I like to eat?]", "Your favorite food is {v}.", lambda random: random.choice(FOODS)),
    "hobby": ("[My hobby is {v}|I like {v}|In my free time I enjoy {v}|I spend my weekends with {v}].", "{V} is a nice hobby.",
              "[What is my hobby?|What do I like to do?|What do I do in my free time?|Do you remember my hobby?]", "Your hobby is {v}.", lambda random: random.choice(HOBBIES)),
    "pet": ("[I have a {p} called {v}|My {p} is called {v}|The name of my {p} is {v}|My {p}'s name is {v}].", "{v} is a good name for a {p}.",
            "[What is my {p} called?|What is the name of my {p}?|Do you remember the name of my {p}?|What's my {p}'s name?]", "Your {p} is called {v}.", first_name),
    "number": ("[Remember the number {v}|My number is {v}|Please remember {v}|The secret number is {v}|Keep the number {v} in mind].", "I will remember {v}.",
               "[What was the number?|What number should you remember?|Which number did I tell you?|What is the number?|Do you remember the number?]", "The number is {v}.", lambda random: str(random.randrange(10, 10000))),
    "word": ("[The password is {v}|Remember the word {v}|The code word is {v}|The secret word is {v}].", "I will remember the word {v}.",
             "[What is the password?|What was the word?|Which word did I tell you?|What is the secret word?|What is the code word?]", "The word is {v}.", lambda random: first_name(random).lower()),
}  # fmt: skip


def told(random: Random, split: Split) -> Exchange:
    """Draw one to three things told in one or several turns, and one of them asked for. The key is the values."""
    while True:
        names = random.sample(sorted(TOLD), random.choice((1, 1, 2, 2, 3)))
        values = {name: TOLD[name][4](random) for name in names}
        asked = random.choice(names)
        if admits(split, "told " + repr(sorted(values.items())) + asked):
            break
    pet = random.choice(PETS)
    slots = {name: {"v": value, "p": pet} for name, value in values.items()}
    if random.random() < 0.5:
        saying = " ".join(spin(random, TOLD[name][0], slots[name]) for name in names)
        history = ((_said(random, saying), spin(random, TOLD[names[0]][1], slots[names[0]])),)
    else:
        history = tuple(
            (_said(random, spin(random, TOLD[name][0], slots[name])), spin(random, TOLD[name][1], slots[name]))
            for name in names
        )
    question = as_typed(random, spin(random, TOLD[asked][2], slots[asked]))
    return Exchange(
        "memory", "", question, spin(random, TOLD[asked][3], slots[asked]), (values[asked],), history=history
    )


def untold(random: Random, split: Split) -> Exchange:
    """Draw the same question with nothing told, and an honest answer."""
    name = random.choice(sorted(TOLD))
    question = spin(random, TOLD[name][2], {"p": random.choice(PETS)})
    answer = spin(random, "You have not told me [yet|that yet].")
    required = ("not told",)
    return Exchange("unknown", UNTOLD, as_typed(random, question), answer, required)


def _said(random: Random, text: str) -> str:
    return text.rstrip(".") if random.random() < 0.2 else text


def persona(random: Random, split: Split) -> Exchange:
    """Draw a name or a company in the system prompt, which the answers follow."""
    while True:
        name = invented_name(random) if random.random() < 0.3 else first_name(random)
        employer, subject = company(random), random.choice(HOBBIES)
        if admits(split, f"persona {name} {employer}"):
            break
    slots = {"name": name, "company": employer, "subject": subject}
    kind = random.randrange(3)
    if kind == 0:
        system = "[You are {name}, a helpful assistant.|You are {name}, a helpful assistant.|You are {name}, a friendly assistant.|Your name is {name}.|You are an assistant called {name}.|You are {name}.|You are a helpful assistant named {name}.|You are a chatbot. Your name is {name}.]"
        asked, answer, needed = (
            "[What is your name?|Who are you?|What's your name?|How are you called?|Introduce yourself.]",
            "I am {name}.",
            name,
        )
    elif kind == 1:
        system = "[You are an assistant of {company}.|You work for {company}.|You answer questions for the customers of {company}.]"
        asked, answer, needed = (
            "[Who do you work for?|Which company are you from?|Whose assistant are you?]",
            "I work for {company}.",
            employer,
        )
    else:
        system = "[You are {name}, an assistant of {company}.|You are {name} and you work for {company}.]"
        asked, answer, needed = (
            "[Who are you?|Introduce yourself.|Who am I talking to?|What are you?]",
            "I am {name}, an assistant of {company}.",
            name,
        )
    return Exchange(
        "memory",
        "",
        as_typed(random, spin(random, asked)),
        spin(random, answer, slots),
        (needed,),
        system=spin(random, system, slots),
    )


_PEOPLE = ("{name} [lives in|comes from|is from] {city}", "{name} works as {a job}", "{name} is {age} years old", "{name} likes {hobby}",
           "{name} has a {color} [car|bike|house|hat]", "{name} works for {company}")  # fmt: skip
_ASK_PEOPLE: dict[str, tuple[str, str]] = {
    "city": ("[Where does {name} live?|Where is {name} from?|Which city is {name} from?|In which city is {name} at home?]", "{name} is from {city}."),
    "job": ("[What does {name} work as?|What is the job of {name}?|What is {name}'s job?|What does {name} do for a living?]", "{name} works as {a job}."),
    "age": ("[How old is {name}?|What is the age of {name}?|What is {name}'s age?]", "{name} is {age} years old."),
    "hobby": ("[What does {name} like?|What is the hobby of {name}?|What is {name}'s hobby?|What does {name} like to do?]", "{name} likes {hobby}."),
    "color": ("[Which color does {name} have?|What color is mentioned for {name}?|What is {name}'s color?]", "It is {color}."),
    "company": ("[Who does {name} work for?|Which company employs {name}?|Where does {name} work?|What is {name}'s company?]", "{name} works for {company}."),
}  # fmt: skip


def passage(random: Random, split: Split) -> Exchange:
    """Draw a few sentences about one to three people, and a question about one fact. The key is the facts."""
    while True:
        people = [
            {
                "name": full_name(random) if random.random() < 0.3 else first_name(random),
                "city": city(random),
                "job": random.choice(JOBS),
                "age": str(random.randrange(5, 95)),
                "hobby": random.choice(HOBBIES),
                "color": random.choice(COLOURS),
                "company": company(random),
            }
            for _ in range(random.choice((1, 2, 2, 3)))
        ]
        if len({person["name"] for person in people}) == len(people) and admits(split, f"passage {people}"):
            break
    told_of = [random.sample(sorted(_ASK_PEOPLE), random.choice((2, 3, 4))) for _ in people]
    patterns = dict(zip(("city", "job", "age", "hobby", "color", "company"), _PEOPLE, strict=True))
    sentences = [
        spin(random, patterns[field], person) + "."
        for person, fields in zip(people, told_of, strict=True)
        for field in fields
    ]
    if random.random() < 0.3:
        random.shuffle(sentences)
    text = " ".join(sentences)
    chosen = random.randrange(len(people))
    field = random.choice(told_of[chosen])
    asked, answer = _ASK_PEOPLE[field]
    question = spin(random, asked, people[chosen])
    user = spin(
        random, "[{text} {q}|{text}\n\n{q}|Text: {text}\nQuestion: {q}|{text}\n{q}|Read this: {text} {q}|{q}\n\n{text}]",
        {"text": text, "q": question},
    )  # fmt: skip
    return Exchange("reading", "", user, spin(random, answer, people[chosen]), (people[chosen][field],))
