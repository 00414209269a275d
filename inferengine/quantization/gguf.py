"""GGUF weights in a model: read from the file into the planes of kernels/block_codes.py, and multiplied from them.

Linear layers, experts (gguf_experts.py), the output head and the token embedding keep the file's formats; the rest
becomes ordinary numbers. The parts of one Linear may be of several formats (Q4_K_M stores half of the value projections
in Q6_K): each run of parts of one kind is a product of its own.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.gguf.checkpoint import FLOATS, Source, tensor_sources
from inferengine.gguf.reader import BLOCKS, mapped
from inferengine.kernels import block_codes
from inferengine.kernels.block_codes import FORMATS, BlockWeight, numbers, read_blocks, stack
from inferengine.kernels.ops import Ops
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.linear import Linear
from inferengine.layers.moe import ExpertLinear, Experts
from inferengine.layers.parallel import Cut, DimensionRange
from inferengine.quantization.experts import with_expert_codes
from inferengine.quantization.gguf_experts import StoredRows, bytes_per_weight, random_blocks, stored_experts

METHOD = "gguf"  # quant_method
NUMBER = re.compile(r"\.(\d+)\.")
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufShard:
    """The tensors of a GGUF model under a checkpoint's names, as weights.py reads them from a safetensors file."""

    def __init__(self, path: Path) -> None:
        self.sources = tensor_sources(path)
        self._files = {
            info.file: mapped(info.file) for info in (info for source in self.sources.values() for info in source.infos)
        }

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file."""
        source = self.sources[name]
        return sum(info.num_bytes // source.piece[0] for info in source.infos)

    def get_slice(self, name: str) -> LazyTensor:
        """Return a tensor that is read when it is indexed."""
        return LazyTensor(self, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as numbers, dequantized where it is stored in blocks."""
        source = self.sources[name]
        if source.values is not None:
            keys, values = (self._numbers(Source(info)).float() for info in source.infos)
            return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        tensor = self._numbers(source)
        return tensor.t() if source.transpose else tensor.view(source.shape)

    def _numbers(self, source: Source) -> torch.Tensor:
        info = source.info
        if info.type in FLOATS:
            tensor = self._bytes(source).view(FLOAT_TYPES[info.type])
            tensor = tensor.view(source.stored_shape)
            return in_order(tensor, source.heads)
        stored = self._stored_rows(source)
        codes = read_blocks(stored.kind, stored.raw)
        tensor = in_order(numbers(codes, 0, codes.shape[0]), stored.heads)
        return tensor.view(source.stored_shape)

    def stored(self, name: str) -> StoredRows | torch.Tensor:
        """Return a tensor as the file has it: in blocks, or as numbers."""
        return self.get_tensor(name) if self.sources[name].info.type in FLOATS else self.stored_rows(name)

    def stored_rows(self, name: str) -> StoredRows:
        """Return a tensor that is stored in blocks, as bytes of the mapped file."""
        return self._stored_rows(self.sources[name])

    def _stored_rows(self, source: Source) -> StoredRows:
        columns = source.info.shape[-1]
        block, num_bytes = BLOCKS[source.info.type]
        return StoredRows(source.info.type, self._bytes(source).view(-1, columns // block * num_bytes), source.heads)

    def _bytes(self, source: Source) -> torch.Tensor:
        info = source.info
        count, index = source.piece
        count = info.num_bytes // count
        with warnings.catch_warnings():  # of memory that may not be written; nothing here writes to it
            warnings.simplefilter("ignore", UserWarning)
            begin = info.begin + count * index
            return torch.frombuffer(self._files[info.file], dtype=torch.uint8, count=count, offset=begin)


class LazyTensor(NamedTuple):
    """What safetensors calls a slice: the shape of a tensor, and parts of it."""

    shard: GgufShard
    name: str

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self.shard.sources[self.name].shape)

    def __getitem__(self, key: Any) -> torch.Tensor:  # type: ignore[override]
        return self.shard.get_tensor(self.name)[key]


def in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of q and k: the halves of a head, which are neighbours there, apart again."""
    if not heads:
        return rows
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class StoredBlocks:
    """What a layer holds in place of a float weight while a file is read: a tensor for each of `kinds`, of so many
    rows, in the order of the rows. `cuts` are what this rank takes of each."""

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str],
        rows: Sequence[int],
        columns: int,
        device: torch.device,
        cuts: Sequence[Cut | None],
        dtype: torch.dtype,
        *,
        random_weights: bool,
    ) -> None:
        self.names, self.kinds, self.rows, self.columns = names, kinds, rows, columns
        self.device, self.cuts, self.dtype, self.random_weights = device, cuts, dtype, random_weights
        self.taken: list[BlockWeight | torch.Tensor | None] = [None] * len(kinds)

    def knows(self, suffix: str) -> bool:
        """Return whether a tensor is for this weight."""
        return suffix == "weight"

    def take(self, part: int | None, suffix: str, stored: StoredRows | torch.Tensor) -> None:
        """Keep one tensor, packed for the device. Raises ConfigError naming it."""
        index = part or 0
        name, rows = self.names[index], self.rows[index]
        if self.taken[index] is not None:
            raise ConfigError("model.path", f"the tensor {name} fills a place that is taken")
        raw = stored.raw if isinstance(stored, StoredRows) else stored
        form = FORMATS[stored.kind] if isinstance(stored, StoredRows) else None
        columns = raw.shape[1] if form is None else raw.shape[1] // form.num_bytes * form.block
        if (raw.shape[0], columns) != (rows, self.columns):
            shape, wanted = [raw.shape[0], columns], [rows, self.columns]
            raise ConfigError("model.path", f"the tensor {name} has shape {shape} where the model asks for {wanted}")
        if self.device.type == "meta":
            self.taken[index] = torch.empty(0)
            return
        if isinstance(stored, StoredRows):
            raw = _cut_blocks(name, in_order(raw.to(self.device), stored.heads), self.cuts[index], stored.kind)
            self.taken[index] = read_blocks(stored.kind, raw)
        else:
            cut = self.cuts[index]
            self.taken[index] = (raw if cut is None else cut.of(raw)).to(self.device, self.dtype, copy=True)

    def missing(self) -> str | None:
        """Return the name of a tensor that has not come, or None."""
        return next((name for name, each in zip(self.names, self.taken, strict=True) if each is None), None)

    def num_bytes(self) -> int:
        """Return the bytes of what this rank holds, as the file stores it."""
        total = 0
        for kind, cut, rows in zip(self.kinds, self.cuts, self.rows, strict=True):
            share = 1.0 if cut is None else sum(span.size for span in cut.spans) / cut.whole
            total += int(rows * self.columns * share * bytes_per_weight(kind, self.dtype))
        return total

    def assemble(self) -> tuple[BlockWeight | torch.Tensor, ...]:
        """Return all parts, those of one kind that follow each other as one, and let go of them."""
        parts = list(self.taken)
        if self.random_weights:
            parts = [self._random(index) for index in range(len(self.kinds))]
        made: list[BlockWeight | torch.Tensor] = []
        for part in parts:
            assert part is not None  # checked by the loader
            last = made[-1] if made else None
            if isinstance(part, BlockWeight) and isinstance(last, BlockWeight) and part.kind == last.kind:
                made[-1] = stack((last, part))
            else:
                made.append(part)
        self.taken = []
        return tuple(made)

    def _random(self, index: int) -> BlockWeight | torch.Tensor:
        """Return random codes of a part, with scales that keep the weights below 0.05."""
        rows, columns, cut = self.rows[index], self.columns, self.cuts[index]
        if cut is not None:
            held = sum(span.size for span in cut.spans)
            rows, columns = (held, columns) if cut.dim == 0 else (rows, held)
        if self.kinds[index] not in FORMATS:
            return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(0.0, 0.02)
        return random_blocks(self.kinds[index], rows, columns, self.device)


def _cut_blocks(name: str, raw: torch.Tensor, cut: Cut | None, kind: str) -> torch.Tensor:
    """Cut a part of the rows or of the columns of a tensor in blocks. Raises ConfigError where it would cut a block."""
    if cut is None:
        return raw
    if cut.dim == 0:
        return cut.of(raw)
    form = FORMATS[kind]
    if any(side % form.block for span in cut.spans for side in (span.begin, span.end)):
        raise ConfigError(
            "engine.tensor_parallel", f"the blocks of {form.block} weights of {name} do not divide among the ranks"
        )
    unit = form.num_bytes
    spans = tuple(DimensionRange(*(side // form.block * unit for side in span)) for span in cut.spans)
    return cut._replace(spans=spans).of(raw)


def prepare(
    model: nn.Module,
    ops: Ops,
    kinds: Mapping[str, str],
    targets: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    random_weights: bool = False,
    deterministic: bool = False,
) -> None:
    """Let every layer of `model`, on `meta`, whose tensors `kinds` lists take them as they are stored. `targets` are
    models/decoder.py's; `dtype` is that of the arithmetic."""
    table = BlockProducts(ops, device, deterministic=deterministic).table()
    of_parameter: dict[str, dict[int, tuple[str, str]]] = {}
    for name, kind in kinds.items():
        number = NUMBER.search(name)
        target = targets.get(NUMBER.sub(".{}.", name, count=1))
        if target is not None:
            parameter = target.parameter.replace("{}", number.group(1) if number else "")
            of_parameter.setdefault(parameter, {})[target.part or 0] = (name, kind)
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.ops = with_expert_codes(module.ops)
        found = of_parameter.get(f"{name}.weight")
        if found is None or module.weight is None:
            continue
        if isinstance(module, ExpertLinear):
            name_of = partial(_name_of, f"{name}.weight", targets, found)
            module.source = stored_experts(module, found, name_of, device, dtype, random_weights=random_weights)
            module.weight = None
            continue
        outputs, held = [module.weight.shape[0]], None
        if isinstance(module, Linear):
            held, outputs = module.held, module.parts
            if held is not None:  # a file has all of it
                outputs = [span.whole for span in held.outputs] or outputs
        elif type(module) not in (TokenEmbedding, Head):
            continue
        columns: int = module.weight.shape[1] if held is None or held.inputs is None else held.inputs.whole
        is_fused = len(outputs) > 1 and not _is_by_part(f"{name}.weight", targets)
        rows = [sum(outputs)] if is_fused else outputs
        names = [_name_of(f"{name}.weight", targets, found, part) for part in range(len(rows))]
        cuts = [None if held is None else held.cut(part if len(rows) > 1 else None) for part in range(len(rows))]
        part_kinds = [found[part][1] if part in found else "F32" for part in range(len(rows))]
        module.weight = None
        module.source = StoredBlocks(
            names, part_kinds, rows, columns, device, cuts, dtype, random_weights=random_weights
        )
        module.ops = table
    for module in model.modules():
        if isinstance(module, Head) and module.tied is not None and module.tied.source is not None:
            module.ops = table


def _is_by_part(parameter: str, targets: Mapping[str, Any]) -> bool:
    template = NUMBER.sub(".{}.", parameter, count=1)
    return any(target.parameter == template and target.part is not None for target in targets.values())


def _name_of(parameter: str, targets: Mapping[str, Any], found: Mapping[int, tuple[str, str]], part: int) -> str:
    if part in found:
        return found[part][0]
    number, template = NUMBER.search(parameter), NUMBER.sub(".{}.", parameter, count=1)
    names = (name for name, target in targets.items() if target.parameter == template and target.part in (part, None))
    return next(names, parameter).replace("{}", number.group(1) if number else "")


# -- products ----------------------------------------------------------------------------------------------------------


class PackedBlocks(NamedTuple):
    """A weight as its products read it: parts of one kind each, one below the other; `dtype` is that of rows of it."""

    parts: tuple[BlockWeight | torch.Tensor, ...]
    dtype: torch.dtype

    @property
    def num_outputs(self) -> int:
        """Rows of all parts."""
        return sum(part.shape[0] for part in self.parts)


def num_bytes(weight: PackedBlocks) -> float:
    """Return the bytes of a packed weight."""
    planes = (part if isinstance(part, BlockWeight) else (part,) for part in weight.parts)
    return float(sum(each.nbytes for plane in planes for each in plane if isinstance(each, torch.Tensor)))


class BlockProducts:
    """Products with packed weights on a device, and the norms and activations of the table that they stand in."""

    def __init__(self, base: Ops, device: torch.device, *, deterministic: bool = False) -> None:
        self.base, self.deterministic = base, deterministic
        self.kernels: Any = None
        if device.type == "cuda":
            from inferengine.kernels.cuda.gemm import block_tiles  # here: Triton is not installed everywhere
            from inferengine.kernels.cuda.split_k import Scratch

            self.kernels, self.scratch = block_tiles, Scratch(device)

    def table(self) -> Ops:
        """Return `base` with these products."""
        return dataclasses.replace(
            self.base,
            linear=self.linear,
            pack_linear=self.pack_linear,
            norm_linear=self.norm_linear,
            linear_add=self.linear_add,
            linear_add_norm=None,
            norm_gated_linear=self.norm_gated_linear,
            rows_of=self.rows_of,
        )

    def pack_linear(self, source: Any) -> PackedBlocks:
        """Return a layer's weight in the kernels' layout."""
        arrange: Callable[[Any], Any] = (lambda part: part) if self.kernels is None else self.kernels.arrange
        parts = (part if isinstance(part, torch.Tensor) else arrange(part) for part in source.assemble())
        return PackedBlocks(tuple(parts), source.dtype)

    def linear(self, x: torch.Tensor, weight: PackedBlocks, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, in] times the weight, [T, out]."""
        if self.kernels is not None:
            return self._by_kernels(x, weight, bias)
        made = [_on_cpu(x, part) for part in weight.parts]
        y = made[0] if len(made) == 1 else torch.cat(made, 1)
        return y if bias is None else y.add_(bias)

    def norm_linear(
        self, x: torch.Tensor, gain: torch.Tensor, eps: float, weight: PackedBlocks, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return linear(rms_norm(x))."""
        return self.linear(self.base.rms_norm(x, gain, eps), weight, bias)

    def linear_add(
        self, x: torch.Tensor, weight: PackedBlocks, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Add linear(x) to the residual, in place."""
        if self.kernels is not None:
            return self._by_kernels(x, weight, bias, residual)
        return residual.add_(self.linear(x, weight, bias))

    def norm_gated_linear(
        self,
        x: torch.Tensor,
        gain: torch.Tensor | None,
        eps: float,
        weight: PackedBlocks,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Return act(gate) * up of rms_norm(x), of x itself without a gain; the weight's first rows are the gate's."""
        both = self.linear(x if gain is None else self.base.rms_norm(x, gain, eps), weight, bias)
        return self.base.silu_and_mul(both) if activation == "silu" else self.base.gelu_tanh_and_mul(both)

    def rows_of(self, weight: PackedBlocks, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` [T] of an embedding, [T, E], as numbers."""
        (part,) = weight.parts
        assert isinstance(part, BlockWeight)
        if self.kernels is None:
            return block_codes.gather(part, ids).to(weight.dtype)
        rows: torch.Tensor = self.kernels.gather(part, ids, weight.dtype)
        return rows

    def _by_kernels(
        self,
        x: torch.Tensor,
        weight: PackedBlocks,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply x with the weight, added to the residual where there is one, by Triton kernels or, for many rows, by
        the library after the weight has been dequantized."""
        from inferengine.kernels.cuda.dispatch import KernelChoice, Operands, Product, candidates

        def choices_of(part: BlockWeight) -> tuple[KernelChoice, ...]:
            operands = Operands.BLOCK_NIBBLES if part.bits == 4 else Operands.BLOCK_CODES
            operands = Operands.BLOCK_CODES_EXACT if self.deterministic else operands
            return candidates(operands, Product.LINEAR, rows, *part.shape)

        rows, width = x.shape[0], weight.num_outputs
        choices = [choices_of(part) if isinstance(part, BlockWeight) else () for part in weight.parts]
        if not any(choices):
            y = functional.linear(x, self._numbers(weight, x.dtype), bias)
            return y if residual is None else residual.add_(y)
        out = x.new_empty(rows, width) if residual is None else residual
        begin = 0
        for part, found in zip(weight.parts, choices, strict=True):
            end = begin + part.shape[0]
            place, own_bias = out[:, begin:end], None if bias is None else bias[begin:end]
            if isinstance(part, BlockWeight):
                self.kernels.block_product(
                    x, part, found[0].config, self.scratch, out=place, bias=own_bias, add=residual is not None
                )
            else:
                y = functional.linear(x, part, own_bias)
                place.copy_(y) if residual is None else place.add_(y)
            begin = end
        return out

    def _numbers(self, weight: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the whole weight, for one product."""
        first = weight.parts[0]
        out = torch.empty(weight.num_outputs, first.shape[1], dtype=dtype, device=self.scratch.partial.device)
        for part, place in zip(weight.parts, out.split([part.shape[0] for part in weight.parts]), strict=True):
            if isinstance(part, BlockWeight):
                self.kernels.to_numbers(part, dtype, place)
            else:
                place.copy_(part)
        return out


def _on_cpu(x: torch.Tensor, part: BlockWeight | torch.Tensor) -> torch.Tensor:
    return functional.linear(x, part) if isinstance(part, torch.Tensor) else block_codes.multiply(x, part)
