"""What a client has asked its engine and not been answered yet: pings, model files, operations.

Sent again after a reconnect, because asking twice does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inferengine.client.streams import Answer, error_from
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Admin, AdminReply, Message, Model, ModelFiles, Ping, Pong


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
