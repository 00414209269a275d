"""Speculator: gets draft tokens from a proposer, with KV blocks for them, in the steps in which that pays."""

from __future__ import annotations

from inferengine.core.kv_cache.manager import KVCacheManager
from inferengine.core.sequence import Sequence
from inferengine.core.speculation.controller import SpeculationController
from inferengine.core.speculation.proposers import Proposer

QUIET_STEPS = 8  # most steps without another look at whether a sequence could have draft tokens
LOOK_EVERY = 4  # of those steps only every fourth is measured: measuring takes microseconds, too


class Speculator:
    """Joins a proposer, the controller of how much to propose, and the scheduler's running sequences.

    `running` is the scheduler's own list, in order of admission. `proposer` is None without speculation.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        kv: KVCacheManager,
        running: list[Sequence],
        *,
        max_drafts: int,
        max_running: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.proposer = proposer
        self.controller = SpeculationController(max_drafts, max_running)
        self._kv = kv
        self._running = running
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waited_step = 0  # the last step that was not launched behind another, because of speculation
        self._quiet_until = 0  # step before which no sequence could have draft tokens
        self._begun_step = self._observed_step = 0  # the last steps planned and measured with speculation in mind

    def propose(self, step: int) -> dict[Sequence, list[int]]:
        """Return draft tokens for sequences whose tokens are all known. Their blocks are allocated; no sequence is
        preempted for draft tokens."""
        running, proposer, controller = self._running, self.proposer, self.controller
        if proposer is None or step < self._quiet_until:
            return {}
        num_steps, self._begun_step = step - self._begun_step, step
        if not controller.begin(len(running), num_steps):
            return {}
        offers: dict[Sequence, list[int]] = {}
        for sequence in running:
            total = len(sequence.tokens)
            if sequence.num_inflight or total - sequence.num_computed != 1 or not controller.is_due(sequence, total):
                continue
            if sequence.grammar is not None and proposer.on_device:
                continue  # the device cannot check draft tokens against a grammar
            most = min(controller.length(sequence), sequence.max_total - total - 1)
            if most <= 0:
                continue
            tokens = proposer.propose(sequence, most)
            if sequence.grammar is not None:
                tokens = tokens[: sequence.grammar.validate(tokens)]
            if tokens:
                offers[sequence] = tokens
            else:
                controller.nothing_offered(sequence)
        lengths = controller.choose(
            {sequence: len(tokens) for sequence, tokens in offers.items()}, len(running), on_device=proposer.on_device
        )
        chosen: dict[Sequence, list[int]] = {}
        room = max(0, self._max_num_batched_tokens - len(running))  # every running sequence keeps its own token
        for sequence, tokens in offers.items():
            tokens = tokens[: min(lengths.get(sequence, 0), room)]
            if tokens and self._kv.allocate(sequence, len(sequence.tokens) + len(tokens)):
                chosen[sequence] = tokens
                controller.begin_drafts(sequence)
                room -= len(tokens)
        return chosen

    def wants_results(self, step: int, is_verifying: bool) -> bool:
        """Whether planning this step should wait for the tokens under way. `is_verifying`: the last step has draft
        tokens, so its sequences' lengths are not known."""
        if is_verifying or (self.proposer is not None and self._could_propose(self.proposer, step)):
            self._waited_step = step
            return True
        return False

    def observe_step(
        self, step: int, num_rows: int, num_draft_tokens: int, verified: list[Sequence], seconds: float
    ) -> None:
        """Learn from the time of a step without prompts. `verified`: the sequences that had draft tokens in it."""
        if step < self._quiet_until and step % LOOK_EVERY and not num_draft_tokens:
            return
        on_device = self.proposer is not None and self.proposer.on_device
        self.controller.observe_step(
            num_rows,
            num_draft_tokens,
            seconds,
            num_steps=min(LOOK_EVERY, step - self._observed_step),
            has_waited=step == self._waited_step,
            # the draft model has read prompts in this step, or what came since its last draft tokens
            is_reading=on_device and any(sequence.is_draft_model_behind for sequence in verified),
        )
        self._observed_step = step

    def _could_propose(self, proposer: Proposer, step: int) -> bool:
        """Whether it is worth waiting for the tokens under way. A proposer on the host is asked what it would propose
        after the tokens that are known: where it has nothing now, it will hardly have anything after one more."""
        if step < self._quiet_until:
            return False
        running, controller = self._running, self.controller
        quiet = QUIET_STEPS
        if controller.is_active(len(running)):
            for sequence in running:
                if sequence.num_pending == 1 and controller.is_due(sequence, sequence.num_tokens):
                    if proposer.on_device or proposer.propose(sequence, 1):
                        return True
                    controller.nothing_offered(sequence)
                quiet = min(quiet, max(1, sequence.drafts_resume_at - sequence.num_tokens))
        self._quiet_until = step + quiet
        return False
