"""What kernels take: shapes, and room in memory. The search tries nothing else, and tables may choose nothing else."""

from __future__ import annotations

from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, Product

SHARED_BYTES = 220 << 10  # of a multiprocessor, that the stages of a tile may take
SCRATCH_FLOATS = 8 << 20  # split_k.NUM_FLOATS: partial sums must have room


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
