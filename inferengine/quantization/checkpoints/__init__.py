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
    "mxfp4": "mxfp4",
    "gguf": "gguf_blocks",
}
OF_FOLDERS = tuple(name for name in MODULES if name != "gguf")  # what config.json of a folder may name
AT_LOAD = "take the checkpoint without it, and have the engine make the weights at load: model.quantization = "
NEAREST = {
    "bitsandbytes": f"its blocks of 64 weights are no layout that a kernel here reads; {AT_LOAD}int4 or int8",
    "fbgemm_fp8": "the nearest that is: fp8 or compressed-tensors, the same numbers with a scale for each row",
    "modelopt": "the nearest that is: compressed-tensors, into which llm-compressor writes FP8 and INT4",
    "quark": "the nearest that is: compressed-tensors, into which llm-compressor writes FP8 and INT4",
    "torchao": f"its tensors are pickled subclasses; {AT_LOAD}int4, int8 or fp8",
    "hqq": f"the nearest that is: gptq or awq, with 4 bits and groups too; or {AT_LOAD}int4",
    "eetq": f"{AT_LOAD}int8 is the same: 8 bits, a scale for each row",
    "quanto": f"{AT_LOAD}int4 or int8",
    "aqlm": "its weights are sums of codebook entries; the nearest that is: gptq or awq with 4 bits",
    "quip": "its weights are codebook entries; the nearest that is: gptq or awq with 4 bits",
    "vptq": "its weights are codebook entries; the nearest that is: gptq or awq with 4 bits",
    "spqr": "its outliers are stored apart; the nearest that is: gptq or awq with 4 bits",
    "higgs": f"its weights are codebook entries; {AT_LOAD}int4",
    "bitnet": "its weights have three values; no kernel here reads them",
    "mxfp4": f"no kernel here reads FP4; {AT_LOAD}int4 of a bf16 checkpoint",
}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """Return the layout that a decoded config.json announces; None for plain weights. Raises ConfigError."""
    values = config.get("quantization_config") or config.get("compression_config")
    if not values:
        return None
    if not isinstance(values, dict):
        raise refused("quantization_config must be an object")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in MODULES:
        near = NEAREST.get(str(method), f"{', '.join(OF_FOLDERS)} are read")
        raise refused(f"quantization_config.quant_method = {method!r} is not supported: {near}")
    layout: Layout = importlib.import_module(f"inferengine.quantization.checkpoints.{MODULES[method]}").read(values)
    return layout
