"""Warm-up steps: one of every kind, so that each kernel is compiled and loaded before the first request.

Kernels are compiled for classes of shapes (kernels/cuda/tuning.py); one step of each class is enough. What a request
may ask
of the sampler is compiled once for any combination and any number of rows. Warm-up steps belong to the scratch slot,
whose KV nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from inferengine.core.step_plan import BlockUpdates, PooledRow, SlotInit, StepPlan
from inferengine.executor.cuda_graphs.layer_kinds import one_layer_of_each_kind
from inferengine.kernels.cuda.compilation import compiling_ahead
from inferengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

CHUNKS = (2, 16, 32, 64, 80)  # tokens: the classes of matrix products for few rows, and beyond


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


def plans(
    slot: int, num_groups: int, *, max_rows: int, max_tokens: int, decode_rows: Iterable[int]
) -> Iterator[StepPlan]:
    """One step of every class that is computed without a graph. `decode_rows`: numbers of decode rows, one for each
    kernel that attends for them."""
    for chunk in (*CHUNKS, max_tokens):
        if chunk <= max_tokens:
            yield scratch_plan(slot, num_groups, decodes=0, chunk=chunk)
    for decodes in decode_rows:
        if decodes < max_rows and decodes + 2 <= max_tokens:
            yield scratch_plan(slot, num_groups, decodes=decodes, chunk=2)


EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    min_tokens=8,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0, 1),
    bad_words_ids=((0,), (0, 1)),
    logprobs=1,
)
FEATURES = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=1),
    EVERYTHING,
)


def feature_plans(slot: int, num_groups: int, *, max_rows: int, vocab_size: int) -> Iterator[StepPlan]:
    """Steps whose draws use each feature of the sampler: alone, and in as many rows as an engine runs.

    Masked draws wait for `provide_masks`: see `open_masks`.
    """
    for rows in dict.fromkeys((1, max_rows)):
        for params in FEATURES:
            plan = scratch_plan(slot, num_groups, decodes=rows, chunk=0)
            init = plan.admitted[0]._replace(params=params, stop_token_ids=(vocab_size - 1,))
            plan = plan._replace(admitted=[init])
            yield plan
            yield plan._replace(masked=list(range(rows)))
    prompt = scratch_plan(slot, num_groups, decodes=0, chunk=2)
    yield prompt._replace(pooled=[PooledRow(0, True, True)], samples=[False])
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    yield prompt._replace(admitted=[prompt.admitted[0]._replace(params=params)])


def open_masks(plan: StepPlan, vocab_size: int) -> bytearray:
    """Masks for the plan's masked draws that allow every token."""
    return bytearray(b"\xff") * (4 * -(-vocab_size // 32) * len(plan.masked))


@torch.inference_mode()
def compile_kernels(steps: list[Callable[[], object]], model: Any) -> None:
    """Compile, in parallel, whatever these steps of a model launch; what they compute is thrown away."""
    try:
        with compiling_ahead(), one_layer_of_each_kind(model):
            for step in steps:
                step()
    except Exception:  # one after the other still works, and tells which kernel it is
        logger.warning("kernels could not be compiled in parallel; they are one by one", exc_info=True)
