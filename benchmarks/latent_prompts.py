"""Prompts of latent attention (DeepSeek) on one thread of a CPU: this engine and transformers' modules.

python -m benchmarks.latent_prompts --out benchmarks/results/latent-prompts-cpu2.json

A model of random weights with the attention of DeepSeek-V2-Lite (16 heads, latents of 512), two dense layers and a
hidden size of 512. Each prompt is computed in one step; with --chunk in several, behind what is cached of it. Seconds
are those that the thread itself ran, because other programs share the machine; of all rounds the fastest.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import inferengine
from inferengine.bench.compare import with_tokenizer
from inferengine.bench.environment import write_result
from inferengine.sampling_params import SamplingParams

VOCABULARY = 1024


def main() -> None:
    """Measure, print and write tokens per CPU second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--chunk", type=int, default=2048, help="most prompt tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name))
        folder = with_tokenizer(Path(name), Path(name, "served"))
        Path(folder, "model.safetensors").symlink_to(Path(name, "model.safetensors"))
        with inferengine.LLM(
            str(folder),
            engine={"device": "cpu", "threads": 1, "max_num_batched_tokens": args.chunk, "max_num_seqs": 1},
            cache={"num_blocks": 512, "prefix_caching": False},
        ) as llm:  # fmt: skip
            ways = {"engine": lambda prompt: run(llm, prompt), "transformers": lambda prompt: forward(model, prompt)}
            found = {
                str(length): {name: best_of(way, length, args.rounds) for name, way in ways.items()}
                for length in args.lengths
            }
    for length, speeds in found.items():
        print(f"{length:>6} tokens: " + ", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in speeds.items()))
    if args.out is not None:
        write_result(args.out, {"chunk": args.chunk, "tokens_per_cpu_s": found})


def make_model(folder: Path) -> Any:
    """Save a model of random weights, and return it as transformers computes it."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, first_k_dense_replace=2, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def run(llm: inferengine.LLM, prompt: list[int]) -> None:
    """Compute the prompt, and one token."""
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))


def forward(model: Any, prompt: list[int]) -> None:
    """Compute the prompt, and the logits of its last token."""
    with torch.inference_mode():
        model(torch.tensor([prompt]), logits_to_keep=1)


def best_of(way: Callable[[list[int]], None], length: int, rounds: int) -> float:
    """Return tokens per CPU second of the fastest round, after one that is not counted."""
    draw = random.Random(length)
    times = []
    for _ in range(rounds + 1):
        prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
        start = time.process_time()
        way(prompt)
        times.append(time.process_time() - start)
    return length / min(times[1:])


if __name__ == "__main__":
    main()
