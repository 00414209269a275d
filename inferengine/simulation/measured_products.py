"""Cost models of models that were not calibrated, from the measured times of their matrix products.

`inferengine tune` measures each product of a model on a card, for several numbers of rows. Dispatch chooses kernels by
the same table. Products take most of a step, so a step of a model whose products are in the table is estimated as

    products(tokens) + size * (calibrated(tokens) - products of the calibrated model(tokens))

The bracket is the time of the calibrated model's steps outside of products: norms, activations, draws and gaps between
kernels, minus the kernel starts that overlap with the kernel before. It scales with layers times hidden size (`size`).
Reading KV scales with its bytes, and the attention of prompts with layers, heads and head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferengine.errors import ConfigError
from inferengine.simulation.cost_model import (
    EXPERT_KEYS,
    Curve,
    DeviceProfile,
    Exchange,
    KindCost,
    ModelShape,
    load_profile,
    shape_from_config,
)

CARD = "NVIDIA H200"
CALIBRATED = "h200-llama-3.1-8b"
CALIBRATED_SHAPE = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
HEAD_UNIT = 64  # a head's rows on a card are padded to a multiple of it
BYTES = 2  # of a weight, and of an element of K and V: the tables used here are for 16-bit models


Products = Mapping[tuple[str, int, int], Curve]
"""(rows, seconds) of each measured product x [rows, columns] @ weight [width, columns]^T, by (kind, width, columns).
The kind is LINEAR, GATED (act(gate) * up) or PARTS (with the sum into the residual)."""


class ProductTimes:
    """The time of a model's matrix products, by number of rows."""

    def __init__(self, shape: ModelShape, products: Products) -> None:
        """Raises ConfigError naming a product that was not measured."""
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self._num_layers = shape.num_layers
        self._layer = [
            _times(products, "LINEAR", heads + 2 * kv_heads, hidden),
            _times(products, "PARTS", hidden, heads),
            _times(products, "GATED", 2 * inner, hidden),
            _times(products, "PARTS", hidden, inner),
        ]
        self._head = _times(products, "LINEAR", -(-shape.vocab_size // HEAD_UNIT) * HEAD_UNIT, hidden)

    def seconds(self, rows: float, head_rows: float) -> float:
        """Return the seconds that all layers' products take with `rows` rows, and the head's with `head_rows`."""
        return self._num_layers * sum(_at(times, rows) for times in self._layer) + _at(self._head, head_rows)


def _times(products: Products, kind: str, width: int, columns: int) -> KindCost:
    if not (times := products.get((kind, width, columns))):
        raise ConfigError(
            "config.json",
            f"the product [{width}, {columns}] ({kind.lower()}) was not measured: run `inferengine tune MODEL` on the "
            "card, or calibrate the model without --products",
        )
    return KindCost(times)


def _at(times: KindCost, rows: float) -> float:
    """Return the time for a number of rows: interpolated linearly, and in proportion beyond the last point."""
    last_rows, last_s = times.curve[-1]
    return times.at(rows) if rows <= last_rows else last_s * rows / last_rows


def tuned_profile(name: str, shape: ModelShape, products: Products, max_model_len: int = 0) -> DeviceProfile:
    """Return the profile of a dense 16-bit model on the card on which `products` were measured.

    `max_model_len`: 0 means the calibrated model's. Raises ConfigError if a product was not measured, or if the model
    does not fit on the card.
    """
    known = load_profile(CALIBRATED)
    ours, theirs = ProductTimes(shape, products), ProductTimes(CALIBRATED_SHAPE, products)
    size = shape.num_layers * shape.hidden_size / (CALIBRATED_SHAPE.num_layers * CALIBRATED_SHAPE.hidden_size)
    kv_size = _kv_bytes(shape) / _kv_bytes(CALIBRATED_SHAPE)
    pair_size = _pair_flops(shape) / _pair_flops(CALIBRATED_SHAPE)

    def scaled(kind: KindCost, *, is_prompts: bool) -> KindCost:
        curve = []
        for tokens, seconds in kind.curve:
            head_rows = 1.0 if is_prompts else tokens
            beside = seconds - theirs.seconds(tokens, head_rows)
            curve.append((tokens, ours.seconds(tokens, head_rows) + size * beside))
        kv_token_s = tuple((decodes, seconds * kv_size) for decodes, seconds in kind.kv_token_s)
        return replace(kind, curve=tuple(curve), kv_token_s=kv_token_s, pair_s=kind.pair_s * pair_size)

    cost = known.cost
    launched = None if cost.launched is None else scaled(cost.launched, is_prompts=True)
    exchange = known.exchange
    return replace(
        known,
        name=name,
        cost=replace(
            cost,
            decodes=scaled(cost.decodes, is_prompts=False),
            prompts=scaled(cost.prompts, is_prompts=True),
            launched=launched,
        ),
        num_blocks=_num_blocks(shape, known),
        max_model_len=max_model_len or known.max_model_len,
        exchange=None
        if exchange is None
        else Exchange(2 * shape.num_layers + 1, BYTES * shape.hidden_size, exchange.undivided_s * size),
        source={"method": f"measured products of {CARD}, and what {CALIBRATED} takes beside its own", "model": name},
    )


def _kv_bytes(shape: ModelShape) -> int:
    """Return the bytes of one token's keys and values."""
    return shape.kv_numbers_per_token * BYTES


def _pair_flops(shape: ModelShape) -> int:
    """Return a number in proportion to the operations of the attention between one query and one key."""
    return shape.operations_per_pair


def _weight_bytes(shape: ModelShape) -> int:
    embedding = 0 if shape.tied_embeddings else shape.hidden_size * shape.vocab_size
    return BYTES * (int(shape.num_read_weights(math.inf)) + embedding)


def _num_blocks(shape: ModelShape, known: DeviceProfile) -> int:
    """Return how many KV blocks fit into the memory that the calibrated model's weights and blocks take together."""
    memory = _weight_bytes(CALIBRATED_SHAPE) + known.num_blocks * known.block_size * _kv_bytes(CALIBRATED_SHAPE)
    blocks = (memory - _weight_bytes(shape)) // (known.block_size * _kv_bytes(shape))
    if blocks < 1:
        raise ConfigError("config.json", f"weights of {_weight_bytes(shape) / 1e9:.0f} GB do not fit on one {CARD}")
    return blocks


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model whose products the tables do not hold."""
    if config.get("quantization_config"):
        raise ConfigError("config.json", "the checkpoint is quantized; the tables used here are of 16 bits")
    if any(key in config for key in EXPERT_KEYS):
        raise ConfigError("config.json", "the model is a mixture of experts, whose products are not in the tables")


def profile_of_config(name: str, config: Mapping[str, Any], products: Products) -> DeviceProfile:
    """Return the profile of the model that a config.json describes. Raises ConfigError."""
    check_config(config)
    longest = load_profile(CALIBRATED).max_model_len
    longest = min(int(config.get("max_position_embeddings", longest)), longest)
    return tuned_profile(name, shape_from_config(config), products, longest)
