"""Chat templates: the operator's Jinja text, rendered in a sandbox with limits, as `transformers` would render it.

The environment (trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes, `raise_exception`,
`strftime_now`, the `generation` tag) follows transformers' apply_chat_template, because templates are written for it.

For models whose chat template does not support tools, `with_tools` describes them in the system message, in the prompt
format that Nous Research published with Hermes 2 Pro.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text.template_limits import (
    LIMITED_FILTERS,
    MOST_CHARACTERS,
    TooLarge,
    check_call,
    check_operator,
    check_text,
    limited,
)
from inferengine.text.tokenizer import read_json, special_token_strings
from inferengine.text.tool_parsers import marked
from inferengine.text.tool_parsers.custom import custom_arguments

MAX_OUTPUT_CHARACTERS = MOST_CHARACTERS
TIME_LIMIT_S = 10.0
MAX_ITEMS = 16_384  # messages of a conversation, and parts of a message
# Names that a request's chat_template_kwargs may not replace.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
_CONTINUE_MARK = "\ue000CONTINUE\ue001"  # private use characters: no template and no message contains them by chance
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names under which templates read earlier reasoning
MAX_ARGUMENT_DEPTH = 100  # of brackets in arguments that are no whole JSON
MAX_CUT_ARGUMENTS = 200_000  # characters of cut arguments that are read; a body of megabytes would take seconds
_JSON_PIECE = re.compile(r'"(?:[^"\\]+|\\.)*(?P<closed>")?|[{}\[\],]', re.DOTALL)
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
_PROBE = "\ue000PROBE\ue001"
_PROBE_TIME_S = 1.0


class ChatTemplate:
    """One compiled template. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_output_characters: int = MAX_OUTPUT_CHARACTERS,
        time_limit_s: float = TIME_LIMIT_S,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_output_characters = max_output_characters
        self._time_limit_s = time_limit_s
        self._environment = _Environment(now)
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InferEngineError("engine_error", f"the model's chat template does not compile: {error}") from None
        undeclared = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.variables = undeclared - RESERVED
        self.reads_tools = "tools" in undeclared
        self._wants: _Wants | None = None  # found out with the first conversation

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Read the template of a checkpoint: `chat_template.jinja`, else `chat_template` of tokenizer_config.json (a
        text, or a list of named ones of which `default` is taken). None when the model has none."""
        special_tokens = special_token_strings(files)
        if (content := files.get("chat_template.jinja")) is not None:
            return cls(content.decode(errors="replace"), special_tokens)
        source = read_json(files, "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            named = [item for item in source if isinstance(item, dict) and item.get("name") == "default"]
            source = named[-1].get("template") if named else None
        return cls(source, special_tokens) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render the prompt text of a conversation. `kwargs` that the template does not read are left out.

        Raises InvalidRequest for a reserved name, and where the template calls `raise_exception`.
        """
        for name in kwargs:
            if name in RESERVED:
                raise InvalidRequest("chat_template_kwargs", f"{name} cannot be set this way")
        if self._wants is None:
            self._wants = self._find_wants()
        chat = [_as_wanted(message, self._wants) for message in messages]
        if marked.KIMI.separator in self.source:
            _number_calls(chat)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest("continue_final_message", "needs add_generation_prompt = false")
            _mark_end(chat[-1])
        context = {
            **self._special_tokens,
            **{name: value for name, value in kwargs.items() if name in self.variables},
            "messages": chat,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context, self._time_limit_s)
        if continue_final_message:
            text, mark, rest = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise InvalidRequest("continue_final_message", "the chat template does not show the final message")
            if not rest.startswith(" "):  # the template trims what it shows
                text = text.rstrip()
        return text

    def _find_wants(self) -> _Wants:
        """Find out, by rendering them, in what form this template shows the contents and calls of messages."""
        user = {"role": "user", "content": _PROBE}
        as_text, as_part = self._try([user]), self._try([_with_parts(user)])
        as_parts = _PROBE not in as_text and _PROBE in as_part
        several: frozenset[str] = frozenset()
        if as_parts or (_PROBE in as_text and as_part == as_text):
            parts = _parts_of(two := ("first\ue002", "second\ue002"))
            rest = {"system": [_with_parts(user)], "user": []}
            of_role = {role: self._try([{"role": role, "content": parts}, *chat]) for role, chat in rest.items()}
            several = frozenset(role for role, text in of_role.items() if all(each in text for each in two))
        if "tool_calls" not in self.source:
            return _Wants(as_parts, several, arguments_as_text=False)
        shown = []
        for arguments in ({"k": _PROBE}, json.dumps({"k": _PROBE}, ensure_ascii=False)):
            function = {"name": "f", "arguments": arguments}
            calls = [{"id": "000000000", "type": "function", "function": function}]
            asked = {"role": "user", "content": "?"}
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            messages = [_with_parts(asked) if as_parts else asked, _with_parts(called) if as_parts else called]
            shown.append(self._try(messages))
        is_object_bad = _PROBE not in shown[0] or "{'k'" in shown[0]
        return _Wants(
            as_parts, several, arguments_as_text=is_object_bad and json.dumps(_PROBE, ensure_ascii=False) in shown[1]
        )

    def _try(self, messages: list[dict[str, Any]]) -> str:
        """Render messages; an empty string where the template refuses them."""
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
        context = {**self._special_tokens, "messages": messages, "tools": tools, "documents": None}
        try:
            return self._run({**context, "add_generation_prompt": False}, _PROBE_TIME_S)
        except InferEngineError:
            return ""

    def _run(self, context: dict[str, Any], time_limit_s: float) -> str:
        parts: list[str] = []
        length = 0
        self._environment.start_clock(time_limit_s)
        try:
            for part in self._template.generate(context):
                length += len(part)
                if length > self._max_output_characters:
                    raise _refused(f"gives more than {self._max_output_characters} characters")
                parts.append(part)
        except InferEngineError:
            raise
        except TooLarge as error:
            raise _refused(str(error)) from None
        except MemoryError:
            raise _refused("needs too much memory") from None
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"refused by the chat template: {error}") from None
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise _refused(f"cannot render these messages ({type(error).__name__})") from None
        return "".join(parts)


class _Wants(NamedTuple):
    """The form of messages that a template reads: contents as a list of parts or as a text, the roles whose contents it
    reads in several parts, the arguments of calls as JSON text or as an object."""

    parts: bool
    several: frozenset[str]
    arguments_as_text: bool


def _as_wanted(message: Mapping[str, Any], wants: _Wants) -> dict[str, Any]:
    """Return a message of `check_messages` in the form that a template reads; reasoning under each of its names."""
    read = {key: value for key, value in message.items() if value is not None}
    content = read.get("content")
    if isinstance(content, JoinedParts) and read["role"] in wants.several:
        read["content"] = _parts_of(content.parts)
    elif wants.parts:
        read = _with_parts(read)
    if read.get("tool_calls"):
        form = _text_of if wants.arguments_as_text else _object_of
        read["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": form(call["function"].get("arguments"))}}
            for call in read["tool_calls"]
        ]
    reasoning = next((read[name] for name in _REASONING if isinstance(read.get(name), str)), None)
    return read if reasoning is None else {**dict.fromkeys(_REASONING, reasoning), **read}


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Give calls and their results the ids that Kimi K2 was trained with, whose template writes ids into the prompt:
    `functions.NAME:NUMBER`, numbered through the conversation."""
    ids: dict[Any, list[str]] = {}  # by the client's id, of calls without a result so far
    number = 0
    for message in messages:
        if message.get("tool_calls"):
            numbered = []
            for call in message["tool_calls"]:
                numbered.append({**call, "id": f"functions.{call['function'].get('name')}:{number}"})
                ids.setdefault(call.get("id"), []).append(numbered[-1]["id"])
                number += 1
            message["tool_calls"] = numbered
        if message["role"] == "tool" and ids.get(message.get("tool_call_id")):
            message["tool_call_id"] = ids[message["tool_call_id"]].pop(0)


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _object_of(arguments: Any) -> Any:
    return salvage(arguments) if isinstance(arguments, str) else arguments


def salvage(text: str) -> dict[str, Any]:
    """Return the object that a text of JSON begins, for arguments that were cut or are wrong: with its strings and
    brackets closed, or as far as its last complete member; empty where there is none, or for a text of more than
    MAX_CUT_ARGUMENTS characters."""
    if len(text) > MAX_CUT_ARGUMENTS:
        return {}
    closers: list[str] = []
    last: tuple[int, str] | None = None  # of the last comma: its place, and what closes the text before it
    tail = ""
    for found in _JSON_PIECE.finditer(text):
        piece = found[0]
        if piece[0] == '"':
            if not found["closed"]:
                text = _HALF_ESCAPE.sub(r"\1", text)
                tail = '"'
        elif piece in "{[":
            closers.append("}" if piece == "{" else "]")
        elif piece == ",":
            last = (found.start(), "".join(reversed(closers)))
        elif not closers or closers.pop() != piece:
            return {}
        if len(closers) > MAX_ARGUMENT_DEPTH:
            return {}
    candidates = [text + tail + "".join(reversed(closers))]
    if last is not None:
        candidates.append(text[: last[0]] + last[1])
    for candidate in candidates:
        try:
            value = json.loads(candidate)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": _parts_of([content] if content else [])}


def _parts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


class JoinedParts(str):
    """A content of several parts, joined by newlines. `parts` are their texts, for templates that read them one by
    one."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Sequence[str]) -> Self:
        """Join the texts."""
        joined = super().__new__(cls, "\n".join(parts))
        joined.parts = tuple(parts)
        return joined


def _mark_end(message: dict[str, Any]) -> None:
    """Mark the end of the content; after the mark a space, which shows whether the template trims it."""
    content = message.get("content", "")
    if isinstance(content, list):
        text = content[-1]["text"] if content else ""
        message["content"] = [*content[:-1], {"type": "text", "text": f"{text}{_CONTINUE_MARK} "}]
    else:
        message["content"] = f"{content}{_CONTINUE_MARK} "


def check_messages(messages: Any, path: str = "messages") -> list[dict[str, Any]]:
    """Turn the messages of a request into what templates read: a role and a content string each. Several typed text
    parts are JoinedParts. Raises InvalidRequest naming the place of a part of another type or of the wrong shape."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(path, "must be a list of at least one message")
    _check_length(path, messages)
    return [_message(message, f"{path}[{position}]") for position, message in enumerate(messages)]


def _check_length(path: str, items: list[Any]) -> None:
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(path, f"at most {MAX_ITEMS} entries", code="request_too_large")


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(path, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{path}.role", "must be a string such as user, assistant or system")
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{path}.content", "is missing")
    if isinstance(content, list):
        _check_length(f"{path}.content", content)
        texts = [_part(part, f"{path}.content[{place}]") for place, part in enumerate(content)]
        content = JoinedParts(texts) if len(texts) > 1 else "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{path}.content", "must be a string or a list of text parts")
    read: dict[str, Any] = {**message, "content": content}
    if read.get("tool_calls") is not None:
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{path}.tool_calls")
    return read


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Return the tool calls of an earlier message. Their arguments become objects, or stay texts where they are none: a
    model may have been cut in the middle of them."""
    if not isinstance(calls, list):
        raise InvalidRequest(path, "must be a list of calls")
    read = []
    for place, call in enumerate(calls):
        if isinstance(call, dict) and call.get("type") == "custom":
            call = _custom_call(call, f"{path}[{place}]")
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{path}[{place}].function", "must have a name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            text = arguments or "{}"
            try:
                arguments = json.loads(text)
                if "\\u" in text:
                    json.dumps(arguments, ensure_ascii=False).encode()  # an escape can spell half of a surrogate pair
            except UnicodeEncodeError:
                message = "have half of a surrogate pair, which is no character: send both halves or none"
                raise InvalidRequest(f"{path}[{place}].function.arguments", message) from None
            except (ValueError, RecursionError):
                arguments = text
            if not isinstance(arguments, dict | None):
                arguments = text
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict | str):
            raise InvalidRequest(f"{path}[{place}].function.arguments", "must be a JSON object")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _custom_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the call of a custom tool as one of the function that the tool is for the model."""
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        raise InvalidRequest(f"{path}.custom", "must have a name and input, both strings")
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(path, "must be an object such as {type: text, text: ...}")
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        raise InvalidRequest(path, f"parts of type {str(part.get('type'))[:40]} cannot be read", code="unsupported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text", "must be a string")
    text: str = part["text"]
    return text


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest("messages", f"the chat template {what}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a time limit that is checked in every iteration of a loop and every call of a macro."""

    intercepted_binops = frozenset({"+", "%", "*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters |= {name: limited(name, self.filters[name]) for name in LIMITED_FILTERS}
        del self.globals["lipsum"]  # makes any number of words
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self._clock = threading.local()

    def start_clock(self, time_limit_s: float) -> None:
        """Start the time limit of a rendering by the calling thread."""
        self._clock.deadline = time.monotonic() + time_limit_s

    def check_clock(self) -> str:
        """Raise InvalidRequest when the time is over. Called by the compiled template wherever it could run for
        ever."""
        if time.monotonic() > self._clock.deadline:
            raise _refused("takes too long")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Concatenations().visit(super()._parse(source, name, filename))
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("check_clock"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may not be too large."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *values: Any, **named: Any) -> Any:
        """Call a function whose result may not be too large."""
        check_call(function, values, named)
        return super().call(context, function, *values, **named)

    def join_texts(self, *parts: Any) -> str:
        """Compute the operator `~`, which jinja2 leaves to no method."""
        texts = [str(part) for part in parts]
        check_text(texts)
        return "".join(texts)


class _Concatenations(jinja2.visitor.NodeTransformer):
    """Replaces each `~` by a call of join_texts."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802  (jinja2's name)
        """Replace one."""
        self.generic_visit(node)
        function = jinja2.nodes.EnvironmentAttribute("join_texts")
        return jinja2.nodes.Call(function, node.nodes, [], None, None).set_lineno(node.lineno)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with the tools in its system message, and with calls and results as plain text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    described = _describe(tools)
    if plain[0]["role"] in ("system", "developer"):
        plain[0]["content"] = f"{plain[0]['content']}\n\n{described}"
        return plain
    return [{"role": "system", "content": described}, *plain]


def _describe(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions. They are described here as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "For each call answer with its name and arguments as JSON:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": _object_of(function.get("arguments"))}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(_with_object(call['function']), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}
