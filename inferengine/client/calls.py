"""The requests of one session that have not ended: which stream of the wire belongs to which choice of which call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inferengine.client.streams import Answer, Call, Collector, error_from, finish_from
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Accept, Attach, Done, Reject, Step, Submit

RESERVED_STREAMS = 64  # stream numbers set aside for an ATTACH: its number of choices is known only from ACCEPT
_LAST_STREAM = 2**31


class Calls:
    """All of them, by id and by stream number."""

    def __init__(self) -> None:
        self._calls: dict[bytes, Call] = {}
        self._collectors: dict[int, Collector] = {}
        self._next_stream = 1

    # -- coming and going --------------------------------------------------------------------------------------------

    def start(self, message: Submit | Attach, cursors: Sequence[int]) -> Call:
        """A new call with a choice for each of `cursors`, on stream numbers of its own. Raises conflict."""
        self._refuse_known(message.id)
        count = len(cursors) if isinstance(message, Submit) else max(len(cursors), RESERVED_STREAMS)
        stream = self._take_streams(count)
        collectors = [Collector(stream + choice, cursor) for choice, cursor in enumerate(cursors)]
        call = Call(message._replace(stream=stream), collectors)
        self._add(call)
        return call

    def adopt(self, call: Call) -> None:
        """Take over another session's call, under its id and with its collectors. Raises conflict."""
        self._refuse_known(call.id)
        stream = self._take_streams(len(call.collectors))
        call.message = call.message._replace(stream=stream)
        if call.accepted.done:
            call.accepted = Answer()
        for name, collector in enumerate(call.collectors, stream):
            collector.name = name
        self._add(call)

    def release(self, call: Call) -> list[int]:
        """Forget a call that goes on elsewhere. Returns its open streams; none when it is not here."""
        if self._calls.get(call.id) is not call:
            return []
        del self._calls[call.id]
        return [collector.name for collector in call.collectors if self._collectors.pop(collector.name, None)]

    def drop(self, call: Call, error: InferEngineError) -> None:
        """Forget a call and end what is open of it."""
        self._calls.pop(call.id, None)
        for collector in call.collectors:
            self._collectors.pop(collector.name, None)
        call.fail(error)

    def end_all(self, error: InferEngineError) -> None:
        """No more output will come."""
        for call in list(self._calls.values()):
            call.fail(error)
        self._calls.clear()
        self._collectors.clear()

    # -- after a reconnect -------------------------------------------------------------------------------------------

    def after_lapse(self, *, restarted: bool) -> None:
        """The engine has forgotten this connection, or is another. What it may have lost ends; what runs on detached
        is attached to again; what it had not answered is sent again: the id makes sure that it runs once."""
        for call in list(self._calls.values()):
            if not call.accepted.done:
                continue
            if not restarted and _is_detached(call):
                call.message = _attach_again(call)
                call.accepted = Answer()
            elif restarted:
                self.drop(call, InferEngineError("engine_restarted", "The engine was restarted."))
            else:
                self.drop(call, InferEngineError("engine_unavailable", "The lease ran out while disconnected."))

    def unanswered(self) -> Iterator[Submit | Attach]:
        """To be sent again."""
        yield from (call.message for call in self._calls.values() if not call.accepted.done)

    def cancelled(self) -> list[int]:
        """Open streams whose end was asked for."""
        return [name for name, collector in self._collectors.items() if collector.cancelled]

    # -- what the engine says ----------------------------------------------------------------------------------------

    def on_accept(self, accept: Accept) -> None:
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

    def on_reject(self, reject: Reject) -> bool:
        """False: it is about none of these."""
        call = self._calls.get(reject.id) if reject.id is not None else None
        if call is None or reject.stream not in (None, call.message.stream):
            return False
        self.drop(call, error_from(reject.code, reject.message, reject.field, reject.retry_after_ms))
        return True

    def on_step(self, step: Step) -> None:
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
        for row in step.done:
            if row.reason in ("error", "abort") and self._is_rescued(row):
                continue
            if (collector := collectors.pop(row.stream, None)) is not None:
                collector.end(finish_from(row))
                if (call := collector.call) is not None and call.finished:
                    self._calls.pop(call.id, None)
                    if not call.accepted.done:  # its ACCEPT was lost with a connection; its output was sent again
                        message, n = call.message, len(call.collectors)
                        call.accepted.resolve(Accept(call.id, message.stream, row.prompt_tokens, n))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, call: Call) -> None:
        self._calls[call.id] = call
        for collector in call.collectors:
            self._collectors[collector.name] = collector

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


def _is_detached(call: Call) -> bool:
    return isinstance(call.message, Attach) or call.message.detached


def _attach_again(call: Call) -> Attach:
    reply = call.message.reply
    cursors = tuple(c.num_characters if reply == "text" else c.num_tokens for c in call.collectors)
    return Attach(call.id, call.message.stream, cursors, reply)
