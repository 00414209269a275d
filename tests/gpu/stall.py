"""Calls the sampler many times on the card and says which call did not end.

Each call draws with another filter, from logits of another width and number format. A thread watches: when no call has
ended for LIMIT_S, it names the call and ends the process, because a hung kernel cannot be ended otherwise.

With `--graphs` the calls are captured in CUDA graphs of CALLS_PER_GRAPH on STREAMS streams and replayed; temperatures,
filters and seeds change before each replay, so that no two calls are alike. A million calls take minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inferengine.core.executor import SlotInit
from inferengine.executor.slots import Slots
from inferengine.kernels.cuda.sampling import sample
from inferengine.sampling_params import SamplingParams

VOCAB_SIZE = 128_256
MOST_ROWS = 256
LIMIT_S = 20.0
CALLS_PER_WAIT = 50
CALLS_PER_GRAPH = 100
STREAMS = 8
GRAPH_ROWS = (1, 1, 2, 3, 4, 8)
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
    """Return slots with a request each: filters in turn, temperatures and seeds at random."""
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


class Watch:
    """Ends the process when nothing has been noted for LIMIT_S."""

    def __init__(self) -> None:
        self.names: deque[str] = deque(maxlen=CALLS_PER_WAIT)  # of the latest calls
        self._what = "the first, with its compilation"
        self._ended_s = time.monotonic() + 120
        threading.Thread(target=self._run, daemon=True).start()

    def note(self, what: str) -> None:
        """Record that all calls up to now have ended and `what` comes next."""
        self._ended_s, self._what = time.monotonic(), what

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() - self._ended_s > LIMIT_S:
                print(f"FAIL: no end of a sampler call: {self._what}; {'; '.join(self.names)}", flush=True)
                os._exit(7)


Logits = dict[tuple[float, torch.dtype], torch.Tensor]


def draw_call(rng: random.Random, slots: Slots, logits: Logits, row_counts: Sequence[int]) -> tuple[str, Any]:
    """Return what a random call is, and a function that makes it and gives its ids."""
    width, dtype = rng.choice(WIDTHS), rng.choice((torch.bfloat16, torch.float32))
    count = rng.choice(row_counts)
    first = rng.randrange(MOST_ROWS - count + 1)
    rows = np.arange(first, first + count, dtype=np.int32)
    positions = np.full(count, rng.randrange(20, 920), dtype=np.int32)
    shift = rng.randrange(MOST_ROWS - count + 1)
    columns = torch.from_numpy(rows).cuda(), torch.from_numpy(positions).cuda()
    needs = slots.needs(rows, positions)

    def call() -> torch.Tensor:
        return sample.sample(logits[width, dtype][shift : shift + count], slots, *columns, needs)

    return f"{count} rows from {first}, width {width}, {dtype}", call


def one_by_one(calls: int, rng: random.Random, logits: Logits, watch: Watch) -> int:
    """Return the number of rows without a token."""
    slots = make_slots(rng)
    failed = 0
    recent: list[torch.Tensor] = []
    for index in range(calls):
        name, call = draw_call(rng, slots, logits, (1, 2, 3, 7, 8, 16, 33, 64, 128, 256))
        watch.names.append(name)
        recent.append((call() < 0).sum())
        if len(recent) == CALLS_PER_WAIT or index == calls - 1:
            failed += int(torch.stack(recent).sum())
            watch.note(f"one of {CALLS_PER_WAIT} after call {index}")
            recent.clear()
    return failed


class Replayed:
    """A graph of calls on a stream of its own, with slots of its own."""

    def __init__(self, rng: random.Random, logits: Logits) -> None:
        self.slots = make_slots(rng)
        self.stream = torch.cuda.Stream()
        self.failed = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self._filtered = [column > 0 for column in (1 - self.slots.top_p, self.slots.min_p)]
        calls = [draw_call(rng, self.slots, logits, GRAPH_ROWS)[1] for _ in range(CALLS_PER_GRAPH)]
        self._calls = calls  # with their columns, which the graph reads
        with torch.cuda.stream(self.stream):
            for call in calls[:20]:  # compiles, outside of the capture
                call()
        self.stream.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for call in calls:
                self.failed += (call() < 0).sum()

    def replay(self) -> None:
        """Replay with new temperatures, filters and seeds."""
        slots = self.slots
        with torch.cuda.stream(self.stream):
            slots.temperature.uniform_(0.3, 1.5)
            slots.top_p.copy_(torch.where(self._filtered[0], torch.empty_like(slots.top_p).uniform_(0.2, 0.999), 1.0))
            slots.min_p.copy_(torch.where(self._filtered[1], torch.empty_like(slots.min_p).uniform_(0.0, 0.2), 0.0))
            slots.seed.random_()
            self.graph.replay()


def replayed(calls: int, rng: random.Random, logits: Logits, watch: Watch) -> int:
    """Return the number of rows without a token."""
    graphs = [Replayed(rng, logits) for _ in range(STREAMS)]
    for index in range(-(-calls // (CALLS_PER_GRAPH * STREAMS))):
        for graph in graphs:
            graph.replay()
        if index % 2:
            torch.cuda.synchronize()
            watch.note(f"a graph after {index * CALLS_PER_GRAPH * STREAMS} calls")
    torch.cuda.synchronize()
    return sum(int(graph.failed) for graph in graphs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", action="store_true")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    logits = {
        (width, dtype): (torch.randn(MOST_ROWS, VOCAB_SIZE, device="cuda") * width).to(dtype)
        for width in WIDTHS
        for dtype in (torch.bfloat16, torch.float32)
    }
    watch = Watch()
    begin = time.monotonic()
    failed = (replayed if options.graphs else one_by_one)(options.calls, rng, logits, watch)
    seconds = time.monotonic() - begin
    print(f"{options.calls} sampler calls in {seconds:.0f} s, none stalled, {failed} rows without a token")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
