"""Which configurations of experts' products are tried, at which numbers of tokens, with which routings.

A case is a routing: tokens spread evenly over the experts, as routers of random weights do it, or skewed, an expert's
popularity falling as 1 / rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from inferengine.kernels.cuda.moe.configurations import (
    RULES,
    ExpertsChoice,
    ExpertsKey,
    FragmentConfig,
    GroupedConfig,
    PairConfig,
    rule_choice,
)

EVEN, SKEWED = "even", "skewed"
STAGES = ((64,), (1, 16), (256, 8), (32, 128), (1024, 4096))
OTHERS = (4, 2, 24, 96, 48, 192, 512, 2048, 384, 320, 448, 768, 1536, 3072, 6144, 8192)
MOST_PAIRS_APART = 512  # of token and expert, up to which pairs by themselves are tried
MOST_FRAGMENT_PAIRS = 16  # of an expert on average, up to which codes straight from registers are tried
MORE: dict[str, tuple[Any, ...]] = {  # than the rules name
    "numbers": (
        PairConfig(4, 512, 4),
        PairConfig(8, 512, 4),
        GroupedConfig(16, 64, 64, 4, 6, True, True),
        GroupedConfig(32, 64, 128, 4, 4, True, True),
        GroupedConfig(64, 64, 64, 4, 6, False, True),
        GroupedConfig(128, 128, 64, 8, 3, False, True),
    ),
    "fp8": (PairConfig(4, 1024, 4), GroupedConfig(16, 128, 128, 4, 4, True), GroupedConfig(32, 64, 128, 4, 4, True)),
    "mxfp4": (
        GroupedConfig(16, 64, 128, 4, 4, True),
        GroupedConfig(16, 128, 128, 4, 3, True),
        GroupedConfig(32, 64, 128, 4, 4, True),
        FragmentConfig(1, 2, 2, 2, 2, None),
        FragmentConfig(1, 1, 2, 4, 2, 96),
        FragmentConfig(2, 2, 4, 1, 1, 128),
        FragmentConfig(2, 2, 4, 1, 2, None),
    ),
}


class TunedExperts(NamedTuple):
    """The products of a model's mixtures of one shape. `operands`: a key of configurations.RULES; `uses`: how many
    layers; `last_row`: the most tokens that are measured."""

    key: ExpertsKey
    operands: str
    uses: int
    last_row: int

    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of tokens at which variations are tried."""
        return tuple(tuple(rows for rows in stage if rows <= self.last_row) for stage in STAGES)

    def others(self) -> tuple[int, ...]:
        """Return the other numbers of tokens that are measured."""
        return tuple(rows for rows in OTHERS if rows <= self.last_row)

    def cases(self, rows: int) -> tuple[str, ...]:
        """Return the routings: of one token they do not differ."""
        return (EVEN,) if rows == 1 else (EVEN, SKEWED)

    def rule(self, rows: int) -> ExpertsChoice:
        """Return the choice without a measurement."""
        return rule_choice(self.operands, rows * self.key.num_chosen, self.key.num_experts)

    def variations(self, rows: int, choice: ExpertsChoice) -> Iterator[ExpertsChoice]:
        """Return the choices with another configuration of one product, and those that group pairs where this does not,
        or the other way around."""
        for config in self._configurations(rows, is_gate_up=True, is_grouped=choice.is_grouped):
            if config != choice.gate_up:
                yield choice._replace(gate_up=config)
        for config in self._configurations(rows, is_gate_up=False, is_grouped=choice.is_grouped):
            if config != choice.down:
                yield choice._replace(down=config)
        num_pairs = rows * self.key.num_chosen
        if choice.is_grouped and num_pairs <= MOST_PAIRS_APART:
            for rule in RULES[self.operands].pairs:
                yield ExpertsChoice(False, rule.gate_up, rule.down)
        elif not choice.is_grouped:
            grouped = RULES[self.operands].grouped
            rule = next(each for each in grouped if num_pairs <= each.most * self.key.num_experts)
            yield ExpertsChoice(True, rule.gate_up, rule.down)

    def read_bytes(self, rows: int) -> float:
        """Return the bytes of weights that one layer reads where tokens are spread evenly."""
        key = self.key
        missed = (1 - key.num_chosen / key.num_experts) ** rows
        item_bytes = {"16-bit": 2.0, "mxfp4": 0.53}.get(key.format, 0.56 if "int4" in key.format else 1.0)
        return key.num_held * (1 - missed) * 1.5 * key.rows * key.columns * item_bytes

    def operations(self, rows: int) -> float:
        """Return the multiplications and additions of one layer."""
        held = self.key.num_held / self.key.num_experts
        return 2 * rows * self.key.num_chosen * held * 1.5 * self.key.rows * self.key.columns

    def _configurations(self, rows: int, *, is_gate_up: bool, is_grouped: bool) -> list[Any]:
        """The configurations for one product: of pairs by themselves those of the rules, vector units and codes from
        registers, else those whose tiles hold about as many pairs as an expert has."""
        rules, more = RULES[self.operands], MORE.get(self.operands, ())
        found = [rule.gate_up if is_gate_up else rule.down for rule in rules.grouped]
        if not is_grouped:
            named = [config for rule in rules.pairs for config in (rule.gate_up, rule.down)]
            single = [each for each in (*found, *more) if isinstance(each, FragmentConfig) and each.pair_blocks == 1]
            return list(dict.fromkeys((*named, *(each for each in more if isinstance(each, PairConfig)), *single)))
        return [each for each in dict.fromkeys((*found, *more)) if self._suits(each, rows)]

    def _suits(self, config: Any, rows: int) -> bool:
        """Return whether to try a configuration for pairs that are grouped by expert."""
        pairs = rows * self.key.num_chosen / self.key.num_experts
        if isinstance(config, FragmentConfig):
            return pairs <= MOST_FRAGMENT_PAIRS
        return isinstance(config, GroupedConfig) and min(pairs, 128) / 8 <= config.block_m <= max(32, 8 * pairs)
