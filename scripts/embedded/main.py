"""Makes the embedded model and its draft: text, tokenizer, two trainings, evaluation, two checkpoint folders.

usage: scripts/train_embedded [--out FOLDER] [--device cuda|cpu] [--steps N] [--seconds S] [--rows N]
                              [--workers N] [--no-compile]

On one GPU it takes less than ten minutes. On a CPU, `--steps 5 --device cpu --out FOLDER` shows that every stage works;
up to 50 steps the evaluation is a token one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from . import checkpoint, corpus, evaluation, quantized
from . import report as pages
from .network import DRAFT, MODEL, Network
from .packing import Batches, Rows
from .training import Plan, distillation_loss, likelihood_loss, train
from .vocabulary import texts_of, train_tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "inferengine" / "assets"
TOKENIZER_CHUNKS = 8
TRIAL_STEPS = 50  # up to here it is a trial of the program, not a training
DRAFT_SHARE = 0.3  # of the model's steps and time


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/train_embedded", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for embedded/ and embedded-draft/")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3300, help="most steps of the model's training")
    parser.add_argument("--seconds", type=float, default=240.0, help="most seconds of the model's training")
    parser.add_argument("--rows", type=int, default=0, help="rows of 2048 tokens per step; 0: 64 on a GPU, 2 on a CPU")
    parser.add_argument("--workers", type=int, default=min(16, max(1, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    options = parser.parse_args(words)
    if options.out == ASSETS and options.steps <= TRIAL_STEPS:
        parser.error("so few steps would replace the shipped model by noise: give --out FOLDER")
    return options


class Progress:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)


def main(words: list[str]) -> int:
    options = arguments(words)
    say = Progress()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    rows = options.rows or (64 if on_gpu else 2)
    torch.set_float32_matmul_precision("high")

    tokenizer = _tokenizer(say, TOKENIZER_CHUNKS if options.steps > TRIAL_STEPS else 1)
    batches = Batches(tokenizer, rows=rows, workers=options.workers, last_chunk=100_000)
    seen: list[Rows] = []
    try:
        compiled = _compiler(on_gpu and not options.no_compile)
        model = Network(MODEL, seed=1).to(device)
        plan = Plan(options.steps, options.seconds, learning_rate=2.5e-3)
        kept = _kept(batches, seen, 1 + int(DRAFT_SHARE * options.steps))
        say(f"training the model: {_millions(model)} parameters, at most {plan.steps} steps of {rows * 2048} tokens")
        model_report = train(model, likelihood_loss(compiled(model)), kept, plan, device, say)
    finally:
        batches.close()
    draft = Network(DRAFT, seed=2).to(device)
    draft_plan = Plan(1 + int(DRAFT_SHARE * options.steps), DRAFT_SHARE * options.seconds, learning_rate=4e-3)
    say(f"training the draft: {_millions(draft)} parameters, at most {draft_plan.steps} steps")
    model.eval().requires_grad_(False)
    endless = itertools.chain.from_iterable(itertools.repeat(seen))
    draft_report = train(draft, distillation_loss(compiled(draft), compiled(model)), endless, draft_plan, device, say)

    checkpoint.write(options.out / "embedded", model, tokenizer)
    checkpoint.write(options.out / "embedded-draft", draft, tokenizer)
    say("evaluating on held-out text")
    torch.set_float32_matmul_precision("highest")
    effort = evaluation.FULL if options.steps > TRIAL_STEPS else evaluation.SMOKE
    report = evaluation.evaluate(options.out / "embedded", options.out / "embedded-draft", device, effort)
    report["quantized"] = quantized.losses(options.out / "embedded", effort.documents // 5)
    report["training"] = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "model": vars(model_report),
        "draft": vars(draft_report),
    }
    path = options.out / "embedded" / "evaluation.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    _show(report, say)
    if options.out == ASSETS:
        pages.write(ASSETS, ASSETS.parents[1] / "docs" / "embedded_model.md")
    say(f"wrote {options.out / 'embedded'} and {options.out / 'embedded-draft'}")
    return 0


def _tokenizer(say: Progress, chunks: int) -> Tokenizer:
    documents = itertools.chain.from_iterable(corpus.chunk(number) for number in range(chunks))
    tokenizer = train_tokenizer(texts_of(documents))
    say(f"tokenizer of {tokenizer.get_vocab_size()} tokens from {chunks * corpus.DOCUMENTS_PER_CHUNK} documents")
    return tokenizer


def _compiler(wanted: bool) -> Callable[[Network], Callable[[torch.Tensor], torch.Tensor]]:
    return torch.compile if wanted else lambda network: network


def _kept(batches: Batches, seen: list[Rows], most: int) -> Iterator[Rows]:
    """Yield the batches, the first `most` of them kept for the draft."""
    for batch in batches:
        if len(seen) < most:
            seen.append(batch)
        yield batch


def _millions(network: Network) -> str:
    return f"{sum(parameter.numel() for parameter in network.parameters()) / 1e6:.2f} M"


def _show(report: dict[str, Any], say: Progress) -> None:
    losses, right = report["held_out_loss"], report["answered_right"]
    say(f"held-out loss {json.dumps(losses)}")
    for category, result in right.items():
        say(f"{category:12s} right {100 * result['right']:5.1f} %   ended {100 * result['ended_by_eos']:5.1f} %")
    say(f"arithmetic {json.dumps(right['arithmetic']['by_kind'])}")
    say(f"draft {json.dumps(report['draft'])}")
