"""The products of a model's own layers, measured: run by the interpreter where there is no card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.tools.attention_timer import LEAST_S, AttentionTimer
from inferengine.executor.tools.experts_timer import ExpertsTimer
from inferengine.executor.tune import (
    LayerTimer,
    Work,
    attention_of,
    crash_mark,
    experts_of,
    has_crashed,
    measure_within,
    products_of,
    to_measure,
    tune,
    tune_budget,
)
from inferengine.kernels.cuda import dispatch, table
from inferengine.kernels.cuda.attention import decode
from inferengine.kernels.cuda.dispatch import (
    AttentionKey,
    DecodeConfig,
    Kernel,
    KernelChoice,
    Operands,
    Product,
    TileConfig,
)
from inferengine.kernels.cuda.moe import mixture
from inferengine.kernels.cuda.moe.configurations import ExpertsKey
from inferengine.kernels.cuda.tuning.measured_table import MeasuredTable
from inferengine.kernels.cuda.tuning.search import plans
from inferengine.kernels.cuda.tuning.tuned_attention import TunedAttention
from inferengine.kernels.cuda.tuning.tuned_experts import TunedExperts
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.layers.linear import Linear
from inferengine.layers.moe import MoeMLP
from inferengine.layers.rotary import RopeConfig
from inferengine.models import llama, weights
from inferengine.models.decoder import DecoderModel
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE
from tests.kernels.builders import dtypes

WRONG = KernelChoice(Kernel.TILE, TileConfig(16, 16, 32, 1, 4, 1, 0))


@pytest.fixture(autouse=True)
def only_rules() -> Iterator[None]:
    yield
    MeasuredTable().decide()


def settings(device: torch.device, tokens: int = 4) -> ExecutorSettings:
    return ExecutorSettings(
        folder=Path(), device=device, dtype=None, random_weights=True, max_num_seqs=2, max_num_batched_tokens=tokens,
        whole_prompt_tokens=tokens, max_model_len=64, block_size=16, num_blocks=8, memory_fraction=0.5, swap_bytes=0,
        chunked_prefill=True, overlap=False, cuda_graphs=False, deterministic=False,
    )  # fmt: skip


def tiny(device: torch.device, scheme: str = "none", **options: Any) -> tuple[DecoderModel, torch.dtype]:
    """Return a Llama with 2 layers, on the CUDA table's kernels; quantized by `scheme`. `options` of its
    DecoderConfig."""
    dtype = dtypes()[1]
    shape: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position": 64, "norm_eps": 1e-6,
        "windows": (None, None), "attention_scale": 0.25,
    }  # fmt: skip
    config = DecoderConfig(**shape | options)
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
    assert tune(settings(device), model, dtype, 64, lambda phase, share: None) is None


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


def test_a_start_measures_products_alone_unless_it_is_given_seconds() -> None:
    products: list[Any] = [object()]
    work = Work(products, {"attention": []}, {"experts": []})
    assert to_measure(work, "auto") == Work(products, {}, {})
    assert to_measure(work, "20") == work


def test_a_process_that_ended_while_it_measured_keeps_others_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not has_crashed(tmp_path)
    gone = tmp_path / "measuring-99999999"
    gone.touch()
    assert has_crashed(tmp_path)
    assert str(gone) in caplog.text, "what to remove"
    with crash_mark(tmp_path):
        assert [mark.name for mark in tmp_path.iterdir()] == [f"measuring-{os.getpid()}"]
    assert not any(tmp_path.iterdir())


def test_a_mark_of_a_running_process_is_no_crash_and_one_of_the_same_number_is(tmp_path: Path) -> None:
    (tmp_path / f"measuring-{os.getppid()}").touch()
    assert not has_crashed(tmp_path)
    (tmp_path / f"measuring-{os.getpid()}").touch()  # in a container every process may have the same number
    assert has_crashed(tmp_path)


def test_without_a_folder_to_write_to_it_is_measured_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with crash_mark(tmp_path / "file"):
        assert not has_crashed(tmp_path / "file")


# -- attention and experts ---------------------------------------------------------------------------------------------

APART = DecodeConfig(32, 2, 4, 2, 1, False)
MANY_BYTES = 1 << 33


def attention_timer(
    device: torch.device, watch: StopWatch, **options: Any
) -> tuple[AttentionTimer, dict[TunedAttention, list[Attention]]]:
    """Return the timer of a tiny model with contexts of up to 512 tokens, and 1 MiB of keys and values."""
    model, dtype = tiny(device, **options)
    found = attention_of(model, settings(device), dtype, 512, MANY_BYTES)
    return AttentionTimer(found, device, dtype, dtype, watch, 1 << 20), found


def test_a_models_attention_is_found_by_heads_and_window(device: torch.device) -> None:
    model, dtype = tiny(device, windows=(32, None))
    found = attention_of(model, settings(device), dtype, 512, cache_bytes=2 * 64 * 2 * 1000)
    assert {(subject.key, subject.uses, subject.room) for subject in found} == {
        (AttentionKey(4, 2, 16, 16, 16, 32), 1, 1000),
        (AttentionKey(4, 2, 16, 16, 16, 0), 1, 1000),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"rope": RopeConfig(theta=10000.0, head_dim=16)},
        {"windows": (40, 40), "attention_softcap": 20.0},
        {"sinks": True},
    ],
    ids=["rotated", "window and softcap", "sinks"],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_attention_of_every_candidate_is_compared_with_torch(
    rows: int, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, found = attention_timer(device, StopWatch(), **options)
    (subject,) = found
    for choice in (subject.rule(rows), APART):
        assert timer.prepare(subject, rows, "256", choice)() > 0
    inner = decode.decode_attention
    monkeypatch.setattr(table, "decode_attention", lambda *args, **named: inner(*args, **named).mul_(1.1))
    with pytest.raises(ArithmeticError, match="off by"):
        timer.prepare(subject, rows, "256", APART)
    monkeypatch.setattr(table, "decode_attention", lambda *args, **named: inner(*args, **named).fill_(float("nan")))
    with pytest.raises(ArithmeticError, match="not finite"):
        timer.prepare(subject, rows, "256", APART)


def test_a_case_is_compared_anew_after_another_wrote_its_own_tokens(device: torch.device) -> None:
    timer, found = attention_timer(device, StopWatch())
    (subject,) = found
    for case in ("32", "64", "32"):
        assert timer.prepare(subject, 16, case, subject.rule(16))() > 0


def test_attention_is_measured_in_a_small_cache_of_its_own(device: torch.device) -> None:
    timer, found = attention_timer(device, StopWatch())
    ((subject, layers),) = found.items()
    own = torch.zeros(4, 2, 2, 16, 16, dtype=dtypes()[1], device=device)
    for layer in layers:
        layer.kv = own
    timer.prepare(subject, 2, "256", subject.rule(2))()
    assert not own.any()
    assert timer._pool(subject).nbytes <= 1 << 20


def test_of_attention_with_few_rows_the_product_after_it_is_subtracted(device: torch.device) -> None:
    class Counting(StopWatch):
        def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
            width = calls[0]().shape[1]
            return lambda: 5.0 if width == 128 and len(taken) % 2 == 0 else 2.0

    taken: list[int] = []
    timer, found = attention_timer(device, Counting())
    (subject,) = found
    sample = timer.prepare(subject, 2, "32", subject.rule(2))
    taken.append(1)
    assert sample() == LEAST_S  # 2 of attention and product, less than the 5 of the product
    taken.append(2)
    assert timer.prepare(subject, 65, "32", subject.rule(65))() == 2.0  # attention alone, which is 64 wide


def test_launches_take_the_measured_attention(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    timer, found = attention_timer(device, StopWatch())
    (subject,) = found
    calls: list[str] = []

    def recorded(name: str, inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **named: Any) -> torch.Tensor:
            calls.append(name)
            return inner(*args, **named)

        return call

    for name in ("decode_attention", "decode_attention_qkv"):
        monkeypatch.setattr(table, name, recorded(name, getattr(table, name)))
    inputs = timer._inputs_of(subject, 2, "256")
    layer = found[subject][0]

    def attend() -> torch.Tensor:
        return timer._attend(subject, layer, inputs, inputs.batches[0])

    attend()  # the new tokens of all rows are in the cache then
    by_rule = attend()
    dispatch.attention_choices.use({subject.key: ((1, 2, APART),)})
    apart = attend()
    assert calls == ["decode_attention_qkv", "decode_attention_qkv", "decode_attention"]
    assert float((apart - by_rule).norm() / by_rule.norm()) < 0.03


def mixtures(device: torch.device) -> tuple[dict[TunedExperts, list[MoeMLP]], torch.dtype]:
    model, dtype = tiny(device, moe=MoeConfig(4, 2, 32))
    return experts_of(model, settings(device), dtype), dtype


def test_a_models_experts_are_found_by_shape(device: torch.device) -> None:
    found, _ = mixtures(device)
    assert [(each.key, each.operands, each.uses, each.last_row) for each in found] == [
        (ExpertsKey("16-bit", 4, 4, 2, 64, 128), "numbers", 2, 4)
    ]


def test_experts_that_compute_something_else_are_no_candidates(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, dtype = mixtures(device)
    (subject,) = found
    timer = ExpertsTimer(found, device, dtype, StopWatch())
    rule = subject.rule(4)
    grouped = next(each for each in subject.variations(4, rule) if each.is_grouped)
    for case in subject.cases(4):
        for choice in (rule, grouped):
            assert timer.prepare(subject, 4, case, choice)() > 0
    inner = mixture.multiply_pairs
    monkeypatch.setattr(mixture, "multiply_pairs", lambda *args, **named: inner(*args, **named) * 1.1)
    with pytest.raises(ArithmeticError, match="off by"):
        timer.prepare(subject, 4, "even", rule)
    assert timer.prepare(subject, 4, "even", grouped)() > 0


class TickingClock:
    """Goes on by a second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def measured_parts(device: torch.device, free_bytes: int) -> tuple[Work, MeasuredTable]:
    """Measure attention of a tiny model, for two rows, and its experts, for one token, measured in turns."""
    model, dtype = tiny(device, moe=MoeConfig(4, 2, 32))
    few = settings(device, tokens=1)
    work = Work([], attention_of(model, few, dtype, 256, MANY_BYTES), experts_of(model, few, dtype))
    found = MeasuredTable()
    measure_within(
        work, few, dtype, found, StopWatch(), clock=TickingClock(), budget_s=1e6, free_bytes=free_bytes,
        progress=lambda share: None,
    )  # fmt: skip
    return work, found


def test_attention_and_experts_of_a_model_are_measured_once(device: torch.device) -> None:
    work, found = measured_parts(device, MANY_BYTES)
    assert {(type(key), *sorted(rows)) for key, rows in found.choices.items()} == {
        (AttentionKey, 1, 2),
        (ExpertsKey, 1),
    }
    assert any(work)
    assert not any(work.without(found))


def test_without_free_memory_nothing_is_measured_and_the_next_start_tries_again(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    work, found = measured_parts(device, 1 << 20)
    assert found.choices == {}
    assert work.without(found) == work
    assert "attention is not measured: 1 MiB" in caplog.text
    assert "experts are not measured: 1 MiB" in caplog.text
