"""Measured steps in a file, so that a cost model can be fitted again without the device, and read in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inferengine.bench.environment import environment
from inferengine.simulation.cost_model import CapturedSteps, CostModel, DeviceProfile, KindCost, StepShape
from inferengine.simulation.fitting import Fit, fit

CALIBRATION = "calibration"


def save_steps(path: Path, profile: DeviceProfile, steps: Mapping[str, Sequence[StepShape]]) -> None:
    """Save measured steps. `steps`: by where they were measured, CALIBRATION among them. Times in microseconds."""
    about = asdict(profile)
    graphs = about.pop("cost")["graphs"]
    document = {
        "environment": environment(),
        "profile": about,
        "graphs": graphs,
        "columns": StepShape._fields,
        "steps": {name: [_row(shape) for shape in shapes] for name, shapes in steps.items()},
    }
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def read_steps(path: Path) -> tuple[dict[str, Any], CapturedSteps | None, dict[str, list[StepShape]]]:
    """Read the profile's sizes and source, the graphs that steps were padded to, and the steps by where they are
    from."""
    document = json.loads(path.read_text())
    graphs = document["graphs"]
    if graphs is not None:
        mixed = tuple((decodes, tokens) for decodes, tokens in graphs["mixed"])
        graphs = CapturedSteps(tuple(graphs["decodes"]), mixed, graphs["prompt_rows"])
    columns = document["columns"]
    steps = {
        name: [_shape(dict(zip(columns, row, strict=True))) for row in rows] for name, rows in document["steps"].items()
    }
    return document["profile"], graphs, steps


def fit_again(path: Path, name: str) -> DeviceProfile:
    """Fit the profile of the steps in a file, as today's fit has it."""
    about, graphs, steps = read_steps(path)
    found = fit(steps[CALIBRATION], graphs)
    about |= {"name": name, "source": {**about["source"], **errors_of(found)}}
    return DeviceProfile(cost=found.cost, **about)


def errors_of(found: Fit) -> dict[str, Any]:
    """Return what a profile's source says about its fit."""
    return {
        "measured_steps": found.num_steps,
        "median_error": round(found.median_error, 4),
        "p90_error": round(found.p90_error, 4),
    }


def describe(cost: CostModel) -> str:
    """Format the coefficients, a line for each kind of steps."""
    lines = []
    for name in ("decodes", "prompts", "launched"):
        kind: KindCost | None = getattr(cost, name)
        if kind is not None:
            curve = ", ".join(f"{tokens:g}: {1e3 * seconds:.2f}" for tokens, seconds in kind.curve)
            kv = ", ".join(f"{1e6 * seconds:.4f} ({decodes:g})" for decodes, seconds in kind.kv_token_s)
            lines.append(
                f"{name:<9}ms {curve}; us per row {1e6 * kind.row_s:.2f}, KV token {kv}, "
                f"pair {1e6 * kind.pair_s:.5f}, change {1e6 * kind.change_s:.0f}"
            )
    host = cost.host
    lines.append(
        f"host     ms {1e3 * host.step_s:.2f}, launching {1e3 * host.launch_s:.2f}; us per row {1e6 * host.row_s:.2f}"
    )
    return "\n".join(lines)


def _row(shape: StepShape) -> list[float]:
    row = shape._replace(seconds=round(1e6 * shape.seconds, 1), host_s=round(1e6 * shape.host_s))
    return [round(float(value), 1) if isinstance(value, float) else int(value) for value in row]


def _shape(row: dict[str, Any]) -> StepShape:
    shape = StepShape(**row)
    return shape._replace(
        seconds=1e-6 * shape.seconds,
        host_s=1e-6 * shape.host_s,
        is_changed=bool(shape.is_changed),
        is_device_time=bool(shape.is_device_time),
    )
