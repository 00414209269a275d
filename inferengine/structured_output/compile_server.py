"""The process that tries grammars out: `python -m inferengine.structured_output.compile_server`, started by
CompileProcess.

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
import ctypes
import json
import os
import resource
import selectors
import signal
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from inferengine.errors import InvalidRequest
from inferengine.structured_output.build import STACK_BYTES, Builder, Vocabulary, has_tools, on_large_stack
from inferengine.structured_output.json_grammar import Translation
from inferengine.structured_output.matcher import TOO_DEEP
from inferengine.structured_output.spec import GrammarSpec

PR_SET_PDEATHSIG = 1
MIB = 1024 * 1024
LENGTH = struct.Struct("<I")
QUICK_S = 0.05  # of processor time; most grammars take less
SECOND_S = 0.3
QUICK_LANES = 1  # processes at once for first tries
SLOW_LANES = 2  # and for the others
_LIBC = ctypes.CDLL(None)


class Frames:
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


class Job(NamedTuple):
    """A grammar to be tried out. `level`: how many times its time was not enough. `gives_up_tools`: the schemas of its
    tools are not held to, because it was beyond the limits with them."""

    id: int
    tenant: str
    spec: list[Any]
    level: int = 0
    gives_up_tools: bool = False


class Jobs:
    """Decides which grammar is compiled next, and for how long. New ones go first, for a short time.

    A grammar that takes 5 ms must not wait for one that takes seconds, and a client that sends many slow ones must not
    delay the others. So each is tried for a short time in a lane for first tries; what is not done by then starts over
    in a slower lane with more time. Within a lane tenants take turns. `limit_s` is the processor time after which a
    grammar is given up. Pure: no processes and no clock.
    """

    def __init__(self, limit_s: float) -> None:
        self.slices = [*(short for short in (QUICK_S, SECOND_S) if short < limit_s), limit_s]
        self.running: dict[int, Job] = {}
        self._waiting: list[OrderedDict[str, deque[Job]]] = [OrderedDict() for _ in self.slices]

    def add(self, job: Job) -> None:
        """Queue a job at its level."""
        self._waiting[job.level].setdefault(job.tenant, deque()).append(job)

    def next(self) -> Job | None:
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

    def out_of_time(self, id: int) -> Job | None:
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
        self._frames = Frames()
        self._children: dict[int, tuple[int, int]] = {}  # by job: process and the pipe that its answer comes from
        self._answers: dict[int, bytearray] = {}
        self._dropped: set[int] = set()
        self._builder: Builder
        self._jobs = Jobs(0.0)  # until the first message says how long
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
                self._jobs.add(Job(message["id"], message["tenant"], message["spec"]))
        return bool(data)

    def _begin(self, message: dict[str, Any]) -> None:
        self._builder = Builder(Vocabulary(message["tokenizer"], message["vocab_size"], message["eos_token_ids"]))
        self._builder.tokenizer()
        self._jobs = Jobs(message["compile_s"])
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

    def _start(self, job: Job) -> None:
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

    def _refuse(self, job: Job, why: str) -> None:
        """Refuse a grammar; one of tools is tried again without their schemas."""
        if job.gives_up_tools or not has_tools(GrammarSpec(*job.spec)):
            self._answer({"id": job.id, "refused": why})
        else:
            self._jobs.add(job._replace(level=0, gives_up_tools=True))

    def _cause_of_death(self, status: int) -> str:
        """Why a child that left no answer has ended."""
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended_by in (signal.SIGSEGV, signal.SIGBUS):
            return TOO_DEEP
        return f"needs more than {self._memory_bytes // MIB} MiB of memory to be compiled: simplify it"

    def _be_child(self, job: Job, target: int, parent: int) -> NoReturn:
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

    def _confine(self, job: Job, parent: int) -> None:
        """Bound what this child process takes: it ends with its parent, has limits of memory and time, and gives way to
        other processes once it was slow."""
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
    """Bytes of memory that this process allocated. Pages of files do not count: they are the system's."""
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


if __name__ == "__main__":
    main()
