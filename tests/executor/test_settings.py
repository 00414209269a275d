"""The configuration as the executor sees it: nothing is `auto` any more, and what cannot be is refused by its key."""

from __future__ import annotations

import pytest
import torch

from inferengine.config import load
from inferengine.errors import ConfigError
from inferengine.executor.memory.plan import with_whole_prompts
from inferengine.executor.settings import executor_settings
from inferengine.layers.decoder_config import DecoderConfig

CPU = load(environment={}).with_values(engine={"device": "cpu"})


def encoder(hidden_size: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="bert", vocab_size=96, hidden_size=hidden_size, intermediate_size=256, num_layers=1, num_heads=4,
        num_kv_heads=4, head_dim=16, max_position=512, norm_eps=1e-6, windows=(None,), attention_scale=0.25,
        is_causal=False,
    )  # fmt: skip


def test_deterministic_mode_needs_a_card_and_says_so() -> None:
    with pytest.raises(ConfigError, match="needs cuda") as caught:
        executor_settings(CPU.with_values(engine={"deterministic": True}))
    assert caught.value.field == "engine.deterministic"


def test_every_zero_and_auto_is_decided() -> None:
    settings = executor_settings(CPU)
    assert (settings.device, settings.dtype) == (torch.device("cpu"), torch.float32)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_size) == (64, 512, 16)
    assert not settings.overlap


def test_the_operators_peaks_reach_the_executor() -> None:
    settings = executor_settings(CPU.with_values(engine={"peak_gb_per_s": 4000.0, "peak_tflops": 700.0}))
    assert (settings.peak_gb_per_s, settings.peak_tflops) == (4000.0, 700.0)


@pytest.mark.parametrize(("hidden_size", "tokens"), [(384, 32_768), (1024, 32_768), (3584, 8192)])
def test_steps_of_small_encoders_are_large_on_a_card(hidden_size: int, tokens: int) -> None:
    """Larger models compute a step of 8,192 tokens for longer than it takes to launch."""
    config, device = load(environment={}), torch.device("cuda")
    settings = with_whole_prompts(executor_settings(config, device), encoder(hidden_size))
    assert settings.max_num_batched_tokens == tokens
    asked = executor_settings(config.with_values(engine={"max_num_batched_tokens": 2048}), device)
    assert with_whole_prompts(asked, encoder(hidden_size)).max_num_batched_tokens == 2048
