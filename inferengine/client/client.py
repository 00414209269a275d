"""The two clients of one engine: AsyncClient for asyncio programs (front ends, producers), Client for ordinary threads.

Both drive the same Session over the same Transport; they differ in how their readers wait. One instance per engine, for
the program's life.

AsyncClient: the DEALER's file descriptor sits in the event loop and is drained without waiting: measured five times
cheaper than zmq.asyncio. The descriptor is edge-triggered, so the drain ends only at an empty queue and is repeated
after each send.

Client: plain iteration. A background thread keeps the lease and collects output. The session is under one lock: the
thread owns the sockets, callers only touch the session and wake the thread. So a caller may take minutes between two
tokens and lose nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from inferengine.client.requests import (
    RESUME_WAIT_S,
    Delta,
    Embedding,
    OpenRequest,
    OutputCollector,
    PendingReply,
    Prompt,
    SubmitOptions,
    embedding_from,
    embedding_submits,
    require_embeddings,
)
from inferengine.client.session import Phase, Session
from inferengine.config import check_address
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire import sockets
from inferengine.wire.curve import ClientKeys
from inferengine.wire.messages import PLACED_TOPIC, READY, Accept, ModelFiles, Pong, Welcome, from_u64

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0  # of queries (model files, admin, ping); outputs have no limit of this client's
_DRAIN_BATCH = 64  # messages handled before the event loop does other work
CLOSE_LINGER_MS = 200


class Transport:
    """A DEALER to the engine, its monitor, and where `status_address` is not empty a SUB for the engine's status."""

    def __init__(
        self,
        session: Session,
        address: str,
        status_address: str,
        curve: ClientKeys | None,
        on_placed: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        """`on_placed` is called with the keys of beginnings and of sessions that the engine was sent lately."""
        self._session = session
        self._on_placed = on_placed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = sockets.client_dealer(self._context, sockets.routing_id(session.role))
        self.monitor = sockets.connection_monitor(self.dealer)
        sockets.use_curve(self.dealer, curve, address)
        self.dealer.connect(address)
        self.subscriber: zmq.Socket[bytes] | None = None
        if status_address:
            self.subscriber = sockets.status_subscriber(self._context, *([PLACED_TOPIC] if on_placed else []))
            sockets.use_curve(self.subscriber, curve, status_address)
            self.subscriber.connect(status_address)

    @property
    def sources(self) -> Sequence[zmq.Socket[bytes]]:
        """The sockets to poll."""
        return [self.dealer, self.monitor] if self.subscriber is None else [self.dealer, self.monitor, self.subscriber]

    def receive(self, now: float) -> bool:
        """Give the session the next message of the engine. Returns False when there is none."""
        if not sockets.readable(self.dealer):
            return False
        self._session.receive(self.dealer.recv_multipart(zmq.NOBLOCK), now)
        return True

    def flush(self) -> bool:
        """Send the session's outgoing messages. Returns False when not connected or the pipe is full: try later."""
        outgoing = self._session.outgoing
        while outgoing:
            try:
                self.dealer.send_multipart(outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            outgoing.popleft()
        return True

    def watch(self, now: float) -> None:
        """Report connections made and lost to the session; a loss only after all messages that arrived before it."""
        while sockets.readable(self.monitor):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._session.connected(now)
            elif event == zmq.EVENT_DISCONNECTED:
                while self.receive(now):
                    pass
                self._session.disconnected(now)

    def latest_status(self) -> dict[str, Any] | None:
        """Return the newest STATUS that has arrived since the last call, or None. Calls `on_placed` on the way."""
        latest: dict[str, Any] | None = None
        while self.subscriber is not None and sockets.readable(self.subscriber):
            frames = self.subscriber.recv_multipart(zmq.NOBLOCK)
            try:
                if frames[0].startswith(PLACED_TOPIC):
                    beginnings, sessions = map(from_u64, frames[1:3])
                    if self._on_placed is not None:
                        self._on_placed(beginnings, sessions)
                    continue
                values = msgpack.unpackb(frames[-1])
            except Exception:  # not from this engine; STATUS may be lost anyway
                continue
            if isinstance(values, dict):
                latest = values
        return latest

    def close(self) -> None:
        """Close the sockets. What was sent may take CLOSE_LINGER_MS to leave."""
        self.dealer.disable_monitor()
        self._context.destroy(linger=CLOSE_LINGER_MS)


# -- for asyncio -------------------------------------------------------------------------------------------------------


class AsyncClient:
    """A connection to one engine that survives reconnects; see the module docstring of `session`."""

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
        is lost. Raises ConfigError for what is no address."""
        check_address("address", address)
        self.address = address
        self.status: dict[str, Any] | None = None
        self.status_received_s: float | None = None  # on the event loop's clock
        self._status_address = sockets.default_status_address(address) if status_address is None else status_address
        self._role, self._name, self._window = role, name, window
        self._resume_wait_s = resume_wait_s
        self.on_resumed: Callable[[float], None] = lambda pause_s: (
            None
        )  # a request resumed after its engine was lost, after so long
        # Set before `start`: called with the keys of beginnings and of sessions that the engine was sent lately.
        self.on_placed: Callable[[Sequence[int], Sequence[int]], None] | None = None
        self._curve = curve
        self._session: Session | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._closed = False

    # -- connection --------------------------------------------------------------------------------------------------

    async def connect(self, timeout_s: float = 5.0) -> Welcome:
        """Connect and wait for WELCOME, whatever state the engine is in. Raises engine_unavailable."""
        self.start()
        await self._until(lambda session: session.phase is Phase.UP, timeout_s, "The engine does not answer.")
        return self.welcome

    def start(self) -> None:
        """Open the sockets and let them connect in the background. Needs a running event loop. Raises RuntimeError
        after `close`."""
        if self._session is not None:
            return
        if self._closed:
            raise RuntimeError("the client is closed")
        self._loop = asyncio.get_running_loop()
        self._session = Session(
            role=self._role,
            name=self._name,
            window=self._window,
            now=self._loop.time(),
            resume_wait_s=self._resume_wait_s,
            clock=self._loop.time,
        )
        self._session.on_change = self._wake_waiters
        self._session.requests.on_resumed = self._note_resumed
        self._transport = Transport(
            self._session, self.address, self._status_address, self._curve, on_placed=self.on_placed
        )
        for source, drain in self._drains():
            self._loop.add_reader(source, drain)
            self._loop.call_soon(drain)
        self._tick()

    async def wait_ready(self, timeout_s: float) -> Welcome:
        """Wait until the engine is READY. Raises engine_unavailable."""
        self.start()
        await self._until(lambda session: self.ready, timeout_s, "The engine is not ready.")
        return self.welcome

    @property
    def ready(self) -> bool:
        """Whether the engine is connected and accepts requests."""
        session = self._session
        return bool(session and session.phase is Phase.UP and session.welcome and session.welcome.state == READY)

    @property
    def connected(self) -> bool:
        """Whether the engine has answered on the current connection."""
        return self._session is not None and self._session.phase is Phase.UP

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return 0 if self._session is None else len(self._session.requests)

    @property
    def welcome(self) -> Welcome:
        """The latest WELCOME. Raises engine_unavailable before the first."""
        if self._session is None or self._session.welcome is None:
            raise InferEngineError("engine_unavailable", "The engine has not answered yet.")
        return self._session.welcome

    @property
    def last_pong(self) -> Pong | None:
        """The engine's answer to the latest heartbeat."""
        return None if self._session is None else self._session.last_pong

    async def close(self) -> None:
        """Send BYE and close. Open streams end with engine_unavailable; requests not detached are cancelled."""
        self._closed = True
        session, self._session = self._session, None
        if session is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        session.on_change = lambda: None
        session.close()
        self._transport.flush()
        for source, _ in self._drains():
            self._loop.remove_reader(source)
        self._transport.close()
        self._wake_waiters()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        prepare: Callable[[Submission], None] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Submission:
        """Send a request; see `make_submit`. Returns at once: await `accepted()` for the answer, or just iterate
        the streams, which end with an error if it is refused. `prepare` is called before anything is sent: the answer
        may be here before this returns."""
        request = self._open_session().submit(prompt_ids, params, **options)
        submission = Submission(self, request)
        if prepare is not None:
            prepare(submission)
        self.send()
        return submission

    async def embed(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[SubmitOptions]) -> list[Embedding]:
        """Embed one or several prompts (texts or token ids), in their order; `pooling` is an option. Raises
        InferEngineError when one of them fails."""
        require_embeddings(self.welcome)
        submissions = [
            self.submit(prompt_ids, **submit_options)
            for prompt_ids, submit_options in embedding_submits(prompts, options)
        ]
        try:
            return [await submission.embedding() for submission in submissions]
        finally:
            for submission in submissions:
                submission.cancel()

    def attach(self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1, reply: str = "tokens") -> Submission:
        """Read a request from `cursors` on: the tokens already received of each choice (reply "text": characters)."""
        request = self._open_session().attach(request_id, cursors, n, reply)
        self.send()
        return Submission(self, request)

    def give_up(self) -> None:
        """Count an engine that is not connected as lost now, without waiting for its lease."""
        if self._session is not None:
            self._session.give_up(self._loop.time())

    def reads(self, request_id: bytes) -> bool:
        """Return whether a request with this id is open here."""
        return self._session is not None and self._session.requests.get(request_id) is not None

    def release(self, submission: Submission) -> None:
        """Forget a submission that will `move_to` another engine, and have this one cancel it."""
        if self._session is not None:
            self._session.release(submission.request)
            self.send()

    def forget(self, request: OpenRequest) -> None:
        """Forget a request that is read at another engine from now on, without a word to this one."""
        if self._session is not None:
            self._session.forget(request)

    def hedge(self, request: OpenRequest) -> OpenRequest:
        """Run another engine's request here as well; `send` sends it. Raises engine_unavailable or conflict."""
        return self._open_session().hedge(request)

    def end_hedge(self, hedge: OpenRequest) -> None:
        """Forget a hedge, and have the engine cancel it."""
        if self._session is not None:
            self._session.release(hedge)
            self.send()

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel a request by its id, whoever submitted it, without waiting for the engine."""
        self._open_session().cancel_request(request_id)
        self.send()

    async def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        """Fetch the model's tokenizer, template and configuration files: all, or the named ones."""
        return await self._ask(lambda session: session.model_files(files))

    async def admin(self, op: str, **arguments: Any) -> Any:
        """Run an ADMIN operation and return its result. Raises InferEngineError when it is refused."""
        return await self._ask(lambda session: session.admin(op, arguments))

    async def ping(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Pong:
        """Return the engine's PONG: its epoch and how long ago its loop turned."""
        return await self._ask(lambda session: session.ping(), timeout_s)

    # -- for Stream and Submission: these queue a message, `send` sends it -------------------------------------------

    def cancel_streams(self, collectors: Sequence[OutputCollector], stop: tuple[int, str] | None = None) -> None:
        """Cancel choices; `stop`: for a stop string in their text, (tokens up to its end, the string)."""
        if self._session is not None:
            self._session.cancel(collectors, stop)

    def leave_request(self, request: OpenRequest) -> None:
        """Stop reading a request. It ends unless another peer reads it."""
        if self._session is not None:
            self._session.leave(request)

    def take_over(self, hedge: OpenRequest, request: OpenRequest) -> None:
        """Let a request go on as its hedge here."""
        self._open_session().requests.take_over(hedge, request)

    def adopt_request(self, request: OpenRequest) -> None:
        """Submit a request that another connection had. Raises engine_unavailable or conflict."""
        self._open_session().adopt(request)

    def send(self) -> None:
        """Send what is queued, and drain: a send may have consumed the descriptor's edge."""
        if self._session is not None and self._session.outgoing:
            self._drain()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_session(self) -> Session:
        if self._session is None:
            raise InferEngineError("engine_unavailable", "The client is not connected: await connect() first.")
        return self._session

    async def _ask(self, query: Callable[[Session], PendingReply[T]], timeout_s: float = REQUEST_TIMEOUT_S) -> T:
        reply = query(self._open_session())
        self.send()
        try:
            return await asyncio.wait_for(_wait_for(reply), timeout_s)
        except TimeoutError:
            raise InferEngineError("engine_unavailable", "The engine did not answer in time.") from None

    def _drains(self) -> list[tuple[int, Callable[[], None]]]:
        """Return the descriptors to watch, and the function that each calls."""
        transport = self._transport
        drains = [(transport.dealer.fileno(), self._drain), (transport.monitor.fileno(), self._drain_monitor)]
        if transport.subscriber is not None:
            drains.append((transport.subscriber.fileno(), self._drain_status))
        return drains

    def _drain(self) -> None:
        """Receive, do what is due, and send, until nothing of that is left."""
        session, transport = self._session, self._transport
        if session is None:
            return
        now = self._loop.time()
        for _ in range(_DRAIN_BATCH):
            flushed = transport.flush()
            if transport.receive(now):
                continue
            due_s = session.tick(now)
            if not session.outgoing or not flushed:  # a full pipe is flushed when it has room again
                break
        else:
            self._loop.call_soon(self._drain)
            due_s = session.tick(now)
            transport.flush()
        self._plan_tick(due_s)

    def _drain_monitor(self) -> None:
        if self._session is not None:
            self._transport.watch(self._loop.time())
            self.send()

    def _drain_status(self) -> None:
        if self._session is not None and (values := self._transport.latest_status()) is not None:
            self.status, self.status_received_s = values, self._loop.time()

    def _tick(self) -> None:
        self._timer = None
        self._drain()

    def _plan_tick(self, due_s: float) -> None:
        if self._timer is not None:
            if self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        self._timer_due_s = due_s  # not timer.when(): for a time in the past uvloop gives a handle without it
        self._timer = self._loop.call_at(due_s, self._tick)

    def _note_resumed(self, pause_s: float) -> None:
        self.on_resumed(pause_s)

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            wake(waiter)

    async def _until(self, condition: Callable[[Session], bool], timeout_s: float, complaint: str) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            session = self._session
            if session is None:
                raise InferEngineError("engine_unavailable", "The client was closed.")
            if condition(session):
                return
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                raise InferEngineError("engine_unavailable", complaint) from None
            finally:
                self._waiters.discard(waiter)


class Stream:
    """The output of one choice, as an asynchronous iterator. Each delta has all output since the one before."""

    def __init__(self, client: AsyncClient, collector: OutputCollector) -> None:
        self._client = client
        self._collector = collector
        self._on_first: Callable[[Delta], None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        collector = self._collector
        while not collector.has_output:
            if collector.exhausted:
                raise StopAsyncIteration
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            collector.on_output = partial(wake, waiter)
            await waiter
        return self.take()

    def on_output(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when there is something to take; at once if there is. For readers without a task, who
        do not iterate the stream as well."""
        if self._collector.has_output:
            callback()
        else:
            self._collector.on_output = callback

    def take(self) -> Delta:
        """Return all new output without waiting. Only after the callback of `on_output`."""
        delta = self._collector.take()
        if self._on_first is not None:
            callback, self._on_first = self._on_first, None
            callback(delta)
        return delta

    @property
    def num_tokens(self) -> int:
        """Tokens received so far: the cursor for `attach`."""
        return self._collector.num_tokens

    @property
    def finished(self) -> bool:
        """Whether the terminal event has arrived, read or not."""
        return self._collector.finished

    def cancel(self) -> None:
        """Cancel this choice without waiting for the engine; the stream ends with `abort`. May be called repeatedly."""
        self._client.cancel_streams([self._collector])
        self._client.send()

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at the stop string `text`, which is complete with token number `num_tokens`."""
        self._client.cancel_streams([self._collector], (num_tokens, text))
        self._client.send()


class Submission:
    """A submitted or attached request. As a context manager it cancels on exit what has not finished."""

    def __init__(self, client: AsyncClient, request: OpenRequest) -> None:
        self._client = client
        self._request = request
        self.streams = [Stream(client, collector) for collector in request.collectors]

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes: it runs once under it, and can be attached to by it."""
        return self._request.id

    async def accepted(self) -> Accept:
        """Wait for the engine's ACCEPT. Raises InferEngineError when the request was refused."""
        try:
            accept = await _wait_for(self._request.accepted)
        except InferEngineError:
            self._drop_first()  # nobody reads the end of what was refused
            raise
        known = len(self.streams)  # an attached request may have more choices than the caller knew
        self.streams += [Stream(self._client, collector) for collector in self._request.collectors[known:]]
        return accept

    async def embedding(self) -> Embedding:
        """Wait for the vector of a request with reply "embedding". Raises InferEngineError when there will be none."""
        deltas = [delta async for delta in self.streams[0]]
        await self.accepted()  # a refusal says more than the end of the stream
        return embedding_from(deltas)

    def cancel(self) -> None:
        """Cancel every choice, without waiting for the engine."""
        self._client.cancel_streams(self._request.collectors)
        self._client.send()

    def abandon(self, error: InferEngineError) -> None:
        """Cancel, and end every choice at once with `error`, without waiting for the engine."""
        if self._request.lost_s is not None:
            self._request.end(error)  # with `error`, not as cancelled
        self._client.cancel_streams(self._request.collectors)
        self._request.end(error)  # before `send`, which also reads: the engine may have answered
        self._client.send()

    def leave(self) -> None:
        """Stop reading: the streams end here at once. The engine cancels the request unless another client reads it."""
        self._client.leave_request(self._request)
        self._request.end(InferEngineError("cancelled", "Nobody reads this request here any more."))
        self._drop_first()
        self._client.send()

    @property
    def request(self) -> OpenRequest:
        """The session's state of it."""
        return self._request

    def move_to(self, client: AsyncClient) -> None:
        """Move to another engine, with the same id and streams. Raises engine_unavailable or conflict, and then nothing
        has changed."""
        client.adopt_request(self._request)
        self._use(client)
        client.send()

    def go_on_as(self, hedge: OpenRequest, client: AsyncClient) -> None:
        """Continue as the second run of this request, at `client`'s engine. The first run has been released."""
        client.take_over(hedge, self._request)
        self._use(client)

    def on_first(self, callback: Callable[[Delta], None]) -> None:
        """Call `callback` once, with the first output or the end of a choice that a reader takes."""

        def once(delta: Delta) -> None:
            self._drop_first()
            callback(delta)

        for stream in self.streams:
            stream._on_first = once

    def _drop_first(self) -> None:
        """Forget the callback of `on_first`. It refers to this object, which would be a cycle."""
        for stream in self.streams:
            stream._on_first = None

    def _use(self, client: AsyncClient) -> None:
        self._client = client
        for stream in self.streams:
            stream._client = client

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


async def _wait_for(reply: PendingReply[T]) -> T:
    """Return its value, or raise the InferEngineError that it failed with. Any number of tasks may wait."""
    if not reply.done:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        previous = reply.on_done

        def on_done() -> None:
            if previous is not None:
                previous()
            wake(waiter)

        reply.on_done = on_done
        await waiter
    return reply.result()


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Wake the task that awaits `waiter`. Does nothing without one, or if it was woken or cancelled before."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


# -- for threads -------------------------------------------------------------------------------------------------------


RETRY_S = 0.02  # between attempts to send into a full pipe


class BlockingStream:
    """The output of one choice, as an iterator for any thread."""

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
        """Cancel this choice without waiting for the engine; the stream ends with `abort`."""
        self._client._cancel([self._collector])


class BlockingSubmission:
    """A submitted or attached request."""

    def __init__(self, client: Client, request: OpenRequest) -> None:
        self._client = client
        self._request = request
        self.streams = [BlockingStream(client, collector) for collector in request.collectors]

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes: it runs once under it, and can be attached to by it."""
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
        """Cancel every choice, without waiting for the engine."""
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
        is lost. Raises ConfigError for what is no address."""
        check_address("address", address)
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
        """Whether the engine is connected and accepts requests."""
        session = self._session
        return session.phase is Phase.UP and session.welcome is not None and session.welcome.state == READY

    @property
    def welcome(self) -> Welcome:
        """The latest WELCOME. Raises engine_unavailable before the first."""
        if self._session.welcome is None:
            raise InferEngineError("engine_unavailable", "The engine has not answered yet.")
        return self._session.welcome

    def close(self) -> None:
        """Send BYE and close. Open streams end with engine_unavailable."""
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
        """Embed one or several prompts (texts or token ids), in their order; `pooling` is an option. Raises
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
        """Read a request from `cursors` on: the tokens already received of each choice (reply "text": characters)."""
        with self._changed:
            request = self._session.attach(request_id, cursors, n, reply)
            self._wake()
        return BlockingSubmission(self, request)

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel a request by its id, whoever submitted it, without waiting for the engine."""
        with self._changed:
            self._session.cancel_request(request_id)
            self._wake()

    def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        """Fetch the model's tokenizer, template and configuration files: all, or the named ones."""
        return self._ask(lambda: self._session.model_files(files))

    def admin(self, op: str, **arguments: Any) -> Any:
        """Run an ADMIN operation and return its result. Raises InferEngineError when it is refused."""
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
