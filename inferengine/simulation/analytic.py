"""A cost model from a model's shapes and a device's ceilings, where nothing has been measured yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from inferengine.errors import ConfigError
from inferengine.simulation.cost_model import CostModel, linear_cost


class ModelShape(NamedTuple):
    """What of a decoder's configuration decides its cost."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False

    @property
    def num_matmul_weights(self) -> int:
        """Weights that every token is multiplied with (the input embedding is looked up, not multiplied)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.hidden_size * self.vocab_size


class DeviceCeilings(NamedTuple):
    """What a device reaches, not what its data sheet says."""

    memory_bytes_per_s: float
    flops_per_s: float
    step_s: float  # fixed time of a step: launches, scheduling, sampling
    row_s: float = 0.0


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """From a Hugging Face config.json of a Llama-like decoder. Raises ConfigError naming the missing key."""
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError("config.json", f"has no {error.args[0]}") from None


def analytic(
    shape: ModelShape, device: DeviceCeilings, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> CostModel:
    """A cost model from first principles, the roofline (Williams, Waterman and Patterson, 2009): reading the weights
    or multiplying with them, whichever takes longer; reading KV; attention's arithmetic."""
    weights_s = shape.num_matmul_weights * weight_bytes / device.memory_bytes_per_s
    token_s = 2.0 * shape.num_matmul_weights / device.flops_per_s
    kv_token_bytes = 2.0 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_bytes
    return linear_cost(
        device.step_s,
        token_s,
        knee=weights_s / token_s,
        row_s=device.row_s,
        kv_token_s=kv_token_bytes / device.memory_bytes_per_s,
        pair_s=4.0 * shape.num_layers * shape.num_heads * shape.head_dim / device.flops_per_s,
    )
