"""Rotary position embeddings: every supported scaling as a table of inverse frequencies and one magnitude.

Sources: Su et al. 2021 (RoPE); linear: Chen et al. 2023; dynamic NTK: bloc97 2023; YaRN: Peng et al. 2023; longrope:
Ding et al. 2024; llama3 and proportional: as published with Llama 3.1 and Gemma 4. Definitions agree with
transformers' modeling_rope_utils.

The kernels know one rotation: element i of a head turns with element i + D / 2. Other rotations are the same one after
the elements of each query and key head are put in another order, which changes no product of a query with a key:
`head_order` says which. It serves rotations of neighbours (interleaved) and of a head's first elements only (partial).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotation. `kind` is default | linear | dynamic | llama3 | yarn | longrope | proportional."""

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
    rotary_dim: int = 0  # elements of a head that turn, the first ones; 0: all
    interleaved: bool = False  # element 2i turns with 2i + 1, as checkpoints of such models store them
    short_factor: tuple[float, ...] = ()  # longrope: divisors of the frequencies, up to the original context
    long_factor: tuple[float, ...] = ()  # longrope: divisors where the context served is longer
    num_turning: int = 0  # proportional: pairs of elements that turn, the first ones; the others' frequency is 0

    @property
    def dim(self) -> int:
        """Return the number of elements of a head that turn."""
        return self.rotary_dim or self.head_dim


def head_order(rope: RopeConfig) -> torch.Tensor | None:
    """Return, for each element of a head as the kernels want it, its place in the checkpoint [D]; None: the same."""
    if rope.dim == rope.head_dim and not rope.interleaved:
        return None
    whole = torch.arange(rope.head_dim, device="cpu")  # models are built on `meta`
    turning, rest = whole[: rope.dim], whole[rope.dim :]
    first, second = (turning[::2], turning[1::2]) if rope.interleaved else turning.chunk(2)
    half = len(rest) // 2
    return torch.cat((first, rest[:half], second, rest[half:]))


def inverse_frequencies(rope: RopeConfig, num_positions: int = 0) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies [dim / 2] in fp32 and the factor on cosines and sines.

    `dynamic` equals `default` up to the original context; a longer one is refused when the config is read. `longrope`
    takes its long factors where `num_positions` exceeds the original context, for sequences of any length: cached keys
    must not depend on how long their sequence becomes.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "proportional":
        turns = torch.arange(len(plain)) < rope.num_turning
        return torch.where(turns, plain / rope.factor, 0.0), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "longrope":
        divisors = rope.long_factor if num_positions > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(divisors) * rope.theta**exponents), _longrope_magnitude(rope)
    return _yarn(rope, plain)


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Compute [num_positions, D] fp32: cosines of position * frequency in the first half, sines in the second. Elements
    that do not turn have cosine 1 and sine 0."""
    frequencies, magnitude = inverse_frequencies(rope, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    still = (0, (rope.head_dim - rope.dim) // 2)
    cos = functional.pad(angles.cos() * magnitude, still, value=1.0)
    return torch.cat((cos, functional.pad(angles.sin() * magnitude, still)), dim=-1).to(device)


def _longrope_magnitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


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
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return plain / rope.factor * (1 - keep) + plain * keep, factor
