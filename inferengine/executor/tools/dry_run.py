"""Checks whether a checkpoint would load: config.json and the place of every tensor, without allocating any."""

from __future__ import annotations

from pathlib import Path

import torch

from inferengine.kernels.ops import REFERENCE
from inferengine.models import registry
from inferengine.models.hf_config import read_json
from inferengine.models.weights import check_weights
from inferengine.quantization.apply import quantize
from inferengine.quantization.checkpoints import layout_of


def dry_run(folder: Path, quantization: str = "none") -> int:
    """Go through the files as loading would. Returns the number of parameters that the model would have.

    `quantization` is the configuration's. Raises ConfigError naming what does not fit. Of the tensors that a quantized
    checkpoint stores in place of a weight only the names are checked; their shapes are checked when they are packed.
    """
    config, family = registry.read_model_config(folder)
    weight_map = family.weight_map(config)
    values = read_json(folder / "config.json")
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
    if layout_of(values) is not None:  # weights quantized at load are stored as they are
        cpu = torch.device("cpu")
        quantize(model, REFERENCE, values, weight_map.targets, scheme=quantization, device=cpu)
    check_weights(model, weight_map, folder)
    return num_parameters
