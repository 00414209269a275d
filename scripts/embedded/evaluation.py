"""What the finished checkpoints can do, measured on the held-out split and through transformers, as a user would load
them: loss, share of questions answered right, how often a draft is accepted, samples as they come out."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import arithmetic, conversation, extraction, knowledge, memory, stories, tasks
from .conversation import Message
from .example import Exchange, Skill, Split
from .packing import packed_chunk
from .samples import CHATS, COMPLETIONS

HELD_OUT_CHUNK = 0
DRAFT_LENGTH = 4
GRADED: dict[str, Skill] = {
    "concepts": knowledge.concept, "engine": knowledge.about_engine, "everyday": knowledge.general,
    "small talk": knowledge.small_talk, "unknown": knowledge.unknown, "arithmetic": arithmetic.draw,
    "extraction": extraction.draw, "memory": memory.told, "persona": memory.persona, "reading": memory.passage,
    "tasks": tasks.draw, "stories": stories.draw,
}  # fmt: skip
_SUM = re.compile(r"(\d+)([-+*/])(\d+)")
_NUMBER = re.compile(r"(?<!\d)-?\d+")


@dataclass(frozen=True)
class Effort:
    """How much is measured. SMOKE only shows that every measurement runs."""

    questions: int  # per category
    documents: int  # of held-out text, for the loss
    story_tokens: int
    answer_tokens: int


FULL = Effort(questions=256, documents=600, story_tokens=400, answer_tokens=160)
SMOKE = Effort(questions=1, documents=10, story_tokens=6, answer_tokens=6)


class Checkpoint:
    """A checkpoint folder, loaded by transformers in fp32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.eos = self.tokenizer.eos_token_id

    def prompt(self, messages: list[Message]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text

    @torch.inference_mode()
    def greedy(self, prompts: list[str], max_new_tokens: int, batch: int = 256) -> list[list[int]]:
        """Return the new token ids per prompt, EOS included where it came."""
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            encoded = self.tokenizer(
                prompts[start : start + batch], return_tensors="pt", padding=True, add_special_tokens=False,
                return_token_type_ids=False,
            ).to(self.device)  # fmt: skip
            generated = self.model.generate(
                **encoded, max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None
            )
            for row in generated[:, encoded["input_ids"].shape[1] :].tolist():
                outputs.append(row[: row.index(self.eos) + 1] if self.eos in row else row)
        return outputs

    def text(self, ids: list[int]) -> str:
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return decoded


def evaluate(model_folder: Path, draft_folder: Path, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Measure everything that docs/embedded_model.md reports."""
    model, draft = Checkpoint(model_folder, device), Checkpoint(draft_folder, device)
    right, outputs = _questions(model, effort)
    return {
        "held_out_loss": {name: held_out_loss(each, effort) for name, each in (("model", model), ("draft", draft))},
        "answered_right": right,
        "draft": acceptance(model, draft, outputs[:: max(1, len(outputs) // 256)]),
        "samples": {"chat": _chats(model, effort), "completion": _completions(model, effort)},
    }


@torch.inference_mode()
def held_out_loss(checkpoint: Checkpoint, effort: Effort) -> dict[str, float | int]:
    """Measure nats per token and per byte over what is learned: answers in chats, everything in plain texts."""
    fast = Tokenizer.from_str(checkpoint.tokenizer.backend_tokenizer.to_str())
    fast.no_padding()  # what padded prompts left behind
    ids, learned = packed_chunk(fast, HELD_OUT_CHUNK, Split.HELD_OUT, effort.documents)
    special = set(checkpoint.tokenizer.all_special_ids)
    vocabulary = fast.get_vocab()  # a character of a byte-level token is a byte
    sizes = numpy.zeros(len(vocabulary))
    for token, token_id in vocabulary.items():
        sizes[token_id] = 0 if token_id in special else len(token)
    total, tokens, size = 0.0, 0, 0.0
    for start in range(0, len(ids), 8):
        rows = torch.from_numpy(ids[start : start + 8].astype("int64")).to(checkpoint.device)
        mask = torch.from_numpy(learned[start : start + 8, 1:].astype("float32")).to(checkpoint.device)
        logits = checkpoint.model(rows[:, :-1]).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        total += float((losses * mask.flatten()).sum())
        tokens += int(mask.sum())
        size += float((sizes[ids[start : start + 8, 1:]] * learned[start : start + 8, 1:]).sum())
    return {"nats_per_token": total / tokens, "nats_per_byte": total / size, "tokens": tokens, "bytes": int(size)}


def _questions(model: Checkpoint, effort: Effort) -> tuple[dict[str, Any], list[tuple[str, list[int]]]]:
    """Share answered right per category, with every wrong answer kept for reading; and (prompt, output) pairs."""
    count = effort.questions
    report: dict[str, Any] = {}
    pairs: list[tuple[str, list[int]]] = []
    for category, skill in GRADED.items():
        exchanges = held_out_exchanges(skill, count)
        prompts = [model.prompt(messages_of(exchange)) for exchange in exchanges]
        outputs = model.greedy(prompts, effort.story_tokens if category == "stories" else effort.answer_tokens)
        pairs += zip(prompts, outputs, strict=True)
        answers = [model.text(output) for output in outputs]
        ended = [output[-1] == model.eos for output in outputs]
        good = [grade(*item) for item in zip(exchanges, answers, ended, strict=True)]
        wrong = [
            {"asked": messages_of(exchange)[-1][1], "answered": answer, "expected": exchange.assistant}
            for exchange, answer, is_right in zip(exchanges, answers, good, strict=True)
            if not is_right
        ]
        report[category] = {
            "right": sum(good) / count,
            "ended_by_eos": sum(ended) / count,
            "questions": count,
            "wrong": wrong[:8],
        }
        if category == "arithmetic":
            report[category]["by_kind"] = _by_kind(exchanges, good)
    return report, pairs


def held_out_exchanges(skill: Skill, count: int) -> list[Exchange]:
    """Return exchanges of the held-out split that can be graded, always the same ones."""
    random = Random("evaluation")
    found: list[Exchange] = []
    while len(found) < count:
        exchange = skill(random, Split.HELD_OUT)
        if exchange.required:
            found.append(exchange)
    return found


def messages_of(exchange: Exchange) -> list[Message]:
    system = [("system", exchange.system)] if exchange.system else []
    return [*system, *conversation.turns(exchange.history), ("user", exchange.user)]


def grade(exchange: Exchange, answer: str, ended: bool) -> bool:
    """Return whether an answer ends by itself and holds what the exchange requires: JSON equal field by field, the
    result as the last number of a sum, every required word of a fact, the hero of a story in at least three
    sentences."""
    if not ended:
        return False
    if exchange.category == "extraction":
        try:
            return bool(json.loads(answer) == json.loads(exchange.assistant))
        except ValueError:
            return False
    if exchange.category == "arithmetic" and re.fullmatch(r"-?\d+", exchange.required[0]):
        numbers = _NUMBER.findall(answer.replace(" - ", " "))
        return bool(numbers) and numbers[-1] == exchange.required[0]
    if exchange.category == "story" and len(re.findall(r"[.!?]", answer)) < 3:
        return False
    return all(_holds(answer, word) for word in exchange.required)


def _holds(answer: str, word: str) -> bool:
    """Return whether a text holds the word itself, not as a part of a longer number."""
    pattern = re.escape(word.lower())
    if word[0].isdigit():
        pattern = rf"(?<![\d.]){pattern}"
    if word[-1].isdigit():
        pattern += r"(?!\d)"
    return re.search(pattern, answer.lower()) is not None


def _by_kind(exchanges: list[Exchange], good: list[bool]) -> dict[str, dict[str, float | int]]:
    tally: dict[str, list[bool]] = defaultdict(list)
    for exchange, is_right in zip(exchanges, good, strict=True):
        match = _SUM.fullmatch(exchange.key)
        digits = max(len(match.group(1)), len(match.group(3))) if match else 0
        tally[f"{match.group(2)} {digits} digits" if match else exchange.key.split(" ")[0]].append(is_right)
    return {kind: {"right": sum(marks) / len(marks), "questions": len(marks)} for kind, marks in sorted(tally.items())}


@torch.inference_mode()
def acceptance(model: Checkpoint, draft: Checkpoint, pairs: list[tuple[str, list[int]]]) -> dict[str, float | int]:
    """Measure how speculation with DRAFT_LENGTH drafts would go on greedy answers: the output is the model's own, so
    the drafts that are accepted can be read off one pass of the draft over it. `overlap` is the chance that a sampled
    draft is accepted at temperature 1 (the sum over the vocabulary of the smaller probability)."""
    matches, positions, steps, made, overlap = 0, 0, 0, 0, 0.0
    for prompt, output in pairs:
        prompt_ids = model.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt_ids + output], device=model.device)
        if ids.shape[1] > 2048 or not output:
            continue
        drafted: Tensor = draft.model(ids[:, :-1]).logits[0, len(prompt_ids) - 1 :]
        wanted: Tensor = model.model(ids[:, :-1]).logits[0, len(prompt_ids) - 1 :]
        overlap += float(torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum())
        hits = (drafted.argmax(-1) == ids[0, len(prompt_ids) :]).tolist()
        matches += sum(hits)
        positions += len(hits)
        at = 0
        while at < len(hits):
            accepted = 0
            while accepted < DRAFT_LENGTH and at + accepted < len(hits) and hits[at + accepted]:
                accepted += 1
            steps += 1
            advance = min(accepted + 1, len(hits) - at)
            made += advance
            at += advance
    return {
        "greedy_acceptance": matches / max(positions, 1),
        "sampled_overlap": overlap / max(positions, 1),
        "draft_length": DRAFT_LENGTH,
        "tokens_per_step": made / max(steps, 1),
        "positions": positions,
    }


def _chats(model: Checkpoint, effort: Effort) -> list[dict[str, Any]]:
    prompts = [model.prompt(list(messages)) for messages in CHATS]
    outputs = model.greedy(prompts, effort.story_tokens)
    return [
        {
            "messages": [list(message) for message in messages],
            "answer": model.text(output),
            "ended": output[-1] == model.eos,
        }
        for messages, output in zip(CHATS, outputs, strict=True)
    ]


def _completions(model: Checkpoint, effort: Effort) -> list[dict[str, Any]]:
    bos = model.tokenizer.bos_token
    outputs = model.greedy([bos + prompt for prompt in COMPLETIONS], effort.story_tokens)
    return [
        {"prompt": prompt, "text": model.text(output), "ended": output[-1] == model.eos}
        for prompt, output in zip(COMPLETIONS, outputs, strict=True)
    ]
