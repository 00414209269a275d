"""Decode and prefill of a model that several devices share: random weights, in process.

python -m benchmarks.tensor_parallel --ranks 2 [--shape llama-3.1-8b] [--rows 1 16 64 128] [--prompts 8] [--length 4096]

A decode step's time is the median between two steps' outputs, after prompts of 100 tokens; prefill: the best of 3.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.shapes import SHAPES
from inferengine import LLM, SamplingParams
from tests.gpu.compilations import tokenizer_files

PROMPT, OUTPUT, FIRST = 100, 96, 8  # tokens; steps that do not count


class Measurement:
    """A loaded model and when its steps ended."""

    def __init__(self, shape: str, ranks: int, folder: Path, length: int) -> None:
        config = dict(SHAPES[shape])
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer_files(folder, config["vocab_size"])
        self.llm = LLM(
            str(folder),
            model={"load_format": "dummy", "max_model_len": min(2 * length, config["max_position_embeddings"])},
            engine={"tensor_parallel": ranks, "max_num_seqs": 128},
            cache={"prefix_caching": False},
        )
        self._vocab_size, self._rng = config["vocab_size"], random.Random(7)
        self._ends: list[tuple[float, int]] = []
        step = self.llm.core.step

        def observed():  # type: ignore[no-untyped-def]
            output = step()
            self._ends.append((time.perf_counter(), 0 if output is None else len(output.uids)))
            return output

        self.llm.core.step = observed  # type: ignore[method-assign]

    def generate_s(self, count: int, length: int, max_tokens: int) -> float:
        """Seconds for `count` prompts of `length` tokens."""
        prompts = [[self._rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]
        self._ends.clear()
        begin = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.generate(prompts, params, progress=False)
        return time.perf_counter() - begin

    def decode_ms(self, rows: int) -> float:
        """Milliseconds of a step of `rows` sequences."""
        self.generate_s(rows, PROMPT, OUTPUT)
        ends = [end for end, count in self._ends if count == rows]
        return 1e3 * statistics.median([b - a for a, b in pairwise(ends)][FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurement(arguments.shape, arguments.ranks, Path(folder), arguments.length)
        measured.generate_s(2, PROMPT, 4)
        for rows in arguments.rows:
            print(f"decode step of {rows}: {measured.decode_ms(rows):.2f} ms", flush=True)
        count, length = arguments.prompts, arguments.length
        best = min(measured.generate_s(count, length, 1) for _ in range(3))
        print(f"{count} prompts of {length}: {count * length / best:,.0f} tokens/s")
        measured.llm.close()


if __name__ == "__main__":
    main()
