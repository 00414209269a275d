"""PooledAttachment: reading a request on whose engine is not known, after a front end's restart for instance."""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.client.async_client import AsyncClient
from inferengine.client.submission import Stream, Submission
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Accept


class PooledAttachment:
    """An ATTACH for a request whose engine this pool does not know: each engine is asked in turn."""

    def __init__(
        self, clients: Sequence[AsyncClient], request_id: bytes, cursors: Sequence[int], n: int, reply: str
    ) -> None:
        self.id = request_id
        self.streams: list[Stream] = []
        self._clients = clients
        self._arguments = (cursors, n, reply)
        self._submission: Submission | None = None
        self._cancelled = self._left = False

    async def accepted(self) -> Accept:
        """Raises not_found when no engine has the request. `streams` is filled afterwards."""
        failure = InferEngineError("engine_unavailable", "No engine is connected.")
        for client in self._clients:
            try:
                submission = client.attach(self.id, *self._arguments)
                accept = await submission.accepted()
            except InferEngineError as error:
                failure = error
                if error.code in ("not_found", "engine_unavailable"):
                    continue
                break
            self._submission, self.streams = submission, submission.streams
            if self._cancelled:
                submission.cancel()
            if self._left:
                submission.leave()
            return accept
        raise failure

    def cancel(self) -> None:
        self._cancelled = True
        if self._submission is not None:
            self._submission.cancel()

    def leave(self) -> None:
        """As Submission.leave."""
        self._left = True
        if self._submission is not None:
            self._submission.leave()
