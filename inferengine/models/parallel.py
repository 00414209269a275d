"""Divides a model that is still on `meta` among ranks: says of each parameter what this rank holds, before loading, and
exchanges results, after loading. Pads the vocabulary of one that is not divided. No family knows of it; it serves all
that are built of the shared decoder."""

from __future__ import annotations

from torch import nn

from inferengine.errors import ConfigError
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.latent import LatentAttention
from inferengine.layers.linear import MLP, GatedMLP, Linear
from inferengine.layers.moe import ExpertLinear, MoeMLP
from inferengine.layers.norm import HeadNorm
from inferengine.layers.parallel import (
    KEY,
    Communicator,
    Cut,
    DimensionRange,
    LinearPart,
    ParallelRMSNorm,
    Shard,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    summed,
    vocabulary_rows,
)
from inferengine.models.decoder import DecoderModel
from inferengine.models.llama import Llama


def divide(model: DecoderModel, config: DecoderConfig, shard: Shard, communicator: Communicator | None = None) -> None:
    """Prepare `model`, built of `shard.divide(config)`, for being loaded with this rank's part. `config` is the whole
    model's. Without a communicator it can be measured and loaded but not run. Raises ConfigError."""
    if shard.size == 1:
        return
    if not isinstance(model, Llama):
        raise ConfigError(KEY, f"{config.model_type} is not built of the shared decoder: it runs on one device")
    width = shard.width(config)
    widths = {
        id(layer.mlp): shard.width_of(config.intermediate_size_of(index)) for index, layer in enumerate(model.layers)
    }
    mixtures = [module for module in model.modules() if isinstance(module, MoeMLP)]
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.held, kv_heads = shard.heads(config, module.window)
            queries, keys = (span.times(module.head_dim) for span in (module.held, kv_heads))
            parts = (queries, keys, keys)[: len(module.qkv.parts)]
            module.qkv.held = LinearPart(parts, is_interleaved=config.qkv_interleaved)
            module.out.held = LinearPart(inputs=queries)
            if config.wide_qk_norm == "all_heads":
                module.q_wide = ParallelRMSNorm(queries, config.norm_eps, communicator)
                module.k_wide = ParallelRMSNorm(keys, config.norm_eps, communicator)
            elif config.wide_qk_norm:
                for norm, span in zip((module.q_wide, module.k_wide), shard.heads(config), strict=True):
                    assert isinstance(norm, HeadNorm)  # of each head
                    norm.held = span
        elif isinstance(module, LatentAttention):
            _divide_latent(module, config, shard.heads(config)[0])
        elif isinstance(module, GatedMLP):
            width = widths.get(id(module), width)
            module.gate_up.held, module.down.held = LinearPart((width, width)), LinearPart(inputs=width)
        elif isinstance(module, MLP):
            module.up.held, module.down.held = LinearPart((width,)), LinearPart(inputs=width)
    for mixture in mixtures:
        assert config.moe is not None
        mixture.gate_up.held = mixture.down.held = shard.experts(config.moe)
        mixture.communicator = communicator
        if mixture.shared is not None:
            width = shard.width_of(config.moe.shared_size)
            mixture.shared.gate_up.held = LinearPart((width, width))
            mixture.shared.down.held = LinearPart(inputs=width)
    rows, tokens, tied = shard.vocabulary_rows(config), shard.vocabulary(config), config.tied_embeddings
    embed = VocabularyParallelEmbedding(model.embed, rows, tokens, communicator)
    model.head = VocabularyParallelHead(
        model.head, rows, tokens, config.hidden_size, embed if tied else None, communicator
    )
    model.embed = embed


def pad_vocabulary(model: DecoderModel) -> None:
    """Give the head of `model`, and the embedding that it is tied to, rows up to a multiple of VOCABULARY_UNIT, for a
    device whose products are faster so. Loading fills them with zeros, and no logit of theirs leaves the head. Before
    loading, and after `quantize`: a head that is stored in codes keeps its rows. A divided head is padded already."""
    head = getattr(model, "head", None)
    if isinstance(head, Head) and not isinstance(head, VocabularyParallelHead):
        head.pad(vocabulary_rows(head.vocab_size))


def _divide_latent(attention: LatentAttention, config: DecoderConfig, heads: DimensionRange) -> None:
    """Divide latent attention: every rank computes the latents, and the queries, keys and values of its own heads."""
    latent = config.latent
    assert latent is not None  # what it is built of
    queries = heads.times(latent.query_dim)
    cached = latent.rank + latent.rotary_dim
    if attention.query_up is None:
        attention.qkv.held = LinearPart((queries, DimensionRange(0, cached, cached)))
    else:
        attention.query_up.held = LinearPart((queries,))
    attention.up.held = LinearPart((heads.times(latent.plain_dim + latent.value_dim),))
    attention.out.held = LinearPart(inputs=heads.times(latent.value_dim))


def exchange(model: nn.Module, communicator: Communicator) -> None:
    """Sum the products of divided inputs over the ranks. After loading, and after adapters have been given room: what
    they add is summed with the products. A mixture of experts sums its shared block with its experts."""
    summed_elsewhere = {
        id(module.shared.down) for module in model.modules() if isinstance(module, MoeMLP) and module.shared is not None
    }
    for module in model.modules():
        if not isinstance(module, Linear) or id(module) in summed_elsewhere:
            continue
        if module.held is not None and module.held.inputs is not None:
            module.ops = summed(module.ops, communicator)


def cut_of(model: nn.Module, parameter: str, part: int | None) -> Cut | None:
    """Return what this rank takes of the tensor for a parameter, or for one part of it. None: all of it."""
    owner_name, _, kind = parameter.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(owner, Linear):
        return None if owner.held is None else owner.held.cut(part, is_bias=kind == "bias")
    if isinstance(owner, ExpertLinear):  # a tensor of one expert is that expert's own, or another rank's
        return None if owner.held is None or part is not None else Cut(0, (owner.held,), owner.held.whole)
    if isinstance(owner, Attention) and kind == "sinks" and owner.held is not None:
        return Cut(0, (owner.held,), owner.held.whole)
    if isinstance(owner, VocabularyParallelEmbedding | VocabularyParallelHead | ParallelRMSNorm):
        return Cut(0, (owner.span,), owner.span.whole)
    if isinstance(owner, TokenEmbedding | Head):
        num_tokens = owner.vocab_size
        is_padded = owner.weight is not None and owner.weight.shape[0] > num_tokens
        return Cut(0, (DimensionRange(0, num_tokens, num_tokens),), num_tokens) if is_padded else None
    if isinstance(owner, HeadNorm) and owner.held is not None and len(owner.weight.shape) == 2:
        return Cut(0, (owner.held,), owner.held.whole)
    return None
