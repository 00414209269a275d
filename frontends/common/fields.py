"""Reading a request's JSON fields: each reader gives a value of its type, or an InvalidRequest that names the field."""

from __future__ import annotations

import json
import math
from typing import Any

from inferengine.errors import InvalidRequest

MAX_INTEGER = 2**63 - 1


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Broken JSON of any kind is an InvalidRequest without a field."""
    try:
        document = json.loads(body)
    except RecursionError:
        raise _no_field("The body is nested too deeply.") from None
    except ValueError as error:  # includes broken UTF-8 and integers of thousands of digits
        place = f" at position {error.pos}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise _no_field(f"The body is not valid JSON{place}.") from None
    if not isinstance(document, dict):
        raise _no_field("The body must be a JSON object.")
    if b"\\u" in body and not _encodable(document):
        raise _no_field("The body contains half of a surrogate pair.")
    return document


def string(body: dict[str, Any], name: str, default: str | None = None) -> str | None:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a string")
    return value


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(name, "must be true or false")
    return value


def integer(
    body: dict[str, Any], name: str, default: int | None = None, *, least: int | None = None, most: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, "must be a whole number")
    if least is not None and value < least:
        raise InvalidRequest(name, f"must be at least {least}")
    if value > (MAX_INTEGER if most is None else most):
        raise InvalidRequest(name, f"must be at most {MAX_INTEGER if most is None else most}")
    return value


def number(body: dict[str, Any], name: str, default: float | None = None) -> float | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(name, "must be a finite number")
    return float(value)


def mapping(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    return value


def token_ids(value: Any, name: str) -> list[int]:
    """A non-empty list of whole numbers. Their range is the engine's to check, which knows the vocabulary."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, "must be a non-empty list of token ids")
    for item in value:
        if type(item) is not int:
            raise InvalidRequest(name, "must hold whole numbers only")
        if not 0 <= item < 2**32:
            raise InvalidRequest(name, f"token id {str(item)[:24]} is outside the vocabulary")
    return value


def _encodable(document: dict[str, Any]) -> bool:
    """JSON can spell half a surrogate pair; no tokenizer and no UTF-8 can."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_field(message: str) -> InvalidRequest:
    error = InvalidRequest("body", message)
    error.field = None
    return error
