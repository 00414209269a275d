"""MXFP4 as GPT-OSS publishes it: experts alone, as `_blocks` of two e2m1 codes a byte and `_scales` of 32 columns each
(quantization/experts.py reads them)."""

from __future__ import annotations

from typing import Any

from inferengine.quantization.checkpoints.layout import ConfigSection, Layout, Tensors
from inferengine.quantization.weight import QuantizedWeight

NAME = "mxfp4"


def read(values: dict[str, Any]) -> Layout:
    """Read an MXFP4 quantization_config. Raises ConfigError for what is not supported."""
    config = ConfigSection(values)
    config.skip("quant_method", "modules_to_not_convert")
    config.expect("dequantize", False)
    config.finish()
    return Layout(NAME, (), (), _experts_alone, NAME, lambda name: ".experts" not in name)


def _experts_alone(tensors: Tensors, rows: int, columns: int) -> QuantizedWeight:
    raise ValueError("only experts are stored in MXFP4")
