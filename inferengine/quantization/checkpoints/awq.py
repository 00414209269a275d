"""AWQ (Lin et al. 2023), 4 bits, GEMM layout: codes and zero points packed along the outputs, in interleaved order.

`qweight` [K, N / 8], `qzeros` [K / G, N / 8], `scales` [K / G, N].
"""

from __future__ import annotations

from functools import partial
from typing import Any

from inferengine.quantization.checkpoints.layout import (
    AWQ_ORDER,
    ConfigSection,
    Layout,
    Tensors,
    expect_shape,
    listed,
    unpack_rows,
)
from inferengine.quantization.weight import INT4, Block, QuantizedWeight


def read(values: dict[str, Any]) -> Layout:
    """Read an AWQ quantization_config. Raises ConfigError for what is not supported."""
    config = ConfigSection(values)
    config.skip("quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend")
    config.expect("bits", 4)
    config.expect("w_bit", 4)
    config.expect("version", "gemm", "GEMM")
    config.expect("zero_point", True)
    config.skip("q_group_size")
    group = config.group_size()
    plain = listed([*config.names("modules_to_not_convert"), "lm_head"])
    config.finish()
    return Layout("awq", ("qweight", "qzeros", "scales"), (), partial(_assemble, group=group), "int4", plain)


def _assemble(tensors: Tensors, rows: int, columns: int, *, group: int) -> QuantizedWeight:
    group = columns if group == -1 else group
    if columns % group or rows % 8:
        raise ValueError(f"{columns} inputs and {rows} outputs are no whole words in groups of {group}")
    groups = columns // group
    codes = unpack_rows(expect_shape(tensors, "qweight", (columns, rows // 8)), AWQ_ORDER)
    zeros = unpack_rows(expect_shape(tensors, "qzeros", (groups, rows // 8)), AWQ_ORDER)
    scales = expect_shape(tensors, "scales", (groups, rows)).float().t().contiguous()
    return QuantizedWeight(INT4, codes.t().contiguous(), scales, Block(1, group), zeros.float().t().contiguous())
