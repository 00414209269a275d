"""Reading values of clients into msgspec Structs, with errors that name the field and the remedy.

A Struct states each field once: its type, range (`msgspec.Meta`), default and meaning. From the same statement come
the checks (`read`, `check`), the JSON schema (`json_schema`) and the words of every refusal (`type_words`,
`range_words`). Whole numbers may be written as floats (3.0), because some languages have no other numbers; booleans are
no numbers.

Bounds that the configuration decides are named (`about(most=...)`); `check` and `json_schema` take their values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

MAX_I64 = 2**63 - 1
MAX_LIST_DEPTH = 2  # of whole numbers in any field: lists of token ids
_PLACE = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_WRONG_KEY = "must have strings as keys"


class FieldError(Exception):
    """A value that cannot be used. `field` is its path; `is_type` says that its type is wrong, not its range."""

    def __init__(self, field: str, message: str, *, is_type: bool) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message
        self.is_type = is_type


def about(
    meaning: str | None = None,
    *,
    most: str = "",
    expected: str = "",
    also: Sequence[str] = (),
    whole: bool = False,
    schema: dict[str, Any] | None = None,
    **bounds: Any,
) -> msgspec.Meta:
    """State a field: its meaning and its bounds, as msgspec.Meta takes them.

    `most` names the limit of the configuration that bounds a number from above, or a number of entries or characters;
    such a number's lower bound `ge` is left to `check`, too, so that one message names both.
    `expected` are the words for a wrong type, `also` those of refusals by other rules. `whole`: an entry of a wrong
    type is refused as the list is. `schema` replaces keys of the JSON schema, and with "type" or "anyOf" the whole of
    it; {"limit": name} in it stands for that limit's value.
    """
    extra: dict[str, Any] = {"most": most, "expected": expected, "also": list(also), "whole": whole or None}
    if most and "ge" in bounds:
        extra["least"] = bounds.pop("ge")
    return msgspec.Meta(
        description=meaning,
        extra={name: value for name, value in extra.items() if value not in ("", [], None)} or None,
        extra_json_schema=schema,
        **bounds,
    )


def read(kind: type[T], value: Any) -> T:
    """Convert `value` (of JSON or msgpack) to a `kind`. Unknown keys are ignored. Raises FieldError."""
    repaired: set[str] = set()
    while True:
        try:
            return msgspec.convert(value, kind, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            text, _, place = str(error).partition(" - at `")
            steps = [name or int(index) if index != "..." else index for name, index in _PLACE.findall(place)]
            if "got `float`" in text and steps and steps[0] not in repaired and isinstance(value, dict):
                name = str(steps[0])  # 3.0 where a whole number must be
                repaired.add(name)
                value = {**value, name: _whole(value[name])}
                continue
            if place.startswith("key` in"):
                text = _WRONG_KEY
            raise _field_error(kind, text, steps) from None


def check(struct: msgspec.Struct, limits: Any = None) -> None:
    """Check the ranges of a Struct that may not come from `read`, and those that `limits` decide. Raises FieldError."""
    for name, default, bound in _bounded_fields(type(struct)):
        value = getattr(struct, name)
        if value is not default:
            _check_range(name, value, bound, limits)


def field_docs(kind: type[msgspec.Struct]) -> dict[str, FieldDoc]:
    """Return what is stated of each field of a Struct, by name."""
    return _field_docs(kind)


class FieldDoc(NamedTuple):
    """`node` describes the type, without the None of an optional field."""

    name: str
    node: Node
    meaning: str
    required: bool
    default: Any


class Node(NamedTuple):
    """A type with its metadata. `schema` replaces what would be derived."""

    type: inspect.Type
    description: str = ""
    schema: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    extra: dict[str, Any] = {}  # noqa: RUF012

    @property
    def most(self) -> str:
        """The name of the limit that bounds it, or the empty string."""
        return str(self.extra.get("most", ""))

    @property
    def items(self) -> Node | None:
        """Of a list, the type of its entries."""
        if isinstance(self.type, inspect.ListType | inspect.VarTupleType):
            return node_of(self.type.item_type)
        return None


def node_of(kind: inspect.Type) -> Node:
    """Unwrap Metadata and the None of an optional type."""
    description = ""
    schema: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    while True:
        if isinstance(kind, inspect.Metadata):
            schema |= kind.extra_json_schema or {}
            extra |= kind.extra or {}
            kind = kind.type
        elif isinstance(kind, inspect.UnionType) and len(others := _without_none(kind)) == 1:
            kind = others[0]
        else:
            description = schema.pop("description", description)
            return Node(kind, description, schema, extra)


def json_schema(node: Node, limits: Any = None) -> dict[str, Any]:
    """Return the JSON schema of a type, with the bounds that `limits` decide."""
    kind, schema = node.type, dict[str, Any]()
    low, high, is_open = _bounds(node, limits)
    match kind:
        case inspect.BoolType():
            schema = {"type": "boolean"}
        case inspect.IntType() | inspect.FloatType():
            schema = {"type": "integer" if isinstance(kind, inspect.IntType) else "number"}
            schema |= _given({"exclusiveMinimum" if is_open else "minimum": low, "maximum": high})
        case inspect.StrType():
            schema = {"type": "string", **_given({"minLength": low, "maxLength": high})}
            schema |= _given({"pattern": kind.pattern})
        case inspect.ListType() | inspect.VarTupleType():
            items = json_schema(node_of(kind.item_type), limits)
            schema = {"type": "array", "items": items, **_given({"minItems": low, "maxItems": high})}
        case inspect.TupleType():
            parts = [json_schema(node_of(item), limits) for item in kind.item_types]
            schema = {"type": "array", "prefixItems": parts, "minItems": len(parts), "items": False}
        case inspect.DictType():
            schema = {"type": "object", **_given({"minProperties": low, "maxProperties": high})}
            if not isinstance(kind.value_type, inspect.AnyType):
                schema["additionalProperties"] = json_schema(node_of(kind.value_type), limits)
        case inspect.LiteralType():
            schema = {"enum": list(kind.values)}
        case inspect.UnionType():
            schema = {"anyOf": [json_schema(node_of(item), limits) for item in kind.types]}
        case inspect.StructType():
            docs = _field_docs(kind.cls).values()
            schema = {"type": "object", "properties": {doc.name: json_schema(doc.node, limits) for doc in docs}}
            if required := [doc.name for doc in docs if doc.required]:
                schema["required"] = required
    result = node.schema if {"type", "anyOf"} & node.schema.keys() else schema | node.schema
    return {name: _running(value, limits) for name, value in result.items()}


def type_words(node: Node) -> str:
    """Return the message for a value of the wrong type."""
    if "expected" in node.extra:
        return str(node.extra["expected"])
    match node.type:
        case inspect.BoolType():
            return "must be true or false"
        case inspect.IntType():
            return "must be a whole number"
        case inspect.FloatType():
            return "must be a finite number"
        case inspect.StrType():
            return "must be a string"
        case inspect.BytesType():
            return "must be bytes (bin)"
        case inspect.LiteralType() as literal:
            return f"must be one of {', '.join(map(str, literal.values))}"
        case inspect.ListType() | inspect.VarTupleType():
            return "must be a list"
        case inspect.DictType() | inspect.StructType():
            return "must be an object"
    return "has a wrong type"


def range_words(node: Node, limits: Any = None) -> str:
    """Return the message for a value outside the range."""
    low, high, is_open = _bounds(node, limits)
    match node.type:
        case inspect.IntType() | inspect.FloatType():
            if high is not None and high >= MAX_I64 and low == -high:
                return "must fit in 64 bits"
            if low is not None and (high is None or high >= MAX_I64):
                return f"must be at least {shown(low)}"
            if low is not None:
                return f"must lie in {'(' if is_open else '['}{shown(low)}, {shown(high)}]"
            return f"must be at most {shown(high)}"
        case inspect.StrType():
            return f"at most {high} characters"
        case inspect.BytesType() if low == high:
            return f"must be {low} bytes (bin)"
        case inspect.BytesType():
            return f"must be bytes (bin), at most {high}"
    return f"at most {high} entries"


def refusals(node: Node, limits: Any = None) -> list[str]:
    """Return every message that a value of this field may be refused with."""
    words = [] if isinstance(node.type, inspect.AnyType) else [type_words(node)]
    if node.items is not None and "whole" not in node.extra and not isinstance(node.items.type, inspect.TupleType):
        words.append(type_words(node.items))
    bound, of_items = _bound_of(node), False
    while bound is not None:
        for message in _range_refusals(bound, limits):
            words.append(each(message) if of_items else message)
        bound, of_items = bound.items, True
    return list(dict.fromkeys([*words, *node.extra.get("also", ())]))


def each(message: str) -> str:
    """Return the message for a list some of whose entries are refused with `message`."""
    return f"{message} each" if message.startswith("at most") else f"each {message}"


def _range_refusals(bound: _Bound, limits: Any) -> list[str]:
    low, high, _ = _bounds(bound.node, limits)
    if low is None and high is None:
        return []
    more = []
    if bound.is_number and high is not None and high >= MAX_I64:
        more = ["must fit in 64 bits"]
    elif not bound.is_number and low == 1:
        more = ["must not be empty"]
    return [*([] if high is None and more else [range_words(bound.node, limits)]), *more]


def shown(bound: Any) -> str:
    """Format a bound as people write it."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _field_error(kind: type, text: str, steps: list[Any]) -> FieldError:
    path, node = "", _root(kind)
    for step in steps:
        if "whole" in node.extra and "got `" in text:
            break
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "...":
            path += f".{step}" if path else step
        node = _below(node, step)
    if text == _WRONG_KEY:
        return FieldError(path, text, is_type=True)
    if missing := _MISSING.fullmatch(text):
        return FieldError(f"{path}.{missing[1]}" if path else missing[1], "is required", is_type=True)
    is_type = "got `" in text or text.startswith("Invalid enum value") or isinstance(node.type, inspect.TupleType)
    return FieldError(path, type_words(node) if is_type else _range_refusal(node, text), is_type=is_type)


def _range_refusal(node: Node, text: str) -> str:
    if text == "Number out of range":
        return type_words(node)
    if isinstance(node.type, inspect.IntType) and "<= 9223372036854775807" in text:
        return "must fit in 64 bits"
    if "of length >= 1" in text:
        return "must not be empty"
    if "matching regex" in text or isinstance(node.type, inspect.UnionType):
        return type_words(node)
    return range_words(node)


@functools.cache
def _root(kind: type) -> Node:
    return node_of(inspect.type_info(kind))


def _below(node: Node, step: str | int) -> Node:
    kind = node.type
    if isinstance(kind, inspect.StructType):
        doc = _field_docs(kind.cls).get(str(step))
        return node if doc is None else doc.node
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return node_of(kind.item_type)
    if isinstance(kind, inspect.TupleType) and isinstance(step, int):
        return node_of(kind.item_types[step])
    if isinstance(kind, inspect.DictType):
        return node_of(kind.value_type)
    if isinstance(kind, inspect.UnionType):
        lists = [item for item in map(node_of, kind.types) if item.items is not None]
        return _below(lists[0], step) if lists else node
    return node


@functools.cache
def _field_docs(kind: type[msgspec.Struct]) -> dict[str, FieldDoc]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {
        item.encode_name: FieldDoc(
            item.encode_name,
            node := node_of(item.type),
            node.description,
            item.required,
            None if item.default is msgspec.NODEFAULT else item.default,
        )
        for item in info.fields
    }


class _Bound(NamedTuple):
    """The range of a number, or of a length; `items` is that of each entry of a list."""

    node: Node
    low: Any
    high: Any
    is_open: bool  # low itself is outside
    most: str
    is_number: bool
    items: _Bound | None
    of_pairs: bool  # the entries are pairs, and `items` is the range of the second of each


@functools.cache
def _bounded_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, _Bound], ...]:
    bounds = ((doc.name, doc.default, _bound_of(doc.node)) for doc in _field_docs(kind).values())
    return tuple((name, default, bound) for name, default, bound in bounds if bound is not None)


def _bound_of(node: Node) -> _Bound | None:
    """Return the bound of a type; None where nothing bounds it."""
    low, high, is_open = _bounds(node, None)
    items = node.items
    pair = items.type.item_types if items is not None and isinstance(items.type, inspect.TupleType) else ()
    inner = None if items is None else _bound_of(node_of(pair[1]) if len(pair) == 2 else items)
    if low is None and high is None and not node.most and inner is None:
        return None
    is_number = isinstance(node.type, inspect.IntType | inspect.FloatType)
    return _Bound(node, low, high, is_open, node.most, is_number, inner, len(pair) == 2)


def _check_range(path: str, value: Any, bound: _Bound, limits: Any) -> None:
    _, low, high, is_open, most, is_number, items, of_pairs = bound
    if most and limits is not None:
        high = getattr(limits, most)
    measured = value if is_number else len(value)
    if low is not None and not (measured > low if is_open else measured >= low):
        is_empty = low == 1 and not is_number
        raise FieldError(path, "must not be empty" if is_empty else range_words(bound.node, limits), is_type=False)
    if high is not None and not measured <= high:
        raise FieldError(path, range_words(bound.node, limits), is_type=False)
    if items is not None:
        for place, item in enumerate(value):
            _check_range(f"{path}[{place}]", item[1] if of_pairs else item, items, limits)


def _bounds(node: Node, limits: Any) -> tuple[Any, Any, bool]:
    """Return the lowest and highest value or length, and whether the lowest itself is outside."""
    kind = node.type
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        low, high = (kind.ge if kind.gt is None else kind.gt), kind.le
        is_open = kind.gt is not None
    else:
        low, high = getattr(kind, "min_length", None), getattr(kind, "max_length", None)
        is_open = False
    low = node.extra.get("least", low)
    return low, getattr(limits, node.most) if node.most and limits is not None else high, is_open


def _without_none(kind: inspect.UnionType) -> list[inspect.Type]:
    return [item for item in kind.types if not isinstance(item, inspect.NoneType)]


def _given(bounds: dict[str, Any]) -> dict[str, Any]:
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _running(schema: Any, limits: Any) -> Any:
    """Replace {"limit": name} inside a schema by the value."""
    if isinstance(schema, dict):
        if schema.keys() == {"limit"}:
            return getattr(limits, schema["limit"])
        return {name: _running(value, limits) for name, value in schema.items()}
    return [_running(item, limits) for item in schema] if isinstance(schema, list) else schema


def _whole(value: Any, depth: int = MAX_LIST_DEPTH) -> Any:
    """Make whole numbers of floats that are some, in lists of lists too, and no deeper: clients may nest for ever."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if depth and isinstance(value, list | tuple):
        return [_whole(item, depth - 1) for item in value]
    return value
