"""Chooses kernels for a loaded model by measurement: reads the table of this card, or measures what it lacks.

The products are those of the model's own layers, timed as the layers call them, one layer's weight after the other's,
so that no weight is in L2 unless a step would find it there too. Deterministic mode and fp32 keep their fixed rules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from inferengine.config import cache_directory
from inferengine.core.executor import Progress
from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.attention import Attention
from inferengine.layers.embedding import Head
from inferengine.layers.linear import MLP, GatedMLP, Linear
from inferengine.models import registry
from inferengine.models.decoder import DecoderModel

logger = logging.getLogger(__name__)

AUTO_BUDGET_S = 20.0
LEAST_AUTO_BYTES = 1 << 30  # of weights: a smaller model is not measured by itself
COLD_BYTES = 150 << 20  # of weights that one measurement reads: three times an H200's L2
CALL_S = 4e-3  # about the longest measurement
MOST_CALLS = 24  # of one
FLOPS = 600e12  # per second, to guess how long a call takes
EPS = 1e-6
MOST_ERROR_OF_CODES = 0.1  # e4m3 has three bits: two roundings of one number may be 4 % apart
MOST_ERROR = 0.05  # of a result, against the library's: a kernel that a compiler broke is no candidate


class Layers(NamedTuple):
    """The layers that compute one product, in the order of the model."""

    product: Any  # TunedProduct
    layers: list[Linear | Head]


class TuneReport(NamedTuple):
    """What is known of a model's products: `table` all of it, `measured` whether some was measured just now,
    `slow_rows` the numbers of rows whose steps take longer than larger ones."""

    products: list[Any]  # TunedProduct
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
    """The folder of the tables that this machine measured."""
    return cache_directory() / "tuned"


def tune(
    settings: ExecutorSettings, model: DecoderModel, dtype: torch.dtype, progress: Progress, *, anew: bool = False
) -> TuneReport | None:
    """Let dispatch.py decide by measurements of this card: those on disk, and what is measured now within the budget.
    `anew`: measure all products. None where nothing is to be measured: on a CPU, where it is off, in deterministic mode
    and for fp32."""
    if settings.device.type != "cuda":
        return None
    import triton

    from inferengine.kernels.cuda import dispatch
    from inferengine.kernels.cuda.tuning import measured_table as tables
    from inferengine.kernels.cuda.tuning import search
    from inferengine.kernels.cuda.tuning.search import StreamTimer

    dispatch.use_measured({})
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in tensors_of(model))
    budget_s = tune_budget(settings.tune, weight_bytes)
    if budget_s is None or settings.deterministic or dtype == torch.float32:
        return None
    if settings.tensor_parallel > 1:  # the processes of a model must choose alike: from tables alone
        budget_s = 0.0
    begin = time.perf_counter()
    groups = products_of(model, settings, dtype)
    card = torch.cuda.get_device_name(settings.device)
    environment = tables.Environment(card, torch.__version__, triton.__version__, tables.kernel_hash())
    known = tables.shipped(card)
    known.update(tables.load(tables_folder(), environment))
    missing = [group for group in groups if anew or not group.product.measured_keys() <= known.entries.keys()]
    measured = bool(missing) and budget_s > 0
    if measured:
        progress("measuring kernels", 0.0)
        try:
            found = search.search(
                [group.product for group in missing],
                LayerTimer(missing, settings.device, dtype, StreamTimer()),
                clock=time.perf_counter,
                budget_s=budget_s,
                max_rows=settings.max_num_batched_tokens,
                progress=lambda share: progress("measuring kernels", share),
            )
        except Exception:  # the rules choose well enough to serve
            logger.warning("kernels could not be measured; they are chosen by rules", exc_info=True)
            found = tables.MeasuredTable()
        else:
            for group in missing:  # what no kernel could compute is not tried again at the next start
                found.add_empty(group.product.measured_keys())
        known.update(found)
        torch.cuda.empty_cache()
        try:
            file = tables.save(found, tables_folder(), environment)
            logger.info("measured %d products in %.1f s: %s", len(missing), time.perf_counter() - begin, file)
        except OSError as error:
            logger.warning("the table of measured kernels cannot be written: %s; set XDG_CACHE_HOME", error)
    dispatch.use_measured(known.runs())
    seconds = time.perf_counter() - begin
    products = [group.product for group in groups]
    slow_rows = search.slow_rows(products, known) if settings.tensor_parallel == 1 else frozenset()
    return TuneReport(products, known, environment, measured, seconds, slow_rows)


def measure_model(settings: ExecutorSettings) -> TuneReport | None:
    """Load a model and measure all its products anew."""
    from inferengine.executor.load import load_model
    from inferengine.kernels import ops
    from inferengine.kernels.cuda.compilation import compile_workers

    def silent(phase: str, share: float) -> None:
        pass

    with compile_workers():
        loaded = load_model(settings, ops.resolve(settings.device, deterministic=settings.deterministic), silent)
        return tune(settings, loaded.model, loaded.dtype, silent, anew=True)


def known_table() -> tuple[Any, Any]:
    """Return all that was measured on this machine's card, and of what. Without a card: the package's tables."""
    import triton

    from inferengine.kernels.cuda.tuning import measured_table as tables

    if not torch.cuda.is_available():
        return tables.shipped_first()
    card = torch.cuda.get_device_name()
    environment = tables.Environment(card, torch.__version__, triton.__version__, tables.kernel_hash())
    known = tables.shipped(card)
    known.update(tables.load(tables_folder(), environment))
    return known, environment


def shapes_of(settings: ExecutorSettings) -> set[tuple[int, int]]:
    """Return the width and columns of a model's products, from its config.json alone."""
    config, family = registry.read_model_config(settings.folder)
    with torch.device("meta"):
        model = family.build(REFERENCE, config)
    shapes = {(config.vocab_size, config.hidden_size)}
    for layer, _ in _uses(model):
        if isinstance(layer, Linear):
            shapes.add((sum(layer.parts), layer.in_features))
    return shapes


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
    """Each layer with a product, and how the model uses it: the name of a Product."""
    uses: list[tuple[Linear | Head, str]] = []

    def added(linear: Linear) -> str:
        fused = linear.offset is None and linear.ops.linear_add_norm is not None
        return "PARTS" if fused else "LINEAR"

    for module in model.modules():
        if isinstance(module, Attention):
            uses += [(module.qkv, "LINEAR"), (module.out, added(module.out))]
        elif isinstance(module, GatedMLP):
            uses += [(module.gate_up, "GATED"), (module.down, added(module.down))]
        elif isinstance(module, MLP):
            uses += [(module.up, "LINEAR"), (module.down, added(module.down))]
        elif isinstance(module, Head):
            uses.append((module, "LINEAR"))
    return uses


def tensors_of(model: DecoderModel) -> list[torch.Tensor]:
    """Return all weights of a loaded model, packed ones included."""
    return [*model.parameters(), *(tensor for layer, _ in _uses(model) for tensor in _tensors(layer.packed))]


@dataclass
class _Inputs:
    """x [T, in], gains of norms, and the residual [T, out] that is added to. `expected`: the library's result."""

    x: torch.Tensor
    gain: torch.Tensor
    residual: torch.Tensor | None
    expected: torch.Tensor | None = None


class CallTimer(Protocol):
    """Times calls: kernels/cuda/tuning/search.py."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Return a function that makes the calls and returns the mean seconds of one."""
        ...


class LayerTimer:
    """Times the products of a model's layers, as search.py asks for them."""

    def __init__(self, groups: Sequence[Layers], device: torch.device, dtype: torch.dtype, timer: CallTimer) -> None:
        self._layers = {group.product: group.layers for group in groups}
        self._device, self._dtype, self._timer = device, dtype, timer
        self._generator = torch.Generator(device).manual_seed(0)
        self._inputs: tuple[Any, _Inputs] | None = None  # the latest product and rows

    @torch.inference_mode()
    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile all kernels of these plans, in parallel."""
        from inferengine.kernels.cuda.compilation import compiling_ahead
        from inferengine.kernels.cuda.dispatch import forcing

        with compiling_ahead(ignore_errors=True):
            for product, rows, plan in work:
                try:
                    with forcing(dict(plan)):
                        self._calls(product, rows, 1)[0]()
                except Exception as error:  # `prepare` raises it again, and the plan is no candidate
                    logger.debug("%s of %d rows as %s: %s", product, rows, plan, error)

    @torch.inference_mode()
    def prepare(self, product: Any, rows: int, plan: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one call. Raises where the plan cannot be launched."""
        from inferengine.kernels.cuda.dispatch import forcing

        weight_bytes = sum(each.nbytes for each in _tensors(self._layers[product][0].packed))
        seconds = max(weight_bytes / 4e12, 2 * rows * product.width * product.columns / FLOPS)
        number = max(2, min(-(-COLD_BYTES // weight_bytes), int(CALL_S / seconds), MOST_CALLS))
        expected = self._expected(product, rows)
        with forcing(dict(plan)):
            calls = self._calls(product, rows, number)
            found = calls[0]()
            error = float((_numbers(found) - expected).norm() / expected.norm())
            if not error < (MOST_ERROR if isinstance(found, torch.Tensor) else MOST_ERROR_OF_CODES):
                raise ArithmeticError(f"the result is off by {error:.3f} of its size")
            sample = self._timer.prepare(calls)

        def forced() -> float:
            with forcing(dict(plan)):
                return sample()

        return forced

    def _expected(self, product: Any, rows: int) -> torch.Tensor:
        """What the first layer's product is, by the library."""
        from inferengine.kernels.cuda.dispatch import forcing

        inputs = self._inputs_of(product, rows)
        if inputs.expected is None:
            with forcing({product.key(each, rows): None for each in product.measured()}):
                inputs.expected = _numbers(self._calls(product, rows, 1)[0]())
        return inputs.expected

    def _inputs_of(self, product: Any, rows: int) -> _Inputs:
        """The latest inputs, or new ones for another product or number of rows."""
        if self._inputs is None or self._inputs[0] != (product, rows):
            residual = None
            if product.kind.name == "PARTS":
                residual = torch.zeros(rows, product.width, dtype=self._dtype, device=self._device)
            self._inputs = (
                (product, rows),
                _Inputs(
                    x=torch.randn(
                        rows, product.columns, dtype=self._dtype, device=self._device, generator=self._generator
                    ),
                    gain=torch.ones(max(product.columns, product.width), dtype=self._dtype, device=self._device),
                    residual=residual,
                ),
            )
        return self._inputs[1]

    def _calls(self, product: Any, rows: int, number: int) -> list[Callable[[], Any]]:
        """Calls of `number` layers, in turn, of which the first adds to a residual of zeros."""
        layers, inputs = self._layers[product], self._inputs_of(product, rows)
        if inputs.residual is not None:
            inputs.residual.zero_()
        return [_call(layers[index % len(layers)], product, inputs) for index in range(number)]


def _numbers(result: Any) -> torch.Tensor:
    """The result of a product in fp32, where it is codes for the next product too."""
    numbers: torch.Tensor = result if isinstance(result, torch.Tensor) else result.dequantize()
    return numbers.float()


def _call(layer: Linear | Head, product: Any, inputs: _Inputs) -> Callable[[], Any]:
    """One layer's product as decoder layers call it: the first norm of a single row belongs to it, that of more rows is
    computed by who adds to the residual before."""
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
