"""Makes a model built on `meta` use quantized weights: by giving its Linear layers another ops table, before loading.

No model knows of it. Embeddings, the output head and norms stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from inferengine.errors import ConfigError
from inferengine.kernels.ops import Ops
from inferengine.layers.linear import Linear
from inferengine.layers.moe import ExpertLinear, MoeMLP
from inferengine.quantization import act_order
from inferengine.quantization.checkpoints import layout_of, mxfp4
from inferengine.quantization.checkpoints.layout import Layout
from inferengine.quantization.experts import EXPERT_CODES, StoredExperts, mxfp4_codes, with_expert_codes
from inferengine.quantization.schemes import MADE
from inferengine.quantization.stored import Make, StoredWeight

NUMBER = re.compile(r"\.(\d+)\.")


def quantize(
    model: nn.Module,
    ops: Ops,
    config: dict[str, Any],
    targets: Mapping[str, Any],
    *,
    scheme: str,
    device: torch.device,
    random_weights: bool = False,
    deterministic: bool = False,
) -> str:
    """Prepare every Linear of `model`, as config.json's quantization_config says or by `scheme` ("none": not at all).

    `targets` are models/decoder.py's. Returns what was done, for people: the layout's or the scheme's name, or
    "none". Raises ConfigError.
    """
    layout = layout_of(config)
    if layout is None and scheme == "none":
        return scheme
    if layout is not None and scheme != "none":
        raise ConfigError(
            "model.quantization", f"the checkpoint is quantized already ({layout.name}): leave it at none"
        )
    if layout is not None and layout.name == mxfp4.NAME:
        _read_mxfp4(model, targets, device, random_weights=random_weights)
        return layout.name
    table = _table(ops, MADE[scheme if layout is None else layout.scheme], device, deterministic)
    if layout is not None and layout.order is not None and not random_weights:
        table = act_order.table(table)
    if layout is None or random_weights:
        for module in model.modules():
            if isinstance(module, Linear):
                module.ops = table
        _make_experts(model, scheme if layout is None else layout.scheme)
    else:
        _read_layout(model, table, layout, targets, device)
    return scheme if layout is None else layout.name


def _read_layout(
    model: nn.Module, table: Ops, layout: Layout, targets: Mapping[str, Any], device: torch.device
) -> None:
    for name, module in model.named_modules():
        if isinstance(module, MoeMLP):
            module.ops = with_expert_codes(module.ops)
            continue
        if not isinstance(module, Linear | ExpertLinear):
            continue
        names = _checkpoint_names(f"{name}.weight", targets, len(module.parts))
        outputs, inputs = module.parts, module.in_features
        held = module.held if isinstance(module, Linear) else None
        if held is not None:  # a checkpoint has all of it
            outputs = [span.whole for span in held.outputs] or outputs
            inputs = inputs if held.inputs is None else held.inputs.whole
        parts = outputs if len(names) == len(outputs) else [sum(outputs)]  # stored as one tensor
        plain = [layout.is_plain(each) for each in names]
        if all(plain):
            continue
        if any(plain):
            raise ConfigError(
                "model.path", f"{', '.join(names)}: some are quantized and some are not; all or none can be"
            )
        if isinstance(module, Linear):
            module.ops = table
        module.weight = None
        has_bias = module.bias is not None
        cuts = [None if held is None else held.cut(part if len(parts) > 1 else None) for part in range(len(parts))]
        module.source = StoredWeight(layout, inputs, parts, names, device, cuts, has_bias=has_bias)


def _make_experts(model: nn.Module, scheme: str) -> None:
    """Let experts be rounded to codes once they are loaded. Raises ConfigError for codes that their products do not
    read."""
    for module in model.modules():
        if isinstance(module, MoeMLP):
            make = EXPERT_CODES.get(scheme)
            if make is None:
                raise ConfigError(
                    "model.quantization",
                    f"{scheme} is not supported for a mixture of experts; {', '.join(EXPERT_CODES)} are",
                )
            module.ops = with_expert_codes(module.ops)
            module.gate_up.make = module.down.make = make


def _read_mxfp4(model: nn.Module, targets: Mapping[str, Any], device: torch.device, *, random_weights: bool) -> None:
    """Let experts take what an MXFP4 checkpoint stores for them, or be rounded to such codes. All else is plain."""
    for name, module in model.named_modules():
        if isinstance(module, MoeMLP):
            module.ops = with_expert_codes(module.ops)
        elif isinstance(module, ExpertLinear) and random_weights:
            module.make = mxfp4_codes
        elif isinstance(module, ExpertLinear):
            blocks = _checkpoint_names(f"{name}.blocks", targets, 1)
            rows = sum(module.parts) // module.num_experts
            stem = blocks[0].removesuffix("_blocks")
            module.weight = None
            module.source = StoredExperts(stem, module.num_experts, rows, module.in_features, device)


def _checkpoint_names(parameter: str, targets: Mapping[str, Any], num_parts: int) -> list[str]:
    """What a checkpoint calls the modules whose weights make up a parameter: one for each part, or one for all."""
    number = NUMBER.search(parameter)
    template = NUMBER.sub(".{}.", parameter, count=1)
    names: dict[int, str] = {}
    for name, target in targets.items():
        if target.parameter == template and (num_parts == 1 or not target.stacked):
            if target.transpose:
                raise ConfigError("model.path", "quantized checkpoints of this architecture are not supported")
            names[target.part or 0] = name.removesuffix(".weight").replace("{}", number.group(1) if number else "")
    if not names:
        raise ConfigError("model.path", "quantized checkpoints of this architecture are not supported")
    return [names[part] for part in range(num_parts if len(names) > 1 else 1)]


def _table(ops: Ops, make: Make, device: torch.device, deterministic: bool) -> Ops:
    if device.type == "cuda":
        from inferengine.quantization import cuda  # here: Triton is not installed everywhere

        return cuda.table(ops, make, device, deterministic=deterministic)
    from inferengine.quantization import cpu

    return cpu.table(ops, make)
