"""Finds the best kernel for each product and number of rows by measuring, within a budget of seconds.

Each product is measured at a few numbers of rows first, with all that `configurations` proposes; then at the others,
with what was best at the nearest larger of these. A candidate whose first measurement is much slower than the best so
far is given up; those that remain are measured in turn, so that a card whose clock falls slows all of them, and medians
are compared. What the rules prefer is always among them, and is kept where nothing is faster by more than the noise.

What is tried for a product: what the rules say of any shape with as many rows, and for 16-bit weights variations of
tiles and splits that suit the shape. A split of the inner dimension is tried where the tiles then fill the
multiprocessors better: 5,120 outputs are 80 tiles of 64, which leave 52 of 132 multiprocessors idle; three programs to
a tile leave 24 of 264 turns.

StreamTimer times calls on a CUDA device, without what the host needs to launch them. The device is kept busy while the
host launches all calls; then they run one after the other, as in a CUDA graph, and kernels that are launched with
programmatic dependence overlap. Where the device was ready first the measurement is made again with a longer pause. Who
calls takes a weight that is not in L2, as a step finds it, by going through the layers.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from inferengine.kernels.cuda.dispatch import (
    MULTIPROCESSORS,
    PRODUCTS,
    GemvConfig,
    Kernel,
    KernelChoice,
    Operands,
    Product,
    ProductKey,
    StreamConfig,
    TileConfig,
    TmaTileConfig,
    W8TileConfig,
    rule_candidates,
)
from inferengine.kernels.cuda.tuning.choices import SearchBudget
from inferengine.kernels.cuda.tuning.limits import SHARED_BYTES, takes
from inferengine.kernels.cuda.tuning.measured_table import ROWS, MeasuredTable, ProductEntry

logger = logging.getLogger(__name__)


# -- what is tried -----------------------------------------------------------------------------------------------------

MOST_ACCUMULATORS = 128  # fp32 registers of a thread that hold sums
MOST_SPLITS = 8
SPLIT_COLUMNS = 512  # the fewest that are worth a program
LAST_TILED_ROW = 64  # gemm/dense_small_m.py reads the weight once for each of its tiles of rows
LAST_SPLIT_ROW = 256  # beyond, the tiles of the result fill the device

# block_m, block_n, block_k, num_warps, num_stages, weight_left: by the rows that a tile holds
TMA_TILES: dict[int, tuple[tuple[int, int, int, int, int, bool], ...]] = {
    16: ((16, 64, 128, 4, 6, True), (16, 128, 128, 8, 4, True)),
    32: ((32, 64, 128, 4, 5, True), (32, 64, 128, 4, 2, True), (32, 128, 64, 8, 6, True)),
    64: ((64, 64, 64, 4, 8, False), (64, 128, 64, 8, 4, True), (64, 64, 128, 4, 4, True), (64, 64, 64, 4, 4, False)),
    128: (
        (128, 64, 64, 4, 8, False),
        (128, 128, 64, 8, 4, True),
        (64, 128, 64, 8, 4, True),
        (128, 64, 64, 4, 4, False),
    ),
    256: ((128, 128, 64, 8, 4, True), (128, 256, 64, 8, 3, False), (256, 128, 64, 8, 3, False)),
}
GEMV_TILES = ((4, 2048, 8, 0), (2, 1024, 4, 0), (4, 1024, 4, 0), (8, 1024, 4, 1024), (4, 512, 2, 0))


def tile_rows(rows: int) -> int:
    """Return the key of TMA_TILES for a number of rows: the smallest tile that holds them."""
    return next((size for size in TMA_TILES if rows <= size), max(TMA_TILES))


def configurations(key: ProductKey, rows: int) -> tuple[KernelChoice | None, ...]:
    """Return what is tried for a product of a number of rows, without repetitions: first what the rules prefer, then
    the library (None), then all else."""
    operands, product, width, columns = key
    found: dict[KernelChoice | None, None] = {preferred(key, rows): None, None: None}
    for each in PRODUCTS[operands].get(product, ()):
        whole = width % each.width_of == 0 and columns % each.columns_of == 0
        if whole and each.rows.first <= rows <= each.rows.last:
            found[each.choice(width, columns)] = None
    if operands is Operands.DENSE:
        found.update(dict.fromkeys(_dense(product, rows, width, columns)))
    if operands in (Operands.FP8_CODES, Operands.W8, Operands.W8A8):
        found.update(dict.fromkeys(_other_splits(tuple(found), product, width, columns)))
    return tuple(each for each in found if each is None or takes(each, product, rows, width, columns))


def preferred(key: ProductKey, rows: int) -> KernelChoice | None:
    """Return what the rules prefer and the kernel takes; None: the library."""
    choices = rule_candidates(key.operands, key.product, rows, key.width, key.columns)
    return next((each for each in choices if takes(each, key.product, rows, key.width, key.columns)), None)


def splits_worth_trying(tiles: int, columns: int, *, fewest: int = 1, most: int = 2) -> list[int]:
    """Return numbers of splits of the inner dimension, those first whose programs fill the multiprocessors best."""
    limit = max(fewest, min(MOST_SPLITS, columns // SPLIT_COLUMNS))

    def share_used(splits: int) -> float:
        programs = tiles * splits
        turns = -(-programs // MULTIPROCESSORS)
        return programs / (turns * MULTIPROCESSORS) - 0.03 * splits  # partial sums cost something

    return sorted(range(fewest, limit + 1), key=share_used, reverse=True)[:most]


def _dense(product: Product, rows: int, width: int, columns: int) -> Iterator[KernelChoice]:
    gated = product is Product.GATED
    outputs = width // 2 if gated else width
    if rows == 1 and product is not Product.PARTS:
        for tile in GEMV_TILES:
            yield KernelChoice(Kernel.GEMV, GemvConfig(*tile))
        return
    if rows <= LAST_TILED_ROW and product is not Product.PARTS and outputs % 64 == columns % 128 == 0:
        block = max(16, min(64, tile_rows(rows)))
        for chunks in [1] if gated else splits_worth_trying(outputs // 64, columns):
            yield KernelChoice(Kernel.TILE, TileConfig(block, 64, 128, chunks, 4, 4, 0))
        if width * columns < 16 << 20:
            yield KernelChoice(Kernel.TILE, TileConfig(block, 16, 512, 1, 4, 1, 0, True))
    if columns % 128 or rows == 1:
        return
    kernel = Kernel.TMA_PARTS if product is Product.PARTS else Kernel.TMA_TILE
    if product is Product.PARTS and rows > LAST_SPLIT_ROW:
        return
    for block_m, block_n, block_k, warps, stages, left in TMA_TILES[tile_rows(rows)]:
        shared = (block_m + block_n * (2 if gated else 1)) * block_k * 2 * stages
        sums = block_m * block_n * (2 if gated else 1) // (32 * warps)
        if shared > SHARED_BYTES or sums > MOST_ACCUMULATORS or outputs % block_n:
            continue
        tiles = -(-rows // block_m) * (outputs // block_n)
        if product is Product.PARTS:
            splits = splits_worth_trying(tiles, columns, fewest=2)
        elif gated or rows > LAST_SPLIT_ROW:
            splits = [1]
        else:
            splits = splits_worth_trying(tiles, columns, most=1 if rows > 64 else 2)
        for number in splits:
            choice = KernelChoice(kernel, TmaTileConfig(block_m, block_n, block_k, number, warps, stages, left))
            if not takes(choice, product, rows, width, columns) and product is Product.LINEAR:  # no room for the sums
                choice = KernelChoice(kernel, choice.config._replace(splits=1))
            yield choice


def _other_splits(
    choices: tuple[KernelChoice | None, ...], product: Product, width: int, columns: int
) -> Iterator[KernelChoice]:
    """Vary the splits of configurations for 8-bit weights."""
    for choice in choices:
        if choice is None or product is Product.GATED:
            continue
        config = choice.config
        if isinstance(config, W8TileConfig):
            for chunks in splits_worth_trying(-(-width // config.block_n), columns):
                yield KernelChoice(choice.kernel, config._replace(chunks=chunks))
        if isinstance(config, StreamConfig) and product is Product.PARTS:
            for splits in splits_worth_trying(width // config.block_n, columns, fewest=2):
                yield KernelChoice(choice.kernel, config._replace(splits=splits))


# -- the search --------------------------------------------------------------------------------------------------------

# Rows at which everything is tried, in the order of their importance to serving. A stage is compiled at once: its rows
# are few, so that a budget that is too small for all is not spent on compiling what is never measured.
STAGES = ((64,), (1, 128), (16, 32), (256, 1024))
CLASSES = (  # first row, last row, its stage's row
    *((1, 1, 1), (2, 16, 16), (17, 32, 32), (33, 64, 64), (65, 128, 128)),
    *((129, 512, 256), (513, 1 << 62, 1024)),
)
HOPELESS = 1.2  # times the best: given up after one measurement
NOISE = 0.99  # of the rules' time: a choice must be faster than that to replace theirs
TAKEN_OVER = 4  # best candidates of a class that its other rows try
FINALISTS = 3
ROUNDS = 3


class TunedProduct(NamedTuple):
    """A product of a model. `kind` is how layers use it: LINEAR alone, GATED, or PARTS for a sum with the residual and
    its norm, which may be one product in parts or a whole product and a norm. `one_row` and `more_rows` are the
    operands that dispatch.py is asked for; `last_row` the most rows that it is ever computed for, and `uses` how often
    a step does."""

    kind: Product
    one_row: Operands
    more_rows: Operands
    width: int
    columns: int
    last_row: int
    uses: int = 1

    def key(self, product: Product, rows: int) -> ProductKey:
        """Return the key of a measurement."""
        return ProductKey(self.one_row if rows == 1 else self.more_rows, product, self.width, self.columns)

    def measured(self) -> set[Product]:
        """Return the kinds of products that are measured for it: a sum with a norm may be a whole product."""
        return {self.kind, Product.LINEAR} if self.kind is Product.PARTS else {self.kind}

    def measured_keys(self) -> set[ProductKey]:
        """Return all keys that are measured for it."""
        return {self.key(product, rows) for product in self.measured() for rows in (1, 2)}


StepChoices = tuple[tuple[ProductKey, KernelChoice | None], ...]  # what each product is to take, to be timed as a whole


class Timer(Protocol):
    """Runs products as the model runs them."""

    def compile(self, work: Sequence[tuple[TunedProduct, int, StepChoices]]) -> None:
        """Compile all kernels of these plans."""
        ...

    def prepare(self, product: TunedProduct, rows: int, plan: StepChoices) -> Callable[[], float]:
        """Return a function that measures the seconds of one call. Raises where the plan cannot be launched."""
        ...


def plans(product: TunedProduct, rows: int) -> tuple[StepChoices, ...]:
    """Return what to try for a product: first what the rules prefer."""
    key = product.key(product.kind, rows)
    if product.kind is not Product.PARTS:
        return tuple(((key, choice),) for choice in configurations(key, rows))
    linear = product.key(Product.LINEAR, rows)
    in_parts = [((key, choice),) for choice in configurations(key, rows) if choice is not None]
    whole = [((key, None), (linear, choice)) for choice in configurations(linear, rows)]
    if rows == 1:  # the next product computes the norm itself
        return tuple(whole)
    if in_parts:  # the same tiles with a reduction of their own beside them gain little
        whole = [plan for plan in whole if not _splits_tma_tiles(plan[1][1])]
    found: list[StepChoices] = [*whole, *in_parts]
    by_rules = preferred(key, rows)
    if by_rules is not None:
        found.sort(key=lambda plan: plan != ((key, by_rules),))
    return tuple(found)


def _splits_tma_tiles(choice: KernelChoice | None) -> bool:
    return choice is not None and choice.kernel is Kernel.TMA_TILE and choice.config.splits > 1


def search(
    products: Sequence[TunedProduct],
    timer: Timer,
    *,
    clock: Callable[[], float],
    budget_s: float,
    max_rows: int,
) -> MeasuredTable:
    """Measure products, in order, until all is measured or `budget_s` is spent. `clock` returns seconds."""
    table = MeasuredTable()
    for _ in search_products(products, timer, SearchBudget(clock, budget_s), max_rows, table):
        pass
    return table


def search_products(
    products: Sequence[TunedProduct], timer: Timer, budget: SearchBudget, max_rows: int, table: MeasuredTable
) -> Iterator[None]:
    """Measure products, in order, until all is measured or the budget is spent. Each step of the iterator is a stage,
    whose results are in the table then."""
    ranked: dict[tuple[TunedProduct, int], list[StepChoices]] = {}
    stage_s = budget.first_stage_s  # of the latest
    for stage in STAGES:
        begin = budget.clock()
        if stage_s > budget.left():
            return
        work = [
            (product, rows, plan)
            for rows in stage
            for product in products
            if _reaches_class(product, rows, max_rows)
            for plan in plans(product, rows)
        ]
        timer.compile(work)
        for rows in stage:
            for product in products:
                tried = [plan for each, count, plan in work if each is product and count == rows]
                if tried and (budget.left() > 0 or stage == STAGES[0]):
                    ranked[product, rows] = _measure(product, rows, tried, timer, table)
        stage_s = budget.clock() - begin
        yield
    others = [rows for rows in _by_importance() if rows not in sum(STAGES, ())]
    work = [
        (product, rows, plan)
        for rows in others
        for product in products
        if _reaches(product, rows, max_rows)
        for plan in _taken_over(product, rows, ranked)
    ]
    if work and budget.left() > 0:
        timer.compile(work)
    for rows in others:
        for product in products:
            tried = [plan for each, count, plan in work if each is product and count == rows]
            if tried and budget.left() > 0:
                _measure(product, rows, tried, timer, table)
        yield


def take_turns(
    searches: Sequence[Iterator[None]], budget: SearchBudget, progress: Callable[[float], None]
) -> list[bool]:
    """Run searches, a stage of each in turn, and return which of them came to their end. One that fails is dropped, and
    what it found before stays. One whose first stage had no time did not come to its end."""
    finished = [False] * len(searches)
    has_begun = [False] * len(searches)
    left = list(range(len(searches)))
    while left:
        for index in tuple(left):
            begin = budget.clock()
            try:
                next(searches[index])
                has_begun[index] = True
                budget.first_stage_s = budget.first_stage_s or budget.clock() - begin
            except StopIteration:
                finished[index] = has_begun[index]
                left.remove(index)
            except Exception:  # the rules choose well enough to serve
                logger.warning("some kernels could not be measured; they are chosen by rules", exc_info=True)
                left.remove(index)
            progress(min(1.0, budget.spent() / budget.seconds))
    return finished


def _reaches(product: TunedProduct, rows: int, max_rows: int) -> bool:
    """Return whether steps have so many rows, or fewer for which the measurement stands."""
    return max((each for each in ROWS if each < rows), default=0) < min(max_rows, product.last_row)


def _reaches_class(product: TunedProduct, stage: int, max_rows: int) -> bool:
    """Return whether steps have rows of the class that is measured at `stage` rows."""
    return any(first <= min(max_rows, product.last_row) for first, _, row in CLASSES if row == stage)


def _by_importance() -> Iterable[int]:
    """Decode sizes first."""
    few = (8, 96, 48, 24, 4, 2, 192, 512, 384, 448, 320)
    return (*few, *(rows for rows in ROWS if rows not in few))


def _taken_over(
    product: TunedProduct, rows: int, ranked: dict[tuple[TunedProduct, int], list[StepChoices]]
) -> tuple[StepChoices, ...]:
    """What to try at rows that are no stage's: the rules' choice, the library, and the best of the class."""
    stage = next(stage for _, last, stage in CLASSES if rows <= last)
    best = ranked.get((product, stage), [])
    if not best:
        return ()
    allowed = plans(product, rows)
    found = dict.fromkeys(allowed[:1])
    found.update(dict.fromkeys(plan for plan in allowed if all(choice is None for _, choice in plan)))
    for plan in best[:TAKEN_OVER]:
        if all(choice is None or takes(choice, key.product, rows, key.width, key.columns) for key, choice in plan):
            found[plan] = None
    return tuple(found)


def _measure(
    product: TunedProduct, rows: int, tried: Sequence[StepChoices], timer: Timer, table: MeasuredTable
) -> list[StepChoices]:
    """Measure plans, of which the first is the rules', and put the result into the table. Returns them best first."""
    samples: dict[StepChoices, list[float]] = {}
    again: dict[StepChoices, Callable[[], float]] = {}
    best = float("inf")
    for plan in tried:
        try:
            sample = timer.prepare(product, rows, plan)
            samples[plan] = [sample()]
        except Exception as error:  # what this card cannot launch is no candidate
            logger.debug("%s of %d rows as %s: %s", product, rows, plan, error)
            samples.pop(plan, None)
            continue
        if samples[plan][0] <= best * HOPELESS or plan == tried[0]:
            again[plan] = sample
        best = min(best, samples[plan][0])

    def seconds(plan: StepChoices) -> float:
        return statistics.median(samples[plan])

    finalists = sorted(again, key=seconds)[:FINALISTS]
    if tried[0] in again and tried[0] not in finalists:
        finalists.append(tried[0])
    for _ in range(ROUNDS):
        for plan in finalists:
            samples[plan].append(again[plan]())
    if not samples:
        logger.warning("no kernel for %s of %d rows could be measured; the rules decide", product, rows)
    order = [*sorted(finalists, key=seconds), *sorted((p for p in samples if p not in finalists), key=seconds)]
    if order:
        _record(tried[0], {plan: seconds(plan) for plan in order}, finalists, rows, table)
    return order


def _record(
    rules: StepChoices,
    seconds: dict[StepChoices, float],
    finalists: Sequence[StepChoices],
    rows: int,
    table: MeasuredTable,
) -> None:
    """Put an entry for each key of the plans into the table. Only finalists, measured often enough, can be best."""
    for key in dict.fromkeys(key for plan in seconds for key, _ in plan):
        times: dict[KernelChoice | None, float] = {}
        sure: dict[KernelChoice | None, float] = {}
        for plan, value in seconds.items():
            choices = dict(plan)
            if key in choices:
                choice = choices[key]
                times[choice] = min(value, times.get(choice, value))
                if plan in finalists:
                    sure[choice] = min(value, sure.get(choice, value))
        sure = sure or times
        best = min(sure, key=lambda choice: sure[choice])
        by_rules = dict(rules).get(key, preferred(key, rows))
        rules_s = times.get(by_rules, times[best])
        if by_rules in times and times[best] > rules_s * NOISE:
            best = by_rules
        second = min((each for each in times if each != best), key=lambda choice: times[choice], default=best)
        table.put(key, rows, ProductEntry(best, times[best] * 1e6, second, times[second] * 1e6, rules_s * 1e6))


def slow_rows(products: Sequence[TunedProduct], table: MeasuredTable) -> frozenset[int]:
    """Return the measured numbers of rows whose step takes longer than that of the next larger one: a step is better
    padded to that one. Never one row: its products were measured with the norms before them, others with those after
    them."""
    slow: set[int] = set()
    after = float("inf")
    for rows in reversed(ROWS[1:]):
        seconds = step_seconds(products, table, rows)[0] if _is_complete(products, table, rows) else float("nan")
        if seconds * NOISE > after:
            slow.add(rows)
        else:
            after = seconds
    return frozenset(slow)


def _is_complete(products: Sequence[TunedProduct], table: MeasuredTable, rows: int) -> bool:
    """Return whether every product that is computed for so many rows was measured for them."""
    return all(
        rows > product.last_row or rows in table.entries.get(product.key(product.kind, rows), {})
        for product in products
    )


def step_seconds(products: Sequence[TunedProduct], table: MeasuredTable, rows: int) -> tuple[float, float]:
    """Return the seconds that all products of a step of `rows` rows take, as measured and as the rules would have
    it. Products that are not computed for so many rows count as often as they can be."""
    measured = by_rules = 0.0
    for product in products:
        count = min(rows, max((each for each in ROWS if each <= product.last_row), default=1))
        entry = table.entries.get(product.key(product.kind, count), {}).get(count)
        if entry is None and product.kind is Product.PARTS:
            entry = table.entries.get(product.key(Product.LINEAR, count), {}).get(count)
        if entry is not None:
            measured += entry.best_us * product.uses * 1e-6
            by_rules += entry.rules_us * product.uses * 1e-6
    return measured, by_rules


# -- time --------------------------------------------------------------------------------------------------------------


CYCLES_PER_S = 2e9  # of a multiprocessor, about
LEAST_PAUSE_S = 100e-6
LONGEST_PAUSE_S = 20e-3
SPARE = 1.5  # times the host's time for the launches


class StreamTimer:
    """Measures calls by events on the current stream of a device."""

    def __init__(self) -> None:
        self._first, self._last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Return a function that makes the calls and returns the mean seconds of one. Raises where the first cannot be
        launched."""
        begin = time.perf_counter()
        calls[0]()  # loads kernels and allocates workspaces
        pause_s = SPARE * (time.perf_counter() - begin) * len(calls)

        @torch.inference_mode()
        def sample() -> float:
            nonlocal pause_s
            while True:
                pause_s = min(max(LEAST_PAUSE_S, pause_s), LONGEST_PAUSE_S)
                torch.cuda._sleep(int(pause_s * CYCLES_PER_S))
                self._first.record()
                begin = time.perf_counter()
                for call in calls:
                    call()
                launched_s = time.perf_counter() - begin
                self._last.record()
                was_late = self._first.query()
                self._last.synchronize()
                if not was_late or pause_s >= LONGEST_PAUSE_S:
                    pause_s = SPARE * launched_s
                    milliseconds: float = self._first.elapsed_time(self._last)
                    return milliseconds * 1e-3 / len(calls)
                pause_s *= 2

        return sample
