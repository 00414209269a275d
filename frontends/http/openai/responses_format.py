"""Answers of OpenAI's Responses API: an object with output items, and the events that build it up.

Items come in the order in which the model writes: reasoning, messages, function calls. Every event carries a number, so
that a client can tell whether it has missed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frontends.common.errors import error_object
from frontends.common.generation import Choice, Generation, Output, Piece, Usage, draft_token_counts
from frontends.common.json import event
from frontends.http.openai.chat import ChatRequest
from frontends.http.openai.format import chat_logprobs
from frontends.http.openai.responses_input import item_id
from frontends.http.openai.responses_tools import Origin
from inferengine.errors import InferEngineError
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning
from inferengine.text.tool_parsers.custom import custom_input

Keep = Callable[[dict[str, Any]], None]


class ResponsesFormat:
    """`envelope` has the fields of a response that its request decides; `keep` takes the finished object. `origins`:
    the tools of the request by the names that the model was shown. `log` takes every event."""

    def __init__(
        self,
        chat: ChatRequest,
        envelope: dict[str, Any],
        keep: Keep,
        origins: Mapping[str, Origin],
        log: Callable[[bytes], None] | None = None,
    ) -> None:
        self._origins = origins
        self._log = log
        self._chat = chat
        self._keep = keep
        self._response = {**envelope, "status": "in_progress", "output": []}
        self._reader = chat.prompt.parser.make_reader()
        self._items: list[dict[str, Any]] = []
        self._arguments: list[str] = []  # of the last call
        self._open = False  # the last item is still being written
        self._kind = ""  # of the last item; a call's has its number
        self._number = 0  # of the next event
        self._rows: list[dict[str, Any]] = []  # log-probabilities of the open text
        self._finish_reason: str | None = None

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces; before the first, `response.created` and `response.in_progress`."""
        parts = self._begin()
        for piece in pieces:
            self._take(piece, parts)
        return b"".join(parts)

    def plain(self, choice: Choice) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: Generation) -> bytes:
        """Keep the finished response and write the event that carries it."""
        response = self._finished(generation.usage())
        self._keep(response)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: InferEngineError) -> bytes:
        """Keep the response as failed and write `response.failed`."""
        response = {**self._response, "status": "failed", "output": self._items, "error": failure(error)}
        self._keep(response)
        parts = self._begin()
        parts.append(self._event("response.failed", response=response))
        return b"".join(parts)

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Keep and return the whole response object."""
        (output,) = outputs
        parts: list[bytes] = []
        whole = Piece(
            output.text, output.token_ids, output.logprobs, 0, output.finish_reason, output.stop_reason, output.error
        )
        self._take(whole, parts)
        response = self._finished(usage)
        self._keep(response)
        return response

    def begin(self) -> bytes:
        """Write `response.created` and `response.in_progress`, once."""
        return b"".join(self._begin())

    def _begin(self) -> list[bytes]:
        if self._number:
            return []
        return [self._event(name, response=self._response) for name in ("response.created", "response.in_progress")]

    def _take(self, piece: Piece, parts: list[bytes]) -> None:
        if (shown := chat_logprobs(self._chat.answer, piece.token_ids, piece.logprobs)) is not None:
            self._rows += shown["content"]
        for part in self._reader.push(piece.text, piece.is_last):
            self._add(part, parts)
        if piece.is_last:
            self._finish_reason = piece.finish_reason
            self._close(parts, "incomplete" if piece.finish_reason == "length" else "completed")

    def _add(self, part: Part, parts: list[bytes]) -> None:
        match part:
            case Content(text):
                if self._kind != "message" or not self._open:
                    self._start("message", {"role": "assistant", "content": []}, parts)
                    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    self._last["content"].append(content)
                    parts.append(
                        self._event("response.content_part.added", content_index=0, part=content, **self._where)
                    )
                self._last["content"][0]["text"] += text
                rows, self._rows = self._rows, []
                self._last["content"][0]["logprobs"] += rows
                where = {"content_index": 0, "logprobs": rows, **self._where}
                parts.append(self._event("response.output_text.delta", delta=text, **where))
            case Reasoning(text):
                if self._kind != "reasoning" or not self._open:
                    content = {"type": "reasoning_text", "text": ""}
                    self._start("reasoning", {"summary": [], "content": [content]}, parts)
                self._last["content"][0]["text"] += text
                parts.append(self._event("response.reasoning_text.delta", delta=text, content_index=0, **self._where))
            case CallDelta(call, name, arguments):
                if self._kind != f"call {call}":
                    self._start_call(call, name or "", parts)
                self._arguments.append(arguments)
                if self._last["type"] == "function_call":
                    self._last["arguments"] += arguments
                    where = self._where
                    parts.append(self._event("response.function_call_arguments.delta", delta=arguments, **where))

    @property
    def _last(self) -> dict[str, Any]:
        return self._items[-1]

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._last["id"], "output_index": len(self._items) - 1}

    def _start_call(self, call: int, name: str, parts: list[bytes]) -> None:
        """Open the item of a call. The input of a custom tool is told when the call is complete."""
        origin = self._origins.get(name, Origin("function", name))
        fields: dict[str, Any] = {
            "call_id": self._chat.prompt.parser.call_id(self._response["id"], 0, call),
            "name": origin.name,
        }
        if origin.namespace is not None:
            fields["namespace"] = origin.namespace
        if origin.kind == "custom":
            self._start("custom_tool_call", {**fields, "input": ""}, parts)
        else:
            self._start("function_call", {**fields, "arguments": ""}, parts)
        self._kind = f"call {call}"
        self._arguments = []

    def _start(self, kind: str, fields: dict[str, Any], parts: list[bytes]) -> None:
        self._close(parts, "completed")
        name = item_id(kind, self._response["id"], len(self._items))
        self._items.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self._kind, self._open = kind, True
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.added", output_index=index, item=self._last))

    def _close(self, parts: list[bytes], status: str) -> None:
        if not self._open:
            return
        self._open = False
        item, where = self._last, self._where
        item["status"] = status
        if item["type"] == "message":
            content = item["content"][0]
            done = {"content_index": 0, **where}
            parts.append(self._event("response.output_text.done", text=content["text"], logprobs=[], **done))
            parts.append(self._event("response.content_part.done", part=content, **done))
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            parts.append(self._event("response.reasoning_text.done", text=text, content_index=0, **where))
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input("".join(self._arguments))
            if item["input"]:
                parts.append(self._event("response.custom_tool_call_input.delta", delta=item["input"], **where))
            parts.append(self._event("response.custom_tool_call_input.done", input=item["input"], **where))
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            parts.append(self._event("response.function_call_arguments.done", **call, **where))
        parts.append(self._event("response.output_item.done", output_index=where["output_index"], item=item))

    def _finished(self, usage: Usage) -> dict[str, Any]:
        status, details = "completed", None
        if self._finish_reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        elif self._finish_reason == "abort":
            status = "cancelled"
        return {
            **self._response,
            "status": status,
            "incomplete_details": details,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0, **draft_token_counts(usage)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._number
        self._number += 1
        written = event({"type": kind, "sequence_number": number, **values}, kind)
        if self._log is not None:
            self._log(written)
        return written


def failure(error: InferEngineError) -> dict[str, Any]:
    """`error` of a response that failed."""
    shown = error_object(error)
    return {"code": "server_error" if error.http_status >= 500 else shown["code"], "message": shown["message"]}
