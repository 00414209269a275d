"""StepTimes: how long a step should take, learnt from finished steps. StallRule: when it counts as stalled.

A step has a size (`work`: the least seconds that the device needs, where a roofline tells, else a count of tokens) and
features: what costs time beside the model's own products. A finished step bounds another one that has none but its
features: the other takes at most as long, or longer in proportion to its work. The prediction is the lowest of these
bounds. It is meant to be compared with twenty times itself, so it need not be good to a few per cent; it must not be
wrong for a shape that comes for the first time.

A step with a feature that no finished step had is of a new kind: its bound comes from the other steps and is not to be
trusted as much. Pure: the caller says what a step held and how long it took.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp
from typing import NamedTuple

from inferengine.core.request import Request
from inferengine.core.scheduler.step_builder import ScheduledStep
from inferengine.core.step_plan import StepPlan
from inferengine.sampling_params import SamplingParams

SMOOTHING = 0.3  # weight of a new step
OUTLIER = 3.0  # clip steps at so many times the expected time: what is longer has other causes
MAX_REFERENCES = 128
MAX_REQUESTS = 4096  # requests whose features are kept
PRIOR_SHARE = 0.2  # of the roofline: assumed for a step while nothing was measured
KEYS_PER_TOKEN = 256.0  # keys read, and pairs of query and key, that cost about as much as computing a token
PAIRS_PER_TOKEN = 8192.0


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
    return _RequestFeatures(frozenset(_draw_features(request.params)), prompts, "adapter" if request.adapter else "")


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
