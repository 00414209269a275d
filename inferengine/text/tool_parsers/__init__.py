"""The formats in which models write tool calls. A new one is a file here and a line in FORMATS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from inferengine.text.tool_parsers import hermes, llama3_json, mistral
from inferengine.text.tool_parsers.base import Part

__all__ = ["FORMATS", "ToolFormat", "ToolParser", "detect"]


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
