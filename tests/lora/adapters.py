"""Adapters in PEFT's layout for transformers' models, and the same models with the adapter merged by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2_TARGETS = ("c_attn", "c_proj", "c_fc")


def write_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = LLAMA_TARGETS,
    rslora: bool = False,
    dora: bool = False,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    whole: Sequence[str] = (),
    **config: Any,
) -> Any:
    """Write random factors for every module whose name ends in one of `targets`. `ranks` and `alphas` are those of
    modules that differ, by the ends of their names; `whole` are those whose weights are replaced, of the embedding and
    the head. Returns the merged model."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    usual = (rank, alpha)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in merged.named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] not in targets or weight is None:
            continue
        rank, alpha = (
            next((value for end, value in (of or {}).items() if f".{name}".endswith(f".{end}")), default)
            for of, default in zip((ranks, alphas), usual, strict=True)
        )
        scaling = alpha / math.sqrt(rank) if rslora else alpha / rank
        stored_in_out = type(module).__name__ == "Conv1D"  # GPT-2
        outputs, inputs = reversed(weight.shape) if stored_in_out else weight.shape
        down = torch.randn(rank, inputs, generator=generator) * 0.3
        up = torch.randn(outputs, rank, generator=generator) * 0.3
        delta = scaling * (up.double() @ down.double()).float()
        weight.data += delta.t() if stored_in_out else delta
        if dora:  # Liu et al. 2024: each row of the changed weight at a length that is learned
            rows = weight.data.t() if stored_in_out else weight.data
            magnitude = rows.norm(dim=1) * (0.6 + 0.8 * torch.rand(outputs, generator=generator))
            scaled = rows * (magnitude / rows.norm(dim=1))[:, None]
            weight.data = scaled.t().contiguous() if stored_in_out else scaled
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    for name, module in list(merged.named_modules()):
        if name.rpartition(".")[2] in whole:
            changed = module.weight.data + 0.3 * torch.randn(module.weight.shape, generator=generator)
            module.weight = torch.nn.Parameter(changed)  # its own, though it was tied
            tensors[f"base_model.model.{name}.weight"] = changed
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": usual[0], "lora_alpha": usual[1],
        "target_modules": list(targets),
        "bias": "none", "use_rslora": rslora, "use_dora": dora, "lora_dropout": 0.05,
        "modules_to_save": list(whole) or None,
        "rank_pattern": ranks or {}, "alpha_pattern": alphas or {}, "init_lora_weights": True, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return merged
