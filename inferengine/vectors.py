"""Vectors as they travel through the system: f32, little-endian, as bytes."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

_SWAP = sys.byteorder == "big"
ITEM_BYTES = 4


def to_bytes(values: Iterable[float]) -> bytes:
    """Pack values, rounded to f32. Raises OverflowError for what does not fit."""
    packed = array("f", values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def to_floats(data: bytes) -> list[float]:
    """Unpack values: the inverse of `to_bytes`. Raises ValueError where the length is no multiple of 4."""
    values = array("f")
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def shorten(data: bytes, dimensions: int) -> bytes:
    """Return the first `dimensions` values, of length 1 (L2) again: what models trained for it (Matryoshka, Kusupati et
    al. 2022) keep most of their meaning in."""
    if dimensions * ITEM_BYTES >= len(data):
        return data
    values = to_floats(data[: dimensions * ITEM_BYTES])
    norm = math.hypot(*values) or 1.0
    return to_bytes(value / norm for value in values)
