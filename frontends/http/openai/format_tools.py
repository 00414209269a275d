"""Chat completions whose output is more than text: tool calls and reasoning, whole and streamed.

Plain chats never come here; formats.ChatFormat is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontends.common.errors import error_object
from frontends.common.generation import Choice, Generation, Output, Piece, Usage
from frontends.common.json import DONE, event
from frontends.common.output_parsing import OutputParser, finish_reason
from frontends.http.openai.format import AnswerMetadata, Chunks, chat_document, chat_logprobs
from inferengine.errors import InferEngineError
from inferengine.text.output_parser import MessageReader
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning


class MessageFormat:
    """/v1/chat/completions with tools, or of a model that thinks."""

    def __init__(
        self, answer: AnswerMetadata, num_choices: int, parser: OutputParser, *, include_reasoning: bool = True
    ) -> None:
        self._answer = answer
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._chunks = Chunks(answer, "chat.completion.chunk")
        self._readers: list[MessageReader | None] = [None] * num_choices

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        chunks: list[bytes] = []
        reader = self._readers[choice.index]
        if reader is None:
            reader = self._readers[choice.index] = self._parser.make_reader()
            more = {"prompt_token_ids": list(choice.prompt_ids)} if self._answer.extras.return_token_ids else {}
            first = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(generation, choice, first, None, more, behind=choice.num_tokens))
        for piece in pieces:
            deltas = [delta for part in reader.push(piece.text, piece.is_last) if (delta := self._delta(choice, part))]
            carries = piece.token_ids and (self._answer.logprobs is not None or self._answer.extras.return_token_ids)
            if not deltas and (carries or piece.finish_reason is not None):
                deltas.append({})
            for place, delta in enumerate(deltas):
                done = piece if place == len(deltas) - 1 else None
                behind = choice.num_tokens - piece.num_tokens
                chunks.append(self._chunk(generation, choice, delta, done, {}, reader.num_calls, behind=behind))
        return b"".join(chunks)

    def plain(self, choice: Choice) -> None:
        return None

    def end(self, generation: Generation) -> bytes:
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        messages, reasons = [], []
        for output in outputs:
            message = self._parser.make_reader().read(output.text)
            shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
            if message.reasoning and self._include_reasoning:
                shown["reasoning_content"] = message.reasoning
            if message.calls:
                shown["content"] = message.content or None
                shown["tool_calls"] = [
                    {
                        "id": self._parser.call_id(self._answer.id, output.choice.index, place),
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                    for place, (name, arguments) in enumerate(message.calls)
                ]
            messages.append(shown)
            reasons.append(finish_reason(output.finish_reason, len(message.calls)))
        return chat_document(self._answer, outputs, messages, reasons, usage)

    def _delta(self, choice: Choice, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._include_reasoning else None
            case CallDelta():
                return {"tool_calls": [self._parser.call_entry(self._answer.id, choice.index, part)]}

    def _chunk(
        self,
        generation: Generation,
        choice: Choice,
        delta: dict[str, Any],
        piece: Piece | None,
        more: dict[str, Any],
        num_calls: int = 0,
        *,
        behind: int,
    ) -> bytes:
        """`piece`: the one that this chunk completes, whose tokens and end it tells."""
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            entry["logprobs"] = chat_logprobs(self._answer, piece.token_ids, piece.logprobs)
            entry["finish_reason"] = finish_reason(piece.finish_reason, num_calls)
            if piece.finish_reason is not None:
                entry["stop_reason"] = piece.stop_reason
            if self._answer.extras.return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, more, behind)
