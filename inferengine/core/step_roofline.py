"""Roofline: how close steps come to the least time that the device allows them (Williams, Waterman, Patterson, 2009).

    share = least time / time taken        least time = max(bytes / memory bandwidth, operations / peak rate)

Bytes are the weights once, the head's only where something is drawn, and the keys and values that the step's tokens
look back to, once for each row. Operations are two for each weight and token, and four for each pair of query and key,
head and dimension. Launches, norms, sampling and the time of the host do not count. The time
taken is from when the device could begin (the launch, or the result before) until the result is there.

The peaks are the device's data sheet's, or measured: see executor/tools/device_peaks.py. A prefix that several rows
share is
counted for each of them, and a draft model is not counted.
"""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

from inferengine.core.step_plan import StepPlan

PHASES = ("decode", "prefill", "mixed")
MEMORY_S = 10.0  # the share of a phase is over about so much time of its latest steps


class AttentionGroup(NamedTuple):
    """Layers that look back equally far, together. `window` in tokens; None: to the beginning."""

    kv_bytes_per_token: float
    operations_per_pair: float  # of one query with one key
    window: int | None = None


class ModelWork(NamedTuple):
    """What a model asks of a device, by layer weights, head and attention."""

    layer_bytes: float  # read by every step
    head_bytes: float  # read by steps that draw
    operations_per_token: float
    operations_per_draw: float
    groups: tuple[AttentionGroup, ...]


class DevicePeaks(NamedTuple):
    """What a device can do at most. `source` says where the two figures come from, for people."""

    bytes_per_s: float
    operations_per_s: float
    source: str


class Roofline:
    """Adds up the least time and the time taken of every step, by phase. Written by the loop's thread alone.

    decode: rows of one token, and of draft tokens to verify. prefill: parts of prompts. mixed: both in one step.
    """

    def __init__(self, work: ModelWork, peaks: DevicePeaks) -> None:
        self.work = work
        self.peaks = peaks
        self._byte_s, self._operation_s = 1.0 / peaks.bytes_per_s, 1.0 / peaks.operations_per_s
        self._phases = {phase: _Phase() for phase in PHASES}

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Add a finished step and the seconds it took."""
        self._phases[phase_of(plan)].add(self.least_s(plan), seconds)

    def least_s(self, plan: StepPlan) -> float:
        """Return the seconds that no execution of this step can stay below. O(rows)."""
        work, starts, counts, decodes = self.work, plan.starts, plan.counts, plan.num_decodes
        num_rows = len(starts)
        draws = decodes + sum(plan.num_drafts) if decodes == num_rows else plan.num_sampled
        size = work.layer_bytes + work.head_bytes if draws else work.layer_bytes
        operations = plan.num_tokens * work.operations_per_token + draws * work.operations_per_draw
        for kv_bytes, pair_operations, window in work.groups:
            keys = decode_keys(starts, decodes, window)
            if decodes == num_rows:
                size += keys * kv_bytes
                operations += keys * pair_operations
                continue
            pairs = float(keys)
            for row in range(decodes, num_rows):
                start, count = starts[row], counts[row]
                if window is None or start + count <= window:
                    keys += start + count
                    pairs += count * (start + 0.5 * (count + 1))
                else:
                    keys += start + count - max(0, start - window + 1)
                    inside = max(0, window - start)  # tokens of the chunk that still see the beginning
                    pairs += inside * (start + 0.5 * (inside + 1)) + (count - inside) * window
            size += keys * kv_bytes
            operations += pairs * pair_operations
        return max(size * self._byte_s, operations * self._operation_s)

    def to_map(self) -> dict[str, Any]:
        """Return the figures for /stats: by phase that had steps, how many, and the two times since the start."""
        seen = [(name, phase) for name, phase in self._phases.items() if phase.steps]
        return {
            "steps": {name: phase.steps for name, phase in seen},
            "least_seconds": {name: phase.least_s for name, phase in seen},
            "step_seconds": {name: phase.taken_s for name, phase in seen},
            "peak_bytes_per_s": self.peaks.bytes_per_s,
            "peak_operations_per_s": self.peaks.operations_per_s,
            "peak_source": self.peaks.source,
        }

    def shares(self) -> dict[str, float]:
        """Return the share over the latest MEMORY_S of computing, by phase that had steps."""
        return {name: round(phase.share, 4) for name, phase in self._phases.items() if phase.steps}


class _Phase:
    def __init__(self) -> None:
        self.steps = 0
        self.least_s = self.taken_s = 0.0
        self._late_least_s = self._late_taken_s = 0.0

    def add(self, least_s: float, taken_s: float) -> None:
        keep = exp(-taken_s / MEMORY_S)
        self._late_least_s = keep * self._late_least_s + least_s
        self._late_taken_s = keep * self._late_taken_s + taken_s
        self.least_s += least_s
        self.taken_s += taken_s
        self.steps += 1

    @property
    def share(self) -> float:
        return self._late_least_s / self._late_taken_s if self._late_taken_s > 0 else 0.0


def phase_of(plan: StepPlan) -> str:
    """Return the phase of a step, one of PHASES."""
    decodes, num_rows = plan.num_decodes, len(plan.starts)
    if decodes == num_rows:
        return "decode"
    verifying = len(plan.num_drafts) - list(plan.num_drafts).count(0) if plan.num_drafts else 0
    if decodes + verifying == num_rows:
        return "decode"
    return "mixed" if decodes + verifying else "prefill"


def decode_keys(starts: list[int], decodes: int, window: int | None) -> int:
    """Return the keys that the first `decodes` rows attend to: the sum of min(start + 1, window)."""
    first = starts if decodes == len(starts) else starts[:decodes]
    if window is None:
        return sum(first) + decodes
    near = [start for start in first if start < window]
    return sum(near) + len(near) + (decodes - len(near)) * window
