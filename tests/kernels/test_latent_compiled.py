"""Attention with wide heads as it is compiled for a card, without one: it fits, and latents are on their way while
others are computed with."""

import pytest

COMPILE = """
import re, sys
import torch
from inferengine.kernels.cuda.attention import latent
from inferengine.kernels.cuda.split_k import Scratch

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            text = made.asm["ttgir"]
            rooms = re.findall(r"local_alloc : .*<(\\d+)x32x512x", text)  # tiles of latents in shared memory
            print(made.metadata.shared, rooms[0] if rooms else 0)
        return launch

latent._latent_kernel = Compiled(latent._latent_kernel)
latent._combine_kernel = Compiled(latent._combine_kernel)
latent.supports_pdl = lambda device: True
heads, cache = int(sys.argv[1]), getattr(torch, sys.argv[2])
kv, one = torch.zeros(2, 1, 1, 64, 576, dtype=cache), torch.zeros(4, dtype=torch.int32)
q, out = (torch.zeros(4, heads, width, dtype=torch.bfloat16) for width in (576, 512))
scratch = Scratch(torch.device("cpu"), num_floats=1 << 22, num_counters=64)
latent.latent_decode(q, kv, one, one, one[None], 512, 0.1, scratch, out=out)
latent.latent_prefill(
    q, kv, one[:3], one, one, one[None], 512, 0.1, scratch, first_row=0, num_tokens=4, out=out, num_splits=1
)
"""


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("heads", ["16", "128"])
def test_decodes_and_prompts_fit_and_have_the_next_latents_on_their_way(heads, cache, compile_program):
    """Into the shared memory of a multiprocessor; in 16 bits with two tiles of latents or more there at once."""
    done = compile_program(COMPILE, heads, cache)
    found = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(found) == 3, done.stderr[-2000:]
    decode, _combine, prompt = found
    for shared, tiles in (decode, prompt):
        assert shared <= 227 * 1024
        assert tiles >= 2 or cache != "bfloat16"


WIDE = """
import sys
import torch
from inferengine.kernels.batch import NewKeys
from inferengine.kernels.cuda import rope_kv_write
from inferengine.kernels.cuda.attention import decode, prefill
from inferengine.kernels.cuda.split_k import Scratch

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **options: print(self.kernel.warmup(*args, grid=grid, **options).metadata.shared)

decode._decode_kernel = Compiled(decode._decode_kernel)
prefill._prefill_kernel = Compiled(prefill._prefill_kernel)
rope_kv_write._rope_write_kernel = Compiled(rope_kv_write._rope_write_kernel)
decode.supports_pdl = prefill.supports_pdl = rope_kv_write.supports_pdl = lambda device: True
kv, one = torch.zeros(4, 2, 1, 16, 512, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
q, out = (torch.zeros(4, *shape, dtype=torch.bfloat16) for shape in ((8, 512), (8 * 512,)))
scratch = Scratch(torch.device("cpu"), num_floats=1 << 22, num_counters=64)
if sys.argv[1] == "packed":
    qkv, gain, angles = torch.zeros(4, 9 * 512, dtype=torch.bfloat16), q[0, 0], torch.zeros(8, 512)
    new_keys = NewKeys(has_values=False, value_norm=True)
    decode.decode_attention_qkv(
        qkv, gain, gain, 1e-6, angles, kv, one, one, one[None], 8, 1.0, None, None, scratch, new_keys=new_keys
    )
    rope_kv_write.qkv_rope_write(qkv, gain, gain, 1e-6, angles, one, one.long(), kv, 8, 1, new_keys=new_keys)
    sys.exit()
decode.decode_attention(q, kv, one, one, one[None], 1.0, None, None, scratch)
prefill.prefill_attention(
    q, kv, one[:3], one[:3], one, one[None], 1.0, None, None, first_row=0, num_tokens=4, out=out, scratch=scratch
)
"""


@pytest.mark.parametrize("inputs", ["rotated", "packed"])
def test_heads_of_512_fit_too(inputs, compile_program):
    """Gemma 4's layers without a window have them, some of them with keys that are values."""
    done = compile_program(WIDE, inputs)
    shared = [int(line) for line in done.stdout.splitlines()]
    assert len(shared) == 2, done.stderr[-2000:]
    assert max(shared) <= 227 * 1024
