"""From measured steps to a CostModel: non-negative least squares for each candidate knee; the best one is kept.

Every coefficient is a time, so none may be negative; errors are taken relative to the step's time, so that a decode of
two milliseconds counts as much as a prompt of two hundred: relative to the time that the model gives it, by iteration.
(Relative to the measured one, a step that happened to be fast would count more than one that happened to be slow, and
every prediction would be too short: by 4 % where times scatter by 20 %.) A machine that was busy with something else
gives steps that are far too long: their weight falls with their error (Huber, "Robust estimation of a location
parameter", 1964), to nothing at twice their time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferengine.simulation.cost_model import CapturedSteps, CostModel, StepShape

Matrix = NDArray[np.float64]
_KNEES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_EAGER_KNEES = (0, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_HUBER = 0.5  # relative error beyond which a step counts less: small ones belong to the mean that a load will see,
_DISTURBED = 1.0  # and beyond which it does not count at all
_REWEIGHTINGS = 12
_SEARCH_REWEIGHTINGS = 4  # while knees are compared
_COEFFICIENTS = ("step_s", "chunk_step_s", "token_s", "row_s", "kv_token_s", "pair_s", "change_s")


class Fit(NamedTuple):
    """A cost model and how far it is off on the steps it was made from (shares of each step's time)."""

    cost: CostModel
    num_steps: int
    median_error: float
    p90_error: float


def fit(shapes: Sequence[StepShape], graphs: CapturedSteps | None = None) -> Fit:
    """`graphs`: what steps are padded to on this device. Raises ValueError where there are fewer measured steps than
    coefficients."""
    if len(shapes) < len(_COEFFICIENTS):
        raise ValueError(f"{len(shapes)} measured steps cannot fix {len(_COEFFICIENTS)} coefficients")
    times = np.array([shape.seconds for shape in shapes], dtype=np.float64)
    if not np.all(times > 0):
        raise ValueError("every measured step needs a time above 0")
    eager = _EAGER_KNEES if graphs is not None else (0,)
    models = [
        CostModel(0.0, 0.0, float(knee), eager_knee=float(most), graphs=graphs) for knee in _KNEES for most in eager
    ]
    features = _features(shapes)
    if graphs is not None:  # a captured step costs the same whose rows it has: what else would be put on the change?
        features[:, _COEFFICIENTS.index("change_s")] = 0.0
    best, least = models[0], math.inf
    for model in models:
        _, loss = _robust(_with_tokens(features, shapes, model), times, _SEARCH_REWEIGHTINGS)
        if loss < least * (1.0 - 1e-9):
            best, least = model, loss
    solution, _ = _robust(_with_tokens(features, shapes, best), times, _REWEIGHTINGS)
    values: dict[str, Any] = dict(zip(_COEFFICIENTS, map(float, solution), strict=True))
    cost = replace(best, **values)
    errors = np.abs(np.array([cost.seconds(shape) for shape in shapes]) / times - 1.0)
    return Fit(cost, len(shapes), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _robust(features: Matrix, times: Matrix, rounds: int) -> tuple[Matrix, float]:
    """The coefficients for which `features @ x` is nearest to `times`, and what is left, both by Huber's measure of
    errors relative to the prediction."""
    weights, scale = np.ones(len(times)), times
    for _ in range(rounds):
        root = np.sqrt(weights) / scale
        solution = nonnegative_least_squares(features * root[:, None], times * root)
        scale = np.maximum(features @ solution, 1e-3 * times)
        error = np.abs(times / scale - 1.0)
        weights = np.where(error < _DISTURBED, np.minimum(1.0, _HUBER / np.maximum(error, 1e-12)), 1e-6)
    error = np.abs(np.log(times / scale))  # symmetric, so that no model gains by predicting too much
    loss = np.where(error <= _HUBER, 0.5 * error**2, _HUBER * (error - 0.5 * _HUBER))
    return solution, float(loss.sum())


def _features(shapes: Sequence[StepShape]) -> Matrix:
    """One row a step, one column a coefficient."""
    rows = [
        (
            1.0,
            float(shape.has_chunks),
            0.0,
            float(shape.num_rows),
            float(shape.num_kv_tokens),
            shape.num_pairs,
            float(shape.is_changed),
        )
        for shape in shapes
    ]
    return np.array(rows, dtype=np.float64)


def _with_tokens(features: Matrix, shapes: Sequence[StepShape], model: CostModel) -> Matrix:
    """The same with the tokens that these knees make of each step."""
    found = features.copy()
    found[:, _COEFFICIENTS.index("token_s")] = [model.tokens_of(shape) for shape in shapes]
    return found


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
