"""From measured steps to a CostModel: non-negative least squares for each candidate knee; the best one is kept.

Every coefficient is a time, so none may be negative; errors are taken relative to the step's time, so that a decode of
two milliseconds counts as much as a prompt of two hundred. A machine that was busy with something else gives steps that
are far too long: their weight falls with their error (Huber, "Robust estimation of a location parameter", 1964).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferengine.simulation.cost_model import CostModel, StepShape

Matrix = NDArray[np.float64]
_KNEES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_HUBER = 0.1  # relative error beyond which a step counts less
_REWEIGHTINGS = 12
_COEFFICIENTS = ("step_s", "chunk_step_s", "token_s", "row_s", "kv_token_s", "pair_s")


class Fit(NamedTuple):
    """A cost model and how far it is off on the steps it was made from (shares of each step's time)."""

    cost: CostModel
    num_steps: int
    median_error: float
    p90_error: float


def fit(shapes: Sequence[StepShape]) -> Fit:
    """Raises ValueError where there are fewer measured steps than coefficients."""
    if len(shapes) < len(_COEFFICIENTS):
        raise ValueError(f"{len(shapes)} measured steps cannot fix {len(_COEFFICIENTS)} coefficients")
    times = np.array([shape.seconds for shape in shapes], dtype=np.float64)
    if not np.all(times > 0):
        raise ValueError("every measured step needs a time above 0")
    best: tuple[float, CostModel] | None = None
    for knee in _KNEES:
        solution, residual = _robust(_features(shapes, knee) / times[:, None])
        if best is None or residual < best[0] * (1.0 - 1e-9):
            values = dict(zip(_COEFFICIENTS, map(float, solution), strict=True))
            best = residual, CostModel(knee=float(knee), **values)
    assert best is not None
    cost = best[1]
    errors = np.abs(np.array([cost.seconds(shape) for shape in shapes]) / times - 1.0)
    return Fit(cost, len(shapes), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _robust(relative: Matrix) -> tuple[Matrix, float]:
    """The coefficients for which `relative @ x` is nearest to 1, and what is left, both by Huber's measure."""
    target = np.ones(len(relative))
    weights = target
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        solution = nonnegative_least_squares(relative * root[:, None], target * root)
        error = np.abs(relative @ solution - 1.0)
        weights = np.minimum(1.0, _HUBER / np.maximum(error, 1e-12))
    loss = np.where(error <= _HUBER, 0.5 * error**2, _HUBER * (error - 0.5 * _HUBER))
    return solution, float(loss.sum())


def _features(shapes: Sequence[StepShape], knee: int) -> Matrix:
    rows = [
        (
            1.0,
            float(shape.num_rows > shape.num_decodes),
            float(max(knee, shape.num_tokens)),
            float(shape.num_rows),
            float(shape.num_kv_tokens),
            shape.num_pairs,
        )
        for shape in shapes
    ]
    return np.array(rows, dtype=np.float64)


def nonnegative_least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """The x >= 0 that minimises |matrix @ x - target|: the active-set method of Lawson and Hanson (1974)."""
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
