"""Where a Linear's codes come from: a float weight that a scheme rounds, or what a checkpoint stored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inferengine.quant.stored import StoredWeight
from inferengine.quant.weight import QuantizedWeight

Make = Callable[[torch.Tensor], QuantizedWeight]


def codes_from(source: torch.Tensor | StoredWeight, make: Make) -> QuantizedWeight:
    """Codes and scales on the device of `source`."""
    return source.assemble() if isinstance(source, StoredWeight) else make(source)
