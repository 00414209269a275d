"""Attention over shared prefixes as it is compiled for a card, without one: it fits, and its products are the tensor
cores'."""

import pytest

COMPILE = """
import re, sys
import torch
from inferengine.kernels.batch import SharedPrefixColumns
from inferengine.kernels.cuda.attention import decode, shared_prefix
from inferengine.kernels.cuda.split_k import Scratch
from tests.kernels.compiler_process import stop_before_ptx

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            text = made.asm["ptx"] or made.asm["llir"]
            products = len(re.findall("wgmma.mma_async|mma.sync", text))
            print(self.kernel.fn.__name__, made.metadata.shared, products, "griddepcontrol.wait" in text)
        return launch

decode._decode_kernel = Compiled(decode._decode_kernel)
shared_prefix._prefix_kernel = Compiled(shared_prefix._prefix_kernel)
decode.supports_pdl = shared_prefix.supports_pdl = lambda device: True
rows, heads, kv_heads, head_dim = map(int, sys.argv[1:5])
dtype, cache = (getattr(torch, name) for name in sys.argv[5:7])
if dtype == torch.float32:  # without tensor cores, as many instructions as multiplications
    stop_before_ptx()
one, block = torch.zeros(rows, dtype=torch.int32), int(sys.argv[7])
shared_prefix.shared_decode_attention(
    torch.zeros(rows, heads, head_dim, dtype=dtype), torch.zeros(2, 2, kv_heads, block, head_dim, dtype=cache),
    one, one, one[None], SharedPrefixColumns(one, one, torch.zeros(3, 16, dtype=torch.int32)), 0.1, None,
    Scratch(torch.device("cpu"), num_counters=1 << 16),
)
"""


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "dtype", "cache", "block_size"),
    [
        (64, 32, 8, 128, "bfloat16", "bfloat16", 64),
        (8, 14, 2, 64, "bfloat16", "float8_e4m3fn", 64),
        (64, 16, 8, 256, "bfloat16", "bfloat16", 16),
        (64, 8, 2, 512, "bfloat16", "bfloat16", 16),
        (64, 71, 1, 64, "float32", "float32", 64),
    ],
)
def test_the_kernels_fit_into_the_shared_memory_of_a_multiprocessor(
    rows, heads, kv_heads, head_dim, dtype, cache, block_size, compile_program
):
    arguments = map(str, (rows, heads, kv_heads, head_dim, dtype, cache, block_size))
    done = compile_program(COMPILE, *arguments)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == ["_prefix_kernel", "_decode_kernel"], done.stderr[-2000:]
    for _, shared, products, waits in lines:
        assert int(shared) <= 227 * 1024
        assert waits == "True"
        assert dtype == "float32" or int(products) > 0
