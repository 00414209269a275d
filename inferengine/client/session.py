"""One client's side of the wire as a state machine: frames and time in, frames and collected output out. No sockets.

AsyncClient and Client drive the same machine; they differ only in how their readers wait. Here are the phases of the
connection, its heartbeat and its lease; `calls` has the requests, `questions` what else was asked. What must survive a
broken connection is kept as state and sent again after the next WELCOME: submissions without an answer (their ids make
that safe), cancellations without an effect, questions without a reply. What must survive a lost engine is submitted
again with the output so far, as soon as an engine at this address is READY (`going_on`).

    DOWN --transport connected--> GREETING --WELCOME--> UP --connection lost, epoch changed--> GREETING
    UP --nothing heard for a lease, the connection stands--> SILENT --anything heard--> UP
    UP, GREETING, SILENT --nothing heard for a lease, no connection; or for PATIENCE_S--> DOWN: open requests wait for
    the engine, or go on at another

A process that is gone loses its connection at once. One that says nothing while its connection stands is paused
(SIGSTOP, a frozen container, a debugger) or stuck: its streams wait, and go on when it does. New requests are refused
meanwhile. Time in which this process itself did not run counts for nobody.

The sockets of one client and what moves between them and its Session. Used by one thread; it never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Unpack

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from inferengine.client.pending import Calls, Questions
from inferengine.client.requests import SubmitOptions, make_submit
from inferengine.client.resume import RESUME_WAIT_S
from inferengine.client.streams import Answer, Call, Collector
from inferengine.errors import InferEngineError
from inferengine.process.system import missed_s
from inferengine.sampling_params import SamplingParams
from inferengine.wire import codec, sockets
from inferengine.wire.curve import ClientKeys
from inferengine.wire.flow_control import CreditGiver
from inferengine.wire.messages import (
    READY,
    Accept,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    Goodbye,
    Hello,
    Message,
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
MAX_ORPHANS = 4096  # requests that went on elsewhere, to be cancelled where they were
PATIENCE_S = 120.0  # with an engine that says nothing over a connection that stands; above every watchdog's limit


class Phase(Enum):
    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    SILENT = "silent"


_GREETED = (Phase.UP, Phase.SILENT)  # this connection has had its WELCOME


class Session:
    """State of one connection to one engine, over reconnects and restarts of the engine."""

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
        self.phase = Phase.DOWN
        self.welcome: Welcome | None = None
        self.last_pong: Pong | None = None
        self.outgoing: deque[codec.Frames] = deque()
        self.on_change: Callable[[], None] = lambda: None  # phase or engine state changed
        self.num_protocol_errors = 0
        self._window = window
        self._connected = False
        self._heard_s = now
        self._greet_s: float | None = None
        self._ping_s: float | None = None
        self._due_s = now  # when `tick` wanted to be called
        self._resume: tuple[bytes, int] | None = None
        self._last_seq = 0
        self._credit = CreditGiver()
        self._calls = Calls(wait_s=resume_wait_s)
        self._now = now
        self._clock = clock or (lambda: self._now)
        self._epoch: bytes | None = None  # of the engine that the open requests are at
        self._away_s: float | None = None  # since when it is not heard
        self._orphan_ids: deque[bytes] = deque(maxlen=MAX_ORPHANS)  # that may still run, and go on elsewhere
        self._questions = Questions(self._ask)
        self._orphans: list[int] = []  # streams released while the connection was broken
        self._left: list[int] = []  # likewise, but somebody else may read them
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Welcome: self._on_welcome,
            Accept: lambda message, now: self._calls.on_accept(message, now, self._model),
            Reject: self._on_reject,
            Step: self._on_step,
            Pong: self._on_pong,
            ModelFiles: lambda message, now: self._questions.on_model_files(message),
            AdminReply: lambda message, now: self._questions.on_admin_reply(message),
            Goodbye: self._on_goodbye,
        }

    # -- what the caller asks for ------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int] | None, params: SamplingParams | None, **options: Unpack[SubmitOptions]
    ) -> Call:
        """See `make_submit`."""
        message = make_submit(prompt_ids, params, **options)
        self._refuse_when_down()
        num_choices = 1 if params is None else max(params.n, 1)
        resubmit = options.get("resubmit", True)
        hides_tokens = resubmit and message.reply == "text"  # to go on, it must know them
        call = self._calls.start(
            message._replace(reply="both") if hides_tokens else message, [0] * num_choices, resubmit=resubmit
        )
        for collector in call.collectors:
            collector.hides_tokens = hides_tokens
        if message.deadline_ms is not None:
            call.deadline_s = self._clock() + message.deadline_ms / 1000
        self._ask(call.message)
        return call

    def attach(self, request_id: bytes, cursors: Sequence[int], n: int, reply: str) -> Call:
        """Continue a request from what is already held of each choice."""
        self._refuse_when_down()
        held = (*cursors, *([0] * (n - len(cursors))))
        call = self._calls.start(Attach(request_id, 0, held, reply), held)
        self._ask(call.message)
        return call

    def cancel(self, collectors: Sequence[Collector], stop: tuple[int, str] | None = None) -> None:
        """Idempotent, no answer: the streams end with `abort` when the engine has done it. `stop`: with `stop`, because
        their text has a stop string, complete with so many tokens."""
        names = []
        for collector in collectors:
            if not collector.finished and not collector.cancelled:
                collector.cancelled = True
                collector.found_stop = stop
                call = collector.call
                if call is not None and call.lost_s is not None and (call.held or self.phase is Phase.DOWN):
                    self._orphans += filter(None, [self._calls.end_here(collector)])
                else:
                    names.append(collector.name)
        if names and self.phase is Phase.UP:
            stopped = () if stop is None else tuple(StopFound(name, *stop) for name in names)
            self._send(Cancel(tuple(names), stopped=stopped))

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel by id, whoever submitted it."""
        call = self._calls.get(request_id)
        if call is not None and (call.held or self.phase is not Phase.UP):
            self.cancel(call.collectors)
        if self.phase is Phase.UP:
            self._send(Cancel(ids=(request_id,)))

    def adopt(self, call: Call) -> None:
        """Submit another session's call here, under its id and with its collectors. Nothing of it has come yet.
        Raises engine_unavailable, and conflict where this session has the id."""
        self._refuse_when_down()
        self._calls.adopt(call)
        if call.id in self._orphan_ids:
            self._orphan_ids.remove(call.id)
        if call.finished:
            return
        if call.lost_s is None:
            self._ask(call.message)
        else:
            call.held, call.retry_s = True, 0.0
            self._send_held(self._clock())

    def release(self, call: Call) -> None:
        """Forget a call that goes on elsewhere, and have the engine cancel it, now or when it is back."""
        names = self._calls.release(call)
        if names and self.phase is Phase.UP:
            self._send(Cancel(tuple(names)))
        else:
            self._orphans += names
        if call.lost_s is not None and self.phase is not Phase.UP:
            self._orphan_ids.append(call.id)

    def leave(self, call: Call) -> None:
        """Forget a call that nobody here reads any more. The engine cancels it, now or when it is back, unless
        another peer reads it."""
        names = self._calls.release(call)
        if names and self.phase is Phase.UP:
            self._send(Cancel(tuple(names), leave=True))
        else:
            self._left += names

    def ping(self) -> Answer[Pong]:
        return self._questions.ping()

    def model_files(self, files: Sequence[str] | None = None) -> Answer[ModelFiles]:
        return self._questions.model_files(files)

    def admin(self, op: str, arguments: dict[str, Any]) -> Answer[Any]:
        return self._questions.admin(op, arguments)

    def close(self, message: str = "The client was closed.") -> None:
        """Say BYE; what is open ends here."""
        if self.phase in _GREETED:
            self._send(Bye())
        self._end_all("engine_unavailable", message)
        self.phase = Phase.DOWN

    # -- what the transport reports ----------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The transport has a (new) connection; whatever was in the old one is lost."""
        self._connected = True
        self._now = now
        self._greet(now)

    def disconnected(self, now: float) -> None:
        self._connected = False
        self._now = now
        if self._away_s is None:
            self._away_s = now
        if self.phase is Phase.SILENT:
            self._heard_s = now  # that much is heard of it: the lease to come back in begins
        if self.phase is not Phase.DOWN:
            self._leave_up(Phase.GREETING)
        self._greet_s = None

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """One message of the engine. One that cannot be decoded is counted and dropped."""
        try:
            message = codec.decode(frames)
        except codec.WireError:
            self.num_protocol_errors += 1
            return
        self._heard_s = self._now = now
        if self.phase is Phase.SILENT:
            self._end_silence(now)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, now)

    def tick(self, now: float) -> float:
        """Do what is due; returns when to call again. Call `receive` for all that has arrived before."""
        self._now = now
        self._heard_s = min(now, self._heard_s + missed_s(now, self._due_s))  # what we could not hear was no silence
        silent_s = now - self._heard_s
        if self.phase is not Phase.DOWN and silent_s > self._lease_s:
            if silent_s > self._patience_s:
                self._lose("The engine has not been heard of for too long.", now)
            elif self.phase is Phase.UP:
                self.phase = Phase.SILENT
                self.on_change()
        if self.phase is Phase.SILENT:
            self._orphans += self._calls.expire_deadlines(now)
        if (calls_due_s := self._calls.due_s()) is not None and now >= calls_due_s:
            if streams := self._calls.expire(now):
                if self.phase is Phase.UP:
                    self._send(Cancel(tuple(streams)))
                else:
                    self._orphans += streams
            self._send_held(now)
            calls_due_s = self._calls.due_s()
        if self._greet_s is not None and now >= self._greet_s:
            self._greet(now)
        if self._ping_s is not None and now >= self._ping_s:
            self._send(Ping(0))
            self._ping_s = now + self._heartbeat_s
        if (credit := self._credit.due(now)) is not None:
            self._send(credit)
        known = (self._greet_s, self._ping_s, self._credit.due_s, calls_due_s)
        self._due_s = min((time for time in known if time is not None), default=now + self._heartbeat_s)
        return self._due_s

    # -- phases ------------------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        if self.phase in _GREETED:
            self._leave_up(Phase.GREETING)
        elif self.phase is Phase.DOWN:
            self.phase = Phase.GREETING
            self._heard_s = now
        self.outgoing.clear()  # it was meant for the connection that is gone; what matters is kept as state
        self._greet_s = now + self._heartbeat_s
        epoch, last_seq = self._resume or (None, 0)
        self._send(Hello(role=self.role, name=self.name, window=self._window, epoch=epoch, last_seq=last_seq))

    def _leave_up(self, phase: Phase) -> None:
        if self.phase in _GREETED and self.welcome is not None:
            self._resume = (self.welcome.epoch, self._last_seq)
        self.phase = phase
        self._ping_s = None
        self._credit.reset()
        self.outgoing.clear()
        self.on_change()

    def _lose(self, message: str, now: float) -> None:
        """The engine has forgotten us by now, or is gone, or could not run for a while and then still knows us. While
        the transport is connected, HELLO goes on."""
        self._leave_up(Phase.DOWN)
        self._greet_s = now + self._heartbeat_s if self._connected else None
        error = InferEngineError("engine_unavailable", message)
        self._calls.suspend_all(error, self._away_since(now))
        self._questions.end_all(error)

    def _away_since(self, now: float) -> float:
        return now if self._away_s is None else self._away_s

    def _end_silence(self, now: float) -> None:
        """The connection stood all the time: nothing on it is lost, and what was not sent over it is sent now."""
        self.phase = Phase.UP
        self._send_again(now)
        self.on_change()

    def _end_all(self, code: str, message: str) -> None:
        error = InferEngineError(code, message)
        self._calls.end_all(error)
        self._questions.end_all(error)

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if self.phase is Phase.UP and self.welcome is not None and self.welcome.epoch != welcome.epoch:
            self._greet(now)  # another engine speaks at this address; what to resume is still the old one's
            return
        self.welcome = welcome
        if self.phase is Phase.UP:
            self._send_held(now)
            self.on_change()
            return
        if self._resume is not None and welcome.resumed is None and welcome.epoch == self._resume[0]:
            return  # news of the engine's state that crossed our HELLO
        self._after_greeting(welcome, now)
        self.phase = Phase.UP
        self._greet_s = None
        self._ping_s = now + welcome.heartbeat_s
        self._credit.start(welcome.window, self._last_seq)
        self._send_again(now)
        self.on_change()

    def _after_greeting(self, welcome: Welcome, now: float) -> None:
        """Decide what became of the streams that were open before."""
        resume, self._resume = self._resume, None
        lost_s, self._away_s = self._away_since(now), None
        epoch, self._epoch = self._epoch, welcome.epoch
        if resume is not None and welcome.resumed:
            self._calls.found_again(now)
            return
        self._last_seq = 0
        if epoch is not None:
            self._calls.after_lapse(restarted=welcome.epoch != epoch, lost_s=lost_s)

    def _send_held(self, now: float) -> None:
        """Let calls go on that were lost, once the engine takes requests."""
        if self.phase is Phase.UP and self.welcome is not None and self.welcome.state == READY:
            for message in self._calls.to_send(self.welcome, now):
                self._send(message)

    def _send_again(self, now: float) -> None:
        for message in self._calls.unanswered():
            self._send(message)
        names = self._calls.cancelled() + self._orphans
        self._orphans.clear()
        if names:
            self._send(Cancel(tuple(names), stopped=tuple(self._calls.found_stops())))
        if self._left:
            self._send(Cancel(tuple(self._left), leave=True))
            self._left.clear()
        if self._orphan_ids:
            self._send(Cancel(ids=tuple(self._orphan_ids)))
            self._orphan_ids.clear()
        self._send_held(now)
        for question in self._questions.unanswered():
            self._send(question)

    # -- messages of the engine --------------------------------------------------------------------------------------

    def _on_step(self, step: Step, now: float) -> None:
        if self.phase is not Phase.UP or step.seq <= self._last_seq:
            return
        if step.seq != self._last_seq + 1:
            self._greet(now)  # something was lost: have it sent again
            return
        self._last_seq = step.seq
        self._calls.on_step(step, now)
        if (credit := self._credit.handled(step.seq, now)) is not None:
            self._send(credit)

    def _on_reject(self, reject: Reject, now: float) -> None:
        if self._calls.on_reject(reject, now):
            return
        if reject.field == "hello" and self.phase is Phase.UP:
            self._greet(now)  # the engine does not know us any more
        elif reject.code == "version_mismatch":
            self._end_all("version_mismatch", reject.message)

    def _on_pong(self, pong: Pong, now: float) -> None:
        self.last_pong = pong
        self._questions.on_pong(pong)
        if self.phase is Phase.UP and self.welcome is not None and pong.epoch != self.welcome.epoch:
            self._greet(now)

    def _on_goodbye(self, message: Goodbye, now: float) -> None:
        """It says nothing more, and has forgotten this client: what is open cannot be found again there."""
        self._lose(message.reason, now)
        self._resume = None
        self._last_seq = 0

    # -- small things ------------------------------------------------------------------------------------------------

    def _refuse_when_down(self) -> None:
        if self.phase is Phase.DOWN:
            raise InferEngineError("engine_unavailable", "There is no connection to the engine.")
        if self.phase is Phase.SILENT:
            raise InferEngineError("engine_unavailable", "The engine says nothing.", retry_after_s=1.0)

    def _ask(self, message: Message) -> None:
        if self.phase is Phase.UP:
            self._send(message)

    def _send(self, message: Message) -> None:
        self.outgoing.append(codec.encode(message))

    @property
    def _model(self) -> tuple[str, str] | None:
        model = None if self.welcome is None else self.welcome.model
        return None if model is None else (model.name, model.fingerprint)

    @property
    def calls(self) -> Calls:
        return self._calls

    @property
    def _heartbeat_s(self) -> float:
        return HEARTBEAT_BEFORE_WELCOME_S if self.welcome is None else self.welcome.heartbeat_s

    @property
    def _lease_s(self) -> float:
        return LEASE_BEFORE_WELCOME_S if self.welcome is None else self.welcome.lease_s

    @property
    def _patience_s(self) -> float:
        """How long the open streams of an engine that says nothing wait for it."""
        return max(self._lease_s, PATIENCE_S) if self._connected and self.welcome is not None else self._lease_s


CLOSE_LINGER_MS = 200


class Transport:
    """A DEALER to the engine, its monitor, and where `status_address` is not empty a SUB for the engine's status."""

    def __init__(self, session: Session, address: str, status_address: str, curve: ClientKeys | None) -> None:
        self._session = session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = sockets.client_dealer(self._context, sockets.routing_id(session.role))
        self.monitor = sockets.connection_monitor(self.dealer)
        sockets.use_curve(self.dealer, curve, address)
        self.dealer.connect(address)
        self.subscriber: zmq.Socket[bytes] | None = None
        if status_address:
            self.subscriber = sockets.status_subscriber(self._context)
            sockets.use_curve(self.subscriber, curve, status_address)
            self.subscriber.connect(status_address)

    @property
    def sources(self) -> Sequence[zmq.Socket[bytes]]:
        """What to wait for."""
        return [self.dealer, self.monitor] if self.subscriber is None else [self.dealer, self.monitor, self.subscriber]

    def receive(self, now: float) -> bool:
        """Give the session the next message of the engine. False: there is none."""
        if not sockets.readable(self.dealer):
            return False
        self._session.receive(self.dealer.recv_multipart(zmq.NOBLOCK), now)
        return True

    def flush(self) -> bool:
        """Send what the session has to say. False: not connected, or a full pipe; try again later."""
        outgoing = self._session.outgoing
        while outgoing:
            try:
                self.dealer.send_multipart(outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            outgoing.popleft()
        return True

    def watch(self, now: float) -> None:
        """Tell the session of connections made and lost, the latter after all that had arrived before."""
        while sockets.readable(self.monitor):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._session.connected(now)
            elif event == zmq.EVENT_DISCONNECTED:
                while self.receive(now):
                    pass
                self._session.disconnected(now)

    def latest_status(self) -> dict[str, Any] | None:
        """The newest STATUS that has arrived; None when none has."""
        latest: dict[str, Any] | None = None
        while self.subscriber is not None and sockets.readable(self.subscriber):
            frames = self.subscriber.recv_multipart(zmq.NOBLOCK)
            try:
                values = msgpack.unpackb(frames[-1])
            except Exception:  # not from an engine of ours; STATUS may be lost anyway
                continue
            if isinstance(values, dict):
                latest = values
        return latest

    def close(self) -> None:
        self.dealer.disable_monitor()
        self._context.destroy(linger=CLOSE_LINGER_MS)
