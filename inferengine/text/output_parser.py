"""Splits an assistant's output into reasoning, content and tool calls, while it is being generated.

FORMATS are the formats in which models write tool calls; a new one is a file in tool_parsers/ and a line there.
`calls_grammar` allows nothing but calls in one of them. REASONING are the ways in which models mark what they think.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inferengine.text.tool_parsers import (
    cohere,
    gemma4,
    harmony,
    hermes,
    json_list,
    llama3_json,
    marked,
    mistral,
    pythonic,
    xml,
)
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning, shown_end, split_at_mark
from inferengine.text.tool_parsers.custom import CustomCalls

# -- formats of tool calls ---------------------------------------------------------------------------------------------


MAX_CALLS = 8  # in one answer: a model that does not stop would call for ever
# The style of JSON that models were trained on. Without it a model could write white space for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolParser(Protocol):
    """Parses one output. The joined parts do not depend on how the text is cut into pushes."""

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text. Returns the parts that it completes; `final`: nothing follows, so nothing stays held back.

        `cut`, only with `final`: the output was cut off, by max_tokens say. The beginning of a call is then no content:
        it is a call with its arguments as far as they came, and nothing where its name, or the mark before it, is not
        complete."""
        ...


Strings = Mapping[str, Collection[str]]  # by function: the parameters that are strings


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls. `call` is the text of one, with {name} (quoted) or {bare_name}, and
    {arguments} to fill in, and {number}, any; or {parameters}, which are then written one by one as `parameter`, with
    {key} and {value}; as `quoted_parameter`, with {key} as a JSON text, where `bare_key` does not match all of the key.
    Several calls have `between` between them; `before` and `after` enclose them all."""

    name: str
    make_parser: Callable[[Strings], ToolParser]
    call: str
    between: str
    before: str = ""
    after: str = ""
    marks: tuple[str, ...] = ()  # parts of the text that are special tokens in some vocabularies
    signs: tuple[str, ...] = ()  # texts in the chat template of such a model: one of them
    needs: tuple[str, ...] = ()  # and all of these
    parameter: str = ""
    parameter_between: str = ""
    bare_key: re.Pattern[str] | None = None  # None: every key
    quoted_parameter: str = ""
    has_bare_strings: bool = False  # values that are strings are written without quotes: the parser needs their names
    quote: str = ""  # what such a value has around it
    stops: tuple[str, ...] = ()  # special tokens that end an output, beside the checkpoint's own
    reads_reasoning: bool = False  # the parser takes whole outputs, with the marks of reasoning
    id_characters: int = 24  # of the ids of calls; some templates insist on a length


FORMATS = {
    format.name: format
    for format in (
        ToolFormat(
            "hermes",
            lambda strings: hermes.HermesParser(),
            call='<tool_call>\n{"name": {name}, "arguments": {arguments}}\n</tool_call>',
            between="\n",
            marks=hermes.MARKS,
            signs=(hermes.OPEN,),
        ),
        ToolFormat(
            "mistral",
            lambda strings: mistral.MistralParser(),
            call='{"name": {name}, "arguments": {arguments}}',
            between=", ",
            before="[TOOL_CALLS] [",
            after="]",
            marks=(mistral.MARK,),
            signs=(mistral.MARK,),
            id_characters=9,
        ),
        ToolFormat(
            "mistral_args",
            lambda strings: mistral.MistralParser(),
            call="[TOOL_CALLS]{bare_name}[ARGS]{arguments}",
            between="",
            marks=(mistral.MARK, mistral.ARGS),
            signs=(mistral.ARGS,),
            id_characters=9,
        ),
        ToolFormat(
            "llama3_json",
            lambda strings: llama3_json.Llama3JsonParser(),
            call='{"name": {name}, "parameters": {arguments}}',
            between="; ",
            marks=(llama3_json.TAG,),
            signs=(llama3_json.TAG, '"parameters": dictionary of argument name and its value'),
        ),
        ToolFormat(
            "harmony",
            lambda strings: harmony.HarmonyParser(),
            call="<|channel|>commentary to=functions.{bare_name} <|constrain|>json<|message|>{arguments}",
            between="<|end|><|start|>assistant",
            marks=harmony.MARKS,
            signs=(harmony.CHANNEL,),
            needs=(harmony.MESSAGE, harmony.FUNCTIONS),
            stops=harmony.STOPS,
            reads_reasoning=True,
        ),
        ToolFormat(
            "pythonic",
            lambda strings: pythonic.PythonicParser(),
            call="{bare_name}({parameters})",
            between=", ",
            before="[",
            after="]",
            signs=("[func_name1(",),
            parameter="{key}={value}",
            parameter_between=", ",
            bare_key=pythonic.BARE_NAME,
            quoted_parameter="**{{key}: {value}}",
        ),
        ToolFormat(
            "qwen3_coder",
            lambda strings: xml.XmlParser(xml.QWEN3_CODER, strings),
            call="<tool_call>\n<function={bare_name}>\n{parameters}</function>\n</tool_call>",
            between="\n",
            marks=hermes.MARKS,
            signs=("<function=",),
            needs=("<parameter=",),
            parameter="<parameter={key}>\n{value}\n</parameter>\n",
            has_bare_strings=True,
        ),
        ToolFormat(
            "glm45",
            lambda strings: xml.XmlParser(xml.GLM45, strings),
            call="<tool_call>{bare_name}\n{parameters}</tool_call>",
            between="\n",
            marks=(*hermes.MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            signs=("<arg_key>",),
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            has_bare_strings=True,
        ),
        ToolFormat(
            "deepseek_v3",
            lambda strings: marked.MarkedParser(marked.DEEPSEEK),
            call=(
                f"{marked.DEEPSEEK.call}function{marked.DEEPSEEK.separator}{{bare_name}}\n```json\n{{arguments}}\n```"
                f"{marked.DEEPSEEK.call_end}"
            ),
            between="\n",
            before=marked.DEEPSEEK.calls,
            after=marked.DEEPSEEK.calls_end,
            marks=marked.DEEPSEEK.texts,
            signs=(marked.DEEPSEEK.separator,),
            needs=("```json",),
        ),
        ToolFormat(
            "deepseek_v31",
            lambda strings: marked.MarkedParser(marked.DEEPSEEK),
            call=f"{marked.DEEPSEEK.call}{{bare_name}}{marked.DEEPSEEK.separator}{{arguments}}{marked.DEEPSEEK.call_end}",
            between="",
            before=marked.DEEPSEEK.calls,
            after=marked.DEEPSEEK.calls_end,
            marks=marked.DEEPSEEK.texts,
            signs=(marked.DEEPSEEK.separator,),
        ),
        ToolFormat(
            "kimi_k2",
            lambda strings: marked.MarkedParser(marked.KIMI),
            call=(
                f"{marked.KIMI.call}functions.{{bare_name}}:{{number}}{marked.KIMI.separator}{{arguments}}"
                f"{marked.KIMI.call_end}"
            ),
            between="",
            before=marked.KIMI.calls,
            after=marked.KIMI.calls_end,
            marks=marked.KIMI.texts,
            signs=(marked.KIMI.separator,),
        ),
        ToolFormat(
            "phi4_mini",
            lambda strings: json_list.JsonListParser(json_list.PHI4),
            call='{"name": {name}, "arguments": {arguments}}',
            between=", ",
            before="<|tool_call|>[",
            after="]<|/tool_call|>",
            marks=("<|tool_call|>", "<|/tool_call|>"),
            signs=("<|tool|>",),
        ),
        ToolFormat(
            "granite",
            lambda strings: json_list.JsonListParser(json_list.GRANITE),
            call='{"name": {name}, "arguments": {arguments}}',
            between=", ",
            before="<|tool_call|>[",
            after="]",
            marks=("<|tool_call|>",),
            signs=("<|tool_call|>",),
        ),
        ToolFormat(
            "seed_oss",
            lambda strings: xml.XmlParser(xml.SEED_OSS, strings),
            call="<seed:tool_call>\n<function={bare_name}>\n{parameters}</function>\n</seed:tool_call>",
            between="\n",
            marks=(xml.SEED_OSS.opens, xml.SEED_OSS.closes),
            signs=(xml.SEED_OSS.opens,),
            parameter="<parameter={key}>{value}</parameter>\n",
            has_bare_strings=True,
        ),
        ToolFormat(
            "minimax_m2",
            lambda strings: xml.XmlParser(xml.MINIMAX_M2, strings),
            call='<invoke name="{bare_name}">\n{parameters}</invoke>',
            between="\n",
            before=f"{xml.MINIMAX_M2.opens}\n",
            after=f"\n{xml.MINIMAX_M2.closes}",
            marks=(xml.MINIMAX_M2.opens, xml.MINIMAX_M2.closes),
            signs=(xml.MINIMAX_M2.opens,),
            parameter='<parameter name="{key}">{value}</parameter>\n',
            has_bare_strings=True,
        ),
        ToolFormat(
            "cohere",
            lambda strings: cohere.CohereParser(),
            call='{"tool_call_id": "{number}", "tool_name": {name}, "parameters": {arguments}}',
            between=",\n    ",
            before=f"{cohere.ACTION[0]}[\n    ",
            after=f"\n]{cohere.ACTION[1]}",
            marks=cohere.MARKS,
            signs=(cohere.ACTION[0],),
            reads_reasoning=True,
        ),
        ToolFormat(
            "gemma4",
            lambda strings: gemma4.Gemma4Parser(),
            call=f"{gemma4.OPEN}call:{{bare_name}}{{{{parameters}}}}{gemma4.CLOSE}",
            between="",
            marks=gemma4.MARKS,
            signs=(f"{gemma4.OPEN}call:",),
            parameter="{key}:{value}",
            parameter_between=",",
            has_bare_strings=True,
            quote=gemma4.QUOTE,
            stops=(gemma4.RESPONSE,),
        ),
    )
}
_DETECTION_ORDER = (
    "harmony", "cohere", "gemma4", "seed_oss", "minimax_m2", "mistral_args", "mistral", "qwen3_coder", "glm45",
    "deepseek_v3", "deepseek_v31", "kimi_k2", "phi4_mini", "granite", "hermes", "pythonic", "llama3_json",
)  # fmt: skip


def detect(template: str) -> ToolFormat | None:
    """Return the tool format of a chat template; None where it has none."""
    for name in _DETECTION_ORDER:
        format = FORMATS[name]
        if any(sign in template for sign in format.signs) and all(need in template for need in format.needs):
            return format
    return None


# -- the grammar of calls ----------------------------------------------------------------------------------------------


class Function(NamedTuple):
    """A tool that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


def strings_of(functions: Sequence[Function]) -> dict[str, list[str]]:
    """Return the parameters of each function that are strings, for parsers of formats that write them bare."""
    found = {
        function.name: [key for key, schema in _properties(function).items() if _is_string(schema)]
        for function in functions
    }
    return {name: keys for name, keys in found.items() if keys}


def _properties(function: Function) -> dict[str, Any]:
    properties = function.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_string(schema: Any) -> bool:
    """Return whether a schema allows nothing but strings, and null."""
    if not isinstance(schema, dict):
        return False
    if (kinds := schema.get("type")) is not None:
        named = kinds if isinstance(kinds, list) else [kinds]
        return "string" in named and all(kind in ("string", "null") for kind in named)
    if isinstance(values := schema.get("enum"), list):
        return all(isinstance(value, str) for value in values)
    options = schema.get("anyOf") or schema.get("oneOf")
    return isinstance(options, list) and all(_is_string(option) or option == {"type": "null"} for option in options)


def calls_grammar(
    format: ToolFormat,
    functions: Sequence[Function],
    *,
    parallel: bool,
    special_id: Callable[[str], int | None],
    answer: dict[str, Any] | None = None,
) -> str:
    """Make a grammar for one call of one of `functions`, or several where `parallel`; with `answer`, a JSON text
    that matches this schema is allowed instead. The grammar is in llguidance's dialect of Lark. `special_id` returns
    the token id of a text that is a special token, whose characters the grammar cannot match, and None for any other
    text."""

    def text(characters: str) -> str:
        marks = "|".join(map(re.escape, sorted(format.marks, key=len, reverse=True)))
        atoms = []
        for piece in re.split(f"({marks})", characters) if marks else [characters]:
            token_id = special_id(piece) if piece in format.marks else None
            if piece:
                atoms.append(json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>")
        return " ".join(atoms)

    names = [f"call_{number}" for number in range(len(functions))]
    more = f"({text(format.between)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    lines = [
        "start: calls" if answer is None else "start: calls | answer",
        *([] if answer is None else [f"answer: {_json(answer)}"]),
        f"calls: {text(format.before)} call {more} {text(format.after)}",
        f"call: {' | '.join(names)}",
    ]
    for number, function in enumerate(functions):
        quoted = json.dumps(function.name, ensure_ascii=False)
        call = format.call.replace("{name}", quoted).replace("{bare_name}", function.name)
        if format.parameter:
            before, _, after = call.partition("{parameters}")
            written, rules = _parameters(format, function, text, f"value_{number}")
            lines += [f"call_{number}: {text(before)} {written} {text(after)}", *rules]
            continue
        before, _, after = call.partition("{arguments}")
        begin = " /[0-9]{1,4}/ ".join(map(text, before.split("{number}")))
        lines.append(f"call_{number}: {begin} arguments_{number} {text(after)}")
        schema = {"type": "object", **function.parameters, "x-tool": function.name}  # structured_output.json_grammar
        lines.append(f"arguments_{number}: {_json(schema)}")
    return "\n".join(lines) + "\n"


def _parameters(format: ToolFormat, function: Function, text: Callable[[str], str], rule: str) -> tuple[str, list[str]]:
    """Return (the parameters of a call, the rules of their values): those that are required, then any of the others."""
    required = function.parameters.get("required")
    names = [key for key in _properties(function) if isinstance(required, list) and key in required]
    optional = [key for key in _properties(function) if key not in names]
    shared = {key: function.parameters[key] for key in ("$defs", "definitions") if key in function.parameters}
    written, rules = [], []
    for place, key in enumerate([*names, *optional]):
        if format.bare_key is None or format.bare_key.fullmatch(key):
            shown, form = key, format.parameter
        else:
            shown, form = json.dumps(key, ensure_ascii=False), format.quoted_parameter
        before, _, after = form.partition("{value}")
        before = before.replace("{key}", shown)
        if format.quote and _is_string(_properties(function)[key]):
            before, after = before + format.quote, format.quote + after
        before = before if place == 0 else format.parameter_between + before
        value, schema = f"{rule}_{place}", _properties(function)[key]
        written.append(f"{text(before)} {value}")
        if not format.has_bare_strings or not _is_string(schema):
            schema = {**schema, **shared} if isinstance(schema, dict) else {}
            rules.append(f"{value}: {_json({**schema, 'x-tool': function.name})} {text(after)}")
        elif isinstance(options := schema.get("enum"), list):
            strings = [text(option) for option in options if isinstance(option, str) and option]
            rules.append(f"{value}: ({' | '.join(strings)}) {text(after)}")
        elif (end := text(after)).startswith("<[") or " <[" in end:  # a special token, which no text can be
            rules.append(f"{value}: /(?s:.*)/ {end}")
        else:
            ending = re.escape(after).replace("/", "\\/").replace("\\\n", "\\n").replace("\n", "\\n")
            rules.append(f"{value}[lazy]: /(?s:.*){ending}/")
    if format.parameter_between and optional and not names:  # one has no separator before it: only first ones first
        nested = ""
        for one in reversed(written):
            nested = f"({one} {nested})?"
        return nested, rules
    count = len(names)
    return " ".join([*written[:count], *(f"({one})?" for one in written[count:])]), rules


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"


# -- reasoning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReasoningFormat:
    """How models mark the reasoning that they write before they answer. The first of `opens` and `closes` is what the
    model's template writes."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    signs: tuple[str, ...]  # texts in the chat template of such a model
    make_reader: Callable[[], ToolParser] | None = (
        None  # of whole outputs, where reasoning is not only at the beginning
    )
    marks: tuple[str, ...] = ()  # parts of the above that are special tokens in some vocabularies
    stops: tuple[str, ...] = ()  # special tokens that end an output, beside the checkpoint's own
    answer: str = ""  # ends a prompt after which the answer comes at once


THINK = ReasoningFormat("think", ("<think>",), ("</think>",), ("</think>",))
REASONING = {
    format.name: format
    for format in (
        THINK,
        ReasoningFormat(
            "harmony",
            (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
            (f"{harmony.CHANNEL}final{harmony.MESSAGE}",),
            (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
            lambda: harmony.HarmonyParser(calls=False),
            harmony.MARKS,
            harmony.STOPS,
            answer=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        ),
        ReasoningFormat(
            "cohere",
            cohere.THINKING[:1],
            cohere.THINKING[1:],
            cohere.THINKING[1:],
            lambda: cohere.CohereParser(calls=False),
            cohere.MARKS,
        ),
        ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",), ("<|channel>thought",)),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), ("[/THINK]",)),
        ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), ("</seed:think>",)),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            ("Here is my thought process", "Here's my thought process"),
        ),
        ReasoningFormat("kimi", ("\u25c1think\u25b7",), ("\u25c1/think\u25b7",), ("\u25c1/think\u25b7",)),
    )
}


def reasoning_format(mode: str, template: str | None) -> ReasoningFormat | None:
    """Return the format that `http.reasoning_parser` names, or for `auto` the one of a chat template; None: none."""
    if mode != "auto":
        return REASONING.get(mode)
    formats = REASONING.values() if template is not None else ()
    return next((format for format in formats if any(sign in (template or "") for sign in format.signs)), None)


class ReasoningReader:
    """Splits reasoning from the answer in one output. `inside`: the prompt has opened the tag already. A tag inside the
    answer is text. White space next to the tags is dropped."""

    def __init__(self, *, inside: bool, format: ReasoningFormat = THINK) -> None:
        self._format = format
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._begun = False  # whether more than white space has been shown of the current side

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begin = text.lstrip()
            opened = next((mark for mark in self._format.opens if begin.startswith(mark)), None)
            may_open = any(mark.startswith(begin) for mark in self._format.opens)
            if opened is not None:
                self._state, text = "reasoning", begin[len(opened) :]
            elif may_open and not final:
                self._held = text
                return parts
            elif may_open and begin and not shown_end(begin, cut=cut):
                return parts
            else:
                self._state, self._begun = "answer", True
        if self._state == "reasoning":
            before, mark, rest = split_at_mark(text, self._format.closes)
            if final and mark is None:
                before, rest = before + shown_end(rest, cut=cut), ""
            if not self._begun:
                before = before.lstrip()
            shown = before.rstrip()
            if shown:
                self._begun = True
                parts.append(Reasoning(shown))
            if mark is None:
                self._held = before[len(shown) :] + rest
                return parts
            self._state, self._begun, text = "answer", False, rest
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if text:
            parts.append(Content(text))
        return parts


# -- whole outputs -----------------------------------------------------------------------------------------------------


class ParsedOutput:
    """A whole output, joined from its parts."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[tuple[str, str]] = []  # name, and arguments as JSON text or the text for a custom tool

    def add(self, parts: list[Part]) -> None:
        """Append parts."""
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif part.call == len(self.calls):
                self.calls.append((part.name or "", part.arguments))
            else:
                name, arguments = self.calls[part.call]
                self.calls[part.call] = (name, arguments + part.arguments)


class MessageReader:
    """Parses one output. Without a reasoning reader or a tool parser that kind of part is content. `custom`: the names
    of tools that take a text. `only_calls`: nothing else can come, so an unfinished call at the end is no content."""

    def __init__(
        self,
        reasoning: ReasoningReader | ToolParser | None,
        tools: ToolParser | None,
        custom: Collection[str] = (),
        *,
        only_calls: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._only_calls = only_calls
        self._custom = CustomCalls(custom) if custom else None
        self.num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        reasoning = self._reasoning
        split: list[Part] = [Content(text)] if reasoning is None else reasoning.push(text, final, cut=cut)
        if self._tools is None:
            return [part for part in split if not isinstance(part, Content) or part.text]
        parts: list[Part] = []
        for part in split:
            parts += self._tools.push(part.text) if isinstance(part, Content) else [part]
        if final:
            last = self._tools.push("", final=True, cut=cut)
            parts += [part for part in last if not self._only_calls or not isinstance(part, Content)]
        for part in parts:
            if isinstance(part, CallDelta):
                self.num_calls = part.call + 1
        return parts if self._custom is None else self._custom.push(parts, final)

    def read(self, text: str, *, cut: bool = False) -> ParsedOutput:
        """Parse a whole output at once; `cut`: as of ToolParser."""
        message = ParsedOutput()
        message.add(self.push(text, final=True, cut=cut))
        return message
