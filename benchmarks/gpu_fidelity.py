"""Predicted against measured, on a GPU: calibrate by three plans, predict others, measure these one after another.

The same question as that of ``fidelity.py``, which lets all plans train side by side, since a shared CPU is now faster
and now slower.  A GPU is not, and what its allocator holds would be that of all of them.

Memory on CUDA comes as early and goes as late as in any timing of a schedule ([Note: Memory on one stream] in
``shared/order/memory_events.py``), so measured peaks are held against what the schedule guarantees.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from gpu_subject import Clock, Machine, OutOfTime, Section, described, measure
from scipy.stats import spearmanr

from protwin.calibration.fitting.fit import Pair, fit_calibration
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.fitting.subject import Subject
from protwin.runtime.model.identity import software_versions
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Contention
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search

MEAN_ITERATION_ERROR: Final = 0.10
WORST_ITERATION_ERROR: Final = 0.25
MEAN_PEAK_ERROR: Final = 0.02
RANK_CORRELATION: Final = 0.8
OVER_BUSIEST: Final = 1.10
"""A measured iteration over its busiest lane, where the simulated one is within 2 % of it."""
_JUDGED: Final = (
    "all kept, nothing persistent, few buffers",
    "all kept, half persistent",
    "all checkpointed, everything persistent",
    "all checkpointed, nothing persistent, prefetch 3",
    "half checkpointed, nothing persistent",
    "quarter checkpointed, double chunks",
)


def judge(
    section: Section, clock: Clock, machine: Machine, subject: Subject, contention: Sequence[Contention], plan_s: float
) -> None:
    """Fit to three plans and judge by others; those that no time is left for (``plan_s`` each) are told."""
    section.found["subject"] = described(subject)
    records = []
    for plan in bootstrap_plans(subject.workload):
        clock.check(plan_s)
        records.append(measure(subject, plan))
    calibration = fit_calibration(
        [Pair(subject.workload, record) for record in records],
        subject.hardware,
        contention=contention,
        machine=subject.make_device().description,
        software=software_versions(),
    )
    section.found["factors"] = {str(kind): factor.value for kind, factor in calibration.factors.items()}
    rows: list[dict[str, Any]] = []
    section.found["plans"] = rows
    try:
        for name, plan in _judged(subject, calibration).items():
            clock.check(plan_s)
            predicted = simulate(plan, subject.workload, subject.hardware, calibration)
            other_bytes = machine.other_bytes(subject.batch)
            rows.append(_row(name, predicted, measure(subject, plan), other_bytes))
    except OutOfTime:
        section.not_done = f"time for {len(rows)} plans only"
    if len(rows) < 3:
        return
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    section.check("mean error of iteration times", statistics.fmean(errors), MEAN_ITERATION_ERROR)
    section.check("worst error of iteration times", max(errors), WORST_ITERATION_ERROR)
    peaks = [abs(row["measured_peak_bytes"] / row["guaranteed_peak_bytes"] - 1) for row in rows]
    section.check("mean error of peaks", statistics.fmean(peaks), MEAN_PEAK_ERROR)
    ranks = spearmanr([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]).statistic
    section.check("rank correlation", float(ranks), RANK_CORRELATION, at_least=True)
    overlapping = [row for row in rows if row["predicted_over_busiest"] <= 1.02]
    section.found["plans that should overlap"] = [row["name"] for row in overlapping]
    for row in overlapping:
        section.check(f"over the busiest lane: {row['name']}", row["measured_over_busiest"], OVER_BUSIEST)


def _judged(subject: Subject, calibration: Any) -> dict[str, Plan]:
    """Plans that span the knobs, one that swaps and adds up micro-batches, and the search's pick."""
    spanning = spanning_plans(subject.workload)
    chosen = {name: plan for name, plan in spanning.items() if name in _JUDGED}
    base = next(iter(chosen.values()))
    blocks = subject.workload.num_blocks
    chosen["half swapped, half checkpointed, two micro-batches"] = base.model_copy(
        update={"n_swap": blocks // 2, "n_checkpoint": blocks - blocks // 2, "micro_batches": 2}
    )
    needs = [_guaranteed_bytes(plan, subject) for plan in chosen.values()]
    budget_bytes = (min(needs) + max(needs)) // 2
    found = search(
        SearchRequest(
            workload=subject.workload,
            hardware=subject.hardware,
            calibration=calibration,
            device_budget_bytes=budget_bytes,
        )
    )
    chosen["search's pick"] = found.plan
    return chosen


def _row(name: str, predicted: Record, measured: Record, other_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "predicted_s": predicted.iteration_s,
        "measured_s": measured.iteration_s,
        "noise_frac": measured.iteration_noise_frac,
        "predicted_peak_bytes": predicted.peak_device_bytes,
        "guaranteed_peak_bytes": measured.guaranteed_peak_device_bytes,
        "measured_peak_bytes": measured.peak_device_bytes - other_bytes,
        "predicted_over_busiest": _over_busiest(predicted),
        "measured_over_busiest": _over_busiest(measured),
        "lanes_s": {str(use.lane): use.busy_s for use in measured.lanes},
    }


def _over_busiest(record: Record) -> float:
    return record.iteration_s / max(use.busy_s for use in record.lanes)


def _guaranteed_bytes(plan: Plan, subject: Subject) -> int:
    return guaranteed_device_peak(compile_schedule(plan, subject.workload)).size_bytes
