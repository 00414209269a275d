"""compressed-tensors (vLLM's own): FP8 and INT8 with a scale for each tensor or output, FP8 in blocks, packed INT8, and
packed INT4 in groups; one of them for all products, or several, each for its own.

Source: the compressed-tensors project, formats float-quantized, int-quantized, naive-quantized, pack-quantized and
mixed-precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from inferengine.quantization.act_order import order_of
from inferengine.quantization.checkpoints.fp8 import codes_of
from inferengine.quantization.checkpoints.layout import (
    ConfigSection,
    Layout,
    Tensors,
    expect_shape,
    listed,
    refused,
    unpack_bytes,
    unpack_rows,
)
from inferengine.quantization.schemes import bytes_per_weight
from inferengine.quantization.weight import FP8, INT4, INT8, Block, QuantizedWeight

ALL = "Linear"  # the target that stands for every product
FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
CALIBRATION = ("observer", "observer_kwargs", "actorder_kwargs", "block_structure", "zp_dtype", "scale_dtype")


def read(values: dict[str, Any]) -> Layout:
    """Read a compressed-tensors quantization_config. Raises ConfigError for what is not supported."""
    config = ConfigSection(values)
    config.skip("quant_method", "version", "global_compression_ratio", "quantization_status")
    config.expect("format", *FORMATS)
    is_packed = config.value("format") == "pack-quantized"
    if (sparsity := config.section("sparsity_config")) is not None:
        sparsity.expect("format", "dense")
    groups = config.section("config_groups")
    if groups is None or not groups.values:
        raise refused("quantization_config.config_groups must hold a group")
    ignored = listed([*config.names("ignore"), "lm_head"])
    config.expect("kv_cache_scheme", None)
    config.finish()
    read = []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise refused(f"{groups.where} must hold objects")
        read.append((group.names("targets"), _group(group, ignored, is_packed=is_packed)))
    if len(read) == 1 and read[0][0] == [ALL]:
        return read[0][1]
    # A module's name counts more than its class.
    named = [(listed([each for each in targets if each != ALL]), layout) for targets, layout in read]
    chosen = (*named, *((lambda module: True, layout) for targets, layout in read if ALL in targets))

    def is_plain(module: str) -> bool:
        return ignored(module) or not any(holds(module) for holds, _ in chosen)

    largest = max((layout for _, layout in read), key=lambda layout: bytes_per_weight(layout.scheme, 4096))
    return replace(largest, name="compressed-tensors, several", is_plain=is_plain, groups=chosen)


def _group(group: ConfigSection, ignored: Callable[[str], bool], *, is_packed: bool) -> Layout:
    """Read one group of config_groups, but for its targets. Raises ConfigError."""
    group.expect("format", *FORMATS)
    is_packed = group.value("format", "pack-quantized" if is_packed else "") == "pack-quantized"
    weights, inputs = group.section("weights"), group.section("input_activations")
    group.expect("output_activations", None)
    group.finish()
    if weights is None:
        raise refused(f"{group.where}.weights is missing")
    kind, bits, strategy = weights.value("type", "int"), weights.integer("num_bits"), weights.value("strategy")
    symmetric = weights.value("symmetric", True)
    size = weights.group_size() if strategy == "group" else None
    weights.expect("actorder", False, True, "weight", "static", "group", "dynamic")
    reorders = strategy == "group" and weights.value("actorder") in (True, "group", "dynamic")  # others: not stored so
    weights.expect("dynamic", False)
    block = weights.value("block_structure")
    weights.skip("group_size", "symmetric", *CALIBRATION)
    weights.finish()
    activations = _activations(inputs)
    required: tuple[str, ...]
    optional: tuple[str, ...]
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        scheme = "fp8" if strategy == "channel" else "fp8_tensor"
        optional = ("input_scale", "input_zero_point", "weight_zero_point")
        return Layout("compressed-tensors fp8", ("weight", "weight_scale"), optional, _fp8, scheme, ignored)
    if kind == "float" and bits == 8 and strategy == "block":
        assemble = partial(_fp8_blocks, block=_block(block, weights.where))
        optional = ("input_scale", "weight_zero_point")
        return Layout("compressed-tensors fp8", ("weight", "weight_scale"), optional, assemble, "fp8_block", ignored)
    if kind == "int" and bits == 8 and strategy in ("tensor", "channel") and symmetric:
        assemble = partial(_int8, activations=activations == "int8")
        scheme = "int8_w8a8" if activations == "int8" else "int8"
        required = ("weight_packed" if is_packed else "weight", "weight_scale")
        optional = ("input_scale", "input_zero_point", "weight_zero_point", "weight_shape")
        return Layout("compressed-tensors int8", required, optional, assemble, scheme, ignored)
    if kind == "int" and bits == 4 and strategy in ("group", "channel") and activations is None:
        required = ("weight_packed", "weight_scale", *(() if symmetric else ("weight_zero_point",)))
        assemble = partial(_int4, group=size)
        if not reorders:
            return Layout("compressed-tensors int4", required, ("weight_shape",), assemble, "int4", ignored)
        order, required = partial(_order, group=size), (*required, "weight_g_idx")
        return Layout("compressed-tensors int4", required, ("weight_shape",), assemble, "int4", ignored, order)
    raise refused(
        f"{weights.where}: {bits} bits of type {kind}, strategy {strategy}, symmetric {symmetric} is not supported"
    )


def _activations(inputs: ConfigSection | None) -> str | None:
    """Return how inputs are quantized, fp8 or int8 by token; None: they stay as they are."""
    if inputs is None:
        return None
    kind, bits = inputs.value("type", "int"), inputs.integer("num_bits")
    inputs.expect("strategy", "token", "tensor", *(("group",) if kind == "float" else ()))
    inputs.expect("symmetric", True)
    inputs.skip("dynamic", "group_size", *CALIBRATION)  # static scales are not needed: ours are worked out by token
    inputs.finish()
    if bits != 8 or kind not in ("int", "float"):
        raise refused(f"{inputs.where}: {bits} bits of type {kind} is not supported")
    return "fp8" if kind == "float" else "int8"


def _scales(tensors: Tensors, rows: int) -> torch.Tensor:
    scales = expect_shape(tensors, "weight_scale", (), (1,), (1, 1), (rows,), (rows, 1))
    return scales.float().reshape(-1, 1).expand(rows, 1)


def _fp8(tensors: Tensors, rows: int, columns: int) -> QuantizedWeight:
    return QuantizedWeight(FP8, codes_of(tensors, rows, columns), _scales(tensors, rows), Block(1, columns))


def _fp8_blocks(tensors: Tensors, rows: int, columns: int, *, block: Block) -> QuantizedWeight:
    grid = (-(-rows // block.rows), -(-columns // block.columns))
    scales = expect_shape(tensors, "weight_scale", grid, (grid[0], 1, grid[1], 1))
    return QuantizedWeight(FP8, codes_of(tensors, rows, columns), scales.float().reshape(grid), block)


def _block(size: Any, where: str) -> Block:
    if not (isinstance(size, list) and len(size) == 2 and all(type(item) is int and item > 0 for item in size)):
        raise refused(f"{where}.block_structure = {size!r} is not supported; two positive numbers are")
    return Block(size[0], size[1])


def _int8(tensors: Tensors, rows: int, columns: int, *, activations: bool) -> QuantizedWeight:
    if "weight_packed" in tensors:
        codes = unpack_bytes(expect_shape(tensors, "weight_packed", (rows, -(-columns // 4))))[:, :columns]
    else:
        codes = expect_shape(tensors, "weight", (rows, columns))
        if codes.dtype != torch.int8:
            raise ValueError(f"weight is stored as {codes.dtype} where int8 is due")
    scales = _scales(tensors, rows)
    return QuantizedWeight(INT8, codes, scales, Block(1, columns), int8_activations=activations)


def _int4(tensors: Tensors, rows: int, columns: int, *, group: int | None) -> QuantizedWeight:
    """Read INT4 codes: `weight_packed` [N, K / 8] int32 holds code + 8, lowest nibble first; zero points are packed
    along the rows."""
    group = columns if group is None or group == -1 else group
    if columns % group or columns % 8:
        raise ValueError(f"{columns} inputs are no whole groups of {group}")
    groups = columns // group
    packed = expect_shape(tensors, "weight_packed", (rows, columns // 8))
    scales = expect_shape(tensors, "weight_scale", (rows, groups)).float()
    zeros = torch.full_like(scales, 8.0)
    if "weight_zero_point" in tensors:
        stored = expect_shape(tensors, "weight_zero_point", (-(-rows // 8), groups))
        zeros = unpack_rows(stored.t())[:, :rows].t().float().contiguous()
    codes = unpack_rows(packed)
    if "weight_g_idx" in tensors and (order := _order(tensors, columns, group=group)) is not None:
        codes = codes[:, order].contiguous()
    return QuantizedWeight(INT4, codes, scales, Block(1, group), zeros)


def _order(tensors: Tensors, columns: int, *, group: int | None) -> torch.Tensor | None:
    return order_of(tensors["weight_g_idx"], columns, columns if group is None or group == -1 else group)
