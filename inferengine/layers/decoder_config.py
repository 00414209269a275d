"""DecoderConfig: the shapes and constants of a decoder-only model, typed. The family modules read it from
config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from inferengine.kernels.experts import Gating
from inferengine.layers.rotary import RopeConfig


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of feed-forward blocks."""

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int  # of one expert
    renormalized: bool = True  # the weights of a token's experts sum to 1
    shared_size: int = 0  # of a block that all tokens take; 0: there is none
    gated_shared: bool = False  # a score of its own weighs the shared block
    router_bias: bool = False
    bias: bool = False  # of the experts' projections
    interleaved: bool = False  # a checkpoint has the rows of gate and up in turn
    gating: Gating | None = None  # None: the model's activation
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary feed-forward block
    held: tuple[int, int] | None = None  # (first, number) of the experts that this rank holds; None: all
    sigmoid: bool = False  # scores are sigmoids of the logits, not their softmax
    groups: tuple[int, int] | None = None  # (number, kept): experts of a token's best groups alone may be chosen
    factor: float = 1.0  # of the experts' weights
    corrected: bool = False  # a term for each expert is added to the scores that are compared
    beside_dense: bool = False  # with an ordinary block beside them, each with norms of its own (Gemma 4)
    scaled: bool = False  # each expert has a factor of its weights, of the checkpoint

    @property
    def num_held(self) -> int:
        """Return the number of experts whose weights are here."""
        return self.num_experts if self.held is None else self.held[1]


@dataclass(frozen=True)
class LayerInputConfig:
    """A second embedding of each token, with a part for each layer, which the layer adds through a gate (Gemma 3n)."""

    vocab_size: int
    size: int  # numbers of a token for one layer


class KVShape(NamedTuple):
    """What the cache holds of a token in one layer, for keys as for values."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (DeepSeek-V2, 2024): the keys and values of all heads are products of one short vector of each
    token, its latent. The cache holds the latent and one rotated key for all heads."""

    rank: int  # numbers of a latent
    rotary_dim: int  # numbers of the key that is rotated
    plain_dim: int  # numbers of a head's key that are made of the latent
    value_dim: int  # numbers of a head's value
    query_rank: int | None = None  # numbers of what queries are made of; None: of the hidden state

    @property
    def query_dim(self) -> int:
        """Return the numbers of a head's query: first those for the plain part of a key, then the rotated ones."""
        return self.plain_dim + self.rotary_dim


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of each running request beside keys and values: of a convolution or a recurrence."""

    shape: tuple[int, ...]
    is_float32: bool  # whatever the number format of the model's arithmetic


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
    embedding_scale: float | None = None  # of token embeddings
    rounds_embedding_scale: bool = False  # to the weights' type, as Gemma's are trained
    logits_scale: float | None = None
    norm: str = "rms"  # rms | layer (with biases) | layer_without_bias
    pre_norms: bool = True  # each block's input is normed
    post_norms: bool = False  # each block's output is normed before it joins the residual stream
    parallel: str = ""  # both blocks read the same residual stream, through "shared" or "separate" norms
    gated_mlp: bool = True
    wide_qk_norm: str = ""  # all_heads: RMS norm over all of them; each_head, each_head_by_itself: layer norm of each
    qkv_interleaved: bool = False  # stored head by head, each with its query, key and value (GPT-NeoX)
    query_scaling: tuple[float, int] | None = None  # (beta, original context): 1 + beta * log(1 + position // context)
    learned_positions: int | None = None  # a table of positions, beginning with so many rows that no position has
    token_types: int = 0  # rows of a table of which every token has the first added (BERT)
    moe: MoeConfig | None = None
    sinks: bool = False  # each head has a score that takes its share of attention and stands for no key
    no_rope_layers: tuple[int, ...] = ()  # layers without rotation
    full_kv: KVShape | None = None  # of layers with full attention, where it differs; the others' is above (Gemma 4)
    full_keys_as_values: bool = False  # layers with full attention have no values but their keys, as they are projected
    value_norm: bool = False  # values are normed, without a gain
    kv_sources: tuple[int, ...] = ()  # by layer: whose keys and values it reads, its own or an earlier one's; (): own
    intermediate_sizes: tuple[int, ...] = ()  # by layer, where they differ
    layer_inputs: LayerInputConfig | None = None
    layer_scales: bool = False  # a number of the checkpoint multiplies the residual stream behind each layer
    latent: LatentConfig | None = None  # then one KV head, and `head_dim` is what the cache holds of a token
    unused_layers: int = 0  # layers behind the last that checkpoints hold, and that this engine leaves out
    dtype: str = "float32"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    implementation: str = "native"  # whose layers compute the model: native | transformers
    states: tuple[StateTensor, ...] = ()  # that no block of the KV cache holds
    is_causal: bool = True  # False: tokens see later ones too; the model makes embeddings alone
    scores: bool = False  # a head makes one number of the first token's state, for a pair of texts, and no embedding

    @property
    def is_plain(self) -> bool:
        """Return whether a layer is Llama's: two gated blocks one after the other, RMS norms before them."""
        serial = self.pre_norms and not self.post_norms and not self.parallel
        return serial and self.gated_mlp and self.norm == "rms"

    @cached_property
    def group_windows(self) -> tuple[int | None, ...]:
        """Windows of the KV groups: None for full attention first, then each sliding window once."""
        sliding = sorted({window for window in self.windows if window is not None})
        return ((None,) if None in self.windows else ()) + tuple(sliding)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotation of a layer; None: it has none."""
        if layer in self.no_rope_layers:
            return None
        if self.windows[layer] is not None and self.local_rope is not None:
            return self.local_rope
        return self.rope

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return a layer's mixture of experts; None: it has an ordinary feed-forward block."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def intermediate_size_of(self, layer: int) -> int:
        """Return the inner width of a layer's ordinary feed-forward block."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def feed_forward_width(self, layer: int) -> int:
        """Return the inner width of what a token passes in a layer: of an ordinary block, or of its experts and the
        shared block together."""
        moe, dense = self.moe_of(layer), self.intermediate_size_of(layer)
        if moe is None:
            return dense
        return moe.num_chosen * moe.intermediate_size + moe.shared_size + (dense if moe.beside_dense else 0)

    @property
    def num_expert_weights(self) -> int:
        """Return the number of weights of all experts that this rank holds, shared blocks aside."""
        if self.moe is None:
            return 0
        layers = self.num_layers - len(self.moe.dense_layers)
        return layers * self.moe.num_held * 3 * self.moe.intermediate_size * self.hidden_size

    @property
    def num_layer_input_weights(self) -> int:
        """Return the number of weights of the table of the layers' inputs, of which a step reads a few rows."""
        if self.layer_inputs is None:
            return 0
        return self.layer_inputs.vocab_size * self.num_layers * self.layer_inputs.size

    @property
    def chosen_share(self) -> float:
        """Return the share of its experts that a token passes; 1 without experts."""
        return 1.0 if self.moe is None else self.moe.num_chosen / self.moe.num_experts

    def layers_of(self, group: int) -> int:
        """Return the number of layers in a KV group."""
        return sum(window == self.group_windows[group] for window in self.windows)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @cached_property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers that have a cache: all but those that read an earlier one's. In a group all are of one shape."""
        return tuple(layer for layer in range(len(self.windows)) if self.kv_source(layer) == layer)

    def caches_of(self, group: int) -> int:
        """Return the number of layers in a KV group that have a cache."""
        return sum(self.windows[layer] == self.group_windows[group] for layer in self.cached_layers)

    def kv_shape(self, window: int | None) -> KVShape:
        """Return the shape of keys and values of layers with this window."""
        if window is None and self.full_kv is not None:
            return self.full_kv
        return KVShape(self.num_kv_heads, self.head_dim)

    def has_keys_as_values(self, layer: int) -> bool:
        """Return whether a layer's keys, as they are projected, are its values too."""
        return self.full_keys_as_values and self.windows[layer] is None

    def qkv_parts(self, layer: int) -> list[int]:
        """Return the outputs of a layer's projections of queries, keys and values, of those that it has."""
        num_kv_heads, head_dim = self.kv_shape(self.windows[layer])
        keys = num_kv_heads * head_dim
        queries = self.num_heads * head_dim
        if self.kv_source(layer) != layer:
            return [queries]
        return [queries, keys] if self.has_keys_as_values(layer) else [queries, keys, keys]

    @property
    def kv_planes(self) -> int:
        """Return the tensors that the cache holds of each layer: keys and values, or latents alone."""
        return 2 if self.latent is None else 1

    @property
    def mixed_dim(self) -> int:
        """Return the numbers that attention mixes for each head: those of a value, or of a latent."""
        return self.head_dim if self.latent is None else self.latent.rank

    def kv_bytes_per_token(self, group: int, item_bytes: int) -> int:
        """Return the bytes of what the cache holds of one token in one group."""
        num_kv_heads, head_dim = self.kv_shape(self.group_windows[group])
        return self.kv_planes * self.caches_of(group) * num_kv_heads * head_dim * item_bytes

    def state_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the states of one running request."""
        return sum(prod(state.shape) * (4 if state.is_float32 else item_bytes) for state in self.states)
