"""What tasks of one kind have told so far, as sums that any number of records add up in, in any order.

[Note: Evidence]
Least squares need of their rows nothing but sums of products.  So a calibration keeps these sums and not only what was
estimated from them: new records add theirs, and the estimate is the one that all rows together would have given.  Of
calibrations that keep none, the coefficients are known beforehand, as a normal distribution around their values.
Before new records are added, what is known of the same tasks is multiplied by a forgetting factor (``forgetting``),
so that a machine that has changed is followed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from ...shared.schema.calibration import Calibration, Evidence
from ...shared.schema.hardware import Hardware
from ...shared.schema.schedule import TaskKind
from .linear import LEAST_ERROR_FRAC, TIMES, Estimate, FloatArray, Prior, Sums
from .tasks import LOWEST, Coefficient, cold_read_prior, scatter, starting_prior, without_growth, work_prior

_NAMES: Final = tuple(Coefficient)
_DAYS_FRAC: Final = 0.1
"""Of a coefficient without evidence: what calibrations of one machine differ by from day to day."""


def evidence_of(modelled_s: FloatArray, arrived_bytes: FloatArray, measured_s: FloatArray) -> Evidence:
    """Of tasks of one kind; (n,) each of what they should take, read first, and took."""
    present = modelled_s > 0
    rest = measured_s[~present]
    x, y = modelled_s[present], measured_s[present]
    rows = np.stack([x, np.ones_like(x), arrived_bytes[present]], axis=1) / scatter(x)[:, None]
    wanted = y / scatter(x)
    products = rows.T @ wanted
    return Evidence(
        num_tasks=len(x),
        squares=tuple(float(value) for value in (rows.T @ rows).ravel()),
        products=tuple(float(value) for value in products),
        run_products=tuple(float(value) for value in np.outer(products, products).ravel()),
        measured_square=float(wanted @ wanted),
        measured_s=float(y.sum()),
        num_without_work=len(rest),
        without_work_s=float(rest.sum()),
        without_work_square=float(rest @ rest),
    )


def evidence_before(calibration: Calibration, kind: TaskKind) -> Evidence | None:
    """What ``calibration`` knows of ``kind``; None: nothing."""
    if kind in calibration.evidence:
        return calibration.evidence[kind]
    if kind not in calibration.factors and kind not in calibration.overhead_s:
        return None
    factor = calibration.factors.get(kind)
    overhead_s = calibration.overhead_s.get(kind, 0.0)
    known = {Coefficient.OVERHEAD_S: Prior(overhead_s, starting_prior(overhead_s).std)}
    if factor is not None and factor.num_pairs > 0:
        known[Coefficient.SLOPE] = Prior(factor.value, max(factor.relative_std, _DAYS_FRAC) * factor.value)
    arrival, std = (of.get(kind, 0.0) for of in (calibration.arrival_s_per_byte, calibration.arrival_std_s_per_byte))
    if std > 0:
        known[Coefficient.ARRIVAL_S_PER_BYTE] = Prior(arrival, std)
    return Evidence(
        known_precision=tuple(1 / known[name].std ** 2 if name in known else 0.0 for name in _NAMES),
        known_values=tuple(known[name].mean / known[name].std ** 2 if name in known else 0.0 for name in _NAMES),
    )


def together(one: Evidence, other: Evidence, *, forgetting: float = 1.0) -> Evidence:
    """Of all tasks; the sums of ``one`` are multiplied by ``forgetting`` (0..1) first: at 1 nothing is forgotten."""
    sums: dict[str, Any] = {}
    for name in Evidence.model_fields:
        old, new = getattr(one, name), getattr(other, name)
        if isinstance(new, tuple):
            sums[name] = tuple(forgetting * a + b for a, b in zip(old, new, strict=True))
        else:
            sums[name] = forgetting * old + new
    return Evidence(**sums)


def estimate_evidence(evidence: Evidence, hardware: Hardware, run_std_frac: float = 0.0) -> Estimate:
    """The most probable coefficients, as ``estimate_tasks`` has them of tasks one by one ([Note: Evidence]).

    ``run_std_frac``: what runs as a whole differ by.
    """
    precision, values = np.array(evidence.known_precision), np.array(evidence.known_values)
    if evidence.num_tasks == 0 and precision[0] == 0:
        return _without_work(evidence, precision[1], values[1])
    square, product = np.array(evidence.squares).reshape(3, 3), np.array(evidence.products)
    usual_s: float = evidence.measured_s / evidence.num_tasks if evidence.num_tasks else 0.0
    held = [(1, starting_prior(usual_s)), (2, cold_read_prior(hardware))]
    if evidence.num_tasks:
        held.append((0, work_prior(float(square[0, 0] / square[0, 1]))))
    for place, prior in held:
        if precision[place] == 0:
            precision[place] = 1 / prior.std**2
            values[place] = prior.mean / prior.std**2
    count: int = 3 if square[2, 2] > 0 or evidence.known_precision[2] > 0 else 2
    square, product, precision, values = square[:count, :count], product[:count], precision[:count], values[:count]
    scale = np.sqrt(np.diag(square) + precision)
    of_runs = _run_products(evidence)[:count, :count] / np.outer(scale, scale)
    square, product = square / np.outer(scale, scale), product / scale
    precision, values = precision / scale**2, values / scale
    alone = product[0] / square[0, 0] if square[0, 0] > 0 else values[0] / precision[0]
    found, variance = np.array([alone, *[0.0] * (count - 1)]), 1.0
    for _ in range(TIMES if evidence.num_tasks else 1):
        variance = _variance(evidence, square, product, found)
        whole = square / variance + np.diag(precision)
        root = np.linalg.cholesky(whole)
        found, _ = nnls(root.T, np.linalg.solve(root, product / variance + values))
    if evidence.num_tasks and found[0] / scale[0] < LOWEST:
        told = evidence.squares[1], evidence.products[1], evidence.squares[4]
        slope, overhead_s = without_growth(float(alone / scale[0]), *told)
        found = np.array([slope, overhead_s, *[0.0] * (count - 2)]) * scale
    elif found[0] / scale[0] < LOWEST:
        found = np.array([alone, *[0.0] * (count - 1)])
    if evidence.num_tasks:
        sums = Sums(square, evidence.measured_square, evidence.num_tasks, of_runs)
        left = max(0.0, _left(evidence, square, product, found))
        covariance = sums.covariance(np.diag(precision), left, variance, run_std_frac)
    else:
        covariance = np.diag(1 / precision)
    covariance = covariance / np.outer(scale, scale)
    return Estimate(tuple(map(str, _NAMES[:count])), found / scale, covariance, round(evidence.num_tasks))


def _run_products(evidence: Evidence) -> FloatArray:
    """(3, 3) as of ``Sums``; where it is not known, as of one run of all tasks."""
    found = np.array(evidence.run_products).reshape(3, 3)
    return found if found.any() else np.outer(evidence.products, evidence.products)


def _left(evidence: Evidence, square: FloatArray, product: FloatArray, found: FloatArray) -> float:
    """Squares of what ``found`` leaves."""
    return float(evidence.measured_square - 2 * found @ product + found @ square @ found)


def _variance(evidence: Evidence, square: FloatArray, product: FloatArray, found: FloatArray) -> float:
    """Of a row's error: what ``found`` leaves."""
    if not evidence.num_tasks:
        return 1.0
    left = _left(evidence, square, product, found)
    least = LEAST_ERROR_FRAC**2 * evidence.measured_square
    return max(left, least) / evidence.num_tasks


def _without_work(evidence: Evidence, precision: float, value: float) -> Estimate:
    """Tasks without modelled seconds: all that they take is overhead."""
    number = evidence.num_without_work
    mean_s = evidence.without_work_s / number if number else 0.0
    mean_square = evidence.without_work_square / number if number else 0.0
    spread: float = max(mean_square - mean_s**2, (LEAST_ERROR_FRAC * mean_s) ** 2)
    own = number / spread if spread > 0 else 0.0
    if own + precision == 0:
        return Estimate((Coefficient.OVERHEAD_S,), np.array([mean_s]), np.zeros((1, 1)), round(number))
    found = np.array([(own * mean_s + value) / (own + precision)])
    return Estimate((Coefficient.OVERHEAD_S,), found, np.array([[1 / (own + precision)]]), round(number))
