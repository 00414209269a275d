"""The sampler as it is compiled for a card, without one: all threads of a program take the same branches."""

from tests.kernels.ptx import uneven_branches

COMPILE = """
import sys
from types import SimpleNamespace
import torch
from inferengine.kernels.cuda.sampling import sample
from inferengine.kernels.reference.ops import FILTER, RANDOM

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **options):
            if "FAST" in options:
                options["FAST"] = True  # as on a card
            print("// kernel", self.kernel.fn.__name__)
            print(self.kernel.warmup(*args, grid=grid, **options).asm["ptx"])
        return launch

for name in ("_draw_kernel", "_census_kernel", "_gather_kernel", "_finish_kernel"):
    setattr(sample, name, Compiled(getattr(sample, name)))
sample.supports_pdl = lambda device: True
rows = 64
floats, ints = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
slots = SimpleNamespace(temperature=floats, top_k=ints, top_p=floats, min_p=floats,
                        seed=torch.zeros(rows, dtype=torch.int64), tokens=torch.zeros(rows, 64, dtype=torch.int32))
sample.sample(torch.zeros(rows, 128256, dtype=torch.bfloat16), slots, ints, ints, FILTER | RANDOM)
"""


def test_no_branch_of_the_sampler_depends_on_how_a_thread_rounds(compile_program):
    done = compile_program(COMPILE)
    kernels = done.stdout.split("// kernel ")[1:]
    assert len(kernels) == 4, done.stderr[-2000:]
    for ptx in kernels:
        assert ".entry" in ptx, done.stderr[-2000:]
        assert uneven_branches(ptx) == [], ptx.split()[0]


FUSED = """
    mul.f32 %f3, %f1, %f2;
    shfl.sync.bfly.b32 %f4, %f3, 8, 31, -1;
    {addition}
    setp.gt.f32 %p1, %f5, 0f00000000;
    @%p1 bra $L__BB0_2;
"""


def test_a_fused_addition_of_a_neighbours_value_is_found():
    assert uneven_branches(FUSED.format(addition="fma.rn.f32 %f5, %f1, %f2, %f4;")) == ["@%p1 bra $L__BB0_2;"]


def test_an_addition_of_both_values_is_the_same_in_both_threads():
    assert uneven_branches(FUSED.format(addition="add.f32 %f5, %f3, %f4;")) == []
