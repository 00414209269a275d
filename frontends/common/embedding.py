"""The embeddings of one API call: its inputs go out so many at a time, and are answered in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from frontends.common.generation import Options, Submitter
from inferengine.client import Embedding, Submission
from inferengine.errors import InferEngineError

IN_FLIGHT = 256  # inputs of one call: a whole batch of an engine, and no queue of its own beside everybody else's


class Embeddings:
    """Inputs that wait, run, and have their vectors. Raises InferEngineError from `collect` alone."""

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
        self._open: list[Submission] = []
        self._error: InferEngineError | None = None

    async def collect(self) -> list[Embedding]:
        """All of them. The failure of one is the call's; the others are cancelled then."""
        began_s = asyncio.get_running_loop().time()
        found: list[Embedding] = []
        try:
            while len(found) < len(self._prompts):
                while len(self._open) < IN_FLIGHT and len(found) + len(self._open) < len(self._prompts):
                    self._submit(len(found) + len(self._open), began_s)
                found.append(await self._open[0].embedding())
                del self._open[0]
        except InferEngineError as error:
            self.cancel()
            if error.field == "prompt":
                error.field = self._names[len(found)]
            raise self._error or error from None
        return found

    def cancel(self) -> None:
        """End it in the engines. Any number of times."""
        for submission in self._open:
            submission.cancel()

    def abandon(self, error: InferEngineError) -> None:
        """End it on this side at once, whatever the engines do: `collect` raises `error`."""
        self._error = error
        for submission in self._open:
            submission.abandon(error)

    def _submit(self, index: int, began_s: float) -> None:
        if self._error is not None:
            raise self._error
        options, deadline_s = self._options, self._options.deadline_s
        if deadline_s is not None:
            deadline_s -= asyncio.get_running_loop().time() - began_s
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
        self._open.append(submission)
