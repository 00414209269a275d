"""Loads safetensors into a model built on `meta`: by mmap, file by file, every tensor accounted for.

A tensor that is missing, unexpected, misshaped or stored twice is one sentence that names it. Only safetensors are
read: other formats can carry code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from inferengine.gguf.reader import SUFFIX, read_gguf
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.linear import Linear
from inferengine.layers.moe import ExpertLinear
from inferengine.layers.norm import HeadNorm
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import read_json, refused
from inferengine.models.parallel import cut_of
from inferengine.quantization.gguf import GgufShard

INDEX = "model.safetensors.index.json"
OTHERS = ("consolidated", "adapter_model")  # files to skip: the weights under Mistral's own names; a LoRA adapter
LAYER = re.compile(r"\.(\d+)\.")
ALIGNMENT = 64  # bytes: the widest vector of a CPU
ELSEWHERE = -1  # in place of a part's number
READABLE = (torch.float32, torch.float16, torch.bfloat16)
ShareDone = Callable[[float], None]  # share done in [0, 1]


class WeightPart(NamedTuple):
    """A parameter, or one part of a packed one: what one tensor of a checkpoint fills."""

    parameter: str
    part: int | None


def load_weights(
    model: nn.Module,
    weight_map: WeightMap,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: ShareDone = lambda share: None,
    packing: bool = False,
) -> None:
    """Fill every parameter of `model` from the folder's safetensors. Raises ConfigError naming a tensor or file.

    `packing`: each Linear gets its memory with its first tensor, and is packed after its last one. A model that is
    quantized at load so never takes the memory of its numbers as a whole.
    """
    memory = Memory(model, dtype, device)
    memory.allocate(later=_packed_alone(model) if packing else ())
    _read_all(model, weight_map, folder, progress, memory)


def check_weights(model: nn.Module, weight_map: WeightMap, folder: Path) -> None:
    """Check the files as `load_weights` does, for a model that is still on `meta`: every tensor is accounted for and
    none is copied. Whether a tied head equals the embedding is not checked. Raises ConfigError."""
    _read_all(model, weight_map, folder, lambda share: None, None)


def _read_all(
    model: nn.Module, weight_map: WeightMap, folder: Path, progress: ShareDone, memory: Memory | None
) -> None:
    if folder.suffix == SUFFIX:
        _read_gguf(model, weight_map, folder, progress, memory)
        return
    loader = _Loader(model, weight_map, memory)
    files = weight_files(folder)
    total, done = sum(path.stat().st_size for path in files if path.is_file()), 0
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in list(shard.keys()):
                    done += loader.load(shard, name, path.name)
                    progress(min(1.0, done / total))
        except SafetensorError as error:
            raise refused(f"{path.name} is no whole safetensors file ({error}): fetch it again") from None
        except OSError as error:  # a link into the hub's cache whose file is gone, a folder, no permission
            raise refused(f"{path.name} cannot be read ({error.strerror or error}): fetch it again") from None
    _check_index(folder, loader.origin)
    loader.check_complete()
    progress(1.0)


def _read_gguf(model: nn.Module, weight_map: WeightMap, path: Path, progress: ShareDone, memory: Memory | None) -> None:
    """Read a GGUF file, whose norms have no 1 left to be added."""
    targets = {name: target._replace(plus_one=False) for name, target in weight_map.targets.items()}
    loader, shard = _Loader(model, weight_map._replace(targets=targets), memory), GgufShard(path)
    total, done = sum(info.num_bytes for info in read_gguf(path).tensors.values()), 0
    for name in shard.sources:
        done += loader.load(shard, name, path.name)
        progress(min(1.0, done / total))
    loader.check_complete()
    progress(1.0)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it where it does not begin at a multiple of ALIGNMENT.

    A tensor of a file is memory of the mapped file and may begin anywhere. Kernels that load whole vectors (torch's
    bf16 x int8 product does) crash the process on such an address."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def fill_random(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    packing: bool = False,
) -> None:
    """Fill the model with random weights, for measuring speed without a checkpoint.

    The values are rounded to bf16, as most checkpoints store them. `packing` as of `load_weights`.
    """
    memory, later = Memory(model, dtype, device), _packed_alone(model) if packing else ()
    memory.allocate(later=later)
    generator = torch.Generator(device).manual_seed(seed)
    waiting = {linear: sum(1 for _ in linear.parameters()) for linear in later}
    for name in [name for name, _ in model.named_parameters()]:
        parameter, owner = memory.of(name), model.get_submodule(name.rpartition(".")[0])
        data = parameter.data
        if isinstance(owner, TokenEmbedding | Head) and (cut := cut_of(model, name, None)) is not None:
            size = cut.spans[0].size
            data, rest = data[:size], data[size:]
            rest.zero_()
        if data.dim() == 1:
            data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            data.normal_(0.0, 0.02, generator=generator)
            data.copy_(data.bfloat16())
        if isinstance(owner, Linear) and owner in waiting:
            waiting[owner] -= 1
            if not waiting[owner]:
                owner.finish()


def _packed_alone(model: nn.Module) -> list[Linear]:
    """Return the layers that are packed once their own tensors are there, whatever others have."""
    return [module for module in model.modules() if type(module) is Linear and module.source is None]


def finish(model: nn.Module) -> None:
    """Pack the weight of every layer into the layout that the device reads fastest, after loading."""
    for module in list(model.modules()):
        pack: Any = getattr(module, "finish", None)
        if pack is not None:
            pack()


def weight_files(folder: Path) -> list[Path]:
    """List the checkpoint's safetensors files: those of the index where there is one. Raises ConfigError."""
    if (folder / INDEX).is_file():
        names = sorted(set(_index_of(folder).values()))
        for name in names:
            if Path(name).name != name:
                raise refused(f"{INDEX} names a file outside the folder: {name}")
            if not _is_file(folder / name):
                raise refused(f"{name[:200]} stands in {INDEX} but is missing: fetch the weights again")
        return [folder / name for name in names]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(OTHERS))
    if not files:
        raise refused("there are no *.safetensors files: other formats are not read, convert the weights")
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _index_of(folder: Path) -> dict[str, str]:
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise refused(f"{INDEX} has no weight_map: fetch it again")
    return names


def _check_index(folder: Path, origin: dict[str, str]) -> None:
    if not (folder / INDEX).is_file():
        return
    listed = _index_of(folder)
    for name, file in listed.items():
        if origin.get(name) != file:
            raise refused(f"the tensor {name} stands in {INDEX} but not in {file}: fetch the weights again")
    if extra := sorted(origin.keys() - listed.keys()):
        raise refused(f"the tensor {extra[0]} stands in {origin[extra[0]]} but not in {INDEX}: fetch the weights again")


class _Loader:
    """Puts tensors in their places and tracks the places still empty."""

    def __init__(self, model: nn.Module, weight_map: WeightMap, memory: Memory | None) -> None:
        """`memory`: of the parameters; None: tensors are checked, not copied."""
        self.model, self.map, self.memory = model, weight_map, memory
        self.parameters = dict(model.named_parameters())
        self.missing = {piece: None for name in self.parameters for piece in self._covered(name, None)}
        roots = (name.removeprefix(weight_map.root) for name in weight_map.targets if name.startswith(weight_map.root))
        self.rootless = {name.split(".", 1)[0] for name in roots}  # first parts of names that lack the root
        self.origin: dict[str, str] = {}  # file of each tensor
        self.stored_head: torch.Tensor | None = None  # a tied head that the checkpoint holds too

    def load(self, shard: Any, name: str, file: str) -> int:
        """Copy one tensor to its place. Returns its size in bytes."""
        if name in self.origin:
            raise refused(f"the tensor {name} stands in {self.origin[name]} and again in {file}")
        self.origin[name] = file
        short = self._short(name)
        if any(re.fullmatch(pattern, short) for pattern in self.map.ignored):
            return 0
        number = LAYER.search(short)
        stored = self._stored_place(short, number)
        if stored is not None and stored[1] == ELSEWHERE:
            return 0
        if stored is not None:
            owner, part, suffix = stored
            if isinstance(shard, GgufShard):
                owner.take(part, suffix, shard.stored(name))
                return shard.num_bytes(name)
            tensor = aligned(shard.get_tensor(name))
            owner.take(part, suffix, tensor)
            return _num_bytes(tensor)
        if short == self.map.head and self.map.targets[short].parameter not in self.parameters:
            self.stored_head = aligned(shard.get_tensor(name))
            return _num_bytes(self.stored_head)
        target = self.map.targets.get(LAYER.sub(".{}.", short, count=1))
        parameter = target.parameter.replace("{}", number.group(1) if number else "") if target else ""
        if target is None or parameter not in self.parameters or not self._has_part(parameter, target.part):
            raise refused(f"the tensor {name} is unexpected: the model that config.json describes has no place for it")
        part = self._held_part(parameter, target.part)
        return 0 if part == ELSEWHERE else self._fill(shard, name, target, parameter, part)

    def _fill(self, shard: Any, name: str, target: Target, parameter: str, part: int | None) -> int:
        """Copy a tensor, or what this rank holds of it, to its place. Returns the size in bytes of what was read."""
        place, cut = self._place(parameter, part), cut_of(self.model, parameter, part)
        view = shard.get_slice(name)
        shape, wanted = list(view.get_shape()), list(place.shape)
        if cut is not None:
            wanted[cut.dim] = cut.whole
        if target.stacked:
            projection: Any = self.model.get_submodule(parameter.rpartition(".")[0])
            experts = projection.num_experts
            whole = experts if projection.held is None else projection.held.whole
            wanted = [whole, place.shape[0] // experts, *place.shape[1:]]
            if shape != wanted and shape == [
                wanted[0],
                *reversed(wanted[1:]),
            ]:  # published so (Qwen 3-VL), saved so or not
                target = target._replace(transpose=True)
        if target.transpose:
            wanted[-2:] = reversed(wanted[-2:])
        if shape != wanted:
            raise refused(f"the tensor {name} has shape {shape} where config.json asks for {wanted}")
        if cut is None:
            tensor = shard.get_tensor(name)
        else:
            tensor = (cut._replace(dim=1 - cut.dim) if target.transpose and not target.stacked else cut).of(view)
        if tensor.dtype not in READABLE:
            raise refused(f"the tensor {name} is stored as {tensor.dtype}, which this engine does not read")
        for piece in self._covered(parameter, part):
            if piece not in self.missing:
                raise refused(f"the tensor {name} fills a place that another tensor has filled already")
            del self.missing[piece]
        source = tensor.transpose(-2, -1) if target.transpose else tensor
        source = source.flatten(0, 1) if target.stacked else source
        if self.memory is not None:
            self.parameters[parameter] = self.memory.of(parameter)
            place = self._place(parameter, part)
            if cut is not None and len(source) < len(place):  # the vocabulary or a part of it, padded
                place, rest = place[: len(source)], place[len(source) :]
                rest.zero_()
            place.copy_(source.float().add_(1.0) if target.plus_one else source)
            self._pack(parameter.rpartition(".")[0])
        return _num_bytes(tensor)

    def _pack(self, name: str) -> None:
        """Pack a module that is packed alone, where nothing of it is missing."""
        module = self.model.get_submodule(name)
        assert self.memory is not None
        if not isinstance(module, Linear) or module not in self.memory.later:
            return
        own = [f"{name}.{each}" for each, _ in module.named_parameters()]
        if any(piece in self.missing for each in own for piece in self._covered(each, None)):
            return
        weight = f"{name}.weight"
        self.parameters[weight] = _as_meta(self.parameters[weight])  # its shape is still asked for
        module.finish()

    def check_complete(self) -> None:
        """Raise ConfigError where a place is still empty, or a stored head differs from the embedding it is tied to."""
        for piece in self.missing:
            raise refused(f"the tensor {self._checkpoint_name(piece)} is missing from the checkpoint")
        for module in self.model.modules():
            source = getattr(module, "source", None)
            if source is not None and (name := source.missing()) is not None:
                raise refused(f"the tensor {name} is missing from the checkpoint")
        embedding_name = self.map.targets[self.map.embedding].parameter
        shared = self.parameters.get(embedding_name)
        if self.stored_head is not None and shared is not None and not shared.is_meta:
            embedding, cut = shared.data.cpu(), cut_of(self.model, embedding_name, None)
            head = (self.stored_head if cut is None else cut.of(self.stored_head)).to(embedding.dtype)
            embedding = embedding if cut is None else embedding[: len(head)]
            if head.shape != embedding.shape or not torch.equal(head, embedding):
                names = f"the tensor {self.map.head} differs from {self.map.embedding}"
                raise refused(f"{names}, though config.json ties the two")

    def _short(self, name: str) -> str:
        """Return a tensor's name as the weight map has it."""
        short = next((name.removeprefix(p) for p in self.map.prefixes if name.startswith(p)), name)
        is_rootless = short.split(".", 1)[0] in self.rootless
        return f"{self.map.root}{short}" if is_rootless else short

    def _stored_place(self, name: str, number: re.Match[str] | None) -> tuple[Any, int | None, str] | None:
        """Return (source, part, suffix) of a tensor that a quantized checkpoint stores in place of a weight."""
        stem, _, suffix = name.rpartition(".")
        target = self.map.targets.get(LAYER.sub(".{}.", name, count=1))
        if target is not None:  # of all experts together, by a name of its own
            suffix = target.parameter.rpartition(".")[2]
        else:
            target = self.map.targets.get(LAYER.sub(".{}.", f"{stem}.weight", count=1))
        if target is None:
            return None
        owner = target.parameter.replace("{}", number.group(1) if number else "").rpartition(".")[0]
        try:
            source = getattr(self.model.get_submodule(owner), "source", None)
        except AttributeError:  # a layer that this model does not have: refused by `load`
            return None
        if source is None or not source.knows(suffix) or not self._has_part(f"{owner}.weight", target.part):
            return None
        return source, self._held_part(f"{owner}.weight", target.part), suffix

    def _place(self, name: str, part: int | None) -> torch.Tensor:
        data = self.parameters[name].data
        if part is None:
            return data
        if data.dim() == 3:  # of all experts, as transformers' modules hold them
            return data[part]
        owner: Any = self.model.get_submodule(name.rpartition(".")[0])  # a Linear or a HeadNorm: they have parts
        return data.narrow(0, sum(owner.parts[:part]), owner.parts[part])

    def _has_part(self, name: str, part: int | None) -> bool:
        """Return whether a parameter has this part: a layer may lack a projection that others have (Gemma 4's
        values)."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        return part is None or not isinstance(owner, Linear) or part < len(owner.parts)

    def _held_part(self, name: str, part: int | None) -> int | None:
        """Return a part of the whole parameter as a part of what this rank holds; ELSEWHERE: another rank holds it."""
        owner: Any = self.model.get_submodule(name.rpartition(".")[0])
        if part is None or not isinstance(owner, HeadNorm | ExpertLinear) or owner.held is None:
            return part
        each = len(owner.parts) // owner.held.size  # parts of a head or of an expert
        held = owner.held.times(each)
        return part - held.begin if held.begin <= part < held.end else ELSEWHERE

    def _covered(self, name: str, part: int | None) -> list[WeightPart]:
        """Return the pieces that a tensor for this part of a parameter fills."""
        owner = self.model.get_submodule(name.rpartition(".")[0])
        parts: list[int] = getattr(owner, "parts", [0])
        if len(parts) == 1:
            return [WeightPart(name, None)]
        return [WeightPart(name, index) for index in range(len(parts)) if part in (None, index)]

    def _checkpoint_name(self, piece: WeightPart) -> str:
        """Return the name under which a checkpoint would hold a piece."""
        number = LAYER.search(piece.parameter)
        template = LAYER.sub(".{}.", piece.parameter, count=1)
        for name, target in self.map.targets.items():
            part = None if target.part is None else self._held_part(piece.parameter, target.part)
            if target.parameter == template and part in (None, piece.part):
                return name.replace("{}", number.group(1) if number else "")
        raise RuntimeError(f"no entry of the weight map fills {piece}")


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Memory:
    """Gives parameters memory: in `dtype`, or in the `number_type` that they name. A shared one stays shared, and one
    that has memory keeps it: a caller may have mapped a file."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self.later: frozenset[nn.Module] = frozenset()  # modules whose parameters get memory in `of`

    def allocate(self, later: Collection[nn.Module] = ()) -> None:
        """Allocate all parameters but those of the modules `later`, which share none."""
        self.later = frozenset(later)
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id: the old one, which must live on, and the new
        for module in self._model.modules():
            if module in self.later:
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.is_meta:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, _allocated(parameter, self._dtype, self._device)
                module.register_parameter(name, made[id(parameter)][1])

    def of(self, name: str) -> nn.Parameter:
        """Return a parameter of the model, with memory."""
        owner, _, own = name.rpartition(".")
        module = self._model.get_submodule(owner)
        parameter: nn.Parameter = getattr(module, own)
        if parameter.is_meta:
            parameter = _allocated(parameter, self._dtype, self._device)
            module.register_parameter(own, parameter)
        return parameter


def _as_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape without memory."""
    return nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)


def _allocated(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    dtype = getattr(parameter, "number_type", dtype)
    try:
        data = torch.empty(parameter.shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the CPU's allocator has no error class of its own
        raise MemoryError(f"no memory for a parameter of {list(parameter.shape)} as {dtype}: {error}") from None
    return nn.Parameter(data, requires_grad=False)
