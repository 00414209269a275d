"""No kernel is compiled once an engine is warm, whatever requests ask for: counted over every feature.

For shapes with random weights: each feature at 1 to 256 requests, all features together, grammars, embeddings, long
prompts beside decodes, requests that begin alike, speculation, and each low-precision format.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, write_model
from inferengine import LLM, SamplingParams

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.1},
    "logit_bias": {"temperature": 1.0, "logit_bias": ((5, 3.0), (9, -2.0), (11, 1.0))},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": tuple(range(500))},
    "bad_words": {"temperature": 1.0, "bad_words_ids": ((4,), (5, 6, 7))},
    "logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "logprobs 20": {"temperature": 1.0, "logprobs": 20},
    "min_tokens": {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": (7, 8, 9)},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3},
    "n": {"temperature": 1.0, "n": 4},
}
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", {}),
    ("qwen3-0.6b", {"speculation": {"method": "ngram"}}),
    ("qwen3-0.6b", {"model": {"quantization": "fp8"}, "cache": {"dtype": "fp8"}}),
    ("qwen3-0.6b", {"model": {"quantization": "int8"}}),
    ("qwen3-0.6b", {"model": {"quantization": "int4"}}),
    ("qwen3-0.6b", {"engine": {"cuda_graphs": False}}),
)


class Load:
    """Requests of every kind for one engine."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def prompts(self, count: int, least: int = 16, most: int = 200) -> list[list[int]]:
        rng = self._rng
        return [[rng.randrange(self._vocab_size) for _ in range(rng.randint(least, most))] for _ in range(count)]

    def run(
        self,
        name: str,
        params: Any,
        count: int,
        *,
        least: int = 16,
        most: int = 200,
        beginning: Sequence[int] = (),
        **structured: Any,
    ) -> int:
        """Return the kernels that these requests, which all start with `beginning`, had compiled."""
        executor = self._llm.core.executor
        before, begin = executor.compilations.count, time.monotonic()
        prompts = [[*beginning, *own] for own in self.prompts(count, least, most)]
        self._llm.generate(prompts, params, progress=False, **structured)
        compiled = executor.compilations.count - before
        if compiled:
            names = executor.compilations.names[before:]
            print(f"FAIL: {name}, {count} requests, {time.monotonic() - begin:.2f} s: {compiled} compiled: {names}")
        return int(compiled)

    def everything(self, numbers: tuple[int, ...]) -> int:
        def params(values: dict[str, Any]) -> SamplingParams:
            return SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **values})

        compiled = 0
        for count in numbers:
            for name, values in FEATURES.items():
                compiled += self.run(name, params(values), count)
            mixed = [params(values) for values in (list(FEATURES.values()) * count)[:count]]
            compiled += self.run("all features", mixed, count)
        greedy = params({"temperature": 0.0})
        for count in (3, 40):
            compiled += self.run("regex", params({"temperature": 1.0}), count, guided_regex="[a-z ]+")
            compiled += self.run("JSON", greedy, count, guided_json={"type": "object"})
        repeated = [7, 8, 9, 10] * 30  # what prompt lookup finds
        self._llm.generate([repeated] * 3, params({"temperature": 0.0, "max_tokens": 40}), progress=False)
        for count in (1, 2, 5, 20, 70):  # decodes beside chunks of long prompts
            short = [params({"temperature": 1.0, "top_p": 0.9, "max_tokens": 40})] * count
            prompts = [*self.prompts(count), *self.prompts(2, 3000, 4000)]
            before = self._llm.core.executor.compilations.count
            self._llm.generate(prompts, [*short, greedy, greedy], progress=False)
            if (late := self._llm.core.executor.compilations.count - before) > 0:
                names = self._llm.core.executor.compilations.names[before:]
                print(f"FAIL: {count} decodes beside long prompts: {late} compiled: {names}")
                compiled += late
        beginning = self.prompts(1, 2000, 2000)[0]  # which many rows share
        self._llm.generate([beginning], greedy, progress=False)
        for count in (12, 70):
            compiled += self.run("beginning alike", greedy, count, beginning=beginning)
        before = self._llm.core.executor.compilations.count
        self._llm.embed(self.prompts(9), progress=False)
        return compiled + self._llm.core.executor.compilations.count - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, 7, 64, 256])
    options = parser.parse_args()
    total, begin = 0, time.monotonic()
    for shape, settings in RUNS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_model(folder, shape)
            values = {section: dict(keys) for section, keys in settings.items()}
            values["model"] = {"load_format": "dummy", "max_model_len": 8192, **values.get("model", {})}
            values["cache"] = {"num_blocks": 2048, **values.get("cache", {})}  # other parts run on the card beside it
            start = time.monotonic()
            with LLM(name, **values) as llm:
                ready = time.monotonic() - start
                compiled = Load(llm, SHAPES[shape]["vocab_size"]).everything(tuple(options.numbers))
            print(f"{shape} {settings}: warm after {ready:.1f} s, {compiled} compiled while serving", flush=True)
            total += compiled
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{total} kernels compiled while serving, {len(RUNS)} engines, {time.monotonic() - begin:.0f} s")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
