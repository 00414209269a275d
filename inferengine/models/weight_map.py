"""WeightMap: where each tensor of a checkpoint goes in the model, as data. `{}` stands for the number of a layer."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A place in the model: the parameter's dotted name, and the `part` of a packed Linear (None: all of it)."""

    parameter: str
    part: int | None = None
    transpose: bool = False  # GPT-2 stores [in, out]
    plus_one: bool = False  # Gemma's norms multiply by 1 + w: folded in once, here


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


def attention_targets(here: str, there: str) -> dict[str, Target]:
    """Targets of the four projections of an attention block, with biases where the model has them."""
    parts = {"q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "o_proj": ("out", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }


def gated_mlp_targets(here: str, there: str) -> dict[str, Target]:
    """Targets of the three projections of a gated feed-forward block."""
    parts = {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1), "down_proj": ("down", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }
