"""The models that the gauntlet runs: the embedded one, and small random ones of other families, each with an adapter.

Random checkpoints have the embedded model's vocabulary and tokenizer, so that text, grammars and its draft model work.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parents[2] / "inferengine" / "assets" / "embedded"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
ADAPTER = "pirate"
ADAPTER_RANK, ADAPTER_ALPHA = 4, 8.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_fc")
FAMILIES = ("gemma3", "gpt2", "qwen3", "mistral-window", "llama-tied-biases")  # names of tests.models.checkpoints
MODELS = ("embedded", *FAMILIES)
TEMPERING = 0.08  # of random factors: an adapter that changes tokens and breaks nothing


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: Path
    adapters: Path
    vocab_size: int


def prepare(name: str, work: Path) -> Checkpoint:
    """Return the folder of a model and of its adapter, made under `work` where there are none."""
    folder = EMBEDDED if name == "embedded" else work / "models" / name
    if not folder.is_dir():
        _make(name, folder)
    adapters = work / "adapters" / name
    if not adapters.is_dir():
        write_adapter(folder, adapters / ADAPTER)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return Checkpoint(name, folder, adapters, vocab_size)


def _make(name: str, folder: Path) -> None:
    from tests.models.checkpoints import make_model, save

    values: dict[str, Any] = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    values["n_positions" if name == "gpt2" else "max_position_embeddings"] = 1024
    save(make_model(name, **values), folder)
    for file in TEXT_FILES:
        shutil.copy(EMBEDDED / file, folder / file)


def write_adapter(model: Path, folder: Path) -> None:
    """Write a LoRA adapter in PEFT's layout with random factors for every linear module of the checkpoint."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Any] = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for key in list(file.keys()):
            module = key.removesuffix(".weight")
            if module.rpartition(".")[2] not in TARGETS or key == module:
                continue
            shape = file.get_slice(key).get_shape()
            outputs, inputs = reversed(shape) if module.rpartition(".")[2].startswith("c_") else shape  # GPT-2
            down = torch.randn(ADAPTER_RANK, inputs, generator=generator) * TEMPERING
            up = torch.randn(outputs, ADAPTER_RANK, generator=generator) * TEMPERING
            name = module if module.startswith(("model.", "transformer.")) else f"transformer.{module}"
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_ALPHA,
        "target_modules": targets, "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "lora_dropout": 0.0, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values))


def merge_adapter(model: Any, folder: Path) -> None:
    """Add the adapter's product to the weights of transformers' `model`."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for key, down in tensors.items():
        name, found, _ = key.partition(".lora_A.weight")
        if not found:
            continue
        module = modules[name.removeprefix("base_model.model.")]
        delta = ADAPTER_ALPHA / ADAPTER_RANK * (tensors[f"{name}.lora_B.weight"].double() @ down.double()).float()
        is_conv = type(module).__name__ == "Conv1D"
        module.weight.data += (delta.t() if is_conv else delta).to(module.weight.device)
