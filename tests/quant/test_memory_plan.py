"""What plan-memory says of a model in low precision, against the bytes that the CUDA kernels are given."""

from __future__ import annotations

import pytest
import torch

from inferengine.models import registry
from inferengine.quant import cuda
from inferengine.quant.schemes import MADE, bytes_per_weight
from inferengine.runtime.memory_plan import make_plan, weight_bytes

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


def test_an_fp8_cache_holds_twice_the_tokens_of_bfloat16() -> None:
    sizes = {"dtype": torch.bfloat16, "device_bytes": 1 << 30, "memory_fraction": 0.9, "max_num_seqs": 4,
             "max_num_batched_tokens": 64, "num_graphs": 0}  # fmt: skip
    full = make_plan(CONFIG, VALUES, **sizes)
    small = make_plan(CONFIG, VALUES, **sizes, kv_dtype=torch.float8_e4m3fn)
    assert small.num_kv_tokens // full.num_kv_tokens == 2
