"""Scheduler: the core behind one door. It plans steps, takes their results, and says what came of them.

Overlap: `schedule` may be called again before `commit` of the step before. `num_computed` and `num_inflight` advance
when a step is planned, tokens are appended when it is committed. A sequence that turns out to have stopped may have one
more row under way; its token is dropped. Freed blocks may be given away at once, because the device executes plans in
order: the next writer comes after the last reader.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from inferengine.core.constraints import Grammar, TokenRules, token_rules
from inferengine.core.executor import Capacity
from inferengine.core.kv_cache.manager import KVCacheManager
from inferengine.core.request import Request
from inferengine.core.scheduler.fault_isolation import FaultIsolationQueue
from inferengine.core.scheduler.planner import Planner
from inferengine.core.scheduler.scheduler_state import SchedulerOptions, SchedulerState, WaitingForks
from inferengine.core.scheduler.scheduler_stats import SchedulerSnapshot, SchedulerStats
from inferengine.core.scheduler.step_builder import ScheduledStep
from inferengine.core.sequence import (
    GRAMMAR_COMPLETE,
    FinishDetail,
    Finished,
    RowFailure,
    Sequence,
    SequenceStatus,
    refusal,
    stop_reason,
)
from inferengine.core.speculation.proposers import Proposer
from inferengine.core.step_plan import StepResult, TokenLogprobs
from inferengine.errors import InferEngineError, InvalidRequest

__all__ = ["ScheduledStep", "Scheduler", "SchedulerOptions", "StepOutput"]


class StepOutput(NamedTuple):
    """News of one step in columns: token_ids[i] came for uids[i]. A uid appears once for each of its tokens, in their
    order. Equal `layout` means the very same `uids`."""

    step: int
    uids: list[int]
    token_ids: list[int]
    finished: list[Finished]
    layout: int
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # by uid, one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # by uid, with its first token: all of its prompt's
    embeddings: dict[int, bytes] | None = None  # by uid, with its end


class Scheduler:
    """Owns the sequences, the waiting queue and the block tables. Pure: no clock, no threads, no device."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions, proposer: Proposer | None = None) -> None:
        self.capacity = capacity
        self.options = options
        self._roster = SchedulerState(capacity, options)
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by uid, until the prompt is computed
        self._starved: dict[int, int] = {}  # by uid: after so many guesses of this step no token is left
        self._planner = Planner(self._roster, capacity, options, proposer)
        self._max_running_to_force = options.max_running_to_force
        self.kv: KVCacheManager = self._roster.kv

    @property
    def waiting(self) -> FaultIsolationQueue:
        return self._roster.waiting

    @property
    def forks(self) -> WaitingForks:
        return self._roster.forks

    @property
    def running(self) -> list[Sequence]:
        return self._roster.running

    @property
    def sequences(self) -> dict[int, Sequence]:
        return self._roster.sequences

    @property
    def stats(self) -> SchedulerStats:
        return self._roster.stats

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request. It fits the empty pool: admission has seen to that."""
        return self._roster.add(request)

    def grammar_ready(self, uid: int, grammar: Grammar) -> None:
        """The grammar that a request waits for is compiled."""
        self._roster.grammar_ready(uid, grammar)

    def end_if_complete(self, uid: int, now: float) -> Finished | None:
        """End a request that came with output of before if that output is all of it: its end alone was lost."""
        sequence = self._roster.sequences.get(uid)
        if sequence is None or not sequence.num_output:
            return None
        ended = stop_reason(sequence, sequence.tokens[-1])
        if ended is None and sequence.grammar is not None and sequence.grammar.is_terminated():
            ended = "stop", GRAMMAR_COMPLETE
        return None if ended is None else self._finish(sequence, *ended, now)

    def cancel(self, uid: int, reason: str, detail: FinishDetail, now: float) -> Finished | None:
        """End a request in whatever state it is; its blocks are free on return. None: there is no such request."""
        sequence = self._roster.sequences.get(uid)
        return None if sequence is None else self._finish(sequence, reason, detail, now)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._roster.sequences)

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep | None:
        """Plan the next step, or None when nothing can be computed now (idle, or all wait for tokens under way)."""
        if self._roster.waiting.is_isolating:
            for sequence in self._roster.waiting.next_trial():
                self._roster.wait_again(sequence)
        return self._planner.plan(now)

    def wants_results(self, last: ScheduledStep) -> bool:
        """Whether the steps under way should be committed before the next one is planned."""
        return self._roster.waiting.is_isolating or self._planner.wants_results(last)

    def take_rejected(self) -> list[Finished]:
        """Requests that `schedule` ended under pressure since the last call."""
        rejected, self._planner.rejected = self._planner.rejected, []
        return rejected

    def fill_masks(self, scheduled: ScheduledStep, now: float) -> tuple[bytearray, list[Finished]]:
        """The masks that the draws in `plan.masked` wait for, and the requests whose grammar failed meanwhile."""
        words = -(-self.capacity.vocab_size // 32)
        masks = bytearray(b"\xff") * (4 * words * len(scheduled.plan.masked))
        rows = memoryview(masks)
        failed: list[Finished] = []
        starved: dict[int, int] = {}
        row = 0
        for plan_row, sequence in enumerate(scheduled.rows):
            grammar = sequence.grammar
            if grammar is None or not scheduled.plan.samples[plan_row]:
                continue
            drafts = scheduled.drafts.get(plan_row, [])
            own = range(row, row + 1 + len(drafts))
            row = own.stop
            if sequence.status is SequenceStatus.FINISHED:
                continue
            try:
                for index, mask_row in enumerate(own):
                    if index and grammar.is_terminated():
                        continue  # after the last guess nothing can follow: this draw will be dropped
                    mask = rows[mask_row * 4 * words : (mask_row + 1) * 4 * words]
                    grammar.fill_bitmask(mask)
                    if sequence.rules is not None and not self._leaves_some(sequence, mask, drafts[:index]):
                        if not index:
                            raise self._no_token(sequence, 0)
                        starved[sequence.uid] = index
                    if index < len(drafts):
                        grammar.accept(drafts[index])
                grammar.rollback(len(drafts))
            except InferEngineError as error:
                failed.append(self._finish(sequence, *refusal(error), now))
            except Exception as error:  # a grammar library may fail in any way; it concerns this request alone
                message = f"Following the grammar failed: {type(error).__name__}."
                failed.append(self._finish(sequence, "error", ("engine_error", message), now))
        self._starved = starved
        return masks, failed

    def commit(self, scheduled: ScheduledStep, result: StepResult, now: float) -> StepOutput:
        """Append the tokens of a finished step, end what stopped, and offer full blocks of outputs for reuse: those of
        prompts have been since the step was planned."""
        plan, kv = scheduled.plan, self.kv
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(scheduled, result.prompt_logprobs)
        finished: list[Finished] = []
        for row, failure in (result.failed_rows or {}).items():
            sequence = scheduled.rows[row]
            if sequence.status is not SequenceStatus.FINISHED:
                kv.forget(sequence, plan.starts[row])
                finished.append(self._finish(sequence, "error", self._cause(sequence, failure), now))
        if plan.pooled:
            finished += self._finish_pooled(scheduled, result, now)
        if plan.masked or scheduled.drafts:
            return self._commit_many(scheduled, result, finished, now)
        uids, token_ids, layout = scheduled.uids, result.token_ids, scheduled.layout
        dropped: set[int] | None = None
        over = SequenceStatus.FINISHED
        for sequence, token_id in zip(scheduled.sampled, token_ids, strict=True):
            if sequence.status is over:
                dropped = dropped or set()
                dropped.add(sequence.uid)
                continue
            tokens = sequence.tokens
            tokens.append(token_id)
            sequence.num_inflight -= 1
            if len(tokens) >= sequence.next_check_at or token_id in sequence.stop_ids:
                stopped = self._look_at(sequence, token_id, now)
                if stopped is not None:
                    finished.append(self._finish(sequence, *stopped, now))
        if dropped:
            keep = [index for index, uid in enumerate(uids) if uid not in dropped]
            uids, token_ids = [uids[i] for i in keep], [token_ids[i] for i in keep]
            layout = self._planner.new_layout()
        if (tenants := self.waiting.tenants) is not None:
            tenants.charge_each(scheduled.sampled, scheduled.layout)
        return self._output(scheduled, result, uids, token_ids, layout, finished)

    def observe(self, scheduled: ScheduledStep, duration_s: float) -> None:
        """How long the device took for a step that is not committed yet."""
        self._planner.observe(scheduled, duration_s)

    def fail(
        self,
        scheduled: ScheduledStep,
        rows: list[int] | None,
        message: str,
        now: float,
        code: str = "engine_error",
    ) -> list[Finished]:
        """A step did not give a result: end the requests of `rows`. The others have lost the step's work, so they start
        over from their known tokens. With `rows` None no culprit is known: then it is looked for, and everything that
        runs starts over (core/scheduler/fault_isolation.py).

        A step writes into blocks of its own rows alone. Those of its blocks that are in the prefix cache are in
        `offered`: a decode's block is offered only when its step is committed. Whoever has adopted one since has a row
        in a later step, which fails with this one."""
        self.kv.withdraw(scheduled.offered)
        if rows is None:
            blamed = self._accuse(scheduled)
        else:
            blamed = [sequence for row, sequence in enumerate(scheduled.rows) if row in rows]
        finished = [
            self._finish(sequence, "error", (code, message), now)
            for sequence in dict.fromkeys(blamed)
            if sequence.status is not SequenceStatus.FINISHED
        ]
        for row, sequence in enumerate(scheduled.rows):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if scheduled.plan.samples[row]:
                sequence.num_inflight -= 1
            if sequence.status is SequenceStatus.RUNNING:
                self._roster.wait_again(sequence)
            else:
                self._roster.forget_host_copy(sequence)  # it lacks this step's KV
        for sequence in scheduled.swapped_out:
            self._roster.forget_host_copy(sequence)  # it may never have been made
        if rows is None:
            for sequence in self._roster.running[::-1]:  # they had no row in it, and are to have none in a try
                self._roster.wait_again(sequence)
        self._planner.write_again(scheduled)
        return finished

    # -- questions ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot:
        roster, kv, drafts = self._roster, self.kv, self._planner.drafts
        held = sum(pool.num_held for pool in kv.pools)
        cached = sum(pool.num_evictable for pool in kv.pools)
        return SchedulerSnapshot(
            num_running=len(roster.running),
            num_waiting=roster.num_waiting,
            num_waiting_tokens=roster.waiting.num_tokens,
            num_slots_held=roster.num_slots - len(roster.free_slots),
            num_blocks=sum(pool.num_blocks for pool in kv.pools),
            num_blocks_held=held,
            num_blocks_cached=cached,
            num_blocks_free=sum(pool.num_free for pool in kv.pools) - cached,
            kv_usage=kv.usage,
            num_tokens_held=sum(sequence.num_computed for sequence in roster.running) * len(kv.pools),
            block_size=self.capacity.block_size,
            num_evictions=kv.num_evictions,
            num_blocks_swapped_out=kv.swap.num_blocks_out,
            num_blocks_swapped_in=kv.swap.num_blocks_in,
            num_prefix_lookup_tokens=kv.num_lookup_tokens,
            num_prefix_hit_tokens=kv.num_hit_tokens,
            num_drafted=drafts.num_drafted,
            num_drafts_accepted=drafts.num_accepted,
            num_verified=drafts.num_verified,
            drafts_accepted_by_position=tuple(drafts.accepted_by_position),
        )

    def check(self) -> None:
        """Invariants, for tests and for an idle engine. Raises RuntimeError."""
        self._roster.check()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _accuse(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Of a failed step without a culprit: who is to be ended for it."""
        plan, suspects = scheduled.plan, []
        ends: list[int] = []
        for row, sequence in enumerate(scheduled.rows):
            if sequence.status is SequenceStatus.RUNNING:  # who has given way meanwhile comes by itself
                suspects.append(sequence)
                ends.append(plan.starts[row] + (1 if row in scheduled.drafts else plan.counts[row]))
        return self._roster.waiting.isolate(suspects, ends) if suspects else []

    def _commit_many(
        self, scheduled: ScheduledStep, result: StepResult, finished: list[Finished], now: float
    ) -> StepOutput:
        """As `commit`, for steps with guesses or grammars: a row may give several tokens."""
        uids: list[int] = []
        token_ids: list[int] = []
        begin = 0
        tenants = self.waiting.tenants
        draws = (row for row, samples in enumerate(scheduled.plan.samples) if samples)
        for index, row in enumerate(draws):
            sequence = scheduled.rows[row]
            count = result.num_emitted[index] if result.num_emitted is not None else 1
            new = result.token_ids[begin : begin + count]
            begin += count
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_inflight -= 1
            if row in scheduled.drafts:
                self._planner.drafts.observe(sequence, len(scheduled.drafts[row]), count - 1)
                if sequence.status is SequenceStatus.RUNNING or sequence.host_tables is not None:
                    sequence.num_computed = (
                        scheduled.plan.starts[row] + count
                    )  # the rest was computed for wrong guesses
            try:
                ended = self._append(sequence, new, now)
                if ended is None and sequence.grammar is not None:
                    ended = self._follow_grammar(sequence, now)
            except InferEngineError as error:  # of a grammar, which a token has led to one of its limits
                ended = refusal(error)
            num_fresh, sequence.num_fresh = sequence.num_fresh, 0
            if num_fresh:
                uids += [sequence.uid] * num_fresh
                token_ids += sequence.tokens[-num_fresh:]
            if tenants is not None:
                tenants.charge(sequence, num_fresh)
            if ended is not None:
                finished.append(self._finish(sequence, *ended, now))
        return self._output(scheduled, result, uids, token_ids, self._planner.new_layout(), finished)

    def _append(self, sequence: Sequence, token_ids: list[int], now: float) -> tuple[str, FinishDetail] | None:
        """Add tokens one by one until one ends the sequence. Returns how it ended."""
        for token_id in token_ids:
            grammar = sequence.grammar
            if grammar is not None and not grammar.accept(token_id):
                return "error", ("engine_error", "A token came that the grammar does not allow.")
            sequence.tokens.append(token_id)
            sequence.num_fresh += 1
            if len(sequence.tokens) >= sequence.next_check_at or token_id in sequence.stop_ids:
                stopped = self._look_at(sequence, token_id, now)
                if stopped is not None:
                    return stopped
            if grammar is not None and grammar.is_terminated():
                return "stop", GRAMMAR_COMPLETE
        return None

    def _leaves_some(self, sequence: Sequence, mask: memoryview, drafts: list[int]) -> bool:
        """Whether the request's other fields leave any of the tokens in a grammar's mask, after these guesses."""
        rules = sequence.rules
        if rules is None:
            return True
        output = [*sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - rules.num_before) :], *drafts]
        return bool(rules.left(int.from_bytes(mask, "little"), sequence.num_output + len(drafts), output))

    def _no_token(self, sequence: Sequence, num_drafts: int) -> InvalidRequest:
        """Why the fields of a request leave no token after so many guesses."""
        rules = sequence.rules or TokenRules(sequence.request.params, sequence.stop_ids)
        has_grammar = sequence.grammar is not None
        message = rules.no_token_message(sequence.num_output + num_drafts, has_grammar=has_grammar)
        return InvalidRequest("grammar" if has_grammar else rules.fields[0], message)

    def _cause(self, sequence: Sequence, failure: RowFailure) -> FinishDetail:
        """Why the device gave no token for a request: the request itself, where its fields leave none."""
        if sequence.uid in self._starved:
            return refusal(self._no_token(sequence, self._starved[sequence.uid]))[1]
        if sequence.grammar is None and (rules := token_rules(sequence.request.params, sequence.stop_ids)) is not None:
            tokens = sequence.tokens
            before = tokens[max(sequence.num_prompt, len(tokens) - rules.num_before) :]
            if not rules.left((1 << self.capacity.vocab_size) - 1, sequence.num_output, before):
                return refusal(self._no_token(sequence, 0))[1]
        return failure.value

    def _follow_grammar(self, sequence: Sequence, now: float) -> tuple[str, FinishDetail] | None:
        """Append what the grammar forces, without asking the model."""
        grammar = sequence.grammar
        if grammar is None or sequence.request.params.logprobs is not None:
            return None  # every token of a request with log-probabilities goes through the model
        if sequence.rules is not None:
            return None  # what the grammar forces may be what another field forbids
        if 0 < self._max_running_to_force < len(self._roster.running):
            return None  # the mask leaves the draw one token: the same, without rows of several tokens
        forced = grammar.forced()
        if not forced:
            return None
        before = len(sequence.tokens)
        ended = self._append(sequence, forced, now)
        if sequence.status is SequenceStatus.RUNNING:
            known = enumerate(sequence.tokens[before:], start=before)
            self._planner.forced.extend((sequence, position, token) for position, token in known)
        self.stats.num_forced_tokens += len(sequence.tokens) - before
        return ended

    def _output(
        self,
        scheduled: ScheduledStep,
        result: StepResult,
        uids: list[int],
        token_ids: list[int],
        layout: int,
        finished: list[Finished],
    ) -> StepOutput:
        self.stats.num_output_tokens += len(uids)
        logprobs = None
        if result.logprobs:
            kept = Counter(uids)  # tokens after an end were dropped, and so is what is known of them
            by_uid = ((scheduled.rows[row].uid, items) for row, items in result.logprobs.items())
            logprobs = {uid: items[: kept[uid]] for uid, items in by_uid if uid in kept}
        prompts = self._take_prompt_logprobs(uids) if self._prompt_logprobs else None
        embeddings = None
        if result.embeddings:
            ended = {row.uid for row in finished if row.reason == "stop"}
            by_row = ((scheduled.rows[row].uid, vector) for row, vector in result.embeddings.items())
            embeddings = {uid: vector for uid, vector in by_row if uid in ended}
        return StepOutput(scheduled.plan.step, uids, token_ids, finished, layout, logprobs, prompts, embeddings)

    def _finish_pooled(self, scheduled: ScheduledStep, result: StepResult, now: float) -> list[Finished]:
        """End the embedding requests whose vector is there. One that had to give way meanwhile has its vector all the
        same: its step was computed while it still held its blocks."""
        finished: list[Finished] = []
        vectors = result.embeddings or {}
        for row, _, ends in scheduled.plan.pooled:
            sequence = scheduled.rows[row]
            if not ends or sequence.status is SequenceStatus.FINISHED:
                continue
            if row in vectors:
                self.stats.num_embeddings += 1
                finished.append(self._finish(sequence, "stop", None, now))
            else:
                detail = ("engine_error", "The device gave no embedding.")
                finished.append(self._finish(sequence, "error", detail, now))
        return finished

    def _keep_prompt_logprobs(self, scheduled: ScheduledStep, new: dict[int, list[TokenLogprobs]]) -> None:
        """Put chunks together. A preempted prompt starts over, and what is known already comes again."""
        for row, items in new.items():
            sequence, start = scheduled.rows[row], scheduled.plan.starts[row]
            if (
                sequence.status is SequenceStatus.FINISHED or sequence.request.choice
            ):  # the other choices share the prompt
                continue
            known = self._prompt_logprobs.setdefault(sequence.uid, [])
            if start <= len(known):
                known += items[len(known) - start :]

    def _take_prompt_logprobs(self, uids: list[int]) -> dict[int, list[TokenLogprobs]] | None:
        ready = {uid: self._prompt_logprobs.pop(uid) for uid in uids if uid in self._prompt_logprobs}
        for uid in [uid for uid in self._prompt_logprobs if uid not in self._roster.sequences]:
            del self._prompt_logprobs[uid]
        return ready or None

    def _look_at(self, sequence: Sequence, token_id: int, now: float) -> tuple[str, FinishDetail] | None:
        """A committed token that is the first, may end the sequence, or fills a block."""
        length = len(sequence.tokens)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            self._roster.release_forks(sequence)
        if length > sequence.next_hash_at and sequence.status is SequenceStatus.RUNNING:
            self.kv.cache_full_blocks(sequence, min(length - 1, sequence.num_computed))
        sequence.next_check_at = min(sequence.max_total, sequence.next_hash_at + 1)
        return stop_reason(sequence, token_id)

    def _finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        if self._planner.proposer is not None:
            self._planner.proposer.forget(sequence)
        return self._roster.finish(sequence, reason, detail, now)
