"""Chooses kernels for a loaded model by measurement: reads the table of this card, or measures what it lacks.

Products, decode attention and mixtures of experts are those of the model's own layers, timed as the layers call them,
one layer's weight after the other's, so that no weight is in L2 unless a step would find it there too. They share one
budget of seconds and take turns, what takes most of a step first. Deterministic mode and fp32 keep their fixed rules.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inferengine.config import cache_directory
from inferengine.core.executor import Progress
from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.tools.attention_timer import AttentionTimer
from inferengine.executor.tools.call_timer import (
    MOST_ERROR,
    CallTimer,
    check_result,
    compile_candidates,
    num_calls,
    with_choice,
)
from inferengine.executor.tools.experts_timer import ExpertsTimer
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.attention import Attention
from inferengine.layers.embedding import Head
from inferengine.layers.latent import LatentAttention
from inferengine.layers.layer_inputs import LayerInputGate, LayerInputs
from inferengine.layers.linear import MLP, GatedMLP, Linear
from inferengine.layers.moe import MoeMLP
from inferengine.layers.parallel import vocabulary_rows
from inferengine.models import registry
from inferengine.models.decoder import DecoderModel

logger = logging.getLogger(__name__)

AUTO_BUDGET_S = 20.0
LEAST_AUTO_BYTES = 1 << 30  # of weights: a smaller model is not measured by itself
EPS = 1e-6
MOST_ERROR_OF_CODES = 0.1  # e4m3 has three bits: two roundings of one number may be 4 % apart
POOL_BYTES = 256 << 20  # of keys and values that attention is measured with, at most a quarter of what is free
LEAST_POOL_BYTES = 16 << 20
EXPERTS_BYTES = 256 << 20  # of activations of the most tokens that experts are measured with
CACHE_SHARE = 0.9  # of a device's memory, that the keys and values of a step can take
MARK = "measuring-"  # beginning of the name of a file that is there while a process measures
PRIORITY_ROWS, PRIORITY_CONTEXT = 64, 1024  # of a step: what reads most of its bytes is measured first


class Layers(NamedTuple):
    """The layers that compute one product, in the order of the model."""

    product: Any  # TunedProduct
    layers: list[Linear | Head]


class Work(NamedTuple):
    """What of a model is measured: its products, and its layers of attention (by TunedAttention) and of experts (by
    TunedExperts)."""

    products: list[Layers]
    attention: dict[Any, list[Attention]]
    experts: dict[Any, list[MoeMLP]]

    def keys(self) -> set[Any]:
        """Return the keys of all its measurements."""
        products = {key for group in self.products for key in group.product.measured_keys()}
        return products | {subject.key for subject in (*self.attention, *self.experts)}

    def without(self, table: Any) -> Work:
        """Return what a table does not have."""
        return Work(
            [group for group in self.products if not group.product.measured_keys() <= table.entries.keys()],
            {subject: layers for subject, layers in self.attention.items() if subject.key not in table.choices},
            {subject: layers for subject, layers in self.experts.items() if subject.key not in table.choices},
        )


class TuneReport(NamedTuple):
    """What is known of a model: `table` all that was measured, `keys` what of it is this model's, `measured` whether
    some was measured just now, `slow_rows` the numbers of rows whose steps take longer than larger ones."""

    keys: set[Any]
    table: Any  # MeasuredTable
    environment: Any  # of measured_table.py
    measured: bool
    seconds: float
    slow_rows: frozenset[int] = frozenset()


def tune_budget(value: str, weight_bytes: int = 0) -> float | None:
    """Return the seconds that `engine.tune` allows for measuring; None: tables are not used either. Raises
    ConfigError."""
    if value == "off":
        return None
    if value == "auto":
        return AUTO_BUDGET_S if weight_bytes >= LEAST_AUTO_BYTES else 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ConfigError("engine.tune", f"'{value}' is neither auto, off nor a number of seconds up to 3600")
    return seconds


def tables_folder() -> Path:
    """Return the folder of the tables that this machine measured."""
    return cache_directory() / "tuned"


def tune(
    settings: ExecutorSettings,
    model: DecoderModel,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Progress,
    *,
    anew: bool = False,
) -> TuneReport | None:
    """Let measurements of this card decide which kernels are launched: those on disk, and what is measured now within
    the budget. `anew`: measure everything. None where nothing is to be measured: on a CPU, where it is off, in
    deterministic mode and for fp32."""
    if settings.device.type != "cuda":
        return None
    import triton

    from inferengine.kernels.cuda.tuning import measured_table as tables
    from inferengine.kernels.cuda.tuning import search

    tables.MeasuredTable().decide()
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in tensors_of(model))
    budget_s = tune_budget(settings.tune, weight_bytes)
    if budget_s is None or settings.deterministic or dtype == torch.float32:
        return None
    if settings.tensor_parallel > 1:  # the processes of a model must choose alike: from tables alone
        budget_s = 0.0
    begin = time.perf_counter()
    try:
        work = work_of(model, settings, dtype, max_model_len)
    except Exception:  # no model is refused for what would make it faster
        logger.warning("it is not known which kernels the model needs; they are chosen by rules", exc_info=True)
        return None
    card = torch.cuda.get_device_name(settings.device)
    environment = tables.Environment(card, torch.__version__, triton.__version__, tables.kernel_hash())
    known = tables.shipped_for_chip(card)
    known.update(tables.load(tables_folder(), environment))
    missing = work if anew else to_measure(work.without(known), settings.tune)
    measured = any(missing) and budget_s > 0 and (anew or not has_crashed(tables_folder()))
    if measured:
        progress("measuring kernels", 0.0)
        with crash_mark(tables_folder()):
            found = measure(missing, settings, dtype, budget_s, progress)
        known.update(found)
        torch.cuda.empty_cache()
        try:
            file = tables.save(found, tables_folder(), environment)
            logger.info(
                "measured %d products, %d kinds of attention and %d of experts in %.1f s: %s",
                *(len(part) for part in missing), time.perf_counter() - begin, file,
            )  # fmt: skip
        except OSError as error:
            logger.warning("the table of measured kernels cannot be written: %s; set XDG_CACHE_HOME", error)
    known.decide()
    seconds = time.perf_counter() - begin
    products = [group.product for group in work.products]
    slow_rows = search.slow_rows(products, known) if settings.tensor_parallel == 1 else frozenset()
    return TuneReport(work.keys(), known, environment, measured, seconds, slow_rows)


def to_measure(missing: Work, value: str) -> Work:
    """Return what of the work an engine measures by itself with this `engine.tune`. Rules choose attention and experts
    well enough that no start waits for them unless it is asked to."""
    return missing._replace(attention={}, experts={}) if value == "auto" else missing


@contextlib.contextmanager
def crash_mark(folder: Path) -> Iterator[None]:
    """Keep a file named after this process in `folder` meanwhile. What is there from another is removed."""
    mark = folder / f"{MARK}{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _marks_of_ended(folder):
            old.unlink(missing_ok=True)
        mark.touch()
    except OSError:  # the table cannot be written either, which is logged then
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def has_crashed(folder: Path) -> bool:
    """Return whether a process ended while it measured: a kernel that breaks the device would break every start."""
    marks = _marks_of_ended(folder)
    if marks:
        logger.warning(
            "a process ended while it measured kernels; they are chosen by rules: run 'inferengine tune', or remove %s",
            marks[0],
        )
    return bool(marks)


def _marks_of_ended(folder: Path) -> list[Path]:
    """Return the marks of processes that are gone. One of this process's number is from an earlier one, as in a
    container."""
    running = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()} - {str(os.getpid())}
    return [mark for mark in folder.glob(f"{MARK}*") if mark.name.removeprefix(MARK) not in running]


def measure(missing: Work, settings: ExecutorSettings, dtype: torch.dtype, budget_s: float, progress: Progress) -> Any:
    """Measure on a CUDA device what is missing, and return the table of it."""
    from inferengine.kernels.cuda.tuning.measured_table import MeasuredTable
    from inferengine.kernels.cuda.tuning.search import StreamTimer

    free_bytes = torch.cuda.mem_get_info(settings.device)[0]
    table = MeasuredTable()
    try:
        measure_within(
            missing, settings, dtype, table, StreamTimer(), clock=time.perf_counter, budget_s=budget_s,
            free_bytes=free_bytes, progress=lambda share: progress("measuring kernels", share),
        )  # fmt: skip
    except Exception:  # the rules choose well enough to serve
        logger.warning("kernels could not be measured; they are chosen by rules", exc_info=True)
    return table


def measure_within(
    missing: Work,
    settings: ExecutorSettings,
    dtype: torch.dtype,
    table: Any,
    timer: CallTimer,
    *,
    clock: Callable[[], float],
    budget_s: float,
    free_bytes: int,
    progress: Callable[[float], None],
) -> None:
    """Measure what is missing until all is measured or the budget is spent, and put it into a MeasuredTable. Products
    that were tried are noted there even where nothing came of it, so that the next start does not try them again."""
    from inferengine.kernels.cuda.tuning.choices import SearchBudget, search_choices
    from inferengine.kernels.cuda.tuning.search import search_products, take_turns

    budget, device = SearchBudget(clock, budget_s), settings.device
    searches: list[tuple[float, Iterator[None], Callable[[], None]]] = []

    def add_choices(subjects: Sequence[Any], timer: Any, num_bytes: float) -> None:
        search = search_choices(
            subjects, timer, budget, lambda each, rows, entry: table.put_choice(each.key, rows, entry)
        )
        searches.append((num_bytes, search, lambda: None))

    if missing.products:
        products = [group.product for group in missing.products]
        product_timer = LayerTimer(missing.products, device, dtype, timer)
        search = search_products(products, product_timer, budget, settings.max_num_batched_tokens, table)
        keys = [key for product in products for key in product.measured_keys()]
        num_bytes = 2.0 * sum(product.width * product.columns * product.uses for product in products)
        searches.append((num_bytes, search, lambda: table.add_empty(keys)))
    if missing.attention:
        subjects = sorted(missing.attention, key=lambda each: -each.uses)
        pool_bytes = min(POOL_BYTES, free_bytes // 4)
        if pool_bytes >= LEAST_POOL_BYTES:
            kv_dtype = _kv_dtype(settings, dtype)
            attention_timer = AttentionTimer(missing.attention, device, dtype, kv_dtype, timer, pool_bytes)
            read = sum(each.uses * each.read_bytes(PRIORITY_ROWS, PRIORITY_CONTEXT) for each in subjects)
            add_choices(subjects, attention_timer, read)
        else:
            logger.warning("attention is not measured: %d MiB of memory are free", free_bytes >> 20)
    if missing.experts:
        if free_bytes >= 4 * EXPERTS_BYTES:
            mixtures = sorted(missing.experts, key=lambda each: -each.uses)
            read = sum(each.uses * each.read_bytes(PRIORITY_ROWS) for each in mixtures)
            add_choices(mixtures, ExpertsTimer(missing.experts, device, dtype, timer), read)
        else:
            logger.warning("experts are not measured: %d MiB of memory are free", free_bytes >> 20)
    searches.sort(key=lambda item: -item[0])
    finished = take_turns([search for _, search, _ in searches], budget, progress)
    for is_finished, (_, _, note) in zip(finished, searches, strict=True):
        if is_finished:
            note()


def measure_model(settings: ExecutorSettings) -> TuneReport | None:
    """Load a model and measure all of it anew."""
    from inferengine.executor.load import load_model
    from inferengine.executor.memory.plan import context_length
    from inferengine.kernels import ops
    from inferengine.kernels.cuda.compilation import compile_workers

    def silent(phase: str, share: float) -> None:
        pass

    with compile_workers():
        loaded = load_model(settings, ops.resolve(settings.device, deterministic=settings.deterministic), silent)
        max_model_len = context_length(settings, loaded.config)
        return tune(settings, loaded.model, loaded.dtype, max_model_len, silent, anew=True)


def known_table() -> tuple[Any, Any]:
    """Return all that was measured on this machine's card, and of what. Without a card: the package's tables."""
    import triton

    from inferengine.kernels.cuda.tuning import measured_table as tables

    if not torch.cuda.is_available():
        return tables.shipped_most()
    card = torch.cuda.get_device_name()
    environment = tables.Environment(card, torch.__version__, triton.__version__, tables.kernel_hash())
    known = tables.shipped(card)
    known.update(tables.load(tables_folder(), environment))
    return known, environment


def keys_in(table: Any, settings: ExecutorSettings) -> set[Any]:
    """Return the keys of a table that belong to a model, from its config.json alone."""
    config, family = registry.read_model_config(settings.folder)
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    head_rows = (config.vocab_size, vocabulary_rows(config.vocab_size))  # a head that is stored in codes has no padding
    shapes = {(rows, config.hidden_size) for rows in head_rows}
    for layer, _ in _uses(model):
        if isinstance(layer, Linear):
            shapes.add((sum(layer.parts), layer.in_features))
    heads = {(each.num_heads, each.num_kv_heads, each.head_dim, each.window or 0) for each in _attentions(model)}
    mixtures = {
        (each.config.num_experts, each.config.num_chosen, sum(each.gate_up.parts) // each.gate_up.num_experts,
         each.gate_up.in_features) for each in _mixtures(model)
    }  # fmt: skip
    products = {key for key in table.entries if (key.width, key.columns) in shapes}
    return products | {key for key in table.choices if _is_of(key, heads, mixtures)}


def _is_of(key: Any, heads: Collection[tuple[int, ...]], mixtures: Collection[tuple[int, ...]]) -> bool:
    """Return whether a key of attention or experts is of these heads or mixtures."""
    if hasattr(key, "head_dim"):
        return (key.num_heads, key.num_kv_heads, key.head_dim, key.window) in heads
    return (key.num_experts, key.num_chosen, key.rows, key.columns) in mixtures


def work_of(model: DecoderModel, settings: ExecutorSettings, dtype: torch.dtype, max_model_len: int) -> Work:
    """Return what of a model is measured on its device."""
    device_bytes = torch.cuda.get_device_properties(settings.device).total_memory
    return Work(
        products_of(model, settings, dtype),
        attention_of(model, settings, dtype, max_model_len, int(device_bytes * CACHE_SHARE)),
        experts_of(model, settings, dtype),
    )


def attention_of(
    model: DecoderModel, settings: ExecutorSettings, dtype: torch.dtype, max_model_len: int, cache_bytes: int
) -> dict[Any, list[Attention]]:
    """Return the layers of attention by TunedAttention. `cache_bytes`: of the largest cache that the device holds."""
    from inferengine.kernels.cuda.dispatch import AttentionKey
    from inferengine.kernels.cuda.tuning.tuned_attention import TunedAttention

    item_bytes = _kv_dtype(settings, dtype).itemsize
    found: dict[Any, list[Attention]] = {}
    for layer in _attentions(model):
        heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
        key = AttentionKey(*heads, settings.block_size, 8 * item_bytes, layer.window or 0)
        found.setdefault(key, []).append(layer)
    token_bytes = sum(2 * layer.num_kv_heads * layer.head_dim * item_bytes for layer in _attentions(model))
    room = cache_bytes // max(1, token_bytes)
    return {
        TunedAttention(key, len(layers), settings.max_num_seqs, max_model_len, room): layers
        for key, layers in found.items()
    }


def experts_of(model: DecoderModel, settings: ExecutorSettings, dtype: torch.dtype) -> dict[Any, list[MoeMLP]]:
    """Return the layers of experts by TunedExperts."""
    from inferengine.kernels.cuda.moe.mixture import CudaExperts, experts_key, operands_of
    from inferengine.kernels.cuda.tuning.tuned_experts import TunedExperts

    found: dict[Any, list[MoeMLP]] = {}
    for layer in _mixtures(model):
        if isinstance(layer.packed, CudaExperts):
            key = experts_key(layer.packed, layer.config.num_experts, layer.config.num_chosen)
            found.setdefault((key, operands_of(dtype, layer.packed.gate_up)), []).append(layer)
    mixtures = {}
    for (key, operands), layers in found.items():
        token_bytes = key.num_chosen * (key.columns + key.rows // 2) * dtype.itemsize
        last_row = min(settings.max_num_batched_tokens, EXPERTS_BYTES // token_bytes)
        mixtures[TunedExperts(key, operands, len(layers), last_row)] = layers
    return mixtures


def _attentions(model: DecoderModel) -> list[Attention]:
    """Return the layers that have keys of their own and attend by kernels: one that reads an earlier one's keys takes
    what was measured of that one."""
    found = (module for module in model.modules() if isinstance(module, Attention))
    return [module for module in found if module.is_causal and module.new_keys.has_keys]


def _mixtures(model: DecoderModel) -> list[MoeMLP]:
    return [module for module in model.modules() if isinstance(module, MoeMLP)]


def _kv_dtype(settings: ExecutorSettings, dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if settings.cache_dtype == "fp8" else dtype


def products_of(model: DecoderModel, settings: ExecutorSettings, dtype: torch.dtype) -> list[Layers]:
    """Return the products of a model, those first whose weights are largest in all."""
    from inferengine.kernels.cuda.dispatch import Operands, Product
    from inferengine.kernels.cuda.tuning.search import TunedProduct
    from inferengine.quantization.cuda import CudaWeight, operands_of, shape_of

    codes = {Operands.FP8: Operands.FP8_CODES}
    found: dict[Any, list[Linear | Head]] = {}
    for layer, kind in _uses(model):
        packed: Any = layer.packed
        if isinstance(packed, torch.Tensor):
            operands, (width, columns) = Operands.DENSE, packed.shape
        elif isinstance(packed, CudaWeight):
            operands, (width, columns) = operands_of(dtype, packed, False), shape_of(packed.weight)
        else:  # its columns are in an order of their own, which another ops table knows
            continue
        last_row = settings.max_num_seqs if isinstance(layer, Head) else settings.max_num_batched_tokens
        product = TunedProduct(Product[kind], operands, codes.get(operands, operands), width, columns, last_row)
        found.setdefault(product, []).append(layer)
    groups = [Layers(product._replace(uses=len(layers)), layers) for product, layers in found.items()]
    return sorted(groups, key=lambda group: -group.product.width * group.product.columns * group.product.uses)


def _uses(model: DecoderModel) -> list[tuple[Linear | Head, str]]:
    """Return each layer with a product, and how the model uses it: the name of a Product."""
    uses: list[tuple[Linear | Head, str]] = []

    def added(linear: Linear) -> str:
        fused = linear.offset is None and linear.ops.linear_add_norm is not None
        return "PARTS" if fused else "LINEAR"

    for module in model.modules():
        if isinstance(module, Attention):
            uses += [(module.qkv, "LINEAR"), (module.out, added(module.out))]
        elif isinstance(module, LatentAttention):
            uses += [(module.qkv, "LINEAR"), (module.out, added(module.out))]
            uses += [] if module.query_up is None else [(module.query_up, "LINEAR")]
        elif isinstance(module, GatedMLP):
            uses += [(module.gate_up, "GATED"), (module.down, added(module.down))]
        elif isinstance(module, LayerInputs):
            uses.append((module.projection, "LINEAR"))
        elif isinstance(module, LayerInputGate):
            uses += [(module.gate, "LINEAR"), (module.projection, "LINEAR")]
        elif isinstance(module, MLP):
            uses += [(module.up, "LINEAR"), (module.down, added(module.down))]
        elif isinstance(module, Head):
            uses.append((module, "LINEAR"))
    return uses


def tensors_of(model: DecoderModel) -> list[torch.Tensor]:
    """Return all weights of a loaded model, packed ones included."""
    return [*model.parameters(), *(tensor for layer, _ in _uses(model) for tensor in _tensors(layer.packed))]


@dataclass
class _ProductInputs:
    """x [T, in], gains of norms, and the residual [T, out] that is added to. `expected`: the library's result."""

    x: torch.Tensor
    gain: torch.Tensor
    residual: torch.Tensor | None
    expected: torch.Tensor | None = None


class LayerTimer:
    """Times the products of a model's layers, as search.py asks for them."""

    def __init__(self, groups: Sequence[Layers], device: torch.device, dtype: torch.dtype, timer: CallTimer) -> None:
        self._layers = {group.product: group.layers for group in groups}
        self._device, self._dtype, self._timer = device, dtype, timer
        self._generator = torch.Generator(device).manual_seed(0)
        self._inputs: tuple[Any, _ProductInputs] | None = None  # the latest product and rows

    @torch.inference_mode()
    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile all kernels of these plans, in parallel."""
        from inferengine.kernels.cuda.dispatch import forcing

        def launch(product: Any, rows: int, plan: Any) -> None:
            with forcing(dict(plan)):
                self._calls(product, rows, 1)[0]()

        compile_candidates(work, launch)

    @torch.inference_mode()
    def prepare(self, product: Any, rows: int, plan: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one call. Raises where the plan cannot be launched."""
        from inferengine.kernels.cuda.dispatch import forcing

        weight_bytes = sum(each.nbytes for each in _tensors(self._layers[product][0].packed))
        number = num_calls(weight_bytes, 2 * rows * product.width * product.columns)
        expected, forced = self._expected(product, rows), partial(forcing, dict(plan))
        with forced():
            calls = self._calls(product, rows, number)
            found = calls[0]()
            most_error = MOST_ERROR if isinstance(found, torch.Tensor) else MOST_ERROR_OF_CODES
            check_result(_numbers(found), expected, most_error)
            sample = self._timer.prepare(calls)
        return with_choice(forced, sample)

    def _expected(self, product: Any, rows: int) -> torch.Tensor:
        """Return the first layer's product as the library computes it."""
        from inferengine.kernels.cuda.dispatch import forcing

        inputs = self._inputs_of(product, rows)
        if inputs.expected is None:
            with forcing({product.key(each, rows): None for each in product.measured()}):
                inputs.expected = _numbers(self._calls(product, rows, 1)[0]())
        return inputs.expected

    def _inputs_of(self, product: Any, rows: int) -> _ProductInputs:
        """Return the latest inputs, or new ones for another product or number of rows."""
        if self._inputs is None or self._inputs[0] != (product, rows):
            residual = None
            if product.kind.name == "PARTS":
                residual = torch.zeros(rows, product.width, dtype=self._dtype, device=self._device)
            self._inputs = (
                (product, rows),
                _ProductInputs(
                    x=torch.randn(
                        rows, product.columns, dtype=self._dtype, device=self._device, generator=self._generator
                    ),
                    gain=torch.ones(max(product.columns, product.width), dtype=self._dtype, device=self._device),
                    residual=residual,
                ),
            )
        return self._inputs[1]

    def _calls(self, product: Any, rows: int, number: int) -> list[Callable[[], Any]]:
        """Return the calls of `number` layers, in turn, of which the first adds to a residual of zeros."""
        layers, inputs = self._layers[product], self._inputs_of(product, rows)
        if inputs.residual is not None:
            inputs.residual.zero_()
        return [_call(layers[index % len(layers)], product, inputs) for index in range(number)]


def _numbers(result: Any) -> torch.Tensor:
    """Return the result of a product in fp32, where it is codes for the next product too."""
    numbers: torch.Tensor = result if isinstance(result, torch.Tensor) else result.dequantize()
    return numbers.float()


def _call(layer: Linear | Head, product: Any, inputs: _ProductInputs) -> Callable[[], Any]:
    """Return a call of one layer's product as decoder layers make it: the first norm of a single row belongs to it,
    that of more rows is computed by who adds to the residual before."""
    ops, bias = layer.ops, getattr(layer, "offset", None)
    x, gain, residual = inputs.x, inputs.gain, inputs.residual
    one = x.shape[0] == 1

    def linear() -> Any:
        if one:
            return ops.norm_linear(x, gain[: product.columns], EPS, layer.packed, bias)
        return ops.linear(x, layer.packed, bias)

    def gated() -> Any:
        norm = gain[: product.columns] if one else None
        return ops.norm_gated_linear(x, norm, EPS, layer.packed, bias, "silu")

    def added() -> Any:
        assert residual is not None
        assert ops.linear_add_norm is not None
        total, normed = ops.linear_add_norm(x, layer.packed, None, residual, gain[: product.width], EPS)
        if one:
            return total
        return ops.rms_norm(total, gain[: product.width], EPS) if normed is None else normed

    return {"LINEAR": linear, "GATED": gated, "PARTS": added}[product.kind.name]


def _tensors(packed: Any) -> list[torch.Tensor]:
    if packed is None:  # another executor has the weights
        return []
    if isinstance(packed, torch.Tensor):
        return [packed]
    return [each for item in packed for each in (_tensors(item) if isinstance(item, (tuple, torch.Tensor)) else [])]
