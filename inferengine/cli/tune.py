"""`inferengine tune`: measures which kernels a model's matrix products, decode attention and experts take on this card,
and shows the table."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from inferengine.cli.command import Arguments, Option, command
from inferengine.config import keep_compiled_kernels
from inferengine.errors import ConfigError, ExitCode

if TYPE_CHECKING:  # at run time torch is imported only by commands that need it
    from inferengine.kernels.cuda.dispatch import AttentionKey, DecodeConfig, KernelChoice, ProductKey
    from inferengine.kernels.cuda.moe.configurations import ExpertsChoice, ExpertsKey
    from inferengine.kernels.cuda.tuning.choices import ChoiceEntry
    from inferengine.kernels.cuda.tuning.measured_table import Environment, MeasuredTable

DEFAULT_BUDGET_S = 60.0
OPTIONS = {
    "options": (
        Option("--budget-seconds S", "stop measuring after this long; what is left keeps its rules", DEFAULT_BUDGET_S),
        Option("--show", "measure nothing: print what is known of this model, or without MODEL of all shapes"),
        Option("--json", "print the table as JSON"),
    )
}
USAGE = (
    "MODEL [--budget-seconds S] [--json] [--config FILE] [--section.key VALUE ...]",
    "--show [MODEL] [--json]",
)


@command(OPTIONS, takes_model=True, usage=USAGE)
def run(arguments: Arguments) -> int:
    """Measure which kernel is fastest for each matrix product of a model, its decode attention and its experts, at each
    number of rows, on this card.

    An engine does the same at its first start, within engine.tune seconds; here the budget is larger, and what was
    measured before is measured anew. The table lies in the cache folder and holds for this card and these versions of
    torch, Triton and the kernels. Each line shows a number of rows, the kernel, its microseconds and its share of what
    the card can do (reading weights or keys and values, or arithmetic, whichever is longer); then the runner-up, and
    what the rules without a measurement would have taken. Attention has a line for each mean context, experts one for
    tokens that are spread evenly and one for a skewed router: one choice serves all of them.
    """
    values, config = arguments.values, arguments.config
    if values["show"]:
        return _show(arguments)
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
    _print(report.table, report.environment, report.keys, as_json=values["json"])
    print(f"measured in {report.seconds:.1f} s", file=sys.stderr)
    return ExitCode.OK


def _show(arguments: Arguments) -> int:
    """Print what is known of the model that is named, or of all shapes."""
    from inferengine.executor.settings import executor_settings
    from inferengine.executor.tune import keys_in, known_table

    table, environment = known_table()
    keys: Collection[ProductKey | AttentionKey | ExpertsKey] = {*table.entries, *table.choices}
    if arguments.config.model.path:
        keys = keys_in(table, executor_settings(arguments.config))
    _print(table, environment, keys, as_json=arguments.values["json"])
    if not any(rows for of in (table.entries, table.choices) for key, rows in of.items() if key in keys):
        print("nothing was measured: run 'inferengine tune MODEL' on the card", file=sys.stderr)
    return ExitCode.OK


def _print(
    table: MeasuredTable,
    environment: Environment,
    keys: Collection[ProductKey | AttentionKey | ExpertsKey],
    *,
    as_json: bool,
) -> None:
    from inferengine.executor.tools.device_peaks import data_sheet_of
    from inferengine.kernels.cuda.tuning import measured_table

    wanted = measured_table.MeasuredTable(
        {key: rows for key, rows in table.entries.items() if rows and key in keys},
        {key: rows for key, rows in table.choices.items() if rows and key in keys},
    )
    if as_json:
        print(measured_table.to_json(wanted, environment), end="")
        return
    sheet = data_sheet_of(environment.card)
    print(f"{environment.card}, torch {environment.torch}, Triton {environment.triton}, kernels {environment.kernels}")
    for key, rows in sorted(wanted.entries.items()):
        print(f"\n{key.product.name.lower()} of {key.width} x {key.columns}, {key.operands.value}")
        for count in sorted(rows):
            entry = rows[count]
            share = "" if sheet is None else f"{_product_share(key, count, entry.best_us, sheet):6.0%}"
            print(
                f"{count:6}  {_product_name(entry.best):48} {entry.best_us:9.1f} us{share}"
                f"  then {_product_name(entry.second)} {entry.second_us:.1f}, rules {entry.rules_us:.1f}"
            )
    for choice_key, choices in sorted(wanted.choices.items(), key=lambda item: (type(item[0]).__name__, item[0])):
        print(f"\n{_title(choice_key)}")
        for count in sorted(choices):
            for line in _choice_lines(choice_key, count, choices[count], sheet):
                print(line)


def _title(key: AttentionKey | ExpertsKey) -> str:
    """Return the title of a measurement that is not of a matrix product."""
    from inferengine.kernels.cuda.dispatch import AttentionKey

    if isinstance(key, AttentionKey):
        window = f", window {key.window}" if key.window else ""
        return (
            f"decode attention of {key.num_heads} heads, {key.num_kv_heads} of keys and values, {key.head_dim} wide, "
            f"{key.cache_bits} bits, blocks of {key.block_size}{window}"
        )
    return (
        f"experts: {key.num_chosen} of {key.num_experts}, {key.num_held} here, gate and up {key.rows} x {key.columns}, "
        f"{key.format}"
    )


def _choice_lines(key: AttentionKey | ExpertsKey, rows: int, entry: ChoiceEntry, sheet: Any) -> Iterator[str]:
    """Yield one line for each case of an entry. `sheet`: the card's DataSheet, None for an unknown card."""
    for case in sorted(entry.times, key=lambda each: (len(each), each)):
        times = entry.times[case]
        share = ""
        if sheet is not None and case != "skewed":  # a skewed router reads fewer experts, nobody knows how many
            share = f"{_choice_share(key, rows, case, times.best_us, sheet):6.0%}"
        yield (
            f"{rows:6} {case:>6}  {_choice_name(entry.best):48} {times.best_us:9.1f} us{share}"
            f"  then {_choice_name(entry.second)} {times.second_us:.1f}, rules {times.rules_us:.1f}"
        )


def _choice_share(key: AttentionKey | ExpertsKey, rows: int, case: str, microseconds: float, sheet: Any) -> float:
    """Return the share of the peak: the least time for reading keys and values, or experts' weights, or for their
    arithmetic, over the measured time."""
    from inferengine.kernels.cuda.dispatch import AttentionKey
    from inferengine.kernels.cuda.tuning.tuned_attention import TunedAttention
    from inferengine.kernels.cuda.tuning.tuned_experts import TunedExperts

    if isinstance(key, AttentionKey):
        context = int(case)
        num_bytes: float = TunedAttention(key, 1, rows, context, rows * context).read_bytes(rows, context)
        operations = 0.0
    else:
        experts = TunedExperts(key, "", 1, rows)
        num_bytes, operations = experts.read_bytes(rows), experts.operations(rows)
    seconds = max(num_bytes / (sheet.gb_per_s * 1e9), operations / (sheet.sixteen_bit * 1e12))
    return seconds / (microseconds * 1e-6) if microseconds else 0.0


def _choice_name(choice: DecodeConfig | ExpertsChoice) -> str:
    from inferengine.kernels.cuda.dispatch import DecodeConfig

    if isinstance(choice, DecodeConfig):
        numbers = (choice.block_tokens, choice.num_splits, choice.num_warps, choice.num_stages, choice.min_tiles)
        return " ".join([*map(str, numbers), "" if choice.fused else "apart"]).strip()
    products = (" ".join(str(int(each)) for each in config) for config in (choice.gate_up, choice.down))
    return ("grouped " if choice.is_grouped else "pairs ") + " / ".join(products)


def _product_share(key: ProductKey, rows: int, microseconds: float, sheet: Any) -> float:
    """Return the share of the data sheet's peak: the least time for reading the weight, or for the arithmetic, over the
    measured time."""
    name = key.operands.name
    item_bytes = 2.0 if name.startswith("DENSE") else 0.5 if name.startswith("W4") else 1.0
    by_reading = key.width * key.columns * item_bytes / (sheet.gb_per_s * 1e9)
    tflops = sheet.eight_bit if "CODES" in name else sheet.sixteen_bit
    by_arithmetic = 2 * rows * key.width * key.columns / (tflops * 1e12)
    return max(by_reading, by_arithmetic) / (microseconds * 1e-6) if microseconds else 0.0


def _product_name(choice: KernelChoice | None) -> str:
    if choice is None:
        return "library"
    return " ".join([choice.kernel.name.lower(), *(str(int(each)) for each in choice.config or ())])
