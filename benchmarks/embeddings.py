"""Embeddings per second, beside transformers' own forward pass over the same prompts, in one process.

python -m benchmarks.embeddings [--model FOLDER | --encoder bge-small] [--device cpu] [--prompts 64] [--lengths 16 256]
    [--rounds 3] [--json FILE]

The two take turns, round by round. transformers gets the prompts sorted by length and padded, 32 at a time, as
sentence-transformers does it; the engine gets them as they are, without a prefix cache. `--encoder`: BERT with random
weights, of the shape of a published embedding model. Both compute in fp32 on a CPU and in bf16 on a card.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from inferengine.bench.compare import with_tokenizer
from inferengine.bench.environment import write_result
from inferengine.config.model_path import EMBEDDED
from inferengine.llm import LLM

BATCH = 32
ENCODERS = {
    "bge-small": {
        "vocab_size": 30_522, "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bge-base": {"vocab_size": 30_522},
}  # fmt: skip


def ours(llm: LLM, prompts: list[list[int]], pooling: str) -> torch.Tensor:
    return torch.tensor([embedding.values for embedding in llm.embed(prompts, pooling=pooling, progress=False)])


@torch.inference_mode()
def theirs(model: Any, prompts: list[list[int]], pooling: str) -> torch.Tensor:
    vectors: dict[int, torch.Tensor] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    device = model.device
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        width = max(len(prompts[row]) for row in rows)
        ids = torch.tensor([prompts[row] + [0] * (width - len(prompts[row])) for row in rows]).to(device)
        mask = torch.tensor([[1] * len(prompts[row]) + [0] * (width - len(prompts[row])) for row in rows]).to(device)
        states = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        lengths = mask.sum(1)
        if pooling == "cls":
            pooled = states[:, 0]
        elif pooling == "last":
            pooled = states[torch.arange(len(rows), device=device), lengths - 1]
        else:
            pooled = (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1)
        vectors |= dict(zip(rows, torch.nn.functional.normalize(pooled.float(), dim=-1).cpu(), strict=True))
    return torch.stack([vectors[index] for index in range(len(prompts))])


def write_encoder(folder: Path, name: str) -> Path:
    """Write BERT with seeded random weights and a tokenizer."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**ENCODERS[name])).save_pretrained(folder)
    return with_tokenizer(folder, folder)


def measure(llm: LLM, model: Any, prompts: list[list[int]], pooling: str, rounds: int) -> dict[str, Any]:
    error = float((ours(llm, prompts, pooling) - theirs(model, prompts, pooling)).norm(dim=1).max())
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for name, run in (
            ("ours", lambda: ours(llm, prompts, pooling)),
            ("theirs", lambda: theirs(model, prompts, pooling)),
        ):
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    tokens = sum(map(len, prompts))
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "pooling": pooling,
        "prompts": len(prompts),
        "tokens": tokens,
        "tokens_per_s": round(tokens / best["ours"], 1),
        "transformers_tokens_per_s": round(tokens / best["theirs"], 1),
        "ratio_of_best": round(best["theirs"] / best["ours"], 3),
        "ratio_of_medians": round(statistics.median(seconds["theirs"]) / statistics.median(seconds["ours"]), 3),
        "largest_distance": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--encoder", choices=sorted(ENCODERS), help="in place of --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores, for both")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = arguments.threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = write_encoder(Path(folder), arguments.encoder) if arguments.encoder else arguments.model
        run(path, arguments.encoder or path.name, arguments, threads)


def run(path: Path, name: str, arguments: argparse.Namespace, threads: int) -> None:
    """Measure a model, print and write what was found."""
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval().to(arguments.device)
    sections: dict[str, dict[str, Any]] = {
        "engine": {"device": arguments.device, "threads": threads},
        "model": {"dtype": str(dtype).removeprefix("torch.")},
        "cache": {"prefix_caching": False},
    }
    rng = random.Random(0)
    rows = []
    with LLM(str(path), **sections) as llm:
        torch.set_num_threads(threads)
        prompts = [
            [rng.randrange(llm.capacity.vocab_size) for _ in range(rng.randint(*arguments.lengths))]
            for _ in range(arguments.prompts)
        ]
        for pooling in ("cls", "mean") if arguments.encoder else ("last", "mean"):
            rows.append(measure(llm, model, prompts, pooling, arguments.rounds))
            print(rows[-1], flush=True)
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    document = {"machine": platform.platform(), "device": device, "threads": threads, "model": name, "rows": rows}
    if arguments.json is not None:
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
