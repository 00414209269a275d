"""Chats: a system prompt or none, then one exchange or many. Some are long, so that long contexts are learned too."""

# ruff: noqa: E501  (patterns stay on one line)
from __future__ import annotations

from random import Random

from . import arithmetic, extraction, knowledge, memory, stories, tasks
from .example import Exchange, Skill, Split

Message = tuple[str, str]  # role, content

SKILLS: tuple[tuple[Skill, float], ...] = (
    (knowledge.concept, 0.20),
    (knowledge.about_engine, 0.19),
    (arithmetic.draw, 0.20),
    (extraction.draw, 0.12),
    (stories.draw, 0.09),
    (knowledge.small_talk, 0.08),
    (knowledge.general, 0.06),
    (memory.told, 0.05),
    (memory.passage, 0.06),
    (tasks.draw, 0.04),
    (memory.persona, 0.05),
    (knowledge.unknown, 0.035),
    (memory.untold, 0.005),
)
_SKILLS = [skill for skill, _ in SKILLS]
_WEIGHTS = [weight for _, weight in SKILLS]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful, honest assistant.", "Be brief.", "Answer briefly.",
    "You are a friendly assistant.", "You are the assistant of InferEngine.", "Answer in whole sentences.", "You are an expert in LLM serving.",
    "You are a small language model.", "Be concise and correct.", "You are a helpful AI assistant. Answer the user's questions.",
    "Help the user.", "You are a kind and patient teacher.", "Be polite.", "Answer the question.", "You are a chatbot.", "Keep answers short.",
)  # fmt: skip


def draw_exchange(random: Random, split: Split) -> Exchange:
    return random.choices(_SKILLS, _WEIGHTS)[0](random, split)


def draw(random: Random, split: Split) -> list[Message]:
    """Draw the messages of one chat."""
    length = random.random()
    count = 1 if length < 0.5 else random.randint(2, 4) if length < 0.85 else random.randint(5, 12)
    if length > 0.985:
        count = random.randint(15, 40)
    exchanges = [draw_exchange(random, split) for _ in range(count)]
    if any(exchange.history for exchange in exchanges):  # "you have not told me" would then be wrong
        exchanges = [exchange for exchange in exchanges if exchange.key != memory.UNTOLD]
    systems = [exchange.system for exchange in exchanges if exchange.system]
    messages: list[Message] = []
    if systems:  # only one such exchange can be true of one chat, and it comes first
        exchanges = [exchange for exchange in exchanges if not exchange.system or exchange.system == systems[0]]
        messages.append(("system", systems[0]))
    elif random.random() < 0.25:
        messages.append(("system", random.choice(SYSTEM_PROMPTS)))
    told_once = False
    delayed: list[Message] = []
    for exchange in exchanges:
        if exchange.history and told_once:
            continue  # a second name or city would contradict the first
        told_once = told_once or bool(exchange.history)
        messages += turns(exchange.history)
        question = turns(((exchange.user, exchange.assistant),))
        if exchange.history and random.random() < 0.5:
            delayed = question  # asked for only after other things
            continue
        messages += question
        if exchange.follow_ups and random.random() < 0.55:
            messages += turns(exchange.follow_ups)
    return messages + delayed


def turns(pairs: tuple[tuple[str, str], ...]) -> list[Message]:
    """Return (user, assistant) pairs as messages."""
    return [message for user, assistant in pairs for message in (("user", user), ("assistant", assistant))]
