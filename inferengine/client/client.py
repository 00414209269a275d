"""Client: the wire for ordinary threads. Plain iteration; a background thread keeps the lease and collects output.

It drives the same Session as AsyncClient, under one lock: the thread owns the sockets, callers only touch the session
and wake the thread. So a caller may take minutes between two tokens and lose nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import zmq

from inferengine.client.output import Delta, Embedding, OpenRequest, OutputCollector, PendingReply, embedding_from
from inferengine.client.requests import RESUME_WAIT_S, Prompt, SubmitOptions, embedding_submits, require_embeddings
from inferengine.client.session import Phase, Session
from inferengine.client.transport import Transport
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire import sockets
from inferengine.wire.curve import ClientKeys
from inferengine.wire.messages import READY, Accept, ModelFiles, Pong, Welcome

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0
RETRY_S = 0.02  # between attempts to send into a full pipe


class BlockingStream:
    """The output of one choice. Iterate it in any thread."""

    def __init__(self, client: Client, collector: OutputCollector) -> None:
        self._client = client
        self._collector = collector

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Delta:
        collector, changed = self._collector, self._client._changed
        with changed:
            while not collector.has_output:
                if collector.exhausted:
                    raise StopIteration
                changed.wait()
            return collector.take()

    @property
    def num_tokens(self) -> int:
        """Tokens received so far: the cursor for `attach`."""
        return self._collector.num_tokens

    def cancel(self) -> None:
        """Fire and forget; the stream ends with `abort`."""
        self._client._cancel([self._collector])


class BlockingSubmission:
    """A submitted or attached request."""

    def __init__(self, client: Client, request: OpenRequest) -> None:
        self._client = client
        self._request = request
        self.streams = [BlockingStream(client, collector) for collector in request.collectors]

    @property
    def id(self) -> bytes:
        """The 16 bytes under which it runs once and can be attached to."""
        return self._request.id

    def accepted(self) -> Accept:
        """Wait for the engine's ACCEPT. Raises InferEngineError when the request was refused."""
        accept = self._client._wait(self._request.accepted, None)
        known = len(self.streams)
        self.streams += [BlockingStream(self._client, collector) for collector in self._request.collectors[known:]]
        return accept

    def embedding(self) -> Embedding:
        """Wait for the vector of a request with reply "embedding". Raises InferEngineError when there will be none."""
        deltas = list(self.streams[0])
        self.accepted()  # a refusal says more than the end of the stream
        return embedding_from(deltas)

    def cancel(self) -> None:
        """Cancel every choice. Fire and forget."""
        self._client._cancel(self._request.collectors)


class Client:
    """A connection to one engine for programs without an event loop. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        status_address: str | None = None,
        role: str = "client",
        name: str = "",
        window: int | None = None,
        curve: ClientKeys | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
    ) -> None:
        """`status_address`: the engine's PUB; None derives it from `address`, "" does not subscribe. `curve`: the keys
        for an engine on TCP that asks for them. `resume_wait_s`: how long open requests wait for an engine when theirs
        is lost."""
        self.address = address
        self.status: dict[str, Any] | None = None
        self._status_address = sockets.default_status_address(address) if status_address is None else status_address
        self._curve = curve
        self._session = Session(
            role=role,
            name=name,
            window=window,
            now=time.monotonic(),
            resume_wait_s=resume_wait_s,
            clock=time.monotonic,
        )
        self._changed = threading.Condition()
        self._wake_fd = -1  # open while the thread runs
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- connection --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> Welcome:
        """Connect and wait for WELCOME, whatever state the engine is in. Raises engine_unavailable."""
        self._start()
        return self._until(lambda: self._session.phase is Phase.UP, timeout_s, "The engine does not answer.")

    def wait_ready(self, timeout_s: float) -> Welcome:
        """Connect and wait until the engine is READY. Raises engine_unavailable."""
        self._start()
        return self._until(lambda: self.ready, timeout_s, "The engine is not ready.")

    @property
    def ready(self) -> bool:
        """Connected, and the engine takes requests."""
        session = self._session
        return session.phase is Phase.UP and session.welcome is not None and session.welcome.state == READY

    @property
    def welcome(self) -> Welcome:
        """The latest WELCOME. Raises engine_unavailable before the first."""
        if self._session.welcome is None:
            raise InferEngineError("engine_unavailable", "The engine has not answered yet.")
        return self._session.welcome

    def close(self) -> None:
        """Say BYE and close. Open streams end with engine_unavailable."""
        with self._changed:
            self._closing = True
            self._wake()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Client:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[SubmitOptions],
    ) -> BlockingSubmission:
        """Send a request; see `make_submit`. Returns at once."""
        with self._changed:
            request = self._session.submit(prompt_ids, params, **options)
            self._wake()
        return BlockingSubmission(self, request)

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[SubmitOptions]) -> list[Embedding]:
        """The embeddings of one or several prompts (texts or token ids), in their order; `pooling` is an option. Raises
        InferEngineError when one of them fails."""
        require_embeddings(self.welcome)
        submissions = [
            self.submit(prompt_ids, **submit_options)
            for prompt_ids, submit_options in embedding_submits(prompts, options)
        ]
        try:
            return [submission.embedding() for submission in submissions]
        finally:
            for submission in submissions:
                submission.cancel()

    def attach(
        self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1, reply: str = "tokens"
    ) -> BlockingSubmission:
        """Read a request on from `cursors`: tokens already held of each choice (with reply "text": characters)."""
        with self._changed:
            request = self._session.attach(request_id, cursors, n, reply)
            self._wake()
        return BlockingSubmission(self, request)

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel a request by its id, whoever submitted it. Fire and forget."""
        with self._changed:
            self._session.cancel_request(request_id)
            self._wake()

    def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        """The model's tokenizer, template and configuration files: all, or the named ones."""
        return self._ask(lambda: self._session.model_files(files))

    def admin(self, op: str, **arguments: Any) -> Any:
        """An ADMIN operation's result. Raises InferEngineError when it is refused."""
        return self._ask(lambda: self._session.admin(op, arguments))

    def ping(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Pong:
        """Return the engine's PONG: its epoch and how long ago its loop turned."""
        return self._ask(self._session.ping, timeout_s)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _ask(self, query: Callable[[], PendingReply[T]], timeout_s: float = REQUEST_TIMEOUT_S) -> T:
        with self._changed:
            if self._wake_fd < 0:
                raise InferEngineError("engine_unavailable", "The client is not connected: request connect() first.")
            reply = query()
            self._wake()
        return self._wait(reply, timeout_s)

    def _wait(self, reply: PendingReply[T], timeout_s: float | None) -> T:
        with self._changed:
            if not self._changed.wait_for(lambda: reply.done, timeout_s):
                raise InferEngineError("engine_unavailable", "The engine did not answer in time.")
            return reply.result()

    def _start(self) -> None:
        """Start the thread that talks to the engine, once."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the client is closed")
            if self._thread is None:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="inferengine-client", daemon=True)
                self._thread.start()

    def _until(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> Welcome:
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self._closing, timeout_s) or self._closing:
                raise InferEngineError("engine_unavailable", complaint)
            return self.welcome

    def _cancel(self, collectors: Sequence[OutputCollector]) -> None:
        with self._changed:
            self._session.cancel(collectors)
            self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        transport = Transport(self._session, self.address, self._status_address, self._curve)
        poller = zmq.Poller()
        for source in (*transport.sources, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        wait_s = 0.0
        try:
            while True:
                ready = dict(poller.poll(max(0, int(wait_s * 1000) + 1)))
                with self._changed:
                    if self._wake_fd in ready:
                        os.eventfd_read(self._wake_fd)
                    now = time.monotonic()
                    while transport.receive(now):
                        pass
                    transport.watch(now)
                    self.status = transport.latest_status() or self.status
                    if self._closing:
                        return
                    wait_s = self._session.tick(now) - now
                    if not transport.flush():
                        wait_s = min(wait_s, RETRY_S)
                    self._changed.notify_all()
        finally:
            with self._changed:  # also when a bug ends the thread: no reader may wait forever
                self._session.close()
                transport.flush()
                os.close(self._wake_fd)
                self._wake_fd = -1
                self._changed.notify_all()
            transport.close()
