"""Loads a checkpoint: the model, quantized where asked, its LoRA adapters and its draft model. `dry_run` checks that it
would load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from inferengine.config.embedding_modules import read_embedding_modules
from inferengine.core.executor import Progress
from inferengine.errors import ConfigError
from inferengine.executor.draft_model import DraftModel, read_draft_config
from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.sampler import DenseWeights
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.slots import Slots
from inferengine.kernels.ops import REFERENCE, Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.parallel import Communicator
from inferengine.lora.bank import AdapterBank, AdapterFolder
from inferengine.models import registry, weights
from inferengine.models.decoder import DecoderModel, WeightMap
from inferengine.models.hf_config import read_json
from inferengine.models.parallel import divide, exchange, pad_vocabulary
from inferengine.models.weights import check_weights
from inferengine.quantization.apply import quantize
from inferengine.quantization.checkpoints import layout_of

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A model on its device, ready to be given a KV cache."""

    config: DecoderConfig  # of the part that this rank holds
    whole: DecoderConfig
    model: DecoderModel
    dtype: torch.dtype  # of the model's arithmetic
    quantization: str  # the scheme's or the checkpoint layout's name, or "none"
    adapters: AdapterFolder | None


def load_dense(settings: ExecutorSettings, hidden_size: int, device: torch.device) -> list[DenseWeights]:
    """Read the layers behind the pooling, where sentence-transformers' files have some and model.pooling does not
    replace them. Raises ConfigError."""
    if settings.pooling != "auto" or not settings.folder.is_dir():
        return []
    found: list[DenseWeights] = []
    width = hidden_size
    for module in read_embedding_modules(settings.folder).dense:
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.outputs, module.inputs)}
        if module.has_bias:
            shapes["linear.bias"] = (module.outputs,)
        if module.inputs != width:
            raise _not_dense(module.folder, f"takes {module.inputs} numbers, and what comes before it gives {width}")
        if settings.random_weights:
            tensors = {name: torch.randn(shape) / module.inputs**0.5 for name, shape in shapes.items()}
        else:
            try:
                tensors = load_file(module.folder / "model.safetensors")
            except (OSError, SafetensorError) as error:
                raise _not_dense(module.folder, f"has no readable model.safetensors ({error})") from None
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
            raise _not_dense(module.folder, f"must have {', '.join(f'{n} {list(s)}' for n, s in shapes.items())}")
        wide = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        found.append(DenseWeights(wide["linear.weight"], wide.get("linear.bias"), module.activation))
        width = module.outputs
    return found


def score_layers(model: DecoderModel) -> list[DenseWeights]:
    """Return the layers that make a score of a pooled state, of a model that has such a head."""
    head: Any = model.score
    layers = ((head.dense, "tanh"), (head.out, ""))
    return [DenseWeights(layer.weight.data.float(), layer.bias.data.float(), name) for layer, name in layers]


def _not_dense(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        "model.pooling",
        f"{folder.name} of modules.json {what}: set it to last, mean or cls to serve the model without it",
    )


def load_model(
    settings: ExecutorSettings, ops: Ops, progress: Progress, communicator: Communicator | None = None
) -> LoadedModel:
    """Read this rank's part of the checkpoint (or make random weights), quantize, pack for the device, load the
    adapters. `communicator`: to the other ranks; None: there are none."""
    whole, family = registry.read_model_config(settings.folder)
    config = settings.shard.divide(whole)
    if config.implementation != "native":
        logger.warning(
            "%s is served with %s' modules and paged attention: slower than families with layers of this engine",
            settings.folder.name,
            config.implementation,
        )
    if config.states:
        logger.warning(
            "%s keeps a state of every request, which no block of the KV cache holds: tokens are not drafted, and "
            "equal prefixes are reused as far as snapshots of it go (cache.snapshot_gib)",
            settings.folder.name,
        )
    dtype = settings.compute_dtype(config)
    weight_map = family.weight_map(whole)
    with torch.device("meta"):
        model = family.build(ops, config)
        divide(model, whole, settings.shard, communicator)
    quantization = quantize(
        model,
        ops,
        read_json(settings.folder / "config.json"),
        weight_map.targets,
        scheme=settings.quantization,
        device=settings.device,
        dtype=dtype,
        random_weights=settings.random_weights,
        deterministic=settings.deterministic,
    )
    if ops.pads_vocabulary:
        pad_vocabulary(model)
    if settings.random_weights:
        weights.fill_random(model, dtype=dtype, device=settings.device, seed=settings.seed, packing=True)
        progress("making random weights", 1.0)
    else:
        weights.load_weights(
            model,
            weight_map,
            settings.folder,
            dtype=dtype,
            device=settings.device,
            progress=lambda share: progress("loading weights", share),
            packing=True,
        )
    weights.finish(model)
    progress("packing weights", 1.0)
    model.eval()
    model.verify()
    adapters = None
    if settings.adapters_folder is not None:
        bank = AdapterBank(
            model, num_slots=settings.max_num_seqs, device=settings.device, dtype=dtype, communicator=communicator
        )
        model.bind_adapters(bank.part)
        adapters = _load_adapters(settings, settings.adapters_folder, model, weight_map, bank)
    if communicator is not None:
        if not settings.deterministic:  # its sums and norms may not depend on how many rows there are
            communicator.expect_rows(config.hidden_size * dtype.itemsize, settings.max_num_batched_tokens)
        exchange(model, communicator)
    return LoadedModel(config, whole, model, dtype, quantization, adapters)


def _load_adapters(
    settings: ExecutorSettings, folder: Path, model: DecoderModel, weight_map: WeightMap, bank: AdapterBank
) -> AdapterFolder:
    """Load the adapters in the folder into the room beside the model."""
    adapters = AdapterFolder(
        folder,
        model,
        weight_map.targets,
        bank,
        max_rank=settings.max_adapter_rank,
        unread=weight_map.ignored,
    )
    adapters.load_all()
    return adapters


def load_draft_model(
    settings: ExecutorSettings, folder: Path, target: LoadedModel, ops: Ops, slots: Slots, kv: KVCache, max_len: int
) -> DraftModel:
    """Load the draft model of `target`, whose slots and KV blocks it shares. Raises ConfigError."""
    return DraftModel(
        folder,
        read_draft_config(folder, target.whole, max_len),
        ops=ops,
        slots=slots,
        group=kv.groups[0],
        block_size=settings.block_size,
        dtype=target.dtype,
        max_model_len=max_len,
        max_tokens=settings.max_num_batched_tokens,
    )


def dry_run(folder: Path, quantization: str = "none") -> int:
    """Check whether a checkpoint would load: config.json and the place of every tensor, without allocating any. Returns
    the number of parameters that the model would have.

    `quantization` is the configuration's. Raises ConfigError naming what does not fit. Of the tensors that a quantized
    checkpoint stores in place of a weight only the names are checked; their shapes are checked when they are packed.
    """
    config, family = registry.read_model_config(folder)
    weight_map = family.weight_map(config)
    values = read_json(folder / "config.json")
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
    if layout_of(values) is not None:  # weights quantized at load are stored as they are
        quantize(model, REFERENCE, values, weight_map.targets, scheme=quantization, device=torch.device("meta"))
    check_weights(model, weight_map, folder)
    return num_parameters
