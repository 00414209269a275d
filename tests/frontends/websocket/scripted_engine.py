"""An engine for tests: the real wire on a real ROUTER, with answers, pace and faults that the test decides.

Outputs are logs, as in the engine: a request runs on whoever listens, and ATTACH reads it from any cursor.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

from inferengine.text import Tokenizer
from inferengine.text.tokenizer import fingerprint
from inferengine.wire import codec, sockets
from inferengine.wire.messages import (
    READY,
    Accept,
    Attach,
    Bye,
    Cancel,
    Done,
    Hello,
    Message,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Reject,
    Step,
    Submit,
    Welcome,
)

HEARTBEAT_S = 0.5
EOS = 1


class Output:
    """The log of one choice."""

    def __init__(self, token_ids: list[int], max_tokens: int | None) -> None:
        self.planned = [*token_ids, EOS][:max_tokens]
        self.end = ("stop", EOS) if len(self.planned) > len(token_ids) else ("length", None)
        self.token_ids: list[int] = []
        self.ended: tuple[str, Any] | None = None


class Subscriber:
    """One stream of one peer and its place in the log."""

    def __init__(self, peer: bytes, name: int, output: Output, cursor: int) -> None:
        self.peer, self.name, self.output, self.cursor = peer, name, output, cursor


class Job:
    def __init__(self, message: Submit, prompt_ids: list[int], outputs: list[Output]) -> None:
        self.message, self.prompt_ids, self.outputs = message, prompt_ids, outputs


class ScriptedEngine:
    """`script(prompt_text, choice)` is the answer. While `held`, tokens come only as `release` allows."""

    def __init__(
        self,
        address: str,
        files: dict[str, bytes],
        script: Callable[[str, int], str],
        *,
        step_s: float = 0.001,
        name: str = "scripted",
        lease_s: float = 10.0,
    ) -> None:
        """`lease_s`: how long clients wait for one that says nothing. Machines may be that slow."""
        self.address = address
        self.tokenizer = Tokenizer.from_files(files)
        self.submitted: list[Submit] = []
        self.attached: list[Attach] = []
        self.cancelled: list[bytes] = []
        self.refuse: Reject | None = None  # the answer to every SUBMIT, its id filled in
        self.state = READY
        self.accepting = True
        self.held = False
        self.guesses = (0, 0)  # right and wrong, of every choice
        self._files, self._script, self._step_s, self._name = files, script, step_s, name
        self._lease_s = lease_s
        self._lock = threading.RLock()
        self._allowed = 0
        self._epoch = os.urandom(8)
        self._jobs: dict[bytes, Job] = {}
        self._subscribers: list[Subscriber] = []
        self._seqs: dict[bytes, int] = {}
        self._late_accepts: list[tuple[bytes, Accept]] = []
        self._num_tokens = 0
        self._actions: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted engine")
        self._bound = threading.Event()

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        assert self._bound.wait(20)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join(5)

    # -- what tests do -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        self.held = True

    def release(self, num_tokens: int = 10**9) -> None:
        """So many more steps that give tokens; they wait for a request that has not come yet."""
        with self._lock:
            self._allowed += num_tokens

    def restart(self) -> None:
        """As a new process at the same address: nothing of before is known."""
        self._in_its_thread(self._restart)

    def set_state(self, state: str) -> None:
        def tell() -> None:
            self.state = state
            for peer in list(self._seqs):
                self._send(peer, self._welcome())

        self._in_its_thread(tell)

    def _in_its_thread(self, action: Callable[[], None]) -> None:
        """A ZeroMQ socket belongs to one thread. Returns when it has been done."""
        done = threading.Event()
        self._actions.put((action, done))
        assert done.wait(20)

    def _restart(self) -> None:
        self._epoch = os.urandom(8)
        self._jobs.clear()
        self._subscribers.clear()
        self._late_accepts.clear()
        peers, self._seqs = list(self._seqs), {}
        for peer in peers:
            self._send(peer, self._welcome())

    @property
    def num_running(self) -> int:
        with self._lock:
            return sum(output.ended is None for job in self._jobs.values() for output in job.outputs)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the engine never came there"
            time.sleep(0.002)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.engine_router(context, 1 << 24)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.address)
        self._publisher = sockets.engine_publisher(context)
        self._publisher.bind(sockets.default_status_address(self.address))
        self._bound.set()
        next_status = 0.0
        try:
            while not self._stopping.is_set():
                if self._router.poll(max(1, int(self._step_s * 1000))):
                    while sockets.readable(self._router):
                        peer, *frames = self._router.recv_multipart()
                        with self._lock:
                            self._on(peer, codec.decode(frames))
                while not self._actions.empty():
                    action, done = self._actions.get()
                    with self._lock:
                        action()
                    done.set()
                with self._lock:
                    self._advance()
                    self._flush()
                if time.monotonic() >= next_status:
                    next_status = time.monotonic() + 0.1
                    self._publish()
        finally:
            context.destroy(linger=0)

    def _on(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                resumed = None
                if message.epoch is not None:
                    resumed = message.epoch == self._epoch and self._seqs.get(peer) == message.last_seq
                if not resumed:
                    self._subscribers = [item for item in self._subscribers if item.peer != peer]
                    self._seqs[peer] = 0
                self._send(peer, self._welcome()._replace(resumed=resumed))
            case Ping():
                self._send(peer, Pong(message.nonce, 0.0, self.state, self._epoch))
            case Model():
                self._send(peer, ModelFiles(fingerprint(self._files), self._files))
            case Submit():
                self._submit(peer, message)
            case Attach():
                self._attach(peer, message)
            case Cancel():
                for item in list(self._subscribers):
                    if item.peer == peer and item.name in message.streams:
                        if message.leave:
                            self._subscribers.remove(item)
                        if not message.leave or not any(other.output is item.output for other in self._subscribers):
                            self._cancel(item.output)
            case Bye():
                for job in self._jobs.values():
                    if not job.message.detached and any(self._listens(peer, output) for output in job.outputs):
                        for output in job.outputs:
                            self._cancel(output)
                self._subscribers = [item for item in self._subscribers if item.peer != peer]

    def _submit(self, peer: bytes, message: Submit) -> None:
        self.submitted.append(message)
        if self.refuse is not None:
            self._send(peer, self.refuse._replace(id=message.id, stream=message.stream))
            return
        job, attached = self._jobs.get(message.id), True
        if job is None:
            attached = False
            prompt_ids = list(codec.from_u32(message.prompt or b""))
            text = self.tokenizer.decode(prompt_ids, True)
            n, most = message.params.get("n", 1), message.params.get("max_tokens")
            outputs = [Output(self.tokenizer.encode(self._script(text, i), False), most) for i in range(n)]
            job = self._jobs[message.id] = Job(message, prompt_ids, outputs)
        self._join(peer, message.stream, message.id, job, (), attached)

    def _attach(self, peer: bytes, message: Attach) -> None:
        self.attached.append(message)
        job = self._jobs.get(message.id)
        if job is None:
            self._send(peer, Reject(message.id, message.stream, "not_found", "No such request."))
            return
        self._join(peer, message.stream, message.id, job, message.cursors, True)

    def _join(self, peer: bytes, stream: int, name: bytes, job: Job, cursors: tuple[int, ...], attached: bool) -> None:
        accept = Accept(name, stream, len(job.prompt_ids), len(job.outputs), attached, job.message.note)
        if self.accepting:
            self._send(peer, accept)
        else:
            self._late_accepts.append((peer, accept))
        for choice, output in enumerate(job.outputs):
            cursor = cursors[choice] if choice < len(cursors) else 0
            self._subscribers.append(Subscriber(peer, stream + choice, output, cursor))

    def _cancel(self, output: Output) -> None:
        if output.ended is None:
            output.ended = ("abort", ["cancelled", "The client cancelled."])
            for name, job in self._jobs.items():
                if output in job.outputs:
                    self.cancelled.append(name)

    def _listens(self, peer: bytes, output: Output) -> bool:
        return any(item.peer == peer and item.output is output for item in self._subscribers)

    def _advance(self) -> None:
        if self.accepting:
            for peer, accept in self._late_accepts:
                self._send(peer, accept)
            self._late_accepts.clear()
        elif self._late_accepts:
            return
        if self.held and self._allowed <= 0:
            return
        self._allowed -= self.held and self.num_running > 0
        for job in self._jobs.values():
            for output in job.outputs:
                if output.ended is not None:
                    continue
                if len(output.token_ids) < len(output.planned):
                    output.token_ids.append(output.planned[len(output.token_ids)])
                    self._num_tokens += 1
                if len(output.token_ids) == len(output.planned):
                    output.ended = output.end

    def _flush(self) -> None:
        """One STEP for each peer with news."""
        for peer in list(self._seqs):
            unheard = {accept.stream + i for to, accept in self._late_accepts if to == peer for i in range(accept.n)}
            mine = [item for item in self._subscribers if item.peer == peer and item.name not in unheard]
            streams, counts, tokens, done = [], [], [], []
            for item in mine:
                new = item.output.token_ids[item.cursor :]
                if new:
                    streams.append(item.name)
                    counts.append(len(new))
                    tokens += new
                    item.cursor += len(new)
                if item.output.ended is not None:
                    reason, detail = item.output.ended
                    totals = 5, 2, len(item.output.token_ids)
                    done.append(Done(item.name, reason, detail, *totals, 1.0, 2.0, 30.0, *self.guesses))
                    self._subscribers.remove(item)
            if streams or done:
                self._seqs[peer] += 1
                columns = (codec.from_u32(codec.to_u32(column)) for column in (streams, tokens, counts))
                self._send(peer, Step(self._seqs[peer], 0, *columns, done))

    def _welcome(self) -> Welcome:
        info = ModelInfo(
            "scripted-model", fingerprint(self._files), self.tokenizer.vocab_size, 4096, (EOS,), 16, 65536, "float32"
        )
        return Welcome(
            self._name, self._epoch, self.state, model=info, heartbeat_s=HEARTBEAT_S, lease_s=self._lease_s, window=64
        )

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([peer, *codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._seqs.pop(peer, None)

    def _publish(self) -> None:
        running = self.num_running
        figures = {
            "running_requests": running,
            "waiting_requests": 0,
            "waiting_tokens": 0,
            "output_tokens": self._num_tokens,
            "prompt_tokens": 200,
            "cached_tokens": 50,
            "kv_usage": min(1.0, running / 8),
            "preemptions": 3,
        }
        self._publisher.send_multipart([f"status.{self._name}".encode(), msgpack.packb(figures)])
