"""How the cache's memory is divided into blocks."""

from __future__ import annotations

import pytest
import torch

from inferengine.core.executor import Capacity, KVGroup
from inferengine.errors import ConfigError
from inferengine.executor.memory.plan import (
    CacheSettings,
    block_bytes,
    host_budget_bytes,
    plan_groups,
    sequences_at_once,
)
from inferengine.layers.decoder_config import DecoderConfig
from tests.core.builders import Run, make_request
from tests.core.memory_executor import VOCAB_SIZE

FP32 = torch.float32


def make_config(windows: tuple[int | None, ...] = (None, None)) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama", vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=len(windows), num_heads=4,
        num_kv_heads=2, head_dim=8, max_position=1024, norm_eps=1e-5, windows=windows, attention_scale=1.0,
    )  # fmt: skip


def make_settings(**changes: float) -> CacheSettings:
    values = {
        "block_size": 16, "num_blocks": 0, "memory_fraction": 0.0, "swap_bytes": 0, "max_num_seqs": 8,
        "max_model_len": 1024, "max_chunk": 64,
    }  # fmt: skip
    return CacheSettings(**(values | changes))  # type: ignore[arg-type]


def test_a_block_is_keys_and_values_of_all_layers_of_its_group():
    assert block_bytes(make_config((None, None, 32)), 0, 16, FP32) == 2 * 2 * 2 * 8 * 16 * 4


def test_blocks_fill_the_budget():
    config = make_config()
    budget = 100 * block_bytes(config, 0, 16, FP32) + 17
    assert plan_groups(config, make_settings(), FP32, budget) == [KVGroup(100)]


def test_no_more_blocks_than_all_slots_could_use():
    assert plan_groups(make_config(), make_settings(), FP32, 1 << 40) == [KVGroup(8 * 1024 // 16)]


def test_groups_share_the_budget_by_what_a_sequence_holds_in_each():
    config = make_config((None, 32))
    full, sliding = plan_groups(config, make_settings(max_num_seqs=1000), FP32, 1 << 20)
    assert sliding.window == 32
    assert full.num_blocks / (sliding.num_blocks - 64 // 16) == pytest.approx(64 / 3, rel=0.1)
    used = full.num_blocks * block_bytes(config, 0, 16, FP32) + sliding.num_blocks * block_bytes(config, 1, 16, FP32)
    assert 0.98 * (1 << 20) < used <= 1 << 20


@pytest.mark.parametrize("length", [20, 64, 200, 600])
def test_as_many_sequences_as_a_plan_says_run_beside_each_other(length: int):
    config, settings = make_config((None, 32, 32)), make_settings(max_num_seqs=1000, max_chunk=48)
    groups = plan_groups(config, settings, FP32, 500_000)
    count = sequences_at_once(groups, length, settings)
    assert count >= 3
    capacity = Capacity(16, groups, 1000, 48, 1024, VOCAB_SIZE)
    run = Run(capacity, budget=48, watermark=0.0, prefix_caching=False)
    prompt = 10 if length < 100 else length - 100  # long prompts come in chunks while the others decode
    run.submit(*(make_request(uid, prompt=prompt, max_tokens=length - prompt) for uid in range(1, count + 1)))
    run.to_end()
    assert run.scheduler.stats.num_preemptions == 0
    assert run.scheduler.stats.max_batch == count


def test_hardly_any_memory_still_holds_the_one_sequence_that_fits():
    config, settings = make_config((None, 32)), make_settings(max_chunk=512)
    one = 64 * block_bytes(config, 0, 16, FP32) + 35 * block_bytes(config, 1, 16, FP32)
    full, sliding = plan_groups(config, settings, FP32, one)
    assert (full.num_blocks, sliding.num_blocks) == (64, 35)


def test_one_sequence_of_the_configured_length_has_room_where_it_fits():
    config, settings = make_config((None, *[32] * 11)), make_settings(max_model_len=65_536, max_chunk=16)
    costs = [block_bytes(config, group, 16, FP32) for group in range(2)]
    budget = 4200 * costs[0] + 20 * costs[1]
    assert sequences_at_once(plan_groups(config, settings, FP32, budget), 65_536, settings) == 0
    configured = settings._replace(configured_model_len=65_536)
    groups = plan_groups(config, configured, FP32, budget)
    assert sequences_at_once(groups, 65_536, configured) == 1
    assert sum(group.num_blocks * cost for group, cost in zip(groups, costs, strict=True)) <= budget
    too_much = settings._replace(max_model_len=90_000, configured_model_len=90_000)
    assert plan_groups(config, too_much, FP32, budget) == plan_groups(config, settings, FP32, budget)


def test_a_number_in_the_configuration_is_taken_as_it_is():
    groups = plan_groups(make_config((None, 32)), make_settings(num_blocks=33), FP32, 0)
    assert groups == [KVGroup(33), KVGroup(33, 32)]


def test_swap_space_is_divided_like_the_cache():
    config = make_config()
    settings = make_settings(num_blocks=50, swap_bytes=20 * block_bytes(config, 0, 16, FP32))
    assert plan_groups(config, settings, FP32, 0) == [KVGroup(50, None, 20)]


def test_too_little_memory_names_the_key():
    with pytest.raises(ConfigError, match=r"cache\.memory_fraction"):
        plan_groups(make_config(), make_settings(), FP32, 100)


def test_on_a_cpu_the_default_is_modest_and_a_fraction_is_obeyed():
    assert host_budget_bytes(2 << 30, 0.0) == 1 << 29
    assert host_budget_bytes(64 << 30, 0.0) == 1 << 30
    assert host_budget_bytes(64 << 30, 0.5) == 32 << 30
