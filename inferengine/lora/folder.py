"""AdapterFolder: the adapters that a model may use, by name. A name is that of a sub-folder, never a path: clients can
only load what the operator put there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from inferengine.errors import ConfigError, InferEngineError
from inferengine.lora.adapter import CONFIG, Adapter, read_adapter
from inferengine.lora.bank import AdapterBank

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class AdapterFolder:
    """`read` may be called from any thread; `add` and `remove` between steps, in the thread that runs them."""

    def __init__(
        self, folder: Path, model: nn.Module, targets: Mapping[str, Any], bank: AdapterBank, *, max_rank: int
    ) -> None:
        self.bank = bank
        self._folder, self._model, self._targets, self._max_rank = folder, model, targets, max_rank

    def load_all(self) -> None:
        """Load every adapter in the folder. Raises ConfigError for one that cannot be used."""
        for path in sorted(self._folder.iterdir()):
            if (path / CONFIG).is_file():
                try:
                    self.bank.add(self.read(path.name))
                except InferEngineError as error:
                    raise ConfigError("model.adapters", error.message) from None

    def names(self) -> dict[str, int]:
        """Return the number of each loaded adapter."""
        return {adapter.name: number for number, adapter in self.bank.adapters.items()}

    def add(self, adapter: Adapter) -> int:
        """Add an adapter between steps. Returns its number, which requests carry."""
        return self.bank.add(adapter)

    def remove(self, number: int) -> None:
        """Remove an adapter that no sequence uses, between steps."""
        self.bank.remove(number)

    def read(self, name: str) -> Adapter:
        """Read and check an adapter into host memory. Raises InferEngineError."""
        if not NAME.fullmatch(name) or not (self._folder / name / CONFIG).is_file():
            raise InferEngineError("not_found", "there is no adapter of that name in model.adapters", field="name")
        folder = self._folder / name
        bank = self.bank
        return read_adapter(folder, name, self._model, self._targets, max_rank=self._max_rank, dtype=bank.dtype)
