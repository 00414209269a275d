"""The roofline of a loaded model: bytes and operations of its steps, and its device's peaks (core/step_time.py)."""

from __future__ import annotations

import dataclasses

import torch

from inferengine.core.step_time import AttentionGroup, ModelWork, Roofline
from inferengine.executor.memory.plan import weight_sizes
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.tools.device_peaks import device_peaks
from inferengine.kernels.reference.moe import PackedExperts
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.linear import Linear
from inferengine.layers.moe import Experts
from inferengine.models.decoder import DecoderModel
from inferengine.quantization import gguf
from inferengine.quantization.checkpoints import layout_of
from inferengine.quantization.schemes import EIGHT_BIT_PRODUCTS


def roofline_of(
    settings: ExecutorSettings,
    config: DecoderConfig,
    model: DecoderModel,
    values: dict[str, object],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Roofline | None:
    """Compute the roofline of a loaded model, in some 50 ms; None where its device's peaks are unknown. `values` are
    those of config.json, `config` is the whole model's. Of a divided model: what this rank's device does."""
    num_bytes, expert_bytes = weight_sizes(config, values, dtype, settings.quantization, settings.shard)
    sent_bytes = sent_bytes_per_token(config, settings.tensor_parallel, dtype)
    if settings.tensor_parallel > 1:
        rows = settings.shard.vocabulary_rows(config)
        config = dataclasses.replace(settings.shard.divide(config), vocab_size=rows)
    found = device_peaks(
        settings.device,
        dtype,
        weight_bytes=num_bytes,
        gb_per_s=settings.peak_gb_per_s,
        tflops=settings.peak_tflops,
    )
    if found is None:
        return None
    peaks, faster = found
    layout = layout_of(values)
    scheme = settings.quantization if layout is None else layout.scheme
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    halves = [module for module in linears if _is_half(module)] if scheme == "none" else []
    plain_table = float(config.vocab_size * config.hidden_size * dtype.itemsize)
    head, embedding = (_packed_bytes(getattr(model, name, None)) for name in ("head", "embed"))
    table_bytes = (embedding or plain_table) + (0.0 if config.tied_embeddings else head or plain_table)
    if any(isinstance(module, Experts) and _has_half_experts(module) for module in model.modules()):
        saved = config.num_expert_weights * (dtype.itemsize - 2)
        num_bytes, expert_bytes = num_bytes - saved, expert_bytes - saved
    head_item_bytes = float(dtype.itemsize)
    if head:
        head_item_bytes = head / (config.vocab_size * config.hidden_size)
    elif _is_half(getattr(model, "head", None)):
        head_item_bytes = 2.0
    work = model_work(
        config,
        weight_bytes=num_bytes - sum(map(_num_weights, halves)) * (dtype.itemsize - 2),
        num_layer_weights=sum(map(_num_weights, linears)),
        item_bytes=dtype.itemsize,
        head_item_bytes=head_item_bytes,
        table_bytes=table_bytes,
        kv_item_bytes=kv_dtype.itemsize,
        product_speed=faster if scheme in EIGHT_BIT_PRODUCTS else 1.0,
        expert_bytes=expert_bytes,
    )
    return Roofline(work._replace(sent_bytes_per_token=sent_bytes), peaks)


def sent_bytes_per_token(config: DecoderConfig, ranks: int, dtype: torch.dtype) -> float:
    """Count what a rank sends the others for each token of a step: a sum for the embedding, and one for each block of
    each layer. A sum takes at least 2 (n - 1) / n of its bytes (Patarasuk and Yuan, 2009)."""
    blocks = 3 if config.moe is not None and config.moe.beside_dense else 2
    sums = 1 + blocks * config.num_layers
    return sums * config.hidden_size * dtype.itemsize * 2.0 * (ranks - 1) / ranks


def _packed_bytes(module: Head | TokenEmbedding | None) -> float:
    """Return the bytes of an embedding or a head that is packed; 0 where it is not."""
    packed = None if module is None else module.packed
    return gguf.num_bytes(packed) if isinstance(packed, gguf.PackedBlocks) else 0.0


def _num_weights(linear: Linear) -> int:
    return linear.in_features * sum(linear.parts)


def _is_half(module: Linear | Head | None) -> bool:
    """Return whether a CPU keeps the weight of an fp32 layer in half precision: see kernels/reference/ops.py's
    pack_linear."""
    return module is not None and isinstance(module.packed, torch.ScriptObject)


def _has_half_experts(module: Experts) -> bool:
    """Return whether a CPU keeps the weights of fp32 experts in half precision."""
    return isinstance(module.packed, PackedExperts) and isinstance(module.packed.down[0], torch.ScriptObject)


def _dims(config: DecoderConfig, window: int | None) -> int:
    """Return the sizes of a head's key and value, summed over heads, in layers with this window."""
    if config.latent is not None:
        return config.head_dim + config.mixed_dim
    return 2 * config.kv_shape(window).head_dim


def model_work(
    config: DecoderConfig,
    *,
    weight_bytes: int,
    num_layer_weights: int,
    item_bytes: int,
    head_item_bytes: float,
    kv_item_bytes: int,
    product_speed: float = 1.0,
    expert_bytes: float = 0.0,
    table_bytes: float | None = None,
) -> ModelWork:
    """Compute the least work of a step. `weight_bytes` counts all parameters, with the input embedding, of which a step
    reads a few rows, and all experts, of which `expert_bytes` are. `table_bytes` are those of embedding and head; None:
    `item_bytes` for each weight. Products of quantized layers run at `product_speed` times the peak, so they count for
    that much less."""
    head_weights = config.vocab_size * config.hidden_size
    tables = head_weights if config.tied_embeddings else 2 * head_weights
    met = num_layer_weights + config.chosen_share * config.num_expert_weights  # weights that a token passes
    groups = range(len(config.group_windows))
    up_projected = to_up_project = 0
    if (latent := config.latent) is not None:  # `met` has the matrices of new tokens' latents already
        up_projected = 2 * config.num_layers * config.num_heads * (latent.query_dim + latent.value_dim)
        to_up_project = 2 * config.num_layers * config.num_heads * latent.rank * (latent.plain_dim + latent.value_dim)
    unread = (tables * item_bytes if table_bytes is None else table_bytes) + config.num_layer_input_weights * item_bytes
    return ModelWork(
        layer_bytes=float(weight_bytes - unread) - expert_bytes,
        head_bytes=float(head_weights * head_item_bytes),
        operations_per_token=2.0 * met / product_speed,
        operations_per_draw=2.0 * head_weights,
        groups=tuple(
            AttentionGroup(
                kv_bytes_per_token=config.kv_bytes_per_token(group, kv_item_bytes),
                operations_per_pair=2.0
                * config.layers_of(group)
                * config.num_heads
                * _dims(config, config.group_windows[group]),
                window=config.group_windows[group],
                up_projected_operations_per_pair=up_projected,
                operations_to_up_project=to_up_project,
                readings=config.layers_of(group) / config.caches_of(group),
            )
            for group in groups
        ),
        expert_bytes=expert_bytes,
        chosen_share=config.chosen_share,
        product_speed=product_speed,
    )
