"""The first token of each turn of a conversation, of models with states: with the prefix cache and without it, on one
thread of a CPU.

python -m benchmarks.state_prefixes --out benchmarks/results/state-prefixes-cpu2.json

Models of random weights: eight layers, a hidden size of 512. A conversation begins with a system prompt; in each turn
the user says something, and the answer has 32 tokens. The first token of an answer is a request of one token; the whole
answer is asked for after it. Both engines are in this process and take turns. Milliseconds are those that the thread
itself ran, because other programs share the machine; of all conversations the median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

import inferengine
from inferengine.bench.compare import with_tokenizer
from inferengine.bench.environment import write_result
from inferengine.sampling_params import SamplingParams

VOCABULARY = 256
ANSWER_TOKENS = 32
SNAPSHOT_GIB = 0.25  # named, because Mamba 1 has none otherwise
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
ATTENTION = {
    **SIZES, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite 4 hybrid": ("GraniteMoeHybridConfig", {
        **ATTENTION, "layer_types": ["mamba"] * 3 + ["attention"] + ["mamba"] * 3 + ["attention"],
        "num_local_experts": 0, "shared_intermediate_size": 1408, "mamba_n_heads": 32, "mamba_d_head": 32,
        "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4}),
    "qwen 3.5": ("Qwen3_5TextConfig", {
        **ATTENTION, "head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64}),
    "lfm2": ("Lfm2Config", {**ATTENTION, "layer_types": (["conv"] * 3 + ["full_attention"]) * 2}),
    "mamba 2": ("Mamba2Config", {**SIZES, "num_heads": 32, "head_dim": 32, "n_groups": 1, "state_size": 64}),
    "mamba 1": ("MambaConfig", SIZES),
}  # fmt: skip


def main() -> None:
    """Measure, print and write the milliseconds of each turn's first token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--system", type=int, default=256, help="tokens of the system prompt")
    parser.add_argument("--user", type=int, default=48, help="tokens of what the user says in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, args) for name in args.models}
    for name, result in found.items():
        print(name)
        for turn, row in enumerate(result["turns"]):
            print(
                f"  turn {turn + 1}: {row['prompt_tokens']:>5} tokens, {row['cached_tokens']:>5} cached, "
                f"{row['on_ms']:>8.1f} ms, without {row['off_ms']:>8.1f} ms, {row['off_ms'] / row['on_ms']:.2f} times"
            )
    if args.out is not None:
        asked = {name: getattr(args, name) for name in ("system", "user", "turns", "conversations", "budget")}
        write_result(args.out, {**asked, "answer": ANSWER_TOKENS, "models": found})


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Hold conversations with a model at both engines."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        config = getattr(transformers, kind)(**values)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
        folder = with_tokenizer(Path(place), Path(place))
        engines = {
            is_on: stack.enter_context(
                inferengine.LLM(
                    str(folder),
                    engine={
                        "device": "cpu", "threads": 1, "max_num_batched_tokens": args.budget, "max_num_seqs": 4,
                    },
                    cache={"num_blocks": 512, "prefix_caching": is_on, "snapshot_gib": SNAPSHOT_GIB},
                )
            )
            for is_on in (True, False)
        }  # fmt: skip
        converse(engines, args, random.Random(0))  # the first steps of a process are slower
        rows = [converse(engines, args, random.Random(1 + number)) for number in range(args.conversations)]
    turns = [
        {field: statistics.median(row[turn][field] for row in rows) for field in rows[0][turn]}
        for turn in range(args.turns)
    ]
    return {"turns": turns}


def converse(
    engines: dict[bool, inferengine.LLM], args: argparse.Namespace, draw: random.Random
) -> list[dict[str, float]]:
    """Hold one conversation. Returns what each turn took: both engines must give the same answer."""
    text = [draw.randrange(VOCABULARY) for _ in range(args.system)]
    rows: list[dict[str, float]] = []
    for turn in range(args.turns):
        text += [draw.randrange(VOCABULARY) for _ in range(args.user)]
        row: dict[str, float] = {"prompt_tokens": len(text)}
        answers: list[list[int]] = []
        for is_on in (True, False) if turn % 2 else (False, True):  # neither is always the first
            engine = engines[is_on]
            begin = time.process_time()
            (first,) = engine.generate([text], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            row["on_ms" if is_on else "off_ms"] = 1e3 * (time.process_time() - begin)
            if is_on:
                row["cached_tokens"] = first.num_cached_tokens
            params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            (whole,) = engine.generate([text], params)
            answers.append(whole.choices[0].token_ids)
        if answers[0] != answers[1]:
            raise RuntimeError("the engines' answers differ")
        text += answers[0]
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
