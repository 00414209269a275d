"""The formats in which models write tool calls, and the grammar that allows nothing but calls in one of them.

A new format is a file here and a line in FORMATS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inferengine.text.tool_parsers import hermes, llama3_json, mistral
from inferengine.text.tool_parsers.base import Part

__all__ = ["FORMATS", "MAX_CALLS", "Function", "ToolFormat", "ToolParser", "calls_grammar", "detect"]


MAX_CALLS = 8  # in one answer: a model that does not stop would call for ever
# The style of JSON that models were trained on. Without it a model could write white space for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolParser(Protocol):
    """Parses one output. The joined parts do not depend on how the text is cut into pushes."""

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take more text. Returns the parts that it completes; `final`: nothing follows, so nothing stays held back."""
        ...


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls. `call` is the text of one, with {name} and {arguments} to fill in. Several
    calls have `between` between them; `before` and `after` enclose them all."""

    name: str
    make_parser: Callable[[], ToolParser]
    call: str
    between: str
    before: str = ""
    after: str = ""
    marks: tuple[str, ...] = ()  # parts of the text that are special tokens in some vocabularies
    signs: tuple[str, ...] = ()  # texts in the chat template of such a model
    id_characters: int = 24  # of the ids of calls; some templates insist on a length


FORMATS = {
    format.name: format
    for format in (
        ToolFormat(
            "hermes",
            hermes.HermesParser,
            call='<tool_call>\n{"name": {name}, "arguments": {arguments}}\n</tool_call>',
            between="\n",
            marks=hermes.MARKS,
            signs=(hermes.OPEN,),
        ),
        ToolFormat(
            "mistral",
            mistral.MistralParser,
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
            mistral.MistralParser,
            call="[TOOL_CALLS]{bare_name}[ARGS]{arguments}",
            between="",
            marks=(mistral.MARK, mistral.ARGS),
            signs=(mistral.ARGS,),
            id_characters=9,
        ),
        ToolFormat(
            "llama3_json",
            llama3_json.Llama3JsonParser,
            call='{"name": {name}, "parameters": {arguments}}',
            between="; ",
            marks=(llama3_json.TAG,),
            signs=(llama3_json.TAG, '"parameters": dictionary of argument name and its value'),
        ),
    )
}
_DETECTION_ORDER = ("mistral_args", "mistral", "hermes", "llama3_json")


def detect(template: str) -> ToolFormat | None:
    """Return the tool format of a chat template; None where it has none."""
    for name in _DETECTION_ORDER:
        if any(sign in template for sign in FORMATS[name].signs):
            return FORMATS[name]
    return None


class Function(NamedTuple):
    """A tool that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


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
        before, _, after = call.partition("{arguments}")
        lines.append(f"call_{number}: {text(before)} arguments_{number} {text(after)}")
        schema = {"type": "object", **function.parameters, "x-tool": function.name}  # structured_output.json_grammar
        lines.append(f"arguments_{number}: {_json(schema)}")
    return "\n".join(lines) + "\n"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"
