"""The search: equal to brute force, the same each time, and clear about limits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.errors import InfeasibleError, PlanError, ScheduleError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.calibration import Calibration, Contention
from protwin.shared.schema.hardware import DeviceKind, Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.engine import simulator
from protwin.sim.memory.host import default_host_budget_bytes
from protwin.sim.searching import problem as search_problem
from protwin.sim.searching.choice import Chooser
from protwin.sim.searching.request import Effort
from protwin.sim.searching.search import search
from protwin.sim.space.enumerate import enumerate_space
from protwin.sim.space.space import LayoutGrid, SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.shared.faults import with_task
from tests.sim.brute_force import Case, cases, cases_with_disk
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import MACHINE, Seconds, machine, workload
from tests.sim.host_account import host_bytes
from tests.strategies.machines import hardware
from tests.strategies.workloads import workloads


def _is_distinct(plan: Plan, model: Workload) -> bool:
    """Whether no plan with fewer swapped blocks has the same modes: blocks that move nothing keep."""
    return plan.n_swap == 0 or any(model.profile_of(block).swappable_bytes for block in range(plan.n_swap))


# -- against brute force ---------------------------------------------------------------------------------------------


@given(cases(), st.floats(0, 1))
@settings(max_examples=examples(300, 10))
def test_without_tolerance_the_search_finds_what_brute_force_finds(found: Case, share: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    feasible = found.feasible(budget_bytes)
    best_s = min(outcome.iteration_s for outcome in feasible)
    if best_s == 0:
        with pytest.raises(WorkloadError, match="takes time"):
            found.search(budget_bytes)
        return
    result = found.search(budget_bytes)
    assert result.prediction.iteration_s == best_s
    chosen = next(outcome for outcome in found.outcomes if outcome.plan == result.plan)
    assert (chosen.iteration_s, chosen.device_bytes <= budget_bytes) == (best_s, True)
    equals = [outcome.plan for outcome in feasible if outcome.iteration_s == best_s]
    assert (result.plan.n_swap, result.plan.n_checkpoint) == min(
        (plan.n_swap, plan.n_checkpoint) for plan in equals if _is_distinct(plan, found.workload)
    )
    plan = result.plan
    knobs = (plan.micro_batches, plan.max_gradient_norm, plan.parallel, plan.num_ranks)
    assert StepSpec(*knobs, plan.optimizer, plan.host_gradients) == found.step
    assert result.gap_frac <= 1e-4


@given(cases_with_disk(), st.floats(0, 1))
@settings(max_examples=examples(60, 5))
def test_with_chunks_on_a_disk_the_search_finds_what_brute_force_finds(found: Case, share: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    best_s = min(outcome.iteration_s for outcome in found.feasible(budget_bytes))
    assume(best_s > 0)
    result = found.search(budget_bytes)
    assert result.prediction.iteration_s == best_s
    host = {outcome.plan: outcome.host_bytes for outcome in found.outcomes}
    for outcome in (*result.alternatives, *result.pareto):
        assert outcome.pinned_host_bytes + outcome.host_bytes == host[outcome.plan]


@given(cases(), st.floats(0, 1), st.sampled_from((0.005, 0.05, 0.5)))
@settings(max_examples=examples(25, 5))
def test_the_certificate_is_true(found: Case, share: float, tolerance_frac: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    best_s = min(outcome.iteration_s for outcome in found.feasible(budget_bytes))
    if best_s == 0:
        return
    result = found.search(budget_bytes, tolerance_frac)
    certificate = result.certificate
    assert certificate.is_certified
    assert certificate.shortest_possible_s <= best_s
    assert certificate.best_iteration_s * (1 - tolerance_frac) <= best_s
    assert result.prediction.iteration_s <= certificate.best_iteration_s * (1 + tolerance_frac)
    assert result.prediction.iteration_s * (1 - result.gap_frac) <= best_s * (1 + 1e-12)
    known = {outcome.plan: outcome for outcome in found.outcomes}
    for outcome in (*result.alternatives, *result.pareto):
        truth = known[outcome.plan]
        assert outcome.iteration_s == pytest.approx(truth.iteration_s, rel=1e-5)
        assert outcome.guaranteed_peak_device_bytes == truth.device_bytes <= budget_bytes
        assert outcome.pinned_host_bytes + outcome.host_bytes == truth.host_bytes


@given(cases())
@settings(max_examples=examples(60, 6))
def test_more_memory_is_never_slower(found: Case) -> None:
    if max(outcome.iteration_s for outcome in found.outcomes) == 0:
        return
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    times_s = []
    for budget_bytes in peaks[:: max(1, len(peaks) // 6)]:
        if min(outcome.iteration_s for outcome in found.feasible(budget_bytes)) > 0:
            times_s.append(found.search(budget_bytes).prediction.iteration_s)
    assert times_s == sorted(times_s, reverse=True)


@given(cases(), st.floats(0, 1))
@settings(max_examples=examples(60, 6))
def test_below_the_smallest_peak_nothing_fits_and_the_message_names_what_would(found: Case, share: float) -> None:
    least = min(outcome.device_bytes for outcome in found.outcomes)
    if least == 0 or max(outcome.iteration_s for outcome in found.outcomes) == 0:
        return
    budget_bytes = max(1, int(share * (least - 1)))
    if budget_bytes >= least:
        return
    with pytest.raises(InfeasibleError) as raised:
        found.search(budget_bytes)
    named = re.search(r"Raise the device budget to .* \((\d+) bytes\)", str(raised.value))
    assert named is not None
    assert int(named[1]) == least


# -- what it promises ------------------------------------------------------------------------------------------------


def _copy(result: SearchResult) -> SearchResult:
    return SearchResult.from_mapping(json.loads(result.to_json()), origin="memory")


def test_the_result_is_a_document_and_the_same_each_time() -> None:
    model, box = workload(num_blocks=4), machine(cpu_adam_s=3.0)
    result = search(fastest_request(workload=model, hardware=box))
    assert _copy(result) == result
    assert search(fastest_request(workload=model, hardware=box)).to_json() == result.to_json()


@given(workloads(max_blocks=4), hardware(), st.floats(0.3, 1))
@settings(max_examples=examples(25, 5))
def test_the_plan_is_safe_within_the_budget(model: Workload, box: Hardware, share: float) -> None:
    budget_bytes = max(1, int(box.device.usable_bytes * share))
    try:
        result = search(fastest_request(workload=model, hardware=box, device_budget_bytes=budget_bytes))
    except (InfeasibleError, WorkloadError):
        return
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=result.plan.chunk_bytes)
    schedule = compile_schedule(result.plan, model, layout)
    verify_schedule(schedule, result.plan, model, layout, device_limit_bytes=budget_bytes)
    assert host_bytes(result.plan, model, layout, schedule) <= default_host_budget_bytes(box, budget_bytes)
    assert result.prediction.guaranteed_peak_device_bytes <= budget_bytes


def test_the_schedule_that_is_returned_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(*args: Any, **options: Any) -> Schedule:
        schedule = compile_schedule(*args, **options)
        gather = next(task for task in schedule.tasks if task.kind is TaskKind.GATHER)
        return with_task(schedule, gather.id, after=(), after_previous=())

    monkeypatch.setattr(simulator, "compile_schedule", hasty)
    space = SearchSpace(chunk_bytes=256, n_persist=0)
    with pytest.raises(ScheduleError):
        search(fastest_request(workload=workload(num_blocks=4), hardware=machine(), space=space))


def _shuffled(grid: LayoutGrid, random: np.random.Generator) -> LayoutGrid:
    rows = random.permutation(len(grid.prefix))
    return replace(grid, prefix=grid.prefix[rows], n_buffer=grid.n_buffer[rows])


def _orders(
    monkeypatch: pytest.MonkeyPatch, tolerance_frac: float, num_orders: int, *, copy_s: float = 0.25
) -> list[SearchResult]:
    """One search in the usual order of enumeration, and as many as asked in others."""
    model = workload(num_blocks=6)
    box = machine(cpu_adam_s=2 * copy_s, gather_s=copy_s, offload_s=copy_s)
    space = SearchSpace(chunk_bytes=(256, 512, 1536))

    def run() -> SearchResult:
        return search(
            fastest_request(
                workload=model,
                hardware=box,
                space=space,
                device_budget_bytes=9000,
                effort=Effort(tolerance_frac=tolerance_frac),
            )
        )

    results = [run()]
    random = np.random.default_rng(0)

    def enumerate_in_disorder(
        model: Workload,
        space: SearchSpace | None = None,
        step: StepSpec | None = None,
        **options: Any,
    ) -> tuple[LayoutGrid, ...]:
        grids = enumerate_space(model, space, step, **options)
        return tuple(_shuffled(grids[place], random) for place in random.permutation(len(grids)))

    monkeypatch.setattr(search_problem, "enumerate_space", enumerate_in_disorder)
    return results + [run() for _ in range(num_orders)]


@pytest.mark.parametrize("tolerance_frac", [0.0, 0.005, 0.1])
@pytest.mark.parametrize("copy_s", [0.2, 0.25])
def test_the_result_does_not_depend_on_the_order_of_enumeration(
    monkeypatch: pytest.MonkeyPatch, tolerance_frac: float, copy_s: float
) -> None:
    first, *others = _orders(monkeypatch, tolerance_frac, num_orders=5, copy_s=copy_s)
    assert all(other.to_json() == first.to_json() for other in others)


def test_a_rule_that_leaves_ties_open_depends_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # The wrong variant: of equally fast plans with as many swapped blocks, the one that was enumerated first counts.
    monkeypatch.setattr(Chooser, "_undominated", lambda self, chosen: chosen)
    original = LayoutGrid.simplicity
    monkeypatch.setattr(LayoutGrid, "simplicity", lambda *args: (*original(*args)[:4], *args[1:], 0, 0))
    first, *others = _orders(monkeypatch, 0.1, num_orders=5, copy_s=0.2)
    assert any(other.plan != first.plan for other in others)


# -- near-ties -------------------------------------------------------------------------------------------------------


def test_of_equally_fast_plans_the_simplest_counts() -> None:
    # CPU Adam, copies and recomputation take next to no time, so that no plan is much slower than any other.
    model = workload(num_blocks=4, seconds=Seconds(recompute=0.001))
    box = machine(gather_s=1e-9, offload_s=1e-9, cpu_adam_s=1e-9)
    result = search(
        fastest_request(
            workload=model,
            hardware=box,
            space=SearchSpace(chunk_bytes=256, n_persist=0),
            effort=Effort(tolerance_frac=0.01),
        )
    )
    assert (result.plan.n_checkpoint, result.plan.prefetch_depth, result.plan.n_buffer) == (0, 1, 1)


def test_within_the_tolerance_the_simpler_plan_counts() -> None:
    # Keeping every block takes more memory than there is; with four buffers fewer gathers are left in backward, and
    # the iteration is a little shorter than with fewer.
    model = workload(num_blocks=6)
    box = machine(gather_s=0.05, offload_s=0.01, cpu_adam_s=0.01)
    space = SearchSpace(chunk_bytes=256, n_persist=0, n_checkpoint=0)
    fastest = search(fastest_request(workload=model, hardware=box, space=space, effort=Effort(tolerance_frac=0.0)))
    simple = search(fastest_request(workload=model, hardware=box, space=space, effort=Effort(tolerance_frac=0.05)))
    assert simple.prediction.iteration_s <= fastest.prediction.iteration_s * 1.05
    assert (simple.plan.prefetch_depth, simple.plan.n_buffer) < (fastest.plan.prefetch_depth, fastest.plan.n_buffer)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_too_little_host_memory_is_named_and_the_named_budget_is_enough() -> None:
    model, box = workload(num_blocks=4), machine()
    space = SearchSpace(n_persist=0, chunk_bytes=256)
    with pytest.raises(InfeasibleError, match="The host would hold offloaded parameters") as raised:
        search(fastest_request(workload=model, hardware=box, host_budget_bytes=100, space=space))
    named = re.search(r"Raise the host budget to .* \((\d+) bytes\)", str(raised.value))
    assert named is not None
    needed = int(named[1])
    # Parameters, their gradients, two moments and the count of steps, of four chunks.
    assert needed == 4 * (256 + 256 + 64 * 8 + 4)
    search(fastest_request(workload=model, hardware=box, host_budget_bytes=needed, space=space))
    with pytest.raises(InfeasibleError):
        search(fastest_request(workload=model, hardware=box, host_budget_bytes=needed - 1, space=space))


def test_two_limits_that_bind_together_are_both_named() -> None:
    model, box = workload(num_blocks=4), machine()
    space = SearchSpace(chunk_bytes=256)
    roomy = search(
        fastest_request(
            workload=model, hardware=box, space=SearchSpace(chunk_bytes=256, n_persist=0, n_buffer=1, n_checkpoint=4)
        )
    )
    device_bytes = roomy.prediction.guaranteed_peak_device_bytes
    with pytest.raises(InfeasibleError, match="Within the host's budget the closest plan needs") as raised:
        search(
            fastest_request(
                workload=model, hardware=box, device_budget_bytes=device_bytes, host_budget_bytes=600, space=space
            )
        )
    named = re.search(
        r"Raise the host budget to .* \((\d+) bytes\), or the device budget to .* \((\d+) bytes\)", str(raised.value)
    )
    assert named is not None
    host_needed, device_needed = int(named[1]), int(named[2])
    search(
        fastest_request(
            workload=model, hardware=box, device_budget_bytes=device_bytes, host_budget_bytes=host_needed, space=space
        )
    )
    search(
        fastest_request(
            workload=model, hardware=box, device_budget_bytes=device_needed, host_budget_bytes=600, space=space
        )
    )


@pytest.mark.parametrize(
    ("device_budget_bytes", "host_budget_bytes", "tolerance_frac", "max_replays"),
    [
        (0, None, 0.0, None),
        (-5, None, 0.0, None),
        (None, -1, 0.0, None),
        (None, None, 1.0, None),
        (None, None, float("nan"), None),
        (None, None, 0.0, 0),
    ],
)
def test_impossible_arguments_are_refused(
    device_budget_bytes: int | None, host_budget_bytes: int | None, tolerance_frac: float, max_replays: int | None
) -> None:
    with pytest.raises(PlanError, match="must be at least"):
        search(
            fastest_request(
                workload=workload(),
                hardware=machine(),
                device_budget_bytes=device_budget_bytes,
                host_budget_bytes=host_budget_bytes,
                effort=Effort(tolerance_frac=tolerance_frac, max_replays=max_replays),
            )
        )


def test_the_device_takes_its_share_of_the_hosts_memory_where_the_cpu_is_the_device() -> None:
    box = machine(kind=DeviceKind.CPU)
    assert default_host_budget_bytes(box, 10**8) == 10**9 - 10**8 - 10**8
    assert default_host_budget_bytes(machine(), 10**8) == 10**9 - 10**8
    assert default_host_budget_bytes(box, 2 * 10**9) == 0


def test_a_capped_search_says_that_it_proves_nothing() -> None:
    contention = Contention(lanes=(Lane.COMPUTE, Lane.CPU_OPTIM, Lane.H2D, Lane.D2H), slowdowns=(2.0, 3.0, 2.5, 2.5))
    calibration = Calibration(hardware_name=MACHINE, machine=MACHINE, contention=(contention,))
    seconds = Seconds(
        forward=0.3, recompute=0.3, backward=0.6, prologue=0.1, epilogue_forward=0.1, epilogue_backward=0.1
    )
    model = workload(8, seconds)
    box = machine(gather_s=0.9, offload_s=0.9, cpu_adam_s=0.9)
    capped = search(
        fastest_request(
            workload=model, hardware=box, calibration=calibration, effort=Effort(tolerance_frac=0.0, max_replays=1)
        )
    )
    assert not capped.certificate.is_certified
    assert capped.certificate.num_undecided > 0
    assert search(
        fastest_request(workload=model, hardware=box, calibration=calibration, effort=Effort(tolerance_frac=0.0))
    ).certificate.is_certified


def test_progress_ends_with_every_plan_decided() -> None:
    told: list[tuple[int, int]] = []
    result = search(
        fastest_request(workload=workload(num_blocks=4), hardware=machine()),
        on_progress=lambda done, total: told.append((done, total)),
    )
    num_candidates = result.certificate.num_candidates
    assert told[-1] == (num_candidates, num_candidates)
    assert all(0 <= done <= total for done, total in told)
