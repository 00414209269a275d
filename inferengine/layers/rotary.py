"""Rotary position embeddings: every supported scaling as a table of inverse frequencies and one magnitude.

Sources: Su et al. 2021 (RoPE); linear: Chen et al. 2023; dynamic NTK: bloc97 2023; YaRN: Peng et al. 2023;
llama3: the scaling published with Llama 3.1. Definitions agree with transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotation. `kind` is default | linear | dynamic | llama3 | yarn."""

    theta: float
    head_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies [D / 2] in fp32 and the factor on cosines and sines.

    `dynamic` equals `default` up to the original context; a longer one is refused when the config is read.
    """
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    return _yarn(rope, plain)


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Compute [num_positions, D] fp32: cosines of position * frequency in the first half, sines in the second."""
    frequencies, magnitude = inverse_frequencies(rope)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude).to(device)


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> tuple[torch.Tensor, float]:
    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if rope.attention_factor is not None:
        factor = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    else:
        factor = magnitude(rope.factor)

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return plain / rope.factor * (1 - keep) + plain * keep, factor
