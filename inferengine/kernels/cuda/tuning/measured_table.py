"""Measured tables: for each product, decode attention and mixture of experts, and each number of rows, the best kernel,
in JSON files by card and versions.

A file holds the measurements of one card with one version of torch, of Triton and of the kernels, whose sources are
hashed: another card, torch, Triton or kernel is measured anew. It lies beside the compiled kernels. The package
brings tables of common shapes (tables/*.json), which hold for their card whatever the versions, where this machine has
measured nothing itself. They choose for a card with the same chip too, where it has none of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.kernels.cuda import dispatch
from inferengine.kernels.cuda.dispatch import (
    PRODUCTS,
    AttentionKey,
    DecodeConfig,
    Kernel,
    KernelChoice,
    MeasuredRun,
    Operands,
    Product,
    ProductKey,
    attention_choices,
    decode_rule,
)
from inferengine.kernels.cuda.moe.configurations import (
    ExpertsChoice,
    ExpertsKey,
    FragmentConfig,
    GroupedConfig,
    PairConfig,
    experts_choices,
)
from inferengine.kernels.cuda.tuning.choices import CaseTimes, ChoiceEntry
from inferengine.kernels.cuda.tuning.limits import SHARED_BYTES, takes

logger = logging.getLogger(__name__)

FORMAT = 2
ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512),
    *(768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
)  # that are measured; a run reaches up to each of them from the one before
SHIPPED = Path(__file__).with_name("tables")
SAME_CHIP = (("NVIDIA H200", "NVIDIA H100 80GB HBM3"),)  # cards that differ by their memory alone
KERNEL_SOURCES = (
    *("activation.py", "codes.py", "mma.py", "norm.py", "pdl.py", "rope_kv_write.py", "split_k.py"),
    *("gemm/*.py", "attention/decode.py", "moe/*.py"),
)
CONFIGS: dict[Kernel, Any] = {
    Kernel.GEMV: dispatch.GemvConfig,
    Kernel.TILE: dispatch.TileConfig,
    Kernel.TMA_TILE: dispatch.TmaTileConfig,
    Kernel.TMA_PARTS: dispatch.TmaTileConfig,
    Kernel.W8_GEMV: dispatch.W8GemvConfig,
    Kernel.W8_TILE: dispatch.W8TileConfig,
    Kernel.W4_SMALL_M: dispatch.W4SmallMConfig,
    Kernel.W4_TILE: dispatch.W4TileConfig,
    Kernel.BLOCK_TILE: dispatch.BlockTileConfig,
    Kernel.STREAM: dispatch.StreamConfig,
}
WITHOUT_CONFIG = (Kernel.GEMV_HOPPER, Kernel.QUANTIZE_INPUTS)
FLAGS = ("preload", "weight_left", "tma", "fused")  # fields of configurations that are true or false
POWERS_OF_TWO = {  # the largest value that a kernel takes
    "block_m": 256, "block_n": 256, "block_k": 2048, "block_tokens": 128, "num_warps": 8, "tiles": 2, "row_blocks": 4,
    "pair_blocks": 4, "row_warps": 4, "column_warps": 4,
}  # fmt: skip
NUMBERS = {  # the smallest and the largest
    "num_stages": (1, 8), "splits": (1, 64), "chunks": (1, 256), "num_splits": (1, 64), "min_tiles": (1, 64),
    "ahead": (1, 8), "prefetch": (0, 4096),
}  # fmt: skip


class Environment(NamedTuple):
    """What a measurement holds for."""

    card: str
    torch: str
    triton: str
    kernels: str  # hash of their sources


class ProductEntry(NamedTuple):
    """The measurement of a product at one number of rows, in microseconds. The best and the runner-up are a kernel and
    its configuration, or None: the library. `rules_us`: what the rules of dispatch.py would have chosen."""

    best: KernelChoice | None
    best_us: float
    second: KernelChoice | None
    second_us: float
    rules_us: float


ChoiceKey = AttentionKey | ExpertsKey


class MeasuredTable:
    """Entries by product and number of rows. `choices`: those of decode attention (by AttentionKey) and of experts'
    products (by ExpertsKey)."""

    def __init__(
        self,
        entries: Mapping[ProductKey, Mapping[int, ProductEntry]] | None = None,
        choices: Mapping[ChoiceKey, Mapping[int, ChoiceEntry]] | None = None,
    ) -> None:
        self.entries: dict[ProductKey, dict[int, ProductEntry]] = {
            key: dict(rows) for key, rows in (entries or {}).items()
        }
        self.choices: dict[ChoiceKey, dict[int, ChoiceEntry]] = {
            key: dict(rows) for key, rows in (choices or {}).items()
        }

    def put(self, key: ProductKey, rows: int, entry: ProductEntry) -> None:
        """Set one entry."""
        self.entries.setdefault(key, {})[rows] = entry

    def put_choice(self, key: ChoiceKey, rows: int, entry: ChoiceEntry) -> None:
        """Set one entry of what is not a product."""
        self.choices.setdefault(key, {})[rows] = entry

    def add_empty(self, keys: Iterable[ProductKey]) -> None:
        """Note that these products were measured, even where nothing came of it."""
        for key in keys:
            self.entries.setdefault(key, {})

    def update(self, other: MeasuredTable) -> None:
        """Take all entries of another table."""
        for key, rows in other.entries.items():
            self.entries.setdefault(key, {}).update(rows)
        for choice_key, found in other.choices.items():
            self.choices.setdefault(choice_key, {}).update(found)

    def decide(self) -> None:
        """Let these measurements, and no others, decide from now on."""
        dispatch.use_measured(self.runs())
        attention_choices.use(
            {key: choice_runs(rows) for key, rows in self.choices.items() if isinstance(key, AttentionKey)}
        )
        experts_choices.use(
            {key: choice_runs(rows) for key, rows in self.choices.items() if isinstance(key, ExpertsKey)}
        )

    def runs(self) -> dict[ProductKey, tuple[MeasuredRun, ...]]:
        """Return what `dispatch.use_measured` takes: neighbours of one choice are one run."""
        return {key: runs_of(rows) for key, rows in self.entries.items()}


def runs_of(entries: Mapping[int, ProductEntry]) -> tuple[MeasuredRun, ...]:
    """Return the runs of one product. Each measured number of rows stands for those above the next smaller of ROWS."""
    runs: list[MeasuredRun] = []
    for rows in sorted(entries):
        first = max((each for each in ROWS if each < rows), default=0) + 1
        runs.append(MeasuredRun(first, rows, entries[rows].best))
    return tuple(runs)


def choice_runs(entries: Mapping[int, ChoiceEntry]) -> tuple[tuple[int, int, Any], ...]:
    """Return the runs (first row, last row, choice) of what is not a product, as `runs_of`."""
    first = {rows: max((each for each in ROWS if each < rows), default=0) + 1 for rows in entries}
    return tuple((first[rows], rows, entries[rows].best) for rows in sorted(entries))


# -- environment -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def kernel_hash() -> str:
    """Hash the sources of the kernels that tables choose among."""
    folder = Path(dispatch.__file__).parent
    digest = hashlib.sha256()
    for pattern in KERNEL_SOURCES:
        for file in sorted(folder.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def file_name(environment: Environment) -> str:
    """Return the name of the file that holds an environment's measurements."""
    versions = hashlib.sha256("\n".join(environment).encode()).hexdigest()[:12]
    return f"{_slug(environment.card)}-{versions}.json"


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


# -- files -------------------------------------------------------------------------------------------------------------


def load(folder: Path, environment: Environment) -> MeasuredTable:
    """Return what was measured here in this environment; empty where there is no file, or none that can be read."""
    found = _read(folder / file_name(environment))
    if found is None or found[0] != environment:
        return MeasuredTable()
    return found[1]


def shipped(card: str, folder: Path = SHIPPED) -> MeasuredTable:
    """Return the measurements of a card that come with the package."""
    table = MeasuredTable()
    for file in sorted(folder.glob("*.json")):
        found = _read(file)
        if found is not None and found[0].card == card:
            table.update(found[1])
    return table


def shipped_for_chip(card: str, folder: Path = SHIPPED) -> MeasuredTable:
    """Return the measurements that come with the package of a card, and for products without any those of cards with
    the same chip: their choices hold here, their microseconds do not."""
    table = MeasuredTable()
    for cards in SAME_CHIP:
        if card in cards:
            for other in cards:
                table.update(shipped(other, folder))
    own = shipped(card, folder)
    for key in own.entries:  # none of another card's numbers of rows beside its own
        table.entries.pop(key, None)
    for choice in own.choices:
        table.choices.pop(choice, None)
    table.update(own)
    return table


def shipped_most(folder: Path = SHIPPED) -> tuple[MeasuredTable, Environment]:
    """Return the tables of the card of which the package has most products, and how they were measured."""
    found = filter(None, map(_read, sorted(folder.glob("*.json"))))
    tables = [(shipped(environment.card, folder), environment) for environment, _ in found]
    none = MeasuredTable(), Environment("no card", "", "", "")
    return max(tables, key=lambda table: len(table[0].entries), default=none)


def save(table: MeasuredTable, folder: Path, environment: Environment) -> Path:
    """Write the measurements of an environment, with those that its file already has of other products. Raises
    OSError."""
    merged = load(folder, environment)
    merged.update(table)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(environment)
    text = to_json(merged, environment)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".json")
    try:
        with os.fdopen(descriptor, "w") as writer:
            writer.write(text)
        Path(temporary).replace(file)
    except OSError:  # a full disk keeps no half of a table
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def to_json(table: MeasuredTable, environment: Environment) -> str:
    """Return the text of a table's file, one product a line."""
    lines = [
        f"{json.dumps(_key_name(key))}: {json.dumps([_entry_values(row, entries[row]) for row in sorted(entries)])}"
        for key, entries in sorted(table.entries.items())
    ]
    head = json.dumps({"format": FORMAT, **environment._asdict()})
    text = f'{head[:-1]}, "products": {{\n' + ",\n".join(lines) + "}"
    for name, kind in CHOICE_KINDS.items():
        found = [
            f"{json.dumps(' '.join(map(str, key)))}: "
            f"{json.dumps([_choice_entry_values(row, entries[row]) for row in sorted(entries)])}"
            for key, entries in sorted((key, entries) for key, entries in table.choices.items() if type(key) is kind)
        ]
        text += f', "{name}": {{\n' + ",\n".join(found) + "}"
    return text + "}\n"


def from_json(text: str) -> tuple[Environment, MeasuredTable]:
    """Read a table's file. Raises some Exception where it is none, or has a choice that its kernel does not take."""
    values = json.loads(text)
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}")
    environment = Environment(*(str(values[name]) for name in Environment._fields))
    table = MeasuredTable()
    for name, rows in values["products"].items():
        table.add_empty([_key(name)])
        for row, *entry in rows:
            table.put(_key(name), _rows(row), _entry(_key(name), row, entry))
    for kind_name, kind in CHOICE_KINDS.items():
        for name, rows in values[kind_name].items():
            key = _choice_key(kind, name)
            table.choices[key] = {_rows(row): _choice_entry(key, row, *entry) for row, *entry in rows}
    return environment, table


def _read(file: Path) -> tuple[Environment, MeasuredTable] | None:
    try:
        return from_json(file.read_text())
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a file: no start fails for it
        logger.warning("the table of measured kernels %s cannot be read and is not used: %s", file, error)
        return None


def _key_name(key: ProductKey) -> str:
    return f"{key.operands.name} {key.product.name} {key.width}x{key.columns}"


def _key(name: str) -> ProductKey:
    operands, product, shape = name.split(" ")
    width, columns = shape.split("x")
    return ProductKey(Operands[operands], Product[product], int(width), int(columns))


def _entry_values(rows: int, entry: ProductEntry) -> list[Any]:
    choices = [_choice_values(each) for each in (entry.best, entry.second)]
    times = [round(each, 2) for each in (entry.best_us, entry.second_us, entry.rules_us)]
    return [rows, choices[0], times[0], choices[1], times[1], times[2]]


def _rows(value: Any) -> int:
    """A number of rows that is measured. Raises ValueError."""
    if type(value) is not int or value not in ROWS:
        raise ValueError(f"a measurement of {value!r} rows")
    return value


def _entry(key: ProductKey, rows: int, values: list[Any]) -> ProductEntry:
    best, best_us, second, second_us, rules_us = values
    return ProductEntry(
        _choice(key, rows, best), _us(best_us), _choice(key, rows, second), _us(second_us), _us(rules_us)
    )


def _us(value: Any) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a time of {value} us")
    return float(value)


def _choice_values(choice: KernelChoice | None) -> list[Any] | None:
    return None if choice is None else [choice.kernel.name, *(choice.config or ())]


def _choice(key: ProductKey, rows: int, values: list[Any] | None) -> KernelChoice | None:
    if values is None:
        return None
    kernel = Kernel[values[0]]
    config = None if kernel in WITHOUT_CONFIG else _config(CONFIGS[kernel], values[1:])
    choice = KernelChoice(kernel, config)
    kernels = {rule.kernel for rule in PRODUCTS[key.operands].get(key.product, ())}
    if kernel not in kernels or not takes(choice, key.product, rows, key.width, key.columns):
        raise ValueError(f"{kernel.name} {values[1:]} for {rows} rows of {_key_name(key)}")
    return choice


def _config(kind: Any, values: list[Any]) -> Any:
    """A configuration whose numbers its kernel takes. Raises ValueError or TypeError."""
    config = kind(*values)
    for name, value in config._asdict().items():
        if name in FLAGS:
            valid = isinstance(value, bool)
        elif name == "registers":
            valid = value is None or (type(value) is int and 64 <= value <= 248 and value % 8 == 0)
        elif type(value) is not int:
            valid = False
        elif name in POWERS_OF_TWO:
            valid = 1 <= value <= POWERS_OF_TWO[name] and value & (value - 1) == 0
        else:
            least, most = NUMBERS[name]
            valid = least <= value <= most
        if not valid:
            raise ValueError(f"{name} = {value!r} of {values}")
    return config


# -- attention and experts ---------------------------------------------------------------------------------------------

CHOICE_KINDS: dict[str, Any] = {"attention": AttentionKey, "experts": ExpertsKey}
EXPERT_CONFIGS: dict[str, Any] = {"PAIR": PairConfig, "GROUPED": GroupedConfig, "FRAGMENT": FragmentConfig}


def _choice_entry_values(rows: int, entry: ChoiceEntry) -> list[Any]:
    times = {case: [round(each, 2) for each in found] for case, found in entry.times.items()}
    return [rows, _config_values(entry.best), _config_values(entry.second), times]


def _choice_key(kind: Any, name: str) -> ChoiceKey:
    words = name.split(" ")
    num_names = int(kind is ExpertsKey)  # its format
    key: ChoiceKey = kind(*words[:num_names], *map(int, words[num_names:]))
    return key


def _choice_entry(key: ChoiceKey, rows: int, best: Any, second: Any, times: Any) -> ChoiceEntry:
    def read(values: list[Any]) -> Any:
        return _decode_config(key, rows, values) if isinstance(key, AttentionKey) else _experts_choice(key, values)

    found = {str(case): CaseTimes(*(_us(each) for each in values)) for case, values in times.items()}
    return ChoiceEntry(read(best), read(second), found)


def _config_values(choice: DecodeConfig | ExpertsChoice) -> list[Any]:
    if isinstance(choice, DecodeConfig):
        return list(choice)
    names = {config: name for name, config in EXPERT_CONFIGS.items()}
    return [choice.is_grouped, *([names[type(each)], *each] for each in (choice.gate_up, choice.down))]


def _decode_config(key: AttentionKey, rows: int, values: list[Any]) -> DecodeConfig:
    config: DecodeConfig = _config(DecodeConfig, values)
    tile_bytes = 2 * config.block_tokens * key.head_dim * key.cache_bits // 8
    whole = key.block_size % config.block_tokens == 0 or config.block_tokens % key.block_size == 0
    fits = whole and config.block_tokens >= 16 and tile_bytes * config.num_stages <= SHARED_BYTES
    if not fits and config != decode_rule(rows, key.num_kv_heads, key.head_dim):
        raise ValueError(f"configuration {values} for {key}")
    return config


def _experts_choice(key: ExpertsKey, values: list[Any]) -> ExpertsChoice:
    is_grouped, *products = values
    gate_up, down = (_config(EXPERT_CONFIGS[name], numbers) for name, *numbers in products)
    if not isinstance(is_grouped, bool):
        raise ValueError(f"grouped = {is_grouped!r}")
    if is_grouped and PairConfig in (type(gate_up), type(down)):
        raise ValueError(f"pairs by themselves that are grouped: {values}")
    if FragmentConfig in (type(gate_up), type(down)) and not key.format.startswith(("mxfp4", "int4")):
        raise ValueError(f"4-bit codes in {key.format}: {values}")
    return ExpertsChoice(is_grouped, gate_up, down)
