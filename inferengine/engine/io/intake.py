"""Intake: turn SUBMIT messages into core Requests. No other module does.

Everything is validated here, whether or not a front end has checked it before: direct producers skip the front ends. A
SUBMIT is answered at once by ACCEPT, or by a REJECT that names the field and the remedy, whatever the loop is doing.
One with text or a grammar is pending first: it is answered when its prompt is tokenized and its grammar compiled (both
in other threads), when one of them fails, or when it takes too long.

A request that resumes brings the output that an earlier engine gave. It is then in the state of one that was preempted:
its tokens are known and none of them is computed. What is drawn next depends on (seed, position) and on the tokens, so
the whole output is what one engine would have given.

Used by the I/O thread only.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from inferengine.config import Config, LimitsConfig
from inferengine.core.constraints import Grammar
from inferengine.core.scheduler.queues import admit, check_prompt, resolve_max_tokens
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Request, Share, choice_seed, make_share
from inferengine.engine.counters import Counters
from inferengine.engine.io.publisher import Connection, OutputLog, PriorOutputs, Publisher, SubmittedRequest
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.loop import EngineRef, LoadedEngine
from inferengine.engine.model_info import ModelCard
from inferengine.engine.services.adapters import AdapterService
from inferengine.engine.services.preparation import (
    GrammarReplay,
    GrammarService,
    TextService,
    num_characters,
)
from inferengine.errors import InferEngineError, InvalidRequest, bounded
from inferengine.sampling_params import MAX_PROMPT_LOGPROBS, POOLINGS, SamplingParams, from_map, of_choice, validate
from inferengine.structured_output.spec import GrammarSpec, grammar_from_list, validate_grammar
from inferengine.text import CONTEXT_TOKENS
from inferengine.wire import messages
from inferengine.wire.messages import DRAINING, MAX_STALLS, READY, Accept, Attach, Cancel, Reject, Submit

if TYPE_CHECKING:
    from inferengine.structured_output.compiler import Ticket

MAX_READERS = 64  # of one request: each step is sent to all of them
CANCELLED = ("cancelled", "The request was cancelled.")
NOT_KEPT = ("not_found", "There is no such request, or it is not kept any more.")
RESUMED_FACTOR = 2  # times the queue's limits, for requests that an earlier engine had accepted
TEXT_TIMEOUT_S = 30.0  # longest that a request waits for its prompt to be tokenized
RETRY_AFTER_S = 5.0
MAX_PLACED_BYTES = 64 * 1024  # of keys of placements between two STATUS
TOKENS_PER_TURN = 2000  # of before, detokenized in a turn of the I/O thread for new readers: a few milliseconds
ENDING_RETRY_S = 0.1  # before a client may resume a request that is being cancelled because its connection was lost


def check_submit(
    message: Submit,
    limits: LimitsConfig,
    *,
    vocab_size: int,
    has_embeddings: bool,
    has_text: bool,
    has_tokens: bool,
    scores: bool,
) -> SamplingParams:
    """Check a SUBMIT and return its sampling parameters. `has_embeddings`, `has_text` and `has_tokens` say what the
    engine can give, `scores` that its vectors are scores of pairs. Raises InvalidRequest."""
    params = from_map(message.params)
    validate(params, vocab_size=vocab_size, limits=limits)
    if message.reply == "tokens" and params.stop:
        raise InvalidRequest("params.stop", 'stop strings need reply "text" or "both"')
    if message.reply == "embedding" or message.pooling:
        _check_embedding(message, params, has_embeddings)
    elif not has_tokens:
        makes = "scores of pairs (/v1/rerank, /v1/score)" if scores else "embeddings"
        raise InvalidRequest("model", f"it makes {makes} alone: ask for those", code="unsupported")
    if scores and message.pooling not in ("", "cls"):
        raise InvalidRequest("pooling", "a score is made of the first token's state: leave it out")
    if (message.reply in ("text", "both") or message.prompt is None) and not has_text:
        raise InvalidRequest("reply", "this model has no tokenizer: send and read token ids", code="unsupported")
    if message.grammar is not None:
        validate_grammar(grammar_from_list(message.grammar), limits)
    if message.text is not None and not message.text:
        raise InvalidRequest("text", "must not be empty")
    if message.messages is not None and not message.messages:
        raise InvalidRequest("messages", "must not be empty")
    most = limits.max_text_characters
    if num_characters(message.text, message.messages) > most:
        raise InvalidRequest("prompt", f"must have at most {most} characters", code="request_too_large")
    return params


def _check_embedding(message: Submit, params: SamplingParams, has_embeddings: bool) -> None:
    """Refuse parameters of generation in a request for an embedding, where they would have no effect."""
    if message.reply != "embedding":
        raise InvalidRequest("pooling", 'is for reply "embedding" only')
    if not has_embeddings:
        raise InvalidRequest("reply", "this engine gives no embeddings", code="unsupported")
    if message.pooling and message.pooling not in POOLINGS:
        raise InvalidRequest("pooling", f"must be one of {', '.join(POOLINGS)}")
    if message.prediction:
        raise InvalidRequest("prediction", "an embedding has no output to predict: leave it out")
    if message.grammar is not None:
        raise InvalidRequest("grammar", "an embedding has no output that could match it: leave it out")
    if params != SamplingParams():
        raise InvalidRequest("params", "an embedding draws no tokens: leave them out")


def read_resume(message: Submit, params: SamplingParams, *, vocab_size: int, max_model_len: int) -> PriorOutputs | None:
    """Read the output so far of each choice; None for a request that begins. Raises InferEngineError."""
    if message.stalls >= MAX_STALLS:
        text = f"The request was in flight at {message.stalls} stalled steps: it is not run again."
        raise InferEngineError("engine_stalled", text, field="stalls")
    if message.resume is None:
        return None
    if message.reply == "embedding":
        raise InvalidRequest("resume", "an embedding has no output to go on from: leave it out")
    if len(message.resume) != params.n:
        raise InvalidRequest("resume", f"must have one entry for each of the {params.n} choices (params.n)")
    for choice, part in enumerate(message.resume):  # before anything is done that takes longer for more of them
        if part is not None and len(part) > 4 * max_model_len:
            raise InvalidRequest(
                f"resume[{choice}]", f"has {len(part) // 4} tokens; the model's length allows {max_model_len}"
            )
    outputs = [None if part is None else messages.from_u32(part, "resume") for part in message.resume]
    if all(output is None for output in outputs):
        raise InvalidRequest("resume", "every choice has ended: there is nothing to go on with")
    for choice, output in enumerate(outputs):
        if output and (highest := max(output)) >= vocab_size:
            raise InvalidRequest(
                f"resume[{choice}]", f"token id {highest} is outside the vocabulary of {vocab_size}: send what came"
            )
    if params.seed is None and not params.is_greedy and any(outputs):
        raise InvalidRequest("params.seed", "is missing: the output so far was drawn with one (ACCEPT told it)")
    return outputs


def share_of(message: Submit, connection: Connection) -> Share:
    """Return whose share of the engine a request uses: its tenant's, divided by what its front end says of the client,
    or that client's, or without either its connection's."""
    names = (message.tenant, *message.share) if message.tenant else message.share
    return make_share(*(names or (connection.routing_id.hex(),)))


def read_prediction(message: Submit, *, vocab_size: int, max_model_len: int) -> Sequence[int]:
    """Read what the client takes the output to be; empty where it says nothing. Raises InvalidRequest."""
    if not message.prediction:
        return ()
    num_tokens = len(message.prediction) // 4
    if num_tokens > max_model_len:
        raise InvalidRequest("prediction", f"has {num_tokens} tokens; the model's length allows {max_model_len}")
    prediction = messages.from_u32(message.prediction, "prediction")
    if (highest := max(prediction)) >= vocab_size:
        text = f"token id {highest} is outside the vocabulary of {vocab_size}: use the model's tokenizer"
        raise InvalidRequest("prediction", text)
    return prediction


def check_outputs(
    outputs: PriorOutputs, params: SamplingParams, max_tokens: int, eos_token_ids: frozenset[int]
) -> None:
    """Raise InvalidRequest for output that the request could not have given: too much of it, or some after its end."""
    stops = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= eos_token_ids
    for choice, output in enumerate(outputs):
        if output is None:
            continue
        if len(output) > max_tokens:
            raise InvalidRequest(
                f"resume[{choice}]", f"has {len(output)} tokens; max_tokens and the model's length allow {max_tokens}"
            )
        begin = max(params.min_tokens - 1, 0)
        if stops and any(token in stops for token in output[begin:-1]):
            raise InvalidRequest(f"resume[{choice}]", "has tokens after a stop token, where the choice had ended")


@dataclass(eq=False)
class PendingSubmission:
    """A submission that is not answered yet, with the streams that will read it."""

    submission: SubmittedRequest
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
    # Choices that never run and end with the ACCEPT, each with the stop string that its reader found.
    cancelled: dict[int, tuple[int, str] | None] = field(default_factory=dict)

    @property
    def live(self) -> set[int]:
        """The choices that have not ended at an earlier engine."""
        count, outputs = self.submission.params.n, self.outputs
        return {choice for choice in range(count) if outputs is None or outputs[choice] is not None}

    @property
    def complete(self) -> bool:
        """Whether the prompt is tokenized and the grammar, if any, compiled."""
        return self.prompt is not None and (self.spec is None or bool(self.grammars))

    def is_read_as(self, connection: Connection, streams: range) -> bool:
        """Return whether this connection will read one of its choices as one of these streams."""
        count = self.submission.params.n
        return any(
            reader is connection and wanted.stream < streams.stop and streams.start < wanted.stream + count
            for reader, wanted in self.readers
        )


class WaitingReader(NamedTuple):
    """A reader of text who is added, and told so, when the output so far has been detokenized."""

    connection: Connection
    message: Submit | Attach
    submission: SubmittedRequest
    attached: bool  # else it submitted the request
    searches: bool  # the text is needed for its stop strings, whoever reads it


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
        """`ready` and `refuse` are called with the submission; `ready` also gets the prompt's tokens."""
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
        """Return the pending submission with this id, or None."""
        return self._items.get(id)

    def begin(self, item: PendingSubmission, *, vocab_size: int, eos_token_ids: list[int], max_model_len: int) -> None:
        """Start to tokenize the text and to compile the grammar. Raises InferEngineError if that is not possible."""
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
                    tenant=submission.share[0],
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
        """Remove a submission and refuse it with `error`."""
        self.forget(item)
        self._refuse(item, error)

    def tick(self, now: float) -> None:
        """Refuse submissions that have waited too long for grammar or text, or beyond their deadline."""
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
        """Return whether a submission is still pending: neither cancelled nor refused. In any thread."""
        return self._items.get(item.submission.id) is item

    def _go_on(self, item: PendingSubmission, error: InferEngineError | None) -> None:
        """Call `ready` or `refuse` once tokenizing and compiling are done, or one of them has failed."""
        if not self._is_waiting(item):
            return  # cancelled or refused meanwhile, and answered
        if error is not None:
            self.give_up(item, error)
        elif item.complete and item.prompt is not None:
            self.forget(item)
            self._ready(item, item.prompt)


class Placements:
    """Collects the keys of beginnings and sessions of accepted requests, which are published to all front ends.

    Kept are at most MAX_PLACED_BYTES of them until they are taken.
    """

    def __init__(self) -> None:
        self._beginnings = bytearray()
        self._sessions = bytearray()

    def add(self, message: Submit) -> None:
        """Add the keys of an accepted request."""
        for kept, keys in ((self._beginnings, message.beginnings), (self._sessions, message.session)):
            if len(kept) + len(keys) <= MAX_PLACED_BYTES:
                kept += keys

    def take(self) -> list[bytes]:
        """Return the collected keys of beginnings and of sessions, each as u64[], and drop them."""
        if not self._beginnings and not self._sessions:
            return []
        taken = [bytes(self._beginnings), bytes(self._sessions)]
        self._beginnings.clear()
        self._sessions.clear()
        return taken


class Intake:
    """Handles SUBMIT, ATTACH and CANCEL of all connections."""

    def __init__(
        self,
        config: Config,
        lifecycle: Lifecycle,
        card: ModelCard,
        engine: EngineRef,
        publisher: Publisher,
        counters: Counters,
        texts: TextService,
        grammars: GrammarService,
        replay: GrammarReplay,
        adapters: AdapterService,
    ) -> None:
        self.placements = Placements()
        self._text_readers: deque[WaitingReader] = deque()
        self._engine = engine
        self._config = config
        self._lifecycle = lifecycle
        self._publisher = publisher
        self._counters = counters
        self._texts = texts
        self._adapters = adapters
        self._eos, self._pooling = frozenset(card.eos_token_ids), card.pooling
        self._seeds = random.Random(config.engine.seed or None)
        self._next_uid = 1
        self._pending = PendingSubmissions(
            texts,
            grammars,
            replay,
            grammar_timeout_s=config.limits.grammar_timeout_s,
            ready=self._on_prepared,
            refuse=self._refuse,
        )

    @property
    def has_unanswered(self) -> bool:
        """Whether something is being tokenized, compiled or detokenized."""
        return bool(self._pending) or bool(self._text_readers)

    # -- messages ----------------------------------------------------------------------------------------------------

    def submit(self, connection: Connection, message: Submit, now: float) -> None:
        """Handle SUBMIT: answer by ACCEPT or REJECT. An id that is known already is attached to."""
        known = self._publisher.submissions.get(message.id)
        if known is not None and known.abandoned and (message.resume is not None or known.was_cut or not known.ended):
            if not known.ended and message.resume is not None:
                text = "The request is being cancelled, because its reader was lost: send it again."
                self._reject(
                    connection, message, InferEngineError("overloaded", text, retry_after_s=ENDING_RETRY_S), now
                )
                return
            self._publisher.forget(known)  # its reader is back with its output so far, perhaps none: it begins anew
        elif known is not None and message.resume is not None and known.was_lost:
            self._publisher.forget(known)  # it goes on from its output, elsewhere
        elif known is not None:
            self._attach(connection, message, known, now)
            return
        submission: SubmittedRequest | None = None
        try:
            engine = self._require_ready()
            params = check_submit(
                message,
                self._config.limits,
                vocab_size=engine.vocab_size,
                has_embeddings=engine.embedding_size > 0,
                has_text=self._texts.available,
                has_tokens=engine.makes_tokens,
                scores=engine.scores,
            )
            outputs = read_resume(
                message, params, vocab_size=engine.vocab_size, max_model_len=engine.limits.max_model_len
            )
            spec = None if message.grammar is None else grammar_from_list(message.grammar)
            engine.check(params, spec, resumes=outputs is not None)
            self._check_streams(connection, message.stream, params.n)
            self._adapters.resolve(message.adapter)
            submission = SubmittedRequest(
                message.id,
                params,
                tenant=message.tenant,
                share=share_of(message, connection),
                detached=message.detached,
                label=message.label,
                note=message.note,
                pooling=(message.pooling or self._pooling) if message.reply == "embedding" else None,
                traceparent=message.traceparent,
            )
            deadline_s = None if message.deadline_ms is None else now + message.deadline_ms / 1e3
            self._publisher.register(submission)
            prompt = None if message.prompt is None else messages.from_u32(message.prompt, "prompt")
            if prompt is not None and message.grammar is None:
                self._accept(engine, submission, message, prompt, deadline_s, now, outputs=outputs)
                self._read(connection, message, submission, now, attached=False)
            else:
                self._prepare(engine, connection, submission, message, prompt, outputs, deadline_s, now)
        except InferEngineError as error:
            if submission is not None:
                self._publisher.forget(submission)
            self._reject(connection, message, error, now)

    def attach(self, connection: Connection, message: Attach, now: float) -> None:
        """Handle ATTACH: send the output of a request from a cursor on."""
        known = self._publisher.submissions.get(message.id)
        if known is None:
            self._reject(connection, message, InferEngineError(*NOT_KEPT, field="id"), now)
        else:
            self._attach(connection, message, known, now)

    def cancel(self, connection: Connection, message: Cancel, now: float) -> None:
        """Handle CANCEL: end streams of this connection, or requests by id. Unknown ones are ignored.

        A pending submission is refused when all of its choices are cancelled; before that the others go on."""
        if message.leave:
            self._leave(connection, set(message.streams))
            message = message.replace(streams=())
        stops = {found.stream: (found.num_tokens, found.text) for found in message.stopped}
        for stream, found_stop in stops.items():
            if (subscription := connection.streams.get(stream)) is not None:
                subscription.log.found_stop = found_stop
        logs: list[OutputLog] = [
            connection.streams[stream].log for stream in message.streams if stream in connection.streams
        ]
        for id in message.ids:
            submission = self._publisher.submissions.get(id)
            if submission is not None:
                logs += submission.logs
        ids, streams = set(message.ids), set(message.streams)
        for item in self._pending:
            for reader, wanted in item.readers:
                for choice in _named(wanted, item.submission, streams) if reader is connection else ():
                    item.cancelled.setdefault(choice, stops.get(wanted.stream + choice))
            if item.submission.id in ids or item.live <= item.cancelled.keys():
                self._pending.give_up(item, InferEngineError(*CANCELLED))
        logs += self._cancel_text_readers(connection, streams, stops)
        self._end([log.uid for log in logs if log.ended is None], "abort", CANCELLED)

    def _cancel_text_readers(
        self, connection: Connection, streams: set[int], stops: Mapping[int, tuple[int, str]]
    ) -> list[OutputLog]:
        """Return the logs of those of these streams that wait for text. A reader of no others is answered."""
        logs: list[OutputLog] = []
        for waiting in list(self._text_readers):
            wanted, submission = waiting.message, waiting.submission
            if waiting.connection is not connection or not (named := _named(wanted, submission, streams)):
                continue
            for choice in named:
                log = submission.logs[choice]
                log.found_stop = stops.get(wanted.stream + choice, log.found_stop)
                logs.append(log)
            if named == _choices(wanted, submission):
                self._text_readers.remove(waiting)
                self._reject(connection, wanted, InferEngineError(*CANCELLED), self._lifecycle.clock())
        return logs

    def cancel_orphans(self, submissions: Sequence[SubmittedRequest]) -> None:
        """Cancel submissions whose only readers lost their connection, unless somebody waits for their text."""
        submissions = self._unawaited(submissions)
        for submission in submissions:
            submission.abandoned = True
        self.abandon(submissions, CANCELLED)

    def abandon(self, submissions: Sequence[SubmittedRequest], detail: tuple[str, str]) -> None:
        """Abort these submissions; `detail` is their terminal detail."""
        self._end([log.uid for each in submissions for log in each.logs if log.ended is None], "abort", detail)

    def abandon_unread(self) -> None:
        """Drop pending submissions without a reader."""
        for item in self._pending:
            if not item.submission.detached and all(reader.dropped for reader, _ in item.readers):
                self._pending.forget(item)
                self._publisher.forget(item.submission)
        gone = [waiting for waiting in self._text_readers if waiting.connection.dropped]
        self.cancel_orphans([submission for submission in self._orphans(gone) if not submission.detached])

    def _orphans(self, gone: list[WaitingReader]) -> list[SubmittedRequest]:
        """Return the unfinished submissions that these readers submitted, or kept running, if nobody else reads
        them."""
        others = {id(waiting.submission) for waiting in self._text_readers if not waiting.connection.dropped}
        kept = (waiting for waiting in gone if not waiting.attached or not waiting.submission.detached)
        submitted = {id(waiting.submission): waiting.submission for waiting in kept}
        return [
            submission
            for key, submission in submitted.items()
            if key not in others and not submission.ended and not submission.num_subscriptions
        ]

    def refuse_waiting(self, error: InferEngineError) -> None:
        """Refuse all pending submissions, and readers who wait for text, with `error`."""
        for item in self._pending:
            self._pending.give_up(item, error)
        while self._text_readers:
            connection, message, *_ = self._text_readers.popleft()
            if not connection.dropped:
                self._reject(connection, message, error, self._lifecycle.clock())

    def tick(self, now: float) -> None:
        """Refuse pending submissions that have waited too long."""
        self._pending.tick(now)

    def extend_deadlines(self, paused_s: float) -> None:
        """Extend the time limits of pending submissions: the engine itself did not run for so long."""
        self._pending.extend_deadlines(paused_s)

    # -- from message to request -------------------------------------------------------------------------------------

    def _require_ready(self) -> LoadedEngine:
        state, engine = self._lifecycle.state, self._engine.engine
        if state != READY or engine is None:
            code, retry_after_s = ("draining", 5.0) if state == DRAINING else ("engine_unavailable", 2.0)
            raise InferEngineError(code, f"The engine is {state}.", retry_after_s=retry_after_s)
        return engine

    def _check_streams(self, connection: Connection, stream: int, count: int) -> None:
        if stream + count > messages.MAX_U32:
            raise InvalidRequest("stream", f"must be at most {messages.MAX_U32 - count}")
        streams = range(stream, stream + count)
        taken = any(each in connection.streams for each in streams)
        waits = any(
            reader is connection and wanted.stream < streams.stop and stream < wanted.stream + submission.params.n
            for reader, wanted, submission, *_ in self._text_readers
        )
        if taken or waits or any(item.is_read_as(connection, streams) for item in self._pending):
            raise InvalidRequest("stream", "is in use on this connection: choose another number", code="conflict")

    def _prepare(
        self,
        engine: LoadedEngine,
        connection: Connection,
        submission: SubmittedRequest,
        message: Submit,
        prompt: array[int] | None,
        outputs: PriorOutputs | None,
        deadline_s: float | None,
        now: float,
    ) -> None:
        """Start to tokenize the text and to compile the grammar. The answer follows when both are done."""
        self._admit(engine, submission, 1, deadline_s, now, resumed=outputs is not None)
        spec = None if message.grammar is None else grammar_from_list(message.grammar)
        give_up_s = now + self._config.limits.grammar_timeout_s
        text_by_s = now + TEXT_TIMEOUT_S
        item = PendingSubmission(
            submission,
            message,
            deadline_s,
            [(connection, message)],
            prompt,
            spec,
            [],
            give_up_s,
            text_by_s,
            outputs=outputs,
        )
        self._pending.begin(
            item,
            vocab_size=engine.vocab_size,
            eos_token_ids=sorted(self._eos),
            max_model_len=engine.limits.max_model_len,
        )

    def _on_prepared(self, item: PendingSubmission, prompt: array[int]) -> None:
        """Submit a tokenized and compiled submission to the loop, and answer it."""
        submission, now = item.submission, self._lifecycle.clock()
        try:
            engine = self._require_ready()
            self._accept(
                engine,
                submission,
                item.message,
                prompt,
                item.deadline_s,
                now,
                item.spec,
                item.grammars,
                item.outputs,
                item.cancelled,
            )
        except InferEngineError as refusal:
            self._refuse(item, refusal)
            return
        for place, (connection, wanted) in enumerate(item.readers):
            self._read(connection, wanted, submission, now, attached=place > 0)
        rows = []
        for choice, found_stop in item.cancelled.items():
            submission.logs[choice].found_stop = found_stop
            rows.append(submission.logs[choice].row_without_core("abort", CANCELLED, now))
        if rows:
            self._publisher.publish(StepOutput(0, [], [], rows, -1), now)

    def _accept(
        self,
        engine: LoadedEngine,
        submission: SubmittedRequest,
        message: Submit,
        prompt: array[int],
        deadline_s: float | None,
        now: float,
        spec: GrammarSpec | None = None,
        grammars: Sequence[Grammar] = (),
        outputs: PriorOutputs | None = None,
        cancelled: Collection[int] = (),
    ) -> None:
        """Hand the choices to the loop, those that are `cancelled` left out. Raises InferEngineError; then nothing has
        happened."""
        params = submission.params
        if submission.pooling is None:
            max_tokens = resolve_max_tokens(len(prompt), params.max_tokens, engine.limits, min_tokens=params.min_tokens)
        else:
            check_prompt(len(prompt), engine.limits)
            max_tokens = 0
        if (highest := max(prompt)) >= engine.vocab_size:
            raise InvalidRequest(
                "prompt",
                f"token id {highest} is outside the vocabulary of {engine.vocab_size}: use the model's tokenizer",
            )
        if params.prompt_logprobs is not None and len(prompt) * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest("params.prompt_logprobs", f"at most {MAX_PROMPT_LOGPROBS} values for one prompt")
        if outputs is not None:
            check_outputs(outputs, params, max_tokens, self._eos)
        prediction = read_prediction(message, vocab_size=engine.vocab_size, max_model_len=engine.limits.max_model_len)
        self._admit(engine, submission, len(prompt), deadline_s, now, resumed=outputs is not None)
        submission.adapter = self._adapters.resolve(message.adapter)
        seed = params.seed
        if seed is None:
            seed = submission.seed = self._seeds.getrandbits(63)
        first = self._next_uid
        self._next_uid += params.n
        live = [choice for choice in range(params.n) if outputs is None or outputs[choice] is not None]
        if cancelled:
            grammars = [grammar for choice, grammar in zip(live, grammars, strict=False) if choice not in cancelled]
        running = [choice for choice in live if choice not in cancelled]
        requests = [
            Request(
                uid=first + choice,
                prompt_ids=prompt,
                params=of_choice(params, place),
                max_tokens=max_tokens,
                eos_token_ids=self._eos,
                seed=choice_seed(seed, choice),
                choice=choice,
                fork_of=None if place == 0 else first + running[0],
                priority=message.priority,
                tenant=message.tenant,
                share=submission.share,
                cache_salt=message.salt,
                arrival_s=now,
                deadline_s=deadline_s,
                grammar=spec,
                request_id=message.label or message.id.hex(),
                adapter=submission.adapter,
                emitted_ids=() if outputs is None else outputs[choice] or (),
                prediction_ids=prediction,
                pooling=submission.pooling,
            )
            for place, choice in enumerate(running)
        ]
        submission.num_prompt = len(prompt)
        if message.messages is None:  # the output continues the prompt's text
            submission.context_ids = prompt[-CONTEXT_TOKENS:].tolist()
        self._publisher.open(submission, range(first, first + params.n), now, outputs)
        self._counters.accepted(len(live), max_tokens)
        self.placements.add(message)
        engine.loop.submit(requests, grammars)

    def _admit(
        self,
        engine: LoadedEngine,
        submission: SubmittedRequest,
        num_prompt: int,
        deadline_s: float | None,
        now: float,
        *,
        resumed: bool = False,
    ) -> None:
        """Check the limits of the queue. Raises InferEngineError.

        `resumed`: an earlier engine had accepted the request. Limits are higher then: all requests of that engine may
        arrive at once.
        """
        requests, tokens = engine.loop.queued()
        requests_ahead, tokens_ahead = engine.loop.queued(submission.share)
        preparing = len(self._pending)
        tenant_requests, limits = 0, engine.limits
        if resumed:
            limits = replace(
                limits,
                max_queued_requests=limits.max_queued_requests * RESUMED_FACTOR + engine.loop.most_running,
                max_queued_tokens=limits.max_queued_tokens * RESUMED_FACTOR + limits.num_kv_tokens,
                max_tenant_requests=0,
            )
        if limits.max_tenant_requests:
            submissions = (log.submission for log in self._publisher.open_logs())
            tenant_requests = sum(each.tenant == submission.tenant and not each.abandoned for each in submissions)
        admit(
            num_prompt,
            submission.params.n,
            queued_requests=requests + preparing,
            queued_tokens=tokens,
            tokens_per_s=engine.loop.prefill_tokens_per_s,
            limits=limits,
            ahead=(requests_ahead + preparing, tokens_ahead),
            tenant_requests=tenant_requests,
            time_left_s=None if deadline_s is None else deadline_s - now,
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    def _attach(
        self, connection: Connection, message: Submit | Attach, submission: SubmittedRequest, now: float
    ) -> None:
        waiting = self._pending.get(submission.id)
        if waiting is not None and any(
            reader is connection and wanted.stream == message.stream for reader, wanted in waiting.readers
        ):
            return  # it was sent again; the answer comes when there is one
        if any(
            reader is connection and wanted.stream == message.stream and known is submission
            for reader, wanted, known, *_ in self._text_readers
        ):
            return  # likewise
        own = connection.streams.get(message.stream)
        if own is not None and own.log.submission is submission:  # the ACCEPT was lost; the stream goes on
            self._send_accept(connection, message, submission, now, attached=True)
            return
        try:
            self._check_streams(connection, message.stream, submission.params.n)
            num_readers = max((len(log.subscriptions) for log in submission.logs), default=0)
            if num_readers + (0 if waiting is None else len(waiting.readers)) >= MAX_READERS:
                raise InferEngineError("overloaded", f"{MAX_READERS} read it already.", retry_after_s=1.0)
            if message.reply == "embedding" and submission.pooling is None:
                raise InvalidRequest("reply", "that request generates: it gives no embedding")
            if message.reply in ("text", "both") and not self._texts.available:
                raise InvalidRequest("reply", "this model has no tokenizer: read token ids", code="unsupported")
        except InferEngineError as error:
            self._reject(connection, message, error, now)
            return
        if waiting is not None:
            waiting.readers.append((connection, message))
        else:
            self._read(connection, message, submission, now, attached=True)

    def _read(
        self,
        connection: Connection,
        message: Submit | Attach,
        submission: SubmittedRequest,
        now: float,
        *,
        attached: bool,
    ) -> None:
        """Add a reader, now or when the text of the output so far is made. The engine looks for the stop strings of
        who submits for text even if that reader is gone."""
        wants_text = message.reply in ("text", "both")
        searches = wants_text and isinstance(message, Submit) and not attached and bool(submission.params.stop)
        if searches:
            self._publisher.search_stops(submission)
        if wants_text and self._publisher.text_backlog(submission) > TOKENS_PER_TURN:
            if searches or not connection.dropped:
                self._text_readers.append(WaitingReader(connection, message, submission, attached, searches))
                if len(self._text_readers) == 1:
                    self._texts.deliver(self._detokenize)
            return
        if searches:
            self._publisher.add_text(submission)
        if not connection.dropped:
            self._add_reader(connection, message, submission, now, attached=attached)

    def _detokenize(self) -> None:
        """Detokenize for the first reader who waits for text, as much as other streams can wait for. Add the reader
        when little is left."""
        if not self._text_readers:
            return
        connection, message, submission, attached, searches = self._text_readers[0]
        is_kept = self._publisher.submissions.get(submission.id) is submission
        is_wanted = is_kept and (searches or not connection.dropped)
        if is_wanted and self._publisher.text_backlog(submission) > TOKENS_PER_TURN:
            self._publisher.detokenize(submission, TOKENS_PER_TURN)
        else:
            self._text_readers.popleft()
            now = self._lifecycle.clock()
            if is_wanted and searches:
                self._publisher.add_text(submission)
            if not connection.dropped and is_kept:
                self._add_reader(connection, message, submission, now, attached=attached)
            elif not connection.dropped:
                self._reject(connection, message, InferEngineError(*NOT_KEPT, field="id"), now)
        if self._text_readers:
            self._texts.deliver(self._detokenize)

    def _leave_text(self, connection: Connection, streams: set[int]) -> list[WaitingReader]:
        """Have those of this connection who wait for text as one of these streams read it no more. Returns those that
        read no other, forgotten."""
        gone: list[WaitingReader] = []
        for place, waiting in reversed(list(enumerate(self._text_readers))):
            left = _named(waiting.message, waiting.submission, streams) if waiting.connection is connection else []
            if left and left == _choices(waiting.message, waiting.submission):
                gone.append(waiting)
                del self._text_readers[place]
            elif left:
                self._text_readers[place] = waiting._replace(
                    message=_without(waiting.message, waiting.submission, left)
                )
        return gone

    def _add_reader(
        self,
        connection: Connection,
        message: Submit | Attach,
        submission: SubmittedRequest,
        now: float,
        *,
        attached: bool,
    ) -> None:
        cursors, in_tokens = _cursors(message), isinstance(message, Submit)
        if self._publisher.lacks_logprobs(submission, cursors, in_characters=message.reply == "text" and not in_tokens):
            text = "The log-probabilities from there on were lost with the engine that gave them."
            self._reject(connection, message, InferEngineError("engine_restarted", text), now)
            return
        self._send_accept(connection, message, submission, now, attached=attached)
        self._publisher.subscribe(connection, submission, message.stream, cursors, message.reply, in_tokens=in_tokens)
        self._publisher.flush(connection, now)

    def _send_accept(
        self,
        connection: Connection,
        message: Submit | Attach,
        submission: SubmittedRequest,
        now: float,
        *,
        attached: bool,
    ) -> None:
        note = submission.note if attached else b""
        answer = Accept(
            message.id, message.stream, submission.num_prompt, len(submission.logs), attached, note, submission.seed
        )
        connection.answer(messages.encode(answer), now)

    def _refuse(self, item: PendingSubmission, error: InferEngineError) -> None:
        self._publisher.forget(item.submission)
        for connection, wanted in item.readers:
            if not connection.dropped:
                self._reject(connection, wanted, error, self._lifecycle.clock())

    def _reject(self, connection: Connection, message: Submit | Attach, error: InferEngineError, now: float) -> None:
        self._counters.rejected[error.code] += 1
        after_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1e3)
        answer = Reject(
            message.id,
            message.stream,
            error.code,
            bounded(error.message),
            error.field,
            error.kind.retryable,
            after_ms,
        )
        connection.answer(messages.encode(answer), now)

    def _leave(self, connection: Connection, streams: set[int]) -> None:
        """Stop sending these streams to this connection, and cancel requests without another reader."""
        self.abandon(self._orphans(self._leave_text(connection, streams)), CANCELLED)
        for item in self._pending:
            for place, (reader, wanted) in reversed(list(enumerate(item.readers))):
                left = _named(wanted, item.submission, streams) if reader is connection else []
                if left and left == _choices(wanted, item.submission):
                    del item.readers[place]
                elif left:
                    item.readers[place] = (reader, _without(wanted, item.submission, left))
            if not item.readers:
                self._pending.forget(item)
                self._publisher.forget(item.submission)
        self.abandon(self._unawaited(self._publisher.leave(connection, streams)), CANCELLED)

    def _unawaited(self, submissions: Sequence[SubmittedRequest]) -> list[SubmittedRequest]:
        """Return those whose text nobody waits for, who would read them then."""
        awaited = {id(waiting.submission) for waiting in self._text_readers if not waiting.connection.dropped}
        return [submission for submission in submissions if id(submission) not in awaited]

    def _end(self, uids: list[int], reason: str, detail: tuple[str, str]) -> None:
        if uids and self._engine.engine is not None:
            self._engine.engine.loop.cancel(uids, reason, detail)


def _cursors(message: Submit | Attach) -> Sequence[int | None]:
    """Return the cursor of each choice; None for a choice whose end the reader has."""
    if isinstance(message, Attach):
        return message.cursors
    return [None if part is None else len(part) // 4 for part in message.resume or ()]


def _choices(message: Submit | Attach, submission: SubmittedRequest) -> list[int]:
    """Return the choices that a reader reads."""
    cursors = _cursors(message)
    return [choice for choice in range(submission.params.n) if choice >= len(cursors) or cursors[choice] is not None]


def _named(message: Submit | Attach, submission: SubmittedRequest, streams: set[int]) -> list[int]:
    """Return those of a reader's choices that it reads as one of these streams."""
    if not any(message.stream + choice in streams for choice in range(submission.params.n)):
        return []  # as of most that are pending
    return [choice for choice in _choices(message, submission) if message.stream + choice in streams]


def _without(message: Submit | Attach, submission: SubmittedRequest, left: Sequence[int]) -> Submit | Attach:
    """Return the message of a reader who does not read the choices `left`."""
    count = range(submission.params.n)
    if isinstance(message, Attach):
        held = message.cursors
        return message.replace(
            cursors=tuple(None if at in left else (held[at] if at < len(held) else 0) for at in count)
        )
    given = message.resume
    return message.replace(resume=tuple(None if at in left else (given[at] if given else b"") for at in count))
