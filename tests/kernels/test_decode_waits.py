"""Decode attention as it is compiled for a card, without one: what it asks memory for before and after it waits."""

import pytest

COMPILE = """
import sys
import torch
from inferengine.kernels.cuda.attention import decode
from inferengine.kernels.cuda.split_k import Scratch

kernel = decode._decode_kernel

class Compiled:
    def __getitem__(self, grid):
        return lambda *args, **options: print(kernel.warmup(*args, grid=grid, **options).asm["ptx"])

decode._decode_kernel = Compiled()
decode.supports_pdl = lambda device: True
cpu, bf16 = torch.device("cpu"), torch.bfloat16
one, gain = torch.zeros(16, dtype=torch.int32), torch.zeros(128, dtype=bf16)
decode.decode_attention_qkv(
    torch.zeros(1, 48 * 128, dtype=bf16), gain, gain, 1e-6, torch.zeros(64, 128),
    torch.zeros(2, 2, 8, 64, 128, dtype=getattr(torch, sys.argv[1])), one, one, one[None], 32, 0.1, None, None,
    Scratch(cpu, num_floats=1 << 16, num_counters=64),
)
"""


@pytest.mark.parametrize(("cache", "tile_bytes"), [("bfloat16", 64 * 128 * 2), ("float8_e4m3fn", 64 * 128)])
def test_what_the_kernel_before_wrote_is_asked_for_at_once_and_all_else_before_the_wait(
    cache, tile_bytes, compile_program
):
    done = compile_program(COMPILE, cache)
    assert "griddepcontrol.wait" in done.stdout, done.stderr[-2000:]
    parts = done.stdout.split("griddepcontrol.wait")  # one for rows of length 0, which have nothing to attend to
    wait = next(number for number, part in enumerate(parts) if "mma.sync" in part)
    early, late = "".join(parts[:wait]), parts[wait][: parts[wait].index("mma.sync")]
    loads = late[late.index("ld.global") : late.rindex("ld.global")]
    assert loads.count("ld.global") == 4, "the query, the newest key, their partners, the newest value: five in all"
    assert "bar.sync" not in loads, "none of the five waits for another"
    tile_loads = early.split("bar.sync")[0].count("ld.global.v4")
    assert tile_loads >= 2 * tile_bytes // (16 * 128), "keys and values are on their way before either is moved"
