"""Published layouts of quantized checkpoints, by `quantization_config.quant_method`. A new one is a file and a line.

A module here has `read(values) -> Layout`. A value that it does not support is refused by name.
"""

from __future__ import annotations

import importlib
from typing import Any

from inferengine.quantization.checkpoints.layout import Layout, refused

MODULES = {
    "fp8": "fp8",
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptq",
    "awq": "awq",
}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout that a decoded config.json announces; None for plain weights. Raises ConfigError."""
    values = config.get("quantization_config") or config.get("compression_config")
    if not values:
        return None
    if not isinstance(values, dict):
        raise refused("quantization_config must be an object")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in MODULES:
        raise refused(f"quantization_config.quant_method = {method!r} is not supported; {', '.join(MODULES)} are")
    layout: Layout = importlib.import_module(f"inferengine.quantization.checkpoints.{MODULES[method]}").read(values)
    return layout
