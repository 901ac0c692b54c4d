"""Fits a handful of constants. In: a function from constants to residuals, where to begin. Out: the constants.

Levenberg 1944 and Marquardt 1963 on the logarithms of the constants, so that none changes sign, with numeric derivatives and
residuals beyond a limit weighted down (Huber 1964): a few odd measurements do not bend a curve. It finds the nearest minimum only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
STEP = 1e-4  # of a logarithm, for derivatives


def fit(
    residuals: Callable[[dict[str, float]], Vector],
    start: Mapping[str, float],
    *,
    limit: float = 0.1,
    rounds: int = 40,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, float]:
    """Constants near `start` with the least sum of squares of `residuals`, which count less beyond `limit`.

    Args:
        residuals: one number a measurement, for example log(predicted / measured); of constants by name.
        bounds: (least, most) by name; a constant that is not there may be anything above zero.

    Raises:
        ValueError: a constant to start from that is not above zero.

    >>> import numpy as np
    >>> x = np.array([1.0, 2.0, 4.0])
    >>> found = fit(lambda c: np.log((c["a"] + c["b"] * x) / (3.0 + 2.0 * x)), {"a": 1.0, "b": 1.0})
    >>> round(found["a"], 3), round(found["b"], 3)
    (3.0, 2.0)
    """
    names = list(start)
    if any(start[name] <= 0 for name in names):
        raise ValueError(f"constants to start from are above zero, and these are {dict(start)}")
    low, high = (np.array([np.log((bounds or {}).get(n, (1e-30, 1e30))[i]) for n in names]) for i in (0, 1))

    def at(point: Vector) -> Vector:
        return residuals(dict(zip(names, np.exp(point).tolist(), strict=True)))

    def loss(found: Vector) -> float:
        size = np.abs(found)
        return float(np.where(size <= limit, size**2, 2 * limit * size - limit**2).sum())

    point = np.clip(np.log([start[name] for name in names]), low, high)
    now = at(point)
    damping = 1e-2
    for _ in range(rounds):
        slope = np.empty((len(now), len(names)))
        for i in range(len(names)):
            moved = point.copy()
            moved[i] += STEP if point[i] + STEP <= high[i] else -STEP
            slope[:, i] = (at(moved) - now) / (moved[i] - point[i])
        weight = np.minimum(1.0, limit / np.maximum(np.abs(now), 1e-12))
        normal, gradient = slope.T @ (slope * weight[:, None]), slope.T @ (now * weight)
        better = False
        while damping < 1e9:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            tried = np.clip(point + np.clip(move, -1.0, 1.0), low, high)
            there = at(tried)
            if loss(there) < loss(now):
                better = loss(there) < loss(now) * (1 - 1e-6)
                point, now, damping = tried, there, max(damping / 5, 1e-9)
                break
            damping *= 5
        if not better:
            break
    return dict(zip(names, np.exp(point).tolist(), strict=True))


def mean_abs(errors: Sequence[float] | Vector) -> float:
    """Mean of absolute values, in percent of one; 0 of nothing."""
    return 100 * float(np.mean(np.abs(errors))) if len(errors) else 0.0
