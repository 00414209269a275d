"""How steps run on a CPU: on one thread or on all, and row by row where the result is not finite.

Threads: a step is a hundred parallel regions, and each ends when its slowest thread does. On an idle machine a second
core saves a quarter of the time (32 rows of the embedded model: 16 -> 12 ms). Where another process holds that core,
every region waits for a time slice and the same step takes 400 ms. On a small machine that also runs the front ends
this changes from second to second, so the durations of the steps themselves are measured.

What follows attention in the last layer is computed of those tokens alone whose states are wanted: of a prompt, its
last one.

Row by row: rows share products with other rows' keys, masked (kernels/cpu.py). A row whose states are
NaN (a broken weight, an overflow of a low-precision model) would spoil the other rows. One sum over the result detects
that, and such a step is computed again with every row by itself: good rows write the same to the cache, and only the
bad rows fail.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from inferengine.executor.memory.kv_cache import GroupCache
from inferengine.kernels.batch import Batch
from inferengine.kernels.cpu import DecodeKvCache
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.cpu_decode import DecodeRunner
from inferengine.models.decoder import DecoderModel

BYTES_PER_S = 10e9  # that one core reads
FLOPS = 50e9  # of one core in fp32, per second
WORTH_IT_S = 1.5e-3  # steps that one thread computes in less time run on one
MEMORY = 0.25  # weight of the newest step in a mean: high enough for one step of 400 ms to change the choice
FIRST_TRIAL, LAST_TRIAL = 16, 4096  # steps until the slower choice is tried again; doubled each time it loses
TRIAL_SHARE = 0.02  # of all time may go into losing trials: a slow one is followed by a long pause


class Threads:
    """Sets torch's number of threads before a step and learns from the step's duration.

    `fixed` > 0 is the configured number, for every step.
    """

    def __init__(self, config: DecoderConfig, fixed: int) -> None:
        self.most = fixed or torch.get_num_threads()
        self._fixed = fixed > 0
        num_weights = _num_weights(config)
        self._step_s, self._token_s = 2 * num_weights / BYTES_PER_S, 2 * num_weights / FLOPS
        self._sizes: dict[int, _Choice] = {}

    def prepare(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens` tokens, for the calling thread: OpenMP keeps one per thread."""
        number = self._number(num_tokens)
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of the step that was prepared last."""
        choice = self._sizes.get(num_tokens.bit_length())
        if choice is not None:
            choice.observe(seconds / num_tokens)

    def _number(self, num_tokens: int) -> int:
        if self._fixed or self.most == 1:
            return self.most
        if max(self._step_s, num_tokens * self._token_s) < WORTH_IT_S:
            return 1
        return self.most if self._sizes.setdefault(num_tokens.bit_length(), _Choice()).use_all() else 1


class _Choice:
    """One thread or all, for steps of about one size."""

    def __init__(self) -> None:
        self._mean_s: dict[bool, float] = {}  # by "all threads": recent seconds per token
        self._using = False
        self._until_trial, self._interval = 0, FIRST_TRIAL

    def use_all(self) -> bool:
        if len(self._mean_s) < 2:
            self._using = bool(self._mean_s)  # the first step on one thread, the second on all
            return self._using
        best = self._mean_s[True] < self._mean_s[False]
        self._until_trial -= 1
        if self._until_trial > 0:
            self._using = best
        else:
            self._using = not best
            self._interval = min(LAST_TRIAL, 2 * self._interval)
            self._until_trial = self._interval
        return self._using

    def observe(self, seconds: float) -> None:
        using = self._using
        other_s = self._mean_s.get(not using)
        before = self._mean_s.get(using, seconds)
        was_best = other_s is None or before <= other_s
        mean_s = self._mean_s[using] = before + (MEMORY if was_best else 1.0) * (seconds - before)
        if other_s is None:
            return
        if was_best != (mean_s <= other_s):  # the ranking has changed: try again soon
            self._until_trial = self._interval = FIRST_TRIAL
        if mean_s > other_s:
            pause = int((mean_s / other_s - 1.0) / TRIAL_SHARE)
            self._until_trial = max(self._until_trial, min(LAST_TRIAL, pause))


def _num_weights(config: DecoderConfig) -> int:
    """Return the number of weights that a step reads: the projections of every layer, and the head."""
    attention = sum(sum(parts) + parts[0] for parts in map(config.qkv_parts, range(len(config.windows))))
    widths = sum(config.feed_forward_width(layer) for layer in range(config.num_layers))
    return config.hidden_size * (attention + 3 * widths + config.vocab_size)


def forward_on_cpu(
    model: DecoderModel,
    ops: Ops,
    batch: Batch,
    groups: list[GroupCache],
    decode_kv_cache: DecodeKvCache,
    admitted: list[int],
    runner: DecodeRunner | None = None,
) -> torch.Tensor:
    """Compute the final hidden states [T, E], or [N, E] of `batch.kept_tokens`; where states are not finite, once more
    with every row by itself.

    `decode_kv_cache` copies the keys and values of rows that decode step after step. `admitted`: slots with contents
    that no step of `model` computed. `runner` computes the steps that it can.
    """
    assert batch.columns is not None  # `make_batch` made it
    decode_kv_cache.begin(batch.columns, admitted)
    batch.decode_kv_cache = decode_kv_cache
    hidden = _pass(model, ops, batch, groups, runner)
    if _is_finite(hidden) and (batch.checksum is None or math.isfinite(batch.checksum.item())):
        decode_kv_cache.end()
        return hidden
    decode_kv_cache.forget()
    batch.isolated = True
    hidden = _pass(model, ops, batch, groups, None)
    decode_kv_cache.end()
    return hidden


def _is_finite(hidden: torch.Tensor) -> bool:
    if hidden.dtype != torch.float32:
        return math.isfinite(hidden.sum(dtype=torch.float32).item())
    with np.errstate(all="ignore"):
        return math.isfinite(hidden.numpy().sum())  # a tenth of torch's time


def _pass(
    model: DecoderModel, ops: Ops, batch: Batch, groups: list[GroupCache], runner: DecodeRunner | None
) -> torch.Tensor:
    if not model.plans_attention:
        batch.plans = [ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(groups)]
    with np.errstate(all="ignore"):  # rows that are no numbers are looked for afterwards
        found = None if runner is None else runner.compute(batch)
        hidden: torch.Tensor = model(batch) if found is None else found
    return hidden
