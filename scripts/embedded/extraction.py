"""Fields out of a sentence, into compact valid JSON. The key is the values themselves: held-out records are new."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from .example import Exchange, Split, admits
from .grammar import spin
from .phrasing import as_typed
from .words import COLOURS, DAYS, JOBS, MONTHS, PRODUCTS, city, company, first_name, full_name

Value = str | int | bool


def _date(random: Random) -> str:
    day, month, year = random.randrange(1, 29), random.randrange(12), random.randrange(1990, 2031)
    if random.random() < 0.25:
        return f"{year}-{month + 1:02d}-{day:02d}"
    return f"{day} {MONTHS[month]} {year}" if random.random() < 0.7 else f"{MONTHS[month]} {day}, {year}"


FIELDS: dict[str, Callable[[Random], Value]] = {
    "name": lambda random: full_name(random) if random.random() < 0.5 else first_name(random),
    "city": city,
    "age": lambda random: random.randrange(3, 99),
    "job": lambda random: random.choice(JOBS),
    "company": company,
    "email": lambda random: (
        f"{first_name(random).lower()}@{random.choice(('example.com', 'example.org', 'mail.test'))}"
    ),
    "phone": lambda random: f"555-{random.randrange(1000, 10000)}",
    "date": _date,
    "day": lambda random: random.choice(DAYS),
    "time": lambda random: f"{random.randrange(24):02d}:{random.choice((0, 15, 30, 45, 5, 50)):02d}",
    "product": lambda random: random.choice(PRODUCTS),
    "color": lambda random: random.choice(COLOURS),
    "quantity": lambda random: random.randrange(1, 100),
    "price": lambda random: random.randrange(1, 1000),
    "order_id": lambda random: f"{random.choice('ABCDEFGHKLMNPQRSTUVWXYZ')}{random.randrange(100, 100000)}",
    "model": lambda random: f"{random.choice(('llama', 'qwen', 'gemma', 'mistral', 'gpt'))}-{random.randrange(1, 80)}b",
    "gpu": lambda random: random.choice(("H100", "H200", "A100", "L40S", "L4", "B200")),
    "port": lambda random: random.choice((8000, 8001, 9000, 5555, 8080, random.randrange(1024, 65536))),
    "batch_size": lambda random: random.choice((1, 2, 4, 8, 16, 32, 64, 128, 256)),
}

# What each kind of text says, field by field. The clauses are joined in a random order where they are sentences.
RECORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("[{name} lives in {city}.|{name} is from {city}.|{name} moved to {city}.|My name is {name} and I live in {city}.|I am {name} from {city}.|{name}, {city}]", ("name", "city")),
    ("[{name} is {age} years old and lives in {city}.|{name}, {age}, from {city}.|I am {name}, I am {age} and I live in {city}.|In {city} lives {name}, who is {age} years old.]", ("name", "age", "city")),
    ("[{name} works as {a job} in {city}.|{name} is {a job} from {city}.|In {city}, {name} has found work as {a job}.]", ("name", "job", "city")),
    ("[{name}, aged {age}, is {a job}.|{name} is {a job} and {age} years old.|At {age}, {name} became {a job}.]", ("name", "age", "job")),
    ("[{name} works at {company} as {a job}.|{company} has hired {name} as {a job}.|{name} is {a job} at {company}.]", ("name", "company", "job")),
    ("[You can reach {name} at {email} or {phone}.|Write to {email} or call {phone} and ask for {name}.|Contact: {name}, {email}, {phone}.]", ("name", "email", "phone")),
    ("[{name} can be reached at {email}.|The address of {name} is {email}.|Please write to {name} at {email}.]", ("name", "email")),
    ("[{name} ordered {quantity} {color} {product}s for {price} dollars.|Order {order_id}: {quantity} {color} {product}s for {name}, {price} dollars.]", ("name", "quantity", "product", "color", "price")),
    ("[Order {order_id}: {quantity} {product}s to {city}.|Please send {quantity} {product}s to {city}, the order is {order_id}.|We ship {quantity} {product}s to {city} as order {order_id}.]", ("order_id", "quantity", "product", "city")),
    ("[The meeting with {name} is on {day} at {time}.|{name} comes on {day} at {time}.|On {day} at {time} we meet {name}.|See you on {day} at {time}, {name}!]", ("name", "day", "time")),
    ("[{name} will visit {company} in {city} on {date}.|On {date}, {name} travels to {city} to see {company}.|{company} expects {name} in {city} on {date}.]", ("name", "company", "city", "date")),
    ("[The {color} {product} costs {price} dollars.|We sell a {color} {product} for {price} dollars.|For {price} dollars you get a {color} {product}.]", ("product", "color", "price")),
    ("[The engine serves {model} on one {gpu} at port {port}.|{model} runs on {gpu}, port {port}.|Port {port} answers for {model} on {gpu}.]", ("model", "gpu", "port")),
    ("[With batch size {batch_size}, {model} on {gpu} was fastest.|We ran {model} on {gpu} with a batch size of {batch_size}.]", ("model", "gpu", "batch_size")),
    ("[{name} is {age} years old.|{name} is {age}.|I am {name} and I am {age}.|{name}, {age}|My name is {name}, I am {age} years old.|{name} turned {age} yesterday.]", ("name", "age")),
    ("[{name} flies to {city} on {date}.|{name} travels to {city} on {date}.|On {date} {name} goes to {city}.|{name} leaves for {city} on {date}.]", ("name", "city", "date")),
    ("[{name} bought {quantity} {product}s.|{name} needs {quantity} {product}s.|{quantity} {product}s for {name}, please.|{name} sold {quantity} {product}s.]", ("name", "quantity", "product")),
    ("[{name} paid {price} dollars for {a product}.|The {product} was {price} dollars, said {name}.|{name} sells {a product} for {price} dollars.]", ("name", "price", "product")),
    ("[{company} is based in {city}.|{company} has an office in {city}.|{company} moved to {city}.|The head of {company} lives in {city}.]", ("company", "city")),
    ("[{name} works for {company} in {city}.|{name} of {company} lives in {city}.|{company} in {city} has hired {name}.]", ("name", "company", "city")),
    ("[{name} was born on {date} in {city}.|Born in {city} on {date}, {name} still lives there.]", ("name", "date", "city")),
)  # fmt: skip

ASK = (
    "Extract {fields} as JSON from: {text}", "Extract {fields} from this text as JSON: {text}",
    "Extract {fields} from: {text} Answer as JSON.", "Give me {fields} as JSON. Text: {text}",
    "Return JSON with {fields}: {text}", "Read the text and return a JSON object with {fields}.\n\n{text}",
    "{text}\n\nExtract {fields} as JSON.", "{text} Return {fields} as JSON.", "Text: {text}\nFields: {fields}\nJSON:",
    'Extract {fields} from the sentence "{text}" as JSON', "Pull out {fields} and answer in JSON only: {text}",
    "Find {fields} in the following and reply with JSON.\n{text}", "Turn this into JSON with {fields}: {text}",
    "Parse {fields} from: {text} (JSON please)", "Extract {fields} from: {text} as JSON",
    "I need {fields} as a JSON object from this message: {text}", "Give me JSON with {fields}: {text}", "extract {fields} from {text}",
    'extract {fields} from "{text}"', "Get {fields} from: {text}", "{fields} as JSON: {text}", "Make JSON with {fields} out of this: {text}", "Extract to JSON ({fields}): {text}",
)  # fmt: skip


def draw(random: Random, split: Split) -> Exchange:
    """Draw a sentence with two to five fields, all or some of them asked for, in the order of the question."""
    if split is Split.TRAIN and random.random() < 0.08:
        return _made_up(random)
    pattern, names = random.choice(RECORDS)
    while True:
        values = {name: FIELDS[name](random) for name in names}
        key = "extract " + json.dumps(values, sort_keys=True)
        if admits(split, key):
            break
    text = spin(random, pattern, {name: str(value) for name, value in values.items()})
    present = [name for name in names if str(values[name]) in text]
    asked = list(present)
    if random.random() < 0.4:
        random.shuffle(asked)
    if random.random() < 0.35:
        asked = asked[: random.randrange(1, len(asked) + 1)]
    if random.random() < 0.06:  # a field that the text does not give
        asked.append(
            random.choice([name for name in FIELDS if name not in names and name not in ("price", "order_id")])
        )
    record = {name: values.get(name) if name in present else None for name in asked}
    # Only the words of the asking may be mistyped: what is to be copied stays as it is.
    user = as_typed(random, random.choice(ASK), keep_case=True)
    user = user.replace("{fields}", _listed(random, asked)).replace("{text}", text)
    answer = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    follow_ups: tuple[tuple[str, str], ...] = ()
    if len(asked) > 1 and random.random() < 0.5:
        one = random.choice(asked)
        follow_ups = (
            (
                spin(random, "[Only the {field}, please.|Just {field}.|And only {field}?]", {"field": one}),
                json.dumps({one: record[one]}, ensure_ascii=False, separators=(",", ":")),
            ),
        )
    return Exchange("extraction", key, user, answer, (answer,), follow_ups)


def _listed(random: Random, names: list[str]) -> str:
    article = "the " if random.random() < 0.3 else ""
    if len(names) == 1:
        return article + names[0]
    joint = random.choice((" and ", " and ", ", ", ", and "))
    return article + ", ".join(names[:-1]) + joint + names[-1]


def _made_up(random: Random) -> Exchange:
    """Draw, with no text given, a JSON object of the asked fields with sensible values of the model's own. Never
    graded."""
    names = random.choice(RECORDS)[1]
    kind = random.choice(("person", "customer", "user", "order", "record", "example"))
    fields = _listed(random, list(names))
    user = spin(
        random,
        "[Give me a JSON object of a {kind} with {fields}.|Write a JSON {kind} with {fields}.|Make up a {kind} as JSON with "
        "{fields}.|Create a JSON object with the fields {fields}.|Return a JSON {kind}: {fields}]",
        {"kind": kind, "fields": fields},
    )
    record = {name: FIELDS[name](random) for name in names}
    answer = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return Exchange("made_up_json", "made up", as_typed(random, user, keep_case=True), answer)
