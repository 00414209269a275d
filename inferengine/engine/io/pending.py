"""PendingSubmissions: submissions whose prompt is being tokenized or whose grammar is being compiled.

Each is answered when both are done, when one of them fails, or when it takes too long. Used by the I/O thread only; the
work itself is done in other threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from inferengine.core.constraints import Grammar
from inferengine.engine.io.connection import Connection
from inferengine.engine.io.output_log import Submission
from inferengine.engine.io.resume import GrammarReplay, PriorOutputs
from inferengine.engine.services.grammars import GrammarService
from inferengine.engine.services.tokenization import TextService
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output.spec import GrammarSpec
from inferengine.wire.messages import Attach, Submit

if TYPE_CHECKING:
    from inferengine.structured_output.compiler import Ticket

TEXT_TIMEOUT_S = 30.0  # longest that a request waits for its prompt to be tokenized
RETRY_AFTER_S = 5.0


@dataclass(eq=False)
class PendingSubmission:
    """A submission that waits, and who wants to read it."""

    submission: Submission
    message: Submit
    deadline_s: float | None
    readers: list[tuple[Connection, Submit | Attach]]
    prompt: array[int] | None  # None: being tokenized
    spec: GrammarSpec | None
    grammars: list[Grammar]  # empty: none asked for, or being compiled
    give_up_s: float  # when the grammar has taken too long
    text_by_s: float  # when the text has
    ticket: Ticket | None = None  # for what the grammar's compiler does
    outputs: PriorOutputs | None = None  # what an engine before this one gave, by choice

    @property
    def complete(self) -> bool:
        """Whether the prompt is tokenized and the grammar, if any, compiled."""
        return self.prompt is not None and (self.spec is None or bool(self.grammars))

    def is_read_as(self, connection: Connection, streams: range) -> bool:
        """Whether this connection reads one of its choices as one of these streams."""
        count = self.submission.params.n
        return any(
            reader is connection and wanted.stream < streams.stop and streams.start < wanted.stream + count
            for reader, wanted in self.readers
        )


class PendingSubmissions:
    """All pending submissions by id. Each is removed before `ready` or `refuse` is called with it, once."""

    def __init__(
        self,
        texts: TextService,
        grammars: GrammarService,
        replay: GrammarReplay,
        *,
        grammar_timeout_s: float,
        ready: Callable[[PendingSubmission, array[int]], None],
        refuse: Callable[[PendingSubmission, InferEngineError], None],
    ) -> None:
        """`ready` gets the prompt's tokens too."""
        self._texts = texts
        self._grammars = grammars
        self._replay = replay
        self._grammar_timeout_s = grammar_timeout_s
        self._ready = ready
        self._refuse = refuse
        self._items: dict[bytes, PendingSubmission] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[PendingSubmission]:
        return iter(list(self._items.values()))

    def get(self, id: bytes) -> PendingSubmission | None:
        """The submission of this id, if it waits."""
        return self._items.get(id)

    def begin(self, item: PendingSubmission, *, vocab_size: int, eos_token_ids: list[int], max_model_len: int) -> None:
        """Have the text tokenized and the grammar compiled. Raises InferEngineError where that cannot begin."""
        message, submission = item.message, item.submission
        self._items[submission.id] = item
        try:
            if item.spec is not None:
                outputs, params = item.outputs, submission.params
                if outputs is not None:
                    params = params.replace(n=sum(part is not None for part in outputs))
                item.ticket = self._grammars.compile(
                    item.spec,
                    params,
                    vocab_size,
                    eos_token_ids,
                    partial(self._compiled, item),
                    tenant=submission.tenant,
                )
            if item.prompt is None:
                self._texts.tokenize(message.text, message.messages, max_model_len, partial(self._tokenized, item))
        except InferEngineError:
            self.forget(item)
            raise

    def forget(self, item: PendingSubmission) -> None:
        """Remove it, and stop compiling its grammar."""
        self._items.pop(item.submission.id, None)
        if item.ticket is not None:
            self._grammars.cancel(item.ticket)
            item.ticket = None  # it leads back to the item: grammars would wait for the garbage collector

    def give_up(self, item: PendingSubmission, error: InferEngineError) -> None:
        """Refuse it."""
        self.forget(item)
        self._refuse(item, error)

    def tick(self, now: float) -> None:
        """Refuse what waits too long: for its grammar, for its text, or beyond its own deadline."""
        for item in self:
            if item.deadline_s is not None and now >= item.deadline_s:
                self.give_up(item, InferEngineError("deadline_exceeded", "The request's deadline passed."))
            elif item.prompt is None and now > item.text_by_s:
                message = f"The prompt could not be tokenized in {TEXT_TIMEOUT_S:g} s."
                self.give_up(item, InferEngineError("overloaded", message, retry_after_s=RETRY_AFTER_S))
            elif item.ticket is not None and not item.grammars:
                if self._grammars.is_starting:
                    item.give_up_s = now + self._grammar_timeout_s
                elif now > item.give_up_s:
                    self.give_up(item, self._too_late(item.ticket))

    def _too_late(self, ticket: Ticket) -> InferEngineError:
        if self._grammars.is_slow(ticket):
            return InvalidRequest("grammar", f"could not be compiled in {self._grammar_timeout_s:g} s: simplify it")
        message = f"The grammars of others took {self._grammar_timeout_s:g} s: this one was not compiled yet."
        return InferEngineError("overloaded", message, field="grammar", retry_after_s=self._grammar_timeout_s)

    def extend_deadlines(self, paused_s: float) -> None:
        """Extend all time limits: this process did not run for so long, so nothing was compiled or tokenized."""
        for item in self:
            item.give_up_s += paused_s
            item.text_by_s += paused_s

    def _tokenized(self, item: PendingSubmission, result: list[int] | InferEngineError) -> None:
        if isinstance(result, list):
            item.prompt = array("I", result)
        self._go_on(item, result if isinstance(result, InferEngineError) else None)

    def _compiled(self, item: PendingSubmission, result: list[Grammar] | InferEngineError) -> None:
        if not self._is_waiting(item):
            return
        if isinstance(result, list) and item.outputs is not None and any(item.outputs):
            advanced, is_wanted = partial(self._advanced, item), partial(self._is_waiting, item)
            self._replay.advance(result, item.outputs, advanced, is_wanted)
        else:
            self._advanced(item, result)

    def _advanced(self, item: PendingSubmission, result: list[Grammar] | InferEngineError) -> None:
        if isinstance(result, list):
            item.grammars = result
        self._go_on(item, result if isinstance(result, InferEngineError) else None)

    def _is_waiting(self, item: PendingSubmission) -> bool:
        """Whether it was neither cancelled nor refused meanwhile. From any thread."""
        return self._items.get(item.submission.id) is item

    def _go_on(self, item: PendingSubmission, error: InferEngineError | None) -> None:
        """One of the things that a submission waits for is done."""
        if not self._is_waiting(item):
            return  # cancelled or refused meanwhile, and answered
        if error is not None:
            self.give_up(item, error)
        elif item.complete and item.prompt is not None:
            self.forget(item)
            self._ready(item, item.prompt)
