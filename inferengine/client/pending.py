"""The requests of one session that have not ended: which stream of the wire belongs to which choice of which call.

A call whose engine is lost stays here, held, until there is an engine to go on at (`going_on`), or goes to another
session.

What a client has asked its engine and not been answered yet: pings, model files, operations.

Sent again after a reconnect, because asking twice does no harm.

How a task waits for an answer that another part of the program resolves.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from inferengine.client import resume as going_on
from inferengine.client.streams import Answer, Call, Collector, error_from, finish_from
from inferengine.errors import InferEngineError
from inferengine.wire.messages import (
    Accept,
    Admin,
    AdminReply,
    Attach,
    Done,
    Message,
    Model,
    ModelFiles,
    Ping,
    Pong,
    Reject,
    Step,
    StopFound,
    Submit,
    Welcome,
)

RESERVED_STREAMS = 64  # stream numbers set aside for an ATTACH: its number of choices is known only from ACCEPT
_LAST_STREAM = 2**31


class Calls:
    """All of them, by id and by stream number."""

    def __init__(self, *, wait_s: float = going_on.RESUME_WAIT_S) -> None:
        """`wait_s`: how long a lost call waits for an engine."""
        self.on_resumed: Callable[[float], None] = lambda pause_s: None  # a lost call goes on, after so long
        self.num_resumed = 0
        self._wait_s = wait_s
        self._calls: dict[bytes, Call] = {}
        self._collectors: dict[int, Collector] = {}
        self._lost: dict[bytes, Call] = {}  # those with `lost_s`
        self._next_stream = 1

    # -- coming and going --------------------------------------------------------------------------------------------

    def start(self, message: Submit | Attach, cursors: Sequence[int], *, resubmit: bool = True) -> Call:
        """A new call with a choice for each of `cursors`, on stream numbers of its own. Raises conflict."""
        self._refuse_known(message.id)
        stream = self._take_streams(_width(message, len(cursors)))
        collectors = [Collector(stream + choice, cursor) for choice, cursor in enumerate(cursors)]
        if isinstance(message, Attach) and message.reply == "text":  # its cursors are characters
            for collector in collectors:
                collector.num_characters = collector.num_tokens
        call = Call(message._replace(stream=stream), collectors, resubmit=resubmit)
        if isinstance(message, Submit) and resubmit and message.reply != "embedding":
            for collector in collectors:
                collector.ids_read = array("I")
        self._add(call)
        return call

    def adopt(self, call: Call) -> None:
        """Take over another session's call, under its id and with its collectors. Raises conflict. One that was lost
        too often without getting on ends here."""
        self._refuse_known(call.id)
        call.answered = False
        uncounted = call.lost_s is not None and not call.held  # its engine has never said that it is lost
        if uncounted and (refused := going_on.refusal(call, "engine_unavailable")) is not None:
            call.end(refused)
            return
        if call.lost_s is not None:
            self._calls[call.id] = self._lost[call.id] = call
        else:
            self._renumber(call)
            self._add(call)

    def release(self, call: Call) -> list[int]:
        """Forget a call that goes on elsewhere. Returns its open streams; none when it is not here."""
        if self._calls.get(call.id) is not call:
            return []
        return self._forget(call)

    def drop(self, call: Call, error: InferEngineError) -> list[int]:
        """Forget a call and end what is open of it. Returns its open streams."""
        streams = self._forget(call)
        call.fail(error)
        return streams

    def end_all(self, error: InferEngineError) -> None:
        """No more output will come."""
        for call in list(self._calls.values()):
            call.fail(error)
        self._calls.clear()
        self._collectors.clear()
        self._lost.clear()

    # -- an engine that is lost --------------------------------------------------------------------------------------

    def suspend_all(self, error: InferEngineError, lost_s: float) -> None:
        """Nobody knows what has become of the engine. Who can go on at another does; the others wait to hear whether
        this one has kept them."""
        for call in list(self._calls.values()):
            if call.lost_s is None and not call.resubmit:
                self.drop(call, error)
            elif self._end_as_asked(call) and call.lost_s is None:
                self._mark_lost(call, lost_s)
                if call.rescue is not None:
                    call.rescue(call, error)  # where it succeeds, the other session has it, and this one forgets it

    def found_again(self, now: float) -> None:
        """The engine has kept everything."""
        for call in list(self._lost.values()):
            if call.answered and not call.held:
                self._went_on(call, now)

    def after_lapse(self, *, restarted: bool, lost_s: float) -> None:
        """The engine has forgotten this connection, or is another. What it ran goes on where that is possible; what
        runs on detached is attached to again; what it had not answered is sent again: the id makes sure that it runs
        once."""
        for call in list(self._calls.values()):
            if call.held and restarted:
                call.retry_s = 0.0  # what the engine before this one said of its queue holds no more
            if call.held or not (call.answered or restarted):
                continue
            if not restarted and _is_detached(call):
                call.message = going_on.attach_again(call)
                call.answered = False
            elif restarted:
                self.lose(call, InferEngineError("engine_restarted", "The engine was restarted."), lost_s)
            else:
                text = "The lease ran out while disconnected."
                self.lose(call, InferEngineError("engine_unavailable", text), lost_s)

    def lose(self, call: Call, error: InferEngineError, lost_s: float, *, retry_s: float = 0.0) -> None:
        """The engine will say no more of it: it is held, goes on elsewhere, or ends. `retry_s`: when this engine may
        be asked again, if it is READY then."""
        if not self._end_as_asked(call):
            return
        refused = going_on.refusal(call, error.code)
        if refused is not None and call.resubmit:
            self._forget(call)
            call.end(refused)  # nobody else is to try either
            return
        if refused is not None:
            self.drop(call, error)
            return
        self._mark_lost(call, lost_s)
        self._hold(call, retry_s)
        if call.rescue is not None:
            call.rescue(call, error)

    def to_send(self, welcome: Welcome, now: float) -> Iterator[Submit | Attach]:
        """Of the held calls what a READY engine is to hear now, in the order in which they were begun."""
        for call in [call for call in self._calls.values() if call.held and call.retry_s <= now]:
            if call.finished:
                self._forget(call)
                continue
            if (error := going_on.misfit(call, welcome)) is not None:
                self.drop(call, error)
                continue
            call.message = going_on.next_message(call, welcome, now)
            call.held, call.answered = False, False
            call.asked_s = now if call.asked_s is None else call.asked_s
            self._renumber(call)
            self._add(call)
            yield call.message

    def expire(self, now: float) -> list[int]:
        """End the lost calls whose time is over. Returns their streams that an engine was asked for meanwhile."""
        streams: list[int] = []
        for call in list(self._lost.values()):
            if call.retry_s <= now:
                call.retry_s = 0.0  # from now on it waits for the engine to be READY
            if call.finished and call.held:
                self._forget(call)
            elif call.finished:
                del self._lost[call.id]
            elif call.deadline_s is not None and now >= call.deadline_s:
                streams += self.drop(call, InferEngineError("deadline_exceeded", "The request's deadline passed."))
            elif call.lost_s is not None and now >= call.lost_s + self._wait_s:
                text = f"The engine was lost, and none came back within {self._wait_s:g} s."
                streams += self.drop(call, InferEngineError("engine_unavailable", text))
        return streams

    def expire_deadlines(self, now: float) -> list[int]:
        """End the calls whose deadline has passed while the engine, which is to say so, says nothing. Returns their
        streams."""
        late = [call for call in self._calls.values() if call.deadline_s is not None and now >= call.deadline_s]
        error = InferEngineError("deadline_exceeded", "The request's deadline passed.")
        return [stream for call in late for stream in self.drop(call, error)]

    def due_s(self) -> float | None:
        """When `to_send` or `expire` has something to do next."""
        times = []
        for call in self._lost.values():
            times.append((call.lost_s or 0.0) + self._wait_s)
            if call.held and call.retry_s:
                times.append(call.retry_s)
            if call.deadline_s is not None:
                times.append(call.deadline_s)
        return min(times, default=None)

    # -- after a reconnect -------------------------------------------------------------------------------------------

    def unanswered(self) -> Iterator[Submit | Attach]:
        """To be sent again."""
        yield from (call.message for call in self._calls.values() if not call.answered and not call.held)

    def cancelled(self) -> list[int]:
        """Streams that the engine may still run and whose end was asked for."""
        return [name for name, collector in self._collectors.items() if collector.cancelled or collector.finished]

    def found_stops(self) -> list[StopFound]:
        """Of these streams those whose text has a stop string."""
        return [
            StopFound(name, *collector.found_stop)
            for name, collector in self._collectors.items()
            if collector.cancelled and collector.found_stop is not None
        ]

    def get(self, id: bytes) -> Call | None:
        return self._calls.get(id)

    def end_here(self, collector: Collector) -> int | None:
        """End a choice of a lost call, as was asked for. Returns the stream that its engine may still run."""
        collector.end_as_asked()
        call = collector.call
        was_open = self._collectors.pop(collector.name, None) is not None
        if call is not None and call.finished:
            self._forget(call)
            call.accepted.fail(InferEngineError("cancelled", "The request was cancelled."))
        return collector.name if was_open else None

    # -- what the engine says ----------------------------------------------------------------------------------------

    def on_accept(self, accept: Accept, now: float, model: tuple[str, str] | None = None) -> None:
        """`model`: name and fingerprint of what the engine serves."""
        call = self._calls.get(accept.id)
        if call is None or call.held or call.message.stream != accept.stream:
            return
        for choice in range(len(call.collectors), accept.n):  # an ATTACH learns its number of choices here
            collector = Collector(accept.stream + choice)
            call.add(collector)
            self._collectors[collector.name] = collector
        for collector in call.collectors[accept.n :]:
            collector.fail("invalid_request", f"The request has {accept.n} choice(s).")
            self._collectors.pop(collector.name, None)
        call.model = model
        if accept.seed is not None:
            call.seed = accept.seed
        self._answered(call, accept, now)

    def on_reject(self, reject: Reject, now: float) -> bool:
        """False: it is about none of these."""
        call = self._calls.get(reject.id) if reject.id is not None else None
        if call is None or call.held or reject.stream not in (None, call.message.stream):
            return False
        error = error_from(reject.code, reject.message, reject.field, reject.retry_after_ms)
        retry_s = going_on.retry_after(call, error, now)
        if retry_s is None:
            self.drop(call, error)
        elif self._end_as_asked(call):
            self._hold(call, now + retry_s)
            if call.rescue is not None:
                call.rescue(call, error)
        return True

    def on_step(self, step: Step, now: float) -> None:
        """Give every stream what is new of it. The path of every token: it calls as little as it can."""
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
        for name, vector in step.embeddings:
            if (collector := collectors.get(name)) is not None:
                collector.add_embedding(vector)
        for name, text in step.text:
            if (collector := collectors.get(name)) is not None:
                collector.add_text(text)
        lost: dict[bytes, tuple[Call, InferEngineError]] = {}
        for row in step.done:
            if row.reason in ("error", "abort") and self._is_lost(row, lost):
                continue
            if row.reason in ("error", "abort") and self._is_rescued(row):
                continue
            if (collector := collectors.pop(row.stream, None)) is not None:
                collector.end(finish_from(row))
                if (call := collector.call) is not None and call.finished:
                    if not call.answered:  # its ACCEPT was lost with a connection; its output was sent again
                        message, n = call.message, len(call.collectors)
                        self._answered(call, Accept(call.id, message.stream, row.prompt_tokens, n), now)
                    self._forget(call)
        for call, error in lost.values():  # when the ends of its other choices are known
            self.lose(call, error, now, retry_s=now + going_on.RETRY_S)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, call: Call) -> None:
        self._calls[call.id] = call
        for collector in call.collectors:
            if not collector.finished:
                self._collectors[collector.name] = collector

    def _forget(self, call: Call) -> list[int]:
        if self._calls.get(call.id) is call:
            del self._calls[call.id]
        self._lost.pop(call.id, None)
        return self._unlist(call)

    def _unlist(self, call: Call) -> list[int]:
        """Listen no more to its streams; returns those that were open."""
        mine = [item.name for item in call.collectors if self._collectors.get(item.name) is item]
        for name in mine:
            del self._collectors[name]
        return mine

    def _renumber(self, call: Call) -> None:
        """New streams: what is still said of the old ones is about another engine's run, or another time's."""
        stream = self._take_streams(_width(call.message, len(call.collectors)))
        call.message = call.message._replace(stream=stream)
        for name, collector in enumerate(call.collectors, stream):
            collector.name = name

    def _mark_lost(self, call: Call, lost_s: float) -> None:
        if call.lost_s is None:
            call.lost_s = lost_s
        self._lost[call.id] = call

    def _hold(self, call: Call, retry_s: float) -> None:
        self._unlist(call)
        call.held, call.retry_s = True, retry_s

    def _end_as_asked(self, call: Call) -> bool:
        """End the choices that were cancelled. Whether the call goes on without them."""
        for collector in call.collectors:
            if collector.cancelled and not collector.finished:
                collector.end_as_asked()
        if not call.finished:
            return True
        self._forget(call)
        call.accepted.fail(InferEngineError("cancelled", "The request was cancelled."))
        return False

    def _answered(self, call: Call, accept: Accept, now: float) -> None:
        call.answered = True
        call.accepted.resolve(accept)
        if call.lost_s is not None:
            self._went_on(call, now)

    def _went_on(self, call: Call, now: float) -> None:
        pause_s = 0.0 if call.lost_s is None else max(0.0, now - call.lost_s)
        call.lost_s = call.asked_s = None
        self._lost.pop(call.id, None)
        self.num_resumed += 1
        self.on_resumed(pause_s)

    def _is_lost(self, row: Done, lost: dict[bytes, tuple[Call, InferEngineError]]) -> bool:
        """Whether this end says that the engine gives up, and not the request; noted in `lost`."""
        collector = self._collectors.get(row.stream)
        call = None if collector is None else collector.call
        if call is None or not call.resubmit or not isinstance(row.detail, list | tuple):
            return False
        error = error_from(*row.detail[:2])
        if error.code not in going_on.LOST:
            return False
        lost.setdefault(call.id, (call, error))
        return True

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

    def _refuse_known(self, id: bytes) -> None:
        if id in self._calls:
            raise InferEngineError("conflict", "This client is already reading that request.", field="request_id")

    def _take_streams(self, count: int) -> int:
        if self._next_stream + count > _LAST_STREAM:
            self._next_stream = 1
        while any(self._next_stream + i in self._collectors for i in range(count)):
            self._next_stream += count
        first = self._next_stream
        self._next_stream += count
        return first


def _width(message: Submit | Attach, num_choices: int) -> int:
    """Stream numbers that a call takes."""
    return num_choices if isinstance(message, Submit) else max(num_choices, RESERVED_STREAMS)


def _is_detached(call: Call) -> bool:
    return isinstance(call.origin, Attach) or call.origin.detached


class Questions:
    """`ask` sends a message if there is somebody to send it to."""

    def __init__(self, ask: Callable[[Message], None]) -> None:
        self._ask = ask
        self._pings: dict[int, Answer[Pong]] = {}
        self._models: deque[tuple[Model, Answer[ModelFiles]]] = deque()
        self._admins: dict[int, tuple[Admin, Answer[Any]]] = {}
        self._nonce = 1

    def ping(self) -> Answer[Pong]:
        nonce, answer = self._next_nonce(), Answer[Pong]()
        self._pings[nonce] = answer
        self._ask(Ping(nonce))
        return answer

    def model_files(self, files: Sequence[str] | None) -> Answer[ModelFiles]:
        message, answer = Model(None if files is None else tuple(files)), Answer[ModelFiles]()
        self._models.append((message, answer))
        self._ask(message)
        return answer

    def admin(self, op: str, arguments: dict[str, Any]) -> Answer[Any]:
        nonce, answer = self._next_nonce(), Answer[Any]()
        message = Admin(op, nonce, arguments)
        self._admins[nonce] = (message, answer)
        self._ask(message)
        return answer

    def unanswered(self) -> Iterator[Message]:
        """To be sent again."""
        yield from (Ping(nonce) for nonce in self._pings)
        yield from (message for message, _ in self._models)
        yield from (message for message, _ in self._admins.values())

    def end_all(self, error: InferEngineError) -> None:
        """No answer will come."""
        answers: list[Answer[Any]] = [*self._pings.values(), *(answer for _, answer in self._models)]
        answers += [answer for _, answer in self._admins.values()]
        self._pings.clear()
        self._models.clear()
        self._admins.clear()
        for answer in answers:
            answer.fail(error)

    def on_pong(self, pong: Pong) -> None:
        answer = self._pings.pop(pong.nonce, None)
        if answer is not None:
            answer.resolve(pong)

    def on_model_files(self, message: ModelFiles) -> None:
        if self._models:  # answered in the order of asking
            self._models.popleft()[1].resolve(message)

    def on_admin_reply(self, message: AdminReply) -> None:
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


T = TypeVar("T")


async def wait_for(answer: Answer[T]) -> T:
    """Its value, or the InferEngineError that it failed with. Any number of tasks may wait."""
    if not answer.done:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        previous = answer.on_done

        def wake() -> None:
            if previous is not None:
                previous()
            if not waiter.done():
                waiter.set_result(None)

        answer.on_done = wake
        await waiter
    return answer.result()
