"""Times the products of a model's mixtures of experts, as kernels/cuda/tuning/choices.py asks for them.

Routing and the weighted sum are part of each call: they follow the choice. Scores are seeded random numbers, either
equal for all experts on average or falling as 1 / rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch

from inferengine.executor.tools.call_timer import (
    CallTimer,
    check_result,
    compile_candidates,
    num_calls,
    with_choice,
)
from inferengine.layers.moe import MoeMLP


class _ExpertsInputs:
    """Of one subject, number of tokens and routing: x [T, columns], the experts' scores [T, experts], the residual that
    is added to, and what deterministic mode's kernels compute."""

    def __init__(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        self.x, self.logits, self.residual = x, logits, torch.zeros_like(x)
        self.expected: torch.Tensor | None = None


class ExpertsTimer:
    """Times the mixtures of a model, given by subject (TunedExperts)."""

    def __init__(
        self, layers: dict[Any, list[MoeMLP]], device: torch.device, dtype: torch.dtype, timer: CallTimer
    ) -> None:
        self._layers, self._device, self._dtype, self._timer = layers, device, dtype, timer
        self._inputs: dict[tuple[Any, int, str], _ExpertsInputs] = {}  # of the latest subject and rows

    @torch.inference_mode()
    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile the kernels of all choices, in parallel."""
        from inferengine.kernels.cuda.moe.configurations import experts_choices

        def launch(subject: Any, rows: int, choice: Any) -> None:
            layer, inputs = self._layers[subject][0], self._inputs_of(subject, rows, subject.cases(rows)[0])
            with experts_choices.forcing(subject.key, choice):
                _add_experts(layer, inputs)
            self._exact(layer, inputs)

        compile_candidates(work, launch)

    @torch.inference_mode()
    def prepare(self, subject: Any, rows: int, case: str, choice: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one layer's mixture. Raises where the choice cannot be
        launched or computes something else than deterministic mode."""
        from inferengine.kernels.cuda.moe.configurations import experts_choices

        inputs, layers = self._inputs_of(subject, rows, case), self._layers[subject]
        if inputs.expected is None:
            inputs.expected = self._exact(layers[0], inputs).float()
        forcing = partial(experts_choices.forcing, subject.key, choice)
        number = num_calls(max(1.0, subject.read_bytes(rows)), subject.operations(rows))
        with forcing():
            inputs.residual.zero_()
            check_result(_add_experts(layers[0], inputs).float(), inputs.expected)
            turns = cycle(layers)
            sample = self._timer.prepare([lambda: _add_experts(next(turns), inputs)] * number)
        return with_choice(forcing, sample)

    def _exact(self, layer: MoeMLP, inputs: _ExpertsInputs) -> torch.Tensor:
        """Return what deterministic mode computes: no measurement changes its configurations."""
        from inferengine.kernels.cuda.moe.mixture import MoeKernels

        exact = MoeKernels(deterministic=True)
        return exact.add_experts(
            inputs.x, inputs.logits, layer.routing, layer.packed, torch.zeros_like(inputs.residual)
        )

    def _inputs_of(self, subject: Any, rows: int, case: str) -> _ExpertsInputs:
        """Return the inputs of a case; those of another subject or number of tokens are forgotten."""
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
            found = _ExpertsInputs(*(each.to(self._device, self._dtype) for each in (x, logits)))
            self._inputs[subject, rows, case] = found
        return found


def _add_experts(layer: MoeMLP, inputs: _ExpertsInputs) -> torch.Tensor:
    summed: torch.Tensor = layer.ops.add_experts(inputs.x, inputs.logits, layer.routing, layer.packed, inputs.residual)
    return summed
