"""Reads the header of GGUF files, version 2 and 3: metadata and the places of tensors, from a memory-mapped file.

The file is not trusted. Every count, length and offset is checked against the size of the file before it is used. What
does not fit raises a ConfigError that names the file and the remedy. Long lists are decoded on demand.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.errors import ConfigError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MOST_DIMENSIONS = 4
LONGEST_NAME = 1 << 16  # bytes of a key or of a tensor's name
MOST_TEXTS = 1 << 22  # of a list; a vocabulary's merges are half a million
ALIGNMENT = 32  # bytes; of tensors, if the file does not name another
SHORT_LIST = 256  # lists of at most so many numbers are decoded at once

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, LIST, UINT64, INT64, FLOAT64 = range(13)
SCALARS = {  # struct's letter of a type; array's are the same
    UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?",
    UINT64: "Q", INT64: "q", FLOAT64: "d",
}  # fmt: skip

# ggml's types of tensors: their names, weights and bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


BLOCKS = {name: (weights, num_bytes) for name, weights, num_bytes in TYPES.values()}


class TensorInfo(NamedTuple):
    """A tensor of a file. `shape` is in torch's order; `begin` is its offset in bytes from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    num_bytes: int


class LazyList(NamedTuple):
    """A list in the metadata that is not decoded yet. `begin` is the offset of its first item."""

    kind: int
    length: int
    begin: int


@dataclass(frozen=True)
class GgufFile:
    """One model, which may be split into several files. `metadata` is that of the first file."""

    path: Path
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata, or the default if it is absent. Raises ConfigError for another type."""
        found = self.metadata.get(key)
        if found is None:
            return default
        if isinstance(found, LazyList) and kind is list:
            with mapped(self.path) as data:
                return _Cursor(data, self.path, found.begin).items(found)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise refused(self.path, f"{key} is a {type(found).__name__}, which a reader does not expect there")
        return found

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a count. Raises ConfigError if it is absent and has no default, or if it is no count."""
        found = self.value(key, int, default)
        if found is None:
            raise refused(self.path, f"its metadata has no {key}")
        if not 0 <= found < 1 << 32:
            raise refused(self.path, f"{key} = {found} is no count")
        return int(found)


def refused(
    path: Path, why: str, remedy: str = "fetch it again, or take another conversion of the model"
) -> ConfigError:
    """Make the error for a file that cannot be used."""
    return ConfigError("model.path", f"{path.name}: {why}: {remedy}")


def mapped(path: Path) -> mmap.mmap:
    """Map a file into memory. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise refused(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})") from None


def header_bytes(path: Path) -> bytes:
    """Return the bytes before the tensors of a model's first file. Raises ConfigError."""
    tensors = read_gguf(path).tensors.values()
    first = min((info.begin for info in tensors if info.file == read_gguf(path).path), default=0)
    with mapped(read_gguf(path).path) as data:
        return data[:first]


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without config.json, of a split model the first file; None if there is none.

    Raises ConfigError if the folder holds several models.
    """
    if (folder / "config.json").is_file():
        return None
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("mmproj"))
    firsts = [path for path in files if (found := SPLIT.fullmatch(path.name)) is None or int(found[2]) == 1]
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:3])
        raise ConfigError(
            "model.path", f"{folder.name} holds {len(firsts)} GGUF models ({names}): name one of the files"
        )
    return firsts[0] if firsts else files[0] if files else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, and of the other files of a split model. Raises ConfigError."""
    files = _parts(path)
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror})") from None
    return _read(files, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], changed: tuple[tuple[int, int], ...]) -> GgufFile:
    """Read the files. `changed` (modification times and sizes) makes the cache read a changed file again."""
    metadata, tensors = _read_one(files[0])
    for file in files[1:]:
        for name, info in _read_one(file)[1].items():
            if name in tensors:
                raise refused(file, f"the tensor {name} stands in {tensors[name].file.name} too")
            tensors[name] = info
    expected = metadata.get("split.tensors.count")
    if len(files) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise refused(files[0], f"its {len(files)} files hold {len(tensors)} tensors where {expected} are due")
    return GgufFile(files[0], files, metadata, tensors)


def _parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a model. Raises ConfigError if one of a split model is missing."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise refused(path, f"part {int(found[2])} of {count} is no part")
    parts = [path.with_name(f"{found[1]}-{index:05}-of-{found[3]}.gguf") for index in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ConfigError("model.path", f"{part.name} is missing beside {path.name}: fetch all {count} files")
    return tuple(parts)


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    with mapped(path) as data:
        cursor = _Cursor(data, path)
        if cursor.take(4) != MAGIC:
            raise refused(path, "it is no GGUF file")
        version = cursor.scalar(UINT32)
        if version not in VERSIONS:
            big = ", written for machines of the other byte order" if version >> 16 else ""
            raise refused(path, f"version {version} of the format{big} is not read; 2 and 3 are")
        num_tensors, num_values = cursor.scalar(UINT64), cursor.scalar(UINT64)
        cursor.expect(num_tensors, 24, "tensors")
        cursor.expect(num_values, 13, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text(LONGEST_NAME)
            if key in metadata:
                raise refused(path, f"the key {key} stands in it twice")
            metadata[key] = cursor.value(cursor.scalar(UINT32))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise refused(path, f"general.alignment = {alignment} is no power of two")
        infos = [_tensor(cursor) for _ in range(num_tensors)]
        start = -(-cursor.at // alignment) * alignment
        return metadata, _placed(path, infos, start, alignment, len(data))


def _tensor(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Read the next tensor's name, type, shape, offset and number of bytes."""
    name, dimensions = cursor.text(LONGEST_NAME), cursor.scalar(UINT32)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise refused(cursor.path, f"the tensor {name[:80]} has {dimensions} dimensions")
    sizes = [cursor.scalar(UINT64) for _ in range(dimensions)]
    number, offset = cursor.scalar(UINT32), cursor.scalar(UINT64)
    if number not in TYPES:
        raise refused(cursor.path, f"the tensor {name[:80]} is of type {number}, which is not known here")
    kind, block, num_bytes = TYPES[number]
    if prod(sizes) > 1 << 48 or 0 in sizes or sizes[0] % block:
        raise refused(cursor.path, f"the tensor {name[:80]} of shape {sizes[::-1]} cannot be {kind}")
    return name, kind, tuple(reversed(sizes)), offset, prod(sizes) // block * num_bytes


def _placed(
    path: Path, infos: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Return the tensors by name. Raises ConfigError if one is outside of the file, not aligned, or over another."""
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset, num_bytes in infos:
        if name in tensors:
            raise refused(path, f"the tensor {name[:80]} stands in it twice")
        if offset % alignment or start + offset + num_bytes > size:
            raise refused(
                path, f"the tensor {name[:80]} lies outside of the {size} bytes of the file, or is not aligned"
            )
        tensors[name] = TensorInfo(name, kind, shape, path, start + offset, num_bytes)
    end = 0
    for info in sorted(tensors.values(), key=lambda info: info.begin):
        if info.begin < end:
            raise refused(path, f"the tensor {info.name[:80]} lies over another one")
        end = info.begin + info.num_bytes
    return tensors


class _Cursor:
    """A reading position in a mapped file. Its methods raise ConfigError if the file ends too early."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self.data, self.path, self.at, self.size = data, path, at, len(data)

    def take(self, count: int) -> bytes:
        self.expect(count, 1, "bytes")
        found = self.data[self.at : self.at + count]
        self.at += count
        return found

    def expect(self, count: int, each: int, what: str) -> None:
        """Raise ConfigError if the rest of the file cannot hold `count` items of at least `each` bytes."""
        if count * each > self.size - self.at:
            raise refused(self.path, f"it ends before the {count} {what} that it announces")

    def scalar(self, kind: int) -> Any:
        letter = "<" + SCALARS[kind]
        (found,) = struct.unpack(letter, self.take(struct.calcsize(letter)))
        return float(f"{found:.7g}") if kind == FLOAT32 else found  # 1e-6, and not its neighbour among fp32 numbers

    def text(self, longest: int | None = None) -> str:
        length = self.scalar(UINT64)
        if longest is not None and length > longest:
            raise refused(self.path, f"a name of {length} bytes is too long")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise refused(self.path, "a text in it is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.scalar(kind)
        if kind != LIST:
            raise refused(self.path, f"a value is of type {kind}, which is not known here")
        item, count = self.scalar(UINT32), self.scalar(UINT64)
        if item != STRING and item not in SCALARS:
            raise refused(self.path, f"a list has items of type {item}, which is not read")
        found = LazyList(item, count, self.at)
        if item != STRING:
            self.expect(count, struct.calcsize("<" + SCALARS[item]), "numbers")
            if count <= SHORT_LIST:
                return self.items(found)
            self.at += count * struct.calcsize("<" + SCALARS[item])
            return found
        self.expect(count, 8, "texts")
        if count > MOST_TEXTS:
            raise refused(self.path, f"a list of {count} texts is too long")
        for _ in range(count):
            self._skip_text()
        return found

    def _skip_text(self) -> None:
        self.expect(8, 1, "bytes")
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        self.expect(length, 1, "bytes")
        self.at += length

    def items(self, found: LazyList) -> list[Any]:
        """Decode a list."""
        self.at = found.begin
        if found.kind == STRING:
            return [self.text() for _ in range(found.length)]
        letter = SCALARS[found.kind]
        content = self.take(found.length * struct.calcsize("<" + letter))
        if found.kind == BOOL:
            return [byte != 0 for byte in content]
        numbers = array(letter)
        numbers.frombytes(content)
        return numbers.tolist()
