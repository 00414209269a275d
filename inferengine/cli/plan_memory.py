"""usage: inferengine plan-memory [MODEL | config.json] [--memory GIB] [--config FILE] [--section.key VALUE ...]

What a model needs and what fits, from its config.json alone: no weights, no GPU. --memory is the device's memory in
GiB (default: 80, or what is free on this machine where engine.device is cpu).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inferengine.cli.common import resolve
from inferengine.errors import ConfigError, ExitCode

DEFAULT_MEMORY_GIB = 80.0


def run(arguments: Sequence[str]) -> int:
    """Print the plan. Exit code MEMORY where the model does not fit."""
    words, memory_gib = _take_memory(list(arguments))
    words, folder = _take_file(words)
    config = resolve(words, takes_model=True, options=["--memory"])
    if folder is not None:
        config = config.with_values(model={"path": str(folder)})
    import torch

    from inferengine.executor import factory
    from inferengine.executor.memory import plan as memory_plan

    device = torch.device("cpu" if config.engine.device == "cpu" else "cuda")
    settings = factory.executor_settings(config, device)
    if memory_gib is None and device.type == "cpu":
        memory_gib = memory_plan.device_memory(device) / memory_plan.GIB
    memory_gib = memory_gib or DEFAULT_MEMORY_GIB
    plan = memory_plan.make_plan(settings, int(memory_gib * memory_plan.GIB))
    print(f"{settings.folder.name} on {device.type}, {memory_gib:.0f} GiB")
    print("\n".join(memory_plan.plan_lines(plan)))
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
