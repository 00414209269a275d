"""The prompt, parameters and output options of a generate frame.

Conversations are read by the code of /v1/chat/completions, so both front ends give the model the same prompt.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from frontends.common.auth import ApiKey
from frontends.common.chat import OutputParser, parser_from_map, parser_to_map, read_chat_prompt
from frontends.common.generation import CONTEXT_TOKENS
from frontends.common.json import parse_object
from frontends.common.model import ServedModel
from frontends.common.resumable import RequestMetadata, pack_metadata, unpack_metadata
from frontends.websocket.frames import GenerateFrame
from inferengine.config import Config
from inferengine.errors import InvalidRequest
from inferengine.sampling_params import SamplingParams, from_map, validate
from inferengine.structured_output.spec import GrammarSpec, read_grammar, validate_grammar

NOTE_PATH = "websocket"  # no HTTP route has this path
MAX_KEPT_BYTES = 4096


class OutputOptions(NamedTuple):
    """How the text of an answer is split. Kept in the request's metadata, because a resume frame does not have it."""

    parser: OutputParser = OutputParser()
    include_reasoning: bool = True


class GenerateParams(NamedTuple):
    """What a generate frame submits. `context_ids`: the end of a prompt that the output continues. `grammar_field`: the
    frame's field of the grammar, for errors."""

    prompt_ids: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None
    grammar_field: str
    context_ids: list[int]
    output: OutputOptions


async def read_generate_params(frame: GenerateFrame, model: ServedModel, config: Config) -> GenerateParams:
    """Read a generate frame. Raises InvalidRequest naming the field."""
    params = from_map({**model.defaults, **frame.params})
    validate(params, vocab_size=model.info.vocab_size, limits=config.limits)
    structure = frame.structure
    grammar = read_grammar(structure)
    grammar_field = next(iter(structure), "grammar")
    if grammar is not None:
        validate_grammar(grammar, config.limits, path=grammar_field)
    if frame.messages is None:
        prompt_ids = await _prompt_ids(frame, model, config)
        return GenerateParams(prompt_ids, params, grammar, grammar_field, prompt_ids[-CONTEXT_TOKENS:], OutputOptions())
    prompt = await read_chat_prompt({"messages": frame.messages, **frame.conversation}, model, config, grammar)
    params = prompt.adjusted(params)
    if prompt.grammar is not grammar:
        grammar_field = "tools"
    output = OutputOptions(prompt.parser, frame.include_reasoning)
    return GenerateParams(prompt.prompt_ids, params, prompt.grammar, grammar_field, [], output)


async def _prompt_ids(frame: GenerateFrame, model: ServedModel, config: Config) -> list[int]:
    if frame.prompt_ids is not None:
        prompt_ids: list[int] = frame.prompt_ids
        return prompt_ids
    assert frame.prompt is not None
    token_ids = await model.encode(frame.prompt, config.limits, name="prompt")
    if not token_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    return token_ids


def make_metadata(key: ApiKey, output: OutputOptions) -> bytes:
    """Return the metadata that the engine keeps with the request; empty where none is needed."""
    if output.parser.is_plain:
        return pack_metadata(RequestMetadata(key.tenant)) if key.tenant else b""
    kept = {"reading": parser_to_map(output.parser), "include_reasoning": output.include_reasoning}
    return pack_metadata(RequestMetadata(key.tenant, NOTE_PATH, body=json.dumps(kept).encode()))


def output_options_of(note: bytes) -> OutputOptions:
    """Return the options in a request's metadata. The text of requests from HTTP and producers is not split."""
    read = unpack_metadata(note)
    if read.path != NOTE_PATH:
        return OutputOptions()
    try:
        kept = parse_object(read.request_body(MAX_KEPT_BYTES))
    except InvalidRequest:
        return OutputOptions()
    return OutputOptions(parser_from_map(kept.get("reading")), kept.get("include_reasoning") is not False)
