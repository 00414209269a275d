"""`inferengine plan-memory`: what a model needs and what fits, from its config.json alone."""

from __future__ import annotations

from pathlib import Path

from inferengine.cli.command import Arguments, Option, command
from inferengine.errors import ConfigError, ExitCode

DEFAULT_MEMORY_GIB = 80.0
MAX_MEMORY_GIB = 1_000_000
OPTIONS = {
    "options": (
        Option(
            "--memory GIB",
            f"the device's memory; default: {DEFAULT_MEMORY_GIB:.0f}, or what is free on this machine where "
            "engine.device is cpu",
            None,
            kind=float,
        ),
    )
}


@command(
    OPTIONS, takes_model=True, usage=("[MODEL | config.json] [--memory GIB] [--config FILE] [--section.key VALUE ...]",)
)
def run(arguments: Arguments) -> int:
    """Print what a model needs and what fits, from its config.json alone: no weights, no GPU.

    The exit code is 4 where the model does not fit.
    """
    config, memory_gib = arguments.config, arguments.values["memory"]
    if memory_gib is not None and not 0 < memory_gib <= MAX_MEMORY_GIB:
        raise ConfigError("--memory", f"must be above 0 and at most {MAX_MEMORY_GIB:,}")
    file = Path(config.model.path)
    if file.name.endswith("config.json") and file.is_file():
        config = config.with_values(model={"path": str(file.resolve().parent)})
    import torch

    from inferengine.executor.memory.plan import GIB, device_memory, make_plan, plan_lines
    from inferengine.executor.settings import executor_settings

    device = torch.device("cpu" if config.engine.device == "cpu" else "cuda")
    settings = executor_settings(config, device)
    if memory_gib is None and device.type == "cpu":
        memory_gib = device_memory(device) / GIB
    memory_gib = memory_gib or DEFAULT_MEMORY_GIB
    plan = make_plan(settings, int(memory_gib * GIB))
    print(f"{settings.folder.name} on {device.type}, {memory_gib:.0f} GiB")
    print("\n".join(plan_lines(plan)))
    return ExitCode.OK if plan.sequences(1) else ExitCode.MEMORY
