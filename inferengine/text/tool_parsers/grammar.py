"""Makes a grammar that only allows tool calls: in the model's own format, with arguments that match the tools' schemas.
In llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from inferengine.text.tool_parsers import ToolFormat

MAX_CALLS = 8  # in one answer: a model that does not stop would call for ever
# The style of JSON that models were trained on. Without it a model could write white space for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
    """Make a grammar for one call of one of `functions`, or several where `parallel`; with `answer`, a JSON text that
    matches this schema is allowed instead. `special_id` returns the token id of a text that is a special token, whose
    characters the grammar cannot match, and None for any other text."""

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
        lines.append(f"arguments_{number}: {_json({'type': 'object', **function.parameters})}")
    return "\n".join(lines) + "\n"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE}, ensure_ascii=False)}"
