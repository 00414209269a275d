"""Turn a conversation into a prompt, and the output into a message with reasoning and tool calls.

All chat dialects are converted to OpenAI's fields first: `messages`, `tools`, `tool_choice`, `parallel_tool_calls`. An
`OutputParser` describes how the output of a prompt is parsed. The engine keeps it with the request, so that any front
end can resume in the middle of a tool call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec

from frontends.common.json import read_fields
from frontends.common.model import ServedModel
from inferengine.config import Config, LimitsConfig
from inferengine.errors import InvalidRequest
from inferengine.fields import about
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec, validate_grammar
from inferengine.text import check_messages
from inferengine.text.chat_template import RESERVED as TEMPLATE_NAMES
from inferengine.text.chat_template import with_tools
from inferengine.text.output_parser import (
    FORMATS,
    REASONING,
    Function,
    MessageReader,
    ReasoningFormat,
    ReasoningReader,
    ToolFormat,
    calls_grammar,
    detect,
    reasoning_format,
    strings_of,
)
from inferengine.text.tool_parsers.base import CallDelta
from inferengine.text.tool_parsers.custom import as_function

MAX_TOOLS = 128  # OpenAI's limit
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
BOOLEAN: Schema = {"type": "boolean"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
TEXT: Schema = {"type": "string", "minLength": 1}


def array(items: Schema, *, least: int = 0, most: Any = None) -> Schema:
    """Return the JSON schema of a list. `most` may be {"limit": name}."""
    return {"type": "array", "items": items, "minItems": least, **({} if most is None else {"maxItems": most})}


TEXT_PARTS = array({"type": "object", "properties": {"type": {"enum": ["text"]}, "text": STRING}, "required": ["text"]})
MESSAGES = array(
    {
        "type": "object",
        "properties": {"role": STRING, "content": {"anyOf": [STRING, TEXT_PARTS]}},
        "required": ["role", "content"],
    },
    least=1,
)
FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": r"^[\w.-]{1,128}$"}, "parameters": OBJECT},
    "required": ["name"],
}
TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "function": FUNCTION},
    "required": ["function"],
}
CUSTOM_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom"]},
        "custom": {
            "type": "object",
            "properties": {
                "name": FUNCTION["properties"]["name"],
                "description": STRING,
                "format": {"type": "object", "properties": {"type": {"enum": ["text", "grammar"]}}},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "custom"],
}
TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]}


class Conversation(msgspec.Struct, frozen=True):
    """The fields of a conversation and of its chat template, for every route that has them."""

    messages: Annotated[
        Any,
        about(
            "the conversation, through the model's chat template",
            schema=MESSAGES,
            also=["must be an object with role and content"],
        ),
    ] = None
    tools: Annotated[
        Any,
        about(
            "functions, and custom tools, which take a text, that may be called",
            schema=array({"anyOf": [TOOL, CUSTOM_TOOL]}, most=MAX_TOOLS),
            also=[
                'must be {"type": "function", "function": {…}}',
                'must be {"type": "custom", "custom": {"name": …}}',
                "must have 1 to 128 letters, digits, _, - and .",
            ],
        ),
    ] = None
    tool_choice: Annotated[
        Any,
        about(
            "whether, or which, to call",
            schema=TOOL_CHOICE,
            also=[
                'must be none, auto, required or {"type": "function", "function": {"name"}}',
                "needs tools to choose from",
            ],
        ),
    ] = None
    parallel_tool_calls: Annotated[bool, about("more than one call in an answer")] = True
    add_generation_prompt: Annotated[bool | None, about("end the prompt where the assistant begins")] = None
    continue_final_message: Annotated[bool, about("end the prompt inside the last message")] = False
    chat_template_kwargs: Annotated[dict[str, Any], about("variables for the chat template")] = {}
    documents: Annotated[
        Any, about("given to the chat template", schema=array(OBJECT), also=["must be a list of objects"])
    ] = None
    reasoning_effort: Annotated[str | None, about("given to the chat template")] = None


class SpecialTokens(msgspec.Struct, frozen=True):
    """Special tokens of the tokenizer. None: added to a text, not to a conversation."""

    add_special_tokens: Annotated[bool | None, about("let the tokenizer add its own, such as BOS")] = None


class Tools(NamedTuple):
    """The functions that may be called. `choice`: auto, required, or the name of the one function to call. `custom`:
    the names of those that are custom tools, told as such."""

    definitions: list[dict[str, Any]]
    functions: list[Function]
    choice: str
    parallel: bool
    custom: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        """Whether the output must be calls only."""
        return self.choice != "auto"


def read_tools(body: dict[str, Any], limits: LimitsConfig) -> Tools | None:
    """Return the tools of a request, None where none may be called. Raises InvalidRequest naming the place."""
    definitions = body.get("tools")
    allowed = _read_allowed(body.get("tool_choice"))
    choice = allowed.mode if allowed is not None else _read_choice(body.get("tool_choice"))
    parallel = read_fields(Conversation, body).parallel_tool_calls
    if definitions is None or definitions == []:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice", "needs tools to choose from")
        return None
    if not isinstance(definitions, list) or len(definitions) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be a list of at most {MAX_TOOLS} tools")
    functions, custom = _read_functions(definitions, limits)
    definitions = [
        _shown_custom(item, f"tools[{place}]") if _is_custom(item) else item for place, item in enumerate(definitions)
    ]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "must have names that differ")
    if allowed is not None:
        return _only(allowed, definitions, functions, parallel)._replace(custom=custom)
    if choice == "none":
        return None
    if choice not in (None, "auto", "required") and choice not in names:
        raise InvalidRequest("tool_choice", f"there is no tool named {choice[:64]}")
    return Tools(definitions, functions, choice or "auto", parallel, custom)


def tools_grammar(
    tools: Tools, format: ToolFormat, served: ServedModel, limits: LimitsConfig, answer: dict[str, Any] | None = None
) -> GrammarSpec:
    """Return the grammar of an output that is calls of tools or, with `answer`, JSON of that schema."""
    functions = [one for one in tools.functions if tools.choice in ("auto", "required", one.name)]

    def special_id(text: str) -> int | None:
        token_id = served.tokenizer.token_to_id(text)
        return token_id if token_id is not None and served.tokenizer.is_special(token_id) else None

    parallel = tools.parallel and tools.choice in ("auto", "required")
    source = calls_grammar(format, functions, parallel=parallel, special_id=special_id, answer=answer)
    spec = GrammarSpec("lark", source)
    validate_grammar(spec, limits, path="tools")
    return spec


class AllowedTools(NamedTuple):
    """OpenAI's tool_choice of type allowed_tools. `mode`: auto or required."""

    mode: str
    names: list[str]


def _read_allowed(value: Any) -> AllowedTools | None:
    """Read a tool_choice of that type, written as chat or as Responses write it; None for any other."""
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return None
    inner = value.get("allowed_tools", value)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest("tool_choice", "allowed_tools must have a mode, auto or required, and tools")
    named = [tool.get(_kind(tool), tool) if isinstance(tool, dict) else None for tool in tools]
    names = [one.get("name") if isinstance(one, dict) else None for one in named]
    found = [name for name in names if isinstance(name, str)]
    if len(found) < len(names):
        raise InvalidRequest("tool_choice", "allowed_tools must name functions or custom tools")
    return AllowedTools(mode, found)


def _only(allowed: AllowedTools, definitions: list[Any], functions: list[Function], parallel: bool) -> Tools:
    """Return the tools that may be called. With `required` the grammar keeps to them, and the model is shown all, as
    the API means it (the beginning of the prompt stays in the cache). With `auto` it is shown those alone."""
    for name in allowed.names:
        if all(function.name != name for function in functions):
            raise InvalidRequest("tool_choice", f"there is no tool named {name[:64]}")
    keeps = [function.name in allowed.names for function in functions]
    chosen = [function for function, keep in zip(functions, keeps, strict=True) if keep]
    if allowed.mode == "auto":
        definitions = [definition for definition, keep in zip(definitions, keeps, strict=True) if keep]
    return Tools(definitions, chosen, allowed.mode, parallel)


def _read_choice(value: Any) -> str | None:
    if value is None or value in ("auto", "none", "required"):
        return None if value is None else str(value)
    is_named = isinstance(value, dict) and value.get("type", "function") in ("function", "custom")
    function = value.get(_kind(value)) if is_named else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name"}}'
        )
    return name


def _kind(tool: dict[str, Any]) -> str:
    """Return the key that has a tool's name."""
    return "custom" if tool.get("type") == "custom" else "function"


def _is_custom(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "custom"


def _shown_custom(item: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the definition of the function that a custom tool is for the model."""
    custom = item.get("custom")
    if not isinstance(custom, dict):
        raise InvalidRequest(path, 'must be {"type": "custom", "custom": {"name": …}}')
    function = {"name": custom.get("name"), **as_function(custom, f"{path}.custom")}
    return {"type": "function", "function": function}


def _read_functions(definitions: list[Any], limits: LimitsConfig) -> tuple[list[Function], frozenset[str]]:
    """Return what the tools are for the model, and the names of the custom ones among them."""
    functions, custom = [], []
    for place, item in enumerate(definitions):
        path = f"tools[{place}]"
        if not _is_custom(item):
            functions.append(_read_function(item, path, limits))
            continue
        try:
            functions.append(_read_function(_shown_custom(item, path), path, limits))
        except InvalidRequest as error:  # that function is not the request's
            if error.field == f"{path}.function.parameters":
                error.field = f"{path}.custom.format"
            elif error.field == f"{path}.function.name":
                error.field = f"{path}.custom.name"
            raise
        custom.append(functions[-1].name)
    return functions, frozenset(custom)


def _read_function(item: Any, path: str, limits: LimitsConfig) -> Function:
    if not isinstance(item, dict) or item.get("type", "function") != "function":
        raise InvalidRequest(path, 'must be {"type": "function", "function": {…}}')
    function = item.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function", "must be an object with a name")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{path}.function.name", "must have 1 to 128 letters, digits, _, - and .")
    if parameters is None:
        return Function(name, NO_PARAMETERS)
    path = f"{path}.function.parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(path, "must be the JSON schema of an object")
    try:
        schema = json.dumps(parameters)
    except (ValueError, RecursionError):
        raise InvalidRequest(path, "is nested too deep") from None
    validate_grammar(GrammarSpec("json_schema", schema), limits, path=path)
    return Function(name, parameters)


RESERVED = TEMPLATE_NAMES | {"self", "continue_final_message"}  # not allowed in chat_template_kwargs


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a conversation, and how its output is parsed. `stop_ids`: tokens that end such a model's output,
    beside the checkpoint's own."""

    prompt_ids: list[int]
    tools: Tools | None
    grammar: GrammarSpec | None
    parser: OutputParser
    stop_ids: tuple[int, ...] = ()

    def adjusted(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with what the parser needs of the output."""
        if self.parser.keeps_special_tokens:
            params = params.replace(skip_special_tokens=False)
        if self.stop_ids and not params.ignore_eos:
            params = params.replace(stop_token_ids=(*params.stop_token_ids, *self.stop_ids))
        return params


async def read_chat_prompt(
    body: dict[str, Any],
    served: ServedModel,
    config: Config,
    structure: GrammarSpec | None = None,
    *,
    last: int | None = None,
    most: int | None = None,
) -> ChatPrompt:
    """Make the prompt of `messages`, `tools` and the other fields of a conversation. `structure`: the grammar that the
    request asks for. `last`, `most`: see `ServedModel.tokenize`. A grammar applies from the first token of the output,
    so there is no reasoning with one. Raises InvalidRequest naming the field."""
    tools = read_tools(body, config.limits)
    format = _format(served, config)
    text = await _render(body, served, tools)
    reasoning, inside = _reasoning(text, served, config)
    stops = (*format.stops, *(() if reasoning is None else reasoning.stops))
    found = {_special_id(served, stop) for stop in stops}
    stop_ids = tuple(sorted(token_id for token_id in found if token_id is not None))
    grammar = structure
    if tools is not None and (tools.is_forced or structure is not None):
        answer = None if tools.is_forced or structure is None else _answer_schema(structure)
        grammar = tools_grammar(tools, format, served, config.limits, answer)
    if grammar is not None:
        text = f"{text.rstrip()}\n\n{reasoning.closes[0]}\n\n" if inside and reasoning is not None else text
        if reasoning is not None and grammar is structure:
            text += reasoning.answer
        reasoning, inside = None, False
    special = bool(read_fields(SpecialTokens, body).add_special_tokens)  # templates write them
    prompt_ids = await served.encode(
        text, config.limits, name="messages", add_special_tokens=special, last=last, most=most
    )
    if not prompt_ids:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    marks = () if tools is None else format.marks
    marks += () if reasoning is None else (*reasoning.opens, *reasoning.closes, *reasoning.marks)
    keeps = any(_special_id(served, mark) is not None for mark in marks)
    if tools is None:
        parser = OutputParser(None, reasoning, inside, keeps)
    else:
        strings = strings_of(tools.functions) if format.has_bare_strings else {}
        parser = OutputParser(format, reasoning, inside, keeps, tools.custom, strings, tools.is_forced)
    return ChatPrompt(prompt_ids, tools, grammar, parser, stop_ids)


async def _render(body: dict[str, Any], served: ServedModel, tools: Tools | None) -> str:
    messages = check_messages(body.get("messages"))
    conversation = read_fields(Conversation, body)
    continue_final, kwargs = conversation.continue_final_message, conversation.chat_template_kwargs
    add_prompt = conversation.add_generation_prompt
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest("chat_template_kwargs", f"{name} cannot be set this way")
    if conversation.reasoning_effort is not None:
        kwargs = {**kwargs, "reasoning_effort": conversation.reasoning_effort}
    definitions = [] if tools is None else tools.definitions
    if served.template is not None and not served.template.reads_tools and _speaks_of_tools(messages, tools):
        messages, definitions = with_tools(messages, definitions), []
    return await served.render(
        messages,
        tools=definitions,
        documents=_read_documents(body),
        add_generation_prompt=(not continue_final) if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        **kwargs,
    )


def _format(served: ServedModel, config: Config) -> ToolFormat:
    if config.http.tool_parser != "auto":
        return FORMATS[config.http.tool_parser]
    found = detect(served.template.source) if served.template is not None else None
    return found or FORMATS["hermes"]


def _reasoning(prompt: str, served: ServedModel, config: Config) -> tuple[ReasoningFormat | None, bool]:
    """Return the format of the reasoning that the output may begin with, and whether the prompt has opened it. After a
    prompt that ends with the closing mark (reasoning switched off) there is none."""
    template = None if served.template is None else served.template.source
    format = reasoning_format(config.http.reasoning_parser, template)
    end = prompt.rstrip()
    if format is None or end.endswith(format.closes):
        return None, False
    return format, end.endswith(format.opens)


def _answer_schema(structure: GrammarSpec) -> dict[str, Any]:
    """Return the JSON schema of an answer where tools may be called instead."""
    if structure.kind not in ("json_schema", "json_object"):
        raise InvalidRequest("tools", "can be combined with a JSON schema only", code="unsupported")
    schema = json.loads(structure.source) if structure.kind == "json_schema" else {"type": "object"}
    return schema if isinstance(schema, dict) else {}


def _speaks_of_tools(messages: list[dict[str, Any]], tools: Tools | None) -> bool:
    return tools is not None or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _special_id(served: ServedModel, mark: str) -> int | None:
    """Return the id of a special token; None for any other text."""
    token_id = served.tokenizer.token_to_id(mark)
    return token_id if token_id is not None and served.tokenizer.is_special(token_id) else None


def _read_documents(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    documents = body.get("documents")
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
        raise InvalidRequest("documents", "must be a list of objects")
    return documents


@dataclass(frozen=True)
class OutputParser:
    """How the output of a prompt is parsed. `calls`: the format of tool calls, None where none may come. `reasoning`:
    that of the reasoning which the output may begin with. `inside`: the prompt has opened it. `keeps_special_tokens`:
    marks of either are special tokens. `custom`: the names of tools that take a text. `strings`: by function, the
    parameters that are strings, where the format of calls does not show it. `only_calls`: the grammar allows nothing
    else."""

    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    keeps_special_tokens: bool = False
    custom: frozenset[str] = frozenset()
    strings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    only_calls: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the output needs no parsing."""
        return self.calls is None and self.reasoning is None

    def make_reader(self) -> MessageReader:
        """Return a new parser state for one output."""
        if self.calls is not None and self.calls.reads_reasoning:
            tools = self.calls.make_parser(self.strings)
            return MessageReader(None, tools, self.custom, only_calls=self.only_calls)
        if self.reasoning is not None and self.reasoning.make_reader is not None:
            return MessageReader(self.reasoning.make_reader(), None)
        return MessageReader(
            ReasoningReader(inside=self.inside, format=self.reasoning) if self.reasoning is not None else None,
            self.calls.make_parser(self.strings) if self.calls is not None else None,
            self.custom,
            only_calls=self.only_calls,
        )

    def call_id(self, answer_id: str, choice: int, call: int) -> str:
        """Return the id of a call. It is the same when the same answer is read again, as after a reconnect."""
        assert self.calls is not None
        digest = hashlib.sha256(f"{answer_id}/{choice}/{call}".encode()).hexdigest()[: self.calls.id_characters]
        # Formats with short ids need exactly that length, without a prefix.
        return digest if len(digest) < 16 else f"call_{digest}"

    def call_entry(self, answer_id: str, choice: int, part: CallDelta) -> dict[str, Any]:
        """Return an entry of a streamed `tool_calls`. The first of a call has its id and name."""
        if part.name is not None:
            return {"index": part.call, **self.call(answer_id, choice, part.call, part.name, part.arguments)}
        if part.is_custom:
            return {"index": part.call, "custom": {"input": part.arguments}}
        return {"index": part.call, "function": {"arguments": part.arguments}}

    def call(self, answer_id: str, choice: int, call: int, name: str, arguments: str) -> dict[str, Any]:
        """Return a whole call. `arguments`: JSON text, or the text for a custom tool."""
        head = {"id": self.call_id(answer_id, choice, call)}
        if name in self.custom:
            return {**head, "type": "custom", "custom": {"name": name, "input": arguments}}
        return {**head, "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(reason: str | None, num_calls: int) -> str | None:
    """Return the finish reason of a message: `tool_calls` instead of `stop` where it has calls."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def parser_to_map(parser: OutputParser) -> dict[str, Any]:
    """Return a parser as a dict for RequestMetadata."""
    kept = {
        "calls": None if parser.calls is None else parser.calls.name,
        "thinks": None if parser.reasoning is None else parser.reasoning.name,
        "inside": parser.inside,
        "special": parser.keeps_special_tokens,
        "custom": sorted(parser.custom),
        "only_calls": parser.only_calls,
    }
    return {**kept, "strings": dict(parser.strings)} if parser.strings else kept


def parser_from_map(kept: Any) -> OutputParser:
    """Return the parser of a dict from `parser_to_map`; the plain one for anything else."""
    if not isinstance(kept, dict):
        return OutputParser()
    calls, thinks, custom, strings = (kept.get(key) for key in ("calls", "thinks", "custom", "strings"))
    thinks = "think" if thinks is True else thinks  # as versions before several formats wrote it
    return OutputParser(
        FORMATS.get(calls) if isinstance(calls, str) else None,
        REASONING.get(thinks) if isinstance(thinks, str) else None,
        kept.get("inside") is True,
        kept.get("special") is True,
        frozenset(name for name in custom if isinstance(name, str)) if isinstance(custom, list) else frozenset(),
        {
            str(name): [key for key in keys if isinstance(key, str)]
            for name, keys in strings.items()
            if isinstance(keys, list)
        }
        if isinstance(strings, dict)
        else {},
        kept.get("only_calls") is True,
    )
