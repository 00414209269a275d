"""A mixture of experts in place of a feed-forward block (Shazeer et al. 2017): a router sends each token to a few of
many small gated blocks, whose outputs are added up by its weights. Beside them there may be a block that all tokens
take.

The experts' weights are one tensor for each projection, [experts * rows, columns].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inferengine.kernels.experts import Gating, Routing
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import MoeConfig
from inferengine.layers.linear import GatedMLP
from inferengine.layers.norm import Norm, RMSNorm
from inferengine.layers.parallel import Communicator, DimensionRange


class ExpertLinear(nn.Module):
    """The weights of one projection of all experts, until they are packed. `parts` are the rows of the tensors that a
    checkpoint has for them, expert by expert."""

    def __init__(self, in_features: int, parts: list[int], num_experts: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.num_experts = num_experts
        self.held: DimensionRange | None = None  # which of a checkpoint's experts they are; None: all
        self.parts = parts * num_experts
        rows = sum(self.parts)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None
        self.source: Any = None  # what a quantized checkpoint stores instead of `weight`
        self.make: Callable[[torch.Tensor], Any] | None = None  # turns `weight` into codes, where it is quantized

    def take(self) -> tuple[Any, torch.Tensor | None]:
        """Return weight, or what stands for it, and bias, and let go of them."""
        if self.source is not None:
            stored: Any = self.source
        else:
            assert self.weight is not None
            stored = self.weight.data if self.make is None else self.make(self.weight.data)
        bias = None if self.bias is None else self.bias.data
        self.weight = self.bias = self.source = self.make = None
        return stored, bias


class Router(nn.Module):
    """A score for each expert and, where the shared block is gated, one for that block behind them. No scheme quantizes
    it, and no adapter changes it."""

    def __init__(self, ops: Ops, hidden_size: int, parts: list[int], *, bias: bool) -> None:
        super().__init__()
        self.ops, self.parts = ops, parts
        weight = nn.Parameter(torch.empty(sum(parts), hidden_size), requires_grad=False)
        self.weight: nn.Parameter | None = weight
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: Any = None

    def finish(self) -> None:
        """Pack the weight for the device, once it is loaded."""
        assert self.weight is not None
        self.packed = self.ops.pack_linear(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores [T, experts] of x [T, E], or with the shared block's score one more."""
        return self.ops.linear(x, self.packed, self.bias)


class ScoreCorrection(nn.Module):
    """A term for each expert, which is added to the scores that are compared. It is fp32 whatever the model is."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_experts), requires_grad=False)
        self.bias.number_type = torch.float32  # type: ignore[attr-defined]  # read by models/weights.py


class ExpertGains(nn.Module):
    """A factor of each expert's weight, which is fp32 whatever the model is."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts), requires_grad=False)
        self.weight.number_type = torch.float32  # type: ignore[attr-defined]  # read by models/weights.py


class Experts(nn.Module):
    """The gated blocks of a mixture. Subclasses say which of them a token takes."""

    def __init__(self, ops: Ops, hidden_size: int, config: MoeConfig, activation: str) -> None:
        super().__init__()
        self.ops, self.config = ops, config
        self.gating = config.gating or Gating(activation)
        size, count = config.intermediate_size, config.num_held
        up = [2 * size] if config.interleaved else [size, size]
        self.gate_up = ExpertLinear(hidden_size, up, count, bias=config.bias)
        self.down = ExpertLinear(size, [hidden_size], count, bias=config.bias)
        self.packed: Any = None

    def finish(self) -> None:
        """Pack the experts for the device, once they are loaded."""
        gate_up, gate_up_bias = self.gate_up.take()
        down, down_bias = self.down.take()
        self.packed = self.ops.pack_experts(
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            self.config.num_held,
            self.gating,
            interleaved=self.config.interleaved,
        )


class RoutedExperts(Experts):
    """Experts of a model whose own router has chosen them."""

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts make of x [T, E], [T, E]. Each token has k experts, with positive weights
        [T, k]."""
        weights = weights.float()
        # The operation routes by logits: these give the same experts, and weights that sum to 1.
        logits = weights.new_full((len(x), self.config.num_experts), float("-inf"))
        logits.scatter_(1, experts, weights.clamp_min(1e-30).log())
        routing = Routing(experts.shape[1], renormalized=True)
        mixed = self.ops.add_experts(x, logits, routing, self.packed, torch.zeros_like(x))
        return mixed.mul_(weights.sum(1, keepdim=True).to(x.dtype))


class MoeMLP(Experts):
    """The sum of what the chosen experts make of each token, and of a shared block where there is one.

    With a communicator each rank has some of the experts and a part of the shared block: one sum over the ranks makes
    the block's output of theirs. Every rank routes every token."""

    def __init__(self, ops: Ops, hidden_size: int, config: MoeConfig, activation: str) -> None:
        super().__init__(ops, hidden_size, config, activation)
        self.routing = Routing(
            config.num_chosen,
            config.renormalized,
            config.held,
            sigmoid=config.sigmoid,
            groups=config.groups,
            factor=config.factor,
        )
        self.communicator: Communicator | None = None
        scores = [config.num_experts, 1] if config.gated_shared else [config.num_experts]
        self.router = Router(ops, hidden_size, scores, bias=config.router_bias)
        self.correction: ScoreCorrection | None = ScoreCorrection(config.num_experts) if config.corrected else None
        self.gains: ExpertGains | None = ExpertGains(config.num_experts) if config.scaled else None
        self.shared = (
            GatedMLP(ops, hidden_size, config.shared_size, activation=activation) if config.shared_size else None
        )

    def finish(self) -> None:
        """Pack the experts, and let the routing add what the checkpoint has for it."""
        super().finish()
        if self.correction is not None:
            self.routing = self.routing._replace(correction=self.correction.bias.data)
        if self.gains is not None:
            self.routing = self.routing._replace(gains=self.gains.weight.data)

    def add_to_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, following: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add this block of x [T, E] to residual [T, E], in place. Return it and its norm for the next layer, where the
        device computes it on the way."""
        if self.communicator is not None:
            own = self._own(x)
            if not isinstance(following, RMSNorm):
                return residual.add_(self.communicator.all_reduce(own)), None
            gain = following.gain
            assert gain is not None  # loaded
            normed = self.communicator.add_rms_norm(own, residual, gain, following.eps)
            if normed is None:
                own = self.communicator.all_reduce(own)
                normed, residual = self.ops.add_rms_norm(own, residual, gain, following.eps)
            return residual, normed
        logits = self._add_shared(residual, x)
        if not isinstance(following, RMSNorm) or self.ops.add_experts_norm is None:
            return self.ops.add_experts(x, logits, self.routing, self.packed, residual), None
        return self.ops.add_experts_norm(x, logits, self.routing, self.packed, residual, following.gain, following.eps)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add this block of x [T, E] to residual [T, E], in place."""
        if self.communicator is not None:
            return residual.add_(self.communicator.all_reduce(self._own(x)))
        logits = self._add_shared(residual, x)
        return self.ops.add_experts(x, logits, self.routing, self.packed, residual)

    def of_scored(self, x: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of x [T, E], chosen by the scores of `scored` [T, E]."""
        out = self.ops.add_experts(x, self.router(scored), self.routing, self.packed, torch.zeros_like(x))
        return out if self.communicator is None else self.communicator.all_reduce(out)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank's experts, and its part of the shared block, make of x [T, E]."""
        out = torch.zeros_like(x)
        logits = self._add_shared(out, x)
        return self.ops.add_experts(x, logits, self.routing, self.packed, out)

    def _add_shared(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the shared block's part, and return the scores of the experts."""
        scores: torch.Tensor = self.router(x)
        if self.shared is None:
            return scores
        out = self.shared.down(self.shared.hidden(x, None))
        logits = scores
        if self.config.gated_shared:
            logits = scores.narrow(1, 0, self.config.num_experts)
            out = out.mul_(torch.sigmoid(scores.narrow(1, self.config.num_experts, 1)))
        residual.add_(out)
        return logits


class MoeBesideDense(nn.Module):
    """A mixture of experts beside an ordinary block (Gemma 4). Both read the residual stream, each through a norm of
    its own, and so does the router; what both make is normed before it is added up."""

    def __init__(self, ops: Ops, hidden_size: int, config: MoeConfig, activation: str, eps: float) -> None:
        super().__init__()
        self.mixture = MoeMLP(ops, hidden_size, config, activation)
        self.norm, self.out_norm = RMSNorm(ops, hidden_size, eps), RMSNorm(ops, hidden_size, eps)
        self.dense_out_norm, self.router_norm = RMSNorm(ops, hidden_size, eps), RMSNorm(ops, hidden_size, eps)
        self.router_norm.weight.number_type = torch.float32  # type: ignore[attr-defined]  # read by models/weights.py

    def finish(self) -> None:
        """Let the router's norm scale what it reads, once the weights are loaded."""
        weight = self.router_norm.weight
        weight.data.mul_(len(weight) ** -0.5)

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the experts and the ordinary block made of the residual stream [T, E]."""
        mixed = self.mixture.of_scored(self.norm(x), self.router_norm(x))
        out: torch.Tensor = self.out_norm(mixed)
        return out.add_(self.dense_out_norm(dense))
