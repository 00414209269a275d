"""Columns of unsigned 32-bit integers, little-endian: prompts, streams, counts and tokens."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from inferengine.wire.read import WireError

_SWAP = sys.byteorder == "big"


def to_u32(values: Iterable[int]) -> bytes:
    """Little-endian unsigned 32-bit. Raises OverflowError or TypeError for what does not fit."""
    packed = values if isinstance(values, array) and values.typecode == "I" else array("I", values)
    if _SWAP:
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def from_u32(data: bytes, field: str = "tokens") -> array[int]:
    """The inverse of `to_u32`."""
    if len(data) % 4:
        raise WireError(f"{field}: a u32[] has a length that is a multiple of 4, not {len(data)}", field=field)
    values = array("I")
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values
