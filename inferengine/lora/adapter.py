"""Reads a LoRA adapter in PEFT's layout: adapter_config.json and adapter_model.safetensors. Unsupported keys are
refused by name; every tensor is accounted for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from inferengine.errors import InferEngineError
from inferengine.layers.linear import Linear

READABLE = (torch.float32, torch.float16, torch.bfloat16)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Patterns of modules are matched while nothing else runs: a repeated group may take exponential time.
MOST_PATTERN, MOST_REPEATS = 500, 4
REPEATS, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
MAGNITUDE = "magnitude_vector"
NUMBER = re.compile(r"\.(\d+)\.")
TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:(A|B)(?:\.default)?\.weight|(magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
WHOLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save(?:\.default)?)?\.weight")
# Keys that change an adapter's result, with the values that this engine supports.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, {}),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base weights as well
}


class Factors(NamedTuple):
    """An adapter's change of one projection: y += scaling * (x A^T) B^T. `down` is A [r, in], `up` is B [out, r]. With
    `magnitude` [out], the rows of the changed weight are then scaled to these lengths (DoRA, Liu et al. 2024)."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None


EMBEDDING, HEAD = "embed", "head"  # the model's modules that an adapter may replace


class Projection(NamedTuple):
    """A projection of the model: the name of a Linear, and which of its parts (None: all of them)."""

    linear: str
    part: int | None


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in host memory."""

    name: str
    factors: dict[Projection, Factors]
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # weights in place of EMBEDDING's and HEAD's


def read_adapter(
    folder: Path,
    name: str,
    model: nn.Module,
    targets: Mapping[str, Any],
    *,
    max_rank: int,
    dtype: torch.dtype,
    unread: Sequence[str] = (),
) -> Adapter:
    """Read and check an adapter for a model whose checkpoint names are `targets` (models/decoder.py). What it changes
    in parts of a checkpoint that are not loaded, whose names match `unread`, is left out. Raises InferEngineError
    naming what is wrong; the model is not touched."""
    config = _config(folder, name)
    sizes = _Sizes(config, name, max_rank)
    places: dict[Projection, dict[str, torch.Tensor]] = {}
    scalings: dict[Projection, float] = {}
    saved = _Saved(config, name, model, targets)
    stored = _read_tensors(folder, name)
    for key, tensor in sorted(stored.items()):
        if saved.take(key, tensor, dtype) or _is_unread(key, unread):
            continue
        place, kind, stem = _place(key, name, model, targets)
        if kind == MAGNITUDE and not config.get("use_dora"):
            raise _refused(name, f"the tensor {key} is unexpected: {CONFIG} has no use_dora")
        _check_type(tensor, name, key)
        rank, scalings[place] = sizes.of(stem)
        _check_shape(tensor, kind, place, rank, model, name, key)
        held = _held(tensor, kind, place, model)
        places.setdefault(place, {})[kind] = held if kind == MAGNITUDE else held.to(dtype)
    for place, found in places.items():
        if "A" not in found or "B" not in found:
            raise _refused(name, f"{place.linear} has one of lora_A and lora_B, not both")
        if config.get("use_dora") and MAGNITUDE not in found:
            raise _refused(name, f"{place.linear} has no lora_{MAGNITUDE}, though use_dora is true")
    whole = saved.weights()
    if not places and not whole:
        raise _refused(name, f"{WEIGHTS} holds no tensors")
    return Adapter(
        name,
        {
            place: Factors(found["A"], found["B"], scalings[place], found.get(MAGNITUDE))
            for place, found in places.items()
        },
        whole,
    )


class _Saved:
    """Whole weights that an adapter brings (`modules_to_save`), of the embedding and of the output head."""

    def __init__(self, config: dict[str, Any], name: str, model: nn.Module, targets: Mapping[str, Any]) -> None:
        self._name, self._model = name, model
        places = {f"{EMBEDDING}.weight": EMBEDDING, f"{HEAD}.weight": HEAD}
        self._modules = {
            key.removesuffix(".weight"): places[target.parameter]
            for key, target in targets.items()
            if target.parameter in places
        }
        self._ties = bool(config.get("ensure_weight_tying"))
        self._found: dict[str, torch.Tensor] = {}
        listed = config.get("modules_to_save") or []
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise _refused(name, f"{CONFIG}: modules_to_save must be a list of names")
        self._due = {self._module(each) for each in listed}

    def _module(self, listed: str) -> str:
        for name, module in self._modules.items():
            if name == listed or name.rpartition(".")[2] == listed.rpartition(".")[2]:
                return module
        known = ", ".join(name.rpartition(".")[2] for name in self._modules) or "none"
        raise _refused(self._name, f"modules_to_save has {listed[:60]!r}, which is not supported: {known} are")

    def take(self, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Keep a tensor where it is such a weight. Returns whether it is."""
        match = WHOLE.fullmatch(key)
        stem = match.group(1) if match else ""
        module = self._modules.get(stem) or self._modules.get(stem.removeprefix("transformer."))
        if module is None:
            return False
        if any(isinstance(each, Linear) and each.held is not None for each in self._model.modules()):
            raise _refused(self._name, f"the tensor {key} is not supported with engine.tensor_parallel")
        embedding: Any = self._model.get_submodule(EMBEDDING)
        wanted = embedding.shape
        _check_type(tensor, self._name, key)
        if tuple(tensor.shape) != wanted:
            raise _refused(self._name, f"the tensor {key} has shape {list(tensor.shape)} where {list(wanted)} is due")
        self._found[module] = tensor.to(dtype)
        return True

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by module. Raises InferEngineError for one that is listed and missing."""
        for module in self._due - self._found.keys():
            raise _refused(self._name, f"modules_to_save names the {module}, of which {WEIGHTS} has no tensor")
        is_tied = getattr(self._model.get_submodule(HEAD), "tied", None) is not None if self._found else False
        if self._ties and is_tied and EMBEDDING in self._found:
            self._found.setdefault(HEAD, self._found[EMBEDDING])
        return self._found


class _Sizes:
    """The rank and scaling of each module: those of the configuration, or of the patterns that its name ends in."""

    def __init__(self, config: dict[str, Any], name: str, max_rank: int) -> None:
        self._name, self._max_rank = name, max_rank
        self._rank, self._alpha = _positive(config, "r", name), _positive(config, "lora_alpha", name)
        self._ranks, self._alphas = (self._patterns(config, key) for key in ("rank_pattern", "alpha_pattern"))
        self._is_rslora = bool(config.get("use_rslora"))

    def of(self, stem: str) -> tuple[int, float]:
        """Return (rank, scaling) of a module, by its name in the model."""
        rank, alpha = self._found(self._ranks, stem, self._rank), self._found(self._alphas, stem, self._alpha)
        if rank != int(rank) or rank > self._max_rank:
            most = f"at most {self._max_rank} is (model.max_adapter_rank)"
            raise _refused(self._name, f"r = {rank} is not supported: {most}")
        return int(rank), alpha / (math.sqrt(rank) if self._is_rslora else rank)

    def _patterns(self, config: dict[str, Any], key: str) -> dict[re.Pattern[str], float]:
        values = config.get(key) or {}
        if not isinstance(values, dict):
            raise _refused(self._name, f"{CONFIG}: {key} must be an object")
        for pattern in values:
            if (
                len(pattern) > MOST_PATTERN
                or REPEATED_GROUP.search(pattern)
                or len(REPEATS.findall(pattern)) > MOST_REPEATS
            ):
                complaint = (
                    f"{key} has {pattern[:60]!r}: at most {MOST_REPEATS} repeats are supported, and none of groups"
                )
                raise _refused(self._name, f"{CONFIG}: {complaint}")
        try:
            return {
                re.compile(rf"(?:.*\.)?(?:{pattern})"): _positive(values, pattern, self._name) for pattern in values
            }
        except re.error:
            raise _refused(self._name, f"{CONFIG}: {key} has what is no regular expression") from None

    def _found(self, patterns: dict[re.Pattern[str], float], stem: str, default: float) -> float:
        return next((value for pattern, value in patterns.items() if pattern.fullmatch(stem)), default)


def _config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise _refused(name, f"{CONFIG} is missing or not valid JSON") from None
    if not isinstance(config, dict):
        raise _refused(name, f"{CONFIG} is not a JSON object")
    for key, allowed in PLAIN.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise _refused(name, f"{CONFIG}: {key} = {str(value)[:60]} is not supported")
    return config


def _positive(config: dict[str, Any], key: str, name: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise _refused(name, f"{CONFIG}: {key} must be a positive number; got {str(value)[:60]}")
    return value


def _is_unread(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a tensor belongs to a part of the checkpoint that is not loaded (what a model sees with)."""
    match = TENSOR.fullmatch(key)
    return match is not None and any(re.fullmatch(pattern, match.group(1)) for pattern in patterns)


def _place(key: str, name: str, model: nn.Module, targets: Mapping[str, Any]) -> tuple[Projection, str, str]:
    """Return the projection that a tensor of the adapter belongs to, A or B or MAGNITUDE, and the adapter's name for
    it."""
    match = TENSOR.fullmatch(key)
    number = NUMBER.search(key)
    stem = match.group(1) if match else ""
    template = NUMBER.sub(".{}.", stem, count=1) + ".weight"
    target = targets.get(template) or targets.get(template.removeprefix("transformer."))
    if match is None or target is None:
        raise _refused(name, f"the tensor {key} is unexpected: this model has no projection for it")
    linear = target.parameter.replace("{}", number.group(1) if number else "").removesuffix(".weight")
    try:
        module = model.get_submodule(linear)
    except AttributeError:
        module = None
    if isinstance(module, Linear) and not module.takes_adapters:
        what = "a matrix that attention takes apart (latent attention): adapt the other projections"
        raise _refused(name, f"the tensor {key} adapts {what}")
    if not isinstance(module, Linear):
        raise _refused(name, f"the tensor {key} adapts what is no linear layer of this model, which is not supported")
    if target.part is not None and target.part >= len(module.parts):
        raise _refused(name, f"the tensor {key} adapts a projection that this layer does not have")
    return Projection(linear, target.part if len(module.parts) > 1 else None), match.group(2) or MAGNITUDE, stem


def _read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Read the file as a whole. Were it mapped, a newer version written over it would change what is loaded, and a
    shorter one would end the process."""
    try:
        return load((folder / WEIGHTS).read_bytes())
    except (OSError, SafetensorError, LookupError, ValueError, TypeError):
        raise _refused(name, f"{WEIGHTS} is missing or no whole safetensors file") from None


def _check_type(tensor: torch.Tensor, name: str, key: str) -> None:
    if tensor.dtype not in READABLE:
        raise _refused(name, f"the tensor {key} is stored as {tensor.dtype}, which this engine does not read")


def _linear(model: nn.Module, place: Projection) -> Linear:
    module = model.get_submodule(place.linear)
    assert isinstance(module, Linear)  # checked by `_place`
    return module


def _check_shape(
    tensor: torch.Tensor, kind: str, place: Projection, rank: int, model: nn.Module, name: str, key: str
) -> None:
    module = _linear(model, place)
    parts, inputs = module.parts, module.in_features
    if module.held is not None:  # an adapter is one of the whole model
        parts = [span.whole for span in module.held.outputs] or parts
        inputs = inputs if module.held.inputs is None else module.held.inputs.whole
    outputs = sum(parts) if place.part is None else parts[place.part]
    wanted: tuple[int, ...] = {"A": (rank, inputs), "B": (outputs, rank), MAGNITUDE: (outputs,)}[kind]
    if tuple(tensor.shape) != wanted:
        raise _refused(name, f"the tensor {key} has shape {list(tensor.shape)} where {list(wanted)} is due")


def _held(tensor: torch.Tensor, kind: str, place: Projection, model: nn.Module) -> torch.Tensor:
    """Return what this rank needs of a tensor: A is divided as the layer's inputs are, B and magnitudes as its
    outputs."""
    module = _linear(model, place)
    if module.held is None or (kind == "A") != (module.held.inputs is not None):
        return tensor
    cut = module.held.cut(place.part)
    return tensor if cut is None else cut.of(tensor).contiguous()


def _refused(name: str, message: str) -> InferEngineError:
    return InferEngineError("unsupported", f"adapter {name}: {message}", field="adapter")
