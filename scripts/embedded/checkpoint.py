"""Writes a checkpoint folder in the ordinary Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .network import Network
from .vocabulary import BOS, CHAT_TEMPLATE, CONTEXT_LENGTH, EOS, PAD

TOKENIZER_CONFIG = {
    "bos_token": BOS,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": EOS,
    "model_max_length": CONTEXT_LENGTH,
    "pad_token": PAD,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
GENERATION_CONFIG = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": [1],
    "pad_token_id": 2,
    "temperature": 0.5,
    "top_p": 0.9,
}


def write(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Write config.json, model.safetensors in bf16, tokenizer.json, tokenizer_config.json, generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes its files private; a service runs as another user
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", network.shape.config()),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
