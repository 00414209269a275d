"""Measured tables: for each product and number of rows the best kernel, in JSON files by card and versions.

A file holds the measurements of one card with one version of torch, of Triton and of the kernels, whose sources are
hashed: another card, torch, Triton or kernel is measured anew. It lies beside the compiled kernels. The package
brings tables of common shapes (tables/*.json), which hold for their card whatever the versions, where this machine has
measured nothing itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.kernels.cuda import dispatch
from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, MeasuredRun, Operands, Product, ProductKey

logger = logging.getLogger(__name__)

FORMAT = 1
ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512),
    *(768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
)  # that are measured; a run reaches up to each of them from the one before
SHIPPED = Path(__file__).with_name("tables")
KERNEL_SOURCES = ("activation.py", "mma.py", "norm.py", "pdl.py", "split_k.py", "gemm/*.py")
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


class Environment(NamedTuple):
    """What a measurement holds for."""

    card: str
    torch: str
    triton: str
    kernels: str  # hash of their sources


class Entry(NamedTuple):
    """The measurement of a product at one number of rows, in microseconds. The best and the runner-up are a kernel and
    its configuration, or None: the library. `rules_us`: what the rules of dispatch.py would have chosen."""

    best: KernelChoice | None
    best_us: float
    second: KernelChoice | None
    second_us: float
    rules_us: float


class MeasuredTable:
    """Entries by product and number of rows."""

    def __init__(self, entries: Mapping[ProductKey, Mapping[int, Entry]] | None = None) -> None:
        self.entries: dict[ProductKey, dict[int, Entry]] = {key: dict(rows) for key, rows in (entries or {}).items()}

    def put(self, key: ProductKey, rows: int, entry: Entry) -> None:
        """Set one entry."""
        self.entries.setdefault(key, {})[rows] = entry

    def add_empty(self, keys: Iterable[ProductKey]) -> None:
        """Note that these products were measured, even where nothing came of it."""
        for key in keys:
            self.entries.setdefault(key, {})

    def update(self, other: MeasuredTable) -> None:
        """Take all entries of another table."""
        for key, rows in other.entries.items():
            self.entries.setdefault(key, {}).update(rows)

    def runs(self) -> dict[ProductKey, tuple[MeasuredRun, ...]]:
        """Return what `dispatch.use_measured` takes: neighbours of one choice are one run."""
        return {key: runs_of(rows) for key, rows in self.entries.items()}


def runs_of(entries: Mapping[int, Entry]) -> tuple[MeasuredRun, ...]:
    """Return the runs of one product. Each measured number of rows stands for those above the next smaller of ROWS."""
    runs: list[MeasuredRun] = []
    for rows in sorted(entries):
        first = max((each for each in ROWS if each < rows), default=0) + 1
        runs.append(MeasuredRun(first, rows, entries[rows].best))
    return tuple(runs)


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


def shipped_first(folder: Path = SHIPPED) -> tuple[MeasuredTable, Environment]:
    """Return the tables of the first card that the package has some of, and how they were measured."""
    for file in sorted(folder.glob("*.json")):
        found = _read(file)
        if found is not None:
            return shipped(found[0].card, folder), found[0]
    return MeasuredTable(), Environment("no card", "", "", "")


def save(table: MeasuredTable, folder: Path, environment: Environment) -> Path:
    """Write the measurements of an environment, with those that its file already has of other products. Raises
    OSError."""
    merged = load(folder, environment)
    merged.update(table)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(environment)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".json")
    with os.fdopen(descriptor, "w") as writer:
        writer.write(to_json(merged, environment))
    Path(temporary).replace(file)
    return file


def to_json(table: MeasuredTable, environment: Environment) -> str:
    """Return the text of a table's file, one product a line."""
    lines = [
        f"{json.dumps(_key_name(key))}: {json.dumps([_entry_values(row, entries[row]) for row in sorted(entries)])}"
        for key, entries in sorted(table.entries.items())
    ]
    head = json.dumps({"format": FORMAT, **environment._asdict()})
    return f'{head[:-1]}, "products": {{\n' + ",\n".join(lines) + "}}\n"


def from_json(text: str) -> tuple[Environment, MeasuredTable]:
    """Read a table's file. Raises ValueError, KeyError or TypeError where it is none."""
    values = json.loads(text)
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}")
    environment = Environment(*(str(values[name]) for name in Environment._fields))
    table = MeasuredTable()
    for name, rows in values["products"].items():
        for row, *entry in rows:
            table.put(_key(name), int(row), _entry(entry))
    return environment, table


def _read(file: Path) -> tuple[Environment, MeasuredTable] | None:
    try:
        return from_json(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the table of measured kernels %s cannot be read and is not used: %s", file, error)
        return None


def _key_name(key: ProductKey) -> str:
    return f"{key.operands.name} {key.product.name} {key.width}x{key.columns}"


def _key(name: str) -> ProductKey:
    operands, product, shape = name.split(" ")
    width, columns = shape.split("x")
    return ProductKey(Operands[operands], Product[product], int(width), int(columns))


def _entry_values(rows: int, entry: Entry) -> list[Any]:
    choices = [_choice_values(each) for each in (entry.best, entry.second)]
    times = [round(each, 2) for each in (entry.best_us, entry.second_us, entry.rules_us)]
    return [rows, choices[0], times[0], choices[1], times[1], times[2]]


def _entry(values: list[Any]) -> Entry:
    best, best_us, second, second_us, rules_us = values
    return Entry(_choice(best), float(best_us), _choice(second), float(second_us), float(rules_us))


def _choice_values(choice: KernelChoice | None) -> list[Any] | None:
    return None if choice is None else [choice.kernel.name, *(choice.config or ())]


def _choice(values: list[Any] | None) -> KernelChoice | None:
    if values is None:
        return None
    kernel = Kernel[values[0]]
    if kernel in WITHOUT_CONFIG:
        return KernelChoice(kernel, None)
    config = CONFIGS[kernel](*values[1:])
    if not all(isinstance(each, (int, bool)) for each in config):
        raise ValueError(f"configuration {values}")
    return KernelChoice(kernel, config)
