"""Llama (Touvron et al. 2023; 3.x), and the decoder that the other dense families share with it. What differs between
them are options of DecoderConfig: no family has layers of its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.latent import LatentAttention
from inferengine.layers.layer_inputs import LayerInputGate, LayerInputs
from inferengine.layers.linear import MLP, GatedMLP, Linear
from inferengine.layers.moe import MoeBesideDense, MoeMLP
from inferengine.layers.norm import Norm, RMSNorm, make_norm
from inferengine.models.decoder import DecoderModel, Target, WeightMap, attention_targets, gated_mlp_targets
from inferengine.models.hf_config import ConfigReader, read_rope

SILU = {"silu": "silu"}
GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
GELUS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json: full attention in every layer. A window is refused (by `finish`): no Llama was trained with
    one."""
    return read_decoder(config, (None,) * config.integer("num_hidden_layers"))


class Defaults(NamedTuple):
    """What distinguishes a family's config.json from Llama's: names of keys, and defaults of those that are absent."""

    head_dim: int | None = None  # None: hidden / heads
    eps: str = "rms_norm_eps"  # name of the norms' epsilon
    activations: dict[str, str] = SILU  # those that the family knows, by their names in configs; the default first
    partial: float | None = None  # share of a head that turns; None: always all of it
    interleaved: bool = False  # neighbours turn together
    theta: float = 10_000.0
    attention_bias: bool = False
    tied: bool = False
    rope_keys: tuple[str, ...] = ()  # of the rotation, which the family reads itself


LLAMA = Defaults()


def read_decoder(config: ConfigReader, windows: tuple[int | None, ...], defaults: Defaults = LLAMA) -> DecoderConfig:
    """Read the keys that Llama-like families share."""
    num_layers, num_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    max_position = config.integer("max_position_embeddings", 2048)
    config.expect("hidden_act", *defaults.activations)
    config.expect("activation", "swiglu")  # Falcon 3's name for it
    bias = config.flag("attention_bias", defaults.attention_bias)
    rope = read_rope(
        config,
        head_dim,
        max_position,
        default_theta=defaults.theta,
        partial=defaults.partial,
        interleaved=defaults.interleaved,
        own_keys=defaults.rope_keys,
    )
    if rope.kind == "yarn":  # max_position_embeddings may still be what it was before the context was extended
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    return DecoderConfig(
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number(defaults.eps, 1e-6 if defaults.eps == LLAMA.eps else 1e-5, zero=True),
        windows=windows,
        attention_scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", defaults.tied),
        activation=defaults.activations[config.text("hidden_act", next(iter(defaults.activations)))],
        dtype=config.dtype(),
    )


class LlamaLayer(nn.Module):
    """Attention and feed-forward around a residual stream, as the config arranges them. Llama's own arrangement is
    fused most: a product may be computed with the sum and the norm that follow it."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__()

        def norm(wanted: bool) -> Norm | None:
            return make_norm(ops, config.norm, config.hidden_size, config.norm_eps) if wanted else None

        self.attention_norm = norm(config.pre_norms)
        kind_of_attention = Attention if config.latent is None else LatentAttention
        self.attention: Attention | LatentAttention = kind_of_attention(ops, config, layer)
        self.attention_out_norm = norm(config.post_norms)
        self.mlp_norm = norm(config.pre_norms and config.parallel != "shared")
        self.mlp: GatedMLP | MLP | MoeMLP
        moe = config.moe_of(layer)
        self.beside: MoeBesideDense | None = None
        if moe is None or moe.beside_dense:
            kind, width = GatedMLP if config.gated_mlp else MLP, config.intermediate_size_of(layer)
            self.mlp = kind(ops, config.hidden_size, width, activation=config.activation, bias=config.mlp_bias)
        else:
            self.mlp = MoeMLP(ops, config.hidden_size, moe, config.activation)
        if moe is not None and moe.beside_dense:
            self.beside = MoeBesideDense(ops, config.hidden_size, moe, config.activation, config.norm_eps)
        self.mlp_out_norm = norm(config.post_norms)
        inputs = config.layer_inputs
        self.gate = None if inputs is None else LayerInputGate(ops, inputs, config.hidden_size, config.norm_eps)
        self.output_scale = nn.Parameter(torch.empty(1), requires_grad=False) if config.layer_scales else None
        self.is_plain, self.is_parallel = config.is_plain, bool(config.parallel)
        self.following: tuple[Norm | None] = (None,)  # the next layer's first norm; in a tuple: not a submodule
        self.ops, self.reads_norms = ops, False

    def finish(self) -> None:
        """Make plain attributes of submodules, of which each step looks up ten a layer: torch's way takes 1 us."""
        for module in self.modules():
            vars(module).update(module.named_children())
        # Products in low precision norm and encode their inputs at once: a norm computed before would cost them more.
        self.reads_norms = self.attention.qkv.ops is self.ops and (
            isinstance(self.mlp, GatedMLP) and self.mlp.gate_up.ops is self.ops
        )

    def forward(
        self,
        x: torch.Tensor,
        batch: Batch,
        normed: torch.Tensor | None = None,
        own: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream [T, E] after this layer, in place where the device can. `normed` is x after this
        layer's first norm, where the layer before has computed it. Returned beside it: the same for the next layer.
        `own`: the layer's input [T, size], where the model has such. `kept`: of the last layer, the tokens whose states
        are wanted: what follows attention is computed of them alone."""
        attention, mlp = self.attention, self.mlp
        if self.is_plain:
            mixed = attention.mix(attention.qkv.of_norm(x, self.attention_norm, normed), batch)
            if kept is not None:
                x, mixed = x.index_select(0, kept), mixed.index_select(0, kept)
            x, normed = attention.out.add_to_and_norm(x, mixed, self.mlp_norm)
            if isinstance(mlp, MoeMLP):
                return mlp.add_to_and_norm(x, _input_of(x, self.mlp_norm, normed), self.following[0])
            return mlp.down.add_to_and_norm(x, mlp.hidden(x, self.mlp_norm, normed), self.following[0])
        if self.is_parallel:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            mixed = attention.mix(attention.qkv.of_norm(x, None, normed), batch)
            assert not isinstance(mlp, MoeMLP)  # no family has such a layer
            hidden = mlp.hidden(x, self.mlp_norm, normed if self.mlp_norm is None else None)
            x, _ = self._add(x, attention.out, mixed, self.attention_out_norm, None)
            return self._add(x, mlp.down, hidden, self.mlp_out_norm, None)
        mixed = attention.mix(attention.qkv.of_norm(x, self.attention_norm, normed), batch)
        x, normed = self._add(x, attention.out, mixed, self.attention_out_norm, self.mlp_norm)
        if isinstance(mlp, MoeMLP):
            return mlp.add_to(x, _input_of(x, self.mlp_norm, normed)), None
        hidden = mlp.hidden(x, self.mlp_norm, normed)
        if self.beside is None:
            x, normed = self._add(x, mlp.down, hidden, self.mlp_out_norm, self.following[0])
        else:
            assert self.mlp_out_norm is not None  # of every model with such layers
            x, normed = x.add_(self.mlp_out_norm(self.beside(x, mlp.down(hidden)))), None
        if self.gate is not None and own is not None:
            x = self.gate.add_to(x, own)
        return x if self.output_scale is None else x.mul_(self.output_scale), normed

    def _add(
        self, x: torch.Tensor, linear: Linear, inputs: torch.Tensor, norm: Norm | None, following: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add norm(linear(inputs)) to x, in place. Return it, and its norm by `following` where that is
        computed on the way."""
        if norm is None:
            return linear.add_to(x, inputs), None
        out = linear(inputs)
        if not isinstance(norm, RMSNorm):
            return x.add_(norm(out)), None
        after = None
        if self.reads_norms and isinstance(following, RMSNorm):
            after = following.gain, following.eps
        return x, self.ops.rms_norm_add(out, norm.gain, norm.eps, x, after)


def _input_of(x: torch.Tensor, norm: Norm | None, normed: Any) -> torch.Tensor:
    """Return norm(x), for a block that reads numbers: `normed` may be codes for products in low precision."""
    if isinstance(normed, torch.Tensor):
        return normed
    out: torch.Tensor = x if norm is None else norm(x)
    return out


class Llama(DecoderModel):
    """Token ids of a batch -> residual stream; `logits` for the rows of it that draw."""

    norm: Norm

    def __init__(self, ops: Ops, config: DecoderConfig) -> None:
        super().__init__()
        self.can_keep = config.is_plain and config.layer_inputs is None and not config.states
        self.can_be_captured = config.is_causal  # else attention needs to know where rows begin
        self.embed = TokenEmbedding(
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_scale,
            rounds_scale=config.rounds_embedding_scale,
        )
        self.unused_positions = config.learned_positions
        if self.unused_positions is not None:
            self.positions = TokenEmbedding(config.max_position + self.unused_positions, config.hidden_size)
        self.inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self.inputs = LayerInputs(ops, config.layer_inputs, config.hidden_size, config.num_layers, config.norm_eps)
        layers = [LlamaLayer(ops, config, layer) for layer in range(config.num_layers)]
        # Behind a layer's last sum nothing may change the stream.
        if config.is_plain or (config.post_norms and config.layer_inputs is None and not config.layer_scales):
            for layer, after in pairwise(layers):
                layer.following = (after.attention_norm,)
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(ops, config.norm, config.hidden_size, config.norm_eps)
        self.head = Head(
            ops,
            config.vocab_size,
            config.hidden_size,
            tied=self.embed if config.tied_embeddings else None,
            softcap=config.logits_softcap,
            scale=config.logits_scale,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, E] of ids [T]."""
        x: torch.Tensor = self.embed(batch.input_ids)
        if self.unused_positions is not None:
            x.add_(self.positions(batch.positions + self.unused_positions))
        normed, kept = None, batch.kept_tokens
        if self.inputs is not None:
            for layer, own in zip(self.layers, self.inputs(batch.input_ids, x), strict=False):  # warm-up has fewer
                x, normed = layer(x, batch, normed, own)
            return x
        last = None if kept is None else self.layers[-1]
        for layer in self.layers:
            if layer is last:
                batch.checksum = x.sum(dtype=torch.float32)
                x, normed = layer(x, batch, normed, kept=kept)
            else:
                x, normed = layer(x, batch, normed)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of rows [N, E] of the residual stream."""
        return self.head.of_norm(x, self.norm)


def build(ops: Ops, config: DecoderConfig) -> Llama:
    """Build the model on torch's default device, without weights."""
    return Llama(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return decoder_weight_map()


def decoder_weight_map(
    *, root: str = "model", layer: str = "layers.{}", norms: dict[str, str] | None = None, plus_one: bool = False
) -> WeightMap:
    """Say where the tensors of a checkpoint with Llama's names go. `norms` are names of norms within a layer, beside
    Llama's or in place of them; `plus_one`: all norms multiply by 1 + w."""
    here, there = f"{root}.{layer}", "layers.{}"
    names = {**NORMS, **(norms or {})}
    places = {f"{here}.{name}": f"{there}.{place}" for name, place in names.items()} | {f"{root}.norm": "norm"}
    return WeightMap(
        {
            f"{root}.embed_tokens.weight": Target("embed.weight"),
            **attention_targets(f"{here}.self_attn", f"{there}.attention"),
            **gated_mlp_targets(f"{here}.mlp", f"{there}.mlp"),
            **{
                f"{name}.{kind}": Target(f"{place}.{kind}", plus_one=plus_one and kind == "weight")
                for name, place in places.items()
                for kind in ("weight", "bias")
            },
            "lm_head.weight": Target("head.weight"),
        },
        ignored=(r".*\.rotary_emb\.inv_freq",),
    )


NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
