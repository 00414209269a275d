"""DecodeRunner: steps of one new token a row, for Llama-like models in fp32 on a CPU, mostly in numpy.

Between its matrix products a layer is some thirty operations on a few kilobytes each. By torch, through modules and the
ops table, half of the time of such a step is calls, not arithmetic (docs/experiments.md). This runner computes the same
with a third of the calls, on the keys and values that lie side by side already (DecodeKvCache). Any other step and any
other model goes through the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from inferengine.kernels.batch import USUAL_KEYS, Batch
from inferengine.kernels.cpu import AttentionPlan, GroupCopy
from inferengine.kernels.cpu_products import MOST_THREADS
from inferengine.kernels.reference import ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import GatedMLP, Linear
from inferengine.layers.norm import RMSNorm
from inferengine.models.decoder import DecoderModel
from inferengine.models.llama import Llama, LlamaLayer

MOST_ROWS = 64  # of a step, up to which numpy's operations are no slower than torch's

_Product = Callable[[torch.Tensor], torch.Tensor]
_ACTIVATIONS: dict[str, _Product] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class _Layer(NamedTuple):
    attention_gain: np.ndarray
    qkv: _Product
    head_gains: np.ndarray | None  # [H + K, D] of the norms of queries and keys
    out: _Product
    mlp_gain: np.ndarray
    gate_up: _Product
    down: _Product
    kv: torch.Tensor
    cache: np.ndarray  # the same memory, as [.., D]


def decode_runner(
    model: DecoderModel, config: DecoderConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> DecodeRunner | None:
    """Return the runner of a model that is bound to its cache; None where the model must compute such steps itself."""
    if not _suits(config) or dtype != torch.float32 or kv_dtype != torch.float32 or type(model) is not Llama:
        return None
    if not all(type(layer) is LlamaLayer and _is_plain(layer) for layer in model.layers):
        return None
    return DecodeRunner(model, config)


def _suits(config: DecoderConfig) -> bool:
    return (
        config.is_plain
        and config.group_windows == (None,)
        and config.latent is None
        and config.moe is None
        and config.rope is not None
        and not config.no_rope_layers
        and config.activation in _ACTIVATIONS
        and config.attention_softcap is None
        and not config.wide_qk_norm
        and not config.sinks
        and config.query_scaling is None
        and config.learned_positions is None
        and config.layer_inputs is None
        and not config.states
    )


def _is_plain(layer: LlamaLayer) -> bool:
    """Return whether nothing of a layer has been replaced, as where ranks share the model."""
    attention, mlp = layer.attention, layer.mlp
    norms = layer.attention_norm, layer.mlp_norm
    if type(attention) is not Attention or type(mlp) is not GatedMLP:
        return False
    if any(type(norm) is not RMSNorm for norm in norms) or attention.new_keys != USUAL_KEYS:
        return False
    if layer.output_scale is not None:
        return False
    return all(type(linear) is Linear for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down))


class DecodeRunner:
    """Computes the layers of one model, with its weights."""

    def __init__(self, model: Llama, config: DecoderConfig) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._scale = config.norm_eps, np.float32(config.attention_scale)
        self._activation = _ACTIVATIONS[config.activation]
        self._embed = model.embed
        self._layers = [_layer(layer) for layer in model.layers if isinstance(layer, LlamaLayer)]
        angles = next(layer.attention.cos_sin for layer in model.layers if isinstance(layer, LlamaLayer))
        if angles is None:
            raise RuntimeError("the model is not bound to its cache")
        by_half = angles.numpy().reshape(len(angles), 2, 1, 1, -1)
        self._cos, self._sin = by_half[:, 0], by_half[:, 1]  # [positions, 1, 1, D / 2]

    def compute(self, batch: Batch) -> torch.Tensor | None:
        """Return the residual stream [T, E] after all layers; None for a step that the model must compute."""
        plan: AttentionPlan | None = batch.plans[0]
        if plan is None:  # the kernels of a card are interpreted here, as tests do
            return None
        kept = plan.kv_copy
        if kept is None or plan.tiles or plan.shared is not None or not kept.has_next_tokens:
            return None
        if batch.num_tokens > MOST_ROWS or torch.get_num_threads() > MOST_THREADS:
            return None
        assert batch.columns is not None  # attention has been planned with them
        positions = batch.columns.positions
        sin = self._sin[positions]
        x = self._embed(batch.input_ids).numpy()
        with torch._C.DisableTorchFunctionSubclass():  # kernels/reference/ops.py says why
            return torch.from_numpy(self._compute(x, self._cos[positions], np.concatenate((-sin, sin), 2), plan, kept))

    def _compute(
        self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, plan: AttentionPlan, kept: GroupCopy
    ) -> np.ndarray:
        """Compute x [T, E] in place. `cos` [T, 1, 1, D / 2] and `sin` [T, 1, 2, D / 2], whose first half is
        negative."""
        num_tokens, num_heads = len(x), self._num_heads
        num_rotated = num_heads + self._num_kv_heads
        from_numpy, norm, eps, activation = torch.from_numpy, ops.rms_norm_of_few, self._eps, self._activation
        for layer in self._layers:
            qkv = layer.qkv(from_numpy(norm(x, layer.attention_gain, eps))).numpy()
            heads = qkv.reshape(num_tokens, -1, self._head_dim)
            rotated = heads[:, :num_rotated]
            if layer.head_gains is not None:
                rotated[...] = norm(rotated, layer.head_gains, eps)
            halves = rotated.reshape(num_tokens, num_rotated, 2, -1)  # a view: rows of heads are contiguous
            turned = halves[:, :, ::-1] * sin
            halves *= cos
            halves += turned
            new = heads[:, num_heads:]
            layer.cache[plan.written] = new
            mixed = kept.next_tokens(layer.kv, heads[:, :num_heads] * self._scale, new)
            x += layer.out(from_numpy(mixed)).numpy()
            gate_up = layer.gate_up(from_numpy(norm(x, layer.mlp_gain, eps)))
            width = gate_up.shape[1] // 2
            gated = activation(gate_up.narrow(1, 0, width)).mul_(gate_up.narrow(1, width, width))
            x += layer.down(gated).numpy()
        return x


def _layer(layer: LlamaLayer) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention)  # `_is_plain` has looked
    assert isinstance(mlp, GatedMLP)
    assert isinstance(layer.attention_norm, RMSNorm)
    assert isinstance(layer.mlp_norm, RMSNorm)
    assert attention.kv is not None
    gains = None
    if attention.q_gain is not None and attention.k_gain is not None:
        counts = (attention.num_heads, 1), (attention.num_kv_heads, 1)
        pairs = zip((attention.q_gain, attention.k_gain), counts, strict=True)
        gains = np.concatenate([np.tile(gain.numpy(), count) for gain, count in pairs])
    return _Layer(
        layer.attention_norm.weight.detach().numpy(),
        _product(attention.qkv),
        gains,
        _product(attention.out),
        layer.mlp_norm.weight.detach().numpy(),
        _product(mlp.gate_up),
        _product(mlp.down),
        attention.kv,
        attention.kv.view(-1, attention.head_dim).numpy(),
    )


def _product(linear: Linear) -> _Product:
    """Return the product of a layer: by FBGEMM alone where that is all that it does."""
    packed, is_plain = linear.packed, linear.order is None or linear.is_reordered
    if linear.ops.linear is ops.linear and linear.offset is None and is_plain and ops.is_half(packed):
        return lambda x: ops.half_linear(x, packed)
    return linear.forward
