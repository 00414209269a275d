"""DecoderConfig: the shapes and constants of a decoder-only model, typed. The family modules read it from
config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from inferengine.layers.rotary import RopeConfig


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of one checkpoint. Lengths in tokens; `windows[layer]` None means full attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    windows: tuple[int | None, ...]
    attention_scale: float
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None  # of sliding layers, where they differ (Gemma 3)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    activation: str = "silu"
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float | None = None
    dtype: str = "float32"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()

    @cached_property
    def group_windows(self) -> tuple[int | None, ...]:
        """Windows of the KV groups: None for full attention first, then each sliding window once."""
        sliding = sorted({window for window in self.windows if window is not None})
        return ((None,) if None in self.windows else ()) + tuple(sliding)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotation of a layer; None: it has none."""
        if self.windows[layer] is not None and self.local_rope is not None:
            return self.local_rope
        return self.rope

    def layers_of(self, group: int) -> int:
        """Return the number of layers in a KV group."""
        return sum(window == self.group_windows[group] for window in self.windows)

    def kv_bytes_per_token(self, group: int, item_bytes: int) -> int:
        """Return the bytes of K and V of one token in one group."""
        return 2 * self.layers_of(group) * self.num_kv_heads * self.head_dim * item_bytes
