"""UpstreamLoop: the engine's loop when other servers compute. It replaces EngineLoop; all else is the same.

Each running sequence is a task that reads one streamed completion. Tokens that arrive in one turn of the event loop are
published together, like the tokens of a step. There is no KV cache and no scheduler: a sequence waits for one of
`engine.max_num_seqs` places in the order of `scheduler.policy`, and the upstream does the rest.

A slow reader delays no other request: its tokens wait in the output log, whose size is bounded by the request's length.
A reader that acknowledges nothing for `wire.stall_limit_s` has its request cancelled. When the I/O thread is far
behind, the event loop waits for it, and backpressure reaches the upstreams through their TCP connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import uvloop

from inferengine.config import Config
from inferengine.core.constraints import Grammar
from inferengine.core.executor import Capacity, KVGroup, Progress, TokenLogprobs
from inferengine.core.scheduler.queues import POLICIES
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.scheduler.scheduler_state import SchedulerSnapshot, SchedulerStats
from inferengine.core.sequence import (
    GRAMMAR_COMPLETE,
    FinishDetail,
    Finished,
    Request,
    Sequence,
    SequenceStatus,
    Share,
    refusal,
    stop_reason,
    terminal_row,
)
from inferengine.core.step_time import Roofline
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.loop import IDLE_TURN_S, LoopOutput, StepObserver
from inferengine.engine.model_info import ModelCard
from inferengine.engine.upstream.completions import (
    OUTSIDE,
    UpstreamChoice,
    UpstreamUsage,
    check_params,
    completion_body,
    ids_of_text,
    read_logprobs,
)
from inferengine.engine.upstream.servers import Servers, UpstreamFailed, UpstreamServer
from inferengine.errors import ConfigError, InferEngineError, InvalidRequest
from inferengine.gguf.checkpoint import config_values
from inferengine.gguf.reader import SUFFIX
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text.tokenizer import Tokenizer, read_json

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 512
MAX_MODEL_LEN = 32_768  # used if neither the upstream nor the configuration names a length
MOST_QUIET_READS = 65_536  # reads of a stream in a row that bring no output
MOST_LOST = 3  # lost connections of one request before its first token, after which it is given up
MOST_TEXT_TOKENS = 256  # most tokens here for one of an upstream that reports text alone: a long token's bytes
LAYOUT_OF_ONE = -2  # minus the uid: layout number of a step with one token, so that it is the same each time
FINAL_REASONS = ("stop", "length")


class UpstreamLoop:
    """Relays requests to upstreams.

    Call `load`, then `begin`, then `run`, all in the loop's thread. The methods that EngineLoop has too may be called
    from any thread after `load`.
    """

    def __init__(self, config: Config, card: ModelCard) -> None:
        """Raises InferEngineError for a folder without a tokenizer, ConfigError for a wrong key of [upstream]."""
        self._config = config
        self._tokenizer = Tokenizer.from_files(card.files)
        self._vocab_size = max(self._tokenizer.vocab_size, _vocab_size(card))
        self._servers = Servers(config, self._tokenizer)
        self._aio = uvloop.new_event_loop()
        self._max_num_seqs = config.engine.max_num_seqs or MAX_NUM_SEQS
        self._waiting = POLICIES[config.scheduler.policy]()
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._uids: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._finished: list[Finished] = []
        self._flush_is_due = False
        self._layouts: tuple[list[int], int] = ([], 0)  # the last step's uids and their number
        # Requests submitted by the intake's thread, and taken over by the loop's. Each counter has one writer.
        self._sent = self._taken = 0
        self._sent_tokens = self._taken_tokens = 0
        self._stopping = asyncio.Event()
        self._fatal: BaseException | None = None
        self._lifecycle: Lifecycle | None = None
        self._post: Callable[[LoopOutput], None] = lambda output: None
        self._on_turn: Callable[[], None] = lambda: None
        self.stats = SchedulerStats()
        self.roofline: Roofline | None = None
        self.num_failed_steps = 0
        self.last_error: str | None = None
        self.num_compilations = 0
        self.prefill_tokens_per_s = 0.0
        self.observer: StepObserver | None = None
        self.implementation = "upstream"

    def load(self, progress: Progress) -> Capacity:
        """Wait until an upstream is up. Raises InferEngineError after closing everything."""
        try:
            return self._load(progress)
        except BaseException:
            self.close()
            raise

    def _load(self, progress: Progress) -> Capacity:
        self._aio.run_until_complete(self._servers.start(progress))
        lengths = [server.max_model_len for server in self._servers.servers if server.max_model_len is not None]
        length = self._config.model.max_model_len
        if length and lengths and length > min(lengths):
            raise ConfigError("model.max_model_len", f"the upstream's is {min(lengths)}")
        length = length or min(lengths, default=MAX_MODEL_LEN)
        return Capacity(
            block_size=1,
            groups=[KVGroup(length * self._max_num_seqs)],
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=length,
            max_model_len=length,
            vocab_size=self._vocab_size,
        )

    def begin(
        self, lifecycle: Lifecycle, post: Callable[[LoopOutput], None], on_turn: Callable[[], None] = lambda: None
    ) -> None:
        """Set where output is posted, and what to call each turn; see EngineLoop."""
        self._lifecycle, self._post, self._on_turn = lifecycle, post, on_turn

    def run(self) -> None:
        """Relay until stopped. Raises a fatal error after closing everything, since the caller then does not."""
        self._aio.run_until_complete(self._run())
        if self._fatal is not None:
            self.close()
            raise self._fatal

    def close(self) -> None:
        """Close the connections and end the process of `upstream.command`, after `run`. May be called repeatedly."""
        if self._aio.is_closed():
            return
        self._aio.run_until_complete(self._servers.close())
        self._aio.close()

    # -- any thread --------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams, grammar: GrammarSpec | None, *, resumes: bool) -> None:
        """Raise InvalidRequest naming what cannot be relayed."""
        check_params(params, grammar, self._servers.abilities)
        if resumes and grammar is not None:
            raise InvalidRequest("resume", "an upstream cannot go on within a grammar", code="unsupported")

    def submit(self, requests: list[Request], grammars: SequenceOf[Grammar] = ()) -> None:
        """Relay the choices of one accepted submission.

        `grammars` is not used: it was compiled only to refuse an invalid grammar; the upstream compiles its own.
        """
        self._sent += len(requests)
        self._sent_tokens += sum(request.num_prompt for request in requests)
        self._call(lambda: self._submit(requests))

    def cancel(self, uids: list[int], reason: str, detail: FinishDetail) -> None:
        """End the requests with these uids that have not ended."""
        self._call(lambda: self._cancel(uids, reason, detail))

    def cancel_all(self, reason: str, detail: FinishDetail) -> None:
        """End every request."""
        self._call(lambda: self._cancel(list(self._sequences), reason, detail))

    def flush(self, reply: Callable[[int], None]) -> None:
        """Reply that no block was dropped: the caches belong to the upstreams."""
        self._call(lambda: reply(0))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop's thread."""
        self._call(function)

    def stop(self) -> None:
        """Leave `run`."""
        self._call(self._stopping.set)

    def queued(self, share: Share | None = None) -> tuple[int, int]:
        """Return how many requests and prompt tokens wait; with a share, those ahead of its next request."""
        unseen, unseen_tokens = self._sent - self._taken, self._sent_tokens - self._taken_tokens
        free = max(0, self._max_num_seqs - len(self._running) - len(self._waiting))
        over = max(0, unseen - free)
        waiting, tokens, shares = len(self._waiting), self._waiting.num_tokens, self._waiting.shares
        if share is not None and shares is not None:
            waiting, tokens = shares.ahead_of(share)
        return waiting + over, tokens + (unseen_tokens * over // unseen if unseen > 0 else 0)

    @property
    def most_running(self) -> int:
        """How many requests can run at once."""
        return self._max_num_seqs

    @property
    def snapshot(self) -> SchedulerSnapshot:
        """The current gauges; those of KV blocks are 0."""
        zero = dict.fromkeys(SchedulerSnapshot.__dataclass_fields__, 0)
        gauges: dict[str, Any] = {
            **zero,
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "num_waiting_tokens": self._waiting.num_tokens,
            "kv_usage": 0.0,
            "drafts_accepted_by_position": (),
            "running_adapters": (),
            "block_ages": {},
        }
        return SchedulerSnapshot(**gauges)

    @property
    def upstreams(self) -> dict[str, dict[str, float]]:
        """Counters and gauges of each upstream, by figure and then by upstream's name."""
        return self._servers.stats()

    def observe_steps(self, observer: StepObserver | None) -> None:
        """Do nothing: there are no steps to observe."""

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the engine ends
            self._aio.call_soon_threadsafe(self._guarded, function)

    # -- in the loop's thread ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        if self._lifecycle is None:
            raise RuntimeError("begin was not called")
        while not self._stopping.is_set():
            self._lifecycle.turned_s = self._lifecycle.clock()
            self._on_turn()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), IDLE_TURN_S)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _guarded(self, function: Callable[[], None]) -> None:
        """Run a function; an exception of it ends the engine, as in EngineLoop."""
        try:
            function()
        except Exception as error:
            self._fatal = error
            self._stopping.set()

    def _now(self) -> float:
        if self._lifecycle is None:
            raise RuntimeError("begin was not called")
        return self._lifecycle.clock()

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            sequence = Sequence(request)
            self._sequences[request.uid] = sequence
            self.stats.num_submitted += 1
            self._waiting.push(sequence)
            ended = stop_reason(sequence, sequence.tokens[-1]) if request.emitted_ids else None
            if ended is not None:
                self._end(sequence, *ended)
            elif request.deadline_s is not None:
                expire = lambda uid=request.uid: self._cancel(  # noqa: E731
                    [uid], "error", ("deadline_exceeded", "The request's deadline passed.")
                )
                self._deadlines[request.uid] = self._aio.call_later(
                    max(0.0, request.deadline_s - self._now()), self._guarded, expire
                )
        self._taken += len(requests)
        self._taken_tokens += sum(request.num_prompt for request in requests)
        self._start_waiting()

    def _start_waiting(self) -> None:
        now = self._now()
        while len(self._running) < self._max_num_seqs:
            sequence = self._waiting.peek(now, len(self._running))
            if sequence is None:
                return
            self._waiting.pop()
            if self._waiting.shares is not None:
                self._waiting.shares.started(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.first_scheduled_s = now
            self.stats.num_prompt_tokens += sequence.num_prompt
            task = self._running[sequence.uid] = self._aio.create_task(self._relay(sequence))
            task.add_done_callback(self._observe)

    def _cancel(self, uids: list[int], reason: str, detail: FinishDetail) -> None:
        for uid in uids:
            sequence = self._sequences.get(uid)
            if sequence is not None:
                task = self._running.get(uid)
                self._end(sequence, reason, detail)
                if task is not None:
                    task.cancel()

    def _observe(self, task: asyncio.Task[None]) -> None:
        """End the engine if a relaying task raised: otherwise its request would never end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = error
            self._stopping.set()

    async def _relay(self, sequence: Sequence) -> None:
        """Read one sequence's output. If an upstream fails before the first token, another one is tried."""
        tried: list[UpstreamServer] = []
        failure: InferEngineError | None = None
        num_lost = 0
        give_up_s = self._now() + self._config.upstream.wait_s
        try:
            while True:
                try:
                    server = await self._servers.choose(tried, give_up_s - self._now())
                except InferEngineError as error:
                    raise failure or error from None
                before = len(sequence.tokens)
                try:
                    await self._read(sequence, server)
                    return
                except UpstreamFailed as error:
                    if not error.elsewhere or len(sequence.tokens) > before:
                        raise error.error from None
                    failure = error.error
                    num_lost += error.lost
                    if num_lost >= MOST_LOST:  # the request itself may be what ends the upstreams
                        raise failure from None
                    if server.is_up:  # a server that is down may be tried again when it is back
                        tried.append(server)
        except InferEngineError as error:
            self.last_error = str(error)
            self._end(sequence, *refusal(_as_end(error, sequence)))
        except Exception as error:
            logger.exception("relaying a request failed")
            self.num_failed_steps += 1
            self.last_error = f"{type(error).__name__}: {error}"
            self._end(sequence, "error", ("engine_error", "The engine failed on this request."))

    async def _read(self, sequence: Sequence, server: UpstreamServer) -> None:
        if server.abilities is None:
            raise RuntimeError("an upstream that is up was probed")
        body = completion_body(sequence.request, server.model, server.abilities, self._tokenizer)
        reason: str | None = None
        stream = self._servers.stream(server, body)
        num_tokens, num_quiet = -1, 0
        silent_s = 0.0  # when the server will have been silent for too long
        try:
            async for events in stream:
                # Comments and events without output keep a connection open, and are silence all the same.
                if len(sequence.tokens) != num_tokens:
                    num_tokens, num_quiet = len(sequence.tokens), 0
                    silent_s = self._now() + self._config.upstream.read_timeout_s
                else:
                    num_quiet += 1
                    if num_quiet > MOST_QUIET_READS or self._now() > silent_s:
                        raise self._servers.says_nothing(server)
                for event in events:
                    if event.error is not None:
                        raise self._servers.refusal_in_stream(server, event.error)
                    for choice in event.choices:
                        self._take(sequence, choice)
                        reason = choice.finish_reason or reason
                    _note_cached(sequence, event.usage)
                if sequence.status is SequenceStatus.FINISHED:
                    return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator: closes the connection
        if reason is None:
            error = InferEngineError("engine_unavailable", "The upstream ended the stream without a reason.")
            raise UpstreamFailed(error, elsewhere=True)
        if reason not in FINAL_REASONS:
            raise InferEngineError("engine_error", f"The upstream ended the output with {reason!r:.40}.")
        self._end(sequence, reason, _stop_detail(sequence, server) if reason == "stop" else None)

    def _take(self, sequence: Sequence, choice: UpstreamChoice) -> None:
        """Append the tokens of one event."""
        if choice.token_ids is not None:
            token_ids = choice.token_ids
        else:
            token_ids = ids_of_text(self._tokenizer, choice.text) if choice.text else []
        if sequence.status is SequenceStatus.FINISHED or not token_ids:
            return
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise InferEngineError("engine_error", OUTSIDE)
        room = sequence.max_total - len(sequence.tokens)
        if choice.token_ids is None:  # those of this tokenizer for the same text may be more
            room += (MOST_TEXT_TOKENS - 1) * sequence.request.max_tokens
        is_over = len(token_ids) > room
        token_ids = token_ids[: max(0, room)]
        wanted = sequence.request.params.logprobs
        if wanted is not None:
            rows = read_logprobs(choice.logprobs, token_ids, wanted, self._vocab_size)
            self._logprobs.setdefault(sequence.uid, []).extend(rows)
        if sequence.first_token_s is None:
            sequence.first_token_s = self._now()
        sequence.tokens += token_ids
        self.stats.num_output_tokens += len(token_ids)
        if self._waiting.shares is not None:
            self._waiting.shares.charge(sequence, len(token_ids))
        self._uids += [sequence.uid] * len(token_ids)
        self._token_ids += token_ids
        self._publish_soon()
        if is_over:  # the upstream does not end by itself
            self._end(sequence, "length", None)

    def _end(self, sequence: Sequence, reason: str, detail: FinishDetail) -> None:
        """End a sequence; a second call does nothing."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.uid]
        if (timer := self._deadlines.pop(sequence.uid, None)) is not None:
            timer.cancel()
        if was_running:
            self._running.pop(sequence.uid, None)
            if self._waiting.shares is not None:
                self._waiting.shares.stopped(sequence)
        else:
            self._waiting.remove(sequence)
        self.stats.num_finished += 1
        self.stats.num_cached_tokens += sequence.num_cached
        self._finished.append(terminal_row(sequence, reason, detail, self._now()))
        self._publish_soon()
        if was_running:
            self._start_waiting()

    def _publish_soon(self) -> None:
        """Publish at the end of this turn of the event loop, together with all that arrives in it."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._aio.call_soon(self._guarded, self._publish)

    def _publish(self) -> None:
        self._flush_is_due = False
        uids, token_ids, finished, logprobs = self._uids, self._token_ids, self._finished, self._logprobs
        self._uids, self._token_ids, self._finished, self._logprobs = [], [], [], {}
        stats, now = self.stats, self._now()
        if uids:
            stats.num_steps += 1
            stats.num_scheduled_tokens += len(uids)
            stats.num_scheduled_rows += len(uids)
            stats.max_batch = max(stats.max_batch, len(self._running))
        last, layout = self._layouts
        if len(uids) == 1:
            layout = LAYOUT_OF_ONE - uids[0]
        elif uids != last and uids:
            layout += 1
            self._layouts = uids, layout
        output = StepOutput(stats.num_steps, uids, token_ids, finished, layout if uids else -1, logprobs or None)
        self._post(LoopOutput(output, now, [], len(uids)))


def _stop_detail(sequence: Sequence, server: UpstreamServer) -> FinishDetail:
    """Return what stopped an output: a stop token's id, or None for an end-of-text token.

    Returns GRAMMAR_COMPLETE if the output does not end with such a token, or has no token ids.
    """
    last = sequence.tokens[-1] if sequence.num_output else -1
    gives_ids = server.abilities is not None and server.abilities.gives_ids
    if not gives_ids or last not in sequence.stop_ids:
        return GRAMMAR_COMPLETE
    return None if last in sequence.request.eos_token_ids else last


def _as_end(error: InferEngineError, sequence: Sequence) -> InferEngineError:
    """Return the error that a request ends with.

    A request without output ends as `overloaded`, which goes to the caller: every upstream refused it, or none is up.
    After `engine_unavailable` clients would submit it again and again, as they do to continue a broken stream.
    """
    if error.code != "engine_unavailable" or sequence.num_output:
        return error
    return InferEngineError("overloaded", error.message, retry_after_s=error.retry_after_s)


def _note_cached(sequence: Sequence, usage: UpstreamUsage | None) -> None:
    if usage is not None and usage.prompt_tokens_details is not None:
        num_cached = usage.prompt_tokens_details.cached_tokens or 0
        sequence.num_cached = min(max(0, num_cached), sequence.num_prompt)


def _vocab_size(card: ModelCard) -> int:
    """Return the size of the vocabulary in config.json, padding included; 0 if there is none."""
    if card.folder.suffix == SUFFIX:
        return int(config_values(card.folder)["vocab_size"])
    try:
        config = {"config.json": (card.folder / "config.json").read_bytes()}
    except OSError:
        return 0
    values = read_json(config, "config.json")
    nested = values.get("text_config")
    found = values.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
    return found if type(found) is int else 0
