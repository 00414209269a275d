"""One client's side of the wire as a state machine: frames and time in, frames and collected output out. No sockets.

AsyncClient and Client drive the same Session; they differ only in how their readers wait. Three lifetimes meet here:

- the connection: the phases below, heartbeat, lease and credit;
- the engine: one epoch from its first WELCOME until a WELCOME with another epoch;
- the request: from `submit` or `attach` to its last end, over any number of connections and engines (`requests`).

What must survive a broken connection is kept as state and sent again after the next WELCOME: submissions without an
answer (their ids make that safe), cancellations without an effect, queries without a reply. What must survive a lost
engine is submitted again with the output so far, as soon as an engine at this address is READY.

    DOWN --transport connected--> GREETING --WELCOME--> UP --connection lost, epoch changed--> GREETING
    UP --nothing heard for a lease, the connection stands--> SILENT --anything heard--> UP
    UP, GREETING, SILENT --nothing heard for a lease, no connection; or for PATIENCE_S--> DOWN: open requests wait for
    the engine, or resume at another

A process that is gone loses its connection at once. One that says nothing while its connection stands is paused
(SIGSTOP, a frozen container, a debugger) or stuck: its streams wait, and continue when it does. New requests are
refused meanwhile. Time in which this process itself did not run does not count as silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Unpack

from inferengine.client.requests import (
    RESUME_WAIT_S,
    OpenRequest,
    OpenRequests,
    OutputCollector,
    PendingReply,
    SubmitOptions,
    check_request_id,
    error_from,
    make_submit,
)
from inferengine.errors import InferEngineError
from inferengine.process.system import missed_s
from inferengine.sampling_params import SamplingParams
from inferengine.wire import messages
from inferengine.wire.messages import (
    READY,
    Accept,
    Admin,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    CreditGiver,
    Goodbye,
    Hello,
    Message,
    Model,
    ModelFiles,
    Ping,
    Pong,
    Reject,
    Step,
    StopFound,
    Welcome,
)

HEARTBEAT_BEFORE_WELCOME_S = 1.0
LEASE_BEFORE_WELCOME_S = 6.0
MAX_MOVED = 4096  # requests that moved to another engine and are still to be cancelled at this one
PATIENCE_S = 120.0  # for a silent engine whose connection stands; above every watchdog's limit


class Phase(Enum):
    """Phase of the connection; see the module's docstring."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    SILENT = "silent"


_WELCOMED = (Phase.UP, Phase.SILENT)  # this connection has had its WELCOME


class Session:
    """A client's state towards the engine at one address, over reconnects and restarts of the engine."""

    def __init__(
        self,
        *,
        role: str = "client",
        name: str = "",
        window: int | None = None,
        now: float = 0.0,
        resume_wait_s: float = RESUME_WAIT_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`resume_wait_s`: how long open requests wait for an engine when theirs is lost. `clock`: what `now` is read
        off everywhere; without one, a request's deadline counts from the last `now`."""
        self.role = role
        self.name = name
        self.outgoing: deque[messages.Frames] = deque()
        self.on_change: Callable[[], None] = lambda: None  # phase or engine state changed
        self.num_protocol_errors = 0
        self._now = now
        self._clock = clock or (lambda: self._now)
        # the connection
        self.phase = Phase.DOWN
        self._connected = False
        self._window = window
        self._credit = CreditGiver()
        self._heard_s = now
        self._away_s: float | None = None  # when the connection was lost
        self._hello_due_s: float | None = None
        self._ping_due_s: float | None = None
        self._due_s = now  # when `tick` is to be called again
        # the engine
        self.welcome: Welcome | None = None
        self.last_pong: Pong | None = None
        self._epoch: bytes | None = None  # of the engine that has the open requests
        self._last_seq = 0
        self._resume: tuple[bytes, int] | None = None  # epoch and last STEP of the connection before
        # the requests
        self.requests = OpenRequests(wait_s=resume_wait_s)
        self._replies = PendingReplies(self._send_if_up)
        self._streams_to_cancel: list[int] = []  # while there is no connection
        self._streams_to_leave: list[int] = []  # likewise, but other peers may read them
        self._moved_ids: deque[bytes] = deque(maxlen=MAX_MOVED)  # resumed elsewhere, and may still run here
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Welcome: self._on_welcome,
            Accept: lambda message, now: self.requests.on_accept(message, now, self._model),
            Reject: self._on_reject,
            Step: self._on_step,
            Pong: self._on_pong,
            ModelFiles: lambda message, now: self._replies.on_model_files(message),
            AdminReply: lambda message, now: self._replies.on_admin_reply(message),
            Goodbye: self._on_goodbye,
        }

    # -- the callers' side ---------------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int] | None, params: SamplingParams | None, **options: Unpack[SubmitOptions]
    ) -> OpenRequest:
        """Send a SUBMIT; see `make_submit`. Raises engine_unavailable without a connection."""
        message = make_submit(prompt_ids, params, **options)
        self._refuse_when_down()
        num_choices = 1 if params is None else max(params.n, 1)
        resubmit = options.get("resubmit", True)
        hides_tokens = resubmit and message.reply == "text"  # they are needed to resume
        request = self.requests.start(
            message.replace(reply="both") if hides_tokens else message, [0] * num_choices, resubmit=resubmit
        )
        for collector in request.collectors:
            collector.hides_tokens = hides_tokens
        if message.deadline_ms is not None:
            request.deadline_s = self._clock() + message.deadline_ms / 1000
        self._send_if_up(request.message)
        return request

    def attach(self, request_id: bytes, cursors: Sequence[int], n: int, reply: str) -> OpenRequest:
        """Read a request on from `cursors`: what is already held of each choice."""
        check_request_id(request_id)
        self._refuse_when_down()
        all_cursors = (*cursors, *([0] * (n - len(cursors))))
        request = self.requests.start(Attach(request_id, 0, all_cursors, reply), all_cursors)
        self._send_if_up(request.message)
        return request

    def cancel(self, collectors: Sequence[OutputCollector], stop: tuple[int, str] | None = None) -> None:
        """Cancel choices. Idempotent, without an answer: the streams end with `abort` when the engine has done it, or
        with `stop` where `stop` says that their text has a stop string: (tokens up to its end, the string)."""
        streams = []
        for collector in collectors:
            if collector.finished or collector.cancelled:
                continue
            collector.cancelled = True
            collector.found_stop = stop
            request = collector.request
            if request is not None and request.lost_s is not None and (request.held or self.phase is Phase.DOWN):
                stream = self.requests.end_lost_choice(collector)
                self._cancel_streams([] if stream is None else [stream])
            else:
                streams.append(collector.stream)
        if streams and self.phase is Phase.UP:
            stopped = () if stop is None else tuple(StopFound(stream, *stop) for stream in streams)
            self._send(Cancel(tuple(streams), stopped=stopped))

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel a request by its id, whoever submitted it."""
        check_request_id(request_id)
        request = self.requests.get(request_id)
        if request is not None and (request.held or self.phase is not Phase.UP):
            self.cancel(request.collectors)
        if self.phase is Phase.UP:
            self._send(Cancel(ids=(request_id,)))

    def adopt(self, request: OpenRequest) -> None:
        """Submit another session's request here, with its id and collectors. Raises engine_unavailable, and conflict
        where this session has the id."""
        self._refuse_when_down()
        self.requests.adopt(request)
        if request.id in self._moved_ids:
            self._moved_ids.remove(request.id)
        if request.finished:
            return
        if request.held:
            self._send_held(self._clock())
        else:
            self._send_if_up(request.message)

    def hedge(self, request: OpenRequest) -> OpenRequest:
        """Run another session's request here as well. Raises engine_unavailable, and conflict where this session has
        the id."""
        self._refuse_when_down()
        hedge = self.requests.hedge(request, self._clock())
        self._send_if_up(hedge.message)
        return hedge

    def release(self, request: OpenRequest) -> None:
        """Forget a request that moves elsewhere, and have the engine cancel it, now or when it is back."""
        self._cancel_streams(self.requests.release(request))
        if request.lost_s is not None and self.phase is not Phase.UP:
            self._moved_ids.append(request.id)

    def forget(self, request: OpenRequest) -> None:
        """Forget a request that is read at another engine from now on. This engine is told nothing: others may read it
        here, and what it still sends is ignored."""
        self.requests.release(request)

    def leave(self, request: OpenRequest) -> None:
        """Forget a request without readers. The engine cancels it, now or when it is back, unless another peer reads
        it."""
        streams = self.requests.release(request)
        if streams and self.phase is Phase.UP:
            self._send(Cancel(tuple(streams), leave=True))
        else:
            self._streams_to_leave += streams

    def ping(self) -> PendingReply[Pong]:
        """Send PING; the reply says how long ago the engine's loop turned."""
        return self._replies.ping()

    def model_files(self, files: Sequence[str] | None = None) -> PendingReply[ModelFiles]:
        """Ask for the named files of the model, or all."""
        return self._replies.model_files(files)

    def admin(self, op: str, arguments: dict[str, Any]) -> PendingReply[Any]:
        """Send an ADMIN operation."""
        return self._replies.admin(op, arguments)

    def give_up(self, now: float) -> None:
        """Count the engine as lost where it is not connected: somebody knows that it does not come back."""
        if not self._connected and self.phase is not Phase.DOWN:
            self._lose("The engine is gone.", now)

    def close(self, message: str = "The client was closed.") -> None:
        """Say BYE and end everything open with engine_unavailable."""
        if self.phase in _WELCOMED:
            self._send(Bye())
        self._end_all("engine_unavailable", message)
        self.phase = Phase.DOWN

    # -- the transport's side ------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Begin a connection that the transport has made. Whatever was in the old one is lost."""
        self._connected = True
        self._now = now
        self._greet(now)

    def disconnected(self, now: float) -> None:
        """Handle the loss of the transport's connection."""
        self._connected = False
        self._now = now
        if self._away_s is None:
            self._away_s = now
        if self.phase is Phase.SILENT:
            self._heard_s = now  # a loss is a sign of it: its lease starts here
        if self.phase is not Phase.DOWN:
            self._leave_up(Phase.GREETING)
        self._hello_due_s = None

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Handle one message of the engine. One that cannot be decoded is counted and dropped."""
        try:
            message = messages.decode(frames)
        except messages.WireError:
            self.num_protocol_errors += 1
            return
        self._heard_s = self._now = now
        if self.phase is Phase.SILENT:
            self._end_silence(now)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, now)

    def tick(self, now: float) -> float:
        """Do what is due, and return when to call again. Call `receive` for all that has arrived first."""
        self._now = now
        # Time in which this process did not run is no silence of the engine.
        self._heard_s = min(now, self._heard_s + missed_s(now, self._due_s))
        silent_s = now - self._heard_s
        if self.phase is not Phase.DOWN and silent_s > self._lease_s:
            if silent_s > self._patience_s:
                self._lose("The engine has not been heard of for too long.", now)
            elif self.phase is Phase.UP:
                self.phase = Phase.SILENT
                self.on_change()
        if self.phase is Phase.SILENT:
            self._cancel_streams(self.requests.expire_deadlines(now))
        if (requests_due_s := self.requests.due_s()) is not None and now >= requests_due_s:
            self._cancel_streams(self.requests.expire(now))
            self._send_held(now)
            requests_due_s = self.requests.due_s()
        if self._hello_due_s is not None and now >= self._hello_due_s:
            self._greet(now)
        if self._ping_due_s is not None and now >= self._ping_due_s:
            self._send(Ping(0))
            self._ping_due_s = now + self._heartbeat_s
        if (credit := self._credit.due(now)) is not None:
            self._send(credit)
        due = (self._hello_due_s, self._ping_due_s, self._credit.due_s, requests_due_s)
        self._due_s = min((time for time in due if time is not None), default=now + self._heartbeat_s)
        return self._due_s

    # -- the connection ------------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        if self.phase in _WELCOMED:
            self._leave_up(Phase.GREETING)
        elif self.phase is Phase.DOWN:
            self.phase = Phase.GREETING
            self._heard_s = now
        self.outgoing.clear()  # it was for the connection that is gone; what must survive is kept as state
        self._hello_due_s = now + self._heartbeat_s
        epoch, last_seq = self._resume or (None, 0)
        self._send(Hello(role=self.role, name=self.name, window=self._window, epoch=epoch, last_seq=last_seq))

    def _leave_up(self, phase: Phase) -> None:
        if self.phase in _WELCOMED and self.welcome is not None:
            self._resume = (self.welcome.epoch, self._last_seq)
        self.phase = phase
        self._ping_due_s = None
        self._credit.reset()
        self.outgoing.clear()
        self.on_change()

    def _lose(self, message: str, now: float) -> None:
        """Give the engine up: it is gone or has forgotten this client, unless it was only stopped. While the transport
        is connected, HELLO is still sent."""
        self._leave_up(Phase.DOWN)
        self._hello_due_s = now + self._heartbeat_s if self._connected else None
        error = InferEngineError("engine_unavailable", message)
        self.requests.suspend_all(error, self._away_since(now))
        self._replies.end_all(error)

    def _away_since(self, now: float) -> float:
        return now if self._away_s is None else self._away_s

    def _end_silence(self, now: float) -> None:
        """Go back to UP. The connection stood: nothing on it is lost, and what was held back is sent now."""
        self.phase = Phase.UP
        self._send_again(now)
        self.on_change()

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if self.phase is Phase.UP and self.welcome is not None and self.welcome.epoch != welcome.epoch:
            self._greet(now)  # another engine is at this address; `_resume` still names the old one
            return
        self.welcome = welcome
        if self.phase is Phase.UP:
            self._send_held(now)
            self.on_change()
            return
        if self._resume is not None and welcome.resumed is None and welcome.epoch == self._resume[0]:
            return  # a change of state that crossed our HELLO
        self._settle_requests(welcome, now)
        self.phase = Phase.UP
        self._hello_due_s = None
        self._ping_due_s = now + welcome.heartbeat_s
        self._credit.start(welcome.window, self._last_seq)
        self._send_again(now)
        self.on_change()

    def _settle_requests(self, welcome: Welcome, now: float) -> None:
        """Decide what became of the requests that were open before this WELCOME."""
        resume, self._resume = self._resume, None
        lost_s, self._away_s = self._away_since(now), None
        epoch, self._epoch = self._epoch, welcome.epoch
        if resume is not None and welcome.resumed:
            self.requests.engine_kept_all(now)
            return
        self._last_seq = 0
        if epoch is not None:
            self.requests.engine_forgot_all(restarted=welcome.epoch != epoch, lost_s=lost_s)

    def _send_held(self, now: float) -> None:
        """Resume lost requests, once the engine takes requests."""
        if self.phase is Phase.UP and self.welcome is not None and self.welcome.state == READY:
            for message in self.requests.take_held(self.welcome, now):
                self._send(message)

    def _send_again(self, now: float) -> None:
        """Send what the engine may not have got over the connection before."""
        for message in self.requests.unanswered():
            self._send(message)
        streams = self.requests.cancelled() + self._streams_to_cancel
        self._streams_to_cancel.clear()
        if streams:
            self._send(Cancel(tuple(streams), stopped=tuple(self.requests.found_stops())))
        if self._streams_to_leave:
            self._send(Cancel(tuple(self._streams_to_leave), leave=True))
            self._streams_to_leave.clear()
        if self._moved_ids:
            self._send(Cancel(ids=tuple(self._moved_ids)))
            self._moved_ids.clear()
        self._send_held(now)
        for query in self._replies.unanswered():
            self._send(query)

    # -- messages of the engine ----------------------------------------------------------------------------------------

    def _on_step(self, step: Step, now: float) -> None:
        if self.phase is not Phase.UP or step.seq <= self._last_seq:
            return
        if step.seq != self._last_seq + 1:
            self._greet(now)  # a STEP was lost: have it sent again
            return
        self._last_seq = step.seq
        self.requests.on_step(step, now)
        if (credit := self._credit.handled(step.seq, now)) is not None:
            self._send(credit)

    def _on_reject(self, reject: Reject, now: float) -> None:
        if self.requests.on_reject(reject, now):
            return
        if reject.field == "hello" and self.phase is Phase.UP:
            self._greet(now)  # the engine does not know this client any more
        elif reject.code == "version_mismatch":
            self._end_all("version_mismatch", reject.message)

    def _on_pong(self, pong: Pong, now: float) -> None:
        self.last_pong = pong
        self._replies.on_pong(pong)
        if self.phase is Phase.UP and self.welcome is not None and pong.epoch != self.welcome.epoch:
            self._greet(now)

    def _on_goodbye(self, message: Goodbye, now: float) -> None:
        """Handle GOODBYE: the engine stops, and has forgotten this client. Nothing can be resumed there. It waits for
        the BYE, so that no GOODBYE is lost with the connection."""
        self._lose(message.reason, now)
        self._send(Bye())
        self._resume = None
        self._last_seq = 0

    # -- inside --------------------------------------------------------------------------------------------------------

    def _end_all(self, code: str, message: str) -> None:
        error = InferEngineError(code, message)
        self.requests.end_all(error)
        self._replies.end_all(error)

    def _refuse_when_down(self) -> None:
        if self.phase is Phase.DOWN:
            raise InferEngineError("engine_unavailable", "There is no connection to the engine.")
        if self.phase is Phase.SILENT:
            raise InferEngineError("engine_unavailable", "The engine says nothing.", retry_after_s=1.0)

    def _cancel_streams(self, streams: Sequence[int]) -> None:
        """Have the engine cancel streams, now or when the connection is back."""
        if streams and self.phase is Phase.UP:
            self._send(Cancel(tuple(streams)))
        else:
            self._streams_to_cancel += streams

    def _send_if_up(self, message: Message) -> None:
        if self.phase is Phase.UP:
            self._send(message)

    def _send(self, message: Message) -> None:
        self.outgoing.append(messages.encode(message))

    @property
    def _model(self) -> tuple[str, str] | None:
        model = None if self.welcome is None else self.welcome.model
        return None if model is None else (model.name, model.fingerprint)

    @property
    def _heartbeat_s(self) -> float:
        return HEARTBEAT_BEFORE_WELCOME_S if self.welcome is None else self.welcome.heartbeat_s

    @property
    def _lease_s(self) -> float:
        return LEASE_BEFORE_WELCOME_S if self.welcome is None else self.welcome.lease_s

    @property
    def _patience_s(self) -> float:
        """How long the open streams of a silent engine wait for it."""
        return max(self._lease_s, PATIENCE_S) if self._connected and self.welcome is not None else self._lease_s


class PendingReplies:
    """Queries without a reply yet: pings, model files, admin operations. Sent again after a reconnect: it is safe."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        """`send` sends a message if there is a connection."""
        self._send = send
        self._pings: dict[int, PendingReply[Pong]] = {}
        self._models: deque[tuple[Model, PendingReply[ModelFiles]]] = deque()
        self._admins: dict[int, tuple[Admin, PendingReply[Any]]] = {}
        self._nonce = 1

    def ping(self) -> PendingReply[Pong]:
        """Send PING."""
        nonce, reply = self._next_nonce(), PendingReply[Pong]()
        self._pings[nonce] = reply
        self._send(Ping(nonce))
        return reply

    def model_files(self, files: Sequence[str] | None) -> PendingReply[ModelFiles]:
        """Ask for the named files of the model, or all."""
        message, reply = Model(None if files is None else tuple(files)), PendingReply[ModelFiles]()
        self._models.append((message, reply))
        self._send(message)
        return reply

    def admin(self, op: str, arguments: dict[str, Any]) -> PendingReply[Any]:
        """Send an ADMIN operation."""
        nonce, reply = self._next_nonce(), PendingReply[Any]()
        message = Admin(op, nonce, arguments)
        self._admins[nonce] = (message, reply)
        self._send(message)
        return reply

    def unanswered(self) -> Iterator[Message]:
        """Yield the queries to send again."""
        yield from (Ping(nonce) for nonce in self._pings)
        yield from (message for message, _ in self._models)
        yield from (message for message, _ in self._admins.values())

    def end_all(self, error: InferEngineError) -> None:
        """Fail every query: no reply will come."""
        replys: list[PendingReply[Any]] = [*self._pings.values(), *(reply for _, reply in self._models)]
        replys += [reply for _, reply in self._admins.values()]
        self._pings.clear()
        self._models.clear()
        self._admins.clear()
        for reply in replys:
            reply.fail(error)

    def on_pong(self, pong: Pong) -> None:
        """Handle PONG."""
        reply = self._pings.pop(pong.nonce, None)
        if reply is not None:
            reply.resolve(pong)

    def on_model_files(self, message: ModelFiles) -> None:
        """Handle MODEL_FILES."""
        if self._models:  # they are answered in order
            self._models.popleft()[1].resolve(message)

    def on_admin_reply(self, message: AdminReply) -> None:
        """Handle ADMIN_REPLY."""
        item = self._admins.pop(message.nonce, None)
        if item is None:
            return
        if message.ok:
            item[1].resolve(message.result)
        else:
            item[1].fail(error_from(message.code or "engine_error", message.message or "", "op"))

    def _next_nonce(self) -> int:
        self._nonce += 1
        return self._nonce
