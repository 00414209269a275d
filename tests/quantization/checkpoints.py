"""Quantized checkpoints in every published layout, written from transformers' models, and those models with the same
weights as numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inferengine.quantization.checkpoints.layout import AWQ_ORDER, IN_ORDER
from inferengine.quantization.schemes import MADE, int4_groups
from inferengine.quantization.weight import Block, QuantizedWeight, dequantize
from tests.models.checkpoints import save

Tensors = dict[str, torch.Tensor]
GROUP = 16
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 24]}


def pack_rows(codes: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Pack 4-bit codes, eight to a word: uint8 [R, 8 * C] -> int32 [R, C]. `order[i]`: the column of nibble i."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int64)
    words = (codes.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _fp8_blocks(weight: torch.Tensor) -> QuantizedWeight:
    rows, columns = FP8_BLOCKS["weight_block_size"]
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = (blocks.abs().amax((1, 3)) / 448).bfloat16().float()  # as some store them
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return QuantizedWeight("fp8", codes.to(torch.float8_e4m3fn), scales, Block(rows, columns))


def _symmetric_int4(weight: torch.Tensor) -> QuantizedWeight:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).half().float()
    codes = (groups / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return QuantizedWeight(
        "int4", codes.flatten(1).to(torch.uint8), scales, Block(1, GROUP), torch.full_like(scales, 8.0)
    )


def _whole(weight: torch.Tensor) -> QuantizedWeight:
    return int4_groups(weight, GROUP)


def _zeros(weight: QuantizedWeight) -> torch.Tensor:
    assert weight.zeros is not None
    return weight.zeros.to(torch.uint8)


def _gptq(weight: QuantizedWeight, less: int = 1) -> Tensors:
    columns = weight.shape[1]
    zeros = (_zeros(weight).t().contiguous().to(torch.int16) - less) % 16
    return {
        "qweight": pack_rows(weight.codes).t().contiguous(),
        "qzeros": pack_rows(zeros.to(torch.uint8)),
        "scales": weight.scales.t().contiguous().half(),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
        "bias": torch.zeros(weight.shape[0]).half(),
    }


def _sorted_inputs(columns: int) -> torch.Tensor:
    """Return the order in which a calibration might have taken the inputs: the same for all weights of as many."""
    return torch.randperm(columns, generator=torch.Generator().manual_seed(columns))


def _by_activation(weight: torch.Tensor) -> QuantizedWeight:
    """Return INT4 weights in groups of sorted inputs, seen in the inputs' own order: every column has a scale of its
    own then."""
    order = _sorted_inputs(weight.shape[1])
    made, back = int4_groups(weight[:, order], GROUP), torch.argsort(order)
    assert made.zeros is not None
    scales, zeros = (values.repeat_interleave(GROUP, 1)[:, back] for values in (made.scales, made.zeros))
    return made._replace(codes=made.codes[:, back], scales=scales, zeros=zeros, block=Block(1, 1))


def _grouped(weight: QuantizedWeight) -> tuple[QuantizedWeight, torch.Tensor]:
    """Return the weight with a scale for each group again, and the group of each input."""
    assert weight.zeros is not None
    order = _sorted_inputs(weight.shape[1])
    scales, zeros = (values[:, order][:, ::GROUP].contiguous() for values in (weight.scales, weight.zeros))
    groups = torch.empty(weight.shape[1], dtype=torch.int32)
    groups[order] = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    return weight._replace(scales=scales, zeros=zeros, block=Block(1, GROUP)), groups


def _gptq_by_activation(weight: QuantizedWeight) -> Tensors:
    grouped, groups = _grouped(weight)
    return {**_gptq(grouped), "g_idx": groups}


def _packed_by_activation(weight: QuantizedWeight) -> Tensors:
    grouped, groups = _grouped(weight)
    return {**_packed(grouped, zeros=True), "weight_g_idx": groups}


def _awq(weight: QuantizedWeight) -> Tensors:
    return {
        "qweight": pack_rows(weight.codes.t().contiguous(), AWQ_ORDER),
        "qzeros": pack_rows(_zeros(weight).t().contiguous(), AWQ_ORDER),
        "scales": weight.scales.t().contiguous().half(),
    }


def _packed(weight: QuantizedWeight, *, zeros: bool) -> Tensors:
    tensors = {
        "weight_packed": pack_rows(weight.codes),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = pack_rows(_zeros(weight).t().contiguous()).t().contiguous()
    return tensors


def _packed_int8(weight: QuantizedWeight) -> Tensors:
    words = (weight.codes.long() + 128).unflatten(1, (-1, 4)) << torch.tensor([0, 8, 16, 24])
    packed = words.sum(-1).to(torch.uint32).view(torch.int32)
    return {"weight_packed": packed, "weight_scale": weight.scales, "weight_shape": torch.tensor(weight.shape)}


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
_BY_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}

# name -> (quantization_config, weight to codes, codes to tensors)
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], QuantizedWeight], Callable[..., Tensors]]] = {
    "fp8-blocks": (FP8_BLOCKS, _fp8_blocks, lambda w: {"weight": w.codes, "weight_scale_inv": w.scales}),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        MADE["fp8_tensor"],
        lambda w: {"weight": w.codes, "weight_scale": w.scales[0, 0], "input_scale": torch.tensor(0.1)},
    ),
    "compressed-fp8": (
        _compressed({**_CHANNEL, "type": "float"}, {**_BY_TOKEN, "type": "float"}),
        MADE["fp8"],
        lambda w: {"weight": w.codes, "weight_scale": w.scales},
    ),
    "compressed-int8": (
        _compressed({**_CHANNEL, "type": "int"}),
        MADE["int8"],
        lambda w: {"weight": w.codes, "weight_scale": w.scales},
    ),
    "compressed-fp8-blocks": (
        _compressed(
            {**_CHANNEL, "type": "float", "strategy": "block", "block_structure": FP8_BLOCKS["weight_block_size"]},
            {**_BY_TOKEN, "type": "float", "strategy": "group", "group_size": 24},
        ),
        _fp8_blocks,
        lambda w: {"weight": w.codes, "weight_scale": w.scales.bfloat16()},
    ),
    "compressed-int8-packed": (
        {**_compressed({**_CHANNEL, "type": "int"}), "format": "pack-quantized"},
        MADE["int8"],
        _packed_int8,
    ),
    "compressed-int4": (
        _compressed({**_INT4, "symmetric": True, "actorder": "weight"}),
        _symmetric_int4,
        lambda w: _packed(w, zeros=False),
    ),
    "compressed-int4-zeros": (
        _compressed({**_INT4, "symmetric": False}),
        _whole,
        lambda w: _packed(w, zeros=True),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "damp_percent": 0.01},
        _whole,
        _gptq,
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
        _whole,
        lambda w: _gptq(w, less=0),
    ),
    "gptq-desc-act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        _by_activation,
        _gptq_by_activation,
    ),
    "compressed-int4-actorder": (
        _compressed({**_INT4, "symmetric": False, "actorder": "group"}),
        _by_activation,
        _packed_by_activation,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _whole,
        _awq,
    ),
}


def write(
    model: Any,
    layout: str,
    folder: Path,
    *,
    plain: tuple[str, ...] = (),
    other: tuple[str, str] | None = None,
    **config: Any,
) -> Any:
    """Write the checkpoint; modules whose name ends in one of `plain` stay floats. `other`: a layout and the end of
    the names of modules in it. Returns the model that it equals."""
    values = LAYOUTS[layout][0]
    save(model, folder)
    tensors, same = load_file(folder / "model.safetensors"), copy.deepcopy(model)
    for name, module in same.named_modules():
        kept = any(name.endswith(f".{each}") for each in plain)
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or kept:
            continue
        _, make, store = LAYOUTS[other[0]] if other is not None and name.endswith(other[1]) else LAYOUTS[layout]
        codes = make(module.weight.data)
        module.weight.data = dequantize(codes)
        del tensors[f"{name}.weight"]
        stored = store(codes)
        if module.bias is not None:
            stored.pop("bias", None)
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {**values, **config}
    (folder / "config.json").write_text(json.dumps(document))
    return same


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def misalign(folder: Path) -> None:
    """Rewrite the file so that its tensors begin one byte behind a multiple of 64: the header ends in blanks, which is
    all that decides where they lie."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length].rstrip(), whole[8 + length :]
    header += b" " * ((1 - 8 - len(header)) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
