"""Chunked prefill: how the prompt tokens of a step are limited, and shared between tenants.

The time of a step is modelled as base + slope × prompt tokens. Both are learnt from finished steps: the base from steps
that only decode, the slope from what mixed steps took beyond it. The limit keeps a step under the target, so that
running streams keep their rhythm.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from inferengine.core.sequence import Sequence

SMOOTHING = 0.1  # weight of a new observation
MINIMUM_CHUNK = 16  # prompts advance even when the target cannot be met


class ChunkedPrefillController:
    """Limits the prompt tokens of a step by a target for its time. Pure: the caller measures the steps."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._base_s = 0.0
        self._slope_s = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Learn from a finished step."""
        if num_prompt_tokens == 0:
            if num_decodes:
                self._base_s = self._mix(self._base_s, duration_s)
            return
        slope = max(0.0, duration_s - self._base_s) / num_prompt_tokens
        self._slope_s = self._mix(self._slope_s, slope)

    def limit(self, num_decodes: int, budget: int) -> int:
        """Return the most prompt tokens beside `num_decodes` decodes: the whole budget where there are no decodes."""
        if num_decodes == 0 or self._slope_s == 0.0:
            return budget
        room = int((self._target_s - self._base_s) / self._slope_s)
        return min(budget, max(MINIMUM_CHUNK, room))

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0.0 else old + SMOOTHING * (new - old)


def tenant_budgets(prefilling: SequenceOf[Sequence], budget: int) -> dict[str, int] | None:
    """Split a budget of prompt tokens between tenants: equal parts, of which unneeded rests go to the others.

    None where only one tenant has prompts to compute: all of the budget is its own.
    """
    pending: dict[str, int] = {}
    for sequence in prefilling:
        tenant = sequence.request.tenant
        pending[tenant] = pending.get(tenant, 0) + sequence.num_pending * sequence.token_cost
    if len(pending) < 2:
        return None
    budgets: dict[str, int] = {}
    for tenant in sorted(pending, key=pending.__getitem__):
        budgets[tenant] = min(pending[tenant], budget // (len(pending) - len(budgets)))
        budget -= budgets[tenant]
    return budgets
