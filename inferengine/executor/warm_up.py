"""Warm-up: runs one step of every kind, so that each kernel is compiled and loaded before the first request.

Kernels are compiled for classes of shapes (kernels/cuda/dispatch.py); one step of each class is enough. The sampler's
kernels are compiled once for any combination of features and any number of rows. Warm-up steps belong to the scratch
slot, whose KV nobody reads.

To compile, a step through one layer of each kind is enough (models/layer_kinds.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch

from inferengine.core.executor import BlockUpdates, PooledRow, Progress, SlotInit, StepPlan
from inferengine.executor.cuda_graphs import DecodeGraphs, GraphCapture, MixedGraphs, MixedShape, without_slow
from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.memory.prefix_groups import PrefixGroups, shares_prefixes
from inferengine.executor.sampler import StepDraws
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.slots import Slots
from inferengine.kernels.cuda.compilation import compiling_ahead
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.decoder import DecoderModel
from inferengine.models.layer_kinds import one_layer_of_each_kind
from inferengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """An executor with a loaded model: what warm-up and the measurements before it need."""

    settings: ExecutorSettings
    device: torch.device
    ops: Ops
    config: DecoderConfig
    model: DecoderModel
    kv: KVCache
    slots: Slots
    whole: DecoderConfig  # of all ranks together; `config` is this one's
    slow_rows: frozenset[int]  # numbers of rows whose steps take longer than larger ones

    def execute(self, plan: StepPlan) -> StepDraws:
        """Run one step."""
        ...


# -- entry points ------------------------------------------------------------------------------------------------------


class StepGraphs(NamedTuple):
    """The CUDA graphs of an executor."""

    decode: DecodeGraphs
    mixed: MixedGraphs
    later: list[Callable[[], None]]  # each captures one of those that are not captured yet


def capture_graphs(
    runner: StepRunner, shapes: list[MixedShape], compile_draft: Callable[[], None] | None, progress: Progress
) -> StepGraphs | None:
    """Compile every kernel that a step can launch, then capture the CUDA graphs that a start waits for. `shapes` are
    those of the graphs with prompts, `compile_draft` runs the draft model's steps. Returns None where settings or model
    want no graphs."""
    settings = runner.settings
    parts = runner.model, runner.ops, runner.slots, runner.kv.group_caches
    decode = DecodeGraphs(*parts, settings.max_num_seqs, runner.slow_rows, _prefix_groups(runner))
    mixed = MixedGraphs(*parts, [s for s in without_slow(shapes, runner.slow_rows) if _fits(s, settings)])
    steps: list[Callable[[], object]] = []
    config = runner.config  # a captured step lacks columns
    needs_columns = runner.model.plans_attention or bool(config.states) or not config.is_causal
    if not needs_columns:
        steps += [decode.run_all_eagerly, mixed.run_all_eagerly]
    if compile_draft is not None:
        steps.append(compile_draft)
    compile_kernels([*steps, *steps_of_each_class(runner)], runner.model)
    progress("compiling kernels", 1.0)
    if not settings.cuda_graphs or not runner.model.can_be_captured:
        return None
    capture = GraphCapture(runner.model, runner.device)
    for phase, captures in (("capturing decode graphs", decode.first()), ("capturing prompt graphs", mixed.first())):
        for index, capture_one in enumerate(captures):
            capture_one(capture)
            progress(phase, (index + 1) / len(captures))
    torch.cuda.empty_cache()  # of what ran outside the graphs
    return StepGraphs(decode, mixed, [partial(each, capture) for each in (*decode.later(), *mixed.later())])


def _prefix_groups(runner: StepRunner) -> PrefixGroups | None:
    """Make what finds the rows that share prefixes, for steps that can make use of it."""
    settings, whole = runner.settings, runner.whole
    if not runner.model.can_be_captured or not shares_prefixes(settings, whole):
        return None
    # A rank's share of all KV heads, not its own heads: all ranks choose alike.
    shape = whole.kv_shape(None)
    token_bytes = 2 * shape.num_heads * shape.head_dim * settings.kv_dtype(whole).itemsize
    return PrefixGroups(
        runner.slots.num_slots,
        runner.slots.max_blocks,
        runner.slots.block_size,
        group=whole.group_windows.index(None),
        token_bytes=token_bytes // settings.tensor_parallel,
    )


def _fits(shape: MixedShape, settings: ExecutorSettings) -> bool:
    return shape.num_tokens <= settings.max_num_batched_tokens


def steps_of_each_class(runner: StepRunner) -> list[Callable[[], object]]:
    """Return steps without a graph that together launch every kernel of such steps."""
    plans = (*_sampler_plans(runner), *_kernel_class_plans(runner))
    return [partial(execute_unmasked, runner, plan) for plan in plans]


def run_warm_up_steps(runner: StepRunner, progress: Progress) -> None:
    """Run prompts, a decode and, on CUDA, every feature of the sampler, as requests will."""
    on_cuda = runner.device.type == "cuda"
    sizes = (16, runner.settings.max_num_batched_tokens, 1) if on_cuda else (16, 1)
    sampler_plans = _sampler_plans(runner) if on_cuda else ()  # a CPU compiles nothing
    plans = [*sampler_plans, *(prompt_plan(runner, num_tokens) for num_tokens in sizes)]
    for index, plan in enumerate(plans):  # the last leaves the scratch slot greedy, as it was
        execute_unmasked(runner, plan).result()
        progress("warming up", (index + 1) / len(plans))


@torch.inference_mode()
def compile_kernels(steps: list[Callable[[], object]], model: DecoderModel) -> None:
    """Compile, in parallel, whatever these steps of a model launch; what they compute is thrown away."""
    try:
        with compiling_ahead(), one_layer_of_each_kind(model):
            for step in steps:
                step()
    except Exception:  # compiling one by one still works, and its error names the kernel
        logger.warning("kernels could not be compiled in parallel; they are compiled one by one", exc_info=True)


def execute_unmasked(runner: StepRunner, plan: StepPlan) -> StepDraws:
    """Execute a plan; its masked draws, where it has any, get masks that allow every token."""
    draws = runner.execute(plan)
    if plan.masked:
        words = -(-runner.config.vocab_size // 32)
        draws.provide_masks(bytearray(b"\xff") * (4 * words * len(plan.masked)))
    return draws


# -- plans -------------------------------------------------------------------------------------------------------------

CHUNKS = (2, 16, 32, 64, 80)  # tokens: the classes of matrix products for few rows, and beyond


def scratch_plan(slot: int, num_groups: int, *, decodes: int, chunk: int, num_chunks: int = 1) -> StepPlan:
    """Return a step of `decodes` decode rows and, where chunk > 0, `num_chunks` prompts of that many tokens, all of one
    slot."""
    counts = [1] * decodes + [chunk] * (num_chunks if chunk > 0 else 0)
    rows = len(counts)
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


def prompt_plan(runner: StepRunner, num_tokens: int, num_rows: int = 1) -> StepPlan:
    """Return a step of `num_rows` prompts of the scratch slot, cut to what a slot holds; of decodes where num_tokens is
    1."""
    num_tokens = max(1, min(num_tokens, runner.slots.tokens.shape[1] - 1))
    slot, groups = runner.slots.num_slots, len(runner.kv.groups)
    if num_tokens == 1:
        return scratch_plan(slot, groups, decodes=num_rows, chunk=0)
    return scratch_plan(slot, groups, decodes=0, chunk=num_tokens, num_chunks=num_rows)


def _kernel_class_plans(runner: StepRunner) -> Iterator[StepPlan]:
    """Return one step of every class of shapes that is computed without a graph."""
    from inferengine.kernels.cuda.dispatch import (  # here: an engine on a CPU starts without triton
        hopper_prefill_tokens,
        measured_rows,
    )
    from inferengine.kernels.cuda.moe.configurations import token_classes

    config, max_rows = runner.config, runner.settings.max_num_seqs
    dtype = runner.settings.compute_dtype(config)
    # Attention that sees later tokens is torch's: it has no classes.
    dims = {config.kv_shape(window).head_dim for window in config.windows} if config.is_causal else set()
    decode_rows = decode_row_classes(config, runner.kv, dtype, max_rows) if config.is_causal else ()
    return kernel_class_plans(
        runner.slots.num_slots,
        len(runner.kv.groups),
        max_rows=max_rows,
        max_tokens=runner.settings.max_num_batched_tokens,
        row_tokens=runner.slots.tokens.shape[1] - 1,
        decode_rows=decode_rows,
        more_chunks=(
            *measured_rows(),
            *(() if config.latent is not None else set().union(*map(hopper_prefill_tokens, dims))),
            *(() if config.moe is None else token_classes(config.moe.num_experts, config.moe.num_chosen)),
        ),
    )


def decode_row_classes(config: DecoderConfig, kv: KVCache, dtype: torch.dtype, max_rows: int) -> list[int]:
    """Return numbers of decode rows that together launch every attention kernel of steps of 1 to `max_rows` decode rows
    over this cache."""
    if config.latent is not None:
        from inferengine.kernels.cuda.attention import latent

        return latent.row_classes(config.num_heads, config.latent.rank, dtype.itemsize, max_rows)
    from inferengine.kernels.cuda.attention.decode import attention_key, row_classes

    keys = [attention_key(config.num_heads, cache, window) for cache, window in kv.group_caches]
    return row_classes(keys, max_rows, is_fp32=dtype == torch.float32)


def kernel_class_plans(
    slot: int,
    num_groups: int,
    *,
    max_rows: int,
    max_tokens: int,
    row_tokens: int,
    decode_rows: Iterable[int],
    more_chunks: Iterable[int] = (),
) -> Iterator[StepPlan]:
    """Yield one step of every class of shapes. `max_tokens` are a step's, `row_tokens` those that a row may have of it.
    `decode_rows`: a number of decode rows for each decode attention kernel; `more_chunks`: further classes by the
    number of tokens, such as those where a measured choice changes."""
    for tokens in sorted({*CHUNKS, *more_chunks, max_tokens}):
        rows = -(-tokens // row_tokens)
        for chunk in sorted({tokens // rows, -(-tokens // rows)}):  # both sides, where the rows do not divide them
            if 1 < chunk * rows <= max_tokens and rows <= max_rows:
                yield scratch_plan(slot, num_groups, decodes=0, chunk=chunk, num_chunks=rows)
    for decodes in decode_rows:
        if decodes <= min(max_rows, max_tokens):
            yield scratch_plan(slot, num_groups, decodes=decodes, chunk=0)
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


def _sampler_plans(runner: StepRunner) -> Iterator[StepPlan]:
    """Return the steps whose draws use each feature of the sampler: alone, and in as many rows as an engine runs."""
    rows = min(runner.settings.max_num_seqs, runner.settings.max_num_batched_tokens)
    slot, groups = runner.slots.num_slots, len(runner.kv.groups)
    return sampler_plans(slot, groups, max_rows=rows, vocab_size=runner.config.vocab_size)


def sampler_plans(slot: int, num_groups: int, *, max_rows: int, vocab_size: int) -> Iterator[StepPlan]:
    """Yield steps whose draws use each feature of the sampler, of one row and of `max_rows`. Some have masked draws."""
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
