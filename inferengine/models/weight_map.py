"""Which tensor of a checkpoint goes where in the model, as data. `{}` stands for the number of a layer."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A place in the model: the parameter's dotted name; `part` of a packed Linear (None: the whole of it)."""

    parameter: str
    part: int | None = None
    transpose: bool = False  # GPT-2 stores [in, out]
    plus_one: bool = False  # Gemma's norms multiply by 1 + w: folded in once, here


class WeightMap(NamedTuple):
    """`targets` by checkpoint name. `prefixes` are taken off names where present; `root` is put before names where a
    checkpoint left it out, as those are written that hold no head (embedding models). `ignored` names (patterns of
    `re`) hold no weights: buffers that old checkpoints kept. A tied head may be stored, if it equals the embedding."""

    targets: dict[str, Target]
    prefixes: tuple[str, ...] = ()
    root: str = "model."
    ignored: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"


def attention_targets(here: str, there: str) -> dict[str, Target]:
    """The four projections of an attention block, with biases where the model has them."""
    parts = {"q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "o_proj": ("out", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }


def gated_mlp_targets(here: str, there: str) -> dict[str, Target]:
    """The three projections of a gated feed-forward block."""
    parts = {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1), "down_proj": ("down", None)}
    return {
        f"{here}.{name}.{kind}": Target(f"{there}.{module}.{kind}", part)
        for name, (module, part) in parts.items()
        for kind in ("weight", "bias")
    }
