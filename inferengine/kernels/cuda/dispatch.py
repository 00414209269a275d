"""Which kernel takes which shape, and in which configuration: the one table that all launch sites on CUDA consult.

A product is x [rows, columns] @ weight [width, columns]^T. `PRODUCTS` lists, for each pair of operands and each kind of
product, rules in order of preference. A rule holds for ranges of rows, width, columns and weight size. `candidates`
returns the first rule of each kernel that holds, best kernel first; a launch site takes the first one whose kernel
accepts its tensors (Hopper only, alignment, whole tiles). Where none is left, the launch site uses the library: cuBLAS,
for quantized weights after they are dequantized.

The rules' figures were measured on an H200 with benchmarks/kernels.py and benchmarks/quantized.py, most of them with
the shapes of an 8B model. For another shape they may be slow but never wrong. What was measured for the very shape on
the very card comes first, from the tables that tuning/ keeps (`use_measured`). The rules then say what is tried, and
what holds where nothing was measured. A process reads its table before it compiles anything and keeps it: equal shapes
take equal launches.

Deterministic mode has operands of its own. Their configurations sum the inner dimension in an order that depends on the
weight's shape only, never on the number of rows.

Every `width` counts all rows of the weight: of a gated product gate and up together.

Attention over single new tokens is chosen in the same way, by the number of rows (`AttentionKey`). How long the rows'
contexts are is known on the device alone, so one choice serves all contexts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

# -- configurations, by kernel -----------------------------------------------------------------------------------------


class GemvConfig(NamedTuple):
    """gemm/dense_small_m.py, one row: weight rows and columns per tile, columns of each row prefetched into L2."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int


class TileConfig(NamedTuple):
    """gemm/dense_small_m.py, few rows on the tensor cores. `chunks`: parts of the inner dimension that are summed
    apart; `preload`: read the weight's first tile before the input is there, which pays where there are few tiles."""

    block_m: int
    block_n: int
    block_k: int
    chunks: int
    num_warps: int
    num_stages: int
    prefetch: int
    preload: bool = False


class TmaTileConfig(NamedTuple):
    """gemm/dense_tma.py: tiles of rows, of outputs (twice as many weight rows when gated) and of the inner dimension,
    which `splits` programs share. `weight_left`: the weight is the tensor cores' left operand."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    weight_left: bool = False


class W8GemvConfig(NamedTuple):
    """gemm/w8.py, one row: weight rows and columns of a tile. A thread reads eight columns at a time."""

    block_n: int
    block_k: int
    num_warps: int


class W8TileConfig(NamedTuple):
    """gemm/w8.py, some rows: tile sizes; `chunks` are parts of the inner dimension that different programs sum."""

    block_m: int
    block_n: int
    block_k: int
    chunks: int
    num_warps: int
    num_stages: int


class W4SmallMConfig(NamedTuple):
    """gemm/w4_small_m.py: tiles of 16 weight rows of a program (two where the product is gated), its warps, slices that
    each warp has in flight, and the most blocks of eight rows of x that a program takes."""

    tiles: int
    num_warps: int
    ahead: int
    row_blocks: int = 4


class W4TileConfig(NamedTuple):
    """gemm/w4_tiles.py: tiles of rows of x and of weight rows; `chunks` are parts of the inner dimension that different
    programs sum."""

    block_m: int
    block_n: int
    chunks: int
    num_warps: int
    num_stages: int


class BlockTileConfig(NamedTuple):
    """gemm/block_tiles.py: tiles of rows of x (1: on the vector units) and of weight rows; `splits` programs share the
    inner dimension."""

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


class StreamConfig(NamedTuple):
    """gemm/w8a8_stream_hopper.py: rows of x, weight rows (as many of gate as of up) and columns of a step, parts of the
    inner dimension, warps, and steps in the ring. `block_k` is at least 128. Shared memory that the ring leaves free is
    where the next product's ring begins to fill."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class DecodeConfig(NamedTuple):
    """attention/decode.py: tokens per tile, and the most programs per (row, KV head), of which one more takes part for
    each `min_tiles` of the context. `fused`: where all rows of a step are decodes, the kernel also rotates queries and
    keys and writes the cache; else a kernel before it does."""

    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1
    fused: bool = True


class PrefixConfig(NamedTuple):
    """attention/shared_prefix.py: queries of a tile (rows x heads of a KV head, padded to a power of two), tokens per
    tile, the most parts of a prefix, of which there is one more for each `min_tiles` of it."""

    block_m: int
    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int
    min_tiles: int = 2


class PrefillConfig(NamedTuple):
    """attention/prefill.py: rows (tokens x heads of a group) and keys per tile. `tma`: load tiles with the tensor
    memory accelerator where the cache's blocks allow it. `fill`: programs that fill the device; where there are fewer,
    up to 16 share the keys of a tile."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    tma: bool = False
    fill: int = 264


class HopperPrefillConfig(NamedTuple):
    """attention/prefill_hopper.py: keys of a step, steps in shared memory, computing groups (2 or 3), the most programs
    that share the keys of a tile of queries where there are few tiles, whether a KV head's heads are padded to a power
    of two, and the tokens of a step from which on it is the better choice."""

    block_tokens: int
    num_stages: int
    num_groups: int
    max_splits: int
    packs: bool = False
    min_tokens: int = 256


# -- what is looked up -------------------------------------------------------------------------------------------------


class Operands(StrEnum):
    """Number formats of a product: the weight's, then the input's where it is not 16 bits wide."""

    DENSE = "16 bits"
    DENSE_FP32 = "fp32"
    DENSE_EXACT = "16 bits, deterministic"
    DENSE_FP32_EXACT = "fp32, deterministic"
    W8 = "8-bit codes"
    W8_FP32 = "8-bit codes, fp32 inputs"
    W8_EXACT = "8-bit codes, deterministic"
    W8_FP32_EXACT = "8-bit codes, fp32 inputs, deterministic"
    FP8 = "FP8 with a scale for each output, whose inputs may be quantized to FP8"
    W8A8 = "int8 with a scale for each output, whose inputs may be quantized to int8"
    FP8_CODES = "FP8, inputs quantized to FP8 with a scale for each row"
    FP8_BLOCK_CODES = "FP8, inputs quantized to FP8 with a scale for each 128 columns of a row"
    INT8_CODES = "int8, inputs quantized to int8"
    W4 = "4-bit codes in groups of 32 columns or more"
    W4_SMALL_GROUPS = "4-bit codes in groups of 16 columns"
    W4_FP32 = "4-bit codes, fp32 inputs"
    W4_EXACT = "4-bit codes, deterministic"
    BLOCK_NIBBLES = "block formats of GGUF files, of 4 bits"
    BLOCK_CODES = "block formats of GGUF files, of more bits"
    BLOCK_CODES_EXACT = "block formats of GGUF files, deterministic"


class Product(StrEnum):
    """What surrounds a product."""

    LINEAR = "bias or residual"
    GATED = "act(gate) * up"
    PARTS = "partial sums, which the norm that follows adds to the residual"


class Kernel(StrEnum):
    """A kernel, or a step that makes other operands of these."""

    GEMV = "dense_small_m.gemv"
    TILE = "dense_small_m.tiled"
    TMA_TILE = "dense_tma.tma_tiled"
    TMA_PARTS = "dense_tma.tma_parts"
    GEMV_HOPPER = "gemv_hopper"  # its configuration follows from the shared memory of a multiprocessor: find_shape
    W8_GEMV = "w8.vector_product"
    W8_TILE = "w8.tile_product"
    W4_SMALL_M = "w4_small_m"
    W4_TILE = "w4_tiles"
    BLOCK_TILE = "block_tiles.block_product"
    STREAM = "w8a8_stream_hopper"
    QUANTIZE_INPUTS = "quantize the inputs, then look up codes times codes"


class KernelChoice(NamedTuple):
    """A kernel and its configuration: the NamedTuple above that names the kernel's file; None where it needs none."""

    kernel: Kernel
    config: Any


class Range(NamedTuple):
    """Whole numbers from `first` to `last`."""

    first: int
    last: int


class Rule(NamedTuple):
    """One line of the table: the choice, and for which shapes it holds."""

    kernel: Kernel
    config: Any
    rows: Range
    width: Range
    columns: Range
    size: Range  # width * columns
    width_of: int  # the width is a multiple of this
    columns_of: int
    wide: bool | None  # whether the width is greater than the columns; None: either
    tiles: Range  # tiles of 128 x 128 that the result has
    splits: Callable[[int, int], int] | None  # (width, columns) -> `splits` or `chunks` of the configuration

    def holds(self, rows: int, width: int, columns: int) -> bool:
        """Return whether the rule covers a shape."""
        return (
            self.rows.first <= rows <= self.rows.last
            and self.width.first <= width <= self.width.last
            and self.columns.first <= columns <= self.columns.last
            and self.size.first <= width * columns <= self.size.last
            and width % self.width_of == 0
            and columns % self.columns_of == 0
            and self.wide in (None, width > columns)
            and self.tiles.first <= -(-rows // 128) * -(-width // 128) <= self.tiles.last
        )

    def choice(self, width: int, columns: int) -> KernelChoice:
        """Return the choice for a shape that the rule covers."""
        if self.splits is None:
            return KernelChoice(self.kernel, self.config)
        name = "splits" if "splits" in self.config._fields else "chunks"
        return KernelChoice(self.kernel, self.config._replace(**{name: self.splits(width, columns)}))


MANY = 1 << 62
ANY = Range(0, MANY)
ONE = Range(1, 1)


def to(last: int) -> Range:
    """Return the range of everything up to `last`."""
    return Range(0, last)


def above(last: int) -> Range:
    """Return the range of everything greater than `last`."""
    return Range(last + 1, MANY)


def rule(
    kernel: Kernel,
    config: Any = None,
    rows: Range = ANY,
    *,
    width: Range = ANY,
    columns: Range = ANY,
    size: Range = ANY,
    width_of: int = 1,
    columns_of: int = 1,
    wide: bool | None = None,
    tiles: Range = ANY,
    splits: Callable[[int, int], int] | None = None,
) -> Rule:
    """Return a rule; what is not given does not limit it."""
    return Rule(kernel, config, rows, width, columns, size, width_of, columns_of, wide, tiles, splits)


# -- splits that follow from the shape ---------------------------------------------------------------------------------

MULTIPROCESSORS = 132


def fill(fewest: int, most: int) -> Callable[[int, int], int]:
    """Return splits that give each multiprocessor one tile of 64 outputs."""
    return lambda width, columns: max(fewest, min(most, round(MULTIPROCESSORS * 64 / width)))


def by_columns(size: int) -> Callable[[int, int], int]:
    """Return one split for each `size` columns."""
    return lambda width, columns: max(1, -(-columns // size))


def double_until_two_programs_each(width: int, columns: int) -> int:
    """Return 1, 2, 4 or 8: splits of 512 columns or more that give each multiprocessor two tiles of 64 outputs."""
    splits = 1
    while splits < 8 and width // 64 * splits < 2 * MULTIPROCESSORS and columns // (splits * 2) >= 512:
        splits *= 2
    return splits


# -- 16-bit weights ----------------------------------------------------------------------------------------------------

LARGE = Range(12 << 20, MANY)  # weights whose reading takes so long that deep pipelines pay
SMALL = to((12 << 20) - 1)  # weights that are read in a few microseconds: one tile for each program, preloaded
BLOCKS_32 = ((Range(2, 16), 16), (Range(17, 32), 32))  # rows, and the tile's rows that hold them
BLOCKS_64 = (*BLOCKS_32, (Range(33, 64), 64))


def _dense_linear() -> Iterator[Rule]:
    yield rule(Kernel.GEMV, GemvConfig(4, 2048, 8, 0), ONE, columns=Range(3584, MANY), width=to(4096))
    yield rule(Kernel.GEMV, GemvConfig(4, 2048, 8, 0), ONE, columns=Range(8192, MANY))
    yield rule(Kernel.GEMV, GemvConfig(2, 1024, 4, 0), ONE, columns=Range(3584, MANY))
    yield rule(Kernel.GEMV, GemvConfig(8, 1024, 4, 1024), ONE, columns=above(2560))
    yield rule(Kernel.GEMV, GemvConfig(4, 1024, 4, 1024), ONE, columns=above(1536))
    yield rule(Kernel.GEMV, GemvConfig(8, 1024, 4, 0), ONE, width=to(16384))
    yield rule(Kernel.GEMV, GemvConfig(4, 1024, 4, 0), ONE)
    # Deep pipelines on one tile a multiprocessor win, and sums that need no second program.
    tma: dict[str, Any] = {"size": LARGE, "columns_of": 128}
    few, some = Range(17, 32), Range(33, 64)
    yield rule(
        Kernel.TMA_TILE, TmaTileConfig(32, 64, 128, 1, 4, 5, True), few, width=to(16384), splits=fill(1, 4), **tma
    )
    yield rule(Kernel.TMA_TILE, TmaTileConfig(64, 128, 64, 1, 8, 4, True), some, width=above(16384), **tma)
    yield rule(Kernel.TMA_TILE, TmaTileConfig(64, 64, 64, 1, 4, 8), some, width=Range(4097, 16384), **tma)
    tile: dict[str, Any] = {"width_of": 64, "columns_of": 128}
    for rows, block in BLOCKS_32:
        small = TileConfig(block, 16, 1024, 1, 4, 1, 0, True)
        yield rule(Kernel.TILE, small, rows, size=SMALL, splits=by_columns(1024), **tile)
        yield rule(Kernel.TILE, TileConfig(block, 64, 128, 4, 4, 4, 0), rows, size=LARGE, width=to(4096), **tile)
        yield rule(Kernel.TILE, TileConfig(block, 64, 64, 4, 4, 6, 0), rows, size=LARGE, width=to(16384), **tile)
        yield rule(Kernel.TILE, TileConfig(block, 64, 128, 1, 4, 4, 0), rows, size=LARGE, **tile)
    yield rule(Kernel.TILE, TileConfig(64, 64, 128, 2, 4, 4, 0), some, size=LARGE, width=to(4096), **tile)


def _dense_gated() -> Iterator[Rule]:
    yield rule(Kernel.GEMV, GemvConfig(4, 2048, 8, 0), ONE, columns=Range(3584, MANY), width=to(4096))
    yield rule(Kernel.GEMV, GemvConfig(4, 2048, 8, 0), ONE, columns=Range(8192, MANY))
    yield rule(Kernel.GEMV, GemvConfig(2, 1024, 4, 0), ONE, columns=Range(3584, MANY))
    yield rule(Kernel.GEMV, GemvConfig(4, 512, 2, 0), ONE)
    tma: dict[str, Any] = {"size": LARGE, "columns_of": 128}
    yield rule(Kernel.TMA_TILE, TmaTileConfig(32, 64, 128, 1, 4, 2, True), Range(17, 32), **tma)
    yield rule(Kernel.TMA_TILE, TmaTileConfig(64, 64, 64, 1, 4, 4), Range(33, 64), **tma)
    yield rule(Kernel.TMA_TILE, TmaTileConfig(128, 128, 64, 1, 8, 4, True), Range(65, 128), **tma)
    tile: dict[str, Any] = {"width_of": 64, "columns_of": 128}
    for rows, block in BLOCKS_32:
        narrow = TileConfig(block, 16, 1024, 1, 4, 1, 0, True)
        yield rule(Kernel.TILE, narrow, rows, size=SMALL, columns=to(1024), **tile)
        yield rule(Kernel.TILE, TileConfig(block, 16, 512, 1, 4, 1, 0, True), rows, size=SMALL, **tile)
    for rows, block in BLOCKS_64:
        yield rule(Kernel.TILE, TileConfig(block, 64, 128, 1, 4, 4, 0), rows, size=LARGE, **tile)


def _dense_parts() -> Iterator[Rule]:
    limits: dict[str, Any] = {"width": to(8192), "size": LARGE, "columns_of": 256, "splits": fill(2, 4)}
    yield rule(Kernel.TMA_PARTS, TmaTileConfig(32, 64, 128, 1, 4, 5, True), Range(17, 32), **limits)
    yield rule(Kernel.TMA_PARTS, TmaTileConfig(64, 64, 64, 1, 4, 8), Range(33, 64), **limits)
    yield rule(Kernel.TMA_PARTS, TmaTileConfig(128, 64, 64, 1, 4, 8), Range(65, 128), **limits)


def _dense_exact(*, gated: bool, num_stages: int | None = None) -> Iterator[Rule]:
    """Steps of 64 columns, in chunks that the weight's shape decides: a row's sum is the same whatever else the
    configuration says. `num_stages`: for fp32, whose tiles take twice the room."""
    blocks = ((to(16), 16), (Range(17, 32), 32), (Range(33, 64), 64))
    shapes: list[tuple[int, dict[str, Any]]] = [(1, {})]
    if not gated:
        shapes.insert(0, (2, {"columns": Range(2048, MANY), "width": to(8192)}))
    for chunks, limits in shapes:
        for rows, block in blocks:
            stages = num_stages or (5 if gated else 6)
            yield rule(Kernel.TILE, TileConfig(block, 64, 64, chunks, 4, stages, 0), rows, **limits)
        many = TileConfig(128, 64, 64, chunks, 8, num_stages or 4, 0)
        if gated:
            yield rule(Kernel.TILE, many, above(64), **limits)
        else:
            yield rule(Kernel.TILE, many, above(64), tiles=to(2 * MULTIPROCESSORS - 1), **limits)
            yield rule(Kernel.TILE, many._replace(block_n=128), above(64), **limits)


# -- 8-bit weights -----------------------------------------------------------------------------------------------------


def _w8_gemv(*, gated: bool) -> Iterator[Rule]:
    yield rule(Kernel.W8_GEMV, W8GemvConfig(8, 512, 2), ONE, columns=to(1023))
    if gated:
        yield rule(Kernel.W8_GEMV, W8GemvConfig(2, 512, 2), ONE)
    yield rule(Kernel.W8_GEMV, W8GemvConfig(8, 512, 2), ONE, wide=True)
    yield rule(Kernel.W8_GEMV, W8GemvConfig(8, 1024, 4), ONE)


def _w8_tile(last_row: int, *, num_stages: int = 4) -> Iterator[Rule]:
    for rows, block in (*BLOCKS_32, (Range(33, last_row), 64)):
        config = W8TileConfig(block, 64, 128, 1, 4, num_stages)
        yield rule(Kernel.W8_TILE, config, rows, splits=double_until_two_programs_each)


STREAM_BLOCKS = ((Range(2, 8), 8), (Range(9, 16), 16), (Range(17, 32), 32), (Range(33, 64), 64), (Range(65, 128), 128))


def _fp8_stream() -> Iterator[Rule]:
    for (rows, block), stages in zip(STREAM_BLOCKS, (7, 7, 5, 4, 4), strict=True):
        yield rule(Kernel.STREAM, StreamConfig(block, 64, 256, 1, 4, stages), rows, size=LARGE, width=above(4096))


def _fp8_tile() -> Iterator[Rule]:
    for rows, block in ((to(16), 16), (Range(17, 32), 32), (Range(33, 64), 64)):
        wide = W8TileConfig(block, 64, 128, 1, 4, 3 if block == 16 else 5)
        yield rule(Kernel.W8_TILE, wide, rows, width=above(16384))
        deep = W8TileConfig(block, 64, 256, 4 if block < 64 else 2, 4, 4)
        yield rule(Kernel.W8_TILE, deep, rows, columns=ANY if block < 64 else above(8192))
    yield rule(Kernel.W8_TILE, W8TileConfig(64, 64, 256, 1, 4, 4), Range(33, 64))
    yield rule(Kernel.W8_TILE, W8TileConfig(64, 64, 256, 1, 4, 4), Range(65, 128), width=to(4096))
    yield rule(Kernel.W8_TILE, W8TileConfig(64, 64, 128, 1, 4, 4), Range(65, 128), width=to(6144))


def _fp8_parts() -> Iterator[Rule]:
    for (rows, block), stages in zip(STREAM_BLOCKS[:4], (5, 5, 4, 3), strict=True):
        config = StreamConfig(block, 64, 256, 2, 4, stages)
        yield rule(Kernel.STREAM, config._replace(splits=4), rows, size=LARGE, width=to(8192), columns=above(8192))
        yield rule(Kernel.STREAM, config, rows, size=LARGE, width=to(8192))


def _fp8_narrow_blocks() -> Iterator[Rule]:
    """Inputs with a scale for each 128 columns, which only the streamed kernel reads."""
    for (rows, block), stages in zip(STREAM_BLOCKS[:4], (5, 5, 4, 3), strict=True):
        yield rule(Kernel.STREAM, StreamConfig(block, 64, 256, 1, 4, stages), rows, size=LARGE, width=to(4096))


def _fp8_gated() -> Iterator[Rule]:
    """With `block_n` 128 the kernel can quantize its results by blocks of 128 columns, from which few rows gain."""
    configs = (
        StreamConfig(8, 128, 256, 1, 8, 3),
        StreamConfig(16, 128, 128, 1, 4, 5),
        StreamConfig(32, 64, 128, 1, 4, 5),
        StreamConfig(64, 64, 256, 1, 4, 2),
        StreamConfig(128, 64, 128, 1, 4, 3),
    )
    for (rows, _), config in zip(STREAM_BLOCKS, configs, strict=True):
        yield rule(Kernel.STREAM, config, rows, size=LARGE, width=above(16384))


# -- 4-bit weights -----------------------------------------------------------------------------------------------------


def _w4_small_m(last_row: int) -> Iterator[Rule]:
    few, some, more = Range(2, 8), Range(9, 16), Range(17, last_row)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 4, 4), ONE, wide=True)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 8, 2), ONE)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(2, 4, 2), few, width=above(16384))
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 8, 4), few)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(2, 4, 1, 2), some, width=above(16384))
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 4, 2, 2), some, wide=True)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 8, 1, 2), some)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(2, 4, 1, 2), more, wide=True)
    yield rule(Kernel.W4_SMALL_M, W4SmallMConfig(2, 4, 1, 4), more)


def _w4_tile() -> Iterator[Rule]:
    few, some, more = Range(17, 32), Range(33, 64), Range(65, 128)
    yield rule(Kernel.W4_TILE, W4TileConfig(32, 64, 2, 4, 3), few, width=above(16384))
    yield rule(Kernel.W4_TILE, W4TileConfig(32, 64, 8, 4, 3), few, columns=above(8192))
    yield rule(Kernel.W4_TILE, W4TileConfig(32, 64, 4, 4, 3), few)
    yield rule(Kernel.W4_TILE, W4TileConfig(64, 128, 1, 8, 3), some, width=above(16384))
    yield rule(Kernel.W4_TILE, W4TileConfig(64, 64, 4, 4, 3), some)
    yield rule(Kernel.W4_TILE, W4TileConfig(128, 64, 1, 4, 3), more, width=above(16384))
    yield rule(Kernel.W4_TILE, W4TileConfig(128, 64, 1, 4, 4), more, wide=True)
    yield rule(Kernel.W4_TILE, W4TileConfig(128, 64, 4, 4, 3), more)


def _block_tile(block_n: int) -> Iterator[Rule]:
    """`block_n`: rows of the weight that a program takes of a single row's product."""
    wide = above(16384)
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(1, block_n, 4, 4, 2), ONE)
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(16, 64, 8, 4, 2), Range(2, 16), width=wide)
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(16, 64, 8, 4, 3), Range(2, 16))
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(32, 64, 4, 4, 2), Range(17, 32))
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(64, 128, 1, 8, 2), Range(33, 64), width=wide)
    yield rule(Kernel.BLOCK_TILE, BlockTileConfig(64, 64, 4, 4, 2), Range(33, 64))


# -- the table ---------------------------------------------------------------------------------------------------------

_GEMV_HOPPER = rule(Kernel.GEMV_HOPPER, None, ONE)
_W4_GATED = rule(Kernel.W4_SMALL_M, W4SmallMConfig(2, 2, 1), ONE)
_W8_ONE_GATED = (_GEMV_HOPPER, *_w8_gemv(gated=True))

PRODUCTS: dict[Operands, dict[Product, tuple[Rule, ...]]] = {
    Operands.DENSE: {
        Product.LINEAR: tuple(_dense_linear()),
        Product.GATED: tuple(_dense_gated()),
        Product.PARTS: tuple(_dense_parts()),
    },
    Operands.DENSE_FP32: {},
    Operands.DENSE_EXACT: {
        Product.LINEAR: tuple(_dense_exact(gated=False)),
        Product.GATED: tuple(_dense_exact(gated=True)),
    },
    Operands.DENSE_FP32_EXACT: {
        Product.LINEAR: tuple(_dense_exact(gated=False, num_stages=2)),
        Product.GATED: tuple(_dense_exact(gated=True, num_stages=2)),
    },
    Operands.W8: {
        Product.LINEAR: (_GEMV_HOPPER, *_w8_gemv(gated=False), *_w8_tile(256)),
        Product.GATED: _W8_ONE_GATED,
    },
    Operands.W8_FP32: {
        Product.LINEAR: (*_w8_gemv(gated=False), *_w8_tile(256, num_stages=2)),
        Product.GATED: tuple(_w8_gemv(gated=True)),
    },
    Operands.W8_EXACT: {Product.LINEAR: (rule(Kernel.W8_TILE, W8TileConfig(64, 64, 128, 1, 4, 3)),)},
    Operands.W8_FP32_EXACT: {Product.LINEAR: (rule(Kernel.W8_TILE, W8TileConfig(64, 64, 128, 1, 4, 2)),)},
    Operands.FP8: {
        Product.LINEAR: (_GEMV_HOPPER, *_w8_gemv(gated=False), rule(Kernel.QUANTIZE_INPUTS, None, above(1))),
        Product.GATED: _W8_ONE_GATED,
    },
    Operands.W8A8: {
        Product.LINEAR: (
            _GEMV_HOPPER,
            *_w8_gemv(gated=False),
            *_w8_tile(64),
            rule(Kernel.QUANTIZE_INPUTS, None, above(64)),
        ),
        Product.GATED: _W8_ONE_GATED,
    },
    Operands.FP8_CODES: {
        Product.LINEAR: (*_fp8_stream(), *_fp8_tile()),
        Product.GATED: tuple(_fp8_gated()),
        Product.PARTS: tuple(_fp8_parts()),
    },
    Operands.FP8_BLOCK_CODES: {
        Product.LINEAR: (*_fp8_stream(), *_fp8_narrow_blocks()),
        Product.PARTS: tuple(_fp8_parts()),
    },
    Operands.INT8_CODES: {},
    Operands.W4: {
        Product.LINEAR: (_GEMV_HOPPER, *_w4_small_m(16), *_w4_tile()),
        Product.GATED: (_GEMV_HOPPER, _W4_GATED),
    },
    Operands.W4_SMALL_GROUPS: {
        Product.LINEAR: tuple(_w4_small_m(96)),
        Product.GATED: (_W4_GATED,),
    },
    Operands.W4_FP32: {Product.LINEAR: tuple(_w4_small_m(96))},
    Operands.W4_EXACT: {Product.LINEAR: (rule(Kernel.W4_SMALL_M, W4SmallMConfig(1, 4, 2)),)},
    Operands.BLOCK_NIBBLES: {Product.LINEAR: tuple(_block_tile(32))},
    Operands.BLOCK_CODES: {Product.LINEAR: tuple(_block_tile(16))},
    Operands.BLOCK_CODES_EXACT: {Product.LINEAR: (rule(Kernel.BLOCK_TILE, BlockTileConfig(16, 64, 1, 4, 2)),)},
}

# More rows than this are one class, but where the number of tiles counts.
_MOST_ROWS = max(
    row
    for products in PRODUCTS.values()
    for rules in products.values()
    for each in rules
    for row in each.rows
    if row < MANY
)
_BY_TILES = frozenset((Operands.DENSE_EXACT, Operands.DENSE_FP32_EXACT))


class ProductKey(NamedTuple):
    """What a measurement is of, but for the number of rows."""

    operands: Operands
    product: Product
    width: int
    columns: int


class MeasuredRun(NamedTuple):
    """The best kernel for `first` to `last` rows; None: the library, or for PARTS that the sum is not left in parts."""

    first: int
    last: int
    choice: KernelChoice | None


class _Runs(NamedTuple):
    """Of one product, in order."""

    lasts: tuple[int, ...]
    runs: tuple[MeasuredRun, ...]
    choices: tuple[tuple[KernelChoice, ...], ...]  # the measured one first, then those of the rules


_measured: dict[ProductKey, _Runs] = {}


def use_measured(table: Mapping[ProductKey, tuple[MeasuredRun, ...]]) -> None:
    """Let these measurements decide, and the rules where there are none. They replace those of an earlier call."""
    _measured.clear()
    for key, runs in table.items():
        _measured[key] = _runs_of(key, runs)


def measured_rows() -> tuple[int, ...]:
    """Return the last number of rows of every measured run, in order: at these the choice may change."""
    return tuple(sorted({last for runs in _measured.values() for last in runs.lasts}))


KeyT = TypeVar("KeyT")
ChoiceT = TypeVar("ChoiceT")


class MeasuredChoices(Generic[KeyT, ChoiceT]):
    """What was measured to be best of something other than a product: by key, and by runs of numbers of rows."""

    def __init__(self) -> None:
        self._runs: dict[KeyT, tuple[tuple[int, int, ChoiceT], ...]] = {}
        self._forced: dict[KeyT, ChoiceT] = {}

    def use(self, table: Mapping[KeyT, tuple[tuple[int, int, ChoiceT], ...]]) -> None:
        """Let these runs (first row, last row, choice) decide. They replace those of an earlier call."""
        self._runs = dict(table)

    def find(self, key: KeyT, rows: int) -> ChoiceT | None:
        """Return what was measured for so many rows, or what is forced; None: nothing was."""
        if self._forced and key in self._forced:
            return self._forced[key]
        for first, last, choice in self._runs.get(key, ()):
            if first <= rows <= last:
                return choice
        return None

    def rows(self) -> tuple[int, ...]:
        """Return the last number of rows of every run, in order."""
        return tuple(sorted({last for runs in self._runs.values() for _, last, _ in runs}))

    @contextmanager
    def forcing(self, key: KeyT, choice: ChoiceT) -> Iterator[None]:
        """Inside, `key` takes this choice for any number of rows."""
        before = dict(self._forced)
        self._forced[key] = choice
        try:
            yield
        finally:
            self._forced = before


@contextmanager
def forcing(choices: Mapping[ProductKey, KernelChoice | None]) -> Iterator[None]:
    """Inside, these products take these kernels for any number of rows, where they accept the tensors."""
    before = {key: _measured.get(key) for key in choices}
    for key, choice in choices.items():
        found = () if choice is None else (choice,)
        _measured[key] = _Runs((MANY,), (MeasuredRun(0, MANY, choice),), (found,))
    try:
        yield
    finally:
        for key, runs in before.items():
            if runs is None:
                del _measured[key]
            else:
                _measured[key] = runs


def _runs_of(key: ProductKey, runs: tuple[MeasuredRun, ...]) -> _Runs:
    choices = []
    for _, last, choice in runs:
        others = rule_candidates(key.operands, key.product, last, key.width, key.columns)
        found = () if choice is None else (choice, *(each for each in others if each.kernel is not choice.kernel))
        choices.append(found)
    return _Runs(tuple(run.last for run in runs), runs, tuple(choices))


def candidates(operands: Operands, product: Product, rows: int, width: int, columns: int) -> tuple[KernelChoice, ...]:
    """Return the kernels for x [rows, columns] @ weight [width, columns]^T, best first; empty: the library is best."""
    if _measured:
        found = _measured.get(ProductKey(operands, product, width, columns))
        if found is not None:
            index = bisect_left(found.lasts, rows)
            if index < len(found.lasts) and found.runs[index].first <= rows:
                return found.choices[index]
    return rule_candidates(operands, product, rows, width, columns)


def rule_candidates(
    operands: Operands, product: Product, rows: int, width: int, columns: int
) -> tuple[KernelChoice, ...]:
    """Return what the rules say of a product, whatever was measured; as `candidates`."""
    if rows > _MOST_ROWS and operands not in _BY_TILES:
        rows = _MOST_ROWS + 1
    return _candidates(operands, product, rows, width, columns)


@lru_cache(maxsize=16384)
def _candidates(operands: Operands, product: Product, rows: int, width: int, columns: int) -> tuple[KernelChoice, ...]:
    found: dict[Kernel, KernelChoice] = {}
    for each in PRODUCTS[operands].get(product, ()):
        if each.kernel not in found and each.holds(rows, width, columns):
            found[each.kernel] = each.choice(width, columns)
    return tuple(found.values())


# -- attention ---------------------------------------------------------------------------------------------------------

# (head dimensions, rows x KV heads, configuration). Few rows are split to fill the device, in programs that hold one
# tile and are light enough to start beside the product before them; many rows are split where the context is long
# (`min_tiles`). Measured over equal and unequal contexts: the other rows must not wait for one long row.
DECODE_ATTENTION: tuple[tuple[Range, Range, DecodeConfig], ...] = (
    (to(128), to(8), DecodeConfig(64, 32, 4, 1)),
    (to(128), to(16), DecodeConfig(64, 16, 4, 1)),
    (to(64), to(32), DecodeConfig(64, 16, 4, 2)),
    (to(128), to(64), DecodeConfig(64, 8, 4, 2)),
    (to(128), to(128), DecodeConfig(64, 8, 4, 2, 2)),
    (to(128), to(264), DecodeConfig(64, 8, 2, 2, 8)),
    (to(128), to(528), DecodeConfig(64, 8, 2, 2, 16)),
    (to(128), to(1056), DecodeConfig(64, 8, 4, 2, 16)),
    (to(128), to(1408), DecodeConfig(64, 4, 4, 2, 16)),
    (to(128), ANY, DecodeConfig(64, 2, 4, 2, 16)),
    (above(256), to(16), DecodeConfig(32, 16, 8, 2, 2)),  # of such heads none was measured: no register is spilled
    (above(256), to(64), DecodeConfig(32, 8, 8, 2, 2)),
    (above(256), ANY, DecodeConfig(32, 2, 8, 2, 16)),
    (ANY, to(64), DecodeConfig(32, 8, 4, 2)),
    (ANY, ANY, DecodeConfig(32, 2, 4, 2, 16)),
)

# (head dimensions, tokens of a block of the cache, configuration)
PREFILL_ATTENTION: tuple[tuple[Range, Range, PrefillConfig], ...] = (
    (above(256), ANY, PrefillConfig(32, 32, 8, 1)),  # not measured: larger tiles do not fit
    (above(128), ANY, PrefillConfig(64, 32, 4, 2)),
    (ANY, Range(64, MANY), PrefillConfig(64, 64, 4, 2, tma=True)),
    (ANY, Range(32, 32), PrefillConfig(64, 32, 4, 4, tma=True)),
    (ANY, ANY, PrefillConfig(64, 64, 4, 2)),
)

# (head dimensions, tokens of the step, configuration). Sets of heads take 64 tile rows each, so short steps, whose
# sequences may have few tokens, pad the heads of a KV head instead (`packs`).
HOPPER_PREFILL_ATTENTION: tuple[tuple[Range, Range, HopperPrefillConfig], ...] = (
    (to(64), to(511), HopperPrefillConfig(128, 4, 2, 16, packs=True)),
    (to(128), to(511), HopperPrefillConfig(128, 2, 2, 16, packs=True)),
    (ANY, to(511), HopperPrefillConfig(64, 2, 2, 16, packs=True)),
    (to(64), to(2047), HopperPrefillConfig(128, 4, 2, 16)),
    (to(64), ANY, HopperPrefillConfig(128, 4, 3, 16)),  # few tokens leave more of its larger tiles empty
    (to(128), ANY, HopperPrefillConfig(128, 2, 2, 16)),
    (ANY, ANY, HopperPrefillConfig(64, 2, 2, 16)),
)

HOPPER_ROWS = 16  # up to which rows may have few tokens each: as many as a captured step has, most of them empty
HOPPER_ROW_TOKENS = 32  # average of more rows than these, below which tiles of Hopper's kernel are mostly empty


class AttentionKey(NamedTuple):
    """What a measurement of decode attention is of, but for rows and contexts: heads, the dimensions of one, the tokens
    of a block of the cache, the bits of one of its numbers, and the window; 0: there is none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cache_bits: int
    window: int


attention_choices: MeasuredChoices[AttentionKey, DecodeConfig] = MeasuredChoices()


def decode_config(key: AttentionKey, num_rows: int) -> DecodeConfig:
    """Return the configuration of decode attention: as measured, else by the rule. Not for fp32 queries, nor where the
    caller fixes the splits: they keep the rule."""
    return attention_choices.find(key, num_rows) or decode_rule(num_rows, key.num_kv_heads, key.head_dim)


@lru_cache(maxsize=4096)
def decode_rule(num_rows: int, num_kv_heads: int, head_dim: int) -> DecodeConfig:
    """Return what the rule says of decode attention, whatever was measured."""
    programs = num_rows * num_kv_heads
    return next(
        config
        for dims, counts, config in DECODE_ATTENTION
        if dims.first <= head_dim <= dims.last and counts.first <= programs <= counts.last
    )


LARGEST_QUERY_TILE = 128  # queries that a program of shared-prefix attention takes
PROGRAMS = 264  # two for each of a Hopper card's multiprocessors


@lru_cache(maxsize=256)
def prefix_attention_config(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, *, is_fp32: bool
) -> PrefixConfig | None:
    """Return the configuration of attention over shared prefixes for a step of so many rows. None: the query heads of a
    KV head, or one head, do not fit into a tile. Not measured: tiles are as of prompts, and parts as for one group
    of all rows."""
    heads = 1 << (num_heads // num_kv_heads - 1).bit_length()  # of a row, in a tile
    largest = 32 if is_fp32 or head_dim > 256 else 64 if head_dim > 128 else LARGEST_QUERY_TILE
    if heads > LARGEST_QUERY_TILE or head_dim > 512 or (head_dim > 256 and (is_fp32 or heads > largest)):
        return None
    queries = 1 << (num_rows * heads - 1).bit_length()
    block_m = max(16, heads, min(queries, largest))
    programs = num_kv_heads * max(1, num_rows * heads // block_m)
    splits = max(1, min(32, 1 << (PROGRAMS // programs).bit_length() - 1)) if programs <= PROGRAMS else 1
    wide = head_dim > 128 or is_fp32
    warps = 8 if block_m >= 128 or head_dim > 256 else 4
    return PrefixConfig(block_m, 32 if wide else 64, splits, warps, 2 if wide else 3)


@lru_cache(maxsize=64)
def prefill_config(head_dim: int, block_size: int) -> PrefillConfig:
    """Return the configuration of prefill attention on a cache with blocks of `block_size` tokens."""
    return next(
        config
        for dims, sizes, config in PREFILL_ATTENTION
        if dims.first <= head_dim <= dims.last and sizes.first <= block_size <= sizes.last
    )


@lru_cache(maxsize=4096)
def hopper_prefill_config(head_dim: int, num_tokens: int) -> HopperPrefillConfig:
    """Return the configuration of prefill attention on Hopper, in steps of so many tokens."""
    return next(
        config
        for dims, tokens, config in HOPPER_PREFILL_ATTENTION
        if dims.first <= head_dim <= dims.last and tokens.first <= num_tokens <= tokens.last
    )


def hopper_prefill_tokens(head_dim: int) -> set[int]:
    """Return numbers of tokens whose steps, with the largest one, together launch every variant of the kernel: those
    beside a change of configuration, since the longer a step is, the fewer programs share a tile's keys."""
    ends = [tokens.last for dims, tokens, _ in HOPPER_PREFILL_ATTENTION if dims.first <= head_dim <= dims.last]
    beside = {number for last in ends if last < MANY for number in (last, last + 1)}
    return beside | {hopper_prefill_config(head_dim, number).min_tokens for number in (1, *beside)}


def hopper_prefill_is_faster(num_tokens: int, num_rows: int, head_dim: int) -> bool:
    """Return whether Hopper's kernel is to compute `num_tokens` queries of `num_rows` rows. Neither number says how
    long contexts are, and in a captured step both are upper bounds. Measured: where many rows are short and their
    contexts too, attention/prefill.py is up to 8 us faster; over long contexts it takes up to twice as long."""
    tokens = hopper_prefill_config(head_dim, num_tokens).min_tokens
    return num_tokens >= (tokens if num_rows <= HOPPER_ROWS else max(tokens, HOPPER_ROW_TOKENS * num_rows))
