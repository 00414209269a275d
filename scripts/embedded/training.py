"""The two trainings: the model on the text, then the draft on what the model says about the text (distillation)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from .network import Network
from .packing import Rows

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # inputs [B, T], targets [B, T], learned [B, T] -> scalar


@dataclass(frozen=True)
class Plan:
    """`limit_s` bounds the training's time whatever the device: the learning rate falls with the larger of the shares
    of steps and time that are used up."""

    steps: int
    limit_s: float
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.1
    final_share: float = 0.03
    gradient_norm: float = 1.0


@dataclass(frozen=True)
class Report:
    steps: int
    tokens: int
    seconds: float
    last_loss: float


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def likelihood_loss(network: Callable[[Tensor], Tensor]) -> Loss:
    """Return the cross-entropy per learned token."""

    def loss(inputs: Tensor, targets: Tensor, learned: Tensor) -> Tensor:
        logits = network(inputs).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        weights = learned.flatten()
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    return loss


def distillation_loss(network: Callable[[Tensor], Tensor], teacher: Callable[[Tensor], Tensor]) -> Loss:
    """Return the cross-entropy with the teacher's whole distribution (Hinton et al. 2015): a draft is accepted as often
    as its distribution overlaps the model's, so the model, not the text, is what it must predict."""

    def loss(inputs: Tensor, targets: Tensor, learned: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.softmax(teacher(inputs).float(), dim=-1)
        losses = -(wanted * torch.log_softmax(network(inputs).float(), dim=-1)).sum(-1)
        return (losses * learned).sum() / learned.sum().clamp(min=1)

    return loss


def train(
    network: Network,
    loss_of: Loss,
    batches: Iterable[Rows],
    plan: Plan,
    device: torch.device,
    say: Callable[[str], None],
) -> Report:
    """Train in place until the steps, the time or the batches are used up."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    started = time.monotonic()
    first_step_s = 0.0
    step, tokens, loss = 0, 0, torch.zeros(())
    for step, (ids, learned_mask) in enumerate(batches, start=1):
        used = (time.monotonic() - started - first_step_s) / plan.limit_s
        progress = max((step - 1) / plan.steps, used)
        if progress >= 1:
            step -= 1
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule(progress, step, plan)
        rows = torch.from_numpy(ids.astype("int64")).to(device, non_blocking=True)
        learned = torch.from_numpy(learned_mask.astype("float32")).to(device, non_blocking=True)
        with autocast(device):
            loss = loss_of(rows[:, :-1], rows[:, 1:], learned[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), plan.gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += rows.numel()
        if step == 1:
            loss.item()
            first_step_s = time.monotonic() - started  # compiling is not training
        if step % 50 == 0 or step == 1:
            seconds = time.monotonic() - started
            rate = tokens / seconds / 1e6
            say(f"step {step:5d}  {100 * progress:3.0f} %  loss {loss.item():.4f}  {rate:.2f} M tokens/s")
    return Report(step, tokens, time.monotonic() - started, float(loss.item()))


def _schedule(progress: float, step: int, plan: Plan) -> float:
    """Return the rate's factor: linear warm-up, then a cosine down to `final_share`."""
    falling = plan.final_share + (1 - plan.final_share) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, step / plan.warmup_steps) * falling
