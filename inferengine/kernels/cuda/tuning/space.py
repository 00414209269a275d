"""Which kernels and configurations are tried for a product: what the rules say of any shape with as many rows, and for
16-bit weights variations of tiles and splits that suit the shape.

A split of the inner dimension is tried where the tiles then fill the multiprocessors better: 5,120 outputs are 80 tiles
of 64, which leave 52 of 132 multiprocessors idle; three programs to a tile leave 24 of 264 turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferengine.kernels.cuda.dispatch import (
    MULTIPROCESSORS,
    PRODUCTS,
    GemvConfig,
    Kernel,
    KernelChoice,
    Operands,
    Product,
    ProductKey,
    StreamConfig,
    TileConfig,
    TmaTileConfig,
    W8TileConfig,
    rule_candidates,
)

SHARED_BYTES = 220 << 10  # of a multiprocessor, that the stages of a tile may take
MOST_ACCUMULATORS = 128  # fp32 registers of a thread that hold sums
MOST_SPLITS = 8
SPLIT_COLUMNS = 512  # the fewest that are worth a program
SCRATCH_FLOATS = 8 << 20  # split_k.NUM_FLOATS: partial sums must have room
LAST_TILED_ROW = 64  # gemm/dense_small_m.py reads the weight once for each of its tiles of rows
LAST_SPLIT_ROW = 256  # beyond, the tiles of the result fill the device

# block_m, block_n, block_k, num_warps, num_stages, weight_left: by the rows that a tile holds
TMA_TILES: dict[int, tuple[tuple[int, int, int, int, int, bool], ...]] = {
    16: ((16, 64, 128, 4, 6, True), (16, 128, 128, 8, 4, True)),
    32: ((32, 64, 128, 4, 5, True), (32, 64, 128, 4, 2, True), (32, 128, 64, 8, 6, True)),
    64: ((64, 64, 64, 4, 8, False), (64, 128, 64, 8, 4, True), (64, 64, 128, 4, 4, True), (64, 64, 64, 4, 4, False)),
    128: (
        (128, 64, 64, 4, 8, False),
        (128, 128, 64, 8, 4, True),
        (64, 128, 64, 8, 4, True),
        (128, 64, 64, 4, 4, False),
    ),
    256: ((128, 128, 64, 8, 4, True), (128, 256, 64, 8, 3, False), (256, 128, 64, 8, 3, False)),
}
GEMV_TILES = ((4, 2048, 8, 0), (2, 1024, 4, 0), (4, 1024, 4, 0), (8, 1024, 4, 1024), (4, 512, 2, 0))


def tile_rows(rows: int) -> int:
    """Return the key of TMA_TILES for a number of rows: the smallest tile that holds them."""
    return next((size for size in TMA_TILES if rows <= size), max(TMA_TILES))


def configurations(key: ProductKey, rows: int) -> tuple[KernelChoice | None, ...]:
    """Return what is tried for a product of a number of rows, without repetitions: first what the rules prefer, then
    the library (None), then all else."""
    operands, product, width, columns = key
    found: dict[KernelChoice | None, None] = {preferred(key, rows): None, None: None}
    for each in PRODUCTS[operands].get(product, ()):
        whole = width % each.width_of == 0 and columns % each.columns_of == 0
        if whole and each.rows.first <= rows <= each.rows.last:
            found[each.choice(width, columns)] = None
    if operands is Operands.DENSE:
        found.update(dict.fromkeys(_dense(product, rows, width, columns)))
    if operands in (Operands.FP8_CODES, Operands.W8, Operands.W8A8):
        found.update(dict.fromkeys(_other_splits(tuple(found), product, width, columns)))
    return tuple(each for each in found if each is None or takes(each, product, rows, width, columns))


def preferred(key: ProductKey, rows: int) -> KernelChoice | None:
    """Return what the rules prefer and the kernel takes; None: the library."""
    choices = rule_candidates(key.operands, key.product, rows, key.width, key.columns)
    return next((each for each in choices if takes(each, key.product, rows, key.width, key.columns)), None)


def takes(choice: KernelChoice, product: Product, rows: int, width: int, columns: int) -> bool:
    """Return whether a kernel in this configuration takes a shape, of tensors that are contiguous and aligned. The
    same as `tma_fits` and `fits` ask of tensors, and room for the partial sums."""
    gated = product is Product.GATED
    outputs = width // 2 if gated else width
    config = choice.config
    match choice.kernel:
        case Kernel.GEMV | Kernel.W8_GEMV:
            return rows == 1
        case Kernel.TMA_TILE | Kernel.TMA_PARTS:
            if outputs % config.block_n or columns % 8:
                return False
            tiles = -(-rows // config.block_m) * (outputs // config.block_n)
            floats = config.splits * (
                rows * width if product is Product.PARTS else tiles * config.block_m * config.block_n
            )
            split = config.splits > 1 or product is Product.PARTS
            return bool(not split or (floats <= SCRATCH_FLOATS and tiles <= 1 << 16))
        case Kernel.STREAM:
            whole = width % (config.block_n * (2 if gated else 1)) == 0
            whole = whole and columns % (config.block_k * config.splits) == 0
            return bool(whole and rows <= config.block_m)
        case _:
            return True


def splits_worth_trying(tiles: int, columns: int, *, fewest: int = 1, most: int = 2) -> list[int]:
    """Return numbers of splits of the inner dimension, those first whose programs fill the multiprocessors best."""
    limit = max(fewest, min(MOST_SPLITS, columns // SPLIT_COLUMNS))

    def share_used(splits: int) -> float:
        programs = tiles * splits
        turns = -(-programs // MULTIPROCESSORS)
        return programs / (turns * MULTIPROCESSORS) - 0.03 * splits  # partial sums cost something

    return sorted(range(fewest, limit + 1), key=share_used, reverse=True)[:most]


def _dense(product: Product, rows: int, width: int, columns: int) -> Iterator[KernelChoice]:
    gated = product is Product.GATED
    outputs = width // 2 if gated else width
    if rows == 1 and product is not Product.PARTS:
        for tile in GEMV_TILES:
            yield KernelChoice(Kernel.GEMV, GemvConfig(*tile))
        return
    if rows <= LAST_TILED_ROW and product is not Product.PARTS and outputs % 64 == columns % 128 == 0:
        block = max(16, min(64, tile_rows(rows)))
        for chunks in [1] if gated else splits_worth_trying(outputs // 64, columns):
            yield KernelChoice(Kernel.TILE, TileConfig(block, 64, 128, chunks, 4, 4, 0))
        if width * columns < 16 << 20:
            yield KernelChoice(Kernel.TILE, TileConfig(block, 16, 512, 1, 4, 1, 0, True))
    if columns % 128 or rows == 1:
        return
    kernel = Kernel.TMA_PARTS if product is Product.PARTS else Kernel.TMA_TILE
    if product is Product.PARTS and rows > LAST_SPLIT_ROW:
        return
    for block_m, block_n, block_k, warps, stages, left in TMA_TILES[tile_rows(rows)]:
        shared = (block_m + block_n * (2 if gated else 1)) * block_k * 2 * stages
        sums = block_m * block_n * (2 if gated else 1) // (32 * warps)
        if shared > SHARED_BYTES or sums > MOST_ACCUMULATORS or outputs % block_n:
            continue
        tiles = -(-rows // block_m) * (outputs // block_n)
        if product is Product.PARTS:
            splits = splits_worth_trying(tiles, columns, fewest=2)
        elif gated or rows > LAST_SPLIT_ROW:
            splits = [1]
        else:
            splits = splits_worth_trying(tiles, columns, most=1 if rows > 64 else 2)
        for number in splits:
            choice = KernelChoice(kernel, TmaTileConfig(block_m, block_n, block_k, number, warps, stages, left))
            if not takes(choice, product, rows, width, columns) and product is Product.LINEAR:  # no room for the sums
                choice = KernelChoice(kernel, choice.config._replace(splits=1))
            yield choice


def _other_splits(
    choices: tuple[KernelChoice | None, ...], product: Product, width: int, columns: int
) -> Iterator[KernelChoice]:
    """Vary the splits of configurations for 8-bit weights."""
    for choice in choices:
        if choice is None or product is Product.GATED:
            continue
        config = choice.config
        if isinstance(config, W8TileConfig):
            for chunks in splits_worth_trying(-(-width // config.block_n), columns):
                yield KernelChoice(choice.kernel, config._replace(chunks=chunks))
        if isinstance(config, StreamConfig) and product is Product.PARTS:
            for splits in splits_worth_trying(width // config.block_n, columns, fewest=2):
                yield KernelChoice(choice.kernel, config._replace(splits=splits))
