"""Chooses the kernel, and its configuration, for products with experts' weights: as measured, else by rules.

The rules depend on the weight's number format and on the number of pairs of token and expert. `pairs` rules apply up to
a number of pairs; `grouped` rules up to an average number of pairs for each expert. The first rule that applies is
taken. They were measured on an H200 with the shapes of Qwen3-30B-A3B (16-bit numbers, FP8) and GPT-OSS-20B (MXFP4),
those of FragmentConfig on an H100.

What was measured for the very shape on the very card comes first, by the number of tokens (`experts_choices`). How the
tokens are spread over the experts is known on the device alone, so one choice serves all of them. Deterministic mode
has a single configuration, so that a row's sum is the same at every number of rows. It and fp32 are never measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inferengine.kernels.cuda.dispatch import MeasuredChoices


class PairConfig(NamedTuple):
    """Configuration of moe/pairs.py: outputs and columns of a tile. A gated product's output has two weight rows."""

    block_n: int
    block_k: int
    num_warps: int


class GroupedConfig(NamedTuple):
    """Configuration of moe/grouped.py: pairs, weight rows and columns of a tile.

    `weight_left`: the weight is the tensor cores' left operand. `tma`: weights that are plain numbers are loaded by the
    tensor memory accelerator.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    weight_left: bool = False
    tma: bool = False


class FragmentConfig(NamedTuple):
    """Configuration of moe/fragments.py: blocks of eight pairs of a program, tiles of 16 weight rows of a warp, warps
    that take different tiles, warps that take different columns, slices that each warp has on their way, and the most
    registers of a thread (None: as many as the compiler likes)."""

    pair_blocks: int
    tiles: int
    row_warps: int
    column_warps: int
    ahead: int
    registers: int | None = 128


class MoeRule(NamedTuple):
    """A configuration for the gated product and one for the other, and up to where they apply.

    `most` is a number of pairs for a PairConfig, or a GroupedConfig whose blocks are single pairs; otherwise it is an
    average number of pairs for each expert.
    """

    most: float
    gate_up: Any
    down: Any


class Rules(NamedTuple):
    """The rules for one number format."""

    pairs: tuple[MoeRule, ...]
    grouped: tuple[MoeRule, ...]


class ExpertsKey(NamedTuple):
    """What a measurement of experts' products is of, but for the number of tokens: the weight's format, the experts of
    the layer and those that this device holds, how many each token chooses, and one expert's gate and up rows and their
    columns."""

    format: str
    num_experts: int
    num_held: int
    num_chosen: int
    rows: int
    columns: int


class ExpertsChoice(NamedTuple):
    """The configurations of the gated product and of the other, and whether pairs are grouped by expert."""

    is_grouped: bool
    gate_up: Any
    down: Any


experts_choices: MeasuredChoices[ExpertsKey, ExpertsChoice] = MeasuredChoices()

MANY = float("inf")
SINGLE = GroupedConfig(16, 32, 128, 4, 4, True)  # in place of a PairConfig that does not suit the weight
NOT_FRAGMENTS = GroupedConfig(16, 128, 128, 4, 4, True)  # in place of a FragmentConfig: fp16, columns out of line

_SQUARE = GroupedConfig(64, 128, 64, 4, 4, False, True)
_WIDE = GroupedConfig(128, 256, 64, 8, 3, False, True)
_UNEVEN = GroupedConfig(
    32, 128, 64, 4, 5, True, True
)  # 2 % behind 16 rows a tile where experts are chosen equally often
_NUMBERS = Rules(
    (MoeRule(32, PairConfig(4, 1024, 4), PairConfig(8, 1024, 4)),),
    (
        MoeRule(4, GroupedConfig(16, 64, 128, 4, 4, True, True), GroupedConfig(16, 128, 64, 4, 5, True, True)),
        MoeRule(24, _UNEVEN, _UNEVEN),
        MoeRule(96, _SQUARE, _SQUARE),
        MoeRule(MANY, _WIDE, _WIDE),
    ),
)
_FP8_FEW = GroupedConfig(16, 64, 128, 4, 4, True)
_FP8_SOME = GroupedConfig(32, 128, 128, 4, 3, True)
_FP8_MORE = GroupedConfig(64, 128, 128, 4, 3, True)
_FP8_MANY = GroupedConfig(128, 64, 128, 4, 3, True)
_FP8 = Rules(
    (MoeRule(32, PairConfig(8, 1024, 4), GroupedConfig(16, 32, 128, 2, 5, True)),),
    (
        MoeRule(12, _FP8_FEW, _FP8_FEW),
        MoeRule(24, _FP8_SOME, _FP8_SOME),
        MoeRule(96, _FP8_MORE, _FP8_MORE),
        MoeRule(MANY, _FP8_MANY, _FP8_MANY),
    ),
)
_MX_SOME = NOT_FRAGMENTS
_MX_MORE = GroupedConfig(32, 128, 128, 4, 3, True)
_MX_SQUARE = GroupedConfig(64, 128, 128, 4, 3, True)
_MX_FEW = FragmentConfig(1, 2, 2, 2, 1, 96)
_MXFP4 = Rules(
    (MoeRule(8, GroupedConfig(16, 32, 256, 2, 4, True), GroupedConfig(16, 16, 256, 1, 4, True)),),
    (
        MoeRule(4, _MX_FEW, _MX_FEW),
        MoeRule(12, _MX_SOME, _MX_SOME),
        MoeRule(24, _MX_MORE, _MX_MORE),
        MoeRule(96, _MX_SQUARE, _MX_SQUARE),
        MoeRule(MANY, GroupedConfig(128, 128, 128, 8, 3, True), GroupedConfig(128, 128, 128, 4, 3, True)),
    ),
)
# For GGUF files. The tiles were not chosen by measurement: they are dispatch.py's for dense products of these formats.
_BLOCKS = Rules(
    (MoeRule(32, PairConfig(16, 32, 4), PairConfig(16, 32, 4)),),
    (
        MoeRule(12, GroupedConfig(16, 64, 32, 4, 2), GroupedConfig(16, 64, 32, 4, 2)),
        MoeRule(24, GroupedConfig(32, 64, 32, 4, 2), GroupedConfig(32, 64, 32, 4, 2)),
        MoeRule(MANY, GroupedConfig(64, 128, 32, 8, 2), GroupedConfig(64, 128, 32, 8, 2)),
    ),
)
_FP32 = Rules(
    (MoeRule(64, PairConfig(4, 512, 4), PairConfig(8, 512, 4)),),
    (MoeRule(24, GroupedConfig(16, 64, 32, 4, 3), GroupedConfig(16, 64, 32, 4, 3)),
     MoeRule(MANY, GroupedConfig(64, 64, 32, 4, 3), GroupedConfig(64, 64, 32, 4, 3))),
)  # fmt: skip
_EXACT = GroupedConfig(64, 64, 64, 4, 4)
_MX_EXACT = GroupedConfig(64, 64, 128, 4, 3)
_BLOCKS_EXACT = GroupedConfig(16, 64, 32, 4, 2)
_FP32_EXACT = GroupedConfig(64, 64, 32, 4, 3)

RULES = {"numbers": _NUMBERS, "fp8": _FP8, "mxfp4": _MXFP4, "blocks": _BLOCKS, "fp32": _FP32}
EXACT = {
    name: Rules((), (MoeRule(MANY, config, config),))
    for name, config in (
        ("numbers", _EXACT), ("fp8", _EXACT), ("mxfp4", _MX_EXACT), ("blocks", _BLOCKS_EXACT), ("fp32", _FP32_EXACT)
    )
}  # fmt: skip


def token_classes(num_experts: int, num_chosen: int) -> tuple[int, ...]:
    """Return numbers of tokens that together launch every kernel of these rules and of what was measured, whatever the
    weights' format."""
    numbers: set[int] = set(experts_choices.rows())
    for rules in RULES.values():
        numbers.update(int(rule.most) // num_chosen for rule in rules.pairs)
        numbers.update(int(rule.most * num_experts) // num_chosen for rule in rules.grouped if rule.most < MANY)
    return tuple(sorted({count for number in numbers for count in (number, number + 1)} - {0}))


def choose(operands: str, key: ExpertsKey, num_tokens: int, *, deterministic: bool = False) -> ExpertsChoice:
    """Return how the products of `num_tokens` tokens are computed, for a weight of `operands` (a key of RULES)."""
    if not deterministic and operands != "fp32":
        measured = experts_choices.find(key, num_tokens)
        if measured is not None:
            return measured
    return rule_choice(operands, num_tokens * key.num_chosen, key.num_experts, deterministic=deterministic)


def rule_choice(operands: str, num_pairs: int, num_experts: int, *, deterministic: bool = False) -> ExpertsChoice:
    """Return what the rules say, whatever was measured."""
    rule, is_grouped = configurations(operands, num_pairs, num_experts, deterministic=deterministic)
    return ExpertsChoice(is_grouped, rule.gate_up, rule.down)


def configurations(
    operands: str, num_pairs: int, num_experts: int, *, deterministic: bool = False
) -> tuple[MoeRule, bool]:
    """Return the rule for a weight of `operands` (a key of RULES), and whether pairs are grouped by expert."""
    rules = (EXACT if deterministic else RULES)[operands]
    for rule in rules.pairs:
        if num_pairs <= rule.most:
            return rule, False
    return next(rule for rule in rules.grouped if num_pairs <= rule.most * num_experts), True
