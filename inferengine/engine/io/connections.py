"""Switchboard: every message of every peer comes in here. Greets, keeps leases and credits, answers questions, and
passes requests on to the link. Whatever the bytes are, the sender gets an answer and nobody else notices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from inferengine.config import Config
from inferengine.engine.io.connection import Peer, Send
from inferengine.engine.io.intake import Link
from inferengine.engine.io.output_log import Submission
from inferengine.engine.io.publisher import Outbox
from inferengine.engine.metrics.counters import Telemetry
from inferengine.engine.model_info import ModelCard
from inferengine.engine.state import Lifecycle
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.process.system import missed_s
from inferengine.wire import codec
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
WELCOME_INTERVAL_S = 0.1  # at most so often while loading
Reply = Callable[[Any], None]
AdminOp = Callable[[dict[str, Any], Reply], None]  # arguments, and what takes the result (in the I/O thread)


class Switchboard:
    """All peers. Only the I/O thread comes here."""

    def __init__(
        self,
        config: Config,
        lifecycle: Lifecycle,
        card: ModelCard,
        outbox: Outbox,
        telemetry: Telemetry,
        send: Send,
    ) -> None:
        self.peers: dict[bytes, Peer] = {}
        self.model: ModelInfo | None = None  # set when the model is loaded
        self.admin_ops: dict[str, AdminOp] = {}
        self._config = config
        self._lifecycle = lifecycle
        self._card = card
        self._outbox = outbox
        self._telemetry = telemetry
        self._send = send
        self._lease_s = LEASE_INTERVALS * config.wire.heartbeat_s
        self._told: tuple[Any, ...] = ()
        self._told_s = -1e9
        self._ticked_s = lifecycle.clock()
        self._limits = {
            **config.resolved()["limits"],
            "max_message_bytes": config.wire.max_message_bytes,
            "max_queued_requests": config.scheduler.max_queued_requests,
            "max_queued_tokens": config.scheduler.max_queued_tokens,
        }
        self._handlers: dict[type, Callable[[Peer, Any, float], None]] = {
            Cancel: lambda peer, message, now: self.link.cancel(peer, message, now),
            Submit: lambda peer, message, now: self.link.submit(peer, message, now),
            Attach: lambda peer, message, now: self.link.attach(peer, message, now),
            Credit: self._on_credit,
            Model: self._on_model,
            Ping: self._on_ping,
            Admin: self._on_admin,
            Bye: self._on_bye,
        }
        self.link: Link  # set right after construction: the two know each other

    def alive(self, peer: Peer) -> bool:
        """Whether this very peer is still known."""
        return self.peers.get(peer.routing_id) is peer

    # -- coming in ---------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """One message as the ROUTER gives it: routing id first."""
        routing_id, peer = frames[0], self.peers.get(frames[0])
        if peer is not None:
            peer.back(now)
        try:
            message = codec.decode(frames[1:])
        except codec.WireError as error:
            self._telemetry.num_protocol_errors += 1
            self._tell(routing_id, peer, error.reject(), now)
            return
        if isinstance(message, Hello):
            self._on_hello(routing_id, peer, message, now)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            self._telemetry.num_protocol_errors += 1
            self._tell(routing_id, peer, _protocol_error(message, "that message is the engine's, not a client's"), now)
        elif peer is None:
            if not isinstance(message, Bye):
                self._tell(routing_id, None, _protocol_error(message, "say HELLO first", field="hello"), now)
        else:
            handler(peer, message, now)
            if peer.overflowed:
                self._drop(peer, now, "it reads none of its answers")

    def _on_hello(self, routing_id: bytes, peer: Peer | None, message: Hello, now: float) -> None:
        resumed: bool | None = None
        if message.epoch is not None:
            same = peer is not None and message.epoch == self._lifecycle.epoch
            resumed = peer is not None and same and peer.resume(message.last_seq, now)
        if peer is not None and not resumed:
            self._drop(peer, now, "it started anew")
            peer = None
        if peer is None:
            window = min(message.window or self._config.wire.window, self._config.wire.window)
            peer = Peer(routing_id, self._send, window=window, now=now, role=message.role, name=message.name)
            self.peers[routing_id] = peer
        peer.answer(codec.encode(self._welcome(peer)._replace(resumed=resumed)), now)
        if resumed:
            peer.send_again(now)
            self._outbox.flush(peer, now)

    def _on_credit(self, peer: Peer, message: Credit, now: float) -> None:
        if not peer.acknowledge(message.seq):
            self._tell(peer.routing_id, peer, _protocol_error(message, f"STEP {message.seq} was never sent"), now)
        self._outbox.flush(peer, now)

    def _on_model(self, peer: Peer, message: Model, now: float) -> None:
        files = self._card.files
        if message.files is not None:
            files = {name: files[name] for name in message.files if name in files}
        peer.answer(codec.encode(ModelFiles(self._card.fingerprint, files)), now)

    def _on_ping(self, peer: Peer, message: Ping, now: float) -> None:
        lifecycle = self._lifecycle
        age_ms = round(lifecycle.loop_age_s() * 1e3, 1)
        peer.answer(codec.encode(Pong(message.nonce, age_ms, lifecycle.state, lifecycle.epoch)), now)

    def _on_admin(self, peer: Peer, message: Admin, now: float) -> None:
        def reply(result: Any) -> None:
            if self.alive(peer):
                answer = AdminReply(message.op, message.nonce, True, result)
                if isinstance(result, InferEngineError):  # it failed later than it was asked
                    answer = AdminReply(message.op, message.nonce, False, None, result.code, result.message)
                peer.answer(codec.encode(answer), self._lifecycle.clock())

        try:
            operation = self.admin_ops.get(message.op)
            if operation is None:
                raise InvalidRequest("op", f"must be one of {', '.join(self.admin_ops)}")
            operation(message.arguments, reply)
        except InferEngineError as error:
            answer = AdminReply(message.op, message.nonce, False, None, error.code, error.message)
            peer.answer(codec.encode(answer), now)

    def _on_bye(self, peer: Peer, message: Bye, now: float) -> None:
        self._drop(peer, now, "")

    # -- going out ---------------------------------------------------------------------------------------------------

    def tell_state(self, now: float, *, at_once: bool = False) -> None:
        """WELCOME again to every peer when the state has changed, and now and then while loading."""
        news = (self._lifecycle.state, self._lifecycle.progress, self.model)
        if news == self._told:
            return
        if news[0] == (self._told or ("",))[0] and not at_once and now - self._told_s < WELCOME_INTERVAL_S:
            return
        self._told, self._told_s = news, now
        for peer in self.peers.values():
            peer.answer(codec.encode(self._welcome(peer)), now)

    def goodbye(self, reason: str, now: float) -> None:
        """The last word to every peer."""
        for peer in self.peers.values():
            peer.answer(codec.encode(Goodbye(reason)), now)

    def tick(self, now: float) -> None:
        """Leases, stalled readers, pipes that were full."""
        wire = self._config.wire
        if paused_s := missed_s(now, self._ticked_s + TICK_S):
            self._forgive(paused_s, now)
        self._ticked_s = now
        for peer in list(self.peers.values()):
            self._outbox.flush(peer, now)
            full_since_s = peer.window.full_since_s
            silent_s = now - peer.heard_s
            if silent_s > self._lease_s:
                self._probe(peer, now)
            if silent_s > max(self._lease_s, wire.stall_limit_s) or (
                silent_s > self._lease_s and peer.gone_since_s is not None
            ):
                self._drop(peer, now, "its lease ran out", farewell=True)
            elif peer.gone_since_s is not None and now - peer.gone_since_s > wire.heartbeat_s:
                self._drop(peer, now, "its connection is gone")
            elif full_since_s is not None and now - full_since_s > wire.stall_limit_s and not peer.stalled:
                peer.stalled = True
                logger.warning("peer %s gives no credit: its requests are cancelled", _shown(peer))
                message = f"No credit for {wire.stall_limit_s:g} s."
                self.link.abandon(self._read_by(peer), ("client_stalled", message))
        self.link.abandon_unread()
        self.link.tick(now)
        self._outbox.expire(now)

    def _probe(self, peer: Peer, now: float) -> None:
        """Say something to a peer that is silent: to one that is gone it cannot be sent, one that is paused reads it
        later."""
        if peer.gone_since_s is None and now - peer.probed_s >= self._config.wire.heartbeat_s:
            peer.probed_s = now
            peer.answer(codec.encode(self._welcome(peer)), now)

    def _forgive(self, paused_s: float, now: float) -> None:
        """This process was paused. Nobody is to lose anything for what we did not hear meanwhile."""
        logger.warning("the engine did not run for %.1f s: leases go on from there", paused_s)
        for peer in self.peers.values():
            peer.forgive(paused_s, now)
        self.link.forgive(paused_s)

    @property
    def all_sent(self) -> bool:
        """Whether no reachable peer waits for anything."""
        return not any(peer.gone_since_s is None and (peer.dirty or peer.backlog) for peer in self.peers.values())

    def _read_by(self, peer: Peer) -> list[Submission]:
        """What this peer alone reads and would miss."""
        submissions = {s.log.submission.id: s.log.submission for s in peer.streams.values()}
        return [
            submission
            for submission in submissions.values()
            if not submission.detached
            and all(reader.peer is peer for log in submission.logs for reader in log.subscriptions)
        ]

    def _drop(self, peer: Peer, now: float, why: str, *, farewell: bool = False) -> None:
        if why and peer.streams:
            logger.info("peer %s dropped: %s", _shown(peer), why)
        if farewell:
            peer.answer(codec.encode(Goodbye(f"This peer was dropped: {why}.")), now)
        self._telemetry.num_peers_dropped += 1
        self.peers.pop(peer.routing_id, None)
        self.link.lose_readers(self._outbox.drop(peer))
        self.link.abandon_unread()

    def _welcome(self, peer: Peer) -> Welcome:
        lifecycle, wire = self._lifecycle, self._config.wire
        return Welcome(
            engine=lifecycle.engine,
            epoch=lifecycle.epoch,
            state=lifecycle.state,
            progress=lifecycle.progress,
            model=self.model,
            limits=self._limits,
            window=peer.window.size,
            heartbeat_s=wire.heartbeat_s,
            lease_s=self._lease_s,
            features=FEATURES,
        )

    def _tell(self, routing_id: bytes, peer: Peer | None, message: Message, now: float) -> None:
        if peer is not None:
            peer.answer(codec.encode(message), now)
        else:
            self._send(routing_id, codec.encode(message))  # a stranger: if the pipe is full, so be it


def _protocol_error(message: Message, text: str, field: str | None = None) -> Reject:
    id, stream = getattr(message, "id", None), getattr(message, "stream", None)
    return Reject(id, stream, "protocol_error", text, field)


def _shown(peer: Peer) -> str:
    return repr(peer.name or peer.routing_id.decode("utf-8", "replace"))
