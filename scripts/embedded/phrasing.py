"""How people type: greetings before the question, politeness after it, lost capitals and full stops, slips of keys."""

from __future__ import annotations

from random import Random

from .grammar import spin

BEFORE = (
    "hey, ", "hi, ", "Hi! ", "Hello, ", "hello! ", "Hey there, ", "Please tell me: ", "Quick question: ", "ok, ",
    "Okay, ", "So, ", "One more question. ", "Tell me, ", "Now, ", "Well, ", "I have a question. ", "Sorry, ", "And ",
    "I was wondering, ", "Question: ", "Also, ", "Good morning. ", "um, ", "please ",
)  # fmt: skip
AFTER = (
    " please", " Please.", " Thanks!", " thanks", " Thank you.", ", please?", " Thank you!", " I want to know.",
    " Can you help?", " I am new to this.", " :)", " Just curious.",
)  # fmt: skip


def as_typed(random: Random, text: str, *, keep_case: bool = False) -> str:
    """Return the question as somebody might type it. Digits and capitalized words are never misspelt: answers repeat
    them. With `keep_case` no letter changes its case beyond the first one."""
    chance = random.random()
    if chance < 0.40:
        return text
    if random.random() < 0.22:
        text = random.choice(BEFORE) + (text if text[:2] in ("I ", "I'") else text[0].lower() + text[1:])
    if random.random() < 0.12:
        text = text + random.choice(AFTER)
    if random.random() < 0.30:
        text = text.rstrip("?.!")
    if not keep_case and random.random() < 0.30:
        text = text.lower()
    elif random.random() < 0.10 and text[:2] not in ("I ", "I'"):
        text = text[0].lower() + text[1:]
    if not keep_case and random.random() < 0.03:
        text = text.upper()
    if random.random() < 0.16:
        text = _slip(random, text)
    if text[-1].isalnum() and random.random() < 0.06:
        text += random.choice(("??", "?!", "...", " ?", "!"))
    return text


def _slip(random: Random, text: str) -> str:
    words = text.split(" ")
    candidates = [index for index, word in enumerate(words) if len(word) > 3 and word.isalpha() and word.islower()]
    if not candidates:
        return text
    index = random.choice(candidates)
    words[index] = _misspell(random, words[index])
    return " ".join(words)


def _misspell(random: Random, word: str) -> str:
    place = random.randrange(1, len(word) - 1)
    kind = random.random()
    if kind < 0.4:  # two letters swapped
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    if kind < 0.7:  # one left out
        return word[:place] + word[place + 1 :]
    if kind < 0.9:  # one doubled
        return word[:place] + word[place] + word[place:]
    return word[:place] + random.choice("abcdefghijklmnopqrstuvwxyz") + word[place + 1 :]


def polite(random: Random, request: str) -> str:
    """Return a request such as `tell me a story` in one of its polite or short forms."""
    form = spin(
        random,
        "[{Request}.|{Request}.|{Request}|{request}|Please {request}.|Can you {request}?|Could you {request}?|"
        "{Request}, please.|I would like you to {request}.|Could you please {request}?|can you {request}|"
        "Would you {request}?|pls {request}|I want you to {request}.|{Request}!]",
        {"request": request},
    )
    return as_typed(random, form, keep_case=True)
