"""Layout: what a checkpoint format says about the tensors that stand for one weight, and how they become codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inferengine.errors import ConfigError
from inferengine.quantization.weight import QuantizedWeight

Tensors = dict[str, torch.Tensor]  # by suffix
_MISSING: Any = object()


@dataclass(frozen=True)
class Layout:
    """`required` and `optional` are the suffixes that stand in place of a Linear's "weight". `assemble(tensors, N, K)`
    turns them into codes; it raises ValueError naming what is wrong. `scheme` makes the same kind of weight from
    floats, for random ones. `is_plain(name)`: this module's weight is stored as ordinary floats. `order(tensors, K)`:
    the order of the inputs in which `assemble` gives the codes; None, or a function that says None, for their own.
    `groups`: the modules that are stored in layouts of their own, the first that holds a module counts."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    assemble: Callable[[Tensors, int, int], QuantizedWeight]
    scheme: str
    is_plain: Callable[[str], bool]
    order: Callable[[Tensors, int], torch.Tensor | None] | None = None
    groups: tuple[tuple[Callable[[str], bool], Layout], ...] = ()

    def of(self, module: str) -> Layout:
        """Return the layout of a module that is not plain."""
        return next((layout for holds, layout in self.groups if holds(module)), self)


def refused(message: str) -> ConfigError:
    """Return the error for a checkpoint whose quantization cannot be used."""
    return ConfigError("model.path", f"config.json: {message}")


class ConfigSection:
    """A part of quantization_config, read strictly: what nobody read is refused by `finish`."""

    def __init__(self, values: dict[str, Any], where: str = "quantization_config") -> None:
        self.values, self.where = values, where
        self._seen: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        """Return a value; the default where it is absent or null."""
        self._seen.add(name)
        found = self.values.get(name)
        return default if found is None else found

    def integer(self, name: str) -> int:
        """Return a whole number. Raises ConfigError for anything else."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise refused(f"{self.where}.{name} must be a whole number; got {value!r}")
        return value

    def group_size(self) -> int:
        """Return `group_size`: at least 1, or -1 for one group in each row. Raises ConfigError for anything else."""
        value = self.integer("group_size")
        if value < 1 and value != -1:
            raise refused(f"{self.where}.group_size must be at least 1, or -1; got {value}")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; an absent key and null are fine."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise refused(f"{self.where}.{name} = {value!r} is not supported; {' or '.join(map(repr, allowed))} is")

    def section(self, name: str) -> ConfigSection | None:
        """Return an object as a ConfigSection; None where it is absent. Raises ConfigError for anything else."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise refused(f"{self.where}.{name} must be an object")
        return ConfigSection(value, f"{self.where}.{name}")

    def names(self, name: str) -> list[str]:
        """Return a list of strings, empty where it is absent. Raises ConfigError for anything else."""
        value = self.value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refused(f"{self.where}.{name} must be a list of names")
        return value

    def skip(self, *names: str) -> None:
        """Accept keys without effect on how a checkpoint is read."""
        self._seen.update(names)

    def finish(self) -> None:
        """Raise ConfigError for the first key with a value that nothing has read."""
        for name, value in self.values.items():
            if name not in self._seen and value not in (None, False, {}, []):
                raise refused(f"{self.where}.{name} = {str(value)[:60]} is not supported by this engine")


def listed(names: list[str]) -> Callable[[str], bool]:
    """Return a function that says whether a module is in a list of exceptions: by full name, by a name it ends with or
    contains between dots, or by a pattern that begins with "re:". Raises ConfigError for a pattern that is not
    valid."""
    try:
        patterns = [re.compile(name[3:]) for name in names if name.startswith("re:")]
    except re.error as error:
        raise refused(f"quantization_config: {error.pattern!r} is not a valid pattern ({error.msg})") from None
    plain = [name for name in names if not name.startswith("re:")]

    def check(module: str) -> bool:
        dotted = f".{module}."
        return any(f".{name}." in dotted for name in plain) or any(pattern.match(module) for pattern in patterns)

    return check


def expect_shape(tensors: Tensors, suffix: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Return one of the tensors, which must have one of these shapes. Raises ValueError."""
    tensor = tensors[suffix]
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{suffix} has shape {list(tensor.shape)} where {wanted} is due")
    return tensor


# -- codes in words: eight of 4 bits, or four of 8 bits, in an int32 ---------------------------------------------------

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)  # lowest nibble first: GPTQ, compressed-tensors
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds column AWQ_ORDER[i]


def unpack_rows(words: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Unpack words of eight 4-bit codes: int32 [R, C] -> uint8 [R, 8 * C]. `order[i]`: the column of nibble i."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int32)
    return ((words.to(torch.int32).unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def unpack_bytes(words: torch.Tensor) -> torch.Tensor:
    """Unpack words of four codes, stored as code + 128, lowest byte first: int32 [R, C] -> int8 [R, 4 * C]."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    return (((words.to(torch.int32).unsqueeze(-1) >> shifts) & 255) - 128).to(torch.int8).flatten(1)
