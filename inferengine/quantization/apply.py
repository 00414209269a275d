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
from inferengine.layers.moe import ExpertLinear, Experts
from inferengine.layers.parallel import DimensionRange
from inferengine.quantization import act_order, gguf
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
    dtype: torch.dtype = torch.float32,
    random_weights: bool = False,
    deterministic: bool = False,
) -> str:
    """Prepare every Linear of `model`, as config.json's quantization_config says or by `scheme` ("none": not at all).

    `targets` are models/decoder.py's, `dtype` is that of the model's arithmetic. Returns what was done, for people: the
    layout's or the scheme's name, or "none". Raises ConfigError.
    """
    layout = layout_of(config)
    if layout is None and scheme == "none":
        return scheme
    if layout is not None and scheme != "none":
        raise ConfigError(
            "model.quantization", f"the checkpoint is quantized already ({layout.name}): leave it at none"
        )
    if layout is not None and layout.name == gguf.METHOD:
        kinds = config["quantization_config"]["tensors"]
        gguf.prepare(
            model, ops, kinds, targets, device, dtype, random_weights=random_weights, deterministic=deterministic
        )
        return layout.name
    if layout is not None and layout.name == mxfp4.NAME:
        _read_mxfp4(model, targets, device, random_weights=random_weights)
        return layout.name

    def table_of(kind: str, *, reorders: bool = False) -> Ops:
        table = _table(ops, MADE[kind], device, deterministic)
        return act_order.table(table) if reorders else table

    if layout is None or random_weights:
        table = table_of(scheme if layout is None else layout.scheme)
        for module in model.modules():
            if isinstance(module, Linear):
                module.ops = table
        _make_experts(model, scheme if layout is None else layout.scheme)
    else:
        layouts = [layout] if not layout.groups else [each for _, each in layout.groups]
        tables = {id(each): table_of(each.scheme, reorders=each.order is not None) for each in layouts}
        _read_layout(model, tables, layout, targets, device)
    return scheme if layout is None else layout.name


def _read_layout(
    model: nn.Module, tables: dict[int, Ops], layout: Layout, targets: Mapping[str, Any], device: torch.device
) -> None:
    """Read the layout of each stored weight. `tables`: of each layout of the checkpoint, by its id."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.ops = with_expert_codes(module.ops)
            continue
        if not isinstance(module, Linear | ExpertLinear):
            continue
        outputs, inputs = module.parts, module.in_features
        held = module.held if isinstance(module, Linear) else None
        experts = module.held if isinstance(module, ExpertLinear) else None
        if experts is None:
            names = _checkpoint_names(f"{name}.weight", targets, len(outputs))
        else:
            mine = experts.times(len(outputs) // experts.size)
            names = _checkpoint_names(f"{name}.weight", targets, mine.whole)[mine.begin : mine.end]
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
        own = layout.of(names[0])
        if any(layout.of(each) is not own for each in names):
            raise ConfigError("model.path", f"{', '.join(names)}: each has a layout of its own; all must have one")
        if isinstance(module, Linear):
            module.ops = tables[id(own)]
        module.weight = None
        has_bias = module.bias is not None
        cuts = [None if held is None else held.cut(part if len(parts) > 1 else None) for part in range(len(parts))]
        module.source = StoredWeight(own, inputs, parts, names, device, cuts, has_bias=has_bias)


def _make_experts(model: nn.Module, scheme: str) -> None:
    """Let experts be rounded to codes once they are loaded. Raises ConfigError for codes that their products do not
    read."""
    for module in model.modules():
        if isinstance(module, Experts):
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
        if isinstance(module, Experts):
            module.ops = with_expert_codes(module.ops)
        elif isinstance(module, ExpertLinear) and random_weights:
            module.make = mxfp4_codes
        elif isinstance(module, ExpertLinear):
            blocks = _checkpoint_names(f"{name}.blocks", targets, 1)
            rows = sum(module.parts) // module.num_experts
            stem = blocks[0].removesuffix("_blocks")
            held = module.held or DimensionRange(0, module.num_experts, module.num_experts)
            module.weight = None
            module.source = StoredExperts(stem, held, rows, module.in_features, device)


def _checkpoint_names(parameter: str, targets: Mapping[str, Any], num_parts: int) -> list[str]:
    """Return what a checkpoint calls the modules whose weights make up a parameter: one for each part, or one for
    all."""
    number = NUMBER.search(parameter)
    template = NUMBER.sub(".{}.", parameter, count=1)
    names: dict[int, str] = {}
    for name, target in targets.items():
        if target.parameter == template and (num_parts == 1 or not target.stacked):
            if target.transpose:
                raise ConfigError("model.path", "quantized checkpoints of this architecture are not supported")
            names[target.part or 0] = name.removesuffix(".weight").replace("{}", number.group(1) if number else "")
    if not names or (len(names) > 1 and len(names) < num_parts):
        raise ConfigError("model.path", "quantized checkpoints of this architecture are not supported in this layout")
    return [names[part] for part in range(num_parts if len(names) > 1 else 1)]


def _table(ops: Ops, make: Make, device: torch.device, deterministic: bool) -> Ops:
    if device.type == "cuda":
        from inferengine.quantization import cuda  # here: Triton is not installed everywhere

        return cuda.table(ops, make, device, deterministic=deterministic)
    from inferengine.quantization import cpu

    return cpu.table(ops, make)
