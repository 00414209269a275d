"""StoredWeight: collects the tensors of a quantized checkpoint that stand for one Linear, part by part.

Where a Linear's codes come from: a float weight that a scheme rounds, or what a checkpoint stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inferengine.errors import ConfigError
from inferengine.layers.parallel import Cut
from inferengine.quantization.checkpoints.layout import Layout
from inferengine.quantization.weight import QuantizedWeight, cut, dequantize, stack


class StoredWeight:
    """What a Linear holds in place of a float weight while a checkpoint is read. `parts` are its output sizes, of
    which the checkpoint has a tensor each; `names[i]` is what it calls the module of part i."""

    def __init__(
        self,
        layout: Layout,
        in_features: int,
        parts: list[int],
        names: list[str],
        device: torch.device,
        cuts: list[Cut | None],
        *,
        has_bias: bool,
    ) -> None:
        """`cuts[i]`: what this rank takes of part i; None: all of it."""
        self.cuts = cuts
        self.layout, self.in_features, self.parts, self.names, self.device = layout, in_features, parts, names, device
        self.has_bias = has_bias
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in parts]
        self.order: torch.Tensor | None = None  # of the inputs, once assembled; None: their own

    def knows(self, suffix: str) -> bool:
        """Return whether a tensor is for this weight. Some tools store biases of zeros for layers that have none."""
        if suffix == "bias":
            return not self.has_bias
        return suffix in self.layout.required or suffix in self.layout.optional

    def take(self, part: int | None, suffix: str, tensor: torch.Tensor) -> None:
        """Keep one tensor, in whatever order they come. Raises ConfigError naming it."""
        index = part or 0
        if suffix in self.tensors[index]:
            raise ConfigError("model.path", f"the tensor {self.names[index]}.{suffix} fills a place that is taken")
        self.tensors[index][suffix] = tensor

    def missing(self) -> str | None:
        """Return the name of a tensor that has not come, or None."""
        for name, tensors in zip(self.names, self.tensors, strict=True):
            for suffix in self.layout.required:
                if suffix not in tensors:
                    return f"{name}.{suffix}"
        return None

    def numbers(self) -> torch.Tensor:
        """Return the weight as numbers [out, in], for a layer that computes with no codes."""
        found = dequantize(self.assemble())
        if self.order is None:
            return found
        in_place = torch.empty_like(found)
        in_place[:, self.order.to(found.device)] = found
        return in_place

    def assemble(self) -> QuantizedWeight:
        """Return all parts as one weight on the device. Raises ConfigError naming a tensor that does not fit."""
        made, orders = [], []
        for name, rows, tensors, part in zip(self.names, self.parts, self.tensors, self.cuts, strict=True):
            if "bias" in tensors and tensors.pop("bias").any():
                raise ConfigError("model.path", f"the tensor {name}.bias is unexpected: this layer has none")
            try:
                order = None if self.layout.order is None else self.layout.order(tensors, self.in_features)
                if order is not None and part is not None and part.dim == 1:
                    raise ValueError(
                        "its inputs are reordered (desc_act) and cannot be divided: set tensor_parallel = 1"
                    )
                made.append(cut(self.layout.assemble(tensors, rows, self.in_features), part))
                orders.append(order)
            except ValueError as error:
                raise ConfigError("model.path", f"{name} ({self.layout.name}): {error}") from None
        self.order = orders[0]
        if any(not _are_equal(order, self.order) for order in orders):
            raise ConfigError("model.path", f"{', '.join(self.names)}: their inputs are reordered each in its own way")
        whole = stack(made)
        self.tensors.clear()
        zeros = None if whole.zeros is None else whole.zeros.to(self.device)
        return whole._replace(
            codes=whole.codes.contiguous().to(self.device),
            scales=whole.scales.contiguous().to(self.device),
            zeros=zeros,
        )


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


Make = Callable[[torch.Tensor], QuantizedWeight]


def codes_from(source: torch.Tensor | StoredWeight, make: Make) -> QuantizedWeight:
    """Return codes and scales on the device of `source`."""
    return source.assemble() if isinstance(source, StoredWeight) else make(source)
