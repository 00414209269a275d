"""The configuration as the executor sees it: nothing is `auto` any more, and what cannot be is refused by its key."""

from __future__ import annotations

import pytest
import torch

from inferengine.config import load
from inferengine.errors import ConfigError
from inferengine.executor.settings import executor_settings

CPU = load(environment={}).with_values(engine={"device": "cpu"})


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
