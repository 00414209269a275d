"""ExecutorSettings: the configuration as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class ExecutorSettings:
    """What the configuration decides, resolved: nothing is `auto` here. 0 in `cache` and `max_model_len`: decide."""

    folder: Path
    device: torch.device
    dtype: torch.dtype | None  # None: the checkpoint's
    random_weights: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    memory_fraction: float
    swap_bytes: int
    chunked_prefill: bool
    overlap: bool
    cuda_graphs: bool
    deterministic: bool
    threads: int = 0  # of the CPU; 0: as many as a step is worth
    seed: int = 0
    draft_folder: Path | None = None
    quantization: str = "none"
    cache_dtype: str = "auto"
    adapters_folder: Path | None = None
    max_adapter_rank: int = 64
    peak_gb_per_s: float = 0.0  # of the device, for the share of the roofline; 0: its data sheet's, or measured
    peak_tflops: float = 0.0
