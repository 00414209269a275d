"""The products of a model's own layers, measured: run by the interpreter where there is no card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.tune import LayerTimer, products_of, tune, tune_budget
from inferengine.kernels.cuda import dispatch, table
from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, Operands, Product, TileConfig
from inferengine.kernels.cuda.tuning.search import plans
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.models import llama, weights
from inferengine.models.decoder import DecoderModel
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE
from tests.kernels.builders import dtypes

WRONG = KernelChoice(Kernel.TILE, TileConfig(16, 16, 32, 1, 4, 1, 0))


@pytest.fixture(autouse=True)
def only_rules() -> Iterator[None]:
    yield
    dispatch.use_measured({})


def settings(device: torch.device, tokens: int = 4) -> ExecutorSettings:
    return ExecutorSettings(
        folder=Path(), device=device, dtype=None, random_weights=True, max_num_seqs=2, max_num_batched_tokens=tokens,
        max_model_len=64, block_size=16, num_blocks=8, memory_fraction=0.5, swap_bytes=0, chunked_prefill=True,
        overlap=False, cuda_graphs=False, deterministic=False,
    )  # fmt: skip


def tiny(device: torch.device, scheme: str = "none") -> tuple[DecoderModel, torch.dtype]:
    """A Llama with 2 layers, on the CUDA table's kernels; quantized by `scheme`."""
    dtype = dtypes()[1]
    config = DecoderConfig(
        model_type="llama", vocab_size=96, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, max_position=64, norm_eps=1e-6, windows=(None, None), attention_scale=0.25,
    )  # fmt: skip
    ops = Ops(**table.table(device))
    with torch.device("meta"):
        model = llama.build(ops, config)
    if scheme != "none":
        for module in model.modules():
            if isinstance(module, Linear):
                module.ops = cuda.table(ops, MADE[scheme], device)
    weights.fill_random(model, dtype=dtype, device=device)
    weights.finish(model)
    return model, dtype


class StopWatch:
    """Calls nothing: what it is given was computed once before, and compared."""

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        self.prepared += 1
        return self.sample

    def sample(self) -> float:
        return 1.0


def test_a_models_products_are_found_with_their_uses(device: torch.device) -> None:
    model, dtype = tiny(device)
    found = {(p.kind, p.width, p.columns): (p.uses, p.last_row) for p, _ in products_of(model, settings(device), dtype)}
    assert found == {
        (Product.LINEAR, 128, 128): (2, 4),
        (Product.PARTS, 128, 64): (2, 4),
        (Product.GATED, 512, 128): (2, 4),
        (Product.PARTS, 128, 256): (2, 4),
        (Product.LINEAR, 96, 128): (1, 2),
    }


def test_the_products_of_a_model_are_measured_as_its_layers_call_them(device: torch.device) -> None:
    model, dtype = tiny(device)
    kinds = (Product.PARTS, Product.GATED)
    groups = [group for group in products_of(model, settings(device), dtype) if group.product.kind in kinds]
    watch = StopWatch()
    timer = LayerTimer(groups, device, dtype, watch)
    for group in groups:
        tried = plans(group.product, 2)
        for plan in {tried[0], tried[-1]}:
            assert timer.prepare(group.product, 2, plan)() > 0
    assert watch.prepared > len(groups)


@pytest.mark.parametrize(("scheme", "operands"), [("int8", Operands.W8), ("int8_w8a8", Operands.W8A8)])
def test_quantized_products_are_measured_under_their_own_operands(
    scheme: str, operands: Operands, device: torch.device
) -> None:
    model, dtype = tiny(device, scheme)
    groups = products_of(model, settings(device), dtype)
    assert {group.product.more_rows for group in groups} == {operands, Operands.DENSE}  # the head stays as it is
    group = next(group for group in groups if group.product.kind is Product.GATED)
    timer = LayerTimer([group], device, dtype, StopWatch())
    assert timer.prepare(group.product, 2, plans(group.product, 2)[0])() > 0


def test_every_measurement_is_of_the_plans_own_kernel(device: torch.device) -> None:
    model, dtype = tiny(device)
    group = next(each for each in products_of(model, settings(device), dtype) if each.product.kind is Product.LINEAR)
    key, seen = group.product.key(Product.LINEAR, 2), []

    class Looking(StopWatch):
        def sample(self) -> float:
            seen.append(dispatch.candidates(*key[:2], 2, *key[2:]))
            return 1.0

    timer = LayerTimer([group], device, dtype, Looking())
    samples = [timer.prepare(group.product, 2, ((key, choice),)) for choice in (None, WRONG)]
    for sample in (*samples, *samples):  # in turn, as finalists are measured
        sample()
    assert seen == [(), (WRONG,), (), (WRONG,)]


def test_a_kernel_with_a_wrong_result_is_no_candidate(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtype = tiny(device)
    group = next(each for each in products_of(model, settings(device), dtype) if each.product.kind is Product.LINEAR)
    timer = LayerTimer([group], device, dtype, StopWatch())
    key = group.product.key(Product.LINEAR, 2)
    assert timer.prepare(group.product, 2, ((key, WRONG),))() > 0
    monkeypatch.setattr(table, "tiled", lambda x, weight, *rest, **surroundings: x.new_zeros(len(x), len(weight)))
    with pytest.raises(ArithmeticError, match="off by"):
        timer.prepare(group.product, 2, ((key, WRONG),))


def test_nothing_is_measured_on_a_cpu() -> None:
    device = torch.device("cpu")
    model, dtype = tiny(device)
    assert tune(settings(device), model, dtype, lambda phase, share: None) is None


@pytest.mark.parametrize(
    ("value", "weight_bytes", "seconds"),
    [("off", 1 << 40, None), ("auto", 1 << 34, 20.0), ("auto", 1 << 20, 0.0), ("0", 1 << 34, 0.0), ("7.5", 0, 7.5)],
)
def test_the_budget_is_what_the_configuration_says(value: str, weight_bytes: int, seconds: float | None) -> None:
    assert tune_budget(value, weight_bytes) == seconds


@pytest.mark.parametrize("value", ["", "on", "-1", "nan", "1e9"])
def test_a_budget_that_is_none_names_its_key(value: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tune"):
        tune_budget(value)
