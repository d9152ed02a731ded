"""Results of searches for tests of what shows them, without a search."""

from __future__ import annotations

from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.answers.search_result import Certificate, PlanOutcome, SearchResult
from protwin.sim.searching.confidence import DATA_SHEETS
from tests.shared.laid_out import MIB, LaidOut


def outcome(example: LaidOut, *, slower_frac: float, less_bytes: int, is_simulated: bool = False) -> PlanOutcome:
    record = example.predicted
    return PlanOutcome(
        plan=record.plan,
        plan_kind=PlanKind.OFFLOADED,
        iteration_s=record.iteration_s * (1 + slower_frac),
        is_simulated=is_simulated,
        guaranteed_peak_device_bytes=record.guaranteed_peak_device_bytes - less_bytes,
        pinned_host_bytes=7 * MIB,
        host_bytes=5 * MIB,
    )


def result_of(example: LaidOut, *, num_front: int = 4, num_undecided: int = 0) -> SearchResult:
    record = example.predicted
    front = [outcome(example, slower_frac=0.0, less_bytes=0, is_simulated=True)]
    front += [outcome(example, slower_frac=0.1 * place, less_bytes=3 * place * MIB) for place in range(1, num_front)]
    return SearchResult(
        model_name=record.model_name,
        hardware_name=record.hardware_name,
        device_budget_bytes=record.guaranteed_peak_device_bytes + MIB,
        host_budget_bytes=2**30,
        plan=record.plan,
        plan_kind=PlanKind.OFFLOADED,
        prediction=record,
        survives=True,
        margin_frac=0.05,
        uncertainty=DATA_SHEETS,
        certificate=Certificate(
            num_candidates=50_000 + num_undecided,
            num_bounded_by_memory=40_000,
            num_bounded_by_time=9_985,
            num_simulated=15,
            num_undecided=num_undecided,
            best_iteration_s=record.iteration_s,
            best_unsimulated_bound_s=record.iteration_s * 0.99,
            tolerance_frac=0.01,
        ),
        alternatives=(outcome(example, slower_frac=0.02, less_bytes=MIB),),
        pareto=tuple(front),
    )
