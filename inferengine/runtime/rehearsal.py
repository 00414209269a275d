"""Rehearsal: steps of every kind that will come, so that each kernel is compiled before the first request.

The kernels are compiled for classes of shapes (see kernels/tuning.py): one step of each class is enough. Such steps
belong to the scratch slot, whose KV nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from inferengine.core.plan import BlockUpdates, SlotInit, StepPlan
from inferengine.kernels.compile_ahead import compiling_ahead
from inferengine.params import SamplingParams

logger = logging.getLogger(__name__)

CHUNKS = (2, 16, 32, 64, 80)  # tokens: the classes of matrix products for few rows, and beyond
BESIDE = (1, 8, 32, 128, 256)  # decode rows beside a chunk


def scratch_plan(slot: int, num_groups: int, *, decodes: int, chunk: int) -> StepPlan:
    """A step of `decodes` decode rows and, where chunk > 0, one prompt of that many tokens, all of one slot."""
    rows = decodes + (chunk > 0)
    counts = [1] * decodes + [chunk] * (chunk > 0)
    return StepPlan(
        step=0,
        slots=[slot] * rows,
        starts=[0] * rows,
        counts=counts,
        samples=[True] * rows,
        num_decodes=decodes,
        num_tokens=sum(counts),
        admitted=[SlotInit(slot, [0] * max(1, chunk), max(1, chunk), SamplingParams(temperature=0.0), 0, ())],
        block_updates=[BlockUpdates([], [], []) for _ in range(num_groups)],
    )


def plans(slot: int, num_groups: int, *, max_rows: int, max_tokens: int) -> Iterator[StepPlan]:
    """One step of every class that is computed without a graph."""
    for chunk in (*CHUNKS, max_tokens):
        if chunk <= max_tokens:
            yield scratch_plan(slot, num_groups, decodes=0, chunk=chunk)
    for decodes in BESIDE:
        if decodes < max_rows and decodes + 2 <= max_tokens:
            yield scratch_plan(slot, num_groups, decodes=decodes, chunk=2)


@torch.inference_mode()
def compile_kernels(steps: list[Callable[[], object]]) -> None:
    """Compile, in parallel, whatever these computations launch; what they compute is thrown away."""
    try:
        with compiling_ahead():
            for step in steps:
                step()
    except Exception:  # one after the other still works, and tells which kernel it is
        logger.warning("kernels could not be compiled in parallel; they are one by one", exc_info=True)
