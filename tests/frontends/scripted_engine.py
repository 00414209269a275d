"""An engine that does what a test says, over the real wire: a ROUTER in a thread that runs the wire's codec.

It refuses, falls silent, dies in the middle of a stream and comes back whenever a test wants it; the real engine's
behaviour is tested with the real engine. Outputs are logs, as there: a request goes on for whoever listens, and ATTACH
reads it from any cursor.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import zmq

from inferengine.simulation.simulated_executor import simulated_embedding
from inferengine.text import Tokenizer, fingerprint
from inferengine.wire import messages, sockets
from inferengine.wire.messages import (
    READY,
    Accept,
    Admin,
    AdminReply,
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
from tests.text.vocabularies import CONFIG, byte_level

TEMPLATE = (
    "{% if reasoning_effort %}<effort>{{ reasoning_effort }}{% endif %}"
    "{% for document in documents or [] %}<document>{{ document.text }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_MODEL_LEN = 512
EMBEDDING_SIZE = 8
EOS = 1
LONGEST_POLL_MS = 5
STATUS_EVERY_S = 0.1
CANCELLED = ("abort", ["cancelled", "The client cancelled."])
TIMINGS_MS = (1.0, 2.0, 30.0)  # of every request: queued, first token, total


class Script(NamedTuple):
    """What becomes of one choice. Tokens leave `chunk` at a time, `pause_s` apart; after `stop_after` of them the
    engine falls silent; `refusal` answers instead of ACCEPT."""

    token_ids: list[int] = []  # noqa: RUF012  (never changed in place)
    reason: str = "length"
    detail: Any = None
    chunk: int = 1
    pause_s: float = 0.0
    stop_after: int | None = None
    refusal: Reject | None = None
    accept: bool = True
    logprobs: list[Any] | None = None
    cached_tokens: int = 0
    draft_counts: tuple[int, int] = (0, 0)  # draft tokens accepted and rejected


class Output:
    """The log of one choice."""

    def __init__(self, script: Script, prompt_tokens: int) -> None:
        self.script = script
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []
        self.ended: tuple[str, Any] | None = None
        self.embedding: bytes | None = None
        self.next_s = 0.0

    @property
    def is_silent(self) -> bool:
        """Nothing more comes of it, unless it is cancelled."""
        script = self.script
        return self.ended is not None or (script.stop_after is not None and len(self.token_ids) >= script.stop_after)

    def advance(self, now: float) -> bool:
        """Append what is due at `now`. Returns whether anything was."""
        script, start = self.script, len(self.token_ids)
        if self.is_silent or self.next_s > now:
            return False
        self.next_s = now + script.pause_s
        self.token_ids += script.token_ids[start : start + script.chunk][
            : script.stop_after and script.stop_after - start
        ]
        if len(self.token_ids) == len(script.token_ids):
            self.ended = (script.reason, script.detail)
        return True

    def done(self, stream: int) -> Done:
        """Return the terminal row, for a subscriber that calls it `stream`."""
        assert self.ended is not None
        counts = self.prompt_tokens, self.script.cached_tokens, len(self.token_ids)
        return Done(stream, *self.ended, *counts, *TIMINGS_MS, *self.script.draft_counts)


class Subscriber:
    """One stream of one peer and its place in the log."""

    def __init__(self, peer: bytes, stream: int, output: Output, cursor: int) -> None:
        self.peer, self.stream, self.output, self.cursor = peer, stream, output, cursor


class Job:
    """A request and the logs of its choices."""

    def __init__(self, message: Submit, outputs: list[Output], prompt_tokens: int) -> None:
        self.message, self.outputs, self.prompt_tokens = message, outputs, prompt_tokens


def model_files() -> dict[str, bytes]:
    """Return the files of a small model with a chat template."""
    config = {**json.loads(CONFIG), "chat_template": TEMPLATE}
    return {"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


FILES = model_files()


def model_info(files: dict[str, bytes] = FILES, **changes: Any) -> ModelInfo:
    """Return what the engine announces of the model of these files."""
    vocab_size = Tokenizer.from_files(files).vocab_size
    info = ModelInfo("tiny", fingerprint(files), vocab_size, MAX_MODEL_LEN, (EOS,), 16, 4096, "float32")
    info = info.replace(embedding_size=EMBEDDING_SIZE, pooling="last")
    return info.replace(**changes)


class ScriptedEngine:
    """Start it with `with`; `script` is called with each SUBMIT and the choice's number.

    While `held`, tokens come only as `release` allows. While not `accepting`, ACCEPT is put off and nothing moves.
    """

    def __init__(
        self,
        address: str,
        script: Callable[[Submit, int], Script],
        *,
        files: dict[str, bytes] = FILES,
        info: ModelInfo | None = None,
        state: str = READY,
        heartbeat_s: float = 0.2,
        lease_s: float = 1.0,
    ) -> None:
        """`lease_s`: how long clients wait for an engine that says nothing; on a busy machine this takes a while."""
        self.address = address
        self.script = script
        self.files = files
        self.tokenizer = Tokenizer.from_files(files)
        self.info = info or model_info(files)
        self.state = state
        self.heartbeat_s, self.lease_s = heartbeat_s, lease_s
        self.submits: list[Submit] = []
        self.attached: list[Attach] = []
        self.num_file_requests = 0
        self.cancelled: list[bytes] = []  # ids of requests, once for each choice
        self.admin: dict[str, Any] = {}  # results of operations by name
        self.refuse: Reject | None = None  # the answer to every SUBMIT, its id filled in
        self.loop_age_ms = 0.5
        self.accepting = True
        self.held = False
        self._allowed = 0
        self._lock = threading.RLock()
        self._actions: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._stop, self._bound = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._num_tokens = 0
        self._forget_everything()

    def _forget_everything(self) -> None:
        """Forget everything, as a new process has."""
        self.epoch = secrets.token_bytes(8)
        self._jobs: dict[bytes, Job] = {}
        self._subscribers: list[Subscriber] = []
        self._seqs: dict[bytes, int] = {}
        self._ids: dict[tuple[bytes, int], bytes] = {}  # of requests, by peer and stream
        self._late_accepts: list[tuple[bytes, Accept]] = []

    def __enter__(self) -> ScriptedEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # -- what tests do -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen at the address. Returns when it does."""
        self._stop.clear()
        self._bound.clear()
        self._thread = threading.Thread(target=self._run, name="scripted engine", daemon=True)
        self._thread.start()
        assert self._bound.wait(60)

    def kill(self) -> None:
        """End without a word; `start` brings up another epoch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._forget_everything()

    def restart(self) -> None:
        """Restart as a new process at the same address, which its peers hear of at once."""

        def restart() -> None:
            peers = list(self._seqs)
            self._forget_everything()
            for peer in peers:
                self._send(peer, self._welcome())

        self._in_its_thread(restart)

    def set_state(self, state: str) -> None:
        """Change the state and announce it to every peer."""

        def announce() -> None:
            self.state = state
            for peer in list(self._seqs):
                self._send(peer, self._welcome())

        self._in_its_thread(announce)

    def hold(self) -> None:
        """Give no tokens from now on but those that `release` allows from now on."""
        with self._lock:
            self.held, self._allowed = True, 0

    def release(self, num_steps: int = 10**9) -> None:
        """Release so many more steps; they wait for a request that has not come yet. Only a step that gives tokens
        counts."""
        with self._lock:
            self._allowed += num_steps

    @property
    def num_running(self) -> int:
        """Choices that have not ended."""
        with self._lock:
            return sum(output.ended is None for job in self._jobs.values() for output in job.outputs)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the engine never came there"
            time.sleep(0.002)

    def _in_its_thread(self, action: Callable[[], None]) -> None:
        """Do it in the thread that owns the ZeroMQ socket. Returns when it has been done."""
        done = threading.Event()
        self._actions.put((action, done))
        assert done.wait(60)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.engine_router(context, 2**24)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.address)
        publisher = sockets.engine_publisher(context)
        publisher.bind(sockets.default_status_address(self.address))
        self._bound.set()
        next_status_s = 0.0
        try:
            while not self._stop.is_set():
                if self._router.poll(self._poll_ms()):
                    while sockets.readable(self._router):
                        peer, *frames = self._router.recv_multipart()
                        with self._lock:
                            self._on(peer, messages.decode(frames))
                while not self._actions.empty():
                    action, done = self._actions.get()
                    with self._lock:
                        action()
                    done.set()
                with self._lock:
                    self._advance()
                    self._flush()
                if time.monotonic() >= next_status_s:
                    next_status_s = time.monotonic() + STATUS_EVERY_S
                    publisher.send_multipart([b"status.scripted", msgpack.packb(self._status())])
        finally:
            context.destroy(linger=0)

    def _poll_ms(self) -> float:
        """Return how long nothing is due. A running output's tokens are, unless steps are held."""
        if not self._may_step:
            return 1
        now = time.monotonic()
        with self._lock:
            outputs = [output for job in self._jobs.values() for output in job.outputs if not output.is_silent]
        waits = [1 if output.next_s > now else 0 for output in outputs]
        return min(waits, default=LONGEST_POLL_MS)

    @property
    def _may_step(self) -> bool:
        return not self._late_accepts and (not self.held or self._allowed > 0)

    def _on(self, peer: bytes, message: Message) -> None:
        match message:
            case Hello():
                resumed = None
                if message.epoch is not None:
                    resumed = message.epoch == self.epoch and self._seqs.get(peer) == message.last_seq
                if not resumed:
                    self._drop(peer)
                    self._seqs[peer] = 0
                self._send(peer, self._welcome().replace(resumed=resumed))
            case Ping():
                self._send(peer, Pong(message.nonce, self.loop_age_ms, self.state, self.epoch))
            case Model():
                self.num_file_requests += 1
                self._send(peer, ModelFiles(self.info.fingerprint, self.files))
            case Admin():
                known, result = message.op in self.admin, self.admin.get(message.op)
                self._send(peer, AdminReply(message.op, message.nonce, known, result, "not_found", "no such op"))
            case Submit():
                self._submit(peer, message)
            case Attach():
                self.attached.append(message)
                job = self._jobs.get(message.id)
                if job is None:
                    self._send(peer, Reject(message.id, message.stream, "not_found", "No such request."))
                else:
                    self._join(peer, message.stream, job, message.cursors, attached=True)
            case Cancel():
                self._on_cancel(peer, message)
            case Bye():
                self._drop(peer)

    def _submit(self, peer: bytes, message: Submit) -> None:
        self.submits.append(message)
        job = self._jobs.get(message.id)
        if job is not None:
            self._join(peer, message.stream, job, (), attached=True)
            return
        scripts = [self.script(message, choice) for choice in range(int(message.params.get("n", 1)))]
        refusal = self.refuse or scripts[0].refusal
        if refusal is not None:
            self._send(peer, refusal.replace(id=message.id, stream=message.stream))
            return
        prompt_tokens = len(message.prompt or b"") // 4
        outputs = [Output(script, prompt_tokens) for script in scripts]
        if message.reply == "embedding":
            self._embed(message, outputs[0])
        job = self._jobs[message.id] = Job(message, outputs, prompt_tokens)
        self._join(peer, message.stream, job, (), attached=False)

    def _embed(self, message: Submit, output: Output) -> None:
        """Embed as the engine does: no tokens, and a vector with the end, after the script's pause. A script that is to
        fall silent or fail does."""
        if output.script.reason == "length":
            output.script = output.script._replace(token_ids=[], reason="stop")
        output.next_s = time.monotonic() + output.script.pause_s
        if output.script.reason == "stop":
            size = self.info.embedding_size
            output.embedding = simulated_embedding(output.prompt_tokens, message.pooling == "mean", size)

    def _join(self, peer: bytes, stream: int, job: Job, cursors: tuple[int, ...], *, attached: bool) -> None:
        """Subscribe a peer to the choices of a job and tell it so."""
        accept = Accept(job.message.id, stream, job.prompt_tokens, len(job.outputs), attached, job.message.note)
        if not self.accepting:
            self._late_accepts.append((peer, accept))
        elif job.outputs[0].script.accept:
            self._send(peer, accept)
        for choice, output in enumerate(job.outputs):
            cursor = cursors[choice] if choice < len(cursors) else 0
            self._subscribers.append(Subscriber(peer, stream + choice, output, cursor))
            self._ids[peer, stream + choice] = job.message.id

    def _on_cancel(self, peer: bytes, message: Cancel) -> None:
        if not message.leave:  # recorded even of what has ended already: the message may have crossed its end
            self.cancelled += [self._ids[peer, stream] for stream in message.streams if (peer, stream) in self._ids]
        for one in [one for one in self._subscribers if one.peer == peer and one.stream in message.streams]:
            if message.leave:
                self._subscribers.remove(one)
                self._end_unread(one.output)
            elif one.output.ended is None:
                one.output.ended = CANCELLED
        for request_id in message.ids:
            if (job := self._jobs.get(request_id)) is not None:
                for output in job.outputs:
                    output.ended = output.ended or CANCELLED
                    self.cancelled.append(request_id)

    def _drop(self, peer: bytes) -> None:
        """Forget the peer's streams. Its requests end, unless they are detached or somebody else reads them."""
        mine = [one for one in self._subscribers if one.peer == peer]
        self._subscribers = [one for one in self._subscribers if one.peer != peer]
        for one in mine:
            self._end_unread(one.output, detached_too=False)

    def _end_unread(self, output: Output, *, detached_too: bool = True) -> None:
        """Cancel a choice that has no subscriber."""
        if output.ended is not None or any(one.output is output for one in self._subscribers):
            return
        message = next(job.message for job in self._jobs.values() if output in job.outputs)
        if detached_too or not message.detached:
            output.ended = CANCELLED
            self.cancelled.append(message.id)

    def _advance(self) -> None:
        if self.accepting:
            for peer, accept in self._late_accepts:
                self._send(peer, accept)
            self._late_accepts.clear()
        if not self._may_step:
            return
        now, has_output = time.monotonic(), False
        for job in self._jobs.values():
            for output in job.outputs:
                before = len(output.token_ids)
                has_output |= output.advance(now)
                self._num_tokens += len(output.token_ids) - before
        self._allowed -= self.held and has_output

    def _flush(self) -> None:
        """Send one STEP to each peer with new output."""
        for peer in list(self._seqs):
            unheard = {accept.stream + i for to, accept in self._late_accepts if to == peer for i in range(accept.n)}
            mine = [one for one in self._subscribers if one.peer == peer and one.stream not in unheard]
            step = self._step(mine)
            if step.streams or step.done:
                self._seqs[peer] += 1
                self._send(peer, step._replace(seq=self._seqs[peer]))

    def _step(self, subscribers: list[Subscriber]) -> Step:
        """Return everything that these have not been sent. Those that get their end are forgotten."""
        step = Step(0, 0, array("I"), array("I"), array("I"), [], [], [], [], [])
        for one in subscribers:
            output, start = one.output, one.cursor
            new = output.token_ids[start:]
            if new and step.counts is not None:
                step.streams.append(one.stream)
                step.counts.append(len(new))
                step.tokens.extend(new)
                one.cursor += len(new)
                if output.script.logprobs:
                    step.logprobs.append((one.stream, output.script.logprobs[start : one.cursor]))
            if output.ended is not None:
                step.done.append(output.done(one.stream))
                if output.embedding is not None and output.ended[0] == "stop":
                    step.embeddings.append((one.stream, output.embedding))
                self._subscribers.remove(one)
        return step

    def _welcome(self) -> Welcome:
        return Welcome(
            "scripted", self.epoch, self.state, model=self.info, heartbeat_s=self.heartbeat_s, lease_s=self.lease_s
        )

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([peer, *messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone
            self._seqs.pop(peer, None)
            self._drop(peer)

    def _status(self) -> dict[str, Any]:
        running = self.num_running
        return {
            "running_requests": running,
            "waiting_requests": 0,
            "waiting_tokens": 0,
            "output_tokens": self._num_tokens,
            "prompt_tokens": 200,
            "cached_tokens": 50,
            "kv_usage": min(1.0, running / 8),
            "preemptions": 3,
        }
