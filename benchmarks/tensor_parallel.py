"""Decode and prefill of a model that several devices share: random weights, in process.

python -m benchmarks.tensor_parallel --ranks 2 [--shape llama-3.1-8b] [--quantization fp8] [--rows 1 16 64 128]
    [--prompts 8] [--length 4096]

A decode step's time is the median between two steps' outputs, after prompts of 100 tokens; prefill: the best of 3.

python -m benchmarks.tensor_parallel --sums OUT.json

Microseconds of one sum over two GPUs, alone and with the residual add and norm after it, by NCCL and through peer
memory, in packets and as whole rows: of 32 in one CUDA graph, the median of seven replays.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, write_model
from inferengine import LLM, SamplingParams
from inferengine.bench.environment import write_result

PROMPT, OUTPUT, FIRST = 100, 96, 8  # tokens; steps that do not count


class Measurement:
    """A loaded model and when its steps ended."""

    def __init__(self, shape: str, ranks: int, folder: Path, length: int, quantization: str) -> None:
        config = SHAPES[shape]
        write_model(folder, shape)
        self.llm = LLM(
            str(folder),
            model={
                "load_format": "dummy",
                "max_model_len": min(2 * length, config["max_position_embeddings"]),
                "quantization": quantization,
            },
            engine={"tensor_parallel": ranks, "max_num_seqs": 128},
            cache={"prefix_caching": False},
        )
        self._vocab_size, self._rng = config["vocab_size"], random.Random(7)
        self._ends: list[tuple[float, int]] = []
        step = self.llm.core.step

        def observed():  # type: ignore[no-untyped-def]
            output = step()
            self._ends.append((time.perf_counter(), 0 if output is None else len(output.uids)))
            return output

        self.llm.core.step = observed  # type: ignore[method-assign]

    def generate_s(self, count: int, length: int, max_tokens: int) -> float:
        """Measure the seconds for `count` prompts of `length` tokens."""
        prompts = [[self._rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]
        self._ends.clear()
        begin = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.generate(prompts, params, progress=False)
        return time.perf_counter() - begin

    def decode_ms(self, rows: int) -> float:
        """Measure the milliseconds of a step of `rows` sequences."""
        self.generate_s(rows, PROMPT, OUTPUT)
        ends = [end for end, count in self._ends if count == rows]
        return 1e3 * statistics.median([b - a for a, b in pairwise(ends)][FIRST:])


SUMS = [(4096, rows) for rows in (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)] + [(8192, r) for r in (1, 64, 256)]


class SumTimes:
    """One of two ranks that add up rows of bf16."""

    def __init__(self, store: str, rank: int) -> None:
        import torch

        from inferengine.executor.parallel import communicator

        communicator.PACKET_ROWS = (256,)  # both ways, wherever they are possible
        self.torch, self.device = torch, torch.device("cuda", rank)
        joined = communicator.TorchCommunicator(store, rank, 2, torch.device("cuda"))
        sums = communicator.PeerSums(joined, 8192 * 2, 8192)
        if differs := sums.differs_from_nccl():
            raise SystemExit(f"wrong: {differs}")
        self.exchange = sums.exchange

    def measure(self, width: int, rows: int) -> dict[str, float]:
        """Measure the microseconds by way."""
        from inferengine.kernels.cuda.norm import add_rms_norm

        torch, exchange = self.torch, self.exchange
        x = (torch.randn(rows, width, device=self.device) * 1e-3).bfloat16()
        residual, gain = torch.randn_like(x), torch.ones(width, dtype=x.dtype, device=self.device)

        def by_nccl() -> None:
            torch.distributed.all_reduce(x)

        def norm_by_nccl() -> None:
            by_nccl()
            add_rms_norm(x, residual, gain, 1e-5)

        ways = {"nccl": by_nccl, "nccl and norm": norm_by_nccl}
        for name, by_packets in (("packets", True), ("whole rows", False)):
            if by_packets and rows > exchange.shape.packet_rows:
                continue
            ways[name] = partial(exchange.all_reduce, x, by_packets=by_packets)
            ways[f"{name} and norm"] = partial(exchange.add_rms_norm, x, residual, gain, 1e-5, by_packets=by_packets)
        return {name: self._us(work, x) for name, work in ways.items()}

    def _us(self, work: Callable[[], object], x: Any) -> float:
        torch, side, start = self.torch, self.torch.cuda.Stream(), x.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=side):
            for _ in range(32):
                work()
        for _ in range(7):
            x.copy_(start)
            torch.distributed.barrier()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3 / 32)
        return round(statistics.median(times), 2)


def measure_sums(out: Path, store: str, rank: int) -> None:
    """Measure as rank `rank`; rank 0 starts the other one and writes the file."""
    import torch

    other = None
    if rank == 0:
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--sums", str(out), "--store", store]
        other = subprocess.Popen([*command, "--rank", "1"])
    times = SumTimes(store, rank)
    found = [{"width": width, "rows": rows, "us": times.measure(width, rows)} for width, rows in SUMS]
    if other is not None:
        about = {"devices": [torch.cuda.get_device_name(index) for index in range(2)]}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        write_result(out, {"environment": about, "benchmark": "tensor_parallel", "nccl": nccl, "sums": found})
        for item in found:
            print(json.dumps(item), flush=True)
        other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--sums", type=Path, metavar="OUT.json")
    parser.add_argument("--rank", type=int, default=0, help="of --sums")
    parser.add_argument("--store", default="", help="of --sums: where the ranks meet")
    arguments = parser.parse_args()
    if arguments.sums is not None:
        with tempfile.NamedTemporaryFile() as store:
            measure_sums(arguments.sums, arguments.store or store.name, arguments.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurement(arguments.shape, arguments.ranks, Path(folder), arguments.length, arguments.quantization)
        measured.generate_s(2, PROMPT, 4)
        for rows in arguments.rows:
            print(f"decode step of {rows}: {measured.decode_ms(rows):.2f} ms", flush=True)
        count, length = arguments.prompts, arguments.length
        best = min(measured.generate_s(count, length, 1) for _ in range(3))
        print(f"{count} prompts of {length}: {count * length / best:,.0f} tokens/s")
        measured.llm.close()


if __name__ == "__main__":
    main()
