"""The time of a step: the least that the device allows (Roofline), and the most that is expected (StepTimes).

Roofline (Williams, Waterman, Patterson, 2009) adds up how close steps come to the least time:

    share = least time / time taken        least time = max(bytes / memory bandwidth, operations / peak rate)

Bytes are the weights once, the head's only where something is drawn, and the keys and values that the step's tokens
look back to, once for each row; of a mixture's experts, those that as many tokens choose on average where all experts
are chosen equally often. Operations are two for each weight and token, and four for each pair of query and key,
head and dimension; of latents (DeepSeek-V2, 2024), as they are or with the keys and values made of them, whichever is
less. To that, ranks that share a model add the time in which their sums pass the link between them: a
sum waits for the product before it, and the product after it for the sum. Launches, norms, sampling and the time of the
host do not count. A prefix that several rows share is counted for each of them, and a draft model is not counted. The
time taken is from when the device could begin (the launch, or the result before) until the result is there. The peaks
are those of the device's data sheet, or measured: see executor/tools/device_peaks.py. Beside other programs they are
measured too low; steps that take less than the least time raise them.

StepTimes learns from finished steps how long a step should take. A step has a size (`work`: its least time, where a
roofline tells, else a count of tokens) and features: what costs time beside the model's own products. A finished step
bounds another one that has none but its features: the other takes at most as long, or longer in proportion to its work.
The prediction is the lowest of these bounds. It is compared with twenty times itself (StallRule), so it need not be
good to a few per cent; it must not be wrong for a shape that comes for the first time. A step with a feature that no
finished step had is of a new kind: its bound comes from the other steps and is not to be trusted as much.

Pure: the caller says what a step held and how long it took.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, frexp
from typing import Any, NamedTuple

from inferengine.core.executor import StepPlan
from inferengine.core.scheduler.planner import ScheduledStep
from inferengine.core.sequence import Request
from inferengine.sampling_params import SamplingParams

PHASES = ("decode", "prefill", "mixed")
MEMORY_S = 10.0  # the share of a phase is over about so much time of its latest steps
RAISE_S = 1.0  # of steps, over which a share above 1 says that the peaks were measured too low
SMOOTHING = 0.3  # weight of a new step
OUTLIER = 3.0  # clip steps at so many times the expected time: what is longer has other causes
MAX_REFERENCES = 128
MAX_REQUESTS = 4096  # requests whose features are kept
PRIOR_SHARE = 0.2  # of the roofline: assumed for a step while nothing was measured
KEYS_PER_TOKEN = 256.0  # keys read, and pairs of query and key, that cost about as much as computing a token
PAIRS_PER_TOKEN = 8192.0


# -- the least time ---------------------------------------------------------------------------------------------------


class AttentionGroup(NamedTuple):
    """Layers that look back equally far, together. `window` in tokens; None: to the beginning."""

    kv_bytes_per_token: float
    operations_per_pair: float  # of one query with one key
    window: int | None = None
    # Of latent attention, if keys and values are up-projected: as `operations_per_pair`, and to up-project one token.
    up_projected_operations_per_pair: float = 0.0
    operations_to_up_project: float = 0.0
    readings: float = 1.0  # of a key by a query: more where layers share a cache, on the average of its layers


class ModelWork(NamedTuple):
    """What a model asks of a device, by layer weights, head and attention."""

    layer_bytes: float  # read by every step
    head_bytes: float  # read by steps that draw
    operations_per_token: float
    operations_per_draw: float
    groups: tuple[AttentionGroup, ...]
    expert_bytes: float = 0.0  # of a mixture's experts, all together
    chosen_share: float = 1.0  # of its experts that a token passes
    sent_bytes_per_token: float = 0.0  # to other ranks, which hold the rest of the model
    product_speed: float = 1.0  # of the layers' products, by which `operations_per_token` is divided


class StepWork(NamedTuple):
    """The least that a step asks of its device. Operations of quantized products count for less, as they run faster."""

    read_bytes: float
    operations: float


class DevicePeaks(NamedTuple):
    """What a device can do at most. `source` says where the figures come from, for people."""

    bytes_per_s: float
    operations_per_s: float
    source: str
    sent_bytes_per_s: float = 0.0  # to other devices; 0: unknown, and what is sent does not count
    is_measured: bool = False  # by this process, beside whatever else ran


class Roofline:
    """Adds up the least time and the time taken of every step, by phase. Written by the loop's thread alone.

    decode: rows of one token, and of draft tokens to verify. prefill: parts of prompts. mixed: both in one step.
    """

    def __init__(self, work: ModelWork, peaks: DevicePeaks) -> None:
        self.work = work
        self.peaks = peaks
        self._byte_s, self._operation_s = 1.0 / peaks.bytes_per_s, 1.0 / peaks.operations_per_s
        self._sent_token_s = work.sent_bytes_per_token / peaks.sent_bytes_per_s if peaks.sent_bytes_per_s else 0.0
        self._phases = {phase: _Phase() for phase in PHASES}
        self._written_token_bytes = sum(group.kv_bytes_per_token for group in work.groups)
        self._faster_operations = work.operations_per_token * (work.product_speed - 1.0)
        self._read_bytes = self._operations = 0.0
        self._tokens = 0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Add a finished step and the seconds it took."""
        work = self.work_of(plan)
        phase = self._phases[phase_of(plan)]
        phase.add(self._seconds_of(work, plan), seconds)
        if self.peaks.is_measured and phase.share > 1.0 and phase.late_taken_s >= RAISE_S:
            self._raise_peak(work, phase)
        self._read_bytes += work.read_bytes
        self._operations += work.operations
        self._tokens += plan.num_tokens

    def _raise_peak(self, work: StepWork, phase: _Phase) -> None:
        """Take for the peak that bounds such a step what the phase's latest steps have reached."""
        peaks, factor = self.peaks, phase.share
        if work.read_bytes * self._byte_s > work.operations * self._operation_s:
            self.peaks = peaks._replace(bytes_per_s=peaks.bytes_per_s * factor)
        else:
            self.peaks = peaks._replace(operations_per_s=peaks.operations_per_s * factor)
        self._byte_s, self._operation_s = 1.0 / self.peaks.bytes_per_s, 1.0 / self.peaks.operations_per_s
        phase.scale_late(1.0 / factor)

    def least_s(self, plan: StepPlan) -> float:
        """Return the seconds that no execution of this step can stay below. O(rows)."""
        return self._seconds_of(self.work_of(plan), plan)

    def _seconds_of(self, work: StepWork, plan: StepPlan) -> float:
        least_s = max(work.read_bytes * self._byte_s, work.operations * self._operation_s)
        return least_s + plan.num_tokens * self._sent_token_s

    def work_of(self, plan: StepPlan) -> StepWork:
        """Return what a step has to read and to compute. O(rows)."""
        work, starts, counts, decodes = self.work, plan.starts, plan.counts, plan.num_decodes
        num_rows = len(starts)
        draws = decodes + sum(plan.num_drafts) if decodes == num_rows else plan.num_sampled
        size = work.layer_bytes + work.head_bytes if draws else work.layer_bytes
        if work.expert_bytes:
            size += work.expert_bytes * (1.0 - (1.0 - work.chosen_share) ** plan.num_tokens)
        operations = plan.num_tokens * work.operations_per_token + draws * work.operations_per_draw
        for group in work.groups:
            token_bytes, pair_operations, window, up_projected_operations, to_up_project, readings = group
            kv_bytes = token_bytes * readings
            keys = decode_keys(starts, decodes, window)
            if decodes == num_rows:
                size += keys * kv_bytes
                operations += keys * pair_operations
                continue
            pairs, saved = float(keys), 0.0
            for row in range(decodes, num_rows):
                start, count = starts[row], counts[row]
                if window is None or start + count <= window:
                    own_pairs = count * (start + 0.5 * (count + 1))
                    keys += start + count
                    pairs += own_pairs
                    if to_up_project:
                        fewer = own_pairs * (pair_operations - up_projected_operations)
                        saved += max(0.0, fewer - start * to_up_project)
                else:
                    keys += start + count - max(0, start - window + 1)
                    inside = max(0, window - start)  # tokens of the chunk that still see the beginning
                    pairs += inside * (start + 0.5 * (inside + 1)) + (count - inside) * window
            size += keys * kv_bytes
            operations += pairs * pair_operations - saved
        return StepWork(size, operations)

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
            "operations": self._operations + self._tokens * self._faster_operations,
            "read_bytes": self._read_bytes,
            "written_bytes": self._tokens * self._written_token_bytes,
        }

    def shares(self) -> dict[str, float]:
        """Return the share over the latest MEMORY_S of computing, by phase that had steps."""
        return {name: round(phase.share, 4) for name, phase in self._phases.items() if phase.steps}


class _Phase:
    def __init__(self) -> None:
        self.steps = 0
        self.least_s = self.taken_s = 0.0
        self._late_least_s = self.late_taken_s = 0.0

    def add(self, least_s: float, taken_s: float) -> None:
        keep = exp(-taken_s / MEMORY_S)
        self._late_least_s = keep * self._late_least_s + least_s
        self.late_taken_s = keep * self.late_taken_s + taken_s
        self.least_s += least_s
        self.taken_s += taken_s
        self.steps += 1

    @property
    def share(self) -> float:
        return self._late_least_s / self.late_taken_s if self.late_taken_s > 0 else 0.0

    def scale_late(self, factor: float) -> None:
        self._late_least_s *= factor


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


# -- the expected time ------------------------------------------------------------------------------------------------


class StepSize(NamedTuple):
    """What decides the time of a step."""

    work: float  # above 0, in the unit of StepTimes
    features: frozenset[str]


class Prediction(NamedTuple):
    """`seconds` is None while nothing can be said; `known`: a finished step had all of the features."""

    seconds: float | None
    known: bool


class _Reference:
    """Finished steps of about equal size."""

    __slots__ = ("features", "seconds", "work")

    def __init__(self, size: StepSize, seconds: float) -> None:
        self.work, self.features, self.seconds = size.work, size.features, seconds

    def bound(self, work: float) -> float:
        return self.seconds * max(1.0, work / self.work)


class StepTimes:
    """Learns the times of finished steps. Work is `least_s` of a plan where that is given, else tokens."""

    def __init__(self, least_s: Callable[[StepPlan], float] | None = None) -> None:
        self._least_s = least_s
        self._requests: dict[int, _RequestFeatures] = {}
        self._references: dict[tuple[frozenset[str], int], _Reference] = {}  # the one seen longest ago first

    def size(self, step: ScheduledStep) -> StepSize:
        """Return the size of a step. O(rows); reads only what does not change any more."""
        work = token_work(step.plan) if self._least_s is None else self._least_s(step.plan)
        return StepSize(max(work, 1e-9), features_of(step, self._requests))

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn from a finished step."""
        key = (size.features, frexp(size.work)[1])
        known = self._references.pop(key, None)
        if known is not None:
            seconds = min(seconds, OUTLIER * known.bound(size.work))
            known.seconds += SMOOTHING * (seconds - known.seconds)
            known.work += SMOOTHING * (size.work - known.work)
        else:
            expected = self.predict(size)
            if expected.known and expected.seconds:
                seconds = min(seconds, OUTLIER * expected.seconds)
            known = _Reference(size, seconds)
        self._references[key] = known
        if len(self._references) > MAX_REFERENCES:
            del self._references[next(iter(self._references))]

    def predict(self, size: StepSize) -> Prediction:
        """Return how long a step of this size should take at most."""
        references = list(self._references.values())
        alike = [known for known in references if known.features >= size.features]
        if alike or references:
            return Prediction(min(known.bound(size.work) for known in alike or references), bool(alike))
        return Prediction(None if self._least_s is None else size.work / PRIOR_SHARE, False)


class StallRule(NamedTuple):
    """When a step that is not done counts as stalled."""

    factor: float
    min_s: float
    new_kind_s: float  # minimum for a step of a new kind

    def limit_s(self, prediction: Prediction) -> float:
        """Return the seconds after which a step of this prediction is a stall."""
        least_s = self.min_s if prediction.known else max(self.min_s, self.new_kind_s)
        return max(least_s, self.factor * (prediction.seconds or 0.0))


def token_work(plan: StepPlan) -> float:
    """Return the tokens computed, with the rough cost of draws and attention in tokens. O(rows)."""
    keys = pairs = 0.0
    for start, count in zip(plan.starts, plan.counts, strict=True):
        keys += start + count
        pairs += count * (start + 0.5 * (count + 1))
    return 1.0 + plan.num_tokens + plan.num_sampled + keys / KEYS_PER_TOKEN + pairs / PAIRS_PER_TOKEN


def features_of(step: ScheduledStep, known: dict[int, _RequestFeatures] | None = None) -> frozenset[str]:
    """Return what a step does beside running the model over its tokens and taking the likeliest. `known` caches the
    features of requests, by uid."""
    plan, found = step.plan, set[str]()
    if plan.masked:
        found.add("masks")
    if plan.pooled:
        found.add("embeddings")
    if any(plan.num_drafts):
        found.add("draft tokens")
    if plan.device_drafts:
        found.add("draft model")
    if any(copies.sources for updates in (plan.swap_out, plan.swap_in) for copies in updates):
        found.add("swap")
    known = {} if known is None else known
    if len(known) > MAX_REQUESTS:
        known.clear()
    draws: set[frozenset[str]] = set()
    for start, sequence, samples in zip(plan.starts, step.rows, plan.samples, strict=True):
        features = known.get(sequence.uid)
        if features is None:
            features = known[sequence.uid] = _features_of_request(sequence.request)
        if samples:
            draws.add(features.of_draws)
        if features.of_prompts and start < sequence.num_prompt:
            found.add(features.of_prompts)
        if features.of_rows:
            found.add(features.of_rows)
    return frozenset(found.union(*draws))


class _RequestFeatures(NamedTuple):
    """What a request adds to steps in which it draws, computes its prompt, or has a row at all."""

    of_draws: frozenset[str]
    of_prompts: str
    of_rows: str


def _features_of_request(request: Request) -> _RequestFeatures:
    prompts = "" if request.params.prompt_logprobs is None else "prompt_logprobs"
    return _shared(frozenset(_draw_features(request.params)), prompts, "adapter" if request.adapter else "")


@cache
def _shared(of_draws: frozenset[str], of_prompts: str, of_rows: str) -> _RequestFeatures:
    """Make the features, one object for all requests that are alike: thousands are kept, of few kinds."""
    return _RequestFeatures(of_draws, of_prompts, of_rows)


def _draw_features(params: SamplingParams) -> set[str]:
    found: set[str] = set()
    if not params.is_greedy:
        found.add("sampling")
        if params.top_p < 1.0 or params.top_k or params.min_p:
            found.add("filters")
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        found.add("penalties")
    if params.logit_bias or params.allowed_token_ids or params.bad_words_ids:
        found.add("bias")
    if params.logprobs is not None:
        found.add("logprobs")
    return found
