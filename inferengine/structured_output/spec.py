"""Reads the fields of a request that ask for structured output into a GrammarSpec, and checks its size.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs`, and the `guided_*` fields that vLLM removed.
Front ends, `LLM` and the engine share this. Whether a schema or an expression makes sense shows when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inferengine.config import LimitsConfig
from inferengine.errors import HALF_PAIR, InvalidRequest

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "structural_tag")
STRUCTURED_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_NESTING = 64
MAX_WHITESPACE_CHARACTERS = 200
WHITESPACE_NAMES = ("any", "compact")
GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_NO_SIGN = r'[^"\[\]{}]*+'
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'  # perhaps without its end
# What goes before the next bracket outside of strings, and that bracket; the rest of a text without one. So a match
# begins where the last one ended, and never within a string.
_TO_BRACKET = re.compile(rf"{_NO_SIGN}(?:{_STRING}{_NO_SIGN})*+([\[\]{{}}]|\Z)", re.DOTALL)


class GrammarSpec(NamedTuple):
    """A grammar that the output must match, not compiled yet."""

    kind: str  # one of GRAMMAR_KINDS
    source: str  # schema, choices and tags as JSON; expressions and grammars as they are
    whitespace: str | None = None  # between JSON tokens: one of WHITESPACE_NAMES or a pattern; None: the engine's own


def read_grammar(body: Mapping[str, Any]) -> GrammarSpec | None:
    """Return the GrammarSpec of a request body; None where it asks for none. Raises InvalidRequest naming the field."""
    asked = _fields_that_ask(body)
    whitespace = body.get("json_whitespace")
    if whitespace is not None and whitespace not in WHITESPACE_NAMES:
        raise InvalidRequest("json_whitespace", f"must be one of {', '.join(WHITESPACE_NAMES)}")
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidRequest(asked[1], f"cannot be combined with {asked[0]}")
    spec = _read_spec(asked[0], body)
    return spec._replace(whitespace=whitespace) if spec.whitespace is None else spec


def grammar_field(body: Mapping[str, Any]) -> str:
    """Return the name of the field that `read_grammar` reads; `grammar` where a body asks for none."""
    return next(iter(_fields_that_ask(body)), "grammar")


def _fields_that_ask(body: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body that ask for a grammar.

    A response_format of type text asks for nothing: several clients send it by default. So do {} as response_format and
    {} as structured_outputs, of clients that send every field."""
    values = {name: body.get(name) for name in ("response_format", "structured_outputs", *GUIDED_FIELDS)}
    format = values["response_format"]
    if isinstance(format, Mapping) and (not format or format.get("type") == "text"):
        values["response_format"] = None
    if values["structured_outputs"] == {}:
        values["structured_outputs"] = None
    return [name for name, value in values.items() if value is not None]


def _read_spec(name: str, body: Mapping[str, Any]) -> GrammarSpec:
    if name == "response_format":
        return _read_response_format(body[name])
    if name == "structured_outputs":
        return _read_structured_outputs(body[name])
    pattern = body.get("guided_whitespace_pattern")
    return _with_whitespace(_READERS[GUIDED_FIELDS[name]](name, body[name]), "guided_whitespace_pattern", pattern)


def validate_grammar(spec: GrammarSpec, limits: LimitsConfig, *, path: str = "grammar") -> None:
    """Check the kind, the size and the nesting of a grammar, which bound what compiling it costs. Raises
    InvalidRequest."""
    if spec.kind not in GRAMMAR_KINDS:
        raise InvalidRequest(path, f"kind must be one of {', '.join(GRAMMAR_KINDS)}")
    size = _utf8_size(path, spec.source)
    if size > limits.max_grammar_bytes:
        raise InvalidRequest(path, f"has {size} bytes; at most {limits.max_grammar_bytes} are compiled")
    if "\0" in spec.source or (spec.whitespace is not None and "\0" in spec.whitespace):
        raise InvalidRequest(path, "must not contain NUL")
    if spec.whitespace is not None:
        _utf8_size(path, spec.whitespace)
        if len(spec.whitespace) > MAX_WHITESPACE_CHARACTERS:
            raise InvalidRequest(path, "the whitespace pattern is too long")
    if spec.kind in ("json_schema", "choice", "structural_tag") and _nesting(spec.source) > MAX_NESTING:
        raise InvalidRequest(path, f"is nested deeper than {MAX_NESTING} levels")


def grammar_to_list(spec: GrammarSpec) -> list[str | None]:
    """Return the fields as a list, for the wire message SUBMIT."""
    return list(spec)


def grammar_from_list(value: Any, path: str = "grammar") -> GrammarSpec:
    """Read the list of a SUBMIT message: [kind, source] or [kind, source, whitespace]. Raises InvalidRequest."""
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= 3:
        raise InvalidRequest(path, "must be [kind, source] or [kind, source, whitespace]")
    kind, source = value[0], value[1]
    whitespace = value[2] if len(value) == 3 else None
    if not isinstance(kind, str) or not isinstance(source, str):
        raise InvalidRequest(path, "kind and source must be strings")
    if whitespace is not None and not isinstance(whitespace, str):
        raise InvalidRequest(path, "the whitespace pattern must be a string")
    return GrammarSpec(kind, source, whitespace)


def _read_response_format(value: Any) -> GrammarSpec:
    path = "response_format"
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, "must be an object with a type")
    kind = value.get("type")
    if kind == "json_object":
        return GrammarSpec("json_object", "{}")
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, Mapping) or wrapped.get("schema") is None:
            raise InvalidRequest(f"{path}.json_schema", "must be an object with a schema")
        return _read_json(f"{path}.json_schema.schema", wrapped["schema"])
    if kind == "structural_tag":
        return _read_tags(path, value)
    raise InvalidRequest(f"{path}.type", "must be text, json_object, json_schema or structural_tag")


def _read_structured_outputs(value: Any) -> GrammarSpec:
    path = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"must be an object with one of {', '.join(_READERS)}")
    asked = [name for name in _READERS if value.get(name) not in (None, False)]
    if len(asked) != 1:
        raise InvalidRequest(path, f"must have exactly one of {', '.join(_READERS)}")
    spec = _READERS[asked[0]](f"{path}.{asked[0]}", value[asked[0]])
    if value.get("disable_any_whitespace") is True:
        return spec._replace(whitespace="")
    return _with_whitespace(spec, f"{path}.whitespace_pattern", value.get("whitespace_pattern"))


def _with_whitespace(spec: GrammarSpec, path: str, pattern: Any) -> GrammarSpec:
    if pattern is None:
        return spec
    if not isinstance(pattern, str):
        raise InvalidRequest(path, "must be a regular expression")
    return spec._replace(whitespace=pattern)


def _read_json(path: str, value: Any) -> GrammarSpec:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest(path, "is not valid JSON") from None
    if value is True:  # the schema that allows everything
        value = {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, "must be a JSON schema that allows something: an object, or true")
    return GrammarSpec("json_schema", _dumps(path, value))


def _read_text(kind: str) -> Callable[[str, Any], GrammarSpec]:
    def read(path: str, value: Any) -> GrammarSpec:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(path, "must be a string that is not empty")
        return GrammarSpec(kind, value)

    return read


def _read_choice(path: str, value: Any) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequest(path, "must be a list of strings, none of them empty")
    return GrammarSpec("choice", json.dumps(value))


def _read_json_object(path: str, value: Any) -> GrammarSpec:
    if value is not True:
        raise InvalidRequest(path, "must be true")
    return GrammarSpec("json_object", "{}")


def _read_tags(path: str, value: Any) -> GrammarSpec:
    """Read {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: text in which a trigger starts a
    structure."""
    structures, triggers = (
        value.get(key) if isinstance(value, Mapping) else None for key in ("structures", "triggers")
    )
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise InvalidRequest(path, "must have structures and triggers, neither of them empty")
    for index, item in enumerate(structures):
        where = f"{path}.structures[{index}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("begin"), str) or "schema" not in item:
            raise InvalidRequest(where, "must have begin, schema and end")
        if not any(isinstance(trigger, str) and trigger and item["begin"].startswith(trigger) for trigger in triggers):
            raise InvalidRequest(f"{where}.begin", "must start with one of the triggers")
    return GrammarSpec("structural_tag", _dumps(path, {"structures": structures, "triggers": triggers}))


_READERS: dict[str, Callable[[str, Any], GrammarSpec]] = {
    "json": _read_json,
    "json_object": _read_json_object,
    "regex": _read_text("regex"),
    "choice": _read_choice,
    "grammar": _read_text("lark"),
    "structural_tag": _read_tags,
}


def _dumps(path: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise InvalidRequest(path, "is nested too deep, or holds what JSON cannot") from None
    _utf8_size(path, text)
    return text


def _utf8_size(path: str, text: str) -> int:
    """Return the number of bytes of a text in UTF-8. Raises InvalidRequest where it cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(path, HALF_PAIR) from None


def _nesting(source: str) -> int:
    """Return the depth of brackets outside of strings. Counted, not parsed: a parser would follow a hostile depth by
    recursion."""
    depth = deepest = 0
    for bracket in _TO_BRACKET.findall(source):
        if bracket in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif bracket:
            depth -= 1
    return deepest
