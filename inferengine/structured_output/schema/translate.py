"""Translates a JSON Schema of draft 2020-12 (and of the older drafts, as far as they agree) into rules of Lark."""

from __future__ import annotations

from typing import Any

from inferengine.structured_output.schema.algebra import Algebra
from inferengine.structured_output.schema.evaluated import evaluated_values
from inferengine.structured_output.schema.references import Document
from inferengine.structured_output.schema.writer import GrammarWriter, Spacing


def schema_rules(schema: Any, spacing: Spacing, start: str = "start", prefix: str = "s") -> str:
    """Return rules for the JSON texts of a schema, the first of which is `start`. Raises Refusal naming the keyword
    that cannot be held to, and the remedy."""
    algebra = Algebra(Document(schema), evaluated_values)
    return GrammarWriter(algebra, spacing, prefix).write(algebra.schema(schema, "", ()), start)


# A little of any space. Without a bound a model may print spaces until its length is used up.
ANY_WHITESPACE = r"[ \n\t]{0,12}"


def spacing_of(pattern: str | None) -> Spacing:
    """Return the punctuation with white space of this expression between tokens; "": none; "any": a little of any;
    None and "compact": at most one space after commas and colons."""
    if pattern == "any":
        pattern = ANY_WHITESPACE
    if pattern in (None, "compact"):
        options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        return Spacing(", ?", ": ?", "", "", options)
    if not pattern:
        return Spacing(",", ":", "", "", {"whitespace_flexible": False})
    space = f"(?:{pattern})"
    return Spacing(f"{space},{space}", f"{space}:{space}", space, space, {"whitespace_pattern": pattern})
