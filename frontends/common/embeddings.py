"""The embeddings of one API call: its inputs go out so many at a time, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from frontends.common.generation import Options, Submitter
from inferengine.client import Embedding, Submission
from inferengine.errors import InferEngineError

IN_FLIGHT = 256  # inputs of one call: a whole batch of an engine, and no queue of its own beside everybody else's
BUSY = ("overloaded", "rate_limited")


class Embeddings:
    """Inputs that wait, run, and have their vectors. An engine that has no room for all of them at a time gets fewer: a
    worker whose input is refused leaves it to the others, and the last one alone is told to come back later."""

    def __init__(
        self,
        engine: Submitter,
        prompts: Sequence[Sequence[int]],
        names: Sequence[str],
        pooling: str,
        options: Options,
    ) -> None:
        """`names[i]` is what the request calls `prompts[i]`: an input that an engine refuses is refused under it.
        `pooling` empty: the engine's own."""
        self._engine = engine
        self._prompts = prompts
        self._names = names
        self._pooling = pooling
        self._options = options
        self._waiting = deque(range(len(prompts)))
        self._found: dict[int, Embedding] = {}
        self._open: set[Submission] = set()
        self._num_workers = min(IN_FLIGHT, len(prompts))
        self._began_s = 0.0
        self._error: InferEngineError | None = None

    async def collect(self) -> list[Embedding]:
        """All of them. The failure of one is the call's; the others are cancelled then. Raises InferEngineError."""
        self._began_s = asyncio.get_running_loop().time()
        workers = [asyncio.create_task(self._work()) for _ in range(self._num_workers)]
        try:
            await asyncio.gather(*workers)
        except InferEngineError as error:
            raise self._error or error from None
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self.cancel()
        return [self._found[index] for index in range(len(self._prompts))]

    def cancel(self) -> None:
        """End it in the engines. Any number of times."""
        for submission in self._open:
            submission.cancel()

    def abandon(self, error: InferEngineError) -> None:
        """End it on this side at once, whatever the engines do: `collect` raises `error`."""
        self._error = error
        for submission in list(self._open):
            submission.abandon(error)

    async def _work(self) -> None:
        """One input after the other, while there are any."""
        while self._waiting:
            index, alone = self._waiting.popleft(), self._num_workers == 1
            try:
                self._found[index] = await self._embed(index)
            except InferEngineError as error:
                if alone or error.code not in BUSY:
                    raise
                self._waiting.appendleft(index)
                if self._num_workers > 1:
                    break
        self._num_workers -= 1

    async def _embed(self, index: int) -> Embedding:
        if self._error is not None:
            raise self._error
        options, deadline_s = self._options, self._options.deadline_s
        if deadline_s is not None:
            deadline_s -= asyncio.get_running_loop().time() - self._began_s
        submission = self._engine.submit(
            self._prompts[index],
            None,
            reply="embedding",
            pooling=self._pooling,
            priority=options.priority,
            tenant=options.tenant,
            salt=options.salt,
            deadline_s=deadline_s,
            label=options.label,
        )
        self._open.add(submission)
        try:
            embedding = await submission.embedding()
        except InferEngineError as error:
            if error.field == "prompt":
                error.field = self._names[index]
            self._open.discard(submission)
            raise
        self._open.discard(submission)
        return embedding
