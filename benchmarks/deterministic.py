"""What `engine.deterministic` promises, held against the engine, and what it costs.

python -m benchmarks.deterministic --shape qwen3-0.6b [--batches 1 8 64 256] [--json FILE]

Eight greedy requests with log-probabilities: each alone, so again, all together, in chunks of 48 prompt tokens, with
the prefixes of an earlier run in the cache, and beside strangers. `different` counts the requests of which any token or
any bit of a log-probability is another than alone: in deterministic mode it must be 0 everywhere (else the exit code is
1), in fast mode it says what the promise is worth. Then the time of a decode step in both modes.

On a CPU there is no deterministic mode: only the fast one is shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.offline import Bench, environment
from benchmarks.shapes import SHAPES
from inferengine.bench.environment import write_result
from inferengine.config import load, parse_flags
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams

LENGTHS = (7, 64, 65, 130, 200, 257, 301, 400)  # prompt tokens
OUTPUT_TOKENS = 24
CHUNK = 48
Outputs = dict[int, list[Any]]


class Requests:
    """The requests, and how they are run."""

    def __init__(self, bench: Bench, lengths: Sequence[int] = LENGTHS, output_tokens: int = OUTPUT_TOKENS) -> None:
        self._bench, self._output_tokens = bench, output_tokens
        vocab_size = bench.capacity.vocab_size
        draw = random.Random(0)
        self._prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]
        self._strangers = [[draw.randrange(vocab_size) for _ in range(33)] for _ in range(5)]

    def ways(self) -> dict[str, Outputs]:
        """Return the outputs by request, by the way in which they were run."""
        alone: Outputs = {}
        for index in range(len(self._prompts)):
            alone |= self._run([index])
        everyone = list(range(len(self._prompts)))
        core = self._core(prefix_caching=True)
        self._run(everyone, core)
        cached = self._run(everyone, core)  # at once: every core believes that the executor's blocks are its own
        return {
            "alone": alone,
            "alone again": {index: output for index in everyone for output in self._run([index]).values()},
            "together": self._run(everyone),
            "in chunks": self._run(everyone, self._core(prefill_chunk=CHUNK)),
            "prefix cached": cached,
            "beside strangers": self._run(everyone, strangers=True),
        }

    def _core(self, **options: Any) -> EngineCore:
        bench = self._bench
        values = {"prefix_caching": False, **options}
        capacity = bench.capacity
        scheduler = SchedulerOptions(capacity.max_num_batched_tokens, capacity.max_num_seqs, **values)
        return EngineCore(bench.executor, capacity, scheduler, clock=time.perf_counter, on_failure=_raise)

    def _run(self, indices: list[int], core: EngineCore | None = None, *, strangers: bool = False) -> Outputs:
        core = core or self._core()
        for place, prompt in enumerate(self._strangers if strangers else []):
            self._submit(core, 1000 + place, prompt, 5 * (place + 1))
        for index in indices:
            self._submit(core, index, self._prompts[index], self._output_tokens)
        outputs: Outputs = {index: [] for index in indices}
        while core.has_work:
            output = core.step()
            if output is None:
                continue
            logprobs = output.logprobs or {}
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                if uid in outputs:
                    outputs[uid].append((token, logprobs.get(uid)))
        return outputs

    def _submit(self, core: EngineCore, uid: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
        core.submit(Request(uid=uid, prompt_ids=prompt, params=params, max_tokens=max_tokens, seed=uid))


def different(ways: dict[str, Outputs]) -> dict[str, int]:
    """Return, by way, the requests that did not come out as alone, bit by bit."""
    alone = ways["alone"]
    return {
        name: sum(outputs[index] != alone[index] for index in alone)
        for name, outputs in ways.items()
        if name != "alone"
    }


def measure(shape: str, flags: dict[str, str], batches: list[int], *, deterministic: bool) -> dict[str, Any]:
    """Measure one mode, in an engine of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[shape]))
        config = load(flags=flags).with_values(
            model={"path": scratch, "load_format": "dummy"}, engine={"deterministic": deterministic}
        )
        bench = Bench(config)
    result = {
        "deterministic": deterministic,
        "environment": environment(bench),
        "requests": len(LENGTHS),
        "different": different(Requests(bench).ways()),
        "decode_ms": {str(batch): bench.decode(batch, 128, 64, 0.0)["median_ms"] for batch in batches},
    }
    bench.executor.close()
    gc.collect()
    return result


def main() -> int:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    on_cuda = torch.cuda.is_available() and flags.get("engine.device") != "cpu"
    modes = [
        measure(arguments.shape, flags, arguments.batches, deterministic=exact)
        for exact in (False, True)[: 1 + on_cuda]
    ]
    for mode in modes:
        print(
            "deterministic" if mode["deterministic"] else "fast",
            json.dumps(mode["different"]),
            json.dumps(mode["decode_ms"]),
        )
    document: dict[str, Any] = {"benchmark": "deterministic", "model": arguments.shape, "modes": modes}
    if len(modes) == 2:
        fast, exact = (mode["decode_ms"] for mode in modes)
        document["cost"] = {batch: round(exact[batch] / fast[batch] - 1, 4) for batch in fast}
        print("cost of a decode step", json.dumps(document["cost"]))
    if arguments.json:
        write_result(arguments.json, document)
    return int(any(any(mode["different"].values()) for mode in modes if mode["deterministic"]))


def _raise(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    sys.exit(main())
