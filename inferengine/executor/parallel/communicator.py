"""TorchCommunicator: sums and gathers over the ranks of tensor parallelism (the Communicator of layers/parallel.py).

Two GPUs that can access each other's memory use kernels of this project. All else uses torch.distributed: NCCL between
CUDA devices, gloo between CPU processes.

Ranks find each other through an inherited file in memory, so no port is opened and no file is left on the disk. All
ranks are on this host and connect over its loopback interface. NVLink multicast (NVLS) is off unless NCCL_NVLS_ENABLE
is set.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inferengine.config import connect_on_this_host
from inferengine.kernels.cuda.peers.peer_memory import WORD, InboxShape, PeerMemory
from inferengine.kernels.reference.ops import add_rms_norm

logger = logging.getLogger(__name__)

# How long a collective waits for another rank, which may be compiling. A lost rank is detected elsewhere (ranks.py).
WAIT = timedelta(minutes=30)
# `all_gather_into_tensor` is its name before torch 2.12.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PEER_RANKS = (2,)  # numbers of ranks for which sums through peer memory were measured to be faster than NCCL's
PACKET_BYTES = 512 << 10  # sums of at most this size are faster in packets than as whole rows with flags
# Possible limits of rows in packets. Other kernels change at these numbers too, so that warm-up compiles both ways.
PACKET_ROWS = (64, 32, 16)
TEST_ROWS = 1024  # rows of the largest sum in the test at the start
TEST_LOOKS = 1 << 24  # polls before a wait in that test gives up; some seconds


class TorchCommunicator:
    """Implements the Communicator of layers/parallel.py. A process has at most one at a time."""

    def __init__(self, store: str, rank: int, size: int, device: torch.device) -> None:
        """Connect to the other ranks, and wait for them. `store`: path of a file that all ranks can open."""
        self.rank, self.size = rank, size
        self._sums: PeerSums | None = None
        connect_on_this_host()
        on_cuda = device.type == "cuda"
        self.device = torch.device("cuda", rank) if on_cuda else device
        if on_cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=WAIT,
            device_id=self.device if on_cuda else None,
        )

    def expect_rows(self, row_bytes: int, num_rows: int) -> None:
        """Prepare for sums of up to `num_rows` rows of at most `row_bytes` bytes. All ranks must call it.

        If the ranks can access each other's memory, each allocates a buffer for the others. Otherwise, and for larger
        sums, NCCL is used.
        """
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        if self.device.type != "cuda" or self.size not in PEER_RANKS:
            return
        sums = None
        try:
            sums = PeerSums(self, row_bytes, num_rows)
            reason = sums.differs_from_nccl()
        except RuntimeError as error:
            reason = str(error)
        if self.all_agree(not reason):
            self._sums = sums
            logger.info(
                "sums over the ranks of up to %d rows: through peer memory, in packets up to %d rows",
                num_rows,
                packet_rows(row_bytes),
            )
            return
        if sums is not None:
            sums.close()
        logger.warning("sums over the ranks are computed by NCCL: %s", reason or "another rank has no peer memory")

    def all_agree(self, agrees: bool) -> bool:
        """Return whether `agrees` is true on all ranks. All ranks must call it."""
        found = torch.tensor([agrees], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    @property
    def uses_peer_memory(self) -> bool:
        """Whether sums of `expect_rows` go through memory that the ranks can access, and not through NCCL or gloo."""
        return self._sums is not None

    @property
    def lost(self) -> str | None:
        """Names the rank that a sum waited for without success; None if that has not happened."""
        return None if self._sums is None else self._sums.lost

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by its sum over the ranks, in place, and return it. The result has the same bits on all ranks."""
        if self._sums is not None and self._sums.exchange.fits(x):
            return self._sums.exchange.all_reduce(x, by_packets=goes_in_packets(x))
        dist.all_reduce(x)
        return x

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add the sum of x over the ranks to `residual`, in place, and return the RMS norm of the result.

        Does nothing and returns None if no fused kernel exists for the shapes.
        """
        if self._sums is None or not self._sums.exchange.fits(x) or not self._sums.exchange.fits(residual):
            return None
        return self._sums.exchange.add_rms_norm(x, residual, gain, eps, by_packets=goes_in_packets(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks, stacked: [size, *x.shape]."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _gather_into(out, x.contiguous())
        return out.view(self.size, *x.shape)

    def abort(self) -> None:
        """Abort running collectives because another rank is lost. May be called from any thread; may block."""
        if self._sums is not None:
            self._sums.stop()
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Disconnect. All ranks must call it, with no collective running."""
        if self._sums is not None:
            self._sums.close()
            self._sums = None
        if dist.is_initialized():
            dist.destroy_process_group()


class PeerSums:
    """Sums over the ranks through buffers that every rank can write to (kernels/cuda/peers/all_reduce.py)."""

    def __init__(self, communicator: TorchCommunicator, row_bytes: int, num_rows: int) -> None:
        """Allocate and exchange the buffers. All ranks must construct it together.

        Raises RuntimeError on all ranks if one of them cannot access another's memory.
        """
        from inferengine.kernels.cuda.peers.all_reduce import PeerExchange  # an engine on a CPU starts without triton

        self._communicator, self._device = communicator, communicator.device
        rank, size = communicator.rank, communicator.size
        self.shape = inbox_shape(size, row_bytes, num_rows)
        self._memory: PeerMemory | None = None
        handle, reason = bytes(64), ""
        try:
            self._memory = PeerMemory(self._device, self.shape.num_bytes)
            handle = self._memory.handle
        except OSError as error:
            reason = str(error)
        sent = torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(self._device)
        # When the gather returns, all ranks have zeroed their buffers.
        handles = [bytes(found) for found in communicator.all_gather(sent).tolist()]
        addresses = []
        try:
            for peer in range(size if self._memory is not None else 0):
                assert self._memory is not None
                addresses.append(self._memory.address if peer == rank else self._memory.open(peer, handles[peer]))
        except OSError as error:
            reason = str(error)
        if not communicator.all_agree(not reason):
            self.close()
            raise RuntimeError(reason or "another rank has no peer memory")
        self._lost = torch.zeros(4, dtype=torch.int32, pin_memory=True)  # the kernel writes, the host reads
        self._seen = self._lost.numpy()
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._stop = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._side = torch.cuda.Stream(self._device)
        epochs = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        self.exchange = PeerExchange(rank, self.shape, [*addresses, self._lost.data_ptr()], epochs, self._stop)

    @property
    def lost(self) -> str | None:
        """Names the rank that a sum waited for without success; None if that has not happened."""
        found = int(self._seen[0])
        return f"rank {found - 1} did not take part in a sum" if found else None

    def stop(self) -> None:
        """End all waits of this device. May be called from any thread."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            self._stop.copy_(self._one, non_blocking=True)

    def differs_from_nccl(self) -> str:
        """Compare sums of integers, which are exact in any order, with NCCL's.

        Returns what differs; an empty string if nothing does.
        """
        communicator, exchange = self._communicator, self.exchange
        generator, differing = torch.Generator().manual_seed(17 + communicator.rank), list[str]()
        width = self.shape.row_words * WORD // torch.bfloat16.itemsize
        for rows in sorted({1, self.shape.packet_rows, min(TEST_ROWS, self.shape.rows)}):
            x = torch.randint(-16, 17, (rows, width), generator=generator).to(self._device, torch.bfloat16)
            expected = x.clone()
            dist.all_reduce(expected)
            before, gain = communicator.all_gather(x)[0], torch.ones(width, dtype=x.dtype, device=self._device)
            wanted, total = add_rms_norm(expected, before.clone(), gain, 1e-5)
            for by_packets in (True, False) if rows <= self.shape.packet_rows else (False,):
                kind = f"{rows} rows of {width}{' in packets' if by_packets else ''}"
                found = exchange.all_reduce(x.clone(), by_packets=by_packets, limit=TEST_LOOKS)
                if not torch.equal(found, expected):
                    differing.append(f"the sum of {kind}")
                residual = before.clone()
                normed = exchange.add_rms_norm(x, residual, gain, 1e-5, by_packets=by_packets, limit=TEST_LOOKS)
                if not torch.equal(residual, total) or not torch.allclose(normed, wanted, rtol=0.02, atol=0.01):
                    differing.append(f"the norm of {kind}")
        if self.lost is not None:
            differing.insert(0, self.lost)
        return ", ".join(differing)

    def close(self) -> None:
        """Free the memory. All ranks must call it, with no sum running."""
        torch.cuda.synchronize(self._device)
        if self._memory is not None:
            self._memory.close()


def packet_rows(row_bytes: int) -> int:
    """Return the largest number of rows for which a sum is sent in packets."""
    return next((rows for rows in PACKET_ROWS if rows * row_bytes <= PACKET_BYTES), 0)


def goes_in_packets(x: torch.Tensor) -> bool:
    """Return whether a sum of x [T, E] is sent in packets."""
    return x.shape[0] <= packet_rows(x.shape[1] * x.itemsize)


def inbox_shape(ranks: int, row_bytes: int, num_rows: int) -> InboxShape:
    """Return the shape of the inboxes for rows of at most `row_bytes` in steps of at most `num_rows`."""
    row_words = -(-row_bytes // (2 * WORD)) * 2
    return InboxShape(ranks, row_words, min(PACKET_ROWS[0], num_rows), num_rows)


def inbox_bytes(ranks: int, row_bytes: int, num_rows: int) -> int:
    """Return the device memory that `expect_rows` takes; 0 where NCCL computes all sums."""
    return inbox_shape(ranks, row_bytes, num_rows).num_bytes if ranks in PEER_RANKS else 0
