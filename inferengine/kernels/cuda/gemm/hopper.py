"""What the kernels in Gluon for Hopper share: whether a device is one, and names of Gluon that changed between Triton
3.6 and 3.9."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_piece = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
NEW_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape."""
    if NEW_VIEW:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a CUDA device of compute capability 9.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
