"""A conversation on its way to the model and back: messages and tools become a prompt, the output becomes a message.

All chat dialects are brought into OpenAI's shape first, so that there is one place which knows what a turn is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from frontends.common import fields
from frontends.common.model_context import ServedModel
from frontends.common.reading import Reading
from frontends.common.tools import Tools, read_tools, tools_grammar
from inferengine.config import Config
from inferengine.errors import InvalidRequest
from inferengine.structure import GrammarSpec
from inferengine.text import check_messages
from inferengine.text.chat_template import RESERVED as TEMPLATE_NAMES
from inferengine.text.reasoning import CLOSE, OPEN
from inferengine.text.tool_parsers import FORMATS, ToolFormat, detect
from inferengine.text.tool_prompt import with_tools

RESERVED = TEMPLATE_NAMES | {"self", "continue_final_message"}  # what a request's chat_template_kwargs may not replace


@dataclass(frozen=True)
class Turn:
    """What the model is asked, and how its output is to be read."""

    prompt_ids: list[int]
    tools: Tools | None
    grammar: GrammarSpec | None
    reading: Reading


async def read_turn(
    body: dict[str, Any],
    served: ServedModel,
    config: Config,
    structure: GrammarSpec | None = None,
    *,
    last: int | None = None,
    most: int | None = None,
) -> Turn:
    """`messages`, `tools` and what shapes the prompt. `structure` is what the request itself wants of the output;
    `last` and `most` are for `ServedModel.encode`. A grammar governs an output from its first token, so that there is
    no room for reasoning."""
    tools = read_tools(body, config.limits)
    format = _format(served, config)
    text = await _render(body, served, tools)
    thinks, inside = _reasoning(text, served, config)
    grammar = structure
    if tools is not None and (tools.is_forced or structure is not None):
        answer = None if tools.is_forced or structure is None else _answer_schema(structure)
        grammar = tools_grammar(tools, format, served, config.limits, answer)
    if grammar is not None:
        text = f"{text.rstrip()}\n\n{CLOSE}\n\n" if inside else text
        thinks = inside = False
    special = fields.flag(body, "add_special_tokens")  # the template writes them itself
    prompt_ids = await served.encode(
        text, config.limits, name="messages", add_special_tokens=special, last=last, most=most
    )
    if not prompt_ids:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    keeps = tools is not None and any(_is_special(served, mark) for mark in format.marks)
    reading = Reading(None if tools is None else format, thinks, inside, keeps)
    return Turn(prompt_ids, tools, grammar, reading)


async def _render(body: dict[str, Any], served: ServedModel, tools: Tools | None) -> str:
    messages = check_messages(body.get("messages"))
    continue_final = fields.flag(body, "continue_final_message")
    kwargs = fields.mapping(body, "chat_template_kwargs")
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest("chat_template_kwargs", f"{name} cannot be set this way")
    if (effort := fields.string(body, "reasoning_effort")) is not None:
        kwargs = {**kwargs, "reasoning_effort": effort}
    definitions = [] if tools is None else tools.definitions
    if served.template is not None and not served.template.reads_tools and _speaks_of_tools(messages, tools):
        messages, definitions = with_tools(messages, definitions), []
    return await served.render(
        messages,
        tools=definitions,
        documents=_read_documents(body),
        add_generation_prompt=fields.flag(body, "add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        **kwargs,
    )


def _format(served: ServedModel, config: Config) -> ToolFormat:
    if config.http.tool_parser != "auto":
        return FORMATS[config.http.tool_parser]
    found = detect(served.template.source) if served.template is not None else None
    return found or FORMATS["hermes"]


def _reasoning(prompt: str, served: ServedModel, config: Config) -> tuple[bool, bool]:
    """Whether this model thinks, and whether the prompt ends in the middle of it. Where the prompt has closed the tag
    (thinking switched off), the output is the answer."""
    mode = config.http.reasoning_parser
    if mode == "off" or (mode == "auto" and (served.template is None or CLOSE not in served.template.source)):
        return False, False
    end = prompt.rstrip()
    return not end.endswith(CLOSE), end.endswith(OPEN)


def _answer_schema(structure: GrammarSpec) -> dict[str, Any]:
    """The form of an answer that may also be calls of tools."""
    if structure.kind not in ("json_schema", "json_object"):
        raise InvalidRequest("tools", "can be combined with a JSON schema only", code="unsupported")
    schema = json.loads(structure.source) if structure.kind == "json_schema" else {"type": "object"}
    return schema if isinstance(schema, dict) else {}


def _speaks_of_tools(messages: list[dict[str, Any]], tools: Tools | None) -> bool:
    return tools is not None or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _is_special(served: ServedModel, mark: str) -> bool:
    token_id = served.tokenizer.token_to_id(mark)
    return token_id is not None and served.tokenizer.is_special(token_id)


def _read_documents(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    documents = body.get("documents")
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
        raise InvalidRequest("documents", "must be a list of objects")
    return documents
