"""The pinned buffers that carry a step's columns to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferengine.executor import cuda_graphs
from inferengine.executor.cuda_graphs import RING, PinnedRing


class LaggingDevice:
    """A device that copies only when it is waited for: in place of torch.cuda's events and of the copies."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arrived: list[list[int]] = []

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.pending.append((to, source))

    def run(self, number: int) -> None:
        """Do the first `number` copies that were asked for."""
        for _, source in self.pending[:number]:
            self.arrived.append(source.tolist())
        del self.pending[:number]

    def event(self) -> Any:
        device = self

        class Event:
            after = 0

            def record(self) -> None:
                self.after = len(device.arrived) + len(device.pending)

            def synchronize(self) -> None:
                device.run(self.after - len(device.arrived))

        return Event()


class Place:
    """A tensor on that device, all of it."""

    def __init__(self, device: LaggingDevice) -> None:
        self._device = device

    def __getitem__(self, part: slice) -> Place:
        return self

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._device.copy(source, source)


def test_a_buffer_is_not_written_again_before_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LaggingDevice()
    monkeypatch.setattr(cuda_graphs.torch.cuda, "Event", device.event)
    zeros = torch.zeros
    monkeypatch.setattr(cuda_graphs.torch, "zeros", lambda shape, dtype, pin_memory: zeros(shape, dtype=dtype))
    ring = PinnedRing((2,), torch.device("cuda"))
    steps = [[step, 10 * step] for step in range(3 * RING)]
    for step in steps:
        ring.take().copy_(torch.tensor(step))
        ring.send(Place(device), slice(2))  # type: ignore[arg-type]
    device.run(len(device.pending))
    assert device.arrived == steps


def test_on_a_cpu_the_columns_are_there_at_once() -> None:
    ring, to = PinnedRing((4,), torch.device("cpu")), torch.full((4,), -1, dtype=torch.int32)
    for step in range(2 * RING):
        ring.take()[:2] = step
        ring.send(to, slice(2))
        assert to.tolist() == [step, step, -1, -1]
