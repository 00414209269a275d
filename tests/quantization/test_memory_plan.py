"""What plan-memory says of a model in low precision, against the bytes that the CUDA kernels are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import GPT_OSS_20B
from inferengine.config import Config
from inferengine.executor.memory import measure
from inferengine.executor.memory.plan import MemoryPlan, make_plan, weight_bytes
from inferengine.executor.settings import executor_settings
from inferengine.executor.torch_executor import build_executor
from inferengine.models import registry
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE, bytes_per_weight

VALUES = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIG = registry.config_of(VALUES, registry.family(VALUES))


@pytest.mark.parametrize("scheme", sorted(MADE))
def test_bytes_of_a_weight_are_those_of_its_packed_tensors(scheme: str) -> None:
    packed = cuda.pack(MADE[scheme](torch.randn(256, 512))).weight
    held = sum(tensor.numel() * tensor.element_size() for tensor in packed if isinstance(tensor, torch.Tensor))
    assert held == pytest.approx(256 * 512 * bytes_per_weight(scheme, 512), rel=0.01)


def test_embeddings_and_head_stay_as_they_are() -> None:
    full = weight_bytes(CONFIG, VALUES, torch.bfloat16)
    small = weight_bytes(CONFIG, VALUES, torch.bfloat16, "int8")
    linear = 2 * (256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 512)
    assert full - small == pytest.approx(linear, rel=0.02)


def test_a_checkpoint_that_is_quantized_says_so_itself() -> None:
    stored = {**VALUES, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert weight_bytes(CONFIG, stored, torch.bfloat16) == weight_bytes(CONFIG, VALUES, torch.bfloat16, "int4")


def plan_of(folder: Path, device_bytes: int, **sections: dict[str, Any]) -> MemoryPlan:
    (folder / "config.json").write_text(json.dumps(VALUES))
    config = Config().with_values(**{**sections, "model": {"path": str(folder)}})
    return make_plan(executor_settings(config, torch.device("cpu")), device_bytes)


def test_an_fp8_cache_holds_four_times_the_tokens_of_float32(tmp_path: Path) -> None:
    full = plan_of(tmp_path, 1 << 26, cache={"memory_fraction": 0.1})
    small = plan_of(tmp_path, 1 << 26, cache={"memory_fraction": 0.1, "dtype": "fp8"})
    assert small.num_kv_tokens // full.num_kv_tokens == 4


def test_the_engine_divides_its_memory_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = {
        "model_type": "gemma3_text", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64,
        "sliding_window_pattern": 3, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    config = Config().with_values(model={"path": str(tmp_path), "load_format": "dummy"}, engine={"device": "cpu"})
    free = 40 << 20
    monkeypatch.setattr(measure, "free_host_bytes", lambda: free)
    executor = build_executor(config)
    capacity = executor.load(lambda phase, share: None)
    executor.close()
    settings = executor_settings(config)
    weights = make_plan(settings, free).weights
    plan = make_plan(settings, free + weights)  # the engine looks at what is free when its weights are in place
    assert plan.groups == capacity.groups
    assert [group.window for group in plan.groups] == [None, 64]
    assert plan.sequences(16) > plan.sequences(4096) > 0


def test_experts_are_counted_in_the_bytes_of_their_codes() -> None:
    stored = {key: value for key, value in GPT_OSS_20B.items() if key != "quantization_config"}
    config = registry.config_of(GPT_OSS_20B, registry.family(GPT_OSS_20B))
    plain, small = (weight_bytes(config, values, torch.bfloat16) for values in (stored, GPT_OSS_20B))
    assert plain == pytest.approx(2 * 20.9e9, rel=0.01)
    assert plain - small == pytest.approx(config.num_expert_weights * (2 - 0.53125), rel=1e-3), "experts alone"
