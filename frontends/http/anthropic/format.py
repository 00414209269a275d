"""Answers of Anthropic's Messages API: a document of content blocks, or the events that build it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontends.common.errors import sentence
from frontends.common.generation import Choice, Generation, Output, Piece, Usage, guess_counts
from frontends.common.json import event
from frontends.http.anthropic.request import tool_input
from frontends.http.openai.chat import ChatRequest
from inferengine.errors import InferEngineError
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: InferEngineError) -> dict[str, Any]:
    """An error in this dialect. The field at fault is named in the message, which is all that its clients show."""
    kind = ERROR_TYPES.get(error.http_status, "api_error" if error.http_status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": sentence(error)}}


class MessagesFormat:
    """One choice; blocks are numbered as they open."""

    def __init__(self, chat: ChatRequest, message_id: str) -> None:
        self._chat = chat
        self._id = message_id
        self._reader = chat.prompt.parser.make_reader()
        self._open: str | None = None  # what the open block is: text, thinking, or the number of a call
        self._num_blocks = 0
        self._begun = False
        self._last: Piece | None = None

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces; before the first ones, `message_start` and `ping`."""
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            message = {**self._message([], None, None), "usage": _usage(generation.usage(), output_tokens=0)}
            parts.append(_event("message_start", message=message))
            parts.append(_event("ping"))
        for piece in pieces:
            for part in self._reader.push(piece.text, piece.is_last):
                self._add(part, parts)
            if piece.is_last:
                self._last = piece
                self._close(parts)
        return b"".join(parts)

    def plain(self, choice: Choice) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: Generation) -> bytes:
        """Write `message_delta` with the stop reason and usage, then `message_stop`."""
        reason, sequence = _stop(self._last, self._reader.num_calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage(generation.usage())) + _event("message_stop")

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an `error` event."""
        return event(error_body(error), "error")

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole message object with its thinking, text and tool_use blocks."""
        (output,) = outputs
        message = self._reader.read(output.text)
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for place, (name, arguments) in enumerate(message.calls):
            blocks.append(
                {"type": "tool_use", "id": self._call_id(place), "name": name, "input": tool_input(arguments)}
            )
        ended = Piece("", (), None, 0, output.finish_reason, output.stop_reason)
        return {**self._message(blocks, *_stop(ended, len(message.calls))), "usage": _usage(usage)}

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.served.name,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _add(self, part: Part, parts: list[bytes]) -> None:
        match part:
            case Content(text):
                self._block("text", {"type": "text", "text": ""}, parts)
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""}, parts)
                delta = {"type": "thinking_delta", "thinking": text}
            case CallDelta(call, name, arguments):
                block = {"type": "tool_use", "id": self._call_id(call), "name": name or "", "input": {}}
                self._block(str(call), block, parts)
                delta = {"type": "input_json_delta", "partial_json": arguments}
        parts.append(_event("content_block_delta", index=self._num_blocks - 1, delta=delta))

    def _block(self, kind: str, block: dict[str, Any], parts: list[bytes]) -> None:
        """Make sure that a block of this kind is open."""
        if self._open != kind:
            self._close(parts)
            self._open = kind
            parts.append(_event("content_block_start", index=self._num_blocks, content_block=block))
            self._num_blocks += 1

    def _close(self, parts: list[bytes]) -> None:
        if self._open is not None:
            parts.append(_event("content_block_stop", index=self._num_blocks - 1))
            self._open = None

    def _call_id(self, call: int) -> str:
        return self._chat.prompt.parser.call_id(self._id, 0, call)


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)


def _stop(last: Piece | None, num_calls: int) -> tuple[str | None, str | None]:
    """stop_reason and stop_sequence."""
    if last is None:
        return None, None
    if last.finish_reason == "length":
        return "max_tokens", None
    if isinstance(last.stop_reason, str):
        return "stop_sequence", last.stop_reason
    return "tool_use" if num_calls else "end_turn", None


def _usage(usage: Usage, output_tokens: int | None = None) -> dict[str, Any]:
    """Cached tokens of the prompt are counted apart. Guesses have OpenAI's names: Anthropic has none for them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens if output_tokens is None else output_tokens,
        **guess_counts(usage),
    }
