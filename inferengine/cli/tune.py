"""`inferengine tune`: measures which kernels a model's matrix products take on this card, and shows the table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from inferengine.cli.command import Arguments, Option, command
from inferengine.config import keep_compiled_kernels
from inferengine.errors import ConfigError, ExitCode

DEFAULT_BUDGET_S = 60.0
OPTIONS = {
    "options": (
        Option("--budget-seconds S", "stop measuring after this long; what is left keeps its rules", DEFAULT_BUDGET_S),
        Option("--show", "measure nothing: print what is known of this model, without MODEL of all shapes"),
        Option("--json", "print the table as JSON"),
    )
}
USAGE = (
    "MODEL [--budget-seconds S] [--json] [--config FILE] [--section.key VALUE ...]",
    "--show [MODEL] [--json]",
)


@command(OPTIONS, takes_model=True, usage=USAGE)
def run(arguments: Arguments) -> int:
    """Measure which kernel is fastest for each matrix product of a model, at each number of rows, on this card.

    An engine does the same at its first start, within engine.tune seconds; here the budget is larger, and what was
    measured before is measured anew. The table lies in the cache folder and holds for this card and these versions of
    torch, Triton and the kernels. Each line shows a number of rows, the kernel, its microseconds and its share of what
    the card can do (reading the weight, or arithmetic, whichever is longer); then the runner-up, and what the rules
    without a measurement would have taken.
    """
    values, config = arguments.values, arguments.config
    named = bool(config.model.path)
    if values["show"]:
        return _show(arguments, named=named)
    import torch

    from inferengine.executor.settings import executor_settings
    from inferengine.executor.tune import measure_model

    if not torch.cuda.is_available():
        raise ConfigError("engine.device", "torch sees no CUDA device; a CPU has nothing to choose from")
    complaint = keep_compiled_kernels()
    if complaint is not None:
        print(f"inferengine tune: {complaint}", file=sys.stderr)
    settings = executor_settings(
        config.with_values(engine={"device": "cuda", "tune": str(values["budget_seconds"])}),
    )
    report = measure_model(settings)
    if report is None:
        raise ConfigError("engine.deterministic", "deterministic mode and fp32 have one kernel each: nothing to choose")
    keys = {key for product in report.products for key in product.measured_keys()}
    _print(report.table, report.environment, keys, as_json=values["json"])
    print(f"measured in {report.seconds:.1f} s", file=sys.stderr)
    return ExitCode.OK


def _show(arguments: Arguments, *, named: bool) -> int:
    """Print what is known of a model's products, or of all."""
    from inferengine.executor.settings import executor_settings
    from inferengine.executor.tune import known_table, shapes_of

    table, environment = known_table()
    keys = set(table.entries)
    if named:
        shapes = shapes_of(executor_settings(arguments.config))
        keys = {key for key in keys if (key.width, key.columns) in shapes}
    _print(table, environment, keys, as_json=arguments.values["json"])
    if not any(table.entries[key] for key in keys):
        print("nothing was measured: run 'inferengine tune MODEL' on the card", file=sys.stderr)
    return ExitCode.OK


def _print(table: Any, environment: Any, keys: set[Any], *, as_json: bool) -> None:
    from inferengine.executor.tools.device_peaks import data_sheet_of
    from inferengine.kernels.cuda.tuning import measured_table

    wanted = measured_table.MeasuredTable({key: table.entries[key] for key in keys if table.entries.get(key)})
    if as_json:
        print(measured_table.to_json(wanted, environment), end="")
        return
    sheet = data_sheet_of(environment.card)
    print(f"{environment.card}, torch {environment.torch}, Triton {environment.triton}, kernels {environment.kernels}")
    for key, rows in sorted(wanted.entries.items()):
        print(f"\n{key.product.name.lower()} of {key.width} x {key.columns}, {key.operands.value}")
        for count in sorted(rows):
            entry = rows[count]
            share = "" if sheet is None else f"{_share(key, count, entry.best_us, sheet._asdict()):6.0%}"
            print(
                f"{count:6}  {_name(entry.best):48} {entry.best_us:9.1f} us{share}"
                f"  then {_name(entry.second)} {entry.second_us:.1f}, rules {entry.rules_us:.1f}"
            )


def _share(key: Any, rows: int, microseconds: float, sheet: Mapping[str, float]) -> float:
    """Of the time that reading the weight takes, or the arithmetic, at the peaks of the data sheet."""
    name = key.operands.name
    item_bytes = 2.0 if name.startswith("DENSE") else 0.5 if name.startswith("W4") else 1.0
    by_reading = key.width * key.columns * item_bytes / (sheet["gb_per_s"] * 1e9)
    by_arithmetic = (
        2 * rows * key.width * key.columns / ((sheet["eight_bit"] if "CODES" in name else sheet["sixteen_bit"]) * 1e12)
    )
    return max(by_reading, by_arithmetic) / (microseconds * 1e-6) if microseconds else 0.0


def _name(choice: Any) -> str:
    if choice is None:
        return "library"
    return " ".join([choice.kernel.name.lower(), *(str(int(each)) for each in choice.config or ())])
