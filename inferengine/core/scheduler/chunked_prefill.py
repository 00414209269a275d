"""ChunkedPrefillController: how many prompt tokens a step may carry so that running streams keep their rhythm.

The time of a step is taken to be base + slope × prompt tokens. Both are learnt from finished steps: the base from steps
that only decode, the slope from what mixed steps took beyond it. The limit is what keeps a step under the target.
"""

from __future__ import annotations

SMOOTHING = 0.1  # weight of a new observation
MINIMUM_CHUNK = 16  # prompts advance even when the target cannot be met


class ChunkedPrefillController:
    """Pure: the caller says what a step held and how long it took."""

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
        """Most prompt tokens beside `num_decodes` decodes. Without decodes nobody waits for the step: all of it."""
        if num_decodes == 0 or self._slope_s == 0.0:
            return budget
        room = int((self._target_s - self._base_s) / self._slope_s)
        return min(budget, max(MINIMUM_CHUNK, room))

    def _mix(self, old: float, new: float) -> float:
        return new if old == 0.0 else old + SMOOTHING * (new - old)
