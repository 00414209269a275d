"""`inferengine plan-memory`: what a model needs and what fits, from its config.json alone."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inferengine.cli.command import Arguments, Option, command
from inferengine.config import Config
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
        Option(
            "--tensor-parallel N", "plan each of N devices that share the model; default: engine.tensor_parallel", 0
        ),
        Option("--json", "print the plan as JSON, sizes in bytes"),
    )
}


@command(
    OPTIONS,
    takes_model=True,
    usage=(
        "[MODEL | FILE.json] [--memory GIB] [--tensor-parallel N] [--json] [--config FILE] [--section.key VALUE ...]",
    ),
)
def run(arguments: Arguments) -> int:
    """Print what a model needs and what fits, from its config.json alone: no weights, no GPU.

    MODEL is a folder, a model in the hub's local cache, or the file config.json itself under any name that ends in
    .json. The exit code is 4 where the model does not fit.
    """
    config, memory_gib = arguments.config, arguments.values["memory"]
    if memory_gib is not None and not 0 < memory_gib <= MAX_MEMORY_GIB:
        raise ConfigError("--memory", f"must be above 0 and at most {MAX_MEMORY_GIB:,}")
    if arguments.values["tensor_parallel"]:
        config = config.with_values(engine={"tensor_parallel": arguments.values["tensor_parallel"]})
    name, file = "", Path(config.model.path).expanduser()
    with contextlib.ExitStack() as stack:
        if file.suffix == ".json" and file.is_file():
            name = file.resolve().parent.name if file.name == "config.json" else file.stem
            config = config.with_values(model={"path": stack.enter_context(_folder_of(file))})
        return _print_plan(config, memory_gib, name, as_json=arguments.values["json"])


@contextlib.contextmanager
def _folder_of(file: Path) -> Iterator[str]:
    """Provide a folder in which this file is config.json: its own, or one made for the time being."""
    if file.name == "config.json":
        yield str(file.resolve().parent)
        return
    with tempfile.TemporaryDirectory(prefix="inferengine-plan-") as folder:
        try:
            shutil.copyfile(file, Path(folder, "config.json"))
        except OSError as error:
            raise ConfigError("model.path", f"{file} cannot be read: {error.strerror}") from None
        yield folder


def bytes_of_model(folder: Path) -> tuple[int, int]:
    """Return the bytes of a model's weights as stored, and those of one token's keys and values in bfloat16 in all
    layers. Raises ConfigError."""
    import torch

    from inferengine.executor.memory.plan import weight_bytes
    from inferengine.models import registry
    from inferengine.models.hf_config import read_json

    config, _ = registry.read_model_config(folder)
    values = read_json(folder / "config.json")
    per_token = sum(config.kv_bytes_per_token(group, 2) for group in range(len(config.group_windows)))
    return weight_bytes(config, values, torch.bfloat16), per_token


def _print_plan(config: Config, memory_gib: float | None, name: str, *, as_json: bool) -> int:
    """Print the plan of the model in this configuration under `name` (empty: its folder's) and return the exit code."""
    import torch

    from inferengine.executor.memory.plan import GIB, device_memory, make_plan, plan_figures, plan_lines
    from inferengine.executor.settings import executor_settings

    device = torch.device("cpu" if config.engine.device == "cpu" else "cuda")
    settings = executor_settings(config, device)
    if memory_gib is None and device.type == "cpu":
        memory_gib = device_memory(device) / GIB
    memory_gib = memory_gib or DEFAULT_MEMORY_GIB
    plan = make_plan(settings, int(memory_gib * GIB))
    name = name or settings.folder.name
    if as_json:
        shared_by = {"tensor_parallel": settings.tensor_parallel}
        whose = {"model": name, "device": device.type, "memory_gib": memory_gib, **shared_by}
        print(json.dumps({**whose, **plan_figures(plan)}))
    else:
        size = settings.tensor_parallel
        print(f"{name} on {device.type}, {memory_gib:.0f} GiB{f', each of {size} ranks' if size > 1 else ''}")
        print("\n".join(plan_lines(plan)))
    return ExitCode.OK if plan.fits and plan.sequences(1) else ExitCode.MEMORY


@command({"": (Option("--json", "print the table as JSON"),)}, takes_configuration=False)
def models(arguments: Arguments) -> int:
    """Print the families of models that are served: their architectures, sizes, and what fits on which card.

    What fits is arithmetic: weights in bf16, 8 or 4 bits on 80 % of a card's memory. `inferengine plan-memory MODEL`
    plans one model on one device. With engine.executor = onnx the dense families are served, in fp32 or INT8.
    """
    from inferengine.models.table import table

    rows = list(table())
    if arguments.values["json"]:
        print(json.dumps([dict(zip(rows[0], row, strict=True)) for row in rows[1:]], ensure_ascii=False))
        return ExitCode.OK
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return ExitCode.OK
