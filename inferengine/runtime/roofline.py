"""What a loaded model asks of its device, for core/roofline.py."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.core.roofline import AttentionGroup, ModelWork, Roofline
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.quant.layouts import layout_of
from inferengine.runtime import memory_plan
from inferengine.runtime.device_peaks import device_peaks

EIGHT_BIT_PRODUCTS = ("fp8", "fp8_tensor", "int8_w8a8")  # schemes whose inputs are rounded too: quant/cuda.py


def roofline_of(
    config: DecoderConfig,
    model: nn.Module,
    values: dict[str, object],
    *,
    dtype: torch.dtype,
    kv_item_bytes: int,
    quantization: str,
    device: torch.device,
    gb_per_s: float,
    tflops: float,
) -> Roofline | None:
    """The roofline of a loaded model; None where its device's peaks are unknown. Some 30 ms. `values` are
    config.json's, `quantization`, `gb_per_s` and `tflops` the configuration's."""
    weight_bytes = memory_plan.weight_bytes(config, values, dtype, quantization)
    found = device_peaks(device, dtype, weight_bytes=weight_bytes, gb_per_s=gb_per_s, tflops=tflops)
    if found is None:
        return None
    peaks, faster = found
    layout = layout_of(values)
    scheme = quantization if layout is None else layout.scheme
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    work = model_work(
        config,
        weight_bytes=weight_bytes,
        num_layer_weights=sum(module.in_features * sum(module.parts) for module in linears),
        item_bytes=dtype.itemsize,
        kv_item_bytes=kv_item_bytes,
        product_speed=faster if scheme in EIGHT_BIT_PRODUCTS else 1.0,
    )
    return Roofline(work, peaks)


def model_work(
    config: DecoderConfig,
    *,
    weight_bytes: int,
    num_layer_weights: int,
    item_bytes: int,
    kv_item_bytes: int,
    product_speed: float = 1.0,
) -> ModelWork:
    """`weight_bytes` of all parameters, an input embedding among them, of which a step reads a few rows. A product of
    quantized layers runs `product_speed` times as fast as the peak says, so its operations count for so much less."""
    head_weights = config.vocab_size * config.hidden_size
    tables = head_weights if config.tied_embeddings else 2 * head_weights
    groups = range(len(config.group_windows))
    return ModelWork(
        layer_bytes=float(weight_bytes - tables * item_bytes),
        head_bytes=float(head_weights * item_bytes),
        operations_per_token=2.0 * num_layer_weights / product_speed,
        operations_per_draw=2.0 * head_weights,
        groups=tuple(
            AttentionGroup(
                config.kv_bytes_per_token(group, kv_item_bytes),
                4.0 * config.layers_of(group) * config.num_heads * config.head_dim,
                config.group_windows[group],
            )
            for group in groups
        ),
    )
