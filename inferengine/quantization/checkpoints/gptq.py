"""GPTQ (Frantar et al. 2022), 4 bits: codes packed along the inputs, zero points along the outputs.

`qweight` [K / 8, N], `qzeros` [K / G, N / 8], `scales` [K / G, N]. The first version of the format stores zero points
less one. With `desc_act` groups are no runs of inputs: `g_idx` [K] says which group each belongs to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferengine.quantization.act_order import order_of
from inferengine.quantization.checkpoints.layout import (
    ConfigSection,
    Layout,
    Tensors,
    expect_shape,
    listed,
    unpack_rows,
)
from inferengine.quantization.weight import INT4, Block, QuantizedWeight

TRAINING = (
    "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "nsamples",
    "pack_dtype", "pad_token_id", "scale_dtype", "seqlen", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "version",
)  # fmt: skip


def read(values: dict[str, Any]) -> Layout:
    """Read a GPTQ quantization_config. Raises ConfigError for what is not supported."""
    config = ConfigSection(values)
    config.skip("quant_method", *TRAINING)
    config.expect("bits", 4)
    reorders = config.value("desc_act", False)
    config.expect("desc_act", True, False)
    config.expect("checkpoint_format", "gptq", "gptq_v2")
    config.expect("format", "gptq", "gptq_v2")
    config.expect("method", "gptq")
    config.expect("data_type", "int")  # AutoRound's
    config.expect("modules_in_block_to_quantize")
    config.skip("sym", "checkpoint_format")
    config.expect("lm_head", False)
    config.expect("dynamic", {})
    group = config.group_size()
    config.finish()
    less_one = config.value("checkpoint_format", config.value("format", "gptq")) == "gptq"
    assemble = partial(_assemble, group=group, less_one=less_one, reorders=reorders)
    plain = listed(["lm_head"])
    if reorders:
        required = ("qweight", "qzeros", "scales", "g_idx")
        return Layout("gptq", required, (), assemble, "int4", plain, partial(_order, group=group))
    return Layout("gptq", ("qweight", "qzeros", "scales"), ("g_idx",), assemble, "int4", plain)


def _order(tensors: Tensors, columns: int, *, group: int) -> torch.Tensor | None:
    return order_of(tensors["g_idx"], columns, columns if group == -1 else group)


def _assemble(
    tensors: Tensors, rows: int, columns: int, *, group: int, less_one: bool, reorders: bool
) -> QuantizedWeight:
    group = columns if group == -1 else group
    if columns % group or columns % 8 or rows % 8:
        raise ValueError(f"{columns} inputs and {rows} outputs are no whole words in groups of {group}")
    groups = columns // group
    packed = expect_shape(tensors, "qweight", (columns // 8, rows))
    zeros = unpack_rows(expect_shape(tensors, "qzeros", (groups, rows // 8)))
    scales = expect_shape(tensors, "scales", (groups, rows)).float().t().contiguous()
    codes = unpack_rows(packed.t().contiguous())
    if reorders and (order := _order(tensors, columns, group=group)) is not None:
        codes = codes[:, order].contiguous()
    elif "g_idx" in tensors and not torch.equal(tensors["g_idx"].long(), torch.arange(columns) // group):
        raise ValueError("g_idx reorders the inputs, though quantization_config.desc_act does not say so")
    points = (zeros + 1) & 15 if less_one else zeros
    return QuantizedWeight(INT4, codes, scales, Block(1, group), points.float().t().contiguous())
