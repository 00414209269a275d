"""AdapterService: the LoRA adapters of a running engine, by name; loaded and unloaded while it serves.

Names belong to the I/O thread, weights to the loop's. An unloaded name is gone at once for new requests; requests that
run with it run on, and its weights are removed when the last of them has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from inferengine.core.executor import AdapterStore, is_fatal
from inferengine.engine.io.publisher import Publisher
from inferengine.engine.loop import Loop
from inferengine.errors import InferEngineError, InvalidRequest

SendReply = Callable[[Any], None]

logger = logging.getLogger(__name__)


class AdapterService:
    """All methods belong to the I/O thread; `call` brings a function there from any other."""

    def __init__(self, publisher: Publisher, call: Callable[[Callable[[], None]], None]) -> None:
        self.names: dict[str, int] = {}  # changed in place: others read it
        self._publisher, self._call = publisher, call
        self._store: AdapterStore | None = None
        self._loop: Loop | None = None
        self._coming: set[str] = set()
        self._leaving: set[int] = set()

    def begin(self, store: AdapterStore | None, loop: Loop) -> None:
        """Start with the loaded model and its adapters."""
        self._store, self._loop = store, loop
        if store is not None:
            self.names.update(store.names())

    def resolve(self, name: str) -> int:
        """Return an adapter's number; 0 for an empty name. Raises InferEngineError."""
        if name and name not in self.names:
            raise InferEngineError("model_not_found", f"there is no adapter {name[:128]}", field="adapter")
        return self.names[name] if name else 0

    def tick(self) -> None:
        """Remove unloaded adapters that no request uses any more."""
        if self._leaving and self._loop is not None and self._store is not None:
            in_use = {log.submission.adapter for log in self._publisher.open_logs()}
            for number in self._leaving - in_use:
                self._loop.call(partial(self._store.remove, number))
            self._leaving &= in_use

    # -- what operators ask for --------------------------------------------------------------------------------------

    def list(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Answer with the names of all adapters."""
        reply({"adapters": sorted(self.names)})

    def load(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Load an adapter. Answers when requests may name it. Raises `conflict` for a name that is loaded."""
        store, name = self._ready(), self._name(arguments)
        if name in self.names or name in self._coming:
            raise InferEngineError("conflict", f"the adapter {name} is loaded already", field="name")
        self._coming.add(name)
        threading.Thread(target=self._read, args=(store, name, reply), name="inferengine-adapter", daemon=True).start()

    def unload(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Unload an adapter. Answers at once, with the number of requests that still run with it."""
        self._ready()
        number = self.resolve(self._name(arguments))
        del self.names[self._name(arguments)]
        self._leaving.add(number)
        running = sum(log.submission.adapter == number for log in self._publisher.open_logs())
        reply({"running_requests": running})

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ready(self) -> AdapterStore:
        if self._loop is None:
            raise InferEngineError("engine_unavailable", "The engine is still loading.")
        if self._store is None:
            raise InferEngineError(
                "unsupported", "this engine has no folder of adapters: set model.adapters", field="op"
            )
        return self._store

    def _name(self, arguments: dict[str, Any]) -> str:
        name = arguments.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequest("name", "must be the name of an adapter")
        return name

    def _read(self, store: AdapterStore, name: str, reply: SendReply) -> None:
        """Read an adapter's files. In a thread of its own, because reading takes time."""
        try:
            adapter = store.read(name)
        except InferEngineError as error:
            self._call(partial(self._end, name, None, error, reply))
            return
        except Exception:
            failure = InferEngineError("engine_error", f"the adapter {name[:128]} cannot be read", field="name")
            self._call(partial(self._end, name, None, failure, reply))
            return
        if self._loop is not None:
            self._loop.call(partial(self._place, store, name, adapter, reply))

    def _place(self, store: AdapterStore, name: str, adapter: Any, reply: SendReply) -> None:
        """Load an adapter onto the device. In the loop's thread, between steps."""
        try:
            number = store.add(adapter)
        except InferEngineError as error:
            self._call(partial(self._end, name, None, error, reply))
        except Exception as error:
            if is_fatal(error):
                raise
            logger.exception("the adapter %s cannot be loaded", name)
            text = f"the adapter {name[:128]} cannot be loaded: the engine's log has the cause"
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                text = f"there is no memory for the adapter {name[:128]}: unload another one first"
            self._call(partial(self._end, name, None, InferEngineError("engine_error", text, field="name"), reply))
        else:
            self._call(partial(self._end, name, number, None, reply))

    def _end(self, name: str, number: int | None, error: InferEngineError | None, reply: SendReply) -> None:
        self._coming.discard(name)
        if number is None:
            reply(error)
            return
        self.names[name] = number
        reply({"adapters": sorted(self.names)})
