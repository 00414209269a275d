"""The memory of a KV cache."""

from __future__ import annotations

import pytest
import torch

from inferengine.executor.memory.kv_cache import CACHE_LINE, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_zeros_are_zero_and_begin_where_torch_would_begin_them(num_blocks: int, dtype: torch.dtype) -> None:
    tensor = zeros((num_blocks, 2, 3, 16, 8), dtype, torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((num_blocks, 2, 3, 16, 8), dtype)
    assert tensor.is_contiguous()
    assert not tensor.float().any()
    assert not num_blocks or tensor.data_ptr() % CACHE_LINE == 0
    tensor.fill_(1.0)
    assert bool((tensor.float() == 1.0).all())
