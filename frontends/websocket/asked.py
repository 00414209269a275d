"""What a generate frame asks of the engine: its prompt, its parameters, and how the output is to be read.

A conversation goes through the code that serves /v1/chat/completions, so that both say the same to the model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from frontends.common.conversation import read_turn
from frontends.common.fields import flag, parse_object
from frontends.common.generation import CONTEXT_TOKENS
from frontends.common.keys import ApiKey
from frontends.common.model_context import ServedModel
from frontends.common.notes import Note, read_note, write_note
from frontends.common.reading import Reading, reading_from_map, reading_to_map
from frontends.websocket.frames import Generate
from inferengine.config import Config
from inferengine.errors import InvalidRequest
from inferengine.params import SamplingParams, from_map, validate
from inferengine.structure import GrammarSpec, read_grammar, validate_grammar

NOTE_PATH = "websocket"  # no HTTP route has this path
MAX_KEPT_BYTES = 4096


class Told(NamedTuple):
    """How an answer is told. Kept with the request, because a client that comes back says nothing of it."""

    reading: Reading = Reading()
    include_reasoning: bool = True


class Asked(NamedTuple):
    """`context_ids`: the end of the prompt where the output goes on with its text. `grammar_field`: the frame's name
    for the grammar, under which one that does not compile is refused."""

    prompt_ids: list[int]
    params: SamplingParams
    grammar: GrammarSpec | None
    grammar_field: str
    context_ids: list[int]
    told: Told


async def read_asked(frame: Generate, model: ServedModel, config: Config) -> Asked:
    """Raises InvalidRequest naming the field."""
    params = from_map({**model.defaults, **frame.params})
    validate(params, vocab_size=model.info.vocab_size, limits=config.limits)
    grammar = read_grammar(frame.structure)
    grammar_field = next(iter(frame.structure), "grammar")
    if grammar is not None:
        validate_grammar(grammar, config.limits, path=grammar_field)
    if frame.messages is None:
        prompt_ids = await _prompt_ids(frame, model, config)
        return Asked(prompt_ids, params, grammar, grammar_field, prompt_ids[-CONTEXT_TOKENS:], Told())
    turn = await read_turn({"messages": frame.messages, **frame.conversation}, model, config, grammar)
    if turn.reading.keeps_special_tokens:
        params = replace(params, skip_special_tokens=False)
    if turn.grammar is not grammar:
        grammar_field = "tools"
    told = Told(turn.reading, flag(frame.conversation, "include_reasoning", True))
    return Asked(turn.prompt_ids, params, turn.grammar, grammar_field, [], told)


async def _prompt_ids(frame: Generate, model: ServedModel, config: Config) -> list[int]:
    if frame.prompt_ids is not None:
        name, token_ids = "prompt_ids", frame.prompt_ids
    else:
        assert frame.prompt is not None
        name, token_ids = "prompt", await model.encode(frame.prompt, config.limits, name="prompt")
    if not token_ids:
        raise InvalidRequest(name, "must hold at least one token")
    return token_ids


def make_note(key: ApiKey, told: Told) -> bytes:
    """What the engine keeps with the request; nothing where nothing needs to be known."""
    if told.reading.is_plain:
        return write_note(Note(key.tenant)) if key.tenant else b""
    kept = {"reading": reading_to_map(told.reading), "include_reasoning": told.include_reasoning}
    return write_note(Note(key.tenant, NOTE_PATH, body=json.dumps(kept).encode()))


def told_by(note: bytes) -> Told:
    """The inverse. A request that came over HTTP, or from a producer, is told as its text stands."""
    read = read_note(note)
    if read.path != NOTE_PATH:
        return Told()
    try:
        kept = parse_object(read.request_body(MAX_KEPT_BYTES))
    except InvalidRequest:
        return Told()
    return Told(reading_from_map(kept.get("reading")), kept.get("include_reasoning") is not False)
