"""MemoryPlan: where a device's memory goes for a model, from its config.json alone. Printed at start and held to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferengine.kernels.ops import REFERENCE
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.models import registry
from inferengine.quant.layouts import layout_of
from inferengine.quant.schemes import bytes_per_weight

GIB = 1 << 30
CUDA_CONTEXT_BYTES = 600 * (1 << 20)  # driver, kernels and libraries of one process, measured on Hopper
GRAPH_BYTES_PER_BATCH_SIZE = 4 * (1 << 20)  # nodes of one captured decode step; its buffers are shared by all


class MemoryPlan(NamedTuple):
    """Bytes. `kv_bytes_per_token` is of full-attention layers, `window_bytes_per_sequence` of all sliding ones."""

    weights: int
    activations: int
    graphs: int
    context: int
    kv_bytes_per_token: int
    window_bytes_per_sequence: int
    kv_budget: int  # negative where the rest does not fit

    def sequences(self, num_tokens: int) -> int:
        """How many sequences of this length the KV cache holds at once."""
        return max(0, self.kv_budget) // max(1, num_tokens * self.kv_bytes_per_token + self.window_bytes_per_sequence)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that one sequence, or many sharing, could keep in full-attention layers."""
        room = max(0, self.kv_budget - self.window_bytes_per_sequence)
        return room // self.kv_bytes_per_token if self.kv_bytes_per_token else 0


def weight_bytes(
    config: DecoderConfig, model_type_values: dict[str, object], dtype: torch.dtype, quantization: str = "none"
) -> int:
    """Bytes of all parameters, counted on a model that is built without memory; shared ones once. `quantization` is the
    configuration's; a checkpoint that is quantized already says so itself."""
    with torch.device("meta"):
        model = registry.family(model_type_values).build(REFERENCE, config)
    sizes = {id(parameter): float(parameter.numel() * dtype.itemsize) for parameter in model.parameters()}
    layout = layout_of(model_type_values)
    scheme = quantization if layout is None else layout.scheme
    if scheme != "none":
        for module in model.modules():
            if isinstance(module, Linear):
                sizes[id(module.weight)] = module.weight.numel() * bytes_per_weight(scheme, module.in_features)
    return int(sum(sizes.values()))


def activation_bytes(config: DecoderConfig, num_tokens: int, num_seqs: int, dtype: torch.dtype) -> int:
    """An upper bound of what the largest step allocates: its widest layer a few times over, and the logits."""
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    return num_tokens * (widest + 4 * config.hidden_size) * 2 * dtype.itemsize + num_seqs * config.vocab_size * 12


def make_plan(
    config: DecoderConfig,
    model_type_values: dict[str, object],
    *,
    dtype: torch.dtype,
    device_bytes: int,
    memory_fraction: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_graphs: int,
    quantization: str = "none",
    kv_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """The plan for a device of `device_bytes`, of which `memory_fraction` may be used. `kv_dtype` None: `dtype`."""
    weights = weight_bytes(config, model_type_values, dtype, quantization)
    activations = activation_bytes(config, max_num_batched_tokens, max_num_seqs, dtype)
    context = CUDA_CONTEXT_BYTES if num_graphs else 0
    graphs = num_graphs * GRAPH_BYTES_PER_BATCH_SIZE
    full = window_bytes = 0
    for group, window in enumerate(config.group_windows):
        per_token = config.kv_bytes_per_token(group, (kv_dtype or dtype).itemsize)
        if window is None:
            full += per_token
        else:
            window_bytes += per_token * (window + max_num_batched_tokens)
    budget = int(device_bytes * memory_fraction) - weights - activations - context - graphs
    return MemoryPlan(weights, activations, graphs, context, full, window_bytes, budget)


def plan_lines(plan: MemoryPlan, contexts: list[int]) -> list[str]:
    """The plan as a table for people."""
    rows = [
        ("weights", plan.weights),
        ("activations of the largest step", plan.activations),
        ("captured graphs", plan.graphs),
        ("device context", plan.context),
        ("KV cache", plan.kv_budget),
    ]
    lines = [f"  {name:<34}{size / GIB:>9.2f} GiB" for name, size in rows]
    lines.append(f"  {'KV per token':<34}{plan.kv_bytes_per_token / 1024:>9.1f} KiB")
    if plan.window_bytes_per_sequence:
        lines.append(f"  {'sliding windows per sequence':<34}{plan.window_bytes_per_sequence / (1 << 20):>9.1f} MiB")
    if plan.kv_budget <= 0:
        lines.append("  It does not fit: take a smaller model or number format, or a larger device.")
        return lines
    lines.append(f"  {'tokens in the KV cache':<34}{plan.num_kv_tokens:>9,}")
    lines.append("  context length      sequences at once")
    lines += [f"  {length:>14,}      {plan.sequences(length):>17,}" for length in contexts]
    return lines
