"""Linear least squares with coefficients that are not negative, and with what is known of each beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

FloatArray = npt.NDArray[np.float64]

LEAST_ERROR_FRAC: Final = 1e-3
"""Of the mean target: no measurement is truer."""
TIMES: Final = 4
"""The errors are as large as the last estimate leaves them: so often."""


@dataclass(frozen=True)
class Prior:
    """What is known of a coefficient before measuring: a normal distribution, cut off below 0."""

    mean: float = 0.0
    std: float = math.inf
    """Infinite: nothing is known."""


UNKNOWN: Final = Prior()


@dataclass(frozen=True, eq=False)
class Estimate:
    """Coefficients with their uncertainty.  Shapes: k coefficients."""

    names: tuple[str, ...]
    values: FloatArray
    """(k,) at least 0 each."""
    covariance: FloatArray
    """(k, k) of the normal distribution around the values, from the spread of the rows and the priors.

    Coefficients at 0 are counted as if nothing held them there.
    """
    num_rows: int

    def __getitem__(self, name: str) -> float:
        """The coefficient of this name; 0 if there is none."""
        return float(self.values[self.names.index(name)]) if name in self.names else 0.0

    def std(self, name: str) -> float:
        """Its standard deviation; 0 if there is none."""
        place = self.names.index(name) if name in self.names else None
        return 0.0 if place is None else math.sqrt(self.covariance[place, place])


def estimate(
    columns: Mapping[str, FloatArray], target: FloatArray, weights: FloatArray, priors: Mapping[str, Prior]
) -> Estimate:
    """The most probable coefficients c >= 0 of ``target`` = sum of c[name] * columns[name] + an error.

    Minimises |weights * (target - columns c)|^2 / error^2 + sum of ((c - mean) / std)^2, where the error is the root
    mean square of what the estimate before leaves, and of the first what the first column alone leaves.

    Args:
        columns: (n,) of every coefficient, by name; the first explains most.
        target: (n,) in the unit of column times coefficient.
        weights: (n,) one over the relative standard deviation of each row's error.
        priors: by name; of names that are absent nothing is known.  A column of zeros needs one.
    """
    names = tuple(columns)
    rows = np.stack([columns[name] * weights for name in names], axis=1)
    # Columns are of different units: seconds, bytes, counts.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    rows, wanted = rows / scale, target * weights
    known = np.array([priors.get(name, UNKNOWN).std for name in names])
    means = np.array([priors.get(name, UNKNOWN).mean for name in names]) * scale
    prior_rows = np.diag(1 / (known * scale))
    found = np.zeros(len(names))
    found[0] = rows[:, 0] @ wanted
    error = 1.0
    for _ in range(TIMES):
        left = wanted - rows @ found
        error = max(float(np.sqrt(np.mean(left**2))), LEAST_ERROR_FRAC * float(wanted.mean()))
        found, _ = nnls(
            np.concatenate([rows / error, prior_rows]), np.concatenate([wanted / error, prior_rows @ means])
        )
    covariance = np.linalg.inv(rows.T @ rows / error**2 + prior_rows.T @ prior_rows)
    return Estimate(names, found / scale, covariance / np.outer(scale, scale), len(target))


def expected(priors: Mapping[str, Prior]) -> Estimate:
    """The coefficients as they are known before measuring; all of them have finite priors."""
    values, stds = (np.array([getattr(prior, name) for prior in priors.values()]) for name in ("mean", "std"))
    assert np.isfinite(stds).all(), "of a coefficient without rows something is known"
    return Estimate(tuple(map(str, priors)), values, np.diag(stds**2), 0)
