"""BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2019): encoders that make
embeddings or, with a head for it, the score of a pair of texts. Tokens see each other both ways, positions are learned,
and each block's sum is normed."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.linear import MLP
from inferengine.layers.norm import LayerNorm
from inferengine.models.decoder import DecoderModel, Target, WeightMap
from inferengine.models.hf_config import ConfigReader, refused

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
KINDS = ("weight", "bias")
MODEL_TYPES = ("bert", "roberta", "xlm-roberta")
UNREAD = (  # of training, of a head, of a pooler that no code has, and of sentence-transformers
    "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "tie_word_embeddings",
    "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "sbert_ce_default_activation_function",
)  # fmt: skip
LAYERS = {
    "attention.self.query": ("attention.qkv", 0),
    "attention.self.key": ("attention.qkv", 1),
    "attention.self.value": ("attention.qkv", 2),
    "attention.output.dense": ("attention.out", None),
    "attention.output.LayerNorm": ("attention_norm", None),
    "intermediate.dense": ("mlp.up", None),
    "output.dense": ("mlp.down", None),
    "output.LayerNorm": ("mlp_norm", None),
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    hidden_size, num_heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    num_layers, model_type = config.integer("num_hidden_layers", 12), config.text("model_type")
    if model_type not in MODEL_TYPES:
        raise refused(f"{config.where}: model_type = {model_type!r} is none of {', '.join(MODEL_TYPES)}")
    if hidden_size % num_heads:
        raise refused(f"{config.where}: hidden_size does not divide among num_attention_heads = {num_heads}")
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("hidden_act", *ACTIVATIONS)
    for name in UNREAD:
        config.value(name)
    token_types, scores = config.integer("type_vocab_size", 2), _scores(config)
    unused, positions = _unused_positions(config, model_type), config.integer("max_position_embeddings", 512)
    if positions <= unused:
        raise refused(f"{config.where}: max_position_embeddings = {positions} leaves none behind the padding's")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=config.integer("vocab_size", 30_522),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 3072),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=positions - unused,
        norm_eps=config.number("layer_norm_eps", 1e-12, zero=True),
        windows=(None,) * num_layers,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,  # a head that nothing asks for takes no memory so
        activation=ACTIVATIONS[config.text("hidden_act", "gelu")],
        norm="layer",
        pre_norms=False,
        gated_mlp=False,
        learned_positions=unused,
        token_types=token_types,
        scores=scores,
        is_causal=False,
        dtype=config.dtype(),
    )


def _unused_positions(config: ConfigReader, model_type: str) -> int:
    """Return how many positions no token has: RoBERTa's begin behind that of the padding."""
    pad = config.integer("pad_token_id", 0 if model_type == "bert" else 1, least=0)
    if model_type == "bert":
        return 0
    if config.values.get("pad_token_id", pad) is None:
        raise refused(f"{config.where}: pad_token_id is null, and positions begin behind it: set it, as 1 is usual")
    return pad + 1


def _scores(config: ConfigReader) -> bool:
    """Return whether a head gives one number for a text or a pair of texts. Raises ConfigError for several classes."""
    names = config.value("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith("ForSequenceClassification")):
        return False
    named, count = config.value("id2label"), config.value("num_labels")  # the second wins, as in transformers
    config.value("label2id"), config.value("problem_type")
    if count is None:
        count = len(named) if isinstance(named, dict) else 2
    if type(count) is not int or count != 1:
        raise refused(f"{config.where}: only a head with one label is served, as rerankers have")
    return True


class ScoreHead(nn.Module):
    """out(tanh(dense(x))) of the first token's state: computed where states are pooled (executor/sampler.py)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(size, size), nn.Linear(size, 1)
        self.requires_grad_(False)


class BertLayer(nn.Module):
    """Attention, then a feed-forward block; the sum of each with its input is normed."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(ops, config, layer)
        self.attention_norm = LayerNorm(ops, size, config.norm_eps)
        self.mlp = MLP(ops, size, config.intermediate_size, activation=config.activation)
        self.mlp_norm = LayerNorm(ops, size, config.norm_eps)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the states [T, E] behind this layer."""
        mixed = self.attention.mix(self.attention.qkv(x), batch)
        x = self.attention_norm(x + self.attention.out(mixed))
        out: torch.Tensor = self.mlp_norm(x + self.mlp.down(self.mlp.hidden(x, None)))
        return out


class Bert(DecoderModel):
    """Token ids of a batch -> states that are normed already."""

    can_be_captured = False  # attention needs to know where rows begin

    def __init__(self, ops: Ops, config: DecoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.unused_positions = config.learned_positions or 0
        self.embed = TokenEmbedding(config.vocab_size, size)
        self.positions = TokenEmbedding(config.max_position + self.unused_positions, size)
        self.types = nn.Parameter(torch.empty(config.token_types, size), requires_grad=False)
        self.embed_norm = LayerNorm(ops, size, config.norm_eps)
        self.layers = nn.ModuleList(BertLayer(ops, config, layer) for layer in range(config.num_layers))
        self.norm = nn.Identity()
        self.head = Head(ops, config.vocab_size, size, tied=self.embed)
        self.score = ScoreHead(size) if config.scores else None
        self.tells_apart = config.scores and config.model_type == "bert" and config.token_types > 1

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the final states [T, E] of ids [T]."""
        places = batch.positions + self.unused_positions
        types = self.types[_is_second(batch).long()] if self.tells_apart else self.types[0]
        x: torch.Tensor = self.embed_norm(self.embed(batch.input_ids) + self.positions(places) + types)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [N, V] of states [N, E] by the token embeddings: warm-up alone asks for them."""
        found: torch.Tensor = self.head(x)
        return found


def _is_second(batch: Batch) -> torch.Tensor:
    """Return which tokens [T] are of the second text of their pair: those behind the first separator. A prompt ends
    with one, so its last token says which it is."""
    ids, rows = batch.input_ids, batch.token_row.long()
    is_separator = (ids == ids[batch.query_start[1:].long() - 1][rows]).long()
    before = is_separator.cumsum(0) - is_separator  # in the whole step
    return before > before[batch.query_start[:-1].long()][rows]


def build(ops: Ops, config: DecoderConfig) -> Bert:
    """Build the model on torch's default device, without weights."""
    return Bert(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    heads = {"classifier.dense": "dense", "classifier.out_proj": "out"}
    pooler: tuple[str, ...] = (r"pooler\.dense\.(weight|bias)",)
    if config.scores and config.model_type == "bert":
        heads, pooler = {"pooler.dense": "dense", "classifier": "out"}, ()
    return WeightMap(
        {
            "embeddings.word_embeddings.weight": Target("embed.weight"),
            "embeddings.position_embeddings.weight": Target("positions.weight"),
            "embeddings.token_type_embeddings.weight": Target("types"),
            **{f"embeddings.LayerNorm.{kind}": Target(f"embed_norm.{kind}") for kind in KINDS},
            **{
                f"encoder.layer.{{}}.{here}.{kind}": Target(f"layers.{{}}.{there}.{kind}", part)
                for here, (there, part) in LAYERS.items()
                for kind in KINDS
            },
            **{
                f"{here}.{kind}": Target(f"score.{there}.{kind}")
                for here, there in heads.items()
                if config.scores
                for kind in KINDS
            },
        },
        prefixes=("bert.", "roberta."),
        root="",
        ignored=(*pooler, r"embeddings\.(position|token_type)_ids"),
        embedding="embeddings.word_embeddings.weight",
    )
