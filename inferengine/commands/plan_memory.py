"""usage: inferengine plan-memory [MODEL | config.json] [--memory GIB] [--config FILE] [--section.key VALUE ...]

What a model needs and what fits, from its config.json alone: no weights, no GPU. --memory is the device's memory in
GiB (default: 80, or this machine's share for the cache where engine.device is cpu).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from inferengine.commands.arguments import resolve
from inferengine.errors import ConfigError, ExitCode

CONTEXTS = (1024, 4096, 8192, 32768, 131072)
DEFAULT_MEMORY_GIB = 80.0
NUM_GRAPHS = 35  # batch sizes that are captured at start


def run(arguments: Sequence[str]) -> int:
    """Print the plan. Exit code MEMORY where the model does not fit."""
    words, memory_gib = _take_memory(list(arguments))
    words, folder = _take_file(words)
    config = resolve(words, takes_model=True, options=["--memory"])
    import torch

    from inferengine.model_folder import model_folder
    from inferengine.models import registry
    from inferengine.models.hf_config import read_json
    from inferengine.runtime import memory_plan
    from inferengine.runtime.factory import DEFAULTS

    folder = folder or model_folder(config)
    values = read_json(folder / "config.json")
    model = registry.config_of(values, registry.family(values))
    on_cpu = config.engine.device == "cpu"
    name = "float32" if on_cpu else model.dtype
    dtype: torch.dtype = getattr(torch, config.model.dtype if config.model.dtype != "auto" else name)
    seqs, tokens = DEFAULTS["cpu" if on_cpu else "cuda"]
    if memory_gib is None and on_cpu:
        memory_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / memory_plan.GIB
    memory_gib = memory_gib or DEFAULT_MEMORY_GIB
    plan = memory_plan.make_plan(
        model,
        values,
        dtype=dtype,
        device_bytes=int(memory_gib * memory_plan.GIB),
        memory_fraction=config.cache.memory_fraction or (0.25 if on_cpu else 0.92),
        max_num_seqs=config.engine.max_num_seqs or seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens or tokens,
        num_graphs=0 if on_cpu else NUM_GRAPHS,
        quantization=config.model.quantization,
        kv_dtype=torch.float8_e4m3fn if config.cache.dtype == "fp8" else dtype,
    )
    longest = config.model.max_model_len or model.max_position
    contexts = [length for length in CONTEXTS if length < longest] + [longest]
    print(f"{folder.name}: {model.num_layers} layers, {str(dtype).removeprefix('torch.')}, {memory_gib:.0f} GiB")
    print("\n".join(memory_plan.plan_lines(plan, contexts)))
    return ExitCode.OK if plan.sequences(1) else ExitCode.MEMORY


def _take_memory(words: list[str]) -> tuple[list[str], float | None]:
    if "--memory" not in words:
        return words, None
    index = words.index("--memory")
    try:
        memory = float(words[index + 1])
    except (IndexError, ValueError):
        raise ConfigError("--memory", "the device's memory in GiB must follow") from None
    if memory <= 0:
        raise ConfigError("--memory", "must be above 0")
    return words[:index] + words[index + 2 :], memory


def _take_file(words: list[str]) -> tuple[list[str], Path | None]:
    """A bare config.json is as good as the folder around it."""
    for index, word in enumerate(words):
        if word.endswith("config.json") and Path(word).is_file():
            return words[:index] + words[index + 1 :], Path(word).resolve().parent
    return words, None
