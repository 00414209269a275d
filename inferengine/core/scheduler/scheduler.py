"""Scheduler: plans steps, takes their results, and says what came of them. The only interface of the core's state.

Overlap: `schedule` may be called again before `commit` of the step before. `num_computed` and `num_inflight` advance
when a step is planned, tokens are appended when it is committed. A sequence that turns out to have stopped may have one
more row under way; its token is dropped. Freed blocks may be given away at once, because the device executes plans in
order: the next writer comes after the last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inferengine.core.constraints import Grammar, TokenRules, token_rules
from inferengine.core.executor import Capacity, StepResult, TokenLogprobs
from inferengine.core.scheduler.planner import PlannedStep, Planner, ScheduledStep
from inferengine.core.scheduler.scheduler_state import SchedulerOptions, SchedulerSnapshot, SchedulerState
from inferengine.core.sequence import (
    FORCE_PATIENCE,
    GRAMMAR_COMPLETE,
    FinishDetail,
    Finished,
    Request,
    RowFailure,
    Sequence,
    SequenceStatus,
    refusal,
    stop_reason,
)
from inferengine.core.speculation import Proposer, Speculator
from inferengine.core.state_snapshots import StateSnapshots
from inferengine.errors import InferEngineError, InvalidRequest

__all__ = ["ScheduledStep", "Scheduler", "SchedulerOptions", "StepOutput"]

FEW_BYTES = 512  # of a mask, in which most masks have an allowed token: single letters come first in a vocabulary


class StepOutput(NamedTuple):
    """The new tokens of one step in columns: token_ids[i] came for uids[i]. A uid appears once for each of its tokens,
    in their order. Equal `layout` means the very same `uids`."""

    step: int
    uids: list[int]
    token_ids: list[int]
    finished: list[Finished]
    layout: int
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # by uid, one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # by uid, with its first token: all of its prompt's
    embeddings: dict[int, bytes] | None = None  # by uid, with its end


class MaskedRow(NamedTuple):
    """A row whose draws a grammar restricts. `draws`: where the mask of each goes, one more than draft tokens."""

    sequence: Sequence
    grammar: Grammar
    draft_tokens: list[int]
    draws: list[memoryview]


class MaskOutcome(NamedTuple):
    """What came of a row's masks. `starved`: after so many draft tokens no token is allowed; 0: one always is.
    `num_draws`: how many draws, from the first on, have their mask; 0: all of them."""

    uid: int
    starved: int
    num_draws: int
    failure: FinishDetail  # None: the masks are there


FillGroup = Callable[[list[MaskedRow]], list[MaskOutcome]]
RunGroups = Callable[[FillGroup, list[list[MaskedRow]]], list[list[MaskOutcome]]]


def one_after_the_other(fill: FillGroup, groups: list[list[MaskedRow]]) -> list[list[MaskOutcome]]:
    """Fill the masks of all groups in this thread."""
    return [fill(group) for group in groups]


class Scheduler:
    """Owns the sequences, the waiting queue and the block tables. Pure: no clock, no threads, no device."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions, proposer: Proposer | None = None) -> None:
        self.capacity = capacity
        self.options = options
        self.state = state = SchedulerState(capacity, options)
        self.kv = state.kv
        self.sequences = state.sequences
        self.running = state.running
        self.waiting = state.waiting
        self.forks = state.forks
        self.stats = state.stats
        self.speculator = Speculator(
            proposer if options.max_drafts and not options.max_num_decodes and not capacity.has_states else None,
            state.kv,
            state.running,
            max_drafts=options.max_drafts,
            max_running=options.max_running_to_draft,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        self._planner = Planner(state, capacity, options, self.speculator)
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by uid, until the prompt is computed
        self._starved: dict[int, int] = {}  # by uid: after so many draft tokens of this step no token is allowed
        self._num_draws: dict[int, int] = {}  # by uid: so many draws of this step count, because the rest has no mask

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request. It fits the empty pool: admission has checked that."""
        return self.state.add(request)

    def grammar_ready(self, uid: int, grammar: Grammar) -> None:
        """Queue a request whose grammar is compiled."""
        self.state.grammar_ready(uid, grammar)

    def end_if_complete(self, uid: int, now: float) -> Finished | None:
        """End a resumed request if the output that it came with is complete. None: it continues."""
        sequence = self.sequences.get(uid)
        if sequence is None or not sequence.num_output:
            return None
        ended = stop_reason(sequence, sequence.tokens[-1])
        if ended is None and sequence.grammar is not None and sequence.grammar.is_terminated():
            ended = "stop", GRAMMAR_COMPLETE
        return None if ended is None else self._finish(sequence, *ended, now)

    def cancel(self, uid: int, reason: str, detail: FinishDetail, now: float) -> Finished | None:
        """End a request in whatever state it is; its blocks are free on return. None: there is no such request."""
        sequence = self.sequences.get(uid)
        if sequence is None:
            return None
        self._prompt_logprobs.pop(uid, None)  # of a prompt that is partly computed; the next step may be far off
        return self._finish(sequence, reason, detail, now)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.sequences)

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> PlannedStep:
        """Plan the next step."""
        self.kv.now_s = now
        if self.waiting.is_isolating:
            for sequence in self.waiting.next_trial():
                self.state.wait_again(sequence)
        return self._planner.plan(now)

    def wants_results(self, last: ScheduledStep) -> bool:
        """Return whether the steps under way should be committed before the next one is planned."""
        return self.waiting.is_isolating or self._planner.wants_results(last)

    def observe(self, scheduled: ScheduledStep, duration_s: float) -> None:
        """Learn from the time that the device took for a step that is not committed yet."""
        self._planner.observe(scheduled, duration_s)

    def open_masks(self, scheduled: ScheduledStep) -> bytearray:
        """Return masks that allow every token, for the draws in `plan.masked`."""
        words = -(-self.capacity.vocab_size // 32)
        return bytearray(b"\xff") * (4 * words * len(scheduled.plan.masked))

    def fill_masks(
        self, scheduled: ScheduledStep, now: float, run: RunGroups = one_after_the_other
    ) -> tuple[bytearray, list[Finished]]:
        """Return the masks of the draws in `plan.masked`, in order, and the requests that their grammar ended.

        `run` works on groups of rows, beside each other if it likes: grammars that share a lexer are in one group.
        """
        words = -(-self.capacity.vocab_size // 32)
        masks = self.open_masks(scheduled)
        rows = memoryview(masks)
        groups: dict[object, list[MaskedRow]] = {}
        row = 0
        for plan_row, sequence in enumerate(scheduled.rows):
            grammar = sequence.grammar
            if grammar is None or not scheduled.plan.samples[plan_row]:
                continue
            drafts = scheduled.draft_tokens.get(plan_row, [])
            first, row = row, row + 1 + len(drafts)
            if sequence.status is not SequenceStatus.FINISHED:
                draws = [rows[4 * words * draw : 4 * words * (draw + 1)] for draw in range(first, row)]
                groups.setdefault(grammar.lexer, []).append(MaskedRow(sequence, grammar, drafts, draws))
        outcomes = [outcome for found in run(self._fill_group, list(groups.values())) for outcome in found]
        self._starved = {outcome.uid: outcome.starved for outcome in outcomes if outcome.starved}
        self._num_draws = {outcome.uid: outcome.num_draws for outcome in outcomes if outcome.num_draws}
        failed = [
            self._finish(self.sequences[outcome.uid], "error", outcome.failure, now)
            for outcome in outcomes
            if outcome.failure is not None
        ]
        return masks, failed

    def _fill_group(self, group: list[MaskedRow]) -> list[MaskOutcome]:
        return [self._fill_row(row) for row in group]

    def _fill_row(self, row: MaskedRow) -> MaskOutcome:
        """Write the masks of one row. Touches nothing but its own sequence and grammar.

        Where the grammar cannot be followed after a draft token, the draws from there on do not count: the model may
        reject that token. Only the first draw's mask is needed whatever the model says.
        """
        sequence, grammar, drafts, draws = row
        starved = num_masked = 0
        try:
            for index, mask in enumerate(draws):
                if index and grammar.is_terminated():
                    continue  # the draft ends the output: this draw will be dropped
                grammar.fill_bitmask(mask)
                if sequence.rules is not None and not self._leaves_some(sequence, mask, drafts[:index]):
                    if not index:
                        raise self._no_token(sequence)
                    starved = starved or index
                num_masked += 1
                if index < len(drafts):
                    grammar.accept(drafts[index])
            grammar.rollback(len(drafts))
            return MaskOutcome(sequence.uid, starved, 0, None)
        except Exception as error:
            failed: Exception = error
        if num_masked and drafts:
            try:
                grammar.restore(sequence.tokens[sequence.num_prompt :])
                for mask in draws[num_masked:]:
                    mask[:] = b"\xff" * len(mask)  # it may be written in part
                return MaskOutcome(sequence.uid, starved, num_masked, None)
            except Exception as error:
                failed = error
        if isinstance(failed, InferEngineError):
            return MaskOutcome(sequence.uid, starved, 0, refusal(failed)[1])
        # Whatever a grammar library raises concerns this request alone.
        failure = "engine_error", f"Following the grammar failed: {type(failed).__name__}."
        return MaskOutcome(sequence.uid, starved, 0, failure)

    def commit(self, scheduled: ScheduledStep, result: StepResult, now: float) -> StepOutput:
        """Append the tokens of a finished step, end what stopped, and offer full blocks of outputs for reuse.

        A row gives one token. It gives several with accepted draft tokens or where its grammar forces some, and none
        if its sequence has ended since the step was planned. Full blocks of prompts are offered when a step is planned.
        """
        drawn, several, cut = result.token_ids, dict[int, list[int]](), set[int]()
        if scheduled.draft_tokens:
            drawn, several, cut = self._split_emitted(scheduled, result)
        finished: list[Finished] = []
        changed: dict[int, list[int]] = {}  # by uid: the tokens of rows that did not give exactly one
        if result.failed_rows:
            failed = {row: failure for row, failure in result.failed_rows.items() if row not in cut}
            finished, changed = self._finish_failed(scheduled, failed, several, now)
        finished += self._finish_rows(scheduled, result, now)
        for sequence, token_id in zip(scheduled.sampled, drawn, strict=True):
            tokens = sequence.tokens
            if len(tokens) < sequence.next_check_at and token_id not in sequence.stop_ids:
                tokens.append(token_id)
                sequence.num_inflight -= 1
                continue
            if sequence.status is SequenceStatus.FINISHED:
                changed.setdefault(sequence.uid, [])
                continue
            sequence.num_inflight -= 1
            before = len(tokens)
            ended = self._append(sequence, several.get(sequence.uid, (token_id,)), now)
            if len(tokens) != before + 1:
                changed[sequence.uid] = tokens[before:]
            if ended is not None:
                finished.append(self._finish(sequence, *ended, now))
        if (shares := self.state.shares) is not None:
            shares.charge_each(scheduled.sampled, scheduled.layout)
        if not changed:
            return self._output(scheduled, result, scheduled.uids, drawn, scheduled.layout, finished)
        uids: list[int] = []
        token_ids: list[int] = []
        for sequence, token_id in zip(scheduled.sampled, drawn, strict=True):
            new = changed.get(sequence.uid)
            if new is None:
                uids.append(sequence.uid)
                token_ids.append(token_id)
                continue
            uids += [sequence.uid] * len(new)
            token_ids += new
            if shares is not None and len(new) > 1:
                shares.charge(sequence, len(new) - 1)
        return self._output(scheduled, result, uids, token_ids, self.state.new_layout(), finished)

    def fail(
        self,
        scheduled: ScheduledStep,
        rows: list[int] | None,
        message: str,
        now: float,
        code: str = "engine_error",
    ) -> list[Finished]:
        """End the requests of `rows` of a step without a result; the others start over from their known tokens.

        With `rows` None it is not known which request is at fault. Then everything that runs starts over, and fault
        isolation looks for it (core/scheduler/queues.py).

        A step writes into blocks of its own rows alone. Those of its blocks that are in the prefix cache are in
        `offered`: a decode's block is offered only when its step is committed. A sequence that has adopted one since
        has a row in a later step, which fails with this one.
        """
        self.kv.withdraw(scheduled.offered)
        if self.kv.snapshots is not None:
            self.kv.snapshots.withdraw(write.snapshot for write in scheduled.plan.snapshots)
        if rows is None:
            at_fault = self._isolate(scheduled)
        else:
            at_fault = [sequence for row, sequence in enumerate(scheduled.rows) if row in rows]
        finished = [
            self._finish(sequence, "error", (code, message), now)
            for sequence in dict.fromkeys(at_fault)
            if sequence.status is not SequenceStatus.FINISHED
        ]
        for row, sequence in enumerate(scheduled.rows):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if scheduled.plan.samples[row]:
                sequence.num_inflight -= 1
            if sequence.status is SequenceStatus.RUNNING:
                self.state.wait_again(sequence)
            else:
                self.state.drop_host_copy(sequence)  # it lacks this step's KV
        for sequence in scheduled.swapped_out:
            self.state.drop_host_copy(sequence)  # it may never have been made
        if rows is None:
            for sequence in self.running[::-1]:  # they had no row in the step, and must have none in a trial
                self.state.wait_again(sequence)
        self._resend_tokens(scheduled)
        return finished

    # -- questions ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot:
        """Return the gauges of this moment."""
        state, kv, drafts = self.state, self.kv, self.speculator.controller
        snapshots = kv.snapshots or StateSnapshots(0)
        held = sum(pool.num_held for pool in kv.pools)
        cached = sum(pool.num_evictable for pool in kv.pools)
        return SchedulerSnapshot(
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_waiting_tokens=state.waiting.num_tokens,
            num_slots_held=state.num_slots - len(state.free_slots),
            num_blocks=sum(pool.num_blocks for pool in kv.pools),
            num_blocks_held=held,
            num_blocks_cached=cached,
            num_blocks_free=sum(pool.num_free for pool in kv.pools) - cached,
            kv_usage=kv.usage,
            num_tokens_held=sum(sequence.num_computed for sequence in state.running) * len(kv.pools),
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
            running_adapters=tuple(s.request.adapter for s in state.running if s.request.adapter),
            block_ages=kv.block_ages.to_map(),
            num_snapshots=snapshots.num_snapshots,
            num_snapshots_known=snapshots.num_known,
            num_snapshot_evictions=snapshots.num_evictions,
            num_deferred=state.num_deferred,
        )

    def check(self) -> None:
        """Check the invariants, in tests and in an idle engine. Raises RuntimeError."""
        self.state.check()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        if self.speculator.proposer is not None:
            self.speculator.proposer.forget(sequence)
        return self.state.finish(sequence, reason, detail, now)

    def _finish_rows(self, scheduled: ScheduledStep, result: StepResult, now: float) -> list[Finished]:
        """End the requests whose embedding is there or whose log-probabilities are not; keep those of prompts."""
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(scheduled, result.prompt_logprobs)
        finished: list[Finished] = []
        if scheduled.plan.pooled:
            finished += self._finish_pooled(scheduled, result, now)
        if self.state.num_scored:
            finished += self._finish_unscored(scheduled, result, now)
        return finished

    def _finish_failed(
        self, scheduled: ScheduledStep, failed: dict[int, RowFailure], several: dict[int, list[int]], now: float
    ) -> tuple[list[Finished], dict[int, list[int]]]:
        """End the requests whose row failed on the device, after the draft tokens that it accepted before that: the
        draw that failed is the last of its row. `several`: all tokens of the rows that verified draft tokens.

        Returns the ends, and by uid the tokens that belong to the output. One of them may have ended it already.
        """
        finished: list[Finished] = []
        accepted: dict[int, list[int]] = {}
        for row, failure in failed.items():
            sequence = scheduled.rows[row]
            if sequence.status is SequenceStatus.FINISHED:
                continue
            before = len(sequence.tokens)
            tokens = several.get(sequence.uid, [])[:-1]
            try:
                ended = self._append_tokens(sequence, tokens, now)
            except InferEngineError as error:
                ended = refusal(error)
            if ended is None:
                ended = "error", self._cause(sequence, failure, len(tokens))
            accepted[sequence.uid] = sequence.tokens[before:]
            self.kv.forget(sequence, scheduled.plan.starts[row])
            finished.append(self._finish(sequence, *ended, now))
        return finished, accepted

    def _split_emitted(
        self, scheduled: ScheduledStep, result: StepResult
    ) -> tuple[list[int], dict[int, list[int]], set[int]]:
        """Settle the draft tokens of a step.

        Returns the first token of each sampled row, by uid all tokens of the rows that verified draft tokens, and the
        rows whose last draws were dropped because they had no mask.
        """
        plan = scheduled.plan
        first: list[int] = []
        several: dict[int, list[int]] = {}
        cut: set[int] = set()
        begin = 0
        draws = (row for row, samples in enumerate(plan.samples) if samples)
        for index, row in enumerate(draws):
            count = result.num_emitted[index] if result.num_emitted is not None else 1
            first.append(result.token_ids[begin])
            if row in scheduled.draft_tokens and scheduled.rows[row].status is not SequenceStatus.FINISHED:
                sequence = scheduled.rows[row]
                num_draws = self._num_draws.get(sequence.uid, 0)
                num_kept = min(count, num_draws or count)
                if num_kept < count:
                    cut.add(row)
                num_drafts = num_draws - 1 if num_draws else len(scheduled.draft_tokens[row])
                if num_drafts:
                    self.speculator.controller.observe(sequence, num_drafts, num_kept - 1)
                if num_draws:  # the masks after its draft tokens may cost a step as much again
                    sequence.drafts_resume_at = sequence.max_total
                if sequence.status is SequenceStatus.RUNNING or sequence.host_tables is not None:
                    sequence.num_computed = plan.starts[row] + num_kept  # the rest was computed for wrong draft tokens
                several[sequence.uid] = result.token_ids[begin : begin + num_kept]
                sequence.next_check_at = 0
            begin += count
        return first, several, cut

    def _append(self, sequence: Sequence, token_ids: SequenceOf[int], now: float) -> tuple[str, FinishDetail] | None:
        """Append the tokens of a row, and those that its grammar forces after them. Returns how the sequence ended."""
        try:
            ended = self._append_tokens(sequence, token_ids, now)
            if ended is None and sequence.grammar is not None:
                ended = self._append_forced(sequence, now)
            return ended
        except InferEngineError as error:  # the tokens have led the grammar to one of its limits
            return refusal(error)

    def _append_tokens(
        self, sequence: Sequence, token_ids: SequenceOf[int], now: float
    ) -> tuple[str, FinishDetail] | None:
        """Append tokens one by one until one ends the sequence. Returns how it ended."""
        grammar = sequence.grammar
        for token_id in token_ids:
            if grammar is not None and not grammar.accept(token_id):
                return "error", ("engine_error", "A token came that the grammar does not allow.")
            sequence.tokens.append(token_id)
            ended = self._check_token(sequence, token_id, now)
            if ended is not None:
                return ended
            if grammar is not None and grammar.is_terminated():
                return "stop", GRAMMAR_COMPLETE
        return None

    def _append_forced(self, sequence: Sequence, now: float) -> tuple[str, FinishDetail] | None:
        """Append the tokens that the grammar forces, without a step of the model."""
        grammar = sequence.grammar
        if grammar is None or not sequence.can_be_forced:
            return None
        if 0 < self.options.max_running_to_force < len(self.running):
            return None  # the mask allows the draw one token: the same result, without rows of several tokens
        forced = grammar.forced()
        if not forced:
            return None
        before = len(sequence.tokens)
        sequence.overlaps_at = before + FORCE_PATIENCE
        if sequence.num_inflight:
            return None  # the step under way draws the first of them: its mask allows nothing else
        ended = self._append_tokens(sequence, forced, now)
        if sequence.status is SequenceStatus.RUNNING:
            known = enumerate(sequence.tokens[before:], start=before)
            self.state.unsent_tokens.extend((sequence, position, token) for position, token in known)
        self.stats.num_forced_tokens += len(sequence.tokens) - before
        return ended

    def _check_token(self, sequence: Sequence, token_id: int, now: float) -> tuple[str, FinishDetail] | None:
        """Act on a token that was appended and is the first, fills a block, or may end the sequence."""
        length = len(sequence.tokens)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            self.state.release_forks(sequence)
        if length > sequence.next_hash_at and sequence.status is SequenceStatus.RUNNING:
            self.kv.cache_full_blocks(sequence, min(length - 1, sequence.num_computed))
        if sequence.grammar is None:
            sequence.next_check_at = min(sequence.max_total - 1, sequence.next_hash_at)
        return stop_reason(sequence, token_id)

    def _isolate(self, scheduled: ScheduledStep) -> list[Sequence]:
        """Start or continue fault isolation after a failed step. Returns the sequences to end for it."""
        plan = scheduled.plan
        suspects: list[Sequence] = []
        ends: list[int] = []
        for row, sequence in enumerate(scheduled.rows):
            if sequence.status is SequenceStatus.RUNNING:  # a preempted one is computed again anyway
                suspects.append(sequence)
                ends.append(plan.starts[row] + (1 if row in scheduled.draft_tokens else plan.counts[row]))
        return self.waiting.isolate(suspects, ends) if suspects else []

    def _resend_tokens(self, failed: ScheduledStep) -> None:
        """Send again the forced tokens of a failed step, for sequences without a row in it: those with a row start over
        from their known tokens."""
        writes = failed.plan.token_writes
        if writes is not None:
            by_slot = {sequence.slot: sequence for sequence in self.running if sequence not in failed.rows}
            for slot, position, token in zip(*writes, strict=True):
                if slot in by_slot:
                    self.state.unsent_tokens.append((by_slot[slot], position, token))

    def _leaves_some(self, sequence: Sequence, mask: memoryview, drafts: list[int]) -> bool:
        """Return whether the request's other fields allow any of the tokens in a grammar's mask, after these draft
        tokens."""
        rules = sequence.rules
        if rules is None:
            return True
        output = [*sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - rules.num_before) :], *drafts]
        num_output = sequence.num_output + len(drafts)
        parts = mask[:FEW_BYTES], mask  # all of a large vocabulary's takes 20 times as long
        return any(rules.allowed(int.from_bytes(part, "little"), num_output, output) for part in parts)

    def _no_token(self, sequence: Sequence) -> InvalidRequest:
        """Return the error of a request whose fields allow no token after its output."""
        rules = sequence.rules or TokenRules(sequence.request.params, sequence.end_ids)
        has_grammar = sequence.grammar is not None
        message = rules.no_token_message(sequence.num_output, has_grammar=has_grammar)
        return InvalidRequest("grammar" if has_grammar else rules.fields[0], message)

    def _cause(self, sequence: Sequence, failure: RowFailure, num_accepted: int) -> FinishDetail:
        """Return why the device gave no token after the output of a request, of which `num_accepted` draft tokens are
        of this step: the request's own fields if they allow none, else the failure."""
        if self._starved.get(sequence.uid) == num_accepted:
            return refusal(self._no_token(sequence))[1]
        if sequence.grammar is None and (rules := token_rules(sequence.request.params, sequence.stop_ids)) is not None:
            tokens = sequence.tokens
            before = tokens[max(sequence.num_prompt, len(tokens) - rules.num_before) :]
            if not rules.allowed((1 << self.capacity.vocab_size) - 1, sequence.num_output, before):
                return refusal(self._no_token(sequence))[1]
        self.stats.num_corrupted += failure is RowFailure.NOT_A_NUMBER
        return failure.value

    def _output(
        self,
        scheduled: ScheduledStep,
        result: StepResult,
        uids: list[int],
        token_ids: list[int],
        layout: int,
        finished: list[Finished],
    ) -> StepOutput:
        """Collect what belongs to the tokens of a step."""
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
        """End the embedding requests whose vector is there.

        A request that was preempted meanwhile has its vector, too: its step ran while it still held its blocks.
        """
        finished: list[Finished] = []
        vectors = result.embeddings or {}
        for row, _, ends, _ in scheduled.plan.pooled:
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

    def _finish_unscored(self, scheduled: ScheduledStep, result: StepResult, now: float) -> list[Finished]:
        """End the requests whose tokens came without the log-probabilities that they ask for."""
        finished: list[Finished] = []
        given = result.logprobs or {}
        draws = (row for row, samples in enumerate(scheduled.plan.samples) if samples)
        for index, row in enumerate(draws):
            sequence = scheduled.rows[row]
            params, count = sequence.request.params, 1 if result.num_emitted is None else result.num_emitted[index]
            lacks = params.logprobs is not None and len(given.get(row, ())) < count
            if params.prompt_logprobs is not None and not sequence.num_output:
                lacks |= len(self._prompt_logprobs.get(sequence.uid, ())) < sequence.num_prompt - 1
            if lacks and sequence.status is not SequenceStatus.FINISHED:
                detail = ("engine_error", "The device gave no log-probabilities.")
                finished.append(self._finish(sequence, "error", detail, now))
        return finished

    def _keep_prompt_logprobs(self, scheduled: ScheduledStep, new: dict[int, list[TokenLogprobs]]) -> None:
        """Join the chunks of a prompt. A preempted prompt starts over: what is known already is skipped."""
        for row, items in new.items():
            sequence, start = scheduled.rows[row], scheduled.plan.starts[row]
            if sequence.status is SequenceStatus.FINISHED:
                continue
            known = self._prompt_logprobs.setdefault(sequence.uid, [])
            if start <= len(known):
                known += items[len(known) - start :]

    def _take_prompt_logprobs(self, uids: list[int]) -> dict[int, list[TokenLogprobs]] | None:
        """Return the prompts' log-probabilities of sequences that have a token now; those of ended ones are dropped."""
        ready = {uid: self._prompt_logprobs.pop(uid) for uid in uids if uid in self._prompt_logprobs}
        for uid in [uid for uid in self._prompt_logprobs if uid not in self.sequences]:
            del self._prompt_logprobs[uid]
        return ready or None
