"""Exports a checkpoint as ONNX graphs over a paged KV cache, and keeps the export between runs.

The graphs are built node by node from DecoderConfig and the family's own module tree, which names the weights; nothing
is traced. The weights are in one file beside the graphs. There are three graphs, because a step needs their results
separately: `body` (token ids to the residual stream; writes keys and values to the cache), `head` (final norm and
logits of the rows that draw) and `norm` (for embeddings).

An export is a folder `onnx/NAME-FINGERPRINT` in the cache directory. The fingerprint covers config.json, the weight
files (names, sizes, modification times), the number format and this source file. The folder is written under a
temporary name and renamed when complete. A folder whose files do not match its manifest is exported again.

Dimensions of `body`: T tokens; I rows of Q queries each, over C blocks of the cache; K KV heads of size D;
P = blocks * 2 * K. Inputs:
- input_ids [T], positions [T].
- query_tokens [I, Q]: index in [0, T) of each query; a shorter row repeats its last one.
- token_places [T]: index in [0, I * Q) of each token's result.
- for each KV group g: slots.g [T, 2], the block and the offset in it to which a token's key and value are written;
  block_tables.g [I, C]; key_starts.g [I], the position of the first key of the first block.
- for each rotation r: cos.r and sin.r [positions, D / 2].
- for each layer l: kv.l [P, block_size, D].

Outputs: hidden [T, E], and kv_out.l for each layer. The caller binds kv_out.l to the memory of kv.l, so that ScatterND
writes in place and the cache is never copied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from inferengine.config import cache_directory
from inferengine.core.executor import Progress
from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import MLP, GatedMLP, Linear
from inferengine.layers.norm import HeadNorm, LayerNorm, RMSNorm
from inferengine.layers.rotary import RopeConfig, head_order
from inferengine.models import registry, weights
from inferengine.models.llama import Llama, LlamaLayer

logger = logging.getLogger(__name__)

OPSET, IR_VERSION = 23, 11  # RMSNormalization and RotaryEmbedding came with opset 23
PAGE = 4096  # bytes; each weight is aligned to it
WEIGHTS, MANIFEST = "weights.bin", "manifest.json"
GRAPHS = ("body", "head", "norm")
SMALLEST_SCALE = 1e-30  # scale of a row of zeros
CPU_INFO = Path("/proc/cpuinfo")
LOCK, UNFINISHED = ".lock", ".unfinished-"
FAR = -3.4e38  # masks a score: its exp is 0, and unlike -inf a row that is fully masked gives no NaN


class Export(NamedTuple):
    """A folder with the graphs of a model, and the modules that the graphs were built from, without weights."""

    folder: Path
    model: Llama
    config: DecoderConfig

    def graph(self, name: str) -> Path:
        """Return the file of one of GRAPHS."""
        return self.folder / f"{name}.onnx"


def open_export(settings: ExecutorSettings, progress: Progress, *, anew: bool = False) -> Export:
    """Return the export of the checkpoint in the settings' number format.

    The export is made if there is no complete one, or if `anew` is set. Raises ConfigError for a model that cannot be
    exported, and if the cache directory has no room.
    """
    config, family = registry.read_model_config(settings.folder)
    require_supported(config)
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    if not isinstance(model, Llama):
        raise _unsupported("a model that is not built like Llama")
    folder = export_folder(settings)
    export = Export(folder, model, config)
    if anew or _complaint(folder) is not None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (folder.parent / LOCK).open("w") as lock:
                progress("waiting for another export", 0.0)
                fcntl.flock(lock, fcntl.LOCK_EX)  # of two engines that start at once only one exports
                if (complaint := "ONNX Runtime cannot read it" if anew else _complaint(folder)) is not None:
                    _replace(settings, config, folder, complaint, progress)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                "engine.executor",
                f"the ONNX export cannot be written to {folder.parent} ({reason}): free some space there, or set "
                "XDG_CACHE_HOME to another folder",
            ) from None
    return export


def export_folder(settings: ExecutorSettings) -> Path:
    """Return the folder of a checkpoint's export in the settings' number format."""
    source = settings.folder.resolve()
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(
        f"{onnx.__version__} {settings.quantization} {most_code()} {settings.random_weights} {settings.seed} "
        f"{source}".encode()
    )
    digest.update((settings.folder / "config.json").read_bytes())
    if not settings.random_weights:
        for path in weights.weight_files(settings.folder):
            found = path.stat()
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}".encode())
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", source.name)[:60]
    return cache_directory() / "onnx" / f"{name}-{digest.hexdigest()[:16]}"


def require_supported(config: DecoderConfig) -> None:
    """Raise ConfigError naming a part of the model that the graphs cannot compute."""
    refused = {
        "layers of transformers": config.implementation != "native",
        "a mixture of experts": config.moe is not None,
        "attention sinks": config.sinks,
        "latent attention": config.latent is not None,
        "tokens that see later ones": not config.is_causal,
        "the layers of Gemma 4": config.value_norm or config.full_kv is not None or config.layer_inputs is not None,
    }
    for what, found in refused.items():
        if found:
            raise _unsupported(what)


def _unsupported(what: str) -> ConfigError:
    return ConfigError("engine.executor", f"onnx cannot compute {what}: set it to torch")


# -- files -------------------------------------------------------------------------------------------------------------


def _complaint(folder: Path) -> str | None:
    """Return why this folder is not a complete export; None if it is.

    Graphs are compared by checksum. The weights, which may have gigabytes, are compared by size only.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if not {f"{name}.onnx" for name in GRAPHS} <= files.keys():
            return f"{MANIFEST} does not name all graphs"
        for name, entry in files.items():
            path = folder / name
            if Path(name).name != name or path.is_symlink():
                return f"{name} is no file of the folder"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has another size than when it was written"
            if entry["sha256"] and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def _replace(
    settings: ExecutorSettings, config: DecoderConfig, folder: Path, complaint: str, progress: Progress
) -> None:
    """Write an export under a temporary name, then rename it, so that it is never seen incomplete. Raises OSError."""
    begin = time.perf_counter()
    if folder.exists():
        logger.warning("the export %s is made again: %s", folder.name, complaint)
        shutil.rmtree(folder)
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # left by killed processes, since this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    source = str(settings.folder.resolve())
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder.parent) as name:
        made = Path(name) / "export"
        made.mkdir(mode=0o700)
        _export(settings, config, made, progress)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path) if path.suffix == ".onnx" else ""}
            for path in sorted(made.iterdir())
        }
        manifest = {"source": source, "quantization": settings.quantization, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        with (made / WEIGHTS).open("rb") as written:
            os.fsync(written.fileno())  # later only its size is checked, so the content must be on the disk now
        _remove_older(folder, source, settings.quantization)
        made.rename(folder)
    logger.info("exported %s to %s in %.1f s", settings.folder.name, folder, time.perf_counter() - begin)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove_older(folder: Path, source: str, quantization: str) -> None:
    """Remove exports of an earlier state of this checkpoint, or by an older version of this file.

    A process that still uses one has its files open, so it is not disturbed.
    """
    for other in folder.parent.glob(f"*/{MANIFEST}"):
        try:
            manifest = json.loads(other.read_text(encoding="utf-8"))
            if manifest["source"] == source and manifest["quantization"] == quantization and other.parent != folder:
                shutil.rmtree(other.parent, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _export(settings: ExecutorSettings, config: DecoderConfig, folder: Path, progress: Progress) -> None:
    """Write weights and graphs: in fp32, or with the products' weights in int8.

    The weights are loaded into a memory mapping of their file, so a checkpoint may be larger than the memory.
    """
    _, family = registry.read_model_config(settings.folder)
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    assert isinstance(model, Llama)
    places = _map_weights(model, folder / WEIGHTS)
    cpu = torch.device("cpu")
    if settings.random_weights:
        weights.fill_random(model, dtype=torch.float32, device=cpu, seed=settings.seed)
    else:
        weights.load_weights(
            model,
            family.weight_map(config),
            settings.folder,
            dtype=torch.float32,
            device=cpu,
            progress=lambda share: progress("exporting weights", share),
        )
    _put_in_order(model)
    table = model.embed.weight if config.tied_embeddings else model.head.weight
    found = Weights(places, {})
    if settings.quantization != "none":
        found = _write_int8(model, table, folder / "weights.int8", progress)
        (folder / "weights.int8").replace(folder / WEIGHTS)
    for name, graph in _graphs(model, config, table, found):
        onnx.save(graph, folder / f"{name}.onnx")
    progress("exporting weights", 1.0)


class TensorLocation(NamedTuple):
    """Where a tensor is in the weights file; offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    number_type: int = TensorProto.FLOAT


def _map_weights(model: nn.Module, file: Path) -> dict[int, TensorLocation]:
    """Back every parameter of a model on `meta` by a memory mapping of `file`.

    Returns the places by `id` of the new parameters. The file's space is allocated first, so that a full disk raises
    OSError; otherwise writing to the mapping would kill the process.
    """
    made: dict[int, nn.Parameter] = {}
    sizes = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    offsets = np.cumsum([0, *(-(-4 * parameter.numel() // PAGE) * PAGE for _, parameter in sizes.values())])
    with file.open("wb") as writer:
        os.posix_fallocate(writer.fileno(), 0, int(offsets[-1]))
    mapped = np.memmap(file, dtype=np.uint8, mode="r+")
    places: dict[int, TensorLocation] = {}
    for (key, (name, parameter)), offset in zip(sizes.items(), offsets.tolist(), strict=False):
        num_bytes = 4 * parameter.numel()
        data = torch.from_numpy(mapped[offset : offset + num_bytes].view(np.float32)).view(parameter.shape)
        made[key] = nn.Parameter(data, requires_grad=False)
        places[id(made[key])] = TensorLocation(name, tuple(parameter.shape), offset, num_bytes)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, made[id(parameter)])
    return places


def _put_in_order(model: Llama) -> None:
    """Permute the rows of queries and keys to the order that RotaryEmbedding expects (layers/rotary.py)."""
    for module in model.modules():
        if isinstance(module, Linear) and module.order is not None and module.weight is not None:
            module.weight.data.copy_(module.weight.data[module.order])
            if module.bias is not None:
                module.bias.data.copy_(module.bias.data[module.order])
        if isinstance(module, Attention) and module.rope is not None:
            norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm", "q_wide", "k_wide")]
            order = head_order(module.rope)
            for norm in norms:
                if norm is not None and order is not None:
                    heads = norm.weight.data.view(-1, module.head_dim)
                    heads.copy_(heads[:, order])


class Weights(NamedTuple):
    """Where parameters are in the weights file, by `id`: fp32 numbers, and int8 codes with their scales."""

    numbers: dict[int, TensorLocation]
    codes: dict[int, tuple[TensorLocation, TensorLocation]]


def most_code() -> int:
    """Return the largest int8 code of a weight. On x86 without VNNI, ONNX Runtime adds two products of 8-bit inputs and
    weights in 16 bits, which 255 * 64 * 2 does not exceed and larger codes do (its option reduce_range)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 127
    try:
        return 127 if "vnni" in CPU_INFO.read_text() else 64
    except OSError:
        return 64


def _write_int8(model: Llama, table: torch.Tensor | None, file: Path, progress: Progress) -> Weights:
    """Write a weights file in which the weights of products are quantized to int8, one scale for each output channel.

    A weight becomes codes [in, out], the layout of MatMulInteger, and scales [out]. `table` is the head's weight. Only
    one weight at a time is in memory.
    """
    products = {id(module.weight) for module in model.modules() if isinstance(module, Linear)} | {id(table)}
    found = Weights({}, {})
    most = most_code()
    with file.open("wb") as writer:

        def put(name: str, array: torch.Tensor, number_type: int = TensorProto.FLOAT) -> TensorLocation:
            writer.seek(-(-writer.tell() // PAGE) * PAGE)
            place = TensorLocation(name, tuple(array.shape), writer.tell(), array.nbytes, number_type)
            array.contiguous().numpy().tofile(writer)
            return place

        parameters = list(model.named_parameters())
        for index, (name, parameter) in enumerate(parameters):
            progress("quantizing", index / len(parameters))
            if id(parameter) not in products or parameter is model.embed.weight:
                found.numbers[id(parameter)] = put(name, parameter.data)
            if id(parameter) in products:
                scales = parameter.data.abs().amax(1).clamp_min(SMALLEST_SCALE * most) / most
                codes = torch.round(parameter.data / scales.unsqueeze(1)).to(torch.int8).t()
                found.codes[id(parameter)] = (
                    put(f"{name}.codes", codes, TensorProto.INT8),
                    put(f"{name}.scales", scales),
                )
    return found


# -- graphs ------------------------------------------------------------------------------------------------------------


class Graph:
    """Builds one graph node by node. Values are represented by their names, as in an ONNX file."""

    def __init__(self, found: Weights) -> None:
        self._weights = found
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, kind: int, shape: Sequence[Any]) -> str:
        """Declare an input. `shape`: numbers, and names for dimensions that differ from step to step."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, shape: Sequence[Any]) -> str:
        """Declare the latest node's value as an output of the graph called `name`. Returns the name. Raises ValueError
        for an earlier value."""
        node = self._nodes[-1]
        if list(node.output) != [value]:
            raise ValueError(f"{value} is not the latest value")
        node.output[0] = name
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several outputs, and return their names."""
        outputs = [f"{kind}.{len(self._nodes)}.{index}" for index in range(count)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, **attributes))
        return outputs

    def ints(self, *values: int) -> str:
        """Return an int64 constant [n]."""
        return self._constant(np.array(values, dtype=np.int64))

    def number(self, value: float) -> str:
        """Return a scalar fp32 constant."""
        return self._constant(np.array(value, dtype=np.float32))

    def _constant(self, array: np.ndarray) -> str:
        name = f"constant.{array.dtype}.{array.ndim}.{'_'.join(map(str, array.reshape(-1).tolist()))}"
        self._tensors.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def weight(self, parameter: torch.Tensor | None) -> str:
        """Return a parameter as external data, which stays in the weights file."""
        return self._stored(self._weights.numbers[id(parameter)])

    def _stored(self, place: TensorLocation) -> str:
        if place.name not in self._tensors:
            tensor = TensorProto(name=place.name, data_type=place.number_type, dims=place.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", WEIGHTS), ("offset", place.offset), ("length", place.num_bytes)):
                tensor.external_data.add(key=key, value=str(value))
            self._tensors[place.name] = tensor
        return place.name

    def linear(self, x: str, linear: Linear) -> str:
        """Apply a linear layer: [T, in] -> [T, out]."""
        return self.product(x, linear.weight, linear.bias)

    def product(self, x: str, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> str:
        """Return x @ weight^T + bias for a weight [out, in]; with int8 arithmetic if the weight was quantized."""
        found = self._weights.codes.get(id(weight))
        if found is None:
            rest = [] if bias is None else [self.weight(bias)]
            return self.op("Gemm", x, self.weight(weight), *rest, transB=1)
        codes, scales = map(self._stored, found)
        rounded, scale, zero = self.ops("DynamicQuantizeLinear", 3, x)
        sums = self.op("Cast", self.op("MatMulInteger", rounded, codes, zero), to=TensorProto.FLOAT)
        y = self.op("Mul", sums, self.op("Mul", scale, scales))
        return y if bias is None else self.op("Add", y, self.weight(bias))

    def norm(self, x: str, norm: nn.Module | None) -> str:
        """Normalize the last dimension; return x itself if `norm` is None."""
        if norm is None:
            return x
        assert isinstance(norm, HeadNorm | LayerNorm | RMSNorm)  # other norms exist only under tensor parallelism
        gain = self.weight(norm.weight)
        if isinstance(norm, HeadNorm):
            num_heads, size = norm.shape
            ones = self._constant(np.ones(size, dtype=np.float32))
            heads = self.op("LayerNormalization", self.reshape(x, 0, num_heads, size), ones, axis=-1, epsilon=norm.eps)
            return self.reshape(self.op("Mul", heads, self.reshape(gain, num_heads, size)), 0, -1)
        if isinstance(norm, LayerNorm):
            bias = [] if norm.bias is None else [self.weight(norm.bias)]
            return self.op("LayerNormalization", x, gain, *bias, axis=-1, epsilon=norm.eps)
        return self.op("RMSNormalization", x, gain, axis=-1, epsilon=norm.eps)

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape x; 0 keeps the size of that dimension."""
        return self.op("Reshape", x, self.ints(*shape))

    def capped(self, x: str, cap: float | None) -> str:
        """Return cap * tanh(x / cap); x itself if `cap` is None."""
        if cap is None:
            return x
        return self.op("Mul", self.op("Tanh", self.op("Div", x, self.number(cap))), self.number(cap))

    def scaled(self, x: str, scale: float | None) -> str:
        """Return scale * x; x itself if `scale` is None."""
        return x if scale is None or scale == 1.0 else self.op("Mul", x, self.number(scale))

    def made(self, name: str) -> onnx.ModelProto:
        """Return the graph as a model."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=list(self._tensors.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="inferengine")


def rotations(config: DecoderConfig) -> list[RopeConfig]:
    """Return the distinct rotations of a model's layers; r of the inputs cos.r and sin.r is the index in this list."""
    ropes = (config.rope_of(layer) for layer in range(config.num_layers))
    return list(dict.fromkeys(rope for rope in ropes if rope is not None))


def _graphs(
    model: Llama, config: DecoderConfig, table: torch.Tensor | None, found: Weights
) -> list[tuple[str, onnx.ModelProto]]:
    """Build the three graphs, as (name, graph). `table` is the head's weight."""
    head, norm = Graph(found), Graph(found)
    x = head.norm(head.input("hidden", TensorProto.FLOAT, ["N", config.hidden_size]), model.norm)
    logits = head.product(x, table)
    logits = head.capped(head.scaled(logits, config.logits_scale), config.logits_softcap)
    head.output(logits, "logits", ["N", config.vocab_size])
    x = norm.norm(norm.input("hidden", TensorProto.FLOAT, ["N", config.hidden_size]), model.norm)
    norm.output(x, "normed", ["N", config.hidden_size])
    return [("body", _body(model, config, found)), ("head", head.made("head")), ("norm", norm.made("norm"))]


class KeyGroup(NamedTuple):
    """Indices and mask that all layers of a KV group share (K KV heads)."""

    places: str  # [T * 2 * K, 2]: row of the cache and offset in it to which keys and values are written
    keys: str  # [I, K, C]: rows of the cache with the keys to read
    values: str  # [I, K, C]: rows of the cache with the values to read
    mask: str  # [I, 1, 1, Q, C * block_size]: 0 for a visible key, else FAR


def _body(model: Llama, config: DecoderConfig, found: Weights) -> onnx.ModelProto:
    graph = Graph(found)
    ids = graph.input("input_ids", TensorProto.INT32, ["T"])
    positions = graph.input("positions", TensorProto.INT64, ["T"])
    queries = graph.input("query_tokens", TensorProto.INT32, ["I", "Q"])
    answers = graph.input("token_places", TensorProto.INT32, ["T"])
    caches = [
        graph.input(f"kv.{layer}", TensorProto.FLOAT, ["P" + str(config.windows[layer]), "B", config.head_dim])
        for layer in range(config.num_layers)
    ]
    half = ["positions", config.head_dim // 2]
    angles = {
        rope: (
            graph.input(f"cos.{index}", TensorProto.FLOAT, half),
            graph.input(f"sin.{index}", TensorProto.FLOAT, half),
        )
        for index, rope in enumerate(rotations(config))
    }
    groups = [
        _key_group(graph, config, group, caches, positions, queries) for group in range(len(config.group_windows))
    ]
    here = graph.reshape(positions, -1, 1)
    factors = "" if config.query_scaling is None else _query_factors(graph, positions, *config.query_scaling)
    x = graph.scaled(graph.op("Gather", graph.weight(model.embed.weight), ids), config.embedding_scale)
    if model.unused_positions is not None:
        row = graph.op("Add", positions, graph.ints(model.unused_positions))
        x = graph.op("Add", x, graph.op("Gather", graph.weight(model.positions.weight), row))
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, LlamaLayer)
        rope = config.rope_of(index)
        attend = _Attend(graph, config, index, caches[index], groups[layer.attention.group], queries, answers)
        if rope is not None:
            attend.rotate = (*angles[rope], here)
        attend.query_factors = factors
        x = _layer(graph, config, layer, x, attend)
    graph.output(x, "hidden", ["T", config.hidden_size])
    return graph.made("body")


def _key_group(
    graph: Graph, config: DecoderConfig, group: int, caches: list[str], positions: str, queries: str
) -> KeyGroup:
    """Add the nodes that compute what the layers of a group share."""
    window, num_heads = config.group_windows[group], config.num_kv_heads
    slots = graph.input(f"slots.{group}", TensorProto.INT64, ["T", 2])
    tables = graph.input(f"block_tables.{group}", TensorProto.INT64, ["I", f"C{group}"])
    starts = graph.input(f"key_starts.{group}", TensorProto.INT64, ["I"])
    both = graph.ints(2 * num_heads)
    heads = graph.ints(*range(2 * num_heads))
    block, offset = graph.ops("Split", 2, slots, axis=1, num_outputs=2)  # [T, 1] each
    block = graph.op("Add", graph.op("Mul", block, both), heads)  # [T, 2K]
    offset = graph.op("Expand", offset, graph.op("Shape", block))
    pairs = graph.op("Concat", graph.reshape(block, -1, 1), graph.reshape(offset, -1, 1), axis=1)
    first = graph.op("Mul", graph.op("Unsqueeze", tables, graph.ints(1)), both)  # [I, 1, C]
    keys = graph.op("Add", first, graph.reshape(graph.ints(*range(num_heads)), 1, -1, 1))
    values = graph.op("Add", keys, graph.ints(num_heads))
    size = graph.op("Shape", caches[config.windows.index(window)], start=1, end=2)
    length = graph.op("Mul", graph.op("Shape", tables, start=1, end=2), size)
    zero, one = graph.op("Squeeze", graph.ints(0)), graph.op("Squeeze", graph.ints(1))
    key = graph.op("Range", zero, graph.op("Squeeze", length), one)  # [L]
    key = graph.op("Add", graph.op("Unsqueeze", starts, graph.ints(1)), key)  # [I, L]
    key = graph.op("Unsqueeze", key, graph.ints(1))  # [I, 1, L]
    query = graph.op("Unsqueeze", graph.op("Gather", positions, queries), graph.ints(2))  # [I, Q, 1]
    seen = graph.op("LessOrEqual", key, query)
    if window is not None:
        near = graph.op("Less", graph.op("Sub", query, key), graph.ints(window))
        seen = graph.op("And", seen, near)
    mask = graph.op("Where", seen, graph.number(0.0), graph.number(FAR))  # [I, Q, L]
    return KeyGroup(pairs, keys, values, graph.op("Unsqueeze", mask, graph.ints(1, 2)))


def _query_factors(graph: Graph, positions: str, beta: float, context: int) -> str:
    """Return 1 + beta * log(1 + position // context), [T, 1]."""
    spans = graph.op("Cast", graph.op("Div", positions, graph.ints(context)), to=TensorProto.FLOAT)
    grown = graph.op("Log", graph.op("Add", spans, graph.number(1.0)))
    factors = graph.op("Add", graph.op("Mul", grown, graph.number(beta)), graph.number(1.0))
    return graph.reshape(factors, -1, 1)


class _Attend:
    """Adds the nodes of one layer's attention: keys and values are written to the cache, then attended to there."""

    def __init__(
        self, graph: Graph, config: DecoderConfig, layer: int, cache: str, group: KeyGroup, queries: str, answers: str
    ) -> None:
        self.graph, self.config, self.layer, self.cache = graph, config, layer, cache
        self.group, self.queries, self.answers = group, queries, answers
        self.rotate: tuple[str, str, str] | None = None  # cosines, sines, positions [T, 1]
        self.query_factors = ""  # [T, 1]

    def __call__(self, qkv: str, attention: Attention) -> str:
        """Export the attention of packed qkv [T, (H + 2K) * D] -> [T, H * D], and return the name of the result."""
        graph, config = self.graph, self.config
        num_heads, num_keys, size = config.num_heads, config.num_kv_heads, config.head_dim
        num_rotated = num_heads + num_keys  # heads of queries and keys, which are rotated
        rotated, value = graph.ops("Split", 2, qkv, graph.ints(num_rotated * size, num_keys * size), axis=1)
        if attention.is_adjusted or attention.q_norm is not None:
            query, key = graph.ops("Split", 2, rotated, graph.ints(num_heads * size, num_keys * size), axis=1)
            if attention.has_wide_norms:
                query, key = graph.norm(query, attention.q_wide), graph.norm(key, attention.k_wide)
            if self.query_factors:
                query = graph.op("Mul", query, self.query_factors)
            if attention.q_norm is not None:
                query = graph.norm(graph.reshape(query, 0, -1, size), attention.q_norm)
                key = graph.norm(graph.reshape(key, 0, -1, size), attention.k_norm)
            rotated = graph.op("Concat", query, key, axis=1)
        if self.rotate is not None:
            cos, sin, positions = self.rotate
            # Each token is a sequence of one: ONNX Runtime refuses sequences of more tokens than there are positions.
            rotated = graph.reshape(rotated, -1, 1, num_rotated * size)
            rotated = graph.op("RotaryEmbedding", rotated, cos, sin, positions, num_heads=num_rotated)
        rotated = graph.reshape(rotated, -1, num_rotated * size)
        query, key = graph.ops("Split", 2, rotated, graph.ints(num_heads * size, num_keys * size), axis=1)
        written = graph.reshape(graph.op("Concat", key, value, axis=1), -1, size)
        cache = graph.op("ScatterND", self.cache, self.group.places, written)
        cache = graph.output(cache, f"kv_out.{self.layer}", ["P" + str(config.windows[self.layer]), "B", size])
        keys = graph.reshape(graph.op("Gather", cache, self.group.keys), 0, 0, -1, size)  # [I, K, L, D]
        values = graph.reshape(graph.op("Gather", cache, self.group.values), 0, 0, -1, size)
        return self._mix(query, keys, values)

    def _mix(self, query: str, keys: str, values: str) -> str:
        """Compute softmax(query @ keys^T + mask) @ values; [T, H * D].

        The query heads that share a KV head become rows of one product, so scores have the shape [I, K, H / K * Q, L].
        """
        graph, config = self.graph, self.config
        num_keys, size = config.num_kv_heads, config.head_dim
        share = config.num_heads // num_keys
        query = graph.reshape(graph.op("Gather", query, self.queries), 0, 0, num_keys, share, size)
        query = graph.op("Transpose", query, perm=[0, 2, 3, 1, 4])  # [I, K, H / K, Q, D]
        shape = graph.op("Shape", query)
        query = graph.scaled(graph.reshape(query, 0, 0, -1, size), config.attention_scale)
        scores = graph.op("MatMul", query, graph.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = graph.capped(scores, config.attention_softcap)
        flat, length = graph.op("Shape", scores), graph.op("Shape", scores, start=3)
        apart = graph.op("Concat", graph.op("Slice", shape, graph.ints(0), graph.ints(4)), length, axis=0)
        scores = graph.op("Add", graph.op("Reshape", scores, apart), self.group.mask)
        shares = graph.op("Softmax", scores, axis=-1)
        mixed = graph.op("MatMul", graph.op("Reshape", shares, flat), values)
        mixed = graph.op("Transpose", graph.op("Reshape", mixed, shape), perm=[0, 3, 1, 2, 4])
        return graph.op("Gather", graph.reshape(mixed, -1, config.num_heads * size), self.answers)


def _layer(graph: Graph, config: DecoderConfig, layer: LlamaLayer, x: str, attend: _Attend) -> str:
    """Add one layer's nodes, as LlamaLayer.forward computes it: residual stream [T, E] -> [T, E]."""

    def add(x: str, block: str, norm: nn.Module | None) -> str:
        return graph.op("Add", x, graph.norm(block, norm))

    attention = layer.attention
    assert isinstance(attention, Attention)  # `require_supported` refused latents
    normed = graph.norm(x, layer.attention_norm)
    mixed = graph.linear(attend(graph.linear(normed, attention.qkv), attention), attention.out)
    if config.parallel:
        fed = _feed_forward(graph, layer, normed if layer.mlp_norm is None else graph.norm(x, layer.mlp_norm))
        return add(add(x, mixed, layer.attention_out_norm), fed, layer.mlp_out_norm)
    x = add(x, mixed, layer.attention_out_norm)
    return add(x, _feed_forward(graph, layer, graph.norm(x, layer.mlp_norm)), layer.mlp_out_norm)


def _feed_forward(graph: Graph, layer: LlamaLayer, x: str) -> str:
    mlp = layer.mlp
    if isinstance(mlp, GatedMLP):
        gate, up = graph.ops("Split", 2, graph.linear(x, mlp.gate_up), axis=1, num_outputs=2)
        return graph.linear(graph.op("Mul", _activation(graph, gate, mlp.activation), up), mlp.down)
    assert isinstance(mlp, MLP)  # `require_supported` refused experts
    return graph.linear(_activation(graph, graph.linear(x, mlp.up), mlp.activation), mlp.down)


def _activation(graph: Graph, x: str, name: str) -> str:
    match name:
        case "silu":
            return graph.op("Mul", x, graph.op("Sigmoid", x))
        case "gelu":
            return graph.op("Gelu", x)
        case "gelu_tanh":
            return graph.op("Gelu", x, approximate="tanh")
        case "relu":
            return graph.op("Relu", x)
        case "relu2":
            rectified = graph.op("Relu", x)
            return graph.op("Mul", rectified, rectified)
    raise _unsupported(f"the activation {name}")
