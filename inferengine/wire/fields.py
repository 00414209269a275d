"""Reading the values of a message's body: each returns the value, or raises the WireError that names the key.

The limits are the wire's own: what depends on the model is checked by the engine's link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from inferengine.errors import KINDS, bounded
from inferengine.wire.messages import ID_BYTES, Reject

_T = TypeVar("_T")

MAX_NAME_CHARACTERS = 256  # role, name, tenant, label, file names
MAX_SALT_BYTES = 1024
MAX_NOTE_BYTES = 256 * 1024
MAX_LIST_ITEMS = 65_536  # entries of one list in a message, beyond which no honest client goes
MAX_U32 = 2**32 - 1
MAX_I64 = 2**63 - 1


class WireError(Exception):
    """A message that cannot be used. `id` and `stream` are given where they could still be read."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "protocol_error",
        field: str | None = None,
        id: bytes | None = None,
        stream: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.id = id
        self.stream = stream

    def reject(self) -> Reject:
        """The answer to it."""
        return Reject(self.id, self.stream, self.code, bounded(self.message), self.field, KINDS[self.code].retryable)


def map_body(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise WireError(f"the body must be a map, not {type(body).__name__}")
    return body


def array_body(body: Any, least: int) -> list[Any]:
    if not isinstance(body, list) or len(body) < least:
        raise WireError(f"the body must be an array of at least {least} element(s)")
    return body


def integer(value: Any, field: str, low: int = 0, high: int = MAX_I64) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{field}: must be a whole number in [{low}, {high}]", field=field)
    return value


def number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise WireError(f"{field}: must be a finite number", field=field)
    return float(value)


def string(value: Any, field: str, most: int = MAX_NAME_CHARACTERS) -> str:
    if not isinstance(value, str):
        raise WireError(f"{field}: must be a string", field=field)
    if len(value) > most:
        raise WireError(f"{field}: at most {most} characters", field=field)
    return value


def binary(value: Any, field: str, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise WireError(f"{field}: must be {length} bytes (bin)", field=field)
    return value


def boolean(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{field}: must be true or false", field=field)
    return value


def mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{field}: must be a map", field=field)
    return value


def choice(value: Any, field: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise WireError(f"{field}: must be one of {', '.join(choices)}", field=field)
    return cast(str, value)


def each(value: Any, field: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list):
        raise WireError(f"{field}: must be an array", field=field)
    if len(value) > MAX_LIST_ITEMS:
        raise WireError(f"{field}: at most {MAX_LIST_ITEMS} entries", field=field)
    try:
        return tuple(read(item, field) for item in value)
    except WireError:
        for place, item in enumerate(value):
            read(item, f"{field}[{place}]")  # the one at fault raises again, with its place
        raise


def optional(value: Any, read: Callable[..., _T], *arguments: Any) -> _T | None:
    return None if value is None else read(value, *arguments)


def u32(value: Any, field: str) -> int:
    return integer(value, field, 0, MAX_U32)


def request_id(value: Any, field: str) -> bytes:
    return binary(value, field, ID_BYTES)


def protocol(value: Any) -> tuple[int, int]:
    pair = each(value, "protocol", u32)
    if len(pair) < 2:
        raise WireError("protocol: must be [major, minor]", field="protocol")
    return (pair[0], pair[1])


def note(body: dict[str, Any]) -> bytes:
    note = body.get("note", b"")
    if not isinstance(note, bytes) or len(note) > MAX_NOTE_BYTES:
        raise WireError(f"note: must be bytes (bin), at most {MAX_NOTE_BYTES}", field="note")
    return note
