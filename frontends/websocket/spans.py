"""The tracing span of one request on a socket, from its frame to its last frame.

As in the HTTP front end it follows OpenTelemetry's gen_ai conventions: figures and names, never texts.
"""

from __future__ import annotations

from typing import NamedTuple

from frontends.common.generation import Piece
from frontends.websocket.frames import GenerateFrame, ResumeFrame
from frontends.websocket.send_channel import SocketGone
from inferengine.client import Finish
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import PROVIDER, Span, Tracing
from inferengine.wire.messages import Accept

CLIENT_GONE = "client_gone"


class _ChoiceEnd(NamedTuple):
    reason: str | None
    completion_tokens: int
    cached_tokens: int


class RequestSpan:
    """The span of a generate or resume frame. Call `end` exactly once."""

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
        self._ends: dict[int, _ChoiceEnd] = {}

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
        self._ends[index] = _ChoiceEnd(piece.finish_reason, piece.num_tokens, cached)

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
