"""What the executor uses of a model (DecoderModel), and of the module that knows its architecture (ModelFamily).

A WeightMap says as data where each tensor of a checkpoint goes in the model; `{}` stands for the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.models.hf_config import ConfigReader

PartOfStep = Callable[[torch.Tensor], AbstractContextManager[None]]  # of the places of tokens in their step


class DecoderModel(nn.Module):
    """Token ids of a batch -> residual stream [T, E]; `logits` for the rows of it that draw.

    Its Attention modules have a `kv` and a `cos_sin` that are bound after loading (KVCache.bind).
    """

    embed: TokenEmbedding
    layers: nn.ModuleList
    norm: nn.Module
    head: Head
    can_be_captured = True  # as CUDA graphs
    plans_attention = False  # by itself: it does not read `batch.plans`
    is_slow_after_states = False  # of several tokens that follow a state, it computes one at a time
    can_keep = False  # it returns the states of `batch.kept_tokens` alone

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, E] of ids [T]."""
        raise NotImplementedError

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of rows [N, E] of the residual stream."""
        raise NotImplementedError

    def bind_states(self, tensors: list[torch.Tensor], num_slots: int = 0) -> None:
        """Set the tensors [S + P, *shape] that hold what DecoderConfig.states describes: by slot, then by snapshot.
        Most have none."""

    def restore_states(self, slots: list[int], snapshots: list[int]) -> None:
        """Copy the states of snapshots into slots."""

    def bind_adapters(self, part: PartOfStep) -> None:
        """Set what a model enters that computes some tokens of a step by themselves, where there are adapters."""

    def verify(self) -> None:
        """Check the model once its weights are loaded. Raises ConfigError."""


class Target(NamedTuple):
    """A place in the model: the parameter's dotted name, and the `part` of a packed Linear (None: all of it)."""

    parameter: str
    part: int | None = None
    transpose: bool = False  # GPT-2 stores [in, out]
    plus_one: bool = False  # Gemma's norms multiply by 1 + w: folded in once, here
    stacked: bool = False  # all experts in one tensor [experts, rows, columns], whose matrices `transpose` is of


class WeightMap(NamedTuple):
    """`targets` by checkpoint name. `prefixes` are removed from names where present. `root` is added to names that lack
    it, as in checkpoints without a head (embedding models). `ignored` names (patterns of `re`) hold no weights but
    buffers of old checkpoints. A tied head may be stored too, if it equals the embedding."""

    targets: dict[str, Target]
    prefixes: tuple[str, ...] = ()
    root: str = "model."
    ignored: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"


class ModelFamily(Protocol):
    """A module of inferengine/models that knows an architecture."""

    def read_config(self, config: ConfigReader) -> DecoderConfig:
        """Read config.json. Raises ConfigError naming what is not supported."""
        ...

    def build(self, ops: Ops, config: DecoderConfig) -> DecoderModel:
        """Build the model on torch's default device, without weights."""
        ...

    def weight_map(self, config: DecoderConfig) -> WeightMap:
        """Say where each tensor of a checkpoint goes."""
        ...


def attention_targets(here: str, there: str) -> dict[str, Target]:
    """Return the targets of the four projections of an attention block, with biases where the model has them."""
    parts = {"q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "o_proj": ("out", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }


def mlp_targets(here: str, *, up: str, down: str) -> dict[str, Target]:
    """Return the targets of the two projections of a plain feed-forward block."""
    return {
        f"{here}.{name}.{kind}": Target(f"layers.{{}}.mlp.{place}.{kind}")
        for name, place in ((up, "up"), (down, "down"))
        for kind in ("weight", "bias")
    }


def gated_mlp_targets(here: str, there: str) -> dict[str, Target]:
    """Return the targets of the three projections of a gated feed-forward block."""
    parts = {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1), "down_proj": ("down", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }


EXPERT_PARTS = {"gate_proj": ("gate_up", 0, 2), "up_proj": ("gate_up", 1, 2), "down_proj": ("down", 0, 1)}


def moe_targets(
    here: str,
    config: MoeConfig | None,
    *,
    router: str = "gate",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
    there: str = "layers.{}.mlp",
) -> dict[str, Target]:
    """Return the targets of a mixture of experts: a tensor for each expert's projections, which `parts` names, or one
    for all experts, as transformers 5 saves them. `here` is the block's name in the checkpoint, `there` in the
    model."""
    if config is None:
        return {}
    score = 0 if config.gated_shared else None
    targets = {
        f"{here}.{router}.weight": Target(f"{there}.router.weight", score),
        f"{here}.{router}.bias": Target(f"{there}.router.bias", score),
    }
    for expert in range(config.num_experts):
        for name, (place, part, count) in zip(parts, EXPERT_PARTS.values(), strict=True):
            for kind in ("weight", "bias") if config.bias else ("weight",):
                target = Target(f"{there}.{place}.{kind}", count * expert + part)
                targets[f"{here}.experts.{expert}.{name}.{kind}"] = target
    targets |= {
        f"{here}.experts.gate_up_proj": Target(f"{there}.gate_up.weight", stacked=True),
        f"{here}.experts.down_proj": Target(f"{there}.down.weight", stacked=True),
    }
    if config.shared_size:
        targets |= gated_mlp_targets(f"{here}.{shared}", f"{there}.shared")
    if config.corrected:
        targets[f"{here}.{router}.e_score_correction_bias"] = Target(f"{there}.correction.bias")
    if config.gated_shared:
        targets[f"{here}.shared_expert_gate.weight"] = Target(f"{there}.router.weight", 1)
    return targets
