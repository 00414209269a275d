"""All-reduce between devices that can access each other's memory, alone or fused with residual add and RMS norm.

It works in one shot: every rank sends its rows to all others, and adds its own and the received rows in the order of
the ranks, so all ranks get the same bits. A program handles one row: it sends the row, waits for the same row of the
other ranks, and adds them.

Each device has an *inbox*, to which the others write. Each row has a counter of its exchanges, the *epoch*, in device
memory, so that it also advances when a CUDA graph is replayed. Even and odd epochs have separate inboxes. A rank that
sends epoch e + 2 has finished epoch e + 1. For that it needed a row from each other rank, sent by a later kernel than
the one that read epoch e. So nothing is overwritten before it is read.

There are two ways to detect that a row has arrived:

- *packets*, for few rows: every 64-bit word carries 32 bits of the row and the epoch. A word is written and read
  atomically, so no fence is needed. This has the least latency and twice the bytes (as NCCL's LL protocol).
- *fenced*, for many rows: the plain row, then a flag with the epoch, released at system scope.

A wait gives up after `limit` polls. The program then sets `stop`, which ends all further waits at once, and writes the
rank that it waited for to memory that the host reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.peers.peer_memory import WORD, InboxShape

NUMBERS = (torch.bfloat16, torch.float16, torch.float32)
LIMIT = 1 << 30  # polls of 0.2 to 0.4 us on an H200: minutes, because a rank may still be compiling
LANES = 128  # words of a row for each warp


class PeerExchange:
    """This rank's side of the exchanges. All ranks must create and use it in the same way, each on one stream.

    `addresses`: the addresses, for this device, of each rank's inbox, which is zeroed at first; then the address of 16
    bytes of host memory. If a wait gives up, 1 + the rank that it waited for is written there as int32. `epochs` [rows]
    int32 zeros. `stop` [1] int32 zero; any other value ends all waits.
    """

    def __init__(
        self, rank: int, shape: InboxShape, addresses: list[int], epochs: torch.Tensor, stop: torch.Tensor
    ) -> None:
        self.rank, self.shape, self.epochs, self.stop = rank, shape, epochs, stop
        base = epochs.data_ptr()
        if len(addresses) != shape.ranks + 1 or any((address - base) % (2 * WORD) for address in addresses):
            raise ValueError("one address for each rank and one of the host, at multiples of 16 bytes")
        places = [(address - base) // WORD for address in addresses]
        self.places = torch.tensor(places, dtype=torch.int64, device=epochs.device)

    def fits(self, x: torch.Tensor) -> bool:
        """Return whether x is [T, E] of a type and a size that can be exchanged."""
        if x.dim() != 2 or not x.is_contiguous() or x.dtype not in NUMBERS:
            return False
        row_bytes = x.shape[1] * x.itemsize
        return (
            row_bytes % (2 * WORD) == 0
            and row_bytes <= self.shape.row_words * WORD
            and 0 < x.shape[0] <= self.shape.rows
            and x.data_ptr() % (2 * WORD) == 0
        )

    def all_reduce(self, x: torch.Tensor, *, by_packets: bool, limit: int = LIMIT) -> torch.Tensor:
        """Replace x, which `fits`, by its sum over the ranks, and return it."""
        self._launch(x, None, None, 0.0, x, by_packets, limit)
        return x

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        *,
        by_packets: bool,
        limit: int = LIMIT,
    ) -> torch.Tensor:
        """Add the sum of x, which `fits`, over the ranks to `residual` [T, E], in place; return its RMS norm [T, E].

        The sum is rounded before it is added, as `all_reduce` rounds it.
        """
        out = torch.empty_like(residual)
        self._launch(x, residual, gain, eps, out, by_packets, limit)
        return out

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        gain: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        by_packets: bool,
        limit: int,
    ) -> None:
        shape, (rows, width) = self.shape, x.shape
        words = width * x.itemsize // WORD
        block = triton.next_power_of_2(words)
        _exchange_kernel[(rows,)](
            x,
            x if residual is None else residual,
            x if gain is None else gain,
            out,
            self.places,
            self.epochs,
            self.stop,
            eps,
            limit,
            WIDTH=width,
            WORDS=words,
            BLOCK=block,
            RANK=self.rank,
            RANKS=shape.ranks,
            ROW_WORDS=shape.row_words,
            ROWS=shape.packet_rows if by_packets else shape.rows,
            ROWS_AT=shape.rows_at,
            FLAGS_AT=shape.flags_at,
            PACKETS=by_packets,
            NORM=residual is not None,
            num_warps=min(16, max(1, block // LANES)),
            **launch_options(supports_pdl(x.device)),
        )


@triton.jit
def _inbox(places_ptr, epochs_ptr, rank: tl.constexpr):
    """A rank's inbox: words, which begin at multiples of 16 bytes. Relative to a pointer the compiler knows that."""
    return epochs_ptr.to(tl.pointer_type(tl.int64)) + tl.multiple_of(tl.load(places_ptr + rank), 2)


@triton.jit
def _unpack(words, NUMBER: tl.constexpr):
    """The four numbers of 16 bits, or two of 32 bits and two zeros, in 64-bit words: float32."""
    if NUMBER.primitive_bitwidth == 16:
        a = words.to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
        b = (words >> 16).to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
        c = (words >> 32).to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
        d = (words >> 48).to(tl.int16).to(NUMBER, bitcast=True).to(tl.float32)
    else:
        a = words.to(tl.int32).to(tl.float32, bitcast=True)
        b = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        c = tl.zeros_like(a)
        d = tl.zeros_like(a)
    return a, b, c, d


@triton.jit
def _pack(a, b, c, d, NUMBER: tl.constexpr):
    """The inverse of `_unpack`, rounding."""
    if NUMBER.primitive_bitwidth == 16:
        low = a.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        low |= (b.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << 16
        high = c.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        high |= (d.to(NUMBER).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << 16
    else:
        low = a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = b.to(tl.int32, bitcast=True).to(tl.int64)
    return low | (high << 32)


@triton.jit
def _have_not_come(first, second, epoch, mask):
    """1 where a packet of a row is still of another epoch, else 0."""
    late = ((first >> 32).to(tl.int32) != epoch) | ((second >> 32).to(tl.int32) != epoch)
    return tl.max((late & mask).to(tl.int32), axis=0)


@triton.jit
def _give_up(places_ptr, epochs_ptr, stop_ptr, src, RANKS: tl.constexpr):
    """Have all waits end, and tell the host."""
    tl.store(stop_ptr, 1)
    tl.store(_inbox(places_ptr, epochs_ptr, RANKS).to(tl.pointer_type(tl.int32)), 1 + src)


@triton.jit
def _exchange_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    places_ptr,
    epochs_ptr,
    stop_ptr,
    eps,
    limit,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    PACKETS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    NUMBER: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, BLOCK)
    mask = words < WORDS
    inbox = _inbox(places_ptr, epochs_ptr, RANK)
    if NORM:
        gain = tl.load(gain_ptr.to(tl.pointer_type(tl.int64)) + words, mask=mask, other=0)
    wait_for_previous(PDL)

    epoch = tl.load(epochs_ptr + row, volatile=True) + 1
    half = (epoch & 1).to(tl.int64) * (RANKS - 1)
    own = tl.load(x_ptr.to(tl.pointer_type(tl.int64)) + row * WORDS + words, mask=mask, other=0)
    for dst in tl.static_range(RANKS):
        if dst != RANK:
            place = (half + (RANK - 1 if dst < RANK else RANK)) * ROWS + row
            theirs = _inbox(places_ptr, epochs_ptr, dst)
            if PACKETS:
                packets_at = theirs + place * (2 * ROW_WORDS) + words
                tag = epoch.to(tl.int64) << 32
                tl.store(packets_at, (own & 0xFFFFFFFF) | tag, mask=mask)
                tl.store(packets_at + ROW_WORDS, ((own >> 32) & 0xFFFFFFFF) | tag, mask=mask)
            else:
                tl.store(theirs + ROWS_AT + place * ROW_WORDS + words, own, mask=mask)
    if not PACKETS:
        tl.debug_barrier()  # the release that follows covers what all threads have stored
        for dst in tl.static_range(RANKS):
            if dst != RANK:
                place = (half + (RANK - 1 if dst < RANK else RANK)) * ROWS + row
                theirs = _inbox(places_ptr, epochs_ptr, dst)
                flag_at = (theirs + FLAGS_AT + place).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flag_at, epoch, sem="release", scope="sys")
    residual_row = residual_ptr.to(tl.pointer_type(tl.int64)) + row * WORDS + words
    if NORM:
        residual = tl.load(residual_row, mask=mask, other=0)

    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    d = tl.zeros([BLOCK], tl.float32)
    for src in tl.static_range(RANKS):
        if src == RANK:
            part = own
        else:
            place = (half + (src - 1 if src > RANK else src)) * ROWS + row
            tries = 0
            if PACKETS:
                packets_at = inbox + place * (2 * ROW_WORDS) + words
                first = tl.load(packets_at, mask=mask, other=0, volatile=True)
                second = tl.load(packets_at + ROW_WORDS, mask=mask, other=0, volatile=True)
                late = _have_not_come(first, second, epoch, mask)
                while (late != 0) & (tries < limit):
                    tries = tl.where(tl.load(stop_ptr, volatile=True) != 0, limit, tries + 1)
                    first = tl.load(packets_at, mask=mask, other=0, volatile=True)
                    second = tl.load(packets_at + ROW_WORDS, mask=mask, other=0, volatile=True)
                    late = _have_not_come(first, second, epoch, mask)
                if late != 0:
                    _give_up(places_ptr, epochs_ptr, stop_ptr, src, RANKS)
                part = (first & 0xFFFFFFFF) | (second << 32)
            else:
                flag_at = (inbox + FLAGS_AT + place).to(tl.pointer_type(tl.int32))
                seen = tl.atomic_add(flag_at, 0, sem="acquire", scope="sys")
                while (seen != epoch) & (tries < limit):
                    tries = tl.where(tl.load(stop_ptr, volatile=True) != 0, limit, tries + 1)
                    seen = tl.atomic_add(flag_at, 0, sem="acquire", scope="sys")
                if seen != epoch:
                    _give_up(places_ptr, epochs_ptr, stop_ptr, src, RANKS)
                tl.debug_barrier()
                received = inbox + ROWS_AT + place * ROW_WORDS + words
                part = tl.load(received, mask=mask, other=0, cache_modifier=".cg")
        part_a, part_b, part_c, part_d = _unpack(part, NUMBER)
        a += part_a
        b += part_b
        c += part_c
        d += part_d

    result = _pack(a, b, c, d, NUMBER)
    if NORM:
        a, b, c, d = _unpack(result, NUMBER)
        old_a, old_b, old_c, old_d = _unpack(residual, NUMBER)
        stored = _pack(a + old_a, b + old_b, c + old_c, d + old_d, NUMBER)
        tl.store(residual_row, stored, mask=mask)
        a, b, c, d = _unpack(stored, NUMBER)
        scale = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, axis=0) / WIDTH + eps)
        gain_a, gain_b, gain_c, gain_d = _unpack(gain, NUMBER)
        result = _pack(a * scale * gain_a, b * scale * gain_b, c * scale * gain_c, d * scale * gain_d, NUMBER)
    tl.store(out_ptr.to(tl.pointer_type(tl.int64)) + row * WORDS + words, result, mask=mask)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs_ptr + row, epoch)
