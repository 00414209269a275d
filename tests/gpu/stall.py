"""Calls the sampler many times on the card and says which call did not end.

Each call draws with another filter, from logits of another width and number format. A thread watches: when no call has
ended for LIMIT_S, it names the call and ends the process, because a hung kernel cannot be ended otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from inferengine.core.plan import SlotInit
from inferengine.kernels import sampling
from inferengine.params import SamplingParams
from inferengine.runtime.slots import Slots

VOCAB_SIZE = 128_256
MOST_ROWS = 256
LIMIT_S = 20.0
CALLS_PER_WAIT = 50
WIDTHS = (0.02, 0.5, 2.0, 6.0)  # standard deviation of the logits: flat to peaked
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_k": 50},
    {"top_k": 5000, "top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 200, "top_p": 0.8, "min_p": 0.01},
    {"top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {},
)


def make_slots(rng: random.Random) -> Slots:
    """Slots with a request each: filters in turn, temperatures and seeds at random."""
    slots = Slots(
        num_slots=MOST_ROWS,
        max_model_len=1024,
        block_size=64,
        group_blocks=[1],
        vocab_size=VOCAB_SIZE,
        device=torch.device("cuda"),
    )
    inits = []
    for slot in range(MOST_ROWS):
        params = SamplingParams(temperature=rng.choice((0.3, 0.7, 1.0, 1.5)), **FILTERS[slot % len(FILTERS)])
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
        inits.append(SlotInit(slot, tokens, 10, params, rng.randrange(1 << 62), ()))
    slots.admit(inits)
    return slots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    slots = make_slots(rng)
    logits = {
        (width, dtype): (torch.randn(MOST_ROWS, VOCAB_SIZE, device="cuda") * width).to(dtype)
        for width in WIDTHS
        for dtype in (torch.bfloat16, torch.float32)
    }
    state: dict[str, Any] = {"ended_s": time.monotonic() + 120, "what": "the first, with its compilation"}

    def watch() -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() - state["ended_s"] > LIMIT_S:
                print(f"FAIL: no end of a sampler call, one of {CALLS_PER_WAIT}: {state['what']}", flush=True)
                os._exit(7)

    threading.Thread(target=watch, daemon=True).start()
    failed = 0
    begin = time.monotonic()
    recent: list[torch.Tensor] = []
    names: list[str] = []
    for call in range(options.calls):
        width, dtype = rng.choice(WIDTHS), rng.choice((torch.bfloat16, torch.float32))
        count = rng.choice((1, 2, 3, 7, 8, 16, 33, 64, 128, 256))
        first = rng.randrange(MOST_ROWS - count + 1)
        rows = np.arange(first, first + count, dtype=np.int32)
        positions = np.full(count, 20 + call % 900, dtype=np.int32)
        shift = rng.randrange(MOST_ROWS - count + 1)
        names.append(f"call {call}: {count} rows from {first}, width {width}, {dtype}")
        ids = sampling.sample(
            logits[width, dtype][shift : shift + count],
            slots,
            torch.from_numpy(rows).cuda(),
            torch.from_numpy(positions).cuda(),
            slots.needs(rows, positions),
        )
        recent.append((ids < 0).sum())
        if len(recent) == CALLS_PER_WAIT or call == options.calls - 1:
            state["what"] = "; ".join(names)
            failed += int(torch.stack(recent).sum())
            recent.clear()
            names.clear()
            state["ended_s"] = time.monotonic()
    seconds = time.monotonic() - begin
    good = failed == 0
    print(f"{options.calls} sampler calls in {seconds:.0f} s, none stalled, {failed} rows without a token")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
