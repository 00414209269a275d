"""How many kernels the sampler needs compiled: few, and the same for any number of rows and any use of its features."""

LAUNCH_EVERYTHING = """
import random
from types import SimpleNamespace
import torch
from triton.runtime.jit import JITFunction
variants = {}  # of each kernel: the keys under which it would be compiled
def compile_nothing(self, key, *arguments, **options):
    variants.setdefault(self.fn.__name__, set()).add(key)
JITFunction._do_compile = compile_nothing

from inferengine.kernels.cuda.sampling import logits as masks, logprobs, sample as sampling
from inferengine.kernels.reference import ops as needs_of

for module in (logprobs, sampling, masks):
    module.supports_pdl = lambda device: True

VOCAB, SLOTS = 128256, 513
rng = random.Random(0)
columns = torch.zeros(8 * SLOTS, dtype=torch.int32)

def column(rows):
    begin = rng.randrange(4 * SLOTS)  # columns lie anywhere in the buffer that a step uploads
    return columns[begin : begin + rows]

def slots(widths):
    floats, ints = torch.zeros(6, SLOTS), torch.zeros(4, SLOTS, dtype=torch.int32)
    table = lambda width, dtype=torch.int32: torch.zeros(SLOTS, width, dtype=dtype)
    return SimpleNamespace(
        temperature=floats[0], top_p=floats[1], min_p=floats[2], repetition_penalty=floats[3],
        presence_penalty=floats[4], frequency_penalty=floats[5], num_prompt=ints[0], top_k=ints[1],
        min_tokens=ints[2], num_logprobs=ints[3], seed=torch.zeros(SLOTS, dtype=torch.int64),
        tokens=torch.zeros(SLOTS, 64, dtype=torch.int32), allowed=table(widths[0]), bias_ids=table(widths[1]),
        bias_values=table(widths[1], torch.float32), stop_ids=table(widths[2]))

def draw(rows, needs, widths):
    state = slots(widths)
    logits = LOGITS[:rows]
    sampling.sample(logits, state, column(rows), column(rows), needs)
    masks.apply_masks(logits, torch.zeros(rows, 1 + VOCAB // 32, dtype=torch.int32))
    most = rng.choice((0, 1, 2, 5, 20))
    logprobs.token_logprobs(logits, state.num_logprobs, column(rows), column(rows), most)
    of_prompts = torch.zeros(1, dtype=torch.int32)
    logprobs.token_logprobs(logits, of_prompts, column(rows), column(rows), 3)

LOGITS = torch.zeros(512, VOCAB, dtype=torch.bfloat16)
R, F, P = needs_of.RANDOM, needs_of.FILTER, needs_of.PROCESSED
for needs in (0, R, R | F, R | F | P):  # what warm-up steps use
    draw(1, needs, (VOCAB // 32, 1, 1))
warm = {name: set(keys) for name, keys in variants.items()}
for _ in range(60):
    needs = rng.choice((0, R, R | F)) | rng.choice((0, 0, *(rng.randrange(512) & P for _ in range(4))))
    widths = rng.choice((0, VOCAB // 32)), rng.choice((0, 1, 4, 16, 1024)), rng.choice((0, 1, 2, 8))
    draw(rng.choice((1, 2, 3, 7, 8, 33, 64, 100, 256, 512)), needs, widths)
late = {name: len(keys - warm.get(name, set())) for name, keys in variants.items() if keys - warm.get(name, set())}
print("late", late)
print("warm", sum(map(len, warm.values())))
"""


def test_no_feature_and_no_number_of_rows_needs_a_kernel_that_warm_up_has_not_compiled(compile_program):
    done = compile_program(LAUNCH_EVERYTHING)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("late", "warm")))
    assert found.get("late") == "{}", done.stdout + done.stderr[-2000:]
    assert int(found["warm"]) <= 20
