"""All-reduce through peer memory: the protocol, the kernel with ranks that take turns, and the kernel on two cards."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from inferengine.kernels.cuda.peers.all_reduce import PeerExchange
from inferengine.kernels.cuda.peers.peer_memory import NATIVE_ATOMICS, WORD, InboxShape, PeerMemory
from inferengine.kernels.reference.ops import add_rms_norm

WIDTH = 48
EPS = 1e-5
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks in one process need Triton's interpreter")


# -- ranks that take turns in one process ------------------------------------------------------------------------------


class Peers:
    """Ranks whose inboxes are memory of this process."""

    def __init__(self, ranks: int, *, packet_rows: int = 4, rows: int = 6) -> None:
        self.shape = InboxShape(ranks, WIDTH * 4 // WORD, packet_rows, rows)
        self.inboxes = [torch.zeros(self.shape.num_bytes // WORD, dtype=torch.int64) for _ in range(ranks)]
        self.lost = [torch.zeros(4, dtype=torch.int32) for _ in range(ranks)]
        self.exchanges = [
            PeerExchange(
                rank,
                self.shape,
                [*(inbox.data_ptr() for inbox in self.inboxes), lost.data_ptr()],
                torch.zeros(rows, dtype=torch.int32),
                torch.zeros(4, dtype=torch.int32),
            )
            for rank, lost in enumerate(self.lost)
        ]

    def together(self, work: Callable[[PeerExchange, int], torch.Tensor]) -> list[torch.Tensor]:
        """Return what `work(exchange, limit)` gives on each rank. Each but the first sends in a run of its own, which
        gives up waiting; what that run counted and reported is taken back."""
        for exchange, lost in list(zip(self.exchanges, self.lost, strict=True))[1:]:
            before = exchange.epochs.clone()
            work(exchange, 0)
            exchange.epochs.copy_(before)
            exchange.stop.zero_()
            lost.zero_()
        return [work(exchange, 1) for exchange in self.exchanges]


def rows_of(ranks: int, num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(num_rows, WIDTH).to(dtype) for _ in range(ranks)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the ranks, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def send(parts: list[torch.Tensor], by_packets: bool) -> Callable[[PeerExchange, int], torch.Tensor]:
    """Return each rank's part of a sum."""
    return lambda exchange, limit: exchange.all_reduce(parts[exchange.rank].clone(), by_packets=by_packets, limit=limit)


@interpreted
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float16), (3, torch.float32)])
def test_all_ranks_get_the_same_sum_time_after_time(ranks: int, dtype: torch.dtype) -> None:
    """More rows than before and fewer, in packets and whole: each row counts its own exchanges."""
    peers = Peers(ranks)
    for num_rows, by_packets in ((2, True), (3, False), (1, True), (2, True), (1, False)):
        parts = rows_of(ranks, num_rows, dtype)
        for found in peers.together(send(parts, by_packets)):
            assert torch.equal(found, in_order(parts))
    assert [exchange.epochs.tolist() for exchange in peers.exchanges] == [[5, 3, 1, 0, 0, 0]] * ranks
    assert not any(lost.any() for lost in peers.lost)


@interpreted
@pytest.mark.parametrize("by_packets", [True, False])
def test_the_residual_takes_the_sum_and_the_norm_is_of_that(by_packets: bool) -> None:
    parts, gain = rows_of(2, 2, torch.float16), torch.randn(WIDTH).half()
    residual = torch.randn(2, WIDTH).half()
    expected, total = add_rms_norm(in_order(parts), residual.clone(), gain, EPS)
    stored = [residual.clone() for _ in parts]

    def add(exchange: PeerExchange, limit: int) -> torch.Tensor:
        kept = stored[exchange.rank] if limit else residual.clone()
        return exchange.add_rms_norm(parts[exchange.rank], kept, gain, EPS, by_packets=by_packets, limit=limit)

    for normed, kept in zip(Peers(2).together(add), stored, strict=True):
        assert torch.equal(kept, total)
        torch.testing.assert_close(normed, expected, atol=2e-3, rtol=2e-3)


@interpreted
@pytest.mark.parametrize("by_packets", [True, False])
def test_a_rank_that_does_not_take_part_is_named_and_ends_all_further_waits(by_packets: bool) -> None:
    peers = Peers(3)
    exchange, lost = peers.exchanges[0], peers.lost[0]
    exchange.all_reduce(torch.ones(1, WIDTH), by_packets=by_packets, limit=3)
    assert lost[0] in (2, 3), "1 + the rank"
    assert exchange.stop[0] == 1
    exchange.all_reduce(torch.ones(4, WIDTH), by_packets=by_packets, limit=1 << 28)  # would take hours


def test_what_cannot_be_sent_does_not_fit() -> None:
    exchange = Peers(2).exchanges[0]
    assert exchange.fits(torch.zeros(6, WIDTH))
    assert exchange.fits(torch.zeros(6, 2 * WIDTH, dtype=torch.bfloat16))
    assert not exchange.fits(torch.zeros(7, WIDTH)), "more rows than the inbox has"
    assert not exchange.fits(torch.zeros(1, 2 * WIDTH)), "a longer row"
    assert not exchange.fits(torch.zeros(0, WIDTH))
    assert not exchange.fits(torch.zeros(2, 1)), "half a word"
    assert not exchange.fits(torch.zeros(WIDTH)), "no rows"
    assert not exchange.fits(torch.zeros(WIDTH, 4).t()), "rows that are not contiguous"
    assert not exchange.fits(torch.zeros(2, WIDTH, dtype=torch.float64))


# -- memory that other devices reach -----------------------------------------------------------------------------------


class Driver:
    """CUDA's driver, whose devices may not reach each other. `held`: what it has given and not got back."""

    def __init__(self, *, access: int = 1, atomics: int = 1, opened: int = 0) -> None:
        self.access, self.atomics, self.opened = access, atomics, opened
        self.held: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self.call, name)

    def call(self, name: str, *arguments: Any) -> int:
        first = getattr(arguments[0], "_obj", None)
        match name, first:
            case "cuMemAlloc_v2", ctypes.c_uint64():
                first.value = 1 << 32
                self.held.append("memory")
            case "cuIpcGetMemHandle", ctypes.Structure():
                first.reserved[0] = 7
            case "cuDeviceGet", ctypes.c_int():
                first.value = arguments[1].value
            case "cuDeviceCanAccessPeer", ctypes.c_int():
                first.value = self.access
            case "cuDeviceGetP2PAttribute", ctypes.c_int():
                first.value = self.atomics if arguments[1].value == NATIVE_ATOMICS else 0
            case "cuIpcOpenMemHandle_v2", ctypes.c_uint64():
                if self.opened:
                    return self.opened
                first.value = (2 << 32) + arguments[1].reserved[0]
                self.held.append("mapping")
            case "cuIpcCloseMemHandle", None:
                self.held.remove("mapping")
            case "cuMemFree_v2", None:
                self.held.remove("memory")
        return 0


def memory_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> PeerMemory:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return PeerMemory(torch.device("cpu", 0), 4096)


def test_memory_is_opened_by_its_handle_and_all_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    memory = memory_of(driver, monkeypatch)
    assert memory.address == 1 << 32
    assert memory.open(1, memory.handle) == (2 << 32) + 7
    assert driver.held == ["memory", "mapping"]
    memory.close()
    memory.close()
    assert driver.held == []


@pytest.mark.parametrize("driver", [Driver(access=0), Driver(atomics=0), Driver(opened=201)])
def test_devices_that_do_not_reach_each_other_are_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(driver, monkeypatch)
    with pytest.raises(OSError, match=r"GPU 0 does not reach the memory of GPU 1|cuIpcOpenMemHandle_v2 returned 201"):
        memory.open(1, memory.handle)
    memory.close()
    assert driver.held == []


# -- the protocol ------------------------------------------------------------------------------------------------------


def overwritten(ranks: int, inboxes: int, epochs: int = 5) -> bool:
    """Return whether some order of events has a rank read a row of another epoch than it waits for: all orders are
    tried.

    A rank sends its row of an epoch to each other rank, into inbox `epoch % inboxes`; then, for each other rank, it
    sees that the row is there and later, in another event, reads it. What it sends next waits for that."""
    others = ranks - 1
    per_epoch = others * 3  # events of a rank: sends, and pairs of seeing and reading
    start = (0,) * ranks, (0,) * (ranks * ranks * inboxes)
    seen, todo = {start}, [start]
    while todo:
        events, slots = todo.pop()
        for rank in range(ranks):
            epoch, step = divmod(events[rank], per_epoch)
            if epoch == epochs:
                continue
            epoch += 1
            after, half = list(slots), epoch % inboxes
            peer = [other for other in range(ranks) if other != rank][
                step % others if step < others else (step - others) // 2
            ]
            if step < others:
                after[(peer * ranks + rank) * inboxes + half] = epoch
            else:
                found = slots[(rank * ranks + peer) * inboxes + half]
                is_read = (step - others) % 2 == 1
                if is_read and found != epoch:
                    return True
                if not is_read and found != epoch:
                    continue
            state = (*events[:rank], events[rank] + 1, *events[rank + 1 :]), tuple(after)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return False


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_row_is_overwritten_before_it_is_read_in_any_order_of_events(ranks: int) -> None:
    epochs = 5 if ranks == 2 else 3
    assert not overwritten(ranks, 2, epochs)
    assert overwritten(ranks, 1, epochs), "one inbox for all epochs would not do"


# -- compiled for a card, without one ----------------------------------------------------------------------------------

COMPILE = """
import torch
from inferengine.kernels.cuda.peers import all_reduce
from inferengine.kernels.cuda.peers.peer_memory import InboxShape

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            print(self.kernel.warmup(*arguments, grid=grid, **options).asm["ptx"])
            print("=== end")
        return launch

all_reduce._exchange_kernel = Compiled(all_reduce._exchange_kernel)
all_reduce.supports_pdl = lambda device: True
epochs, x = torch.zeros(64, dtype=torch.int32), torch.zeros(4, 4096, dtype=torch.bfloat16)
places = [epochs.data_ptr()] * 3
exchange = all_reduce.PeerExchange(1, InboxShape(2, 1024, 32, 64), places, epochs, torch.zeros(4, dtype=torch.int32))
for by_packets in (True, False):
    exchange.add_rms_norm(x, x.clone(), x[0].clone(), 1e-5, by_packets=by_packets)
"""


def test_compiled_for_hopper_it_reads_what_others_write_past_the_caches(compile_program) -> None:
    done = compile_program(COMPILE)
    packets, fenced, _ = done.stdout.split("=== end")
    assert packets.count("ld.volatile.global.v2.b64") > 0, done.stderr[-2000:]
    assert "st.global.v2.b64" in packets
    assert "sys" not in packets, "packets need no fence"
    release = fenced.index("atom.global.sys.release")
    assert "bar.sync" in fenced[fenced.index("griddepcontrol.wait") : release], "it covers the stores of all threads"
    acquire = fenced.index("sys.acquire")
    assert release < acquire < fenced.index("ld.global.cg")
    for ptx in (packets, fenced):
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert "st.global" not in before
        assert "ld.volatile" not in before
        assert "ld.volatile.global.b32" in after, "the epoch, which the kernel before may have counted up"


# -- on two cards ------------------------------------------------------------------------------------------------------

TWO_CARDS = """
import random, sys, time
import torch, torch.distributed as dist
from inferengine.executor.parallel.communicator import PeerSums, TorchCommunicator

rank = int(sys.argv[1])
communicator = TorchCommunicator(sys.argv[2], rank, 2, torch.device("cuda"))
sums = PeerSums(communicator, 8192, 256)
assert sums.differs_from_nccl() == ""
device, exchange, generator = communicator.device, sums.exchange, torch.Generator().manual_seed(rank)
x = [torch.randn(rows, 4096, generator=generator).to(device, torch.bfloat16) for rows in (1, 64, 3, 64)]
expected = [communicator.all_gather(each).float().sum(0).bfloat16() for each in x]
wrong = torch.zeros(1, dtype=torch.int64, device=device)

def work():
    for index, (part, total) in enumerate(zip(x, expected)):
        wrong.add_((exchange.all_reduce(part.clone(), by_packets=index < 3) != total).sum())

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    work()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side):
    work()
delays = random.Random(rank)
for _ in range(300):
    torch.cuda._sleep(delays.randrange(200_000))
    graph.replay()
torch.cuda.synchronize()
assert wrong.item() == 0 and sums.lost is None, (wrong.item(), sums.lost)
if rank == 0:
    exchange.all_reduce(x[0], by_packets=True, limit=1 << 16)
    torch.cuda.synchronize()
    assert sums.lost == "rank 1 did not take part in a sum"
dist.barrier()
"""


@pytest.mark.gpu
def test_two_cards_agree_in_graphs_with_random_delays(tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    store = tmp_path / "store"
    store.touch()
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWO_CARDS, str(rank), str(store)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
