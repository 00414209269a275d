"""Compares this engine's model with transformers' own, layer by layer.

Both read the same checkpoint and the same prompt. Compared are the residual stream before the first layer and after
each layer, and the logits. The first layer with an error is the one to look at; with `model.quantization` set, the
errors show what quantization costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from inferengine.config import Config
from inferengine.core.executor import BlockUpdates, SlotInit, StepPlan
from inferengine.errors import ConfigError
from inferengine.executor.memory.kv_cache import sample_tokens
from inferengine.executor.slots import columns_of, make_batch
from inferengine.executor.torch_executor import TorchExecutor, build_executor
from inferengine.gguf.reader import SUFFIX
from inferengine.kernels.batch import Batch
from inferengine.sampling_params import SamplingParams


class Probe:
    """Runs prompts through a loaded executor's model for the logits of every position, in chunks of its token budget.
    It writes to the first blocks of the cache: never use it beside requests."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits [T, V] in fp32. Raises ConfigError when the cache is too small for the prompt."""
        executor = self._executor
        blocks = -(-len(token_ids) // executor.capacity.block_size)
        if blocks > min(group.num_blocks for group in executor.capacity.groups):
            raise ConfigError("cache.num_blocks", f"a prompt of {len(token_ids)} tokens needs {blocks}")
        budget = executor.capacity.max_num_batched_tokens
        parts = []
        for start in range(0, len(token_ids), budget):
            batch = self._batch(token_ids, start, min(budget, len(token_ids) - start), first=start == 0)
            parts.append(executor.model.logits(executor.model(batch)).float())
        return torch.cat(parts)

    def _batch(self, token_ids: Sequence[int], start: int, count: int, *, first: bool) -> Batch:
        executor = self._executor
        slot, slots = executor.slots.num_slots, executor.slots
        if first:
            blocks = list(range(-(-len(token_ids) // executor.capacity.block_size)))
            slots.admit([SlotInit(slot, token_ids, len(token_ids), SamplingParams(temperature=0.0), 0, ())])
            slots.apply_blocks([BlockUpdates([slot] * len(blocks), blocks, blocks) for _ in executor.kv.groups])
        plan = StepPlan(
            step=0,
            slots=[slot],
            starts=[start],
            counts=[count],
            samples=[False],
            num_decodes=0,
            num_tokens=count,
            admitted=[],
            block_updates=[],
        )
        batch = make_batch(plan, columns_of(plan), slots, executor.device)
        batch.plans = [
            executor.ops.prepare_attention(batch, group, kv, window)
            for group, (kv, window) in enumerate(executor.kv.group_caches)
        ]
        return batch

    def close(self) -> None:
        """Point the scratch slot's block table to the scratch block again."""
        for table, group in zip(self._executor.slots.block_tables, self._executor.capacity.groups, strict=True):
            table[self._executor.slots.num_slots] = group.num_blocks


DEFAULT_TOKENS = 64
# Largest relative error that rounding explains, by the number format that is computed with.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class Difference(NamedTuple):
    """The error at one place: the largest absolute one, and its norm over the norm of transformers' values."""

    place: str
    max_abs: float
    relative: float


class ModelComparison(NamedTuple):
    """The errors of all places, and how far the most likely tokens agree."""

    rows: list[Difference]
    tolerance: float
    same_tokens: float  # share of positions whose most likely token is the same

    @property
    def parted(self) -> str | None:
        """The first place whose relative error is above the tolerance; None where there is none."""
        return next((row.place for row in self.rows if not row.relative <= self.tolerance), None)


def compare(config: Config, num_tokens: int = DEFAULT_TOKENS) -> ModelComparison:
    """Run both models over the same random tokens. Raises ConfigError when transformers is not installed."""
    executor = build_executor(config)
    capacity = executor.load(lambda phase, share: None)
    token_ids = sample_tokens(capacity.vocab_size, min(num_tokens, capacity.max_model_len - 1))
    if executor.implementation:
        raise ConfigError("--compare", f"the layers of this model are those of {executor.implementation} already")
    ours = _of_ours(executor, token_ids)
    theirs = _of_transformers(executor.settings.folder, executor.dtype, executor.device, token_ids)
    executor.close()
    rows = [_difference(place, ours[place], theirs[place]) for place in theirs]
    same = (ours["logits"].argmax(-1) == theirs["logits"].argmax(-1)).float().mean()
    return ModelComparison(rows, TOLERANCE[executor.dtype], float(same))


def table(comparison: ModelComparison) -> list[str]:
    """Format the comparison as lines of a table."""
    lines = [f"{'place':<14}{'max abs error':>15}{'relative error':>16}"]
    for row in comparison.rows:
        mark = "" if row.relative <= comparison.tolerance else "  above the tolerance"
        lines.append(f"{row.place:<14}{row.max_abs:>15.3e}{row.relative:>16.3e}{mark}")
    lines.append(f"same most likely token at {comparison.same_tokens:.1%} of positions")
    tolerance = f"tolerance {comparison.tolerance:g}"
    parted = comparison.parted
    lines.append(f"the two agree ({tolerance})" if parted is None else f"the two part at {parted} ({tolerance})")
    return lines


def _of_ours(executor: Any, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}

    def keep(place: str, tensor: torch.Tensor) -> None:
        found.setdefault(place, []).append(tensor.detach().float().clone())

    probe = Probe(executor)
    handles = _watch(executor.model.layers, keep)
    try:
        logits = probe.logits(token_ids)
    finally:
        for handle in handles:
            handle.remove()
        probe.close()
    return {place: torch.cat(parts) for place, parts in found.items()} | {"logits": logits}


def _of_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, token_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    try:
        import transformers
    except ImportError:
        raise ConfigError("--compare", "transformers is not installed: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": folder, "use_safetensors": True}
    if folder.suffix == SUFFIX:  # which it dequantizes
        place = {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    except (ImportError, ValueError) as error:  # a GGUF file takes the packages `gguf` and `accelerate`
        raise ConfigError("--compare", f"transformers cannot read it: {error}") from None
    model = model.to(device).eval()  # type: ignore[arg-type]  # transformers' wrapper of `to` lost its signature
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = inner.layers if hasattr(inner, "layers") else inner.h
    found: dict[str, torch.Tensor] = {}
    handles = _watch(layers, lambda place, tensor: found.update({place: tensor.detach().float()[0].clone()}))
    try:
        with torch.inference_mode():
            found["logits"] = model(torch.tensor([list(token_ids)], device=device), use_cache=False).logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _watch(layers: nn.ModuleList, keep: Any) -> list[Any]:
    """Call keep(place, tensor) with the input of the first layer and the output of each one."""

    def entering(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        keep("embedding", inputs[0])

    def leaving(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            keep(f"layer {index}", output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [layers[0].register_forward_pre_hook(entering)]
    return handles + [layer.register_forward_hook(leaving(index)) for index, layer in enumerate(layers)]


def _difference(place: str, ours: torch.Tensor, theirs: torch.Tensor) -> Difference:
    error = (ours - theirs).abs()
    return Difference(place, float(error.max()), float(error.norm() / theirs.norm().clamp(min=1e-30)))
