"""CompileProcess: the engine's side of the process that tries grammars out (compile_server.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from inferengine.config import LimitsConfig
from inferengine.config.environment import variables
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output.build import Vocabulary
from inferengine.structured_output.compile_server import MIB, Frames, to_frame
from inferengine.structured_output.spec import GrammarSpec

logger = logging.getLogger(__name__)

READ_BYTES = 65_536
MAX_START_S = 30.0  # a quarter second on an idle machine, a second more for a large vocabulary


class TrialResult(NamedTuple):
    """What compiling a grammar took, or why it is refused. `grammar`: what it was translated to, where that is costly.
    `notes`: what it does not hold to."""

    refused: str | None
    cpu_s: float = 0.0
    num_bytes: int = 0
    grammar: str | None = None
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise InvalidRequest where the grammar was refused."""
        if self.refused is not None:
            raise InvalidRequest("grammar", self.refused)


Done = Callable[[TrialResult | InferEngineError], None]


class Trial:
    """A grammar that is being tried out."""

    def __init__(self, tenant: str, spec: GrammarSpec, done: Done) -> None:
        self.tenant = tenant
        self.spec = spec
        self.done = done
        self.is_slow = False  # its first time slice was not enough
        self.was_lost = False  # the process died once while it was there


class CompileProcess:
    """The process. It is started at the first trial, in the background, and again when it dies. All methods return at
    once.

    Two threads that sleep: one writes, which may have to wait for the process, and one reads and calls `done`.
    """

    def __init__(self, vocabulary: Vocabulary, limits: LimitsConfig) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._trials: dict[int, Trial] = {}
        self._next_id = 0
        self._requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: threading.Thread | None = None
        self._closed = False
        self._ready = threading.Event()
        self._started_s = 0.0

    @property
    def is_starting(self) -> bool:
        """Whether the process is being started: grammars wait for that, and not for other grammars."""
        return not self._ready.is_set() and time.monotonic() < self._started_s + MAX_START_S

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in the background, unless it has been started."""
        with self._lock:
            self._start()

    def submit(self, tenant: str, spec: GrammarSpec, done: Done) -> int:
        """Try a grammar out. `done` is called once, in a thread of this object, unless the trial is dropped before.
        Returns the number of the trial."""
        with self._lock:
            self._next_id += 1
            id = self._next_id
            self._trials[id] = Trial(tenant, spec, done)
            self._start()
            self._requests.put(self._request(id))
        return id

    def drop(self, id: int) -> None:
        """Forget a trial and kill what runs for it."""
        with self._lock:
            if self._trials.pop(id, None) is not None:
                self._requests.put({"drop": id})

    def is_slow(self, id: int) -> bool:
        """Whether the grammar itself takes long, and does not merely wait its turn."""
        trial = self._trials.get(id)
        return trial is not None and trial.is_slow

    def close(self) -> None:
        """End the process. Trials are not answered any more."""
        with self._lock:
            self._closed = True
            self._trials.clear()
            self._requests.put(None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._writer is None and not self._closed:
            self._started_s = time.monotonic()
            self._writer = threading.Thread(
                target=self._run, args=(self._requests,), name="grammar-process", daemon=True
            )
            self._writer.start()

    def _request(self, id: int) -> dict[str, Any]:
        trial = self._trials[id]
        return {"id": id, "tenant": trial.tenant, "spec": list(trial.spec)}

    def _run(self, requests: SimpleQueue[dict[str, Any] | None]) -> None:
        """Start the process and write to it until it is closed or gone. `requests`: what is for this process; the next
        one has its own."""
        vocabulary, limits = self._vocabulary, self._limits
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "inferengine.structured_output.compile_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**variables(), "MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            self._on_death(f"cannot be started: {error.strerror}")
            return
        threading.Thread(target=self._read, args=(process,), name="grammar-results", daemon=True).start()
        message: dict[str, Any] | None = {
            "tokenizer": vocabulary.tokenizer_json,
            "vocab_size": vocabulary.size,
            "eos_token_ids": vocabulary.eos_token_ids,
            "compile_s": limits.grammar_compile_s,
            "memory_bytes": limits.grammar_memory_mib * MIB,
            "token_s": limits.grammar_token_ms / 1e3,
        }
        assert process.stdin is not None
        try:
            while message is not None:
                process.stdin.write(to_frame(message))
                process.stdin.flush()
                message = requests.get()
        except OSError:
            pass  # it is gone: the reader sees that, too
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        frames = Frames()
        while data := os.read(process.stdout.fileno(), READ_BYTES):
            for message in frames.feed(data):
                if "ready" in message:
                    self._ready.set()
                elif "slow" in message:
                    if (trial := self._trials.get(message["id"])) is not None:
                        trial.is_slow = True
                else:
                    self._on_result(message.pop("id"), message)
        process.stdout.close()
        status = process.wait()
        if not self._closed:
            self._on_death(f"ended with status {status}")

    def _on_result(self, id: int, message: dict[str, Any]) -> None:
        with self._lock:
            trial = self._trials.pop(id, None)
        if trial is not None and "killed" in message:  # nothing is known against the grammar
            text = "The machine had no memory left to compile the grammar."
            trial.done(InferEngineError("overloaded", text, field="grammar", retry_after_s=2.0))
        elif trial is not None:
            took = message.get("cpu_s", 0.0), message.get("num_bytes", 0)
            trial.done(
                TrialResult(message.get("refused"), *took, message.get("grammar"), tuple(message.get("notes", ())))
            )

    def _on_death(self, why: str) -> None:
        """Try again, with a new process, the trials that have not been lost twice."""
        logger.error("the process that compiles grammars %s", why)
        with self._lock:
            self._ready.clear()
            self._process = None
            self._requests.put(None)  # ends the thread that writes
            self._requests, self._writer = SimpleQueue(), None
            lost = [self._trials.pop(id) for id, trial in list(self._trials.items()) if trial.was_lost]
            for id, trial in self._trials.items():
                trial.was_lost = True
                self._requests.put(self._request(id))
            if self._trials:
                self._start()
        for trial in lost:
            message = "The process that compiles grammars was lost twice."
            trial.done(InferEngineError("engine_unavailable", message, retry_after_s=2.0))
