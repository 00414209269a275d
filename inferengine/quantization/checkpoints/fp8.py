"""FP8 as Qwen and DeepSeek publish it (128 x 128 blocks, `weight_scale_inv`), and with a scale for each tensor.

`weight_scale_inv` is what codes are multiplied by, in spite of its name. Activation scales of a static calibration are
accepted and not needed: this engine works them out by token, which is at least as exact. Nor does it round them to
powers of two where a checkpoint's own do so (`scale_fmt` ue8m0, DeepSeek-V3.1).
"""

from __future__ import annotations

from typing import Any

from inferengine.quantization.checkpoints.layout import ConfigSection, Layout, Tensors, expect_shape, listed, refused
from inferengine.quantization.weight import FP8, Block, QuantizedWeight


def read(values: dict[str, Any]) -> Layout:
    """Read an FP8 quantization_config. Raises ConfigError for what is not supported."""
    config = ConfigSection(values)
    config.skip("quant_method", "dequantize")
    config.expect("fmt", "e4m3")
    config.expect("activation_scheme", "dynamic", "static")
    config.expect("scale_fmt", "float", "ue8m0")
    plain = listed([*config.names("modules_to_not_convert"), *config.names("ignored_layers"), "lm_head"])
    size = config.value("weight_block_size")
    config.finish()
    if size is None:
        optional = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
        return Layout("fp8", ("weight",), optional, _per_tensor, "fp8_tensor", plain)
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(item, int) and item > 0 for item in size)):
        raise refused(f"quantization_config.weight_block_size = {size!r} is not supported; two positive numbers are")
    block = Block(size[0], size[1])

    def blocks(tensors: Tensors, rows: int, columns: int) -> QuantizedWeight:
        grid = (-(-rows // block.rows), -(-columns // block.columns))
        scales = expect_shape(tensors, "weight_scale_inv", grid)
        return QuantizedWeight(FP8, codes_of(tensors, rows, columns), scales.float(), block)

    return Layout("fp8 blocks", ("weight", "weight_scale_inv"), ("input_scale",), blocks, "fp8_block", plain)


def codes_of(tensors: Tensors, rows: int, columns: int) -> Any:
    """Return the e4m3 codes themselves. Raises ValueError."""
    codes = expect_shape(tensors, "weight", (rows, columns))
    if str(codes.dtype) != "torch.float8_e4m3fn":
        raise ValueError(f"weight is stored as {codes.dtype} where float8_e4m3fn is due")
    return codes


def _per_tensor(tensors: Tensors, rows: int, columns: int) -> QuantizedWeight:
    names = [name for name in ("weight_scale", "weight_scale_inv") if name in tensors]
    if len(names) != 1:
        raise ValueError("one of weight_scale and weight_scale_inv is due")
    scales = expect_shape(tensors, names[0], (), (1,), (1, 1), (rows,), (rows, 1)).float().reshape(-1, 1)
    return QuantizedWeight(FP8, codes_of(tensors, rows, columns), scales.expand(rows, 1), Block(1, columns))
