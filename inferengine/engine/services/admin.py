"""The operations of ADMIN messages: what an operator may ask of a running engine. Used by the I/O thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferengine.engine.io.connections import AdminOp, SendReply
from inferengine.engine.io.publisher import Publisher
from inferengine.engine.lifecycle import Lifecycle, Shutdown
from inferengine.engine.loop import EngineRef
from inferengine.engine.services.adapters import AdapterService
from inferengine.engine.services.preparation import GrammarService
from inferengine.engine.services.profiler import Profiler
from inferengine.engine.stats import StatsReporter
from inferengine.errors import InferEngineError
from inferengine.process.system import give_back
from inferengine.wire.messages import DRAINING, READY


class AdminOperations:
    """`table` has the operations by name."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        shutdown: Shutdown,
        engine: EngineRef,
        publisher: Publisher,
        adapters: AdapterService,
        grammars: GrammarService,
        profiler: Profiler,
        stats: StatsReporter,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """`call` takes a function to the I/O thread."""
        self._lifecycle = lifecycle
        self._shutdown = shutdown
        self._engine = engine
        self._publisher = publisher
        self._grammars = grammars
        self._call = call
        self.table: dict[str, AdminOp] = {
            "stats": lambda arguments, reply: reply(stats.stats()),
            "config": lambda arguments, reply: reply(stats.config()),
            "flush": self._flush,
            "cancel_all": self._cancel_all,
            "drain": self._drain,
            "resume": self._resume,
            "adapters": adapters.list,
            "load_adapter": adapters.load,
            "unload_adapter": adapters.unload,
            "profile": profiler.profile,
        }

    def _flush(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Drop cached prefixes and grammars, and return free memory to the system."""

        def flushed(blocks: int) -> None:
            self._grammars.flush()
            give_back()
            reply({"blocks": blocks})

        self._engine.require().loop.flush(lambda blocks: self._call(lambda: flushed(blocks)))

    def _cancel_all(self, arguments: dict[str, Any], reply: SendReply) -> None:
        count = self._publisher.num_open
        self._engine.require().loop.cancel_all("abort", ("cancelled", "An operator cancelled all requests."))
        reply({"requests": count})

    def _drain(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Drain the engine. With `exit` false it stays, and `resume` lets it serve again."""
        reply({"active_requests": self._publisher.num_open})
        if arguments.get("exit", True):
            self._shutdown.drain()
        elif self._lifecycle.state == READY:
            self._lifecycle.enter(DRAINING)

    def _resume(self, arguments: dict[str, Any], reply: SendReply) -> None:
        if self._shutdown.begun or self._lifecycle.state not in (READY, DRAINING):
            raise InferEngineError("draining", "The engine is about to exit, or has not begun.")
        self._lifecycle.enter(READY)
        reply({"state": READY})
