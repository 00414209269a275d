"""Fits a CostModel to measured steps: non-negative least squares for each kind of steps.

Every coefficient is a time, so none may be negative. Each CUDA graph has a point of the curve over tokens to itself.
Without graphs the curve may not fall: it is made of the rises between its points, each of them a coefficient.

Errors are taken relative to the step's time, so that a decode of two milliseconds counts as much as a prompt of two
hundred: relative to the time that the model gives it, by iteration. (Relative to the measured one, a step that happened
to be fast would count more than one that happened to be slow, and every prediction would be too short: by 4 % where
times scatter by 20 %.) A machine that was busy with something else gives steps that are far too long: their weight
falls with their error (Huber, "Robust estimation of a location parameter", 1964), to nothing at twice their time.

Where the host works beside the device, only steps that it waited for tell the device's time; the others last as long as
the host took for the next one, which `HostCost` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferengine.simulation.cost_model import (
    CapturedSteps,
    CostModel,
    Curve,
    HostCost,
    KindCost,
    StepShape,
    kind_of,
)

Matrix = NDArray[np.float64]
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
KV_ROWS = (1.0, 16.0, 128.0)  # decodes for which reading a token of KV has a time of its own
_OF_A_SIZE = 2  # steps that a graph needs for a point of its own
_BETWEEN = 3  # steps that a piece of the curve needs at least
_HUBER = 0.5  # relative error beyond which a step counts less: small ones belong to the mean that a load will see;
_LEAST_HUBER, _SCATTERS = 0.03, 4.0  # less where steps scatter little: so many times their median error;
_DISTURBED = 1.0  # and beyond which it does not count at all
_REWEIGHTINGS = 12
_LEAST = 12  # steps of a kind that can be fitted


class Fit(NamedTuple):
    """A cost model and how far it is off on the steps it was made from (shares of each step's time)."""

    cost: CostModel
    num_steps: int
    median_error: float
    p90_error: float


def fit(shapes: Sequence[StepShape], graphs: CapturedSteps | None = None) -> Fit:
    """Fit a cost model. `graphs`: what steps are padded to on this device. Raises ValueError for too few steps."""
    if not all(shape.seconds > 0 for shape in shapes):
        raise ValueError("every measured step needs a time above 0")
    kinds: dict[str, list[tuple[int, StepShape]]] = {"decodes": [], "prompts": [], "launched": []}
    for shape in shapes:
        kind, tokens = kind_of(shape, graphs)
        kinds[kind].append((tokens, shape))
    for kind in ("decodes", "prompts"):
        if len(kinds[kind]) < _LEAST:
            raise ValueError(f"{len(kinds[kind])} measured steps of kind '{kind}' cannot fix its coefficients")
    launched = kinds["launched"]
    captured = graphs is not None
    cost = CostModel(
        fit_kind(kinds["decodes"], captured, on_card=captured),
        fit_kind(kinds["prompts"], captured, on_card=captured),
        fit_kind(launched, False, on_card=True) if len(launched) >= _LEAST else None,
        fit_host(shapes, graphs),
        graphs,
    )
    judged = [shape for shape in shapes if shape.is_device_time] or list(shapes)
    errors = np.abs(np.array([cost.seconds(shape) / shape.seconds for shape in judged]) - 1.0)
    return Fit(cost, len(shapes), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def fit_kind(steps: Sequence[tuple[int, StepShape]], captured: bool, *, on_card: bool) -> KindCost:
    """Fit the coefficients of one kind of steps, each given with the tokens that it is computed as.

    `captured`: those tokens are the sizes of graphs. `on_card`: the change of rows gets no coefficient. It costs
    nothing there, and since prompts always change the rows, the two could not be told apart.
    """
    device = [item for item in steps if item[1].is_device_time]
    steps = device if len(device) >= _LEAST else steps
    tokens = np.array([count for count, _ in steps], dtype=np.float64)
    points = _sizes(tokens) if captured else _knots(tokens)
    chunks = any(shape.has_chunks for _, shape in steps)
    columns = _shares(tokens, points) if captured else [np.ones(len(steps)), *_rises(tokens, points)]
    decodes = np.array([shape.num_decodes for _, shape in steps], dtype=np.float64)
    kv_points = [rows for rows in KV_ROWS if rows <= decodes.max(initial=KV_ROWS[0])]
    columns += [share * np.array([shape.num_kv_tokens for _, shape in steps]) for share in _shares(decodes, kv_points)]
    for values, used in (
        ([shape.num_rows for _, shape in steps], chunks),
        ([shape.num_pairs for _, shape in steps], chunks),
        ([shape.is_changed for _, shape in steps], not on_card),
    ):
        columns.append(np.array(values, dtype=np.float64) * float(used))
    times = np.array([shape.seconds for _, shape in steps], dtype=np.float64)
    solution = robust_least_squares(np.stack(columns, axis=1), times)
    heights, kv_token_s, others = np.split(solution, [len(points), len(points) + len(kv_points)])
    if not captured:
        heights = np.cumsum(heights)
    row_s, pair_s, change_s = map(_rounded, others)
    return KindCost(_curve(points, heights), row_s, _curve(kv_points, kv_token_s), pair_s, change_s)


def fit_host(shapes: Sequence[StepShape], graphs: CapturedSteps | None) -> HostCost:
    """Fit the time of the host beside the device. 0 where it was not measured: then it is part of the steps' times."""
    measured = [shape for shape in shapes if shape.host_s > 0]
    if len(measured) < _LEAST:
        return HostCost()
    rows = [(1.0, float(shape.num_rows), float(kind_of(shape, graphs)[0] == "launched")) for shape in measured]
    times = np.array([shape.host_s for shape in measured], dtype=np.float64)
    # What others do with the host's cores delays launches by half for seconds: that belongs to their mean.
    return HostCost(*map(_rounded, robust_least_squares(np.array(rows), times, scatters=math.inf)))


def _curve(points: Sequence[float], heights: Matrix) -> Curve:
    return tuple((float(point), _rounded(height)) for point, height in zip(points, heights, strict=True))


def _rounded(seconds: float) -> float:
    """Round to as many digits as a measurement has."""
    return float(f"{seconds:.4g}")


def _sizes(tokens: Matrix) -> list[float]:
    """Return the points of a curve over graphs: each has a time of its own, and a smaller one may take longer than a
    larger."""
    sizes, counts = np.unique(tokens, return_counts=True)
    return [float(size) for size, count in zip(sizes, counts, strict=True) if count >= _OF_A_SIZE or size == sizes[-1]]


def _shares(tokens: Matrix, points: Sequence[float]) -> list[Matrix]:
    """Return how near each step is to each point: 1 there, 0 from its neighbours on."""
    return [np.interp(tokens, points, row) for row in np.eye(len(points))]


def _knots(tokens: Matrix) -> list[float]:
    """Return the points of a curve that may not fall: the smallest and the largest step, and those of KNOTS that have
    enough steps on both sides."""
    least, most = float(tokens.min()), float(tokens.max())
    found = [least]
    for knot in (*(float(knot) for knot in KNOTS if least < knot < most), most):
        if np.count_nonzero((tokens > found[-1]) & (tokens <= knot)) >= _BETWEEN:
            found.append(knot)
    if most > least:
        found = [*found[:-1], most] if len(found) > 1 else [least, most]
    return found


def _rises(tokens: Matrix, knots: Sequence[float]) -> list[Matrix]:
    """Return how much of each rise from one point to the next a step has: from 0 to 1."""
    return [np.clip((tokens - left) / (right - left), 0.0, 1.0) for left, right in pairwise(knots)]


def robust_least_squares(features: Matrix, times: Matrix, scatters: float = _SCATTERS) -> Matrix:
    """Return the x >= 0 for which `features @ x` is nearest to `times`, by Huber's measure of errors relative to the
    prediction. `scatters`: median errors beyond which a step counts less."""
    weights, scale = np.ones(len(times)), times
    solution = np.zeros(features.shape[1])
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights) / scale
        solution = nonnegative_least_squares(features * root[:, None], times * root)
        scale = np.maximum(features @ solution, 1e-3 * times)
        error = np.abs(times / scale - 1.0)
        limit = min(_HUBER, max(_LEAST_HUBER, scatters * float(np.median(error))))
        weights = np.where(error < _DISTURBED, np.minimum(1.0, limit / np.maximum(error, 1e-12)), 1e-6)
    return solution


def nonnegative_least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """Return the x >= 0 that minimises |matrix @ x - target|: the active-set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale  # columns of one length: times per step and per attention pair differ by 10^9
    count = scaled.shape[1]
    solution = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10:
            break
        passive[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if trial[passive].min() > 0.0:
                solution = trial
                break
            falling = passive & (trial <= 0.0)
            steps = solution[falling] / (solution[falling] - trial[falling])
            solution = solution + float(steps.min()) * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
            if not passive.any():
                break
    result: Matrix = solution / scale
    return result
