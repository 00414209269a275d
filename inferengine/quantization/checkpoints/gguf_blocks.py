"""The block formats of GGUF files: gguf/checkpoint.py writes the quantization_config, quantization/gguf.py reads the
tensors."""

from __future__ import annotations

from typing import Any

from inferengine.quantization.checkpoints.layout import ConfigSection, Layout, Tensors, refused
from inferengine.quantization.weight import QuantizedWeight

NAME = "gguf"


def read(values: dict[str, Any]) -> Layout:
    """Read what gguf/checkpoint.py says of a file. Raises ConfigError for a config.json that says it of other files."""
    config = ConfigSection(values)
    config.skip("quant_method")
    if not isinstance(config.value("tensors"), dict):
        raise refused("quantization_config.quant_method = gguf is of GGUF files: name the .gguf file as the model")
    config.finish()
    return Layout(NAME, (), (), _by_blocks, NAME, lambda name: False)


def _by_blocks(tensors: Tensors, rows: int, columns: int) -> QuantizedWeight:
    raise ValueError("GGUF weights are read in blocks, by quantization/gguf.py")
