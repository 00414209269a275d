"""The check of deterministic mode finds a single bit, and is itself sound: the same run twice is the same."""

from __future__ import annotations

from benchmarks.deterministic import Requests, different
from benchmarks.offline import Bench
from inferengine.config import load
from inferengine.core.executor import TokenLogprobs


def logprobs(value: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value, 1, [5], [value])]


def test_one_bit_of_a_log_probability_is_a_difference() -> None:
    alone = {0: [(5, logprobs(-1.0))], 1: [(6, logprobs(-2.0))]}
    off = {0: [(5, logprobs(-1.0 - 2**-52))], 1: [(6, logprobs(-2.0))]}
    ways = {"alone": alone, "together": off, "in chunks": dict(alone)}
    assert different(ways) == {"together": 1, "in chunks": 0}


def test_the_same_requests_alone_again_are_the_same() -> None:
    sizes = {"engine": {"device": "cpu", "threads": 1, "max_num_seqs": 16}, "cache": {"num_blocks": 256}}
    bench = Bench(load(environment={}).with_values(model={"dtype": "float32"}, **sizes))
    ways = Requests(bench, lengths=(7, 20, 33), output_tokens=4).ways()
    bench.executor.close()
    assert different(ways)["alone again"] == 0
    assert set(ways) == {"alone", "alone again", "together", "in chunks", "prefix cached", "beside strangers"}
    for name, outputs in ways.items():
        assert [len(outputs[index]) for index in range(3)] == [4, 4, 4]
        assert all(values for output in outputs.values() for _, values in output), "each token has its log-probability"
        tokens = {index: [token for token, _ in output] for index, output in outputs.items()}
        assert tokens == {index: [token for token, _ in output] for index, output in ways["alone"].items()}, name
