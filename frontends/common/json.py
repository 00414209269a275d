"""Reading a request's JSON fields: each reader gives a value of its type, or an InvalidRequest that names the field.

Reading JSON of any size while streams go on.

CPython's parser keeps the interpreter's lock until it is done or meets Python code. A thread alone is of no use: 7 MB
of token ids hold everybody up for 160 ms there as well. With a hook in Python for every number and object others have
their turn, after 15 ms at the most; parsing takes three times as long, which is little beside what the engine has to
do with such a prompt. One long string has no hooks: 8 MB take 60 ms.

Server-Sent Events as bytes. A chunk differs from the last one only in a few places, so the rest is made once.

Separators are LF: common clients split on a blank line made of two LFs.
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
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import FieldError, check, field_docs, read
from inferengine.process.system import give_back

LARGE = 256 * 1024  # bytes or characters: below, 0.2 to 3 ms, and a thread costs as much
GIVE_BACK_AFTER_S = 0.5
MOST_CONTAINERS = 100_000  # lists and objects: 8 MB of empty ones would take a second

Result = TypeVar("Result")
Fields = TypeVar("Fields", bound=msgspec.Struct)


class TooManyContainers(ValueError):
    """More lists and objects than any request has."""

    def __init__(self) -> None:
        super().__init__(f"more than {MOST_CONTAINERS} lists and objects")


def parse(body: bytes | str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """As json.loads, which says what it raises; and TooManyContainers. Other threads go on meanwhile."""
    text = body.decode(json.detect_encoding(body), "surrogatepass") if isinstance(body, bytes) else body
    if len(text) < LARGE:
        return json.loads(text, parse_constant=parse_constant)
    if text.count("[") + text.count("{") > MOST_CONTAINERS and _num_containers(text) > MOST_CONTAINERS:
        raise TooManyContainers
    return json.loads(text, object_hook=_same, parse_int=_integer, parse_float=_decimal, parse_constant=parse_constant)


class OffLoop:
    """Where the large documents of one event loop are read: in a thread, one after the other. The loop takes turns with
    one thread then, however many of them come at once."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """The result of `work`, which is done at once where `size`, in bytes or characters, is small."""
        if size < LARGE:
            return work(*arguments)
        async with self._lock:
            return await asyncio.to_thread(work, *arguments)

    def give_back_soon(self) -> None:
        """Return the memory of a large document to the system, a little later, when nobody holds it any more. Once for
        many that end together."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        gc.collect()  # what was read is often part of a cycle; all that was there at the start is frozen
        asyncio.get_running_loop().run_in_executor(None, give_back)


class Containers:
    """A hook that counts: for parsers that have one for lists and objects. Raises TooManyContainers."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, value: Result) -> Result:
        """Count one list or object. Raises TooManyContainers."""
        self._num += 1
        if self._num > MOST_CONTAINERS:
            raise TooManyContainers
        return value


def _num_containers(text: str) -> int:
    """Those that open outside of strings."""
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
    return sum(part.count("[") + part.count("{") for part in outside)


def _same(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _integer(digits: str) -> int:
    return int(digits)


def _decimal(digits: str) -> float:
    return float(digits)


MAX_PATH_CHARACTERS = 100


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Broken JSON of any kind is an InvalidRequest without a field; one with very many lists
    and objects is request_too_large."""
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
    # Escapes spell it, and bytes do: ED in UTF-8, anything in UTF-16 and UTF-32, which have zeros.
    if b"\\u" in body or b"\xed" in body or b"\x00" in body or body[:1] in (b"\xff", b"\xfe"):
        refuse_half_pairs(document)
    return document


def refuse_half_pairs(document: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair; no tokenizer and no UTF-8 can."""
    if (place := _half_pair(document)) is not None:
        raise InvalidRequest(place, "has half of a surrogate pair, which is no character: send both halves or none")


@functools.cache
def _names_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, ...], msgspec.Struct | None]:
    """The names of a Struct's fields, and the frozen one that a body without any of them makes: most make it."""
    docs = field_docs(kind).values()
    return tuple(doc.name for doc in docs), None if any(doc.required for doc in docs) else kind()


def read_fields(kind: type[Fields], body: Mapping[str, Any], limits: LimitsConfig | None = None) -> Fields:
    """Read the fields of a Struct from a body, within its ranges and those that `limits` decide. Null says nothing, and
    other keys are ignored. Raises InvalidRequest naming the field."""
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


def all_between(items: list[Any], least: int, most: int) -> bool:
    """Whether all are whole numbers in [least, most]: a million of them in some ten milliseconds."""
    return not items or (set(map(type, items)) == {int} and min(items) >= least and max(items) <= most)


def read_token_ids(value: Any, name: str) -> list[int]:
    """A non-empty list of whole numbers. Their range is the engine's to check, which knows the vocabulary."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, "must be a non-empty list of token ids")
    if all_between(value, 0, 2**32 - 1):
        return value
    for item in value:
        if type(item) is not int:
            raise InvalidRequest(name, "must hold whole numbers only")
        if not 0 <= item < 2**32:
            raise InvalidRequest(name, f"token id {str(item)[:24]} is outside the vocabulary")
    return value


def _half_pair(document: dict[str, Any]) -> str | None:
    """Where the first one is that is found."""
    todo: list[tuple[str, Any]] = [("", document)]
    while todo:  # not by recursion: a body may be nested deeper than Python's stack
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
            kinds = (str, dict, list)  # a long list is one of numbers
            todo += [(_under(path, f"[{place}]"), item) for place, item in enumerate(value) if isinstance(item, kinds)]
    return None


def _under(path: str, step: str) -> str:
    """As far as people read it."""
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


DONE = b"data: [DONE]\n\n"


def quote(text: str) -> bytes:
    """`text` as a JSON string with its quotes."""
    return encode_basestring(text).encode()


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any, name: str = "") -> bytes:
    """One event; json.dumps leaves no line break inside."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"
