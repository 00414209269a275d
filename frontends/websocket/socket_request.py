"""One request on one socket, from its frame to its last frame: one done frame for each choice, or one error for all.

generate -> tokens -> SUBMIT -> accepted -> delta ... -> done      (a task for each choice)
resume   ------------> ATTACH -> accepted -> delta ... -> done     (the text up to the cursor is not sent)

New output of a choice becomes a frame in the callback, without a task switch for each token. A choice's task runs only
to wait: for room in the socket or in the client's window, and for the end. The text of a conversation is split into the
answer, the reasoning and the tool calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from frontends.common.auth import ANYBODY, ApiKey, Quotas
from frontends.common.chat import finish_reason
from frontends.common.event_loop import AdmissionThrottle
from frontends.common.generation import (
    MOST_AS_TEXT,
    ChoiceOutput,
    Piece,
    draft_token_counts,
    finite_logprob,
    token_text,
)
from frontends.common.json import OffLoop
from frontends.common.model import ModelContext, ServedModel
from frontends.common.resumable import ChoiceLog, Registry, RequestLog, unpack_metadata
from frontends.common.shares import client_of, name_of
from frontends.websocket.channel import SendChannel, SocketGone
from frontends.websocket.frames import (
    GenerateFrame,
    OutputOptions,
    ResumeFrame,
    make_metadata,
    output_options_of,
    read_generate_params,
)
from inferengine.client import EnginePool, Finish, TokenLogprobs
from inferengine.client.client import wake
from inferengine.config import Config
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import PROVIDER, Span, Tracing
from inferengine.sampling_params import SamplingParams, from_map
from inferengine.text import TextStream, Tokenizer
from inferengine.text.tool_parsers.base import CallDelta, Content
from inferengine.wire.messages import Accept


class ChoiceOptions(NamedTuple):
    """How the choices of a request are written."""

    name: str  # the request's id on this socket
    request_id: str
    params: SamplingParams
    context_ids: Sequence[int]
    output: OutputOptions
    return_token_ids: bool


class ChoiceEnd(NamedTuple):
    """The end of a choice, for its done frame. `finish` is None where a stop string ended it here."""

    piece: Piece
    extra: dict[str, Any]
    finish: Finish | None


class ChoiceWriter:
    """Writes a choice's delta frames. `run` returns the content of its done frame."""

    def __init__(
        self,
        options: ChoiceOptions,
        index: int,
        cursor: int,
        log: ChoiceLog,
        channel: SendChannel,
        tokenizer: Tokenizer,
    ) -> None:
        """`cursor`: tokens that the client has already; their text is not sent."""
        params, output = options.params, options.output
        text = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens and not output.parser.keeps_special_tokens,
            min_tokens=params.min_tokens,
            context_ids=options.context_ids,
        )
        self.index = index
        self._options = options
        self._tokenizer = tokenizer
        self._log = log
        self._view = log.view(cursor, MOST_AS_TEXT)
        self._choice = ChoiceOutput(index, (), self._view, text)
        self._channel = channel
        self._head = channel.delta_head(options.name, index)
        self._message = None if output.parser.is_plain else MessageText(output, options.request_id, index)
        self._cursor = cursor  # a piece ends there: the client has the text of those before
        self._has_extras = options.return_token_ids or params.logprobs is not None or self._message is not None
        self._is_plain = not self._has_extras and self._choice.is_plain
        self._last: ChoiceEnd | None = None
        self._failure: BaseException | None = None
        self._done = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> ChoiceEnd:
        """Write until the end of the choice. Raises the error that ended it, and SocketGone."""
        loop = asyncio.get_running_loop()
        try:
            while self._last is None:
                self._waiter = loop.create_future()
                if self._view.has_news:
                    wake(self._waiter)
                else:
                    self._log.when_news(self._on_news)
                await self._waiter
                if self._failure is not None:
                    raise self._failure
                if self._last is None:  # there was no room, or there is more than one piece
                    await self._channel.wait_for_room()
                    self._log.catch_up()
                    if self._view.has_news:
                        self._write()
                    await asyncio.sleep(0)  # a long output is written piece by piece, and others in between
        finally:
            self._done = True
            self._waiter = self._failure = None  # both may have an error, and with it the frames that have this object
        return self._last

    def _on_news(self) -> None:
        """Write new output, in the callback of the message that brought it."""
        if self._done:
            return
        if self._channel.is_full:
            wake(self._waiter)
            return
        try:
            if self._view.has_news:
                self._write()
        except Exception as error:
            self._failure = error
        if self._last is None and self._failure is None and not self._view.has_news:
            self._log.when_news(self._on_news)
        else:
            wake(self._waiter)

    def _write(self) -> None:
        """Write the next piece of output as one frame. Only when there is output and room."""
        if self._is_plain and not self._repeats and (token_id := self._view.take_one()) is not None:
            text = self._choice.read_plain(token_id)
            if text:
                self._channel.delta(self._head, self._choice.num_tokens, text)
            return
        repeats = self._repeats
        (piece,) = self._choice.read(self._view.take(), per_token=False)
        if piece.error is not None:
            raise piece.error
        fields: dict[str, Any] = {}
        if self._message is not None:
            piece, fields = self._message.read(piece)
        if repeats:
            piece, fields = piece._replace(text="", token_ids=[], logprobs=None), {}
            if not piece.is_last:
                return
        extra = self._extra(piece, fields) if self._has_extras else {}
        if piece.is_last:
            self._last = ChoiceEnd(piece, extra, self._choice.finish)
        elif extra:
            self._channel.delta_with(self._options.name, self.index, piece.num_tokens, piece.text, extra)
        elif piece.text:
            self._channel.delta(self._head, piece.num_tokens, piece.text)

    @property
    def _repeats(self) -> bool:
        """Whether the client has the text of the next piece."""
        return self._choice.num_tokens < self._cursor

    def _extra(self, piece: Piece, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the frame's fields beside the text."""
        extra = dict(fields)
        if self._options.return_token_ids:
            extra["token_ids"] = list(piece.token_ids)
        if piece.logprobs is not None:
            extra["logprobs"] = [
                _logprob(self._tokenizer, *each) for each in zip(piece.token_ids, piece.logprobs, strict=False)
            ]
        return extra


class MessageText:
    """Splits one choice's text. `answer_id`: the request's id; ids of tool calls are made from it, so that a resumed
    answer has the same ids."""

    def __init__(self, output: OutputOptions, answer_id: str, choice: int) -> None:
        self._output = output
        self._answer_id = answer_id
        self._choice = choice
        self._reader = output.parser.make_reader()

    def read(self, piece: Piece) -> tuple[Piece, dict[str, Any]]:
        """Return the piece with the answer's text alone, and the other fields of the frame: `reasoning_content` and
        `tool_calls`, as in OpenAI's streamed deltas."""
        text = reasoning = ""
        calls = []
        for part in self._reader.push(piece.text, piece.is_last, cut=piece.is_cut):
            if isinstance(part, Content):
                text += part.text
            elif isinstance(part, CallDelta):
                calls.append(self._output.parser.call_entry(self._answer_id, self._choice, part))
            elif self._output.include_reasoning:
                reasoning += part.text
        extra: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            extra["tool_calls"] = calls
        reason = finish_reason(piece.finish_reason, self._reader.num_calls)
        return piece._replace(text=text, finish_reason=reason), extra


def _logprob(tokenizer: Tokenizer, token_id: int, row: TokenLogprobs) -> dict[str, Any]:
    top = zip(row.top_ids, map(finite_logprob, row.top_logprobs), strict=True)
    return {
        "logprob": finite_logprob(row.logprob),
        "rank": row.rank,
        "token": token_text(tokenizer, token_id),
        "top": [*top],
        "top_tokens": [token_text(tokenizer, other) for other in row.top_ids],
    }


# -- the request -------------------------------------------------------------------------------------------------------


RESUME_WAIT_S = 5.0  # clients reconnect to a restarted front end before that has connected to its engine
CLIENT_GONE = "client_gone"  # error.type of a span
USAGE_WAIT_S = 1.0  # for the engine's usage after a stop string that was found here


@dataclass(frozen=True)
class Services:
    """What every request of this process uses."""

    engine: EnginePool
    models: ModelContext
    registry: Registry
    config: Config
    tracing: Tracing | None = None
    admission: AdmissionThrottle = field(default_factory=AdmissionThrottle)
    off_loop: OffLoop = field(default_factory=OffLoop)

    async def wait_for_engine(self) -> None:
        """Wait up to RESUME_WAIT_S for a connection: only the engine has what is to be resumed."""
        if not self.engine.connected:
            with contextlib.suppress(InferEngineError):  # the next use of the engine raises it again
                await self.engine.connect(RESUME_WAIT_S)


class Caller(NamedTuple):
    """Who opened a socket, on which path, with which quotas. `traceparent`: of the span that opened it. `name`: of this
    socket among those of its address, for fair shares."""

    key: ApiKey
    quotas: Quotas
    path: str
    address: str | None = None
    traceparent: str = ""
    name: str = ""

    def share(self, session: str) -> tuple[str, str]:
        """Return whose share of the engine a request of this session uses, "" without one: see
        `frontends.common.shares`."""
        return client_of(self.address or ""), name_of(session) or self.name


class _Prepared(NamedTuple):
    """A request that was sent. `output` is None for a resumed one: it is in the metadata that the engine keeps.
    `existed`: this front end knew the request before, or it is resumed; of others the engine says that."""

    log: RequestLog
    params: SamplingParams
    cursors: Sequence[int]
    grammar_field: str = ""
    output: OutputOptions | None = None
    existed: bool = False


class SocketRequest:
    """Serves one generate or resume frame. `cancel()` stops the generation, not `run()`: done frames are still sent."""

    def __init__(
        self,
        frame: GenerateFrame | ResumeFrame,
        channel: SendChannel,
        services: Services,
        caller: Caller,
        before_last_frame: Callable[[], None],
    ) -> None:
        """`before_last_frame` is called before the last frame, maybe repeatedly. It frees quotas, so that a client can
        start its next request when it has read the last frame."""
        self.frame = frame
        self.before_last_frame = before_last_frame
        self._caller, self._key = caller, caller.key
        self._num_open = 0  # choices without a done frame yet
        self._span: RequestSpan | None = None
        self._channel = channel
        self._services = services
        self._log: RequestLog | None = None
        self._cancelled = False
        self._is_ours = isinstance(frame, GenerateFrame)  # for a resumed one this is known after ACCEPT

    @property
    def request_id(self) -> str:
        """Its id in logs: the engine's, when there is one."""
        return self.frame.id if self._log is None else self._log.id.hex()

    def cancel(self) -> None:
        """Stop generating; the done frames say `cancelled`. Idempotent."""
        self._cancelled = True
        if self._log is not None and self._is_ours:
            self._log.cancel()

    async def run(self) -> None:
        """Serve the request to its last done frame. Raises InferEngineError when it fails as a whole, and stops it."""
        caller, tracing = self._caller, self._services.tracing
        if tracing is not None:
            self._span = RequestSpan(tracing, self.frame, caller.path, caller.address, caller.traceparent)
        if self._span is None:
            await self._run()
            return
        try:
            await self._run()
        except BaseException as error:
            self._span.end(error)
            raise
        self._span.end(None)

    async def _run(self) -> None:
        if isinstance(self.frame, ResumeFrame):
            await self._services.wait_for_engine()
        await self._services.admission.wait()
        model = await self._services.models.get()
        prepared = await self._prepare(model)
        if prepared is None:
            return
        self._log, refused = prepared.log, False
        try:
            if self._cancelled and self._is_ours:
                self._log.cancel()
            try:
                accept = await self._log.accepted()
            except InferEngineError as error:
                refused = True
                if error.field == "prompt" and isinstance(self.frame, GenerateFrame):
                    error.field = self.frame.prompt_field
                elif error.field == "max_tokens":
                    error.field = "params.max_tokens"
                raise
            self._claim(self._log)
            if self._span is not None:
                self._span.accepted(self._log.id.hex(), accept)
            await self._channel.send(self._accepted(accept, prepared.existed))
            await self._choices(prepared, accept, model)
        except InferEngineError as error:
            if error.field == "grammar":  # at the start or in the middle of the output
                error.field = prepared.grammar_field or error.field
            if self._is_ours and error.code != "client_stalled":  # a slow client may resume it
                self._log.cancel()
            raise
        finally:
            self._services.registry.leave(self._log, forget=refused)

    def _claim(self, log: RequestLog) -> None:
        """Check that a resumed request belongs to this tenant. Raises not_found otherwise, without disturbing it."""
        self._is_ours = unpack_metadata(log.note).tenant == self._key.tenant
        if not self._is_ours:
            raise InferEngineError("not_found", "There is no such request.", field="request_id")
        if isinstance(self.frame, ResumeFrame):
            log.detached = self.frame.detached
            if self._cancelled:
                log.cancel()

    # -- before the engine -------------------------------------------------------------------------------------------

    async def _prepare(self, model: ServedModel) -> _Prepared | None:
        """Submit or attach. Returns None when the client cancelled before that; the done frames have been sent then."""
        frame, services = self.frame, self._services
        if isinstance(frame, ResumeFrame):
            sampling, cursors = from_map(frame.params), frame.cursors or (0,)
            request_id = bytes.fromhex(frame.request_id)
            log = services.registry.resume(request_id, len(cursors), detached=True, context_ids=frame.context_ids)
            return _Prepared(log, sampling, cursors, existed=True)
        if self._span is not None:
            self._span.set_model(frame.model or model.name)
        adapter = model.adapter_of(frame.model)
        if adapter is None:
            raise InferEngineError("model_not_found", f"this engine serves {model.name}", field="model")
        if not self._key.may_use(frame.model or model.name):
            raise InferEngineError("forbidden", "This key may not use that model.", field="model")
        params = await read_generate_params(frame, model, services.config)
        if self._cancelled:
            self.before_last_frame()
            for choice in range(params.sampling.n):
                self._channel.done(_cancelled_done(frame.id, choice, len(params.prompt_ids)))
            return None
        key = self._key
        chosen_id = None if frame.request_id is None else bytes.fromhex(frame.request_id)
        existed = chosen_id is not None and chosen_id in services.registry
        log = services.registry.submit(
            params.prompt_ids,
            params.sampling,
            request_id=chosen_id,
            detached=frame.detached,
            context_ids=params.context_ids,
            priority=frame.priority if key is ANYBODY else key.urgency(frame.priority),
            tenant=key.tenant,
            salt=key.salt(frame.cache_salt.encode()),
            session=frame.session,
            share=self._caller.share(frame.session),
            note=make_metadata(key, params.output),
            deadline_s=frame.deadline_s,
            label=frame.label,
            traceparent="" if self._span is None else self._span.traceparent,
            grammar=params.grammar,
            adapter=adapter,
            resubmit=frame.resubmit,
        )
        return _Prepared(log, params.sampling, (), params.grammar_field, params.output, existed)

    def _accepted(self, accept: Accept, existed: bool) -> dict[str, Any]:
        assert self._log is not None
        return {
            "type": "accepted",
            "id": self.frame.id,
            "request_id": self._log.id.hex(),
            "prompt_tokens": accept.prompt_tokens,
            "n": accept.n,
            "attached": existed or accept.attached,
            "context_ids": list(self._log.context_ids),
        }

    # -- output -------------------------------------------------------------------------------------------------------

    async def _choices(self, prepared: _Prepared, accept: Accept, model: ServedModel) -> None:
        frame, request_log = self.frame, prepared.log
        output = prepared.output or output_options_of(request_log.note)
        request_id, context_ids = request_log.id.hex(), request_log.context_ids
        options = ChoiceOptions(frame.id, request_id, prepared.params, context_ids, output, frame.return_token_ids)
        choices = []
        for index, log in enumerate(request_log.choices):
            cursor = prepared.cursors[index] if index < len(prepared.cursors) else 0
            writer = ChoiceWriter(options, index, cursor, log, self._channel, model.tokenizer)
            choices.append(self._choice(writer, log, accept))
        self._num_open = len(choices)
        if len(choices) == 1:
            await choices[0]
            return
        tasks = [asyncio.create_task(choice) for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:  # when one fails, the others end
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, writer: ChoiceWriter, log: ChoiceLog, accept: Accept) -> None:
        """Send a choice's frames, from the first delta to done."""
        piece, extra, finish = await writer.run()
        if finish is None:
            finish = await _finish_after_stop(log)
        if self._span is not None:
            self._span.choice_ended(writer.index, piece, finish)
        await self._channel.wait_for_room()
        self._num_open -= 1
        if not self._num_open:
            self.before_last_frame()
        self._channel.done(_done(self.frame.id, writer.index, piece, accept, finish, extra))


async def _finish_after_stop(log: ChoiceLog) -> Finish | None:
    """Return the engine's usage of a choice that a stop string ended here; None if it is late."""
    try:
        return await asyncio.wait_for(log.ended(), USAGE_WAIT_S)
    except TimeoutError:
        return None


def _done(
    name: str, index: int, piece: Piece, accept: Accept, finish: Finish | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """Return a done frame. It carries the choice's last text."""
    return {
        "type": "done",
        "id": name,
        "choice": index,
        "cursor": piece.num_tokens,
        "text": piece.text,
        "finish_reason": "cancelled" if piece.finish_reason == "abort" else piece.finish_reason,
        "stop": piece.stop_reason,
        "usage": {
            "prompt_tokens": accept.prompt_tokens,
            "cached_tokens": 0 if finish is None else finish.cached_tokens,
            "completion_tokens": piece.num_tokens,
            **({} if finish is None else draft_token_counts(finish)),
        },
        "timings": None
        if finish is None
        else {
            "queued_ms": finish.queued_ms,
            "first_token_ms": finish.first_token_ms,
            "total_ms": finish.total_ms,
        },
        **extra,
    }


def _cancelled_done(name: str, index: int, prompt_tokens: int) -> dict[str, Any]:
    """Return the done frame of a choice that was cancelled before it was submitted."""
    piece = Piece("", [], None, 0, "abort")
    return _done(name, index, piece, Accept(b"", 0, prompt_tokens), None, {})


class _EndedChoice(NamedTuple):
    reason: str | None
    completion_tokens: int
    cached_tokens: int


class RequestSpan:
    """The tracing span of a generate or resume frame, with the attributes of OpenTelemetry's gen_ai conventions: names
    and numbers, never texts. Call `end` exactly once."""

    def __init__(
        self, tracing: Tracing, frame: GenerateFrame | ResumeFrame, path: str, client: str | None, traceparent: str
    ) -> None:
        """Begin a child of the span that the frame names, else of `traceparent`, which opened the socket."""
        kind = "generate" if isinstance(frame, GenerateFrame) else "resume"
        self._span: Span = tracing.begin(
            f"{kind} {path}",
            {"traceparent": frame.traceparent or traceparent},
            {
                "url.path": path,
                "network.protocol.name": "websocket",
                "client.address": client,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.operation.name": _operation(frame),
            },
        )
        self._label = frame.label if isinstance(frame, GenerateFrame) else ""
        self._ends: dict[int, _EndedChoice] = {}

    @property
    def traceparent(self) -> str:
        """The W3C header for the engine, whose span is a child of this one."""
        return self._span.traceparent

    def set_model(self, model: str) -> None:
        """Set the model that the client named."""
        self._span.set("gen_ai.request.model", model)

    def accepted(self, request_id: str, accept: Accept) -> None:
        """Record ACCEPT. The client's label replaces `request_id` where there is one, as in the engine's span."""
        self._span.set("inferengine.request_id", self._label or request_id)
        self._span.set("gen_ai.usage.input_tokens", accept.prompt_tokens)

    def choice_ended(self, index: int, piece: Piece, finish: Finish | None) -> None:
        """Record the end of a choice. `finish` is None where the engine's usage is unknown."""
        cached = 0 if finish is None else finish.cached_tokens
        self._ends[index] = _EndedChoice(piece.finish_reason, piece.num_tokens, cached)

    def end(self, error: BaseException | None) -> None:
        """End the span. `error`: what ended the request before its choices did."""
        ends = [self._ends[index] for index in sorted(self._ends)]
        if ends:
            self._span.set("gen_ai.usage.cache_read.input_tokens", ends[0].cached_tokens)
            self._span.set("gen_ai.usage.output_tokens", sum(end.completion_tokens for end in ends))
            self._span.set("gen_ai.response.finish_reasons", [end.reason for end in ends if end.reason])
        if isinstance(error, InferEngineError):
            self._span.set("error.type", error.code)
            if error.http_status >= 500:  # as over HTTP: a client's error is no failure of this server
                self._span.fail("")
        elif isinstance(error, Exception) and not isinstance(error, SocketGone):
            self._span.set("error.type", "engine_error")
            self._span.fail("")
        elif error is not None:
            self._span.set("error.type", CLIENT_GONE)
        self._span.end()


def _operation(frame: GenerateFrame | ResumeFrame) -> str | None:
    if isinstance(frame, ResumeFrame):
        return None  # the operation is known to the engine alone
    return "text_completion" if frame.messages is None else "chat"
