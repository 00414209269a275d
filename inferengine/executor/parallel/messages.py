"""What rank 0 tells the other ranks, and what they tell it: one byte for the kind, then MessagePack or text."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from inferengine.core.step_plan import StepPlan

# To a rank, in this order: JOIN once, then CONFIGURE, LOAD, WARM_UP and steps, and after CLOSE perhaps CONFIGURE again.
JOIN = b"J"  # the store's path: exchange addresses
CONFIGURE = b"C"  # the configuration by section
LOAD = b"L"
WARM_UP = b"W"
STEP = b"S"  # a StepPlan
MASKS = b"M"  # of the step before
ADD_ADAPTER = b"A"  # the name of its folder
REMOVE_ADAPTER = b"R"  # its number
CLOSE = b"X"  # drop the model
# From a rank.
BEAT = b"B"
FAILED = b"F"  # why: its last message

_WORD = (1 << 64) - 1


def _to_plain(value: Any) -> Any:
    """Arrays of token ids, for MessagePack."""
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """Return a STEP message."""
    if plan.admitted:  # a seed counts modulo 2^64, which is what MessagePack has
        plan = plan._replace(admitted=[item._replace(seed=item.seed & _WORD) for item in plan.admitted])
    return STEP + _encoder.encode(plan)


def decode_plan(payload: memoryview | bytes) -> StepPlan:
    """Read a STEP message without its first byte."""
    return _decoder.decode(payload)


def encode_configuration(sections: dict[str, dict[str, Any]]) -> bytes:
    """Return a CONFIGURE message."""
    return CONFIGURE + msgspec.msgpack.encode(sections)


def decode_configuration(payload: bytes) -> dict[str, dict[str, Any]]:
    """Read a CONFIGURE message without its first byte."""
    return msgspec.msgpack.decode(payload, type=dict[str, dict[str, Any]])
