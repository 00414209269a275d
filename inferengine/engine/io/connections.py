"""Receive every message of every client, and pass it to the part that handles it.

Handles HELLO, leases, credit, MODEL, PING, ADMIN and BYE; passes SUBMIT, ATTACH and CANCEL on to the intake. Bytes that
are no message are answered with REJECT and affect no other connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferengine.config import Config
from inferengine.engine.counters import Counters
from inferengine.engine.io.intake import Intake
from inferengine.engine.io.publisher import Connection, Publisher, Send, SubmittedRequest
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.model_info import ModelCard
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import missed_s
from inferengine.wire import messages
from inferengine.wire.messages import (
    EMBEDDINGS,
    RESUME_OUTPUT,
    Admin,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    Credit,
    Goodbye,
    Hello,
    Message,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Reject,
    Submit,
    Welcome,
)

logger = logging.getLogger(__name__)

FEATURES = ("text", "messages", "resume", "attach", "logprobs", EMBEDDINGS, RESUME_OUTPUT)
LEASE_INTERVALS = 3
TICK_S = 0.25  # `tick` is called at least so often
WELCOME_INTERVAL_S = 0.1  # between two that tell the progress of loading
SendReply = Callable[[Any], None]
AdminOp = Callable[[dict[str, Any], SendReply], None]  # arguments, and what takes the result (in the I/O thread)


class Connections:
    """The connections of all clients. Used by the I/O thread only."""

    def __init__(
        self,
        config: Config,
        lifecycle: Lifecycle,
        card: ModelCard,
        intake: Intake,
        publisher: Publisher,
        counters: Counters,
        adapters: Mapping[str, int],
        admin_ops: Mapping[str, AdminOp],
        send: Send,
    ) -> None:
        """`adapters`: LoRA adapters by name, kept up to date by its owner. `admin_ops`: operations of ADMIN by name."""
        self.by_routing_id: dict[bytes, Connection] = {}
        self._model: ModelInfo | None = None  # announced once it is loaded
        self._adapters = adapters
        self._admin_ops = admin_ops
        self._intake = intake
        self._config = config
        self._lifecycle = lifecycle
        self._card = card
        self._publisher = publisher
        self._counters = counters
        self._send = send
        self._lease_s = LEASE_INTERVALS * config.wire.heartbeat_s
        self._broadcast: tuple[Any, ...] = ()
        self._broadcast_s = -1e9
        self._ticked_s = lifecycle.clock()
        self._limits = {
            **config.resolved()["limits"],
            "max_message_bytes": config.wire.max_message_bytes,
            "max_queued_requests": config.scheduler.max_queued_requests,
            "max_queued_tokens": config.scheduler.max_queued_tokens,
        }
        self._handlers: dict[type, Callable[[Connection, Any, float], None]] = {
            Cancel: intake.cancel,
            Submit: intake.submit,
            Attach: intake.attach,
            Credit: self._on_credit,
            Model: self._on_model,
            Ping: self._on_ping,
            Admin: self._on_admin,
            Bye: self._on_bye,
        }

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model with its current adapters; None before it is announced."""
        return None if self._model is None else self._model.replace(adapters=tuple(sorted(self._adapters)))

    @property
    def has_backlog(self) -> bool:
        """Whether any message is queued because a pipe is full."""
        return any(connection.backlog for connection in self.by_routing_id.values())

    def announce(self, model: ModelInfo) -> None:
        """Set the loaded model, which every WELCOME announces from now on."""
        self._model = model

    # -- coming in ---------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Handle a message from the ROUTER, whose first frame is the routing id."""
        routing_id, connection = frames[0], self.by_routing_id.get(frames[0])
        if connection is not None:
            connection.back(now)
        try:
            message = messages.decode(frames[1:])
        except messages.WireError as error:
            self._counters.num_protocol_errors += 1
            self._reply(routing_id, connection, error.reject(), now)
            return
        if isinstance(message, Hello):
            self._on_hello(routing_id, connection, message, now)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            self._counters.num_protocol_errors += 1
            self._reply(
                routing_id, connection, _protocol_error(message, "that message is the engine's, not a client's"), now
            )
        elif connection is None:
            if not isinstance(message, Bye):
                self._reply(routing_id, None, _protocol_error(message, "say HELLO first", field="hello"), now)
        else:
            handler(connection, message, now)
            if connection.overflowed:
                self._drop(connection, now, "it reads none of its answers")

    def _on_hello(self, routing_id: bytes, connection: Connection | None, message: Hello, now: float) -> None:
        resumed: bool | None = None
        if message.epoch is not None:
            same = connection is not None and message.epoch == self._lifecycle.epoch
            resumed = connection is not None and same and connection.resume(message.last_seq, now)
        if connection is not None and not resumed:
            self._drop(connection, now, "it started anew")
            connection = None
        if connection is None:
            window = min(message.window or self._config.wire.window, self._config.wire.window)
            connection = Connection(
                routing_id, self._send, window=window, now=now, role=message.role, name=message.name
            )
            self.by_routing_id[routing_id] = connection
            self._counters.num_connections = len(self.by_routing_id)
        connection.answer(messages.encode(self._welcome(connection).replace(resumed=resumed)), now)
        if resumed:
            connection.send_again(now)
            self._publisher.flush(connection, now)

    def _on_credit(self, connection: Connection, message: Credit, now: float) -> None:
        if not connection.acknowledge(message.seq):
            self._reply(
                connection.routing_id, connection, _protocol_error(message, f"STEP {message.seq} was never sent"), now
            )
        self._publisher.flush(connection, now)

    def _on_model(self, connection: Connection, message: Model, now: float) -> None:
        files = self._card.files
        if message.files is not None:
            files = {name: files[name] for name in message.files if name in files}
        connection.answer(messages.encode(ModelFiles(self._card.fingerprint, files)), now)

    def _on_ping(self, connection: Connection, message: Ping, now: float) -> None:
        lifecycle = self._lifecycle
        age_ms = round(lifecycle.loop_age_s() * 1e3, 1)
        connection.answer(messages.encode(Pong(message.nonce, age_ms, lifecycle.state, lifecycle.epoch)), now)

    def _on_admin(self, connection: Connection, message: Admin, now: float) -> None:
        def reply(result: Any) -> None:
            if not connection.dropped:
                answer = AdminReply(message.op, message.nonce, True, result)
                if isinstance(result, InferEngineError):  # it failed after it had begun
                    answer = AdminReply(message.op, message.nonce, False, None, result.code, result.message)
                connection.answer(messages.encode(answer), self._lifecycle.clock())

        try:
            operation = self._admin_ops.get(message.op)
            if operation is None:
                raise InvalidRequest("op", f"must be one of {', '.join(self._admin_ops)}")
            operation(message.arguments, reply)
        except InferEngineError as error:
            answer = AdminReply(message.op, message.nonce, False, None, error.code, error.message)
            connection.answer(messages.encode(answer), now)

    def _on_bye(self, connection: Connection, message: Bye, now: float) -> None:
        self._drop(connection, now, "")

    # -- going out ---------------------------------------------------------------------------------------------------

    def broadcast_state(self, now: float) -> None:
        """Send WELCOME again to every connection: at once when the state has changed, else at intervals."""
        current = (self._lifecycle.state, self._lifecycle.progress, self.model)
        if current == self._broadcast:
            return
        if current[0] == (self._broadcast or ("",))[0] and now - self._broadcast_s < WELCOME_INTERVAL_S:
            return
        self._broadcast, self._broadcast_s = current, now
        for connection in self.by_routing_id.values():
            connection.answer(messages.encode(self._welcome(connection)), now)

    def goodbye(self, reason: str, now: float) -> None:
        """Send GOODBYE to every connection."""
        for connection in self.by_routing_id.values():
            connection.answer(messages.encode(Goodbye(reason)), now)

    def tick(self, now: float) -> None:
        """Drop connections whose lease is over or that stall, and send what is queued for full pipes."""
        wire = self._config.wire
        if paused_s := missed_s(now, self._ticked_s + TICK_S):
            self._extend_deadlines(paused_s, now)
        self._ticked_s = now
        for connection in list(self.by_routing_id.values()):
            self._publisher.flush(connection, now)
            full_since_s = connection.window.full_since_s
            silent_s = now - connection.heard_s
            if silent_s > self._lease_s:
                self._probe(connection, now)
            if silent_s > max(self._lease_s, wire.stall_limit_s) or (
                silent_s > self._lease_s and connection.gone_since_s is not None
            ):
                self._drop(connection, now, "its lease ran out", farewell=True)
            elif connection.gone_since_s is not None and now - connection.gone_since_s > wire.heartbeat_s:
                self._drop(connection, now, "its connection is gone")
            elif full_since_s is not None and now - full_since_s > wire.stall_limit_s and not connection.stalled:
                connection.stalled = True
                logger.warning("connection %s gives no credit: its requests are cancelled", _display_name(connection))
                message = f"No credit for {wire.stall_limit_s:g} s."
                self._intake.abandon(self._read_by(connection), ("client_stalled", message))
        self._intake.abandon_unread()
        self._intake.tick(now)
        self._publisher.expire(now)

    def _probe(self, connection: Connection, now: float) -> None:
        """Send a silent client a WELCOME. It cannot be sent where the connection is gone; a paused client reads it."""
        if connection.gone_since_s is None and now - connection.probed_s >= self._config.wire.heartbeat_s:
            connection.probed_s = now
            connection.answer(messages.encode(self._welcome(connection)), now)

    def _extend_deadlines(self, paused_s: float, now: float) -> None:
        """Extend leases and time limits by the time for which this process was paused."""
        logger.warning("the engine did not run for %.1f s: leases go on from there", paused_s)
        for connection in self.by_routing_id.values():
            connection.extend_deadlines(paused_s, now)
        self._intake.extend_deadlines(paused_s)

    @property
    def all_sent(self) -> bool:
        """Return whether every reachable connection has been sent everything."""
        return not any(
            connection.gone_since_s is None and (connection.dirty or connection.backlog)
            for connection in self.by_routing_id.values()
        )

    @property
    def all_handled(self) -> bool:
        """Return whether every reachable connection has acknowledged everything.

        Messages that a client has not read when its connection ends are lost: its socket drops them (IMMEDIATE,
        wire/sockets.py).
        """
        return self.all_sent and not any(
            connection.gone_since_s is None and connection.unacknowledged for connection in self.by_routing_id.values()
        )

    @property
    def all_gone(self) -> bool:
        """Return whether no connection is reachable."""
        return all(connection.gone_since_s is not None for connection in self.by_routing_id.values())

    def _read_by(self, connection: Connection) -> list[SubmittedRequest]:
        """Return the submissions that only this connection reads."""
        submissions = {s.log.submission.id: s.log.submission for s in connection.streams.values()}
        return [
            submission
            for submission in submissions.values()
            if not submission.detached
            and all(reader.connection is connection for log in submission.logs for reader in log.subscriptions)
        ]

    def _drop(self, connection: Connection, now: float, why: str, *, farewell: bool = False) -> None:
        if why and connection.streams:
            logger.info("connection %s dropped: %s", _display_name(connection), why)
        if farewell:
            connection.answer(messages.encode(Goodbye(f"This peer was dropped: {why}.")), now)
        connection.dropped = True
        self.by_routing_id.pop(connection.routing_id, None)
        self._counters.num_connections = len(self.by_routing_id)
        self._intake.cancel_orphans(self._publisher.drop(connection))
        self._intake.abandon_unread()

    def _welcome(self, connection: Connection) -> Welcome:
        lifecycle, wire = self._lifecycle, self._config.wire
        return Welcome(
            engine=lifecycle.engine,
            epoch=lifecycle.epoch,
            state=lifecycle.state,
            progress=lifecycle.progress,
            model=self.model,
            limits=self._limits,
            window=connection.window.size,
            heartbeat_s=wire.heartbeat_s,
            lease_s=self._lease_s,
            features=FEATURES,
        )

    def _reply(self, routing_id: bytes, connection: Connection | None, message: Message, now: float) -> None:
        if connection is not None:
            connection.answer(messages.encode(message), now)
        else:
            self._send(routing_id, messages.encode(message))  # an unknown client: lost if the pipe is full


def _protocol_error(message: Message, text: str, field: str | None = None) -> Reject:
    id, stream = getattr(message, "id", None), getattr(message, "stream", None)
    return Reject(id, stream, "protocol_error", text, field)


def _display_name(connection: Connection) -> str:
    return repr(connection.name or connection.routing_id.decode("utf-8", "replace"))
