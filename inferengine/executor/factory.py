"""Builds an executor from the configuration; resolves its `auto` values."""

from __future__ import annotations

from pathlib import Path

import torch

from inferengine.config import Config
from inferengine.config.model_path import draft_folder, model_folder
from inferengine.errors import ConfigError
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.torch_executor import TorchExecutor

BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # 64: what the tensor memory accelerator can fetch as one tile
DEFAULTS = {"cpu": (64, 512), "cuda": (512, 8192)}  # max_num_seqs, max_num_batched_tokens


def build_executor(config: Config) -> TorchExecutor:
    """Build an executor that has not loaded anything yet. Raises ConfigError naming a key that cannot be met."""
    return TorchExecutor(executor_settings(config))


def executor_settings(config: Config, device: torch.device | None = None) -> ExecutorSettings:
    """Resolve the configuration for the device that it names or, to plan for another machine, for `device`. Raises
    ConfigError."""
    device = device or choose_device(config.engine.device)
    if config.engine.deterministic and device.type == "cpu":
        raise ConfigError("engine.deterministic", "the CPU's matrix products depend on the batch: it needs cuda")
    max_num_seqs, max_num_batched_tokens = DEFAULTS[device.type]
    return ExecutorSettings(
        folder=model_folder(config),
        draft_folder=draft_folder(config, on_cpu=device.type == "cpu"),
        device=device,
        dtype=_dtype(config.model.dtype, device),
        random_weights=config.model.load_format == "dummy",
        quantization=config.model.quantization,
        cache_dtype=config.cache.dtype,
        adapters_folder=_adapters_folder(config.model.adapters),
        max_adapter_rank=config.model.max_adapter_rank,
        max_num_seqs=config.engine.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens or max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size or BLOCK_SIZES[device.type],
        num_blocks=config.cache.num_blocks,
        memory_fraction=config.cache.memory_fraction,
        swap_bytes=int(config.cache.swap_gib * (1 << 30)) if config.scheduler.preemption == "swap" else 0,
        chunked_prefill=config.scheduler.chunked_prefill,
        cuda_graphs=config.engine.cuda_graphs,
        deterministic=config.engine.deterministic,
        threads=config.engine.threads,
        peak_gb_per_s=config.engine.peak_gb_per_s,
        peak_tflops=config.engine.peak_tflops,
        overlap=config.engine.overlap == "on" or (config.engine.overlap == "auto" and device.type == "cuda"),
    )


def _adapters_folder(name: str) -> Path | None:
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError("model.adapters", "there is no such folder")
    return folder


def choose_device(name: str) -> torch.device:
    """Return the device for `engine.device`: auto, cpu or cuda. Raises ConfigError where there is no CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device", "torch sees no CUDA device: use cpu, or install a CUDA build of torch")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.float32 if device.type == "cpu" else None
