"""Encodes a StepPlan as MessagePack, for other ranks on this machine (parallel/) and for a remote device (remote/)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from inferengine.core.executor import StepPlan

_WORD = (1 << 64) - 1


def _to_plain(value: Any) -> Any:
    """Convert numpy arrays and numbers, and other sequences, to plain values."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)


encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """Return a plan as MessagePack. Seeds are reduced modulo 2^64, the largest integers of MessagePack."""
    if plan.admitted:
        plan = plan._replace(admitted=[item._replace(seed=item.seed & _WORD) for item in plan.admitted])
    return encoder.encode(plan)


def decode_plan(payload: memoryview | bytes | msgspec.Raw) -> StepPlan:
    """Decode a plan that `encode_plan` encoded. Raises ValueError."""
    return _decoder.decode(payload)
