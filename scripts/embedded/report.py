"""docs/embedded_model.md from evaluation.json: what the embedded model is, and what was measured, bad samples included."""

# ruff: noqa: E501  (prose)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INTRODUCTION = """\
# The embedded model

`inferengine up` without a MODEL serves a model that was trained for this repository: small enough to live in it, and
legible enough to try everything with. Any other checkpoint in the Hugging Face layout is served by the same code.

This page is written by `scripts/train_embedded` from `inferengine/assets/embedded/evaluation.json`. Nothing on it was
chosen or edited by hand.

## What it is
| | model (`assets/embedded`) | draft (`assets/embedded-draft`) |
|---|---|---|
"""
_TEXT = """
Vocabulary: byte-level BPE of 4,096 tokens, every digit a token of its own; `<|bos|>`, `<|eos|>`, `<|pad|>`, and one
marker for each role of a chat. The template writes `<|bos|><|system|>…<|eos|><|user|>…<|eos|><|assistant|>`, and an
answer ends with `<|eos|>`, which is also the end of a plain text. Defaults: temperature 0.5, top-p 0.9.

## What it was trained on
Text from a generator in `scripts/embedded` and nothing from elsewhere: questions and answers on inference serving and on
this engine (its commands, ports, endpoints, wire, every configuration key, every error code), small arithmetic, fields
into JSON, short stories, reading questions, small tasks on words, things told earlier in a chat, small talk, a little
general knowledge, and honest refusals. About a fifth is plain text without roles. The generator is deterministic: chunk
number n is the same text on every machine. One key in sixteen is held out, where the key is the content: the phrasing
of a question for one fact, the operands of a sum, the record behind a sentence, hero, place and plot of a story. Never
held out is what everybody knows or asks first: the tables up to twelve, greetings, "how do I start the server".

The draft was trained to give the model's own distribution over the same text.
"""


def write(assets: Path, page: Path) -> None:
    """Write `page` from the checkpoints and the evaluation under `assets`."""
    page.write_text(render(assets))


def render(assets: Path) -> str:
    report = json.loads((assets / "embedded" / "evaluation.json").read_text())
    return "\n".join(
        [
            _INTRODUCTION + _shapes(assets) + _TEXT,
            _training(report["training"]),
            _losses(report["held_out_loss"]),
            _quantized(report["quantized"]),
            _answers(report["answered_right"]),
            _draft(report["draft"]),
            _samples(report["samples"]),
        ]
    )


def _shapes(assets: Path) -> str:
    folders = [assets / "embedded", assets / "embedded-draft"]
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders]
    rows = [
        ("architecture", [config["architectures"][0] for config in configs]),
        ("hidden size", [config["hidden_size"] for config in configs]),
        ("layers", [config["num_hidden_layers"] for config in configs]),
        ("query / KV heads", [f"{c['num_attention_heads']} / {c['num_key_value_heads']}" for c in configs]),
        ("intermediate size", [config["intermediate_size"] for config in configs]),
        ("context length", [config["max_position_embeddings"] for config in configs]),
        ("parameters", [f"{size / 2e6:.2f} M" for size in sizes]),
        ("weights, bf16", [f"{size / 1e6:.1f} MB" for size in sizes]),
    ]
    return "".join(f"| {name} | {values[0]} | {values[1]} |\n" for name, values in rows)


def _training(training: dict[str, Any]) -> str:
    lines = [
        f"\n## Training\nOn one {training['device']} with torch {training['torch']}, by `scripts/train_embedded`.\n"
    ]
    lines.append("| | steps | tokens | seconds, compiling included |\n|---|---|---|---|")
    for name in ("model", "draft"):
        item = training[name]
        lines.append(f"| {name} | {item['steps']:,} | {item['tokens'] / 1e6:.0f} M | {item['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def _losses(losses: dict[str, Any]) -> str:
    lines = ["## Held-out loss\nOver what is learned: the answers of chats and the whole of plain texts.\n"]
    lines.append("| | nats per token | nats per byte | tokens |\n|---|---|---|---|")
    for name, item in losses.items():
        lines.append(f"| {name} | {item['nats_per_token']:.4f} | {item['nats_per_byte']:.4f} | {item['tokens']:,} |")
    lines.append(
        "\nThe losses are this low because generated text has little in it to be surprised by: they compare the two models"
        " with each other, not with models of natural language."
    )
    return "\n".join(lines) + "\n"


def _quantized(quantized: dict[str, Any]) -> str:
    """Report what number formats cost; docs/quantization.md says what they are."""
    losses = quantized["nats_per_token"]
    lines = [
        "## In low precision\n"
        f"The model's loss over {quantized['tokens']:,} held-out tokens ({quantized['documents']} documents) in every number"
        " format of [quantization.md](quantization.md), through this engine on a CPU. These documents are a"
        " part of the split: compare the rows with each other only. Small differences go either way.\n",
        "| | nats per token | more than float32 |\n|---|---|---|",
    ]
    for name, loss in losses.items():
        lines.append(f"| {name} | {loss:.4f} | {100 * (loss / losses['float32'] - 1):+.2f} % |")
    return "\n".join(lines) + "\n"


def _answers(right: dict[str, Any]) -> str:
    lines = [
        "## Held-out questions answered right\n"
        "Greedy, fp32, through transformers. An answer counts when it ends by itself and holds what it must: JSON equal"
        " field by field, the result as the last number of a sum, the required words of a fact, the hero of a story in at"
        " least three sentences. Questions are drawn with repetition, so that a category with few held-out phrasings"
        " (small talk) weighs single ones heavily.\n",
        "| category | right | ended by EOS | questions |\n|---|---|---|---|",
    ]
    for category, item in right.items():
        share, ended = 100 * item["right"], 100 * item["ended_by_eos"]
        lines.append(f"| {category} | {share:.1f} % | {ended:.1f} % | {item['questions']} |")
    lines.append("\n| arithmetic | right | questions |\n|---|---|---|")
    for kind, item in right["arithmetic"]["by_kind"].items():
        lines.append(f"| {kind.replace('*', '×')} | {100 * item['right']:.0f} % | {item['questions']} |")
    lines.append("\nSome that were wrong:\n\n| asked | answered | expected |\n|---|---|---|")
    for item in right.values():
        for wrong in item["wrong"][:2]:
            cells = (_cell(wrong[key]) for key in ("asked", "answered", "expected"))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _draft(draft: dict[str, Any]) -> str:
    return (
        "## The draft\n"
        f"On greedy answers to held-out questions the draft's token is the model's own in"
        f" {100 * draft['greedy_acceptance']:.1f} % of {draft['positions']:,} positions; with {draft['draft_length']} drafts"
        f" a step would yield {draft['tokens_per_step']:.2f} tokens. At temperature 1 a draft is accepted with a chance of"
        f" {100 * draft['sampled_overlap']:.1f} %. On text of other kinds it will be less.\n"
    )


def _samples(samples: dict[str, Any]) -> str:
    lines = [
        "## Samples, greedy, unedited\nWhat a visitor might type; the questions were written by hand. The plainest of them stand in the training text in these very words.\n"
    ]
    for item in samples["chat"]:
        *before, (_, question) = item["messages"]
        context = "".join(f"({role}: {content}) " for role, content in before)
        ended = "" if item["ended"] else " **(cut at the limit)**"
        lines.append(f"- {context}**{question}** {_cell(item['answer'])}{ended}")
    lines.append("\nPlain completions:\n")
    for item in samples["completion"]:
        ended = "" if item["ended"] else " **(cut at the limit)**"
        lines.append(f"- **{_cell(item['prompt'])}** {_cell(item['text'])}{ended}")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text on one line of a table."""
    return text.replace("|", "\\|").replace("\n", " ⏎ ").strip()
