"""Two ranks give the tokens of one, and its log-probabilities within rounding: on the CPU, over gloo."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.config import Config
from inferengine.core.executor import DeviceLost
from inferengine.core.speculation import DraftModelProposer, Proposer
from inferengine.errors import ConfigError
from inferengine.executor.parallel.communicator import PACKET_ROWS, TorchCommunicator, goes_in_packets, inbox_bytes
from inferengine.executor.torch_executor import build_executor
from inferengine.executor.warm_up import CHUNKS
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.decoder_config import MoeConfig
from inferengine.layers.parallel import Cut, DimensionRange, LinearPart, Shard, summed
from inferengine.models import registry
from inferengine.quantization.schemes import fp8_blocks, int4_groups
from inferengine.quantization.weight import Block, cut, dequantize
from tests.core.builders import ThirdsGrammar
from tests.executor.engine import Engine, Foreknowledge
from tests.executor.parallel import Pair
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import FAMILIES, make_model, model_of, save
from tests.models.families import BARE, CASES, EVEN, MORE, QWEN_EXPERTS, Case
from tests.quantization.checkpoints import write
from tests.quantization.test_experts import GPT_OSS, write_codes, write_mxfp4

ODD = {**EVEN, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 75}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3", "gemma3", "gpt2")},
    "olmo2": CASES["olmo2"][:2],
    "phi3, five heads and one KV head": ("Phi3Config", ODD),
    "pythia": CASES["pythia"][:2],
    "stablelm, a norm for each head": MORE["stablelm, both"][:2],
    "cohere, a norm of heads": CASES["cohere"][:2],
    "qwen2-moe, 7 experts, a shared one": CASES["qwen2-moe"][:2],
    "qwen3-moe, dense layers": CASES["qwen3-moe"][:2],
    "granite-moe": CASES["granite-moe"][:2],
    "gpt-oss": CASES["gpt-oss"][:2],
    "gemma4, layers that share keys": CASES["gemma4-e2b, layers that share keys"][:2],
    "gemma4, fewer KV heads in some layers": CASES["gemma4-26b, experts beside a block"][:2],
    "deepseek-v2, a rank of queries": CASES["deepseek-v2"][:2],
    "deepseek-v3, no rank of queries": MORE["deepseek-v3, halves, no query rank"][:2],
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


def prompts(seed: int = 1, lengths: tuple[int, ...] = (3, 37, 17, 29)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(301) for _ in range(length)] for length in lengths]


def both(folder: Path, pair: Pair, **values: Any) -> tuple[Engine, Engine]:
    """Return the same engine on one rank and on two."""
    return Engine(folder, **values), Engine(folder, build=pair.build, **values)


def largest_difference(one: Engine, two: Engine, uids: list[int]) -> float:
    found = [
        (a, b)
        for uid in uids
        for first, second in zip(one.logprobs[uid], two.logprobs[uid], strict=True)
        for a, b in zip(first.top_logprobs, second.top_logprobs, strict=True)
    ]
    assert found
    return max(abs(a - b) for a, b in found)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_tokens_of_one(name: str, pair: Pair, tmp_path: Path) -> None:
    """In chunks, preempted for lack of blocks, then again from cached prefixes. Prompts of latents as a whole: chunks
    of 16 are computed as decodes are."""
    folder = save(model_of(*MODELS[name]), tmp_path)
    one, two = both(folder, pair, budget=64 if "deepseek" in name else 16, num_blocks=16)
    outputs = [engine.generate(prompts(), 10) for engine in (one, two)]
    assert outputs[0] == outputs[1]
    uids = [[engine.submit(prompt, 10, logprobs=5) for prompt in prompts()] for engine in (one, two)]
    assert one.run().outputs == two.run().outputs
    assert largest_difference(one, two, uids[0]) < 1e-4
    assert two.core.scheduler.stats.num_preemptions > 0


FP8_BLOCKS = Case("Qwen3MoeConfig", {**BARE, **QWEN_EXPERTS, "num_attention_heads": 4, "head_dim": 24})


@pytest.mark.parametrize(("layout", "case"), [("mxfp4", GPT_OSS), ("fp8-blocks", FP8_BLOCKS)])
def test_of_a_quantized_mixture_each_rank_reads_its_own_experts(
    layout: str, case: Case, pair: Pair, tmp_path: Path
) -> None:
    model = model_of(case.config, case.values)
    if layout == "mxfp4":
        write_mxfp4(model, tmp_path)
    else:
        write_codes(model, tmp_path, layout)
    one, two = both(tmp_path, pair)
    uids = [[engine.submit(prompt, 6, logprobs=5) for prompt in prompts()] for engine in (one, two)]
    assert one.run().outputs == two.run().outputs
    assert largest_difference(one, two, uids[0]) < 1e-4


@pytest.mark.parametrize("layout", ["fp8-blocks", "gptq", "awq", "compressed-int4"])
def test_of_a_quantized_checkpoint_each_rank_keeps_its_codes_and_scales(
    layout: str, pair: Pair, tmp_path: Path
) -> None:
    """Groups of 16 inputs that share a scale stay whole. Of the FP8 blocks of 32 rows a rank has three of queries and
    half of one of keys."""
    sizes = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 12, "intermediate_size": 768}
    write(make_model("llama", **sizes), layout, tmp_path)
    one, two = both(tmp_path, pair)
    uids = [[engine.submit(prompt, 8, logprobs=5) for prompt in prompts()] for engine in (one, two)]
    assert one.run().outputs == two.run().outputs
    assert largest_difference(one, two, uids[0]) < 1e-4


def test_two_steps_in_flight_give_the_same_tokens(llama: Path, pair: Pair) -> None:
    """The other rank is then two steps behind what rank 0 has sent."""
    one, two = both(llama, pair, overlap=True, num_blocks=16)
    for engine in (one, two):
        assert engine.executor.max_in_flight == 2
        engine.submit(prompts(2, (9,))[0], 24, grammar=ThirdsGrammar())
        engine.submit(prompts(3, (9,))[0], 24, temperature=0.9, top_p=0.9, seed=3)
        parent = engine.submit(prompts(4, (21,))[0], 12, temperature=1.0, seed=8)
        engine.submit(prompts(4, (21,))[0], 12, temperature=1.0, seed=9, fork_of=parent)
        engine.submit(prompts(5, (37,))[0], 12)
        engine.run()
    assert one.outputs == two.outputs


def test_everything_that_a_request_may_ask_for(llama: Path, pair: Pair) -> None:
    """Drawn tokens, penalties, forbidden tokens, grammars, prompt log-probabilities, embeddings."""
    engines = both(llama, pair, max_num_seqs=8)
    for engine in engines:
        engine.submit(prompts(2, (6,))[0], 12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
        engine.submit(prompts(7, (8,))[0], 24, grammar=ThirdsGrammar())
        engine.submit(prompts(3, (9,))[0], 12, temperature=1.0, seed=-5, presence_penalty=0.5, logit_bias=((3, 2.0),))
        engine.submit(prompts(4, (9,))[0], 12, repetition_penalty=1.3, bad_words_ids=((5,), (7, 8)))
        engine.submit(prompts(5, (70,))[0], 3, prompt_logprobs=2)
        engine.embed(prompts(6, (40,))[0], "mean")
        engine.run()
    one, two = engines
    assert one.outputs == two.outputs
    assert two.core.scheduler.stats.num_forced_tokens > 0
    assert one.embeddings.keys() == two.embeddings.keys() != set()
    for uid, vector in one.embeddings.items():
        torch.testing.assert_close(torch.tensor(two.embeddings[uid]), torch.tensor(vector), atol=1e-5, rtol=0)
    for uid, items in one.prompt_logprobs.items():
        found = [item.logprob for item in two.prompt_logprobs[uid]]
        assert found == pytest.approx([item.logprob for item in items], abs=1e-4)


@pytest.mark.parametrize("proposer", [Foreknowledge(), DraftModelProposer()])
def test_draft_tokens_change_no_output(proposer: Proposer, llama: Path, pair: Pair) -> None:
    """The draft model is the model itself."""

    def drafting(build: Callable[[Config], Any]) -> Callable[[Config], Any]:
        settings = {"method": "draft", "draft_model": str(llama)} if proposer.on_device else {}
        return lambda config: build(config.with_values(speculation=settings))

    engines = []
    for build in (build_executor, pair.build):
        engine = Engine(llama, build=drafting(build), proposer=proposer, max_drafts=3)
        first = engine.generate(prompts(), 20)
        if isinstance(proposer, Foreknowledge):
            proposer.texts += [[*prompt, *output] for prompt, output in zip(prompts(), first, strict=True)]
        assert engine.generate(prompts(), 20) == first
        engine.submit(prompts()[0], 16, temperature=0.7, seed=11, grammar=ThirdsGrammar())
        engine.run()
        engines.append(engine)
    one, two = engines
    assert one.outputs == two.outputs
    found = two.core.scheduler.snapshot()
    assert 20 < found.num_drafts_accepted <= found.num_drafted


def test_a_swapped_sequence_goes_on(llama: Path, pair: Pair) -> None:
    one, two = both(llama, pair, num_blocks=14, preemption="swap", swap_is_cheap=True, prefix_caching=False)
    assert one.generate(prompts(), 20) == two.generate(prompts(), 20)
    assert two.core.scheduler.snapshot().num_blocks_swapped_out > 0


def test_adapters_are_divided_with_their_layers(llama: Path, pair: Pair, tmp_path: Path) -> None:
    """One of them DoRA: the lengths of rows that are divided are summed over the ranks."""
    names = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    write_adapter(tmp_path / "some", make_model("llama"), targets=names)
    write_adapter(tmp_path / "scaled", make_model("llama"), targets=names, dora=True)
    one, two = both(llama, pair, model={"adapters": str(tmp_path)})
    uids: list[int] = []
    for engine in (one, two):
        numbers = engine.executor.adapters.names()
        adapters = (numbers["some"], 0, numbers["scaled"], numbers["scaled"])
        uids = [
            engine.submit(prompt, 10, adapter=adapter, logprobs=3)
            for prompt, adapter in zip(prompts(), adapters, strict=True)
        ]
        engine.run()
    assert one.outputs == two.outputs
    assert largest_difference(one, two, uids) < 1e-4
    plain = one.generate([prompts()[0], prompts()[2]], 10)
    assert all(tokens != one.outputs[uid] for tokens, uid in zip(plain, (uids[0], uids[2]), strict=True))


def test_quantized_at_load_the_ranks_round_their_own_parts(llama: Path, pair: Pair) -> None:
    """Each rank rounds what it holds: of a row that is divided, finer than the whole."""
    two = Engine(llama, build=pair.build, model={"quantization": "int8"})
    first = two.generate(prompts(), 8)
    assert two.generate(prompts(), 8) == first
    assert all(len(tokens) == 8 for tokens in first)


# -- what a rank holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(6, 2, 2), (5, 1, 2), (32, 8, 8), (12, 3, 8), (6, 3, 2), (8, 2, 4)]
)
def test_heads_are_divided_without_rest_and_repeated_where_they_are_few(queries: int, keys: int, size: int) -> None:
    config = _config(queries, keys)
    held = [Shard(rank, size).heads(config) for rank in range(size)]
    assert [head for span, _ in held for head in range(span.begin, span.end)] == list(range(queries))
    for span, own in held:
        each = queries // keys
        assert {head // each for head in range(span.begin, span.end)} == set(range(own.begin, own.end))
        assert span.size % own.size == 0
    assert max(span.size for span, _ in held) == held[0][0].size, "rank 0 is what memory is planned for"


def test_what_does_not_divide_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="do not divide") as caught:
        Shard(0, 8).divide(_config(4, 2))
    assert caught.value.field == "engine.tensor_parallel"


def test_layers_that_would_divide_the_heads_otherwise_are_refused() -> None:
    values = {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
              "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}  # fmt: skip
    config = registry.config_of(values, registry.family(values))
    with pytest.raises(ConfigError, match="the KV heads of some layers divide the heads of gemma4_text otherwise"):
        Shard(0, 2).divide(config)


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 experts do not divide among 8 ranks"):
        Shard(0, 8).experts(MoeConfig(num_experts=5, num_chosen=2, intermediate_size=8))


def test_a_tensor_that_holds_several_projections_is_cut_in_each() -> None:
    part = LinearPart((DimensionRange(2, 4, 4), DimensionRange(1, 2, 2), DimensionRange(1, 2, 2)))
    found = part.cut(None)
    assert found is not None
    assert found.of(torch.arange(8)).tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("make", [fp8_blocks, int4_groups])
@pytest.mark.parametrize(
    "part", [Cut(0, (DimensionRange(64, 320, 512),), 512), Cut(1, (DimensionRange(128, 256, 256),), 256)]
)
def test_part_of_a_quantized_weight_is_that_part_of_its_numbers(make: Any, part: Cut) -> None:
    weight = make(torch.randn(512, 256, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(dequantize(cut(weight, part)), part.of(dequantize(weight)))


def test_a_group_of_inputs_that_shares_a_scale_is_not_cut() -> None:
    weight = int4_groups(torch.ones(8, 256))
    assert weight.block == Block(1, 128)
    with pytest.raises(ValueError, match="groups of 128"):
        cut(weight, Cut(1, (DimensionRange(0, 96, 256),), 256))


def _config(queries: int, keys: int) -> Any:
    from inferengine.models import llama, registry

    values = {**EVEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    values |= {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 10, "rms_norm_eps": 1e-6}
    values = {name: value for name, value in values.items() if name != "initializer_range"}
    return registry.config_of(values, llama)


# -- sums over the ranks -----------------------------------------------------------------------------------------------


class Sums:
    """A communicator of two ranks with equal parts. `at_once`: it adds the norm in the same kernel. Implements
    Communicator."""

    rank, size = 0, 2

    def __init__(self, *, at_once: bool) -> None:
        self.at_once, self.calls = at_once, list[str]()

    def expect_rows(self, row_bytes: int, num_rows: int) -> None: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("sum")
        return x.mul_(2)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        if not self.at_once:
            return None
        self.calls.append("sum and norm")
        return REFERENCE.add_rms_norm(2 * x, residual, gain, eps)[0]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])


@pytest.mark.parametrize(
    ("at_once", "has_bias", "calls"),
    [(True, False, ["sum and norm"]), (False, False, ["sum"]), (True, True, ["sum"])],
)
def test_a_sum_takes_its_norm_along_where_a_kernel_does_both(at_once: bool, has_bias: bool, calls: list[str]) -> None:
    """The bias is added once, after the sum."""
    x, weight, gain, residual = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6), torch.randn(3, 6)
    bias, communicator = torch.randn(6) if has_bias else None, Sums(at_once=at_once)
    total = residual + 2 * x @ weight.t() + (0 if bias is None else bias)
    linear_add_norm = summed(REFERENCE, communicator).linear_add_norm
    assert linear_add_norm is not None
    found, normed = linear_add_norm(x, weight, bias, residual.clone(), gain, 1e-5)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(normed, REFERENCE.rms_norm(total, gain, 1e-5))
    assert communicator.calls == calls


def test_few_rows_go_in_packets_and_longer_rows_sooner_whole() -> None:
    assert goes_in_packets(torch.empty(64, 4096, dtype=torch.bfloat16))
    assert not goes_in_packets(torch.empty(65, 64, dtype=torch.bfloat16))
    assert goes_in_packets(torch.empty(32, 5120, dtype=torch.bfloat16))
    assert not goes_in_packets(torch.empty(33, 5120, dtype=torch.bfloat16)), "64 rows would be more than 512 KiB"
    assert set(PACKET_ROWS) <= set(CHUNKS), "warm-up runs a step on both sides"


def test_only_numbers_of_ranks_that_were_measured_take_memory_for_sums() -> None:
    assert inbox_bytes(2, 8192, 100) > 2 * 100 * 8192
    assert inbox_bytes(4, 8192, 100) == 0


def test_a_step_in_which_a_sum_waited_in_vain_is_lost(llama: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama, build=pair.build)
    monkeypatch.setattr(TorchCommunicator, "lost", "rank 1 did not take part in a sum")
    with pytest.raises(DeviceLost, match="rank 1 did not take part"):
        engine.generate(prompts(), 2)
