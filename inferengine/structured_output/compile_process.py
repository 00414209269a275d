"""The process that tries grammars out (`python -m inferengine.structured_output.compile_process`), and CompileProcess,
the engine's side of it.

What a grammar costs is known only by compiling it, and llguidance cannot be interrupted: two schemas with a hundred
patterns each keep two threads busy for good and take gigabytes. Here each grammar has a process of its own, forked from
this one, which has the vocabulary: it is killed by the kernel when its processor time is used up, and cannot take more
memory than it may. It compiles the grammar and follows it by a few tokens; the answer is what that took, or why the
grammar is refused. The engine then compiles it again, knowing the bounds; a matcher cannot travel between processes.

Requests come on standard input and answers go to standard output, both as a length (u32, little-endian) and JSON. At
the end of the input, whatever ended the engine, this process and its children end. It does nothing while it waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

from inferengine.config import LimitsConfig
from inferengine.config.environment import variables
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import end_with_parent
from inferengine.structured_output.build import STACK_BYTES, Builder, Vocabulary, has_tools, on_large_stack
from inferengine.structured_output.json_grammar import Translation
from inferengine.structured_output.matcher import TOO_DEEP
from inferengine.structured_output.spec import GrammarSpec

logger = logging.getLogger(__name__)


MIB = 1024 * 1024
LENGTH = struct.Struct("<I")
QUICK_S = 0.05  # of processor time; most grammars take less
SECOND_S = 0.3
QUICK_LANES = 1  # processes at once for first tries
SLOW_LANES = 2  # and for the others


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Take bytes. Yields the messages that are complete."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if len(self._bytes) < LENGTH.size + length:
                return
            frame = bytes(self._bytes[LENGTH.size : LENGTH.size + length])
            del self._bytes[: LENGTH.size + length]
            yield json.loads(frame)


def to_frame(message: dict[str, Any]) -> bytes:
    """Encode a message: its length (u32, little-endian), then JSON."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class CompileJob(NamedTuple):
    """A grammar to be tried out. `level`: how many times its time was not enough. `gives_up_tools`: the schemas of its
    tools are not held to, because it was beyond the limits with them."""

    id: int
    tenant: str
    spec: list[Any]
    level: int = 0
    gives_up_tools: bool = False


class CompileJobs:
    """Decides which grammar is compiled next, and for how long. New ones go first, for a short time.

    A grammar that takes 5 ms must not wait for one that takes seconds, and a client that sends many slow ones must not
    delay the others. So each is tried for a short time in a lane for first tries; what is not done by then starts over
    in a slower lane with more time. Within a lane tenants take turns. `limit_s` is the processor time after which a
    grammar is given up. Pure: no processes and no clock.
    """

    def __init__(self, limit_s: float) -> None:
        self.slices = [*(short for short in (QUICK_S, SECOND_S) if short < limit_s), limit_s]
        self.running: dict[int, CompileJob] = {}
        self._waiting: list[OrderedDict[str, deque[CompileJob]]] = [OrderedDict() for _ in self.slices]

    def add(self, job: CompileJob) -> None:
        """Queue a job at its level."""
        self._waiting[job.level].setdefault(job.tenant, deque()).append(job)

    def next(self) -> CompileJob | None:
        """Return the job to start now, which runs from then on; None: there is none, or no room."""
        num_slow = sum(job.level > 0 for job in self.running.values())
        has_quick_room = len(self.running) - num_slow < QUICK_LANES
        for level, waiting in enumerate(self._waiting):
            if not waiting or not (num_slow < SLOW_LANES if level else has_quick_room):
                continue
            tenant, queue = waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                waiting[tenant] = queue  # behind the others
            self.running[job.id] = job
            return job
        return None

    def out_of_time(self, id: int) -> CompileJob | None:
        """Queue a job that has used up its time at the next level, and return it; None after the last level."""
        job = self.running.pop(id)
        if job.level + 1 == len(self.slices):
            return None
        job = job._replace(level=job.level + 1)
        self.add(job)
        return job

    def done(self, id: int) -> None:
        """Free the lane of a job that has ended."""
        self.running.pop(id, None)

    def drop(self, id: int) -> None:
        """Take a job out of the queues. One that runs stays until it is `done`."""
        for waiting in self._waiting:
            for tenant, queue in list(waiting.items()):
                kept = deque(job for job in queue if job.id != id)
                if kept:
                    waiting[tenant] = kept
                else:
                    del waiting[tenant]


class CompileServer:
    """Reads requests, keeps the children, answers. One thread."""

    def __init__(self, source: int, target: int) -> None:
        """Descriptors of the requests and of the answers."""
        self._source = source
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._frames = FrameReader()
        self._children: dict[int, tuple[int, int]] = {}  # by job: process and the pipe that its answer comes from
        self._answers: dict[int, bytearray] = {}
        self._dropped: set[int] = set()
        self._builder: Builder
        self._jobs = CompileJobs(0.0)  # until the first message says how long
        self._memory_bytes = 0
        self._token_s = 0.0

    def run(self) -> None:
        """Serve until the input ends."""
        self._selector.register(self._source, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._read_child(key.data)
                    elif not self._read_requests():
                        return
                while (job := self._jobs.next()) is not None:
                    self._start(job)
        finally:
            for pid, _ in self._children.values():
                os.kill(pid, signal.SIGKILL)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _read_requests(self) -> bool:
        data = os.read(self._source, MIB)
        for message in self._frames.feed(data):
            if "tokenizer" in message:
                self._begin(message)
            elif "drop" in message:
                self._drop(message["drop"])
            else:
                self._jobs.add(CompileJob(message["id"], message["tenant"], message["spec"]))
        return bool(data)

    def _begin(self, message: dict[str, Any]) -> None:
        self._builder = Builder(Vocabulary(message["tokenizer"], message["vocab_size"], message["eos_token_ids"]))
        self._builder.tokenizer()
        self._jobs = CompileJobs(message["compile_s"])
        self._memory_bytes = message["memory_bytes"]
        self._token_s = message["token_s"]
        self._answer({"ready": True})

    def _drop(self, id: int) -> None:
        self._jobs.drop(id)
        if id in self._children:
            self._dropped.add(id)
            os.kill(self._children[id][0], signal.SIGKILL)

    def _answer(self, message: dict[str, Any]) -> None:
        data = memoryview(to_frame(message))
        while data:
            data = data[os.write(self._target, data) :]

    # -- the children ------------------------------------------------------------------------------------------------

    def _start(self, job: CompileJob) -> None:
        source, target = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_child(job, target, parent)
        os.close(target)
        self._children[job.id] = pid, source
        self._answers[job.id] = bytearray()
        self._selector.register(source, selectors.EVENT_READ, job.id)

    def _read_child(self, id: int) -> None:
        pid, source = self._children[id]
        data = os.read(source, MIB)
        self._answers[id] += data
        if data:
            return
        self._selector.unregister(source)
        os.close(source)
        del self._children[id]
        _, status = os.waitpid(pid, 0)
        answer = self._answers.pop(id)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if id in self._dropped:
            self._dropped.discard(id)
            self._jobs.done(id)
        elif ended_by == signal.SIGKILL and not answer:  # not by this process: the kernel takes it first (_confine)
            self._jobs.done(id)
            self._answer({"id": id, "killed": True})
        elif ended_by == signal.SIGPROF:
            self._out_of_time(id)
        elif answer:
            self._jobs.done(id)
            self._answer({"id": id, **json.loads(answer)})
        else:
            job = self._jobs.running[id]
            self._jobs.done(id)
            self._refuse(job, self._cause_of_death(status))

    def _out_of_time(self, id: int) -> None:
        job = self._jobs.running[id]
        waiting = self._jobs.out_of_time(id)
        if waiting is not None:
            self._answer({"id": id, "slow": True})
            return
        limit_s = self._jobs.slices[-1]
        self._refuse(job, f"could not be compiled in {limit_s:g} s: simplify it")

    def _refuse(self, job: CompileJob, why: str) -> None:
        """Refuse a grammar; one of tools is tried again without their schemas."""
        if job.gives_up_tools or not has_tools(GrammarSpec(*job.spec)):
            self._answer({"id": job.id, "refused": why})
        else:
            self._jobs.add(job._replace(level=0, gives_up_tools=True))

    def _cause_of_death(self, status: int) -> str:
        """Return why a child that left no answer has ended."""
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended_by in (signal.SIGSEGV, signal.SIGBUS):
            return TOO_DEEP
        return f"needs more than {self._memory_bytes // MIB} MiB of memory to be compiled: simplify it"

    def _be_child(self, job: CompileJob, target: int, parent: int) -> NoReturn:
        """Compile one grammar and write what came of it."""
        try:
            self._confine(job, parent)
            begin_s, begin_bytes = time.process_time(), _anonymous_bytes()
            spec = GrammarSpec(*job.spec)
            try:
                answer = self._try_out(spec, job.gives_up_tools)
                kept = max(0, _anonymous_bytes() - begin_bytes)
                answer |= {"cpu_s": time.process_time() - begin_s, "num_bytes": kept}
            except InvalidRequest as error:
                answer = {"refused": error.message}
            data = memoryview(json.dumps(answer).encode())
            while data:
                data = data[os.write(target, data) :]
        except BaseException:  # without an answer the grammar is refused
            os._exit(1)
        os._exit(0)

    def _try_out(self, spec: GrammarSpec, gives_up_tools: bool) -> dict[str, Any]:
        """Compile a grammar and follow it. Returns what the engine needs to compile it again."""

        def attempt(gives_up: bool) -> Translation:
            built = on_large_stack(lambda: self._builder.build(spec, gives_up_tools=gives_up))
            self._builder.try_out(built.matcher, self._token_s)
            return built.translation

        try:
            translation = attempt(gives_up_tools)
        except InvalidRequest:
            if gives_up_tools or not has_tools(spec):
                raise
            translation = attempt(True)
        grammar = translation.grammar if translation.is_costly else None
        return {"grammar": grammar, "notes": translation.notes}

    def _confine(self, job: CompileJob, parent: int) -> None:
        """Bound what this child process takes: it ends with its parent, has limits of memory and time, and gives way to
        other processes once it was slow."""
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in {0, 1, 2, self._source, self._target}:
            os.dup2(nothing, descriptor)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        if job.level:
            with contextlib.suppress(OSError):
                os.nice(5)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        most = _virtual_bytes() + self._memory_bytes + STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, self._jobs.slices[job.level])


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _anonymous_bytes() -> int:
    """Return the bytes of memory that this process allocated. Pages of files do not count: they are the system's."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:")), 0)


def main() -> None:
    """Serve on standard input and output. Signals to the process group are ignored: the engine ends this process by
    closing the pipe."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    source, target = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # prints go to standard error, not between the answers
    CompileServer(source, target).run()


# -- the engine's side -------------------------------------------------------------------------------------------------


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


OnTrialResult = Callable[[TrialResult | InferEngineError], None]


class Trial:
    """A grammar that is being tried out."""

    def __init__(self, tenant: str, spec: GrammarSpec, done: OnTrialResult) -> None:
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

    def submit(self, tenant: str, spec: GrammarSpec, done: OnTrialResult) -> int:
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
        """Return whether the grammar itself takes long, and does not merely wait its turn."""
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
                [sys.executable, "-m", "inferengine.structured_output.compile_process"],
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
        frames = FrameReader()
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


if __name__ == "__main__":
    main()


READ_BYTES = 65_536
MAX_START_S = 30.0  # a quarter second on an idle machine, a second more for a large vocabulary
