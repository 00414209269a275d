"""The Communicator of layers/parallel.py by torch.distributed: NCCL between CUDA devices, gloo between CPU processes.

Ranks meet through a file in memory that they inherit, so nothing listens and nothing is left behind on the disk. All
of them are on this host: connections are made over its loopback interface. NVLink multicast (NVLS) stays off unless
NCCL_NVLS_ENABLE says otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inferengine.config import connect_on_this_host

WAIT = timedelta(
    minutes=30
)  # for another rank in a collective: it may be compiling; one that is lost is seen elsewhere
_gather_into: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before torch 2.12


class TorchCommunicator:
    """Implements layers/parallel.py's Communicator. One of a process at a time."""

    def __init__(self, store: str, rank: int, size: int, device: torch.device) -> None:
        """`store`: path of a file that all ranks can open. Waits for the other ranks."""
        self.rank, self.size = rank, size
        connect_on_this_host()
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=WAIT,
            device_id=torch.device("cuda", rank) if on_cuda else None,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by its sum over the ranks, in place, and return it: the same bits on all."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks, stacked: [size, *x.shape]."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _gather_into(out, x.contiguous())
        return out.view(self.size, *x.shape)

    def abort(self) -> None:
        """End what is under way: another rank is lost. From any thread; it may block."""
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Leave. All ranks do, with nothing under way."""
        if dist.is_initialized():
            dist.destroy_process_group()
