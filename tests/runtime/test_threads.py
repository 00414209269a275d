"""Short steps run on one CPU thread, long ones on all, and a number in the configuration is obeyed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.runtime.threads import Threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_config(hidden_size: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama", vocab_size=4096, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_layers=6,
        num_heads=6, num_kv_heads=2, head_dim=64, max_position=2048, norm_eps=1e-5, windows=(None,) * 6,
        attention_scale=0.125,
    )  # fmt: skip


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_decodes_on_one_thread_and_reads_prompts_on_all():
    threads = Threads(make_config(384), fixed=0)
    assert threads.number(1) == 1
    assert threads.number(512) == 2


@pytest.mark.usefixtures("two_threads")
def test_a_large_model_always_uses_all():
    assert Threads(make_config(4096), fixed=0).number(1) == 2


@pytest.mark.usefixtures("two_threads")
def test_the_configuration_has_the_last_word():
    threads = Threads(make_config(384), fixed=2)
    threads.prepare(1)
    assert torch.get_num_threads() == 2
    Threads(make_config(384), fixed=1).prepare(512)
    assert torch.get_num_threads() == 1
