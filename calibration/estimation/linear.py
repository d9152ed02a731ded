"""Linear least squares with coefficients that are not negative, and with what is known of each beforehand.

[Note: As many rows as coefficients]
What an estimate leaves of its rows says how large their errors are only as far as rows are left: two rows that two
coefficients pass through leave nothing, however wrong they are.  So the squares that are left are divided by the rows
that no coefficient took (the trace of the hat matrix counts those that were taken), and a few rows with an error that
is usual stand beside them (an inverse gamma distribution of the variance).

[Note: Runs as a whole]
What slows a run down slows all of its rows, and no number of them averages that out.  A run whose targets are all
larger by a part d moves the estimate by d C b / e^2, where C is the covariance, e^2 the variance of a row's error and b
the products of the run's columns with its targets; so the sum of b b' over runs is what the covariance needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LEAST_ERROR_FRAC: Final = 1e-3
"""Of the mean target: no measurement is truer."""
USUAL_ERROR_FRAC: Final = 0.05
"""Of a target: what means over the iterations of one run differ by from what a fit to many rows says."""
USUAL_ROWS: Final = 2.0
"""Rows that this counts as ([Note: As many rows as coefficients])."""
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
    columns: Mapping[str, FloatArray],
    target: FloatArray,
    weights: FloatArray,
    priors: Mapping[str, Prior],
    runs: IntArray | None = None,
    run_std_frac: float = 0.0,
) -> Estimate:
    """The most probable coefficients c >= 0 of ``target`` = sum of c[name] * columns[name] + an error.

    Minimises |weights * (target - columns c)|^2 / error^2 + sum of ((c - mean) / std)^2, where the error is the root
    mean square of what the estimate before leaves, and of the first what the first column alone leaves.  The
    covariance is that of [Note: As many rows as coefficients] and [Note: Runs as a whole].

    Args:
        columns: (n,) of every coefficient, by name; the first explains most.
        target: (n,) in the unit of column times coefficient.
        weights: (n,) one over the relative standard deviation of each row's error.
        priors: by name; of names that are absent nothing is known.  A column of zeros needs one.
        runs: (n,) which run each row is of; None: one run of all.
        run_std_frac: standard deviation of what a run as a whole is slower or faster by.
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
    left = wanted - rows @ found
    of_run = np.zeros(len(target), dtype=np.int64) if runs is None else runs
    own = np.stack([rows[of_run == run].T @ wanted[of_run == run] for run in np.unique(of_run)])
    sums = Sums(rows.T @ rows, float(wanted @ wanted), len(target), own.T @ own)
    covariance = sums.covariance(prior_rows.T @ prior_rows, float(left @ left), error**2, run_std_frac)
    return Estimate(names, found / scale, covariance / np.outer(scale, scale), len(target))


@dataclass(frozen=True, eq=False)
class Sums:
    """What rows have told, as sums.  Shapes: k coefficients."""

    square: FloatArray
    """(k, k) products of every two columns."""
    wanted: float
    """Squares of the targets."""
    num_rows: float
    run_products: FloatArray
    """(k, k) sum over runs of b b' ([Note: Runs as a whole])."""

    def covariance(self, precision: FloatArray, left: float, variance: float, run_std_frac: float) -> FloatArray:
        """(k, k) of the normal distribution around an estimate.

        Args:
            precision: (k, k) one over the variances of what was known.
            left: squares of what the estimate leaves of the targets.
            variance: of a row's error, as the estimate had it.
            run_std_frac: as of ``estimate``.
        """
        whole = self.square / variance + precision
        taken = float(np.trace(np.linalg.solve(whole, self.square / variance)))
        usual = USUAL_ROWS * USUAL_ERROR_FRAC**2 * self.wanted / self.num_rows
        variance = (left + usual) / (max(0.0, self.num_rows - taken) + USUAL_ROWS)
        found = np.linalg.inv(self.square / variance + precision)
        of_runs: FloatArray = found @ self.run_products @ found * (run_std_frac / variance) ** 2
        return found + of_runs


def expected(priors: Mapping[str, Prior]) -> Estimate:
    """The coefficients as they are known before measuring; all of them have finite priors."""
    values, stds = (np.array([getattr(prior, name) for prior in priors.values()]) for name in ("mean", "std"))
    assert np.isfinite(stds).all(), "of a coefficient without rows something is known"
    return Estimate(tuple(map(str, priors)), values, np.diag(stds**2), 0)
