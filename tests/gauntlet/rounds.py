"""A round: one engine's configuration, the requests that it gets and when, and when it is killed. Plain data, so that a
seed or a file gives the same round again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gauntlet import asks
from tests.gauntlet.asks import Ask, Prompts, Space

MODEL_LENGTH = 512  # model.max_model_len of every round
KILL_SHARE = 0.12
QUIET_SHARE, QUIET_RATE = 0.4, 0.4
TURNS_SHARE = 0.6  # of the quiet rounds: clients that wait for their answers
LONGEST_OUTPUT, QUIET_OUTPUT = 64, 240


@dataclass(frozen=True)
class Round:
    """`settings` are configuration keys with their sections: {"cache.block_size": 8}."""

    model: str
    settings: dict[str, Any]
    asks: tuple[Ask, ...]
    kills_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # for people who read the file

    def to_json(self) -> str:
        body = {
            "model": self.model,
            "settings": self.settings,
            "kills_s": list(self.kills_s),
            "asks": [ask.to_map() for ask in self.asks],
            "notes": list(self.notes),
        }
        return json.dumps(body, indent=1)


def read(path: Path) -> Round:
    values = json.loads(path.read_text())
    return Round(
        values["model"],
        values["settings"],
        tuple(asks.from_map(each) for each in values["asks"]),
        tuple(values.get("kills_s", ())),
        tuple(values.get("notes", ())),
    )


Draw = Callable[[random.Random], Any]


def _one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


# Of every engine. A new key is one line.
SETTINGS: dict[str, Draw] = {
    "engine.max_num_seqs": _one_of(2, 4, 16, 64),
    "engine.max_num_batched_tokens": _one_of(64, 96, 128, 512, 512),
    "engine.overlap": _one_of("auto", "on", "off"),
    "engine.threads": _one_of(1, 1, 2),
    "cache.block_size": _one_of(8, 16, 16, 32),
    "cache.prefix_caching": _one_of(True, True, False),
    "cache.watermark": _one_of(0.0, 0.01, 0.1),
    "cache.eviction": _one_of("lru", "fifo"),
    "scheduler.policy": _one_of("fcfs", "fcfs", "priority", "shortest", "deadline", "fair", "static"),
    "scheduler.preemption": _one_of("preempt", "preempt", "swap", "reject"),
    "scheduler.prefill_chunk": _one_of(0, 0, 7, 32),
    "scheduler.max_num_decodes": _one_of(0, 0, 3),
    "scheduler.itl_target_ms": _one_of(0.0, 0.0, 20.0),
    "speculation.method": _one_of("auto", "auto", "none", "ngram", "draft"),
    "speculation.max_drafts": _one_of(8, 8, 1, 3),
    "speculation.max_running": _one_of(0, 0, 4, 16),
    "wire.window": _one_of(64, 64, 4),
}
NO_DRAFT = ("mistral-window",)  # each model is its own draft, and one with windows alone is refused as a draft
KV_TOKENS = (320, 448, 640, 1024, 4096)  # tiny, so that requests are preempted or swapped, to roomy
CUDA_BLOCK_SIZES = (64, 64, 16, 32)


def draw_settings(rng: random.Random, device: str) -> dict[str, Any]:
    """Draw the configuration of one engine."""
    settings = {key: draw(rng) for key, draw in SETTINGS.items()}
    if device == "cuda":
        settings["cache.block_size"] = rng.choice(CUDA_BLOCK_SIZES)
        settings["engine.max_num_batched_tokens"] = rng.choice((128, 512, 2048))
    settings["cache.num_blocks"] = rng.choice(KV_TOKENS) // settings["cache.block_size"]
    if settings["scheduler.preemption"] == "swap":
        settings["cache.swap_gib"] = 0.25
    if rng.random() < 0.06:  # one block of the longest length for each sequence
        settings["cache.layout"] = "contiguous"
        settings["cache.num_blocks"] = 4096 // settings["cache.block_size"]
    return settings


def kv_tokens(settings: dict[str, Any]) -> int:
    """Return what of the cache one request may use: some is left for the watermark and for blocks that are half
    filled."""
    return int(settings["cache.num_blocks"] * settings["cache.block_size"] * 0.85)


def draw_round(
    rng: random.Random,
    *,
    model: str,
    adapters: tuple[str, ...],
    vocab_size: int,
    device: str,
    span_s: float,
    rate: float,
    fixed: dict[str, Any],
    kills: bool,
) -> Round:
    """Draw `rate` requests a second for `span_s` seconds, in clumps; `fixed` settings go before drawn ones. Some rounds
    are quiet: few requests with long outputs, because engines speculate only where few requests run."""
    settings = {**draw_settings(rng, device), **fixed}
    if model in NO_DRAFT and settings["speculation.method"] == "draft":
        settings["speculation.method"] = "ngram"
    quiet = rng.random() < QUIET_SHARE
    rate, longest = (rate * QUIET_RATE, QUIET_OUTPUT) if quiet else (rate, LONGEST_OUTPUT)
    space = Space(vocab_size, MODEL_LENGTH, kv_tokens(settings), adapters, max_output=longest)
    prompts = Prompts(rng, space)
    asked: list[Ask] = []
    now = 0.0
    while now < span_s:
        for _ in range(rng.choice((1, 1, 2, 6))):
            asked.append(asks.draw_ask(rng, len(asked), round(now, 3), prompts, space))
        now += rng.expovariate(rate / 2.5)  # 2.5: the mean of a clump
    if quiet and rng.random() < TURNS_SHARE:
        asked = in_turns(asked, rng.choice((1, 2, 2, 3)))
    killed = kills and rng.random() < KILL_SHARE
    return Round(model, settings, tuple(asked), (round(rng.uniform(0.2, span_s), 3),) if killed else ())


def in_turns(asked: list[Ask], clients: int) -> list[Ask]:
    """Return the same requests from so many clients, each of which waits for an answer before it asks again."""
    return [
        replace(ask, at_s=0.0, after=None if place < clients else asked[place - clients].name)
        for place, ask in enumerate(asked)
    ]
