"""Measuring kernels: what is tried, what is chosen and kept, within which budget."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from inferengine.kernels.cuda import dispatch
from inferengine.kernels.cuda.dispatch import (
    GemvConfig,
    Kernel,
    KernelChoice,
    Operands,
    Product,
    ProductKey,
    TmaTileConfig,
    candidates,
    rule_candidates,
)
from inferengine.kernels.cuda.tuning import measured_table as table
from inferengine.kernels.cuda.tuning.limits import takes
from inferengine.kernels.cuda.tuning.measured_table import ROWS, Environment, MeasuredTable, ProductEntry
from inferengine.kernels.cuda.tuning.search import (
    CYCLES_PER_S,
    StepChoices,
    StreamTimer,
    TunedProduct,
    configurations,
    plans,
    preferred,
    search,
    slow_rows,
    splits_worth_trying,
    step_seconds,
)

DENSE = Operands.DENSE
HERE = Environment("NVIDIA H200", "2.11.0", "3.6.0", "abc")
QKV_7B = ProductKey(DENSE, Product.LINEAR, 4608, 3584)
TMA = KernelChoice(Kernel.TMA_TILE, TmaTileConfig(64, 64, 64, 3, 4, 8))
SHAPES = {
    "7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "14b": ((7168, 5120), (5120, 5120), (27648, 5120), (34816, 5120), (5120, 17408)),
    "32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "odd": ((1000, 260), (576, 576), (160, 1088)),
}


@pytest.fixture(autouse=True)
def only_rules() -> object:
    yield
    dispatch.use_measured({})


def product(
    kind: Product = Product.LINEAR, width: int = 4608, columns: int = 3584, last_row: int = 8192
) -> TunedProduct:
    return TunedProduct(kind, DENSE, DENSE, width, columns, last_row)


class FakeCard:
    """Takes `seconds(plan)` for a plan, and on its clock `cost_s` to measure it once and to compile it."""

    def __init__(self, seconds: Callable[[TunedProduct, int, StepChoices], float], cost_s: float = 0.0) -> None:
        self.seconds, self.cost_s, self.now = seconds, cost_s, 0.0
        self.compiled: set[tuple[TunedProduct, int, StepChoices]] = set()
        self.launched: list[tuple[TunedProduct, int, StepChoices]] = []

    def compile(self, work: Sequence[tuple[TunedProduct, int, StepChoices]]) -> None:
        self.compiled |= set(work)
        self.now += self.cost_s * len(work)

    def prepare(self, product: TunedProduct, rows: int, plan: StepChoices) -> Callable[[], float]:
        self.launched.append((product, rows, plan))

        def sample() -> float:
            self.now += self.cost_s
            return self.seconds(product, rows, plan)

        return sample

    def search(self, products: Sequence[TunedProduct], budget_s: float = 1e9, max_rows: int = 8192) -> MeasuredTable:
        return search(products, self, clock=lambda: self.now, budget_s=budget_s, max_rows=max_rows)


def rules_first(product: TunedProduct, rows: int, plan: StepChoices) -> float:
    return 1.0 if plan == plans(product, rows)[0] else 2.0


def library_first(product: TunedProduct, rows: int, plan: StepChoices) -> float:
    return 1.0 if all(choice is None for _, choice in plan) else 2.0


# -- what is tried -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("kind", Product, ids=lambda kind: kind.name)
def test_the_rules_choice_comes_first_and_the_library_is_tried(kind: Product, model: str) -> None:
    for width, columns in SHAPES[model]:
        key = ProductKey(DENSE, kind, width, columns)
        for rows in ROWS:
            tried = configurations(key, rows)
            assert tried[0] == preferred(key, rows)
            assert None in tried
            assert len(set(tried)) == len(tried)
            assert all(each is None or takes(each, kind, rows, width, columns) for each in tried)


@pytest.mark.parametrize("model", ["7b", "14b", "32b"])
def test_shapes_that_no_rule_was_measured_for_have_something_to_choose_from(model: str) -> None:
    for width, columns in SHAPES[model]:
        for rows in (1, 2, 16, 32, 64, 128, 256, 1024):
            assert len(configurations(ProductKey(DENSE, Product.LINEAR, width, columns), rows)) >= 4


def test_a_split_that_fills_the_multiprocessors_is_tried_first() -> None:
    assert splits_worth_trying(5120 // 64, 5120)[0] == 3  # 240 programs in 264 turns
    assert splits_worth_trying(132, 4096)[0] == 1


def test_tiles_that_need_whole_weight_rows_are_not_tried_where_a_rest_would_be_left() -> None:
    tried = configurations(ProductKey(DENSE, Product.LINEAR, 1000, 1024), 64)
    assert not [each for each in tried if each is not None and each.kernel is Kernel.TMA_TILE]


def test_partial_sums_without_room_are_not_tried() -> None:
    choice = KernelChoice(Kernel.TMA_PARTS, TmaTileConfig(128, 64, 64, 4, 4, 8))
    assert takes(choice, Product.PARTS, 256, 8192, 8192)
    assert not takes(choice, Product.PARTS, 512, 8192, 8192)


@pytest.mark.parametrize("operands", [each for each in Operands if each not in (DENSE, Operands.INT8_CODES)])
def test_other_operands_try_what_their_rules_name(operands: Operands) -> None:
    for kind in dispatch.PRODUCTS[operands]:
        tried = {
            each.kernel
            for rows in (1, 8, 64, 128)
            for each in configurations(ProductKey(operands, kind, 28672, 4096), rows)
            if each is not None
        }
        assert tried


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_a_measured_choice_is_never_slower_than_the_rules() -> None:
    card = FakeCard(lambda product, rows, plan: 1.0 + crc32(f"{rows} {plan}".encode()) % 97 / 10)
    found = card.search([product(), product(Product.GATED, 37888), product(Product.PARTS, 3584)])
    entries = [entry for rows in found.entries.values() for entry in rows.values()]
    assert len(entries) > 3 * len(ROWS)
    assert all(entry.best_us <= entry.rules_us for entry in entries)
    assert any(entry.best_us < entry.rules_us for entry in entries)


def test_what_is_faster_within_the_noise_does_not_replace_the_rules() -> None:
    def nearly_equal(product: TunedProduct, rows: int, plan: StepChoices) -> float:
        return 1.0 if rules_first(product, rows, plan) == 1.0 else 0.995

    found = FakeCard(nearly_equal).search([product()])
    assert found.entries[QKV_7B][64].best == preferred(QKV_7B, 64)


def test_a_kernel_that_the_card_refuses_is_not_chosen() -> None:
    def refuse_tiles(product: TunedProduct, rows: int, plan: StepChoices) -> float:
        if any(choice is not None and choice.kernel is not Kernel.GEMV for _, choice in plan):
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    found = FakeCard(refuse_tiles).search([product()])
    assert found.entries[QKV_7B][64].best is None


def test_a_sum_and_its_norm_may_be_one_product_or_parts() -> None:
    """The choice between them, and the product that is taken if it is one, are two entries."""
    parts = ProductKey(DENSE, Product.PARTS, 3584, 18944)
    whole = ProductKey(DENSE, Product.LINEAR, 3584, 18944)
    found = FakeCard(library_first).search([product(Product.PARTS, 3584, 18944)])
    assert found.entries[parts][64].best is None
    assert found.entries[whole][64].best is None

    def parts_first(product: TunedProduct, rows: int, plan: StepChoices) -> float:
        return 1.0 if dict(plan).get(parts) is not None else 2.0

    found = FakeCard(parts_first).search([product(Product.PARTS, 3584, 18944)])
    choice = found.entries[parts][64].best
    assert choice is not None
    assert choice.kernel is Kernel.TMA_PARTS


def test_a_product_is_not_measured_for_more_rows_than_it_ever_has() -> None:
    found = FakeCard(rules_first).search([product(last_row=100)], max_rows=8192)
    assert max(found.entries[QKV_7B]) == 128


def test_whatever_is_launched_was_compiled_before() -> None:
    card = FakeCard(library_first)
    card.search([product(), product(Product.PARTS, 3584, 18944)])
    assert set(card.launched) <= card.compiled


def test_hopeless_candidates_are_measured_once() -> None:
    measured: list[StepChoices] = []

    def slow_but_the_rules(product: TunedProduct, rows: int, plan: StepChoices) -> float:
        measured.append(plan)
        return 1.0 if rules_first(product, rows, plan) == 1.0 else 5.0

    FakeCard(slow_but_the_rules).search([product(last_row=1)])
    rules, *others = plans(product(), 1)
    assert measured.count(rules) > 1
    assert [measured.count(plan) for plan in others] == [1] * len(others)


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [0.5, 3.0, 10.0])
def test_the_budget_is_kept(budget_s: float) -> None:
    card = FakeCard(rules_first, cost_s=0.002)
    card.search([product(), product(Product.GATED, 37888), product(Product.PARTS, 3584)], budget_s)
    longest = 0.002 * 200  # what is begun is finished: a product at one number of rows, and one round of compiling
    assert card.now <= budget_s + longest


def test_decode_sizes_are_measured_before_long_prompts() -> None:
    card = FakeCard(rules_first, cost_s=0.01)
    found = card.search([product()], budget_s=1.5)
    assert {1, 64, 128} <= found.entries[QKV_7B].keys()
    assert max(found.entries[QKV_7B]) < max(ROWS)


# -- the table decides -------------------------------------------------------------------------------------------------


def test_a_measured_choice_comes_before_the_rules_and_stands_for_the_rows_below() -> None:
    measured = MeasuredTable({QKV_7B: {64: ProductEntry(TMA, 10.0, None, 12.0, 12.0)}})
    dispatch.use_measured(measured.runs())
    for rows in (49, 64):
        assert candidates(*QKV_7B[:2], rows, *QKV_7B[2:])[0] == TMA
    for rows in (1, 48, 65, 4096):
        assert candidates(*QKV_7B[:2], rows, *QKV_7B[2:]) == rule_candidates(*QKV_7B[:2], rows, *QKV_7B[2:])
    assert dispatch.measured_rows() == (64,)


def test_where_the_library_was_best_no_kernel_is_a_candidate() -> None:
    assert candidates(*QKV_7B[:2], 32, *QKV_7B[2:])
    dispatch.use_measured(MeasuredTable({QKV_7B: {32: ProductEntry(None, 1.0, TMA, 2.0, 2.0)}}).runs())
    assert candidates(*QKV_7B[:2], 32, *QKV_7B[2:]) == ()


def test_deterministic_mode_keeps_its_rules() -> None:
    before = candidates(Operands.DENSE_EXACT, Product.LINEAR, 64, 4608, 3584)
    dispatch.use_measured(MeasuredTable({QKV_7B: {64: ProductEntry(TMA, 10.0, None, 12.0, 12.0)}}).runs())
    assert candidates(Operands.DENSE_EXACT, Product.LINEAR, 64, 4608, 3584) == before


def test_forcing_ends_with_its_block() -> None:
    before = candidates(*QKV_7B[:2], 64, *QKV_7B[2:])
    with dispatch.forcing({QKV_7B: TMA}):
        assert candidates(*QKV_7B[:2], 64, *QKV_7B[2:]) == (TMA,)
    assert candidates(*QKV_7B[:2], 64, *QKV_7B[2:]) == before


def test_a_step_is_the_sum_of_its_products() -> None:
    qkv = product()._replace(uses=28)
    head = product(width=152064, last_row=512)
    measured = MeasuredTable()
    for rows in ROWS:
        measured.put(QKV_7B, rows, ProductEntry(None, 10.0, None, 12.0, 20.0))
    measured.put(head.key(Product.LINEAR, 512), 512, ProductEntry(None, 100.0, None, 100.0, 100.0))
    assert step_seconds([qkv, head], measured, 2048) == pytest.approx((380e-6, 660e-6))


def test_a_number_of_rows_whose_step_takes_longer_than_a_larger_one_is_slow() -> None:
    measured = MeasuredTable()
    for rows in ROWS:
        slow = rows in (1, 320, 448)  # one row is never padded
        microseconds = 700.0 if slow else float(rows)
        measured.put(QKV_7B, rows, ProductEntry(None, microseconds, None, microseconds, microseconds))
    assert slow_rows([product()], measured) == {320, 448}
    del measured.entries[QKV_7B][448]
    assert slow_rows([product()], measured) == {320}
    assert slow_rows([product()], MeasuredTable()) == frozenset()


# -- time --------------------------------------------------------------------------------------------------------------


class FakeEvent:
    """Of a device on which a pause of `slow_s` or less ends before the host has launched everything."""

    def __init__(self, pauses: list[int], slow_s: float) -> None:
        self.pauses, self.slow_s = pauses, slow_s

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.pauses[-1] <= self.slow_s * CYCLES_PER_S

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return 6.0  # milliseconds


def test_a_measurement_that_waited_for_the_host_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(pauses, slow_s=1e-3))
    monkeypatch.setattr(torch.cuda, "_sleep", pauses.append)
    sample = StreamTimer().prepare([lambda: calls.append("first"), lambda: calls.append("second")])
    assert calls == ["first"]
    assert sample() == pytest.approx(3e-3)
    assert len(pauses) > 1
    assert pauses == sorted(pauses)
    assert calls[1:] == ["first", "second"] * len(pauses)


# -- on disk -----------------------------------------------------------------------------------------------------------


def example() -> MeasuredTable:
    gemv = KernelChoice(Kernel.GEMV, GemvConfig(4, 2048, 8, 0))
    tile = ProductKey(Operands.FP8, Product.LINEAR, 6144, 4096)
    return MeasuredTable(
        {
            QKV_7B: {1: ProductEntry(gemv, 9.0, None, 10.0, 9.0), 64: ProductEntry(TMA, 10.0, None, 12.5, 12.5)},
            tile: {1: ProductEntry(KernelChoice(Kernel.GEMV_HOPPER, None), 5.0, None, 9.0, 5.0)},
        }
    )


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table.save(example(), tmp_path, HERE)
    assert table.load(tmp_path, HERE).entries == example().entries


def test_that_nothing_came_of_measuring_is_read_as_it_was_written(tmp_path: Path) -> None:
    measured = MeasuredTable()
    measured.add_empty([QKV_7B])
    table.save(measured, tmp_path, HERE)
    assert table.load(tmp_path, HERE).entries == {QKV_7B: {}}


def test_later_measurements_are_added_to_earlier_ones(tmp_path: Path) -> None:
    table.save(example(), tmp_path, HERE)
    other = ProductKey(DENSE, Product.LINEAR, 5120, 5120)
    table.save(MeasuredTable({other: {64: ProductEntry(None, 1.0, None, 1.0, 1.0)}}), tmp_path, HERE)
    assert table.load(tmp_path, HERE).entries.keys() == {*example().entries, other}


@pytest.mark.parametrize("field", Environment._fields)
def test_another_card_or_version_is_measured_anew(tmp_path: Path, field: str) -> None:
    table.save(example(), tmp_path, HERE)
    assert table.load(tmp_path, HERE._replace(**{field: "other"})).entries == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 3}',
        '{"format": 2, "card": "NVIDIA H200"}',
        '{"format": 2, "card": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "kernels": "abc", "products": 3}',
    ],
)
def test_a_file_that_is_no_table_is_not_used(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / table.file_name(HERE)).write_text(text)
    assert table.load(tmp_path, HERE).entries == {}
    assert "cannot be read and is not used" in caplog.text
    table.save(example(), tmp_path, HERE)  # and is replaced
    assert table.load(tmp_path, HERE).entries == example().entries


def test_a_configuration_that_no_kernel_has_is_not_used(tmp_path: Path) -> None:
    file = table.save(example(), tmp_path, HERE)
    file.write_text(file.read_text().replace('"GEMV", 4,', '"GEMV", 4, 4,'))
    assert table.load(tmp_path, HERE).entries == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["GEMV", 4, 2048, 8, 0]', "[]"),
        ('["GEMV", 4, 2048, 8, 0]', '["GEMV", 3, 2048, 8, 0]'),
        ('["GEMV", 4, 2048, 8, 0]', '["GEMV", 4, 1048576, 8, 0]'),
        ('["GEMV", 4, 2048, 8, 0]', '["GEMV", 4, 2048, 64, 0]'),
        ('["GEMV", 4, 2048, 8, 0]', '["GEMV", true, 2048, 8, 0]'),
        ('["GEMV", 4, 2048, 8, 0]', '["W8_GEMV", 8, 1024, 4]'),
        ('[1, ["GEMV"', '[64, ["GEMV"'),
        ("[[1, ", "[[0, "),
        ("[[1, ", "[[Infinity, "),
        ("[[1, ", '[["1", '),
        ("9.0", "NaN"),
        ("9.0", "-9.0"),
        ('"format": 2', '"format": ' + 10_000 * "[" + 10_000 * "]"),
    ],
)
def test_what_no_kernel_takes_is_not_used(tmp_path: Path, old: str, new: str, caplog: pytest.LogCaptureFixture) -> None:
    file = table.save(example(), tmp_path, HERE)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert table.load(tmp_path, HERE).entries == {}
    assert "cannot be read and is not used" in caplog.text


def test_any_part_of_a_table_is_read_as_nothing(tmp_path: Path) -> None:
    file = table.save(example(), tmp_path, HERE)
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        assert table.load(tmp_path, HERE).entries == {}


def test_a_full_disk_leaves_the_old_table_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = table.save(example(), tmp_path, HERE)

    def full(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        table.save(example(), tmp_path, HERE)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [file]
    assert table.load(tmp_path, HERE).entries == example().entries


def test_the_kernels_hash_changes_with_their_sources_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hash_sources = table.kernel_hash.__wrapped__  # the process's hash is kept
    shutil.copytree(Path(dispatch.__file__).parent, tmp_path / "cuda")
    as_shipped = hash_sources()
    monkeypatch.setattr(dispatch, "__file__", str(tmp_path / "cuda" / "dispatch.py"))
    assert hash_sources() == as_shipped
    for name, is_hashed in (("table.py", False), ("gemm/w8.py", True)):
        with (tmp_path / "cuda" / name).open("a") as source:
            source.write("# changed\n")
        assert (hash_sources() != as_shipped) is is_hashed


def test_shipped_tables_can_be_read_and_name_kernels_that_take_their_shapes() -> None:
    files = sorted(table.SHIPPED.glob("*.json"))
    for file in files:
        assert file.stat().st_size < 100_000
        _, shipped = table.from_json(file.read_text())
        for key, rows in shipped.entries.items():
            for count, entry in rows.items():
                assert entry.best is None or takes(entry.best, key.product, count, key.width, key.columns)
                assert entry.best_us <= entry.rules_us
    assert table.shipped("a card of another name").entries == {}


def test_a_card_without_a_table_of_a_product_takes_that_of_the_same_chip(tmp_path: Path) -> None:
    entries = example().entries
    shared, *others = entries
    rows = {row: entry._replace(best_us=2 * entry.best_us) for row, entry in list(entries[shared].items())[:1]}
    for card, products in (("NVIDIA H200", entries), ("NVIDIA H100 80GB HBM3", {shared: rows})):
        table.save(table.MeasuredTable(products), tmp_path, HERE._replace(card=card))
    found = table.shipped_for_chip("NVIDIA H100 80GB HBM3", tmp_path).entries
    assert found[shared] == rows
    assert others
    assert all(found[key] == entries[key] for key in others)
    assert table.shipped_for_chip("NVIDIA B200", tmp_path).entries == {}
