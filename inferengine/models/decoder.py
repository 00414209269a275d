"""DecoderModel and ModelFamily: what the executor uses of a model, and of the module that builds it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Embedding, Head
from inferengine.models.hf_config import ConfigReader
from inferengine.models.weight_map import WeightMap


class DecoderModel(nn.Module):
    """Token ids of a batch -> residual stream [T, E]; `logits` for the rows of it that draw.

    Its Attention modules have a `kv` and a `cos_sin` that are bound after loading (KVCache.bind).
    """

    embed: Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: Head

    def forward(self, batch: Batch) -> torch.Tensor:
        """[T] ids -> residual stream [T, E]."""
        raise NotImplementedError

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] rows of the residual stream -> [N, V]."""
        raise NotImplementedError


class ModelFamily(Protocol):
    """A module of inferengine/models that knows an architecture."""

    def read_config(self, config: ConfigReader) -> DecoderConfig:
        """Read config.json. Raises ConfigError naming what is not supported."""
        ...

    def build(self, ops: Ops, config: DecoderConfig) -> DecoderModel:
        """Build the model on torch's default device, without weights."""
        ...

    def weight_map(self, config: DecoderConfig) -> WeightMap:
        """Say where each tensor of a checkpoint goes."""
        ...
