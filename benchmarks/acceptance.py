"""Acceptance of draft tokens under the two lossless rules, from the exact distributions of target and draft model.

python -m benchmarks.acceptance [--json FILE]

Along sampled answers of the embedded model, at every position: 1 - d for rejection sampling (d: the total variation
distance of both models' distributions), and for the Gumbel coupling, which the engine uses, the sum over tokens i of
1 / sum over j of max(p_j / p_i, q_j / q_i). `tokens_per_step` is what three draft tokens give, in the same order.
Needs transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.speculation import HEROES, QUESTIONS
from inferengine.bench.environment import write_result
from inferengine.config import load
from inferengine.engine.model_info import read_model_card
from inferengine.text import ChatTemplate, Tokenizer

ASSETS = Path(__file__).resolve().parents[1] / "inferengine" / "assets"
ANSWERS, OUTPUT_TOKENS, DRAFT_TOKENS = 8, 96, 3
LIKELIEST = 200  # tokens whose agreement is summed: the others' is below what is told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, draft = (_load(ASSETS / name) for name in ("embedded", "embedded-draft"))
    stories = [f"Tell me a story about a {HEROES[i]} and a {HEROES[(i + 3) % 16]}." for i in range(ANSWERS)]
    prompts = {"stories": _prompts(stories), "questions": _prompts(list(QUESTIONS[:ANSWERS]))}
    rows = []
    for temperature in (0.7, 1.0):
        for kind, ids in prompts.items():
            torch.manual_seed(0)
            rates = [_rates(target, draft, prompt, temperature) for prompt in ids]
            rows.append({"temperature": temperature, "kind": kind, **_summary(rates)})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        document = {"benchmark": "acceptance", "model": "embedded", "draft": "embedded-draft", "rows": rows}
        write_result(arguments.json, document)


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _prompts(questions: list[str]) -> list[list[int]]:
    card = read_model_card(load(environment={}))
    tokenizer, template = Tokenizer.from_files(card.files), ChatTemplate.from_files(card.files)
    if template is None:
        raise SystemExit("the embedded model has no chat template")
    turns = ([{"role": "user", "content": question}] for question in questions)
    return [tokenizer.encode(template.render(messages), add_special_tokens=False) for messages in turns]


@torch.inference_mode()
def _rates(target: Any, draft: Any, prompt: list[int], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (rejection sampling, coupling): the probability of acceptance at each position of one sampled answer."""
    ids = target.generate(
        torch.tensor([prompt]), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=OUTPUT_TOKENS,
    )  # fmt: skip
    p, q = (
        (model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature).softmax(-1).numpy()
        for model in (target, draft)
    )
    return np.minimum(p, q).sum(1), np.array([_coupled(*pair) for pair in zip(p, q, strict=True)])


def _coupled(p: np.ndarray, q: np.ndarray) -> float:
    likeliest = np.argsort(-np.minimum(p, q))[:LIKELIEST]
    tiny = np.finfo(np.float64).tiny
    ratios = np.maximum(p / p[likeliest, None].clip(tiny), q / q[likeliest, None].clip(tiny))
    return float((1 / ratios.sum(1)).sum())


def _summary(rates: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    rejection, coupling = (np.concatenate(column) for column in zip(*rates, strict=True))
    return {
        "positions": len(rejection),
        "rejection": round(float(rejection.mean()), 4),
        "coupling": round(float(coupling.mean()), 4),
        "tokens_per_step": [round(_tokens([pair[rule] for pair in rates]), 3) for rule in (0, 1)],
    }


def _tokens(answers: list[np.ndarray]) -> float:
    """Return expected tokens of a step with DRAFT_TOKENS draft tokens, over all positions."""
    steps = [
        1 + np.cumprod(one[begin : begin + DRAFT_TOKENS]).sum()
        for one in answers
        for begin in range(len(one) - DRAFT_TOKENS)
    ]
    return float(np.mean(steps))


if __name__ == "__main__":
    main()
