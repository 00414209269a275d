"""Reading JSON of any size while streams go on.

CPython's parser keeps the interpreter's lock until it is done or meets Python code. A thread alone is of no use: 7 MB
of token ids hold everybody up for 160 ms there as well. With a hook in Python for every number and object others have
their turn, after 15 ms at the most; parsing takes three times as long, which is little beside what the engine has to
do with such a prompt. One long string has no hooks: 8 MB take 60 ms.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any, TypeVar

from inferengine.heap import give_back

LARGE = 256 * 1024  # bytes or characters: below, 0.2 to 3 ms, and a thread costs as much
GIVE_BACK_AFTER_S = 0.5
MOST_CONTAINERS = 100_000  # lists and objects: 8 MB of empty ones would take a second

Result = TypeVar("Result")


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


class Beside:
    """Where the large documents of one event loop are read: in a thread, one after the other. The loop takes turns with
    one thread then, however many of them come at once."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def do(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
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
