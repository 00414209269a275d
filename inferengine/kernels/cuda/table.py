"""The ops table of CUDA devices. Everything here may be captured in a CUDA graph.

`dispatch.py` says which kernel takes which shape. Deterministic mode uses one attention kernel for prompts and decodes,
and one matrix product that always sums the inner dimension in the same order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from inferengine.kernels.batch import USUAL_KEYS, NewKeys
from inferengine.kernels.cuda import activation, norm
from inferengine.kernels.cuda.attention.decode import chosen_config, decode_attention, decode_attention_qkv
from inferengine.kernels.cuda.attention.latent import head_products, latent_decode, latent_prefill, latent_rope_write
from inferengine.kernels.cuda.attention.prefill import prefill_attention
from inferengine.kernels.cuda.attention.shared_prefix import shared_decode_attention
from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, Operands, Product, candidates
from inferengine.kernels.cuda.gemm.dense_small_m import gemv, tiled
from inferengine.kernels.cuda.gemm.dense_tma import tma_fits, tma_parts, tma_tiled
from inferengine.kernels.cuda.moe.mixture import MoeKernels, pack_experts
from inferengine.kernels.cuda.rope_kv_write import qkv_rope_write
from inferengine.kernels.cuda.sampling.logits import apply_masks
from inferengine.kernels.cuda.sampling.logprobs import token_logprobs
from inferengine.kernels.cuda.sampling.sample import sample
from inferengine.kernels.cuda.split_k import Scratch

ACTIVATIONS = {"silu": activation.SILU, "gelu_tanh": activation.GELU_TANH}


class CudaKernels:
    """The kernels bound to one device's scratch memory. One instance for each model on a stream."""

    def __init__(self, device: torch.device, *, deterministic: bool = False) -> None:
        self.scratch = Scratch(device)
        self.deterministic = deterministic

    # -- matrix products ---------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, in] @ weight[out, in].T + bias."""
        choice = self._choose(x, weight, Product.LINEAR)
        if choice is None:
            return functional.linear(x, weight, bias)
        return self._launch(choice, x, weight, bias=bias)

    def norm_linear(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return linear(rms_norm(x)); one kernel for a single row."""
        choice = self._choose(x, weight, Product.LINEAR)
        if choice is not None and choice.kernel is Kernel.GEMV:
            return gemv(x, weight, choice.config, bias=bias, gain=gain, eps=eps)
        return self.linear(norm.rms_norm(x, gain, eps), weight, bias)

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Add linear(x) to the residual, in place, summed before it is rounded."""
        choice = self._choose(x, weight, Product.LINEAR)
        if choice is not None:
            return self._launch(choice, x, weight, bias=bias, residual=residual)
        if bias is not None:
            return residual.add_(functional.linear(x, weight, bias))
        return torch.addmm(residual, x, weight.t(), out=residual)

    def linear_add_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do `linear_add`, and return with it rms_norm of the sum where the kernel that adds up the product's partial
        sums computes it; else None."""
        choice = self._choose(x, weight, Product.PARTS) if bias is None else None
        if choice is None:
            return self.linear_add(x, weight, bias, residual), None
        parts = tma_parts(x, weight, choice.config, self.scratch)
        normed, residual = norm.add_parts_rms_norm(parts, residual, gain, eps)
        return residual, normed

    def norm_gated_linear(
        self,
        x: torch.Tensor,
        gain: torch.Tensor | None,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Return act(gate) * up of rms_norm(x), of x itself without a gain; weight [2I, E], the gate's rows first."""
        act = ACTIVATIONS[activation]
        choice = self._choose(x, weight, Product.GATED)
        if choice is not None and choice.kernel is Kernel.GEMV:
            return gemv(x, weight, choice.config, bias=bias, gain=gain, eps=eps, gated=act)
        normed = x if gain is None else norm.rms_norm(x, gain, eps)
        if choice is not None:
            return self._launch(choice, normed, weight, bias=bias, gated=act)
        return self._activate(act, self.linear(normed, weight, bias))

    def _activate(self, act: int, x: torch.Tensor) -> torch.Tensor:
        return activation.silu_and_mul(x) if act == activation.SILU else activation.gelu_tanh_and_mul(x)

    def _choose(self, x: torch.Tensor, weight: torch.Tensor, product: Product) -> KernelChoice | None:
        """Return the best kernel that takes these tensors; None: cuBLAS."""
        is_fp32 = x.dtype == torch.float32
        if self.deterministic:
            operands = Operands.DENSE_FP32_EXACT if is_fp32 else Operands.DENSE_EXACT
        else:
            operands = Operands.DENSE_FP32 if is_fp32 else Operands.DENSE
        for choice in candidates(operands, product, x.shape[0], *weight.shape):
            by_tma = choice.kernel in (Kernel.TMA_TILE, Kernel.TMA_PARTS)
            if not by_tma or tma_fits(x, weight, choice.config, gated=product is Product.GATED):
                return choice
        return None

    def _launch(self, choice: KernelChoice, x: torch.Tensor, weight: torch.Tensor, **surroundings: Any) -> torch.Tensor:
        if choice.kernel is Kernel.GEMV:
            return gemv(x, weight, choice.config, **surroundings)
        product = tma_tiled if choice.kernel is Kernel.TMA_TILE else tiled
        return product(x, weight, choice.config, self.scratch, **surroundings)

    # -- attention ---------------------------------------------------------------------------------------------------

    def prepare_attention(self, batch: Any, group: int, kv: torch.Tensor, window: int | None) -> None:
        """Prepare nothing: the kernels read the step's columns on the device."""

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: Any,
        group: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with q [T, H, D] over the paged keys of each token's row -> [T, H * D]."""
        num_tokens, num_heads, head_dim = q.shape
        table = batch.block_tables[group]
        out = q.new_empty(num_tokens, num_heads * head_dim)
        decodes = 0 if self.deterministic else batch.num_decodes
        if decodes:
            decode_attention(
                q[:decodes], kv, batch.row_slot[:decodes], batch.row_len, table, scale, window, softcap, self.scratch,
                out=out[:decodes], kv_scales=kv_scales, sinks=sinks,
            )  # fmt: skip
        if decodes < num_tokens:
            prefill_attention(
                q, kv, batch.row_slot, batch.row_start, batch.query_start, table, scale, window, softcap,
                first_row=decodes, num_tokens=num_tokens - decodes, out=out,
                kv_scales=kv_scales, deterministic=self.deterministic, scratch=self.scratch,
                sinks=sinks,
            )  # fmt: skip
        return out

    def attention_qkv(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor | None,
        kv: torch.Tensor,
        batch: Any,
        group: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        sinks: torch.Tensor | None = None,
        new_keys: NewKeys = USUAL_KEYS,
    ) -> torch.Tensor:
        """Attend with packed qkv -> [T, H * D], and write K and V to the cache; one kernel when every row is a
        decode and has a new key, unless two were measured to be faster. Three where rows share prefixes, which a window
        hides."""
        rows = batch.num_tokens
        shared = None if window is not None or self.deterministic else batch.shared_prefixes
        config = None
        if rows == batch.num_decodes and not self.deterministic and shared is None and new_keys.has_keys:
            config = chosen_config(qkv, num_heads, kv, window)
        if config is not None and config.fused:
            return decode_attention_qkv(
                qkv, q_norm, k_norm, eps, cos_sin, kv, batch.row_slot, batch.row_len, batch.block_tables[group],
                num_heads, scale, window, softcap, self.scratch, kv_scales=kv_scales, tuning=config, sinks=sinks,
                new_keys=new_keys,
            )  # fmt: skip
        q = qkv_rope_write(
            qkv,
            q_norm,
            k_norm,
            eps,
            cos_sin,
            batch.positions,
            batch.slot_mapping[group],
            kv,
            num_heads,
            num_kv_heads,
            kv_scales,
            new_keys,
        )
        if shared is not None:
            return shared_decode_attention(
                q, kv, batch.row_slot, batch.row_len, batch.block_tables[group], shared, scale, softcap, self.scratch,
                kv_scales=kv_scales, sinks=sinks,
            )  # fmt: skip
        return self.attention(q, kv, batch, group, scale, window, softcap, kv_scales, sinks)

    def latent_attention(
        self,
        q: torch.Tensor,
        new: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        batch: Any,
        group: int,
        scale: float,
        kv_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attend over latents, and write those of the step to the cache; arguments as in kernels/cpu_latent.py."""
        num_tokens, (num_heads, plain, rank) = q.shape[0], key_up.shape
        wide = q.new_empty(num_tokens, num_heads, kv.shape[-1])
        table = batch.block_tables[group]
        latent_rope_write(q, new, gain, eps, cos_sin, batch.positions, batch.token_slot, table, kv, wide, kv_scale)
        queries = q.unflatten(1, (num_heads, -1))[..., :plain]
        self._head_products(queries, key_up, wide[..., :rank])
        mixed = q.new_empty(num_tokens, num_heads, rank)
        decodes = 0 if self.deterministic else batch.num_decodes
        if decodes:
            latent_decode(
                wide[:decodes], kv, batch.row_slot[:decodes], batch.row_len, table, rank, scale, self.scratch,
                out=mixed[:decodes], kv_scale=kv_scale,
            )  # fmt: skip
        if decodes < num_tokens:
            latent_prefill(
                wide, kv, batch.row_slot, batch.row_start, batch.query_start, table, rank, scale, self.scratch,
                first_row=decodes, num_tokens=num_tokens - decodes, out=mixed, kv_scale=kv_scale,
                num_splits=1 if self.deterministic else None,
            )  # fmt: skip
        out = q.new_empty(num_tokens, num_heads, value_up.shape[2])
        return self._head_products(mixed, value_up, out).flatten(1)

    def _head_products(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Multiply x [T, H, K] by weight [H, K, N], head by head, into `out` [T, H, N]."""
        if self.deterministic:
            return head_products(x, weight, out)
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return LayerNorm of x [T, E], by torch."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as it is: the kernels read the plain layout."""
    return weight


def table(device: torch.device, *, deterministic: bool = False) -> dict[str, Any]:
    """Return the fields of an Ops table for a device."""
    kernels = CudaKernels(device, deterministic=deterministic)
    experts = MoeKernels(deterministic=deterministic)
    return {
        "name": "triton",
        "rms_norm": norm.rms_norm,
        "add_rms_norm": norm.add_rms_norm,
        "rms_norm_add": norm.rms_norm_add,
        "norm_queries_keys": norm.norm_queries_keys,
        "layer_norm": layer_norm,
        "silu_and_mul": activation.silu_and_mul,
        "gelu_tanh_and_mul": activation.gelu_tanh_and_mul,
        "softcap": activation.softcap,
        "linear": kernels.linear,
        "pack_linear": pack_linear,
        "norm_linear": kernels.norm_linear,
        "linear_add": kernels.linear_add,
        "linear_add_norm": kernels.linear_add_norm,
        "norm_gated_linear": kernels.norm_gated_linear,
        "pack_experts": pack_experts,
        "add_experts": experts.add_experts,
        "add_experts_norm": experts.add_experts_norm,
        "prepare_attention": kernels.prepare_attention,
        "attention_qkv": kernels.attention_qkv,
        "latent_attention": kernels.latent_attention,
        "apply_masks": apply_masks,
        "sample": partial(sample, deterministic=deterministic),
        "token_logprobs": token_logprobs,
        "pads_vocabulary": True,
    }
