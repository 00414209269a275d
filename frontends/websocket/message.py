"""One choice's text taken apart for the frames: what is for the user, what was thought, and which tools are called."""

from __future__ import annotations

from typing import Any

from frontends.common.generation import Piece
from frontends.common.reading import finish_reason
from frontends.websocket.asked import Told
from inferengine.text.message_parts import CallDelta, Content


class MessageText:
    """`answer_id` names the calls: the request's own id, so that a resumed answer gives them the same ids."""

    def __init__(self, told: Told, answer_id: str, choice: int) -> None:
        self._told = told
        self._answer_id = answer_id
        self._choice = choice
        self._reader = told.reading.make_reader()

    def read(self, piece: Piece) -> tuple[Piece, dict[str, Any]]:
        """The piece with the user's text alone, and what a frame carries beside it: `reasoning_content` and
        `tool_calls`, as in OpenAI's streamed deltas."""
        text = reasoning = ""
        calls = []
        for part in self._reader.push(piece.text, piece.is_last):
            if isinstance(part, Content):
                text += part.text
            elif isinstance(part, CallDelta):
                calls.append(self._told.reading.call_entry(self._answer_id, self._choice, part))
            elif self._told.include_reasoning:
                reasoning += part.text
        beside: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if calls:
            beside["tool_calls"] = calls
        reason = finish_reason(piece.finish_reason, self._reader.num_calls)
        return piece._replace(text=text, finish_reason=reason), beside
