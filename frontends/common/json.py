"""JSON of requests and answers: parse a body, read its fields with errors that name them, and write events.

CPython's JSON parser holds the interpreter's lock until it is done or calls Python code, so a thread alone does not
help: 7 MB of token ids block every stream for 160 ms. Large texts are therefore parsed in a thread (`OffLoop`) with a
Python hook for every number and object, at which the lock can change hands: others wait 15 ms at most. Parsing takes
three times as long, which is little beside the rest of the work on such a prompt. A long string calls no hook: 8 MB
take 60 ms.

Server-Sent Events end with two LF, because common clients split on a blank line of LFs.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any, TypeVar

import msgspec

from inferengine.config import LimitsConfig
from inferengine.errors import HALF_PAIR, InferEngineError, InvalidRequest
from inferengine.fields import FieldError, check, field_docs, read
from inferengine.process.system import give_back

LARGE = 256 * 1024  # bytes or characters: parsing less takes 0.2 to 3 ms, about the cost of a thread
GIVE_BACK_AFTER_S = 0.5
MOST_CONTAINERS = 100_000  # lists and objects: 8 MB of empty ones would take a second
MAX_PATH_CHARACTERS = 100
MAX_DIGITS = 9
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=msgspec.Struct)


class TooManyContainers(ValueError):
    """A text has more than MOST_CONTAINERS lists and objects."""

    def __init__(self) -> None:
        super().__init__(f"more than {MOST_CONTAINERS} lists and objects")


def parse(body: bytes | str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON without blocking other threads for long. Raises what json.loads raises, and TooManyContainers."""
    text = body.decode(json.detect_encoding(body), "surrogatepass") if isinstance(body, bytes) else body
    if len(text) < LARGE:
        return json.loads(text, parse_constant=parse_constant)
    if text.count("[") + text.count("{") > MOST_CONTAINERS and _num_containers(text) > MOST_CONTAINERS:
        raise TooManyContainers
    return json.loads(text, object_hook=_same, parse_int=_integer, parse_float=_decimal, parse_constant=parse_constant)


class OffLoop:
    """Runs work on large documents in a thread, one after the other, so that the event loop competes with one thread
    only."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of `work(*arguments)`. Runs it at once where `size`, in bytes or characters, is small."""
        if size < LARGE:
            return work(*arguments)
        async with self._lock:
            return await asyncio.to_thread(work, *arguments)

    def give_back_soon(self) -> None:
        """Return the memory of large documents to the system after GIVE_BACK_AFTER_S, once for all calls until then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        gc.collect()  # documents are often part of a cycle; objects from the start of the process are frozen
        asyncio.get_running_loop().run_in_executor(None, give_back)


class Containers:
    """Counts lists and objects, as a hook of a parser. Raises TooManyContainers."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, value: Result) -> Result:
        """Count one list or object. Raises TooManyContainers."""
        self._num += 1
        if self._num > MOST_CONTAINERS:
            raise TooManyContainers
        return value


def _num_containers(text: str) -> int:
    """Count the opening brackets and braces outside of strings."""
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
    return sum(part.count("[") + part.count("{") for part in outside)


def _same(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _integer(digits: str) -> int:
    return int(digits)


def _decimal(digits: str) -> float:
    return float(digits)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object. Raises InvalidRequest without a field for invalid JSON, and
    request_too_large for very many lists and objects."""
    try:
        document = parse(body)
    except RecursionError:
        raise _no_field("The body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise _no_field(f"The body is not valid JSON at position {error.pos}: {error.msg}.") from None
    except UnicodeDecodeError as error:
        raise _no_field(f"The body is not valid JSON: byte {error.start} is not {error.encoding.upper()}.") from None
    except TooManyContainers as error:
        raise InferEngineError("request_too_large", f"The body has {error}.") from None
    except ValueError:
        raise _no_field("The body is not valid JSON: a number has thousands of digits.") from None
    if not isinstance(document, dict):
        raise _no_field("The body must be a JSON object.")
    # Surrogates are written as escapes, as ED in UTF-8, or in UTF-16 and UTF-32, which have zero bytes.
    if b"\\u" in body or b"\xed" in body or b"\x00" in body or body[:1] in (b"\xff", b"\xfe"):
        refuse_half_pairs(document)
    return document


def refuse_half_pairs(document: dict[str, Any]) -> None:
    """Raise InvalidRequest for half of a surrogate pair in a string: JSON can write it, UTF-8 and tokenizers cannot."""
    if (place := _half_pair(document)) is not None:
        raise InvalidRequest(place, HALF_PAIR)


@functools.cache
def _names_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, ...], msgspec.Struct | None]:
    """Return the names of a Struct's fields, and the Struct of a body without any of them; None if one is required."""
    docs = field_docs(kind).values()
    return tuple(doc.name for doc in docs), None if any(doc.required for doc in docs) else kind()


def read_fields(kind: type[Fields], body: Mapping[str, Any], limits: LimitsConfig | None = None) -> Fields:
    """Read the fields of a Struct from a body, within its ranges and those that `limits` decide. Null counts as absent,
    and other keys are ignored. Raises InvalidRequest naming the field."""
    names, nothing = _names_of(kind)
    given = {name: value for name in names if (value := body.get(name)) is not None}
    if not given and nothing is not None:
        return nothing  # type: ignore[return-value]
    try:
        found = read(kind, given)
        check(found, limits)
    except FieldError as error:
        raise InvalidRequest(error.field, error.message) from None
    return found


def read_string(body: dict[str, Any], name: str, default: str | None = None) -> str | None:
    """Return the string under `name`, or `default` if missing or null. Raises InvalidRequest for other types."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a string")
    return value


def read_flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """Return the boolean under `name`, or `default` if missing or null. Raises InvalidRequest for other types."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(name, "must be true or false")
    return value


def read_mapping(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object under `name`, or {} if missing or null. Raises InvalidRequest for other types."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    return value


def whole_number(text: str) -> int | None:
    """Return the number that digits of ASCII write, as in a query; None for any other text, and for a number of more
    than MAX_DIGITS digits. Zeros before it change nothing."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal()) or len(digits) > MAX_DIGITS:
        return None
    return int(digits or "0")


def read_token_ids(value: Any, name: str) -> list[int]:
    """Return a non-empty list of token ids. Raises InvalidRequest. The engine checks the vocabulary's size."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, "must be a non-empty list of token ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32:  # a million in some ten milliseconds
        return value
    for item in value:
        if type(item) is not int:
            raise InvalidRequest(name, "must hold whole numbers only")
        if not 0 <= item < 2**32:
            raise InvalidRequest(name, f"token id {str(item)[:24]} is outside the vocabulary")
    return value


def _half_pair(document: dict[str, Any]) -> str | None:
    """Return the path of a string with half of a surrogate pair, or None."""
    todo: list[tuple[str, Any]] = [("", document)]
    while todo:  # without recursion: a body may be nested deeper than Python's stack
        path, value = todo.pop()
        if isinstance(value, str):
            if not _encodable(value):
                return path
        elif isinstance(value, dict):
            for name, item in value.items():
                if not _encodable(name):
                    return path or "body"
                todo.append((_under(path, f".{name[:40]}" if path else name[:40]), item))
        elif isinstance(value, list):
            kinds = (str, dict, list)  # a long list has numbers
            todo += [(_under(path, f"[{place}]"), item) for place, item in enumerate(value) if isinstance(item, kinds)]
    return None


def _under(path: str, step: str) -> str:
    """Append a step to a path, unless it is long already."""
    return path + step if len(path) < MAX_PATH_CHARACTERS else path


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_field(message: str) -> InvalidRequest:
    error = InvalidRequest("body", message)
    error.field = None
    return error


def quote(text: str) -> bytes:
    """Return `text` as a JSON string with its quotes."""
    return encode_basestring(text).encode()


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any, name: str = "") -> bytes:
    """Return one Server-Sent Event. Its JSON has no line break."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"
