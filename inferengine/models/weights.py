"""Loads safetensors into a model built on `meta`: by mmap, file by file, every tensor accounted for.

A tensor that is missing, unexpected, misshaped or stored twice is one sentence that names it. Only safetensors are read:
other formats can carry code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from inferengine.layers.linear import Linear
from inferengine.models.hf_config import read_json, refused
from inferengine.models.weight_map import Target, WeightMap

INDEX = "model.safetensors.index.json"
Progress = Callable[[float], None]  # share done in [0, 1]


class Piece(NamedTuple):
    """A parameter, or one part of a packed one: what a single tensor of a checkpoint fills."""

    parameter: str
    part: int | None


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda share: None,
) -> None:
    """Fill every parameter of `model` from the folder's safetensors files. Raises ConfigError naming a tensor or file."""
    missing = _pieces(model)
    _materialise(model, dtype, device)
    files = weight_files(folder)
    total, done = sum(path.stat().st_size for path in files), 0
    origin: dict[str, str] = {}
    stored_head: torch.Tensor | None = None
    try:
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118: safe_open is no mapping
                    if name in origin:
                        raise refused(f"the tensor {name} stands in {origin[name]} and again in {path.name}")
                    origin[name] = path.name
                    short = _without_prefix(name, weight_map)
                    if any(re.fullmatch(pattern, short) for pattern in weight_map.ignored):
                        continue
                    if short == weight_map.head and "head.weight" not in _names(model):
                        stored_head = shard.get_tensor(name)
                        continue
                    done += _load(model, weight_map, shard, name, short, missing)
                    progress(min(1.0, done / total))
    except SafetensorError as error:
        raise refused(f"{path.name} is no whole safetensors file ({error}): fetch it again") from None
    _check_index(folder, origin)
    if missing:
        raise refused(
            f"the tensor {_checkpoint_name(min(missing, key=str), weight_map)} is missing from the checkpoint"
        )
    if stored_head is not None:
        _check_tied(model, weight_map, stored_head)
    progress(1.0)


def fill_random(model: nn.Module, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    """Random weights of the model's shapes, for measuring speed without a checkpoint."""
    _materialise(model, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)


def finish(model: nn.Module) -> None:
    """After loading: let each layer put its weight into the layout that the device reads fastest."""
    for module in list(model.modules()):
        pack: Any = getattr(module, "finish", None)
        if pack is not None:
            pack()


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files: those of the index where there is one."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map_of(folder).values()))
        for name in names:
            if Path(name).name != name:
                raise refused(f"{INDEX} names a file outside the folder: {name}")
            if not (folder / name).is_file():
                raise refused(f"{name} stands in {INDEX} but is missing: fetch the weights again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise refused("there are no *.safetensors files: other formats are not read, convert the weights")
    return files


def _weight_map_of(folder: Path) -> dict[str, str]:
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise refused(f"{INDEX} has no weight_map: fetch it again")
    return names


def _check_index(folder: Path, origin: dict[str, str]) -> None:
    if not (folder / INDEX).is_file():
        return
    listed = _weight_map_of(folder)
    for name, file in listed.items():
        if origin.get(name) != file:
            raise refused(f"the tensor {name} stands in {INDEX} but not in {file}: fetch the weights again")
    if extra := sorted(origin.keys() - listed.keys()):
        raise refused(f"the tensor {extra[0]} stands in {origin[extra[0]]} but not in {INDEX}: fetch the weights again")


def _load(
    model: nn.Module, weight_map: WeightMap, shard: Any, name: str, short: str, missing: dict[Piece, None]
) -> int:
    """Copy one tensor to its place. Returns its size in bytes."""
    number = re.search(r"\.(\d+)\.|^(\d+)\.", short)
    layer = next(group for group in number.groups() if group is not None) if number else ""
    template = short.replace(f"{layer}.", "{}.", 1) if number and short.startswith(f"{layer}.") else short
    template = re.sub(r"\.\d+\.", ".{}.", template, count=1)
    target = weight_map.targets.get(template)
    parameter_name = target.parameter.replace("{}", layer) if target else ""
    if target is None or parameter_name not in _names(model):
        raise refused(f"the tensor {name} is unexpected: the model that config.json describes has no place for it")
    place = _place(model, parameter_name, target)
    shape = list(shard.get_slice(name).get_shape())
    if (shape[::-1] if target.transpose else shape) != list(place.shape):
        wanted = list(place.shape)[::-1] if target.transpose else list(place.shape)
        raise refused(f"the tensor {name} has shape {shape} where config.json asks for {wanted}")
    tensor = shard.get_tensor(name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise refused(f"the tensor {name} is stored as {tensor.dtype}, which this engine does not read")
    source = tensor.t() if target.transpose else tensor
    place.copy_(source.float().add_(1.0) if target.plus_one else source)
    for piece in _covered(model, parameter_name, target):
        if piece not in missing:
            raise refused(f"the tensor {name} fills a place that another tensor has filled already")
        del missing[piece]
    return tensor.numel() * tensor.element_size()


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def _place(model: nn.Module, name: str, target: Target) -> torch.Tensor:
    data = _names(model)[name].data
    if target.part is None:
        return data
    owner = model.get_submodule(name.rpartition(".")[0])
    begin = sum(owner.parts[: target.part])
    return data[begin : begin + owner.parts[target.part]]


def _pieces(model: nn.Module) -> dict[Piece, None]:
    return {piece: None for name in _names(model) for piece in _covered(model, name, Target(name))}


def _covered(model: nn.Module, name: str, target: Target) -> list[Piece]:
    owner = model.get_submodule(name.rpartition(".")[0])
    num_parts = len(owner.parts) if isinstance(owner, Linear) else 1
    if num_parts == 1:
        return [Piece(name, None)]
    return [Piece(name, part) for part in range(num_parts) if target.part in (None, part)]


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(data, requires_grad=False))


def _without_prefix(name: str, weight_map: WeightMap) -> str:
    for prefix in weight_map.prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _checkpoint_name(piece: Piece, weight_map: WeightMap) -> str:
    """The name under which a checkpoint would hold a piece."""
    template = re.sub(r"\.\d+\.", ".{}.", piece.parameter, count=1)
    number = re.search(r"\.(\d+)\.", piece.parameter)
    for name, target in weight_map.targets.items():
        if target.parameter == template and target.part in (None, piece.part):
            return name.replace("{}", number.group(1) if number else "")
    raise RuntimeError(f"no entry of the weight map fills {piece}")


def _check_tied(model: nn.Module, weight_map: WeightMap, head: torch.Tensor) -> None:
    embedding = _names(model)["embed.weight"].data
    if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding.cpu()):
        raise refused(
            f"the tensor {weight_map.head} differs from {weight_map.embedding}, though config.json ties the two"
        )
