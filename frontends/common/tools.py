"""`tools`, `tool_choice` and `parallel_tool_calls` of a request, in OpenAI's shape."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from frontends.common import fields
from frontends.common.model_context import ServedModel
from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest
from inferengine.structure import GrammarSpec, validate_grammar
from inferengine.text.tool_parsers import ToolFormat
from inferengine.text.tool_parsers.grammar import Function, calls_grammar

MAX_TOOLS = 128  # OpenAI's limit
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


class Tools(NamedTuple):
    """What may be called. `choice`: auto, required, or the name of the one function to call."""

    definitions: list[dict[str, Any]]
    functions: list[Function]
    choice: str
    parallel: bool

    @property
    def is_forced(self) -> bool:
        """The output is calls and nothing else."""
        return self.choice != "auto"


def read_tools(body: dict[str, Any], limits: LimitsConfig) -> Tools | None:
    """None where nothing is offered, or none is to be called. Raises InvalidRequest naming the place."""
    definitions = body.get("tools")
    choice = _read_choice(body.get("tool_choice"))
    parallel = fields.flag(body, "parallel_tool_calls", True)
    if definitions is None or definitions == []:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice", "needs tools to choose from")
        return None
    if not isinstance(definitions, list) or len(definitions) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be a list of at most {MAX_TOOLS} tools")
    functions = [_read_function(item, f"tools[{place}]", limits) for place, item in enumerate(definitions)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "must have names that differ")
    if choice == "none":
        return None
    if choice not in (None, "auto", "required") and choice not in names:
        raise InvalidRequest("tool_choice", f"there is no tool named {choice[:64]}")
    return Tools(definitions, functions, choice or "auto", parallel)


def tools_grammar(
    tools: Tools, format: ToolFormat, served: ServedModel, limits: LimitsConfig, answer: dict[str, Any] | None = None
) -> GrammarSpec:
    """What an output must match that calls a tool, or the tool; or, where it may, answers in JSON of this schema."""
    functions = [one for one in tools.functions if tools.choice in ("auto", "required", one.name)]

    def special_id(text: str) -> int | None:
        token_id = served.tokenizer.token_to_id(text)
        return token_id if token_id is not None and served.tokenizer.is_special(token_id) else None

    parallel = tools.parallel and tools.choice in ("auto", "required")
    source = calls_grammar(format, functions, parallel=parallel, special_id=special_id, answer=answer)
    spec = GrammarSpec("lark", source)
    validate_grammar(spec, limits, path="tools")
    return spec


def _read_choice(value: Any) -> str | None:
    if value is None or value in ("auto", "none", "required"):
        return None if value is None else str(value)
    function = (
        value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name"}}'
        )
    return name


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
        return Function(name, NOTHING)
    path = f"{path}.function.parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(path, "must be the JSON schema of an object")
    try:
        schema = json.dumps(parameters)
    except (ValueError, RecursionError):
        raise InvalidRequest(path, "is nested too deep") from None
    validate_grammar(GrammarSpec("json_schema", schema), limits, path=path)
    return Function(name, parameters)
