"""ExecutorSettings: the configuration as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from inferengine.layers.decoder_config import DecoderConfig


@dataclass(frozen=True)
class ExecutorSettings:
    """The configuration with every `auto` resolved. `num_blocks`, `memory_fraction` and `max_model_len` may still be 0:
    the executor then decides, from the model and the free memory."""

    folder: Path
    device: torch.device
    dtype: torch.dtype | None  # of the arithmetic; None: the checkpoint's
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
    threads: int = 0  # of the CPU, for every step; 0: chosen for each step (executor/threads.py)
    seed: int = 0
    draft_folder: Path | None = None
    quantization: str = "none"
    cache_dtype: str = "auto"
    adapters_folder: Path | None = None
    max_adapter_rank: int = 64
    peak_gb_per_s: float = 0.0  # of the device, for the share of the roofline; 0: its data sheet's, or measured
    peak_tflops: float = 0.0

    def compute_dtype(self, config: DecoderConfig) -> torch.dtype:
        """Return the number format of the model's arithmetic."""
        dtype: torch.dtype = self.dtype or getattr(torch, config.dtype)
        return dtype

    def kv_dtype(self, config: DecoderConfig) -> torch.dtype:
        """Return the number format of the KV cache."""
        return torch.float8_e4m3fn if self.cache_dtype == "fp8" else self.compute_dtype(config)
