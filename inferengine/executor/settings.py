"""ExecutorSettings: the configuration as the executor sees it, with its `auto` values resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from inferengine.config import Config
from inferengine.config.model_path import draft_folder, model_folder
from inferengine.errors import ConfigError
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.parallel import KEY, Shard


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
    whole_prompt_tokens: int  # the same for a small model whose tokens see later ones
    max_model_len: int
    block_size: int
    num_blocks: int
    memory_fraction: float
    swap_bytes: int
    chunked_prefill: bool
    overlap: bool
    cuda_graphs: bool
    deterministic: bool
    threads: int = 0  # of the CPU, for every step; 0: chosen for each step (executor/cpu_step.py)
    seed: int = 0
    draft_folder: Path | None = None
    quantization: str = "none"
    cache_dtype: str = "auto"
    prefix_caching: bool = True  # whether requests share the blocks of equal prefixes
    snapshot_bytes: int = 0  # for copies of states, with which prefixes are found; 0: a share of the device
    num_snapshots: int = 0  # so many copies, decided once the model is known
    adapters_folder: Path | None = None
    max_adapter_rank: int = 64
    pooling: str = "auto"  # of embeddings; auto: as sentence-transformers' files say
    peak_gb_per_s: float = 0.0  # of the device, for the share of the roofline; 0: its data sheet's, or measured
    peak_tflops: float = 0.0
    tune: str = "auto"  # auto, off or seconds: executor/tune.py
    tensor_parallel: int = 1
    rank: int = 0  # of tensor_parallel

    @property
    def shard(self) -> Shard:
        """Which part of the model this process holds."""
        return Shard(self.rank, self.tensor_parallel)

    def compute_dtype(self, config: DecoderConfig) -> torch.dtype:
        """Return the number format of the model's arithmetic."""
        dtype: torch.dtype = self.dtype or getattr(torch, config.dtype)
        return dtype

    def kv_dtype(self, config: DecoderConfig) -> torch.dtype:
        """Return the number format of the KV cache."""
        return torch.float8_e4m3fn if self.cache_dtype == "fp8" else self.compute_dtype(config)


BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # 64: what the tensor memory accelerator can fetch as one tile
DEFAULTS = {"cpu": (64, 512), "cuda": (512, 8192)}  # max_num_seqs, max_num_batched_tokens
# max_num_batched_tokens of small models whose tokens see later ones. Their steps are launched kernel by kernel, which
# takes as long as computing some 16,000 tokens.
WHOLE_PROMPTS = {"cpu": 512, "cuda": 32_768}


def executor_settings(config: Config, device: torch.device | None = None, rank: int = 0) -> ExecutorSettings:
    """Resolve the configuration for the device that it names or, to plan for another machine, for `device`; `rank` is
    this process's of engine.tensor_parallel. Raises ConfigError."""
    size = config.engine.tensor_parallel
    if device is None:
        device = choose_device(config.engine.device)
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise ConfigError(KEY, f"{size} devices are asked for and torch sees {torch.cuda.device_count()}")
    if config.engine.deterministic and device.type == "cpu":
        raise ConfigError("engine.deterministic", "the CPU's matrix products depend on the batch: it needs cuda")
    if config.engine.deterministic and size > 2:
        raise ConfigError(KEY, "a sum over more than 2 devices depends on the batch: engine.deterministic needs 1 or 2")
    threads = config.engine.threads
    if size > 1 and not threads:  # ranks on a CPU share its cores
        threads = max(1, torch.get_num_threads() // size)
    max_num_seqs, max_num_batched_tokens = DEFAULTS[device.type]
    return ExecutorSettings(
        folder=model_folder(config),
        draft_folder=draft_folder(config, on_cpu=device.type == "cpu"),
        device=device,
        dtype=_dtype(config.model.dtype, device),
        random_weights=config.model.load_format == "dummy",
        quantization=config.model.quantization,
        cache_dtype=config.cache.dtype,
        prefix_caching=config.cache.prefix_caching and config.cache.layout == "paged",
        snapshot_bytes=int(config.cache.snapshot_gib * (1 << 30)),
        adapters_folder=_adapters_folder(config.model.adapters),
        max_adapter_rank=config.model.max_adapter_rank,
        max_num_seqs=config.engine.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens or max_num_batched_tokens,
        whole_prompt_tokens=config.engine.max_num_batched_tokens or WHOLE_PROMPTS[device.type],
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size or BLOCK_SIZES[device.type],
        num_blocks=config.cache.num_blocks,
        memory_fraction=config.cache.memory_fraction,
        swap_bytes=int(config.cache.swap_gib * (1 << 30)) // size if config.scheduler.preemption == "swap" else 0,
        chunked_prefill=config.scheduler.chunked_prefill,
        pooling=config.model.pooling,
        cuda_graphs=config.engine.cuda_graphs,
        deterministic=config.engine.deterministic,
        threads=threads,
        peak_gb_per_s=config.engine.peak_gb_per_s,
        peak_tflops=config.engine.peak_tflops,
        tensor_parallel=size,
        rank=rank,
        tune=config.engine.tune,
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
