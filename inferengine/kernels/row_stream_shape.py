"""What the kernel of row_stream.py is compiled for: sizes of a product and how its threads share the work."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

E4M3, INT8, NIBBLES = 1, 2, 3  # FP8 codes; INT8 codes; INT4 codes as quantized_int4.py has them
ELEMENTS = {E4M3: 4, INT8: 4, NIBBLES: 8}  # of a word
GROUP_WORDS = 16  # of a weight row: four for each of four threads


@dataclass(frozen=True)
class Shape:
    """A product and how a program goes about it. Work comes in tiles of weight rows, tiles in stages of the ring, and
    stages in units, 16 groups of 16 words for one warp: of 16 rows, or four of each of four rows, which lie together in
    memory where 16 rows would not."""

    kind: int
    width: int  # outputs, after the gate
    columns: int
    gated: bool
    num_warps: int
    units: int  # of a warp in one stage
    ranges: int  # groups of a unit in a weight row: 4, or 1
    stages: int
    kept_tiles: int  # whose sums wait in shared memory to be added up over the warps
    spare: int = 0  # of shared memory that nothing reads: a word for each thread, so many times

    @property
    def e4m3(self) -> bool:
        return self.kind == E4M3

    @property
    def int8(self) -> bool:
        return self.kind == INT8

    @property
    def nibbles(self) -> bool:
        return self.kind == NIBBLES

    @property
    def row_words(self) -> int:
        return self.columns // ELEMENTS[self.kind]

    @property
    def group_columns(self) -> int:
        return GROUP_WORDS * ELEMENTS[self.kind]

    @property
    def unit_columns(self) -> int:
        return self.group_columns * self.ranges

    @property
    def pieces(self) -> int:
        """What a number of x is cut into: with integer codes its high and its low byte are multiplied apart."""
        return 1 if self.kind == E4M3 else 2

    @property
    def x_words(self) -> int:
        """Words of x that a thread multiplies in a unit."""
        return self.group_columns // (8 * self.pieces)

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.columns // (self.unit_columns * self.num_warps * self.units)

    @property
    def half_rows(self) -> int:
        """Of a tile, twice: the second half is of up, where the first is of the gate."""
        return 8 // self.ranges

    @property
    def outputs(self) -> int:
        return self.half_rows if self.gated else 2 * self.half_rows

    @property
    def tiles(self) -> int:
        return self.width // self.outputs

    @property
    def stage_blocks(self) -> int:
        """16 bytes for each thread: of each unit the first half of the rows, then of each the second."""
        return 2 * self.units

    @property
    def point_sets(self) -> int:
        """INT4's scales and zeros lie by 16 rows; gate and up have theirs in different places."""
        return 2 if self.gated else 1

    @property
    def stage_bytes(self) -> int:
        points = 64 * self.point_sets if self.kind == NIBBLES else 0
        return self.num_warps * self.units * (1024 + points)

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory beside the ring: x, its scales and totals, the sums that wait, and some alignment."""
        groups = self.columns // self.group_columns
        sums = 8 * self.half_rows * self.num_warps * self.kept_tiles
        return 2 * self.columns + 4 * groups * self.pieces + sums + 128 * self.num_warps * self.spare + 512

    @property
    def chunk(self) -> int:
        """Columns of x that the program reads at once."""
        return min(self.num_warps * 256, self.columns & -self.columns)

    # Layouts of the threads 32 w + 4 g + t. g is cut in two: its higher part tells apart ranges of x, its lower pieces.

    @property
    def word_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1, 1, 1, 1], [1, 4, 2, 4], [self.num_warps, 1, 1, 1], [3, 2, 1, 0])

    @property
    def pair_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1, 1, 1, 1, 2], [1, 4, 2, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])

    @property
    def four_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 4, 2, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])

    @property
    def stage_layout(self) -> gl.BlockedLayout:
        """Who copies what: what it multiplies itself."""
        warps = [1, self.num_warps, 1, 1, 1, 1]
        return gl.BlockedLayout([1, 1, 1, 1, 1, 4], [1, 1, 4, 2, 4, 1], warps, [5, 4, 3, 2, 1, 0])

    @property
    def line_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1], [32], [self.num_warps], [0])

    @property
    def sums_layout(self) -> gl.BlockedLayout:
        """Of the sums that wait: [tiles, warps, rows, halves], the warps' sums in one thread."""
        rows = self.half_rows
        warps = [self.num_warps, 1, 1, 1]
        return gl.BlockedLayout([1, self.num_warps, 1, 2], [32 // rows, 1, rows, 1], warps, [3, 2, 1, 0])

    @property
    def x_layout(self) -> gl.BlockedLayout:
        """Of a chunk of x: [groups, steps, halves, threads, neighbours] for INT4, else [groups, eights, neighbours]."""
        if self.kind == NIBBLES:
            return gl.BlockedLayout([1, 1, 2, 1, 4], [2, 4, 1, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])
        return gl.BlockedLayout([1, 1, 8], [4, 8, 1], [self.num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def axis_layout(axis, layout):
    """Of a tensor with one axis that is to become axis `axis` of those of `layout`."""
    for other in range(layout.rank - 1, -1, -1):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout
