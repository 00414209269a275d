"""One request on one socket, from its frame to its last frame: one done frame for each choice, or one error for all.

generate -> tokens -> SUBMIT -> accepted -> delta ... -> done      (a task for each choice)
resume   ------------> ATTACH -> accepted -> delta ... -> done     (the text up to the cursor is not sent)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from frontends.common.auth import ANYBODY, ApiKey
from frontends.common.event_loop import AdmissionThrottle
from frontends.common.generation import Piece, draft_token_counts
from frontends.common.json import OffLoop
from frontends.common.model import ModelContext, ServedModel
from frontends.common.quotas import Quotas
from frontends.common.resumable import ChoiceLog, Registry, RequestLog, unpack_metadata
from frontends.websocket.choice_writer import ChoiceOptions, ChoiceWriter
from frontends.websocket.frames import GenerateFrame, ResumeFrame
from frontends.websocket.generate_params import OutputOptions, make_metadata, output_options_of, read_generate_params
from frontends.websocket.send_channel import SendChannel, SocketGone
from inferengine.client import EnginePool, Finish
from inferengine.config import Config
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import PROVIDER, Span, Tracing
from inferengine.sampling_params import SamplingParams, from_map
from inferengine.wire.messages import Accept

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
    """Who opened a socket, on which path, with which quotas. `traceparent`: of the span that opened it."""

    key: ApiKey
    quotas: Quotas
    path: str
    address: str | None = None
    traceparent: str = ""


class _Prepared(NamedTuple):
    """A request that was sent. `output` is None for a resumed one: it is in the metadata that the engine keeps."""

    log: RequestLog
    params: SamplingParams
    cursors: Sequence[int]
    grammar_field: str = ""
    output: OutputOptions | None = None


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
        failure: BaseException | None = None
        try:
            await self._run()
        except BaseException as error:
            failure = error
            raise
        finally:
            if self._span is not None:
                self._span.end(failure)

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
            await self._channel.send(self._accepted(accept))
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
            return _Prepared(log, sampling, cursors)
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
        log = services.registry.submit(
            params.prompt_ids,
            params.sampling,
            request_id=None if frame.request_id is None else bytes.fromhex(frame.request_id),
            detached=frame.detached,
            context_ids=params.context_ids,
            priority=frame.priority if key is ANYBODY else key.urgency(frame.priority),
            tenant=key.tenant,
            salt=key.salt(frame.cache_salt.encode()),
            note=make_metadata(key, params.output),
            deadline_s=frame.deadline_s,
            label=frame.label,
            traceparent="" if self._span is None else self._span.traceparent,
            grammar=params.grammar,
            adapter=adapter,
            resubmit=frame.resubmit,
        )
        return _Prepared(log, params.sampling, (), params.grammar_field, params.output)

    def _accepted(self, accept: Accept) -> dict[str, Any]:
        assert self._log is not None
        return {
            "type": "accepted",
            "id": self.frame.id,
            "request_id": self._log.id.hex(),
            "prompt_tokens": accept.prompt_tokens,
            "n": accept.n,
            "attached": accept.attached,
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
