"""Times the products of a model's mixtures of experts, as kernels/cuda/tuning/choices.py asks for them.

Routing and the weighted sum are part of each call: they follow the choice. Scores are seeded random numbers, either
equal for all experts on average or falling as 1 / rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

from inferengine.executor.tools.attention_timer import CallTimer
from inferengine.layers.moe import MoeMLP

logger = logging.getLogger(__name__)

MOST_ERROR = 0.05  # of a result, against deterministic mode's kernels
COLD_BYTES = 150 << 20  # of weights that one measurement reads: three times an H200's L2
CALL_S = 4e-3  # about the longest measurement
MOST_CALLS = 24  # of one
BYTES_PER_S, OPERATIONS_PER_S = 4e12, 600e12  # to guess how long a call takes


class _Inputs:
    """Of one subject, number of tokens and routing: x [T, E], the scores of the experts, what is added to, and what
    must come out."""

    def __init__(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        self.x, self.logits, self.residual = x, logits, torch.zeros_like(x)
        self.expected: torch.Tensor | None = None


class ExpertsTimer:
    """Times the mixtures of a model, given by subject (TunedExperts)."""

    def __init__(
        self, layers: dict[Any, list[MoeMLP]], device: torch.device, dtype: torch.dtype, timer: CallTimer
    ) -> None:
        self._layers, self._device, self._dtype, self._timer = layers, device, dtype, timer
        self._inputs: dict[tuple[Any, int, str], _Inputs] = {}  # of the latest subject and rows

    @torch.inference_mode()
    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile the kernels of all choices, in parallel."""
        from inferengine.kernels.cuda.compilation import compiling_ahead
        from inferengine.kernels.cuda.moe.configurations import experts_choices

        with compiling_ahead(ignore_errors=True):
            for subject, rows, choice in work:
                try:
                    layer, inputs = self._layers[subject][0], self._inputs_of(subject, rows, subject.cases(rows)[0])
                    with experts_choices.forcing(subject.key, choice):
                        _add(layer, inputs)
                    self._exact(layer, inputs)
                except Exception as error:  # `prepare` raises it again, and the choice is no candidate
                    logger.debug("%s of %d tokens as %s: %s", subject.key, rows, choice, error)

    @torch.inference_mode()
    def prepare(self, subject: Any, rows: int, case: str, choice: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one layer's mixture. Raises where the choice cannot be
        launched or computes something else than deterministic mode."""
        from inferengine.kernels.cuda.moe.configurations import experts_choices

        inputs, layers = self._inputs_of(subject, rows, case), self._layers[subject]
        if inputs.expected is None:
            inputs.expected = self._exact(layers[0], inputs).float()
        with experts_choices.forcing(subject.key, choice):
            inputs.residual.zero_()
            error = float((_add(layers[0], inputs).float() - inputs.expected).norm() / inputs.expected.norm())
            if not error < MOST_ERROR:
                raise ArithmeticError(f"the result is off by {error:.3f} of its size")
            turns = cycle(layers)
            sample = self._timer.prepare([lambda: _add(next(turns), inputs)] * self._num_calls(subject, rows))

        def forced() -> float:
            with experts_choices.forcing(subject.key, choice):
                return sample()

        return forced

    def _num_calls(self, subject: Any, rows: int) -> int:
        read_bytes = max(1.0, subject.read_bytes(rows))
        seconds = max(read_bytes / BYTES_PER_S, subject.operations(rows) / OPERATIONS_PER_S)
        return max(2, min(int(COLD_BYTES / read_bytes) + 1, int(CALL_S / seconds), MOST_CALLS))

    def _exact(self, layer: MoeMLP, inputs: _Inputs) -> torch.Tensor:
        """What deterministic mode computes, whose configurations nothing changes."""
        from inferengine.kernels.cuda.moe.mixture import MoeKernels

        exact = MoeKernels(deterministic=True)
        return exact.add_experts(
            inputs.x, inputs.logits, layer.routing, layer.packed, torch.zeros_like(inputs.residual)
        )

    def _inputs_of(self, subject: Any, rows: int, case: str) -> _Inputs:
        """The inputs of a case; those of another subject or number of tokens are forgotten."""
        from inferengine.kernels.cuda.tuning.tuned_experts import SKEWED

        found = self._inputs.get((subject, rows, case))
        if found is None:
            if not any(known[:2] == (subject, rows) for known in self._inputs):
                self._inputs.clear()
            generator = torch.Generator().manual_seed(rows)
            logits = torch.randn(rows, subject.key.num_experts, generator=generator)
            if case == SKEWED:
                logits -= (1 + torch.randperm(subject.key.num_experts, generator=generator)).float().log()
            x = torch.randn(rows, subject.key.columns, generator=generator)
            found = _Inputs(*(each.to(self._device, self._dtype) for each in (x, logits)))
            self._inputs[subject, rows, case] = found
        return found


def _add(layer: MoeMLP, inputs: _Inputs) -> torch.Tensor:
    summed: torch.Tensor = layer.ops.add_experts(inputs.x, inputs.logits, layer.routing, layer.packed, inputs.residual)
    return summed
