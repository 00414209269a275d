"""The ops table: which function does each job on this device, resolved once when a model is built.

A model never asks where it runs; it calls `ops.rms_norm` and so on. A new kernel is a new entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inferengine.kernels import cpu, cpu_latent
from inferengine.kernels.reference import moe, ops


@dataclass(frozen=True)
class Ops:
    """Functions by job; signatures in docs/executor.md and kernels/reference/ops.py."""

    name: str
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norm_add: Callable[..., torch.Tensor | None]
    norm_queries_keys: Callable[..., None]
    layer_norm: Callable[..., torch.Tensor]
    silu_and_mul: Callable[..., torch.Tensor]
    gelu_tanh_and_mul: Callable[..., torch.Tensor]
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    linear: Callable[..., torch.Tensor]
    pack_linear: Callable[[torch.Tensor], Any]
    norm_linear: Callable[..., torch.Tensor]
    linear_add: Callable[..., torch.Tensor]
    linear_add_norm: Callable[..., tuple[torch.Tensor, Any]] | None  # None: nothing to gain
    norm_gated_linear: Callable[..., torch.Tensor]
    pack_experts: Callable[..., Any]
    add_experts: Callable[..., torch.Tensor]
    add_experts_norm: Callable[..., tuple[torch.Tensor, Any]] | None  # None: nothing to gain
    prepare_attention: Callable[..., Any]
    attention_qkv: Callable[..., torch.Tensor]
    latent_attention: Callable[..., torch.Tensor]
    apply_masks: Callable[[torch.Tensor, torch.Tensor], None]
    sample: Callable[..., torch.Tensor]
    token_logprobs: Callable[..., torch.Tensor]
    rows_of: Callable[..., torch.Tensor] | None = None  # of a packed embedding; None: none is packed
    pads_vocabulary: bool = False  # products are faster whose outputs are a multiple of VOCABULARY_UNIT
    reads_codes: bool = False  # products take, besides tensors, inputs that other products of the table handed on


REFERENCE = Ops(
    name="torch",
    rms_norm=ops.rms_norm,
    add_rms_norm=ops.add_rms_norm,
    rms_norm_add=ops.rms_norm_add,
    norm_queries_keys=ops.norm_queries_keys,
    layer_norm=ops.layer_norm,
    silu_and_mul=ops.silu_and_mul,
    gelu_tanh_and_mul=ops.gelu_tanh_and_mul,
    softcap=ops.softcap,
    linear=ops.linear,
    pack_linear=ops.pack_linear,
    norm_linear=ops.norm_linear,
    linear_add=ops.linear_add,
    linear_add_norm=None,
    norm_gated_linear=ops.norm_gated_linear,
    pack_experts=moe.pack_experts,
    add_experts=moe.add_experts,
    add_experts_norm=None,
    prepare_attention=cpu.prepare_attention,
    attention_qkv=cpu.attention_qkv,
    latent_attention=cpu_latent.latent_attention,
    apply_masks=ops.apply_masks,
    sample=ops.sample,
    token_logprobs=ops.token_logprobs,
)


def resolve(device: torch.device, *, deterministic: bool = False) -> Ops:
    """Return the table for a device. `deterministic`: tilings that depend on the model's shapes only, never on the
    batch."""
    if device.type == "cuda":
        from inferengine.kernels.cuda import table  # here: Triton is not installed everywhere

        return Ops(**table.table(device, deterministic=deterministic))
    return REFERENCE
