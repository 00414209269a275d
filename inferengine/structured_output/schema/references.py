"""Document: where the parts of a schema are that `$ref` and `$dynamicRef` name. Nothing outside the schema is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from inferengine.structured_output.schema.refusal import Refusal

SINGLE = (
    "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "items", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class Location(NamedTuple):
    """A subschema and the URI that its references start from."""

    schema: Any
    base: str


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas directly inside this one."""
    for name in SINGLE:
        if isinstance(schema.get(name), dict):
            yield schema[name]
    for name in LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()


class Document:
    """A schema with its `$id`, `$anchor` and `$dynamicAnchor` looked up."""

    def __init__(self, root: Any) -> None:
        self._bases: dict[int, str] = {}  # by identity of the subschema, where it has an $id
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Location] = {}
        self._dynamic: dict[tuple[str, str], Location] = {}
        self.has_dynamic_references = False
        queue = [Location(root, "")]
        while queue:
            schema, base = queue.pop()
            if not isinstance(schema, dict):
                continue
            base = self._enter(schema, base)
            self.has_dynamic_references |= "$dynamicRef" in schema or "$recursiveRef" in schema
            queue += (Location(one, base) for one in subschemas(schema))

    def base_of(self, schema: Any, base: str) -> str:
        """Return the URI that references inside `schema` start from."""
        return self._bases.get(id(schema), base)

    def resolve(self, reference: str, base: str) -> Location:
        """Return what a `$ref` names. Raises Refusal where the schema does not contain it."""
        uri, fragment = _split(reference, base)
        if uri not in self._resources:
            raise Refusal(f"$ref to {uri[:120]}: only what the schema itself contains is read: copy it under $defs")
        if fragment.startswith("/"):
            return self._follow(uri, fragment, reference)
        if not fragment:
            return Location(self._resources[uri], uri)
        found = self._anchors.get((uri, fragment))
        if found is None:
            raise Refusal(f"$ref to {reference[:120]}: there is no such $anchor in the schema")
        return found

    def resolve_dynamic(self, reference: str, base: str, scope: tuple[str, ...]) -> Location:
        """Return what a `$dynamicRef` names where `scope` are the resources that were entered, the outermost first."""
        uri, fragment = _split(reference, base)
        found = self.resolve(reference, base)
        if (uri, fragment) in self._dynamic:
            for outer in scope:
                if (outer, fragment) in self._dynamic:
                    return self._dynamic[outer, fragment]
        return found

    def _enter(self, schema: dict[str, Any], base: str) -> str:
        if isinstance(own := schema.get("$id"), str) and not own.startswith("#"):
            base = self._bases[id(schema)] = urldefrag(_join(base, own)).url
            self._resources[base] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._anchors[base, name] = Location(schema, base)
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            self._dynamic[base, name] = Location(schema, base)
        return base

    def _follow(self, uri: str, pointer: str, reference: str) -> Location:
        value, base = self._resources[uri], uri
        for part in pointer[1:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise Refusal(f"$ref to {reference[:120]}: there is nothing at this place of the schema")
            base = self.base_of(value, base)
        return Location(value, base)


def _join(base: str, reference: str) -> str:
    if urlsplit(reference).scheme or not base:
        return reference
    return urljoin(base, reference)


def _split(reference: str, base: str) -> tuple[str, str]:
    if reference.startswith("#"):
        return base, unquote(reference[1:]) if not reference.startswith("#/") else reference[1:]
    try:
        uri, fragment = urldefrag(_join(base, reference))
    except ValueError:
        raise Refusal(f"$ref {reference[:120]} is no URI") from None
    return uri, fragment
