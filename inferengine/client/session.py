"""One client's side of the wire as a state machine: frames and time in, frames and collected output out. No sockets.

AsyncClient and Client drive the same machine; they differ only in how their readers wait. What must survive a broken
connection is kept as state and sent again after the next WELCOME: submissions without an answer (their ids make that
safe), cancellations without an effect, questions without a reply.

    DOWN --transport connected--> GREETING --WELCOME--> UP --connection lost, epoch changed--> GREETING
    UP, GREETING --nothing heard for a lease--> DOWN, every open stream ends with engine_unavailable
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from inferengine.client.streams import Answer, Call, Collector, error_from, finish_from
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.params import SamplingParams
from inferengine.structure import GrammarSpec, grammar_to_list
from inferengine.wire import codec
from inferengine.wire.credit import CreditGiver
from inferengine.wire.messages import (
    ID_BYTES,
    Accept,
    Admin,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    Done,
    Goodbye,
    Hello,
    Message,
    Model,
    ModelFiles,
    Ping,
    Pong,
    Reject,
    Step,
    Submit,
    Welcome,
)

HEARTBEAT_BEFORE_WELCOME_S = 1.0
LEASE_BEFORE_WELCOME_S = 6.0
RESERVED_STREAMS = 64  # stream numbers set aside for an ATTACH: its number of choices is known only from ACCEPT
_LAST_STREAM = 2**31


class Phase(Enum):
    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


class Session:
    """State of one connection to one engine, over reconnects and restarts of the engine."""

    def __init__(self, *, role: str = "client", name: str = "", window: int | None = None, now: float = 0.0) -> None:
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
        self._resume: tuple[bytes, int] | None = None
        self._last_seq = 0
        self._credit = CreditGiver()
        self._calls: dict[bytes, Call] = {}
        self._collectors: dict[int, Collector] = {}
        self._next_stream = 1
        self._pings: dict[int, Answer[Pong]] = {}
        self._models: deque[tuple[Model, Answer[ModelFiles]]] = deque()
        self._admins: dict[int, tuple[Admin, Answer[Any]]] = {}
        self._next_nonce = 1
        self._orphans: list[int] = []  # streams released while the connection was broken
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Welcome: self._on_welcome,
            Accept: self._on_accept,
            Reject: self._on_reject,
            Step: self._on_step,
            Pong: self._on_pong,
            ModelFiles: self._on_model,
            AdminReply: self._on_admin_reply,
            Goodbye: self._on_goodbye,
        }

    # -- what the caller asks for ------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int] | None,
        params: SamplingParams,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        request_id: bytes | None = None,
        priority: int = 0,
        tenant: str = "",
        salt: bytes = b"",
        deadline_s: float | None = None,
        detached: bool = False,
        reply: str = "tokens",
        label: str = "",
        grammar: GrammarSpec | None = None,
        note: bytes = b"",
        adapter: str = "",
    ) -> Call:
        """Exactly one of `prompt_ids`, `text` and `messages`. With reply "tokens" the stop *strings* of `params` are
        the caller's to match, because only it has the text; the engine matches them for "text" and "both"."""
        if (prompt_ids is not None) + (text is not None) + (messages is not None) != 1:
            raise InvalidRequest("prompt", "give exactly one of prompt_ids, text and messages")
        values = params.to_map()
        if reply == "tokens":
            values.pop("stop", None)
        message = Submit(
            id=request_id or secrets.token_bytes(ID_BYTES),
            stream=self._take_streams(max(params.n, 1)),
            prompt=None if prompt_ids is None else _prompt_frame(prompt_ids),
            text=text,
            messages=messages,
            params=values,
            reply=reply,
            priority=priority,
            tenant=tenant,
            salt=salt,
            deadline_ms=None if deadline_s is None else max(1, int(deadline_s * 1000)),
            detached=detached,
            label=label,
            grammar=None if grammar is None else tuple(grammar_to_list(grammar)),
            note=note,
            adapter=adapter,
        )
        return self._start(message, [Collector(message.stream + choice) for choice in range(max(params.n, 1))])

    def attach(self, request_id: bytes, cursors: Sequence[int], n: int, reply: str) -> Call:
        """Continue a request from what is already held of each choice."""
        held = [*cursors, *([0] * (n - len(cursors)))]
        message = Attach(request_id, self._take_streams(max(len(held), RESERVED_STREAMS)), tuple(held), reply)
        return self._start(message, [Collector(message.stream + choice, count) for choice, count in enumerate(held)])

    def cancel(self, collectors: Sequence[Collector]) -> None:
        """Idempotent, no answer: the streams end with `abort` when the engine has done it."""
        names = []
        for collector in collectors:
            if not collector.finished and not collector.cancelled:
                collector.cancelled = True
                names.append(collector.name)
        if names and self.phase is Phase.UP:
            self._send(Cancel(tuple(names)))

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel by id, whoever submitted it."""
        if self.phase is Phase.UP:
            self._send(Cancel(ids=(request_id,)))

    def adopt(self, call: Call) -> None:
        """Submit another session's call here, under its id and with its collectors. Nothing of it has come yet.
        Raises engine_unavailable, and conflict where this session has the id."""
        if self.phase is Phase.DOWN:
            raise InferEngineError("engine_unavailable", "There is no connection to the engine.")
        if call.id in self._calls:
            raise InferEngineError("conflict", "This client is already reading that request.", field="request_id")
        stream = self._take_streams(len(call.collectors))
        call.message = call.message._replace(stream=stream)
        if call.accepted.done:
            call.accepted = Answer()
        for name, collector in enumerate(call.collectors, stream):
            collector.name = name
            self._collectors[name] = collector
        self._calls[call.id] = call
        self._ask(call.message)

    def release(self, call: Call) -> None:
        """Forget a call that goes on elsewhere, and have the engine cancel it, now or when it is back."""
        if self._calls.get(call.id) is not call:
            return
        del self._calls[call.id]
        names = [collector.name for collector in call.collectors if self._collectors.pop(collector.name, None)]
        if self.phase is Phase.UP:
            self._send(Cancel(tuple(names)))
        else:
            self._orphans += names

    def ping(self) -> Answer[Pong]:
        nonce, answer = self._take_nonce(), Answer[Pong]()
        self._pings[nonce] = answer
        self._ask(Ping(nonce))
        return answer

    def model_files(self, files: Sequence[str] | None = None) -> Answer[ModelFiles]:
        message, answer = Model(None if files is None else tuple(files)), Answer[ModelFiles]()
        self._models.append((message, answer))
        self._ask(message)
        return answer

    def admin(self, op: str, arguments: dict[str, Any]) -> Answer[Any]:
        nonce, answer = self._take_nonce(), Answer[Any]()
        message = Admin(op, nonce, arguments)
        self._admins[nonce] = (message, answer)
        self._ask(message)
        return answer

    def close(self, message: str = "The client was closed.") -> None:
        """Say BYE; what is open ends here."""
        if self.phase is Phase.UP:
            self._send(Bye())
        self._end_all("engine_unavailable", message)
        self.phase = Phase.DOWN

    # -- what the transport reports ----------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The transport has a (new) connection; whatever was in the old one is lost."""
        self._connected = True
        self._greet(now)

    def disconnected(self, now: float) -> None:
        self._connected = False
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
        self._heard_s = now
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message, now)

    def tick(self, now: float) -> float:
        """Do what is due; returns when to call again. Call `receive` for all that has arrived before."""
        if self.phase is not Phase.DOWN and now - self._heard_s > self._lease_s:
            self._lose("The engine has not been heard of for a lease.", now)
        if self._greet_s is not None and now >= self._greet_s:
            self._greet(now)
        if self._ping_s is not None and now >= self._ping_s:
            self._send(Ping(0))
            self._ping_s = now + self._heartbeat_s
        if (credit := self._credit.due(now)) is not None:
            self._send(credit)
        times = [time for time in (self._greet_s, self._ping_s, self._credit.due_s) if time is not None]
        return min(times, default=now + self._heartbeat_s)

    # -- phases ------------------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        if self.phase is Phase.UP:
            self._leave_up(Phase.GREETING)
        elif self.phase is Phase.DOWN:
            self.phase = Phase.GREETING
            self._heard_s = now
        self.outgoing.clear()  # it was meant for the connection that is gone; what matters is kept as state
        self._greet_s = now + self._heartbeat_s
        epoch, last_seq = self._resume or (None, 0)
        self._send(Hello(role=self.role, name=self.name, window=self._window, epoch=epoch, last_seq=last_seq))

    def _leave_up(self, phase: Phase) -> None:
        if self.phase is Phase.UP and self.welcome is not None:
            self._resume = (self.welcome.epoch, self._last_seq)
        self.phase = phase
        self._ping_s = None
        self._credit.reset()
        self.outgoing.clear()
        self.on_change()

    def _lose(self, message: str, now: float) -> None:
        """The engine has forgotten us by now, or is gone. While the transport is connected, HELLO goes on."""
        self._leave_up(Phase.DOWN)
        self._resume = None
        self._last_seq = 0
        self._greet_s = now + self._heartbeat_s if self._connected else None
        self._end_all("engine_unavailable", message)

    def _end_all(self, code: str, message: str) -> None:
        error = InferEngineError(code, message)
        for call in list(self._calls.values()):
            call.fail(error)
        self._calls.clear()
        self._collectors.clear()
        waiting: list[Answer[Any]] = [*self._pings.values(), *(item[1] for item in self._models)]
        waiting += [item[1] for item in self._admins.values()]
        self._pings.clear()
        self._models.clear()
        self._admins.clear()
        for answer in waiting:
            answer.fail(error)

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if self.phase is Phase.UP and self.welcome is not None and self.welcome.epoch != welcome.epoch:
            self._greet(now)  # another engine speaks at this address; what to resume is still the old one's
            return
        self.welcome = welcome
        if self.phase is Phase.UP:
            self.on_change()
            return
        if self._resume is not None and welcome.resumed is None and welcome.epoch == self._resume[0]:
            return  # news of the engine's state that crossed our HELLO
        self._after_greeting(welcome)
        self.phase = Phase.UP
        self._greet_s = None
        self._ping_s = now + welcome.heartbeat_s
        self._credit.start(welcome.window, self._last_seq)
        self._send_again()
        self.on_change()

    def _after_greeting(self, welcome: Welcome) -> None:
        """Decide what became of the streams that were open before."""
        resume, self._resume = self._resume, None
        if resume is not None and welcome.resumed:
            return
        self._last_seq = 0
        if resume is None:
            return
        restarted = welcome.epoch != resume[0]
        for call in list(self._calls.values()):
            if not call.accepted.done:
                continue  # sent again: the id makes sure that it runs once
            if not restarted and isinstance(call.message, Attach | Submit) and _is_detached(call):
                call.message = _attach_again(call)
                call.accepted = Answer()
            elif restarted:
                self._drop(call, InferEngineError("engine_restarted", "The engine was restarted."))
            else:
                self._drop(call, InferEngineError("engine_unavailable", "The lease ran out while disconnected."))

    def _send_again(self) -> None:
        for call in self._calls.values():
            if not call.accepted.done:
                self._send(call.message)
        names = [name for name, collector in self._collectors.items() if collector.cancelled]
        names += self._orphans
        self._orphans.clear()
        if names:
            self._send(Cancel(tuple(names)))
        for nonce in self._pings:
            self._send(Ping(nonce))
        for model, _ in self._models:
            self._send(model)
        for admin, _ in self._admins.values():
            self._send(admin)

    # -- messages of the engine --------------------------------------------------------------------------------------

    def _on_step(self, step: Step, now: float) -> None:
        if self.phase is not Phase.UP or step.seq <= self._last_seq:
            return
        if step.seq != self._last_seq + 1:
            self._greet(now)  # something was lost: have it sent again
            return
        self._last_seq = step.seq
        collectors = self._collectors
        tokens = step.tokens
        if step.counts is None:
            for name, token_id in zip(step.streams, tokens, strict=True):
                collector = collectors.get(name)
                if collector is not None:
                    collector.token_ids.append(token_id)
                    collector.num_tokens += 1
                    callback = collector.on_news
                    if callback is not None:
                        collector.on_news = None
                        callback()
        else:
            start = 0
            for name, count in zip(step.streams, step.counts, strict=True):
                collector = collectors.get(name)
                if collector is not None:
                    collector.add_tokens(tokens[start : start + count].tolist())
                start += count
        for name, rows in step.logprobs:
            if (collector := collectors.get(name)) is not None:
                collector.add_logprobs(rows)
        for name, rows in step.prompt_logprobs:
            if (collector := collectors.get(name)) is not None:
                collector.add_prompt_logprobs(rows)
        for name, text in step.text:
            if (collector := collectors.get(name)) is not None:
                collector.add_text(text)
        for row in step.done:
            if row.reason in ("error", "abort") and self._is_rescued(row):
                continue
            if (collector := collectors.pop(row.stream, None)) is not None:
                collector.end(finish_from(row))
                if collector.call is not None and collector.call.finished:
                    self._calls.pop(collector.call.id, None)
        if (credit := self._credit.handled(step.seq, now)) is not None:
            self._send(credit)

    def _on_accept(self, accept: Accept, now: float) -> None:
        call = self._calls.get(accept.id)
        if call is None or call.message.stream != accept.stream:
            return
        for choice in range(len(call.collectors), accept.n):  # an ATTACH learns its number of choices here
            collector = Collector(accept.stream + choice)
            call.add(collector)
            self._collectors[collector.name] = collector
        for collector in call.collectors[accept.n :]:
            collector.fail("invalid_request", f"The request has {accept.n} choice(s).")
            self._collectors.pop(collector.name, None)
        call.accepted.resolve(accept)

    def _on_reject(self, reject: Reject, now: float) -> None:
        call = self._calls.get(reject.id) if reject.id is not None else None
        if call is not None and reject.stream in (None, call.message.stream):
            self._drop(call, error_from(reject.code, reject.message, reject.field, reject.retry_after_ms))
        elif reject.field == "hello" and self.phase is Phase.UP:
            self._greet(now)  # the engine does not know us any more
        elif reject.code == "version_mismatch":
            self._end_all("version_mismatch", reject.message)

    def _on_pong(self, pong: Pong, now: float) -> None:
        self.last_pong = pong
        answer = self._pings.pop(pong.nonce, None)
        if answer is not None:
            answer.resolve(pong)
        if self.phase is Phase.UP and self.welcome is not None and pong.epoch != self.welcome.epoch:
            self._greet(now)

    def _on_model(self, message: ModelFiles, now: float) -> None:
        if self._models:  # answered in the order of asking
            self._models.popleft()[1].resolve(message)

    def _on_admin_reply(self, message: AdminReply, now: float) -> None:
        item = self._admins.pop(message.nonce, None)
        if item is None:
            return
        if message.ok:
            item[1].resolve(message.result)
        else:
            item[1].fail(error_from(message.code or "engine_error", message.message or "", "op"))

    def _on_goodbye(self, message: Goodbye, now: float) -> None:
        self._lose(message.reason, now)

    # -- small things ------------------------------------------------------------------------------------------------

    def _start(self, message: Submit | Attach, collectors: list[Collector]) -> Call:
        if self.phase is Phase.DOWN:
            raise InferEngineError("engine_unavailable", "There is no connection to the engine.")
        if message.id in self._calls:
            raise InferEngineError("conflict", "This client is already reading that request.", field="request_id")
        call = Call(message, collectors)
        self._calls[message.id] = call
        for collector in collectors:
            self._collectors[collector.name] = collector
        self._ask(message)
        return call

    def _is_rescued(self, row: Done) -> bool:
        """Whether a request that ended without output goes on elsewhere."""
        collector = self._collectors.get(row.stream)
        call = None if collector is None else collector.call
        if call is None or call.rescue is None or call.begun or not isinstance(row.detail, list | tuple):
            return False
        names = [item.name for item in call.collectors]
        if call.rescue(call, error_from(*row.detail[:2])) is not None:
            return False
        self._calls.pop(call.id, None)
        for name in names:
            self._collectors.pop(name, None)
        return True

    def _drop(self, call: Call, error: InferEngineError) -> None:
        self._calls.pop(call.id, None)
        for collector in call.collectors:
            self._collectors.pop(collector.name, None)
        call.fail(error)

    def _ask(self, message: Message) -> None:
        if self.phase is Phase.UP:
            self._send(message)

    def _send(self, message: Message) -> None:
        self.outgoing.append(codec.encode(message))

    def _take_streams(self, count: int) -> int:
        if self._next_stream + count > _LAST_STREAM:
            self._next_stream = 1
        while any(self._next_stream + i in self._collectors for i in range(count)):
            self._next_stream += count
        first = self._next_stream
        self._next_stream += count
        return first

    def _take_nonce(self) -> int:
        self._next_nonce += 1
        return self._next_nonce

    @property
    def _heartbeat_s(self) -> float:
        return HEARTBEAT_BEFORE_WELCOME_S if self.welcome is None else self.welcome.heartbeat_s

    @property
    def _lease_s(self) -> float:
        return LEASE_BEFORE_WELCOME_S if self.welcome is None else self.welcome.lease_s


def _prompt_frame(prompt_ids: Sequence[int]) -> bytes:
    if not prompt_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    try:
        return codec.to_u32(prompt_ids)
    except (OverflowError, TypeError):
        raise InvalidRequest("prompt", "token ids are whole numbers from 0 to 2^32 - 1") from None


def _is_detached(call: Call) -> bool:
    return isinstance(call.message, Attach) or call.message.detached


def _attach_again(call: Call) -> Attach:
    reply = call.message.reply
    cursors = tuple(c.num_characters if reply == "text" else c.num_tokens for c in call.collectors)
    return Attach(call.id, call.message.stream, cursors, reply)
