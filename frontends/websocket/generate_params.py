"""What a generate frame asks of the engine: its prompt, its parameters, and how the output is to be read.

A conversation goes through the code that serves /v1/chat/completions, so that both say the same to the model.

One choice's text taken apart for the frames: what is for the user, what was thought, and which tools are called.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from frontends.common.auth import ApiKey
from frontends.common.chat import read_chat_prompt
from frontends.common.generation import CONTEXT_TOKENS, Piece
from frontends.common.json import flag, parse_object
from frontends.common.model import ServedModel
from frontends.common.output_parsing import OutputParser, finish_reason, parser_from_map, parser_to_map
from frontends.common.resumable.metadata import RequestMetadata, pack_metadata, unpack_metadata
from frontends.websocket.frames import Generate
from inferengine.config import Config
from inferengine.errors import InvalidRequest
from inferengine.sampling_params import SamplingParams, from_map, validate
from inferengine.structured_output.spec import GrammarSpec, read_grammar, validate_grammar
from inferengine.text.tool_parsers.base import CallDelta, Content

NOTE_PATH = "websocket"  # no HTTP route has this path
MAX_KEPT_BYTES = 4096


class Told(NamedTuple):
    """How an answer is told. Kept with the request, because a client that comes back says nothing of it."""

    reading: OutputParser = OutputParser()
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
    prompt = await read_chat_prompt({"messages": frame.messages, **frame.conversation}, model, config, grammar)
    if prompt.parser.keeps_special_tokens:
        params = params.replace(skip_special_tokens=False)
    if prompt.grammar is not grammar:
        grammar_field = "tools"
    told = Told(prompt.parser, flag(frame.conversation, "include_reasoning", True))
    return Asked(prompt.prompt_ids, params, prompt.grammar, grammar_field, [], told)


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
        return pack_metadata(RequestMetadata(key.tenant)) if key.tenant else b""
    kept = {"reading": parser_to_map(told.reading), "include_reasoning": told.include_reasoning}
    return pack_metadata(RequestMetadata(key.tenant, NOTE_PATH, body=json.dumps(kept).encode()))


def told_by(note: bytes) -> Told:
    """The inverse. A request that came over HTTP, or from a producer, is told as its text stands."""
    read = unpack_metadata(note)
    if read.path != NOTE_PATH:
        return Told()
    try:
        kept = parse_object(read.request_body(MAX_KEPT_BYTES))
    except InvalidRequest:
        return Told()
    return Told(parser_from_map(kept.get("reading")), kept.get("include_reasoning") is not False)


class MessageText:
    """`answer_id` names the calls: the request's own id, so that a resumed answer gives them the same ids."""

    def __init__(self, told: Told, answer_id: str, choice: int) -> None:
        self._told = told
        self._answer_id = answer_id
        self._choice = choice
        self._reader = told.reading.make_reader()

    def read(self, piece: Piece) -> tuple[Piece, dict[str, Any]]:
        """The piece with the user's text alone, and what a frame carries beside it: `reasoning_content` and
        `tool_calls`, as in OpenAI's streamed deltas."""
        text = reasoning = ""
        calls = []
        for part in self._reader.push(piece.text, piece.is_last):
            if isinstance(part, Content):
                text += part.text
            elif isinstance(part, CallDelta):
                calls.append(self._told.reading.call_entry(self._answer_id, self._choice, part))
            elif self._told.include_reasoning:
                reasoning += part.text
        beside: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            beside["tool_calls"] = calls
        reason = finish_reason(piece.finish_reason, self._reader.num_calls)
        return piece._replace(text=text, finish_reason=reason), beside
