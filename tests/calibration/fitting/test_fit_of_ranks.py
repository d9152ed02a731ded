"""Fitting to plans of several ranks finds the factors that a machine of two was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from protwin.calibration.fitting.fit import Pair, fit_calibration, pairs_of
from protwin.calibration.fitting.measurement_plans import RANK_MODES, bootstrap_plans, spanning_plans
from protwin.calibration.fitting.slowdowns import sets_of_lanes
from protwin.calibration.fitting.updating import updated
from protwin.shared.basics.errors import CalibrationError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.calibration import Calibration, Contention, Factor
from protwin.shared.schema.hardware import Collective, Link, LinkPoint, MeasuredCollective, Node, Topology
from protwin.shared.schema.record import OF_RANKS, Origin, RankRecord, RankWait, Record
from protwin.shared.schema.schedule import LANES_ALONE, Lane, TaskKind, lanes_of
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, SLOW, TRUTH, a_workload
from tests.calibration.fitting.test_updating import told

COLLECTIVES = {TaskKind.ALL_GATHER: 1.7, TaskKind.REDUCE_SCATTER: 2.4, TaskKind.ALL_REDUCE: 0.7}
ALL = TRUTH | COLLECTIVES
BESIDE = (
    Contention(lanes=(Lane.COMPUTE, Lane.COLLECTIVE), slowdowns=(1.2, 1.9)),
    Contention(lanes=(Lane.H2D, Lane.COLLECTIVE), slowdowns=(1.1, 1.5)),
    Contention(lanes=(Lane.D2H, Lane.COLLECTIVE), slowdowns=(1.2, 1.3)),
    Contention(lanes=(Lane.CPU_OPTIM, Lane.COLLECTIVE), slowdowns=(1.6, 1.4)),
)
TWO = MACHINE.model_copy(
    update={
        "node": Node(
            name="two processes",
            num_devices=2,
            sockets=(2,),
            pcie_roots=(2,),
            topology=Topology.HOST,
            host_path=Link(name="path", latency_s=1e-4, bandwidth_bytes_per_s=5e8),
        ),
        "collectives": tuple(
            MeasuredCollective(
                collective=collective,
                num_ranks=2,
                table=(LinkPoint(size_bytes=2**12, seconds=3e-4), LinkPoint(size_bytes=2**22, seconds=5e-3)),
            )
            for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        ),
    }
)


def truth() -> Calibration:
    factors = {kind: Factor(value=value) for kind, value in ALL.items()}
    return Calibration(hardware_name=TWO.name, machine="here", factors=factors, contention=(*SLOW, *BESIDE))


def fitted(workload: Workload, contention: tuple[Contention, ...]) -> Calibration:
    records = [simulate(plan, workload, TWO, truth()) for plan in bootstrap_plans(workload, num_ranks=2)]
    pairs = [Pair(workload, record.model_copy(update={"origin": Origin.MEASURED})) for record in records]
    return fit_calibration(pairs, TWO, contention=contention, machine="here", software={})


def test_the_factors_of_collectives_come_back() -> None:
    """Within 2 % for every kind, though other lanes slow them; a fit that knows one rank's sets of lanes is wrong."""
    workload = a_workload()
    found, wrong = fitted(workload, (*SLOW, *BESIDE)), fitted(workload, SLOW)
    for kind, value in ALL.items():
        assert found.factor(kind) == pytest.approx(value, rel=0.02), kind
    assert max(abs(wrong.factor(kind) / value - 1) for kind, value in COLLECTIVES.items()) > 0.05


def test_predictions_under_the_fit_are_the_machine_in_every_mode() -> None:
    """Iteration times of plans that nothing was fitted to, within 1 %."""
    workload = a_workload()
    found = fitted(workload, (*SLOW, *BESIDE))
    plans = spanning_plans(workload, num_ranks=2)
    assert {plan.parallel for plan in plans.values()} == set(RANK_MODES)
    for name, plan in plans.items():
        truth_s = simulate(plan, workload, TWO, truth()).iteration_s
        assert simulate(plan, workload, TWO, found).iteration_s == pytest.approx(truth_s, rel=0.01), name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plans_of_ranks_run_every_kind_of_task_and_can_be_carried_out(num_ranks: int) -> None:
    workload = a_workload()
    judging = list(spanning_plans(workload, num_ranks=num_ranks).values())
    fitting = list(bootstrap_plans(workload, num_ranks=num_ranks))
    assert len(judging) >= 11
    assert not set(judging) & set(fitting)
    schedules = {plan: compile_schedule(plan, workload) for plan in (*judging, *fitting)}
    for plan, schedule in schedules.items():
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
        verify_schedule(schedule, plan, workload, layout)
    kinds = {task.kind for task in chain.from_iterable(schedules[plan].tasks for plan in fitting)}
    assert set(ALL) <= kinds


def test_lanes_of_ranks_are_measured_in_every_set() -> None:
    sets = sets_of_lanes(num_ranks=2)
    assert len(sets) == len(set(sets)) == 2 ** len(lanes_of(2)) - 1
    assert set(sets_of_lanes()) < set(sets)
    assert {Lane.COLLECTIVE, *LANES_ALONE} in sets


def test_a_pair_has_what_its_rank_waited_within_its_collectives() -> None:
    """Every rank's own tasks, of one record of both."""
    workload = a_workload(num_blocks=2)
    plan = bootstrap_plans(workload, num_ranks=2)[2]
    alone = simulate(plan, workload, TWO)
    late = next(timing for timing in alone.tasks if timing.kind is TaskKind.ALL_GATHER)
    own = {name: getattr(alone, name) for name in OF_RANKS}
    ranks = [
        RankRecord(rank=0, begins_s=0.0, **own),
        RankRecord(rank=1, begins_s=0.0, rank_waits=(RankWait(task=late.task, seconds=0.5),), **own),
    ]
    record = alone.model_copy(update={"origin": Origin.MEASURED, "ranks": tuple(ranks)})
    (first, second) = pairs_of(workload, record)
    assert first.measured.tasks == alone.tasks
    for timing, other in zip(alone.tasks, second.measured.tasks, strict=True):
        longer_s = 0.5 if timing.task == late.task else 0.0
        assert other.duration_s == timing.duration_s + longer_s
        assert other.end_s == timing.end_s
    assert pairs_of(workload, alone) == (Pair(workload, alone),)


def _of_both(record: Record) -> Record:
    """As two equal ranks would have recorded it."""
    own = {name: getattr(record, name) for name in OF_RANKS}
    ranks = tuple(RankRecord(rank=rank, begins_s=0.0, machine=TWO.name, **own) for rank in range(2))
    return record.model_copy(update={"origin": Origin.MEASURED, "ranks": ranks})


def _changed(record: Record, place: int, **changes: object) -> tuple[RankRecord, ...]:
    return tuple(one.model_copy(update=changes) if one.rank == place else one for one in record.ranks)


WRONG_RANKS: dict[str, tuple[Callable[[Record], dict[str, Any]], str]] = {
    "a rank is missing": (lambda r: {"ranks": r.ranks[:1]}, "has 1 of the 2 ranks of its plan; it lacks rank 1"),
    "a rank of another run": (lambda r: {"ranks": _changed(r, 1, rank=5)}, "it lacks rank 1"),
    "too many": (lambda r: {"ranks": _changed(r, 1, num_alike=2)}, "it has a rank 2 that its plan does not have"),
    "an edited time": (lambda r: {"iteration_s": 0.9 * r.iteration_s}, "has other iteration_s than its rank 0"),
    "an edited task": (lambda r: {"tasks": r.tasks[:-1]}, "has other tasks than its rank 0"),
    "a wait for nothing": (
        lambda r: {"ranks": _changed(r, 1, rank_waits=(RankWait(task=r.tasks[0].task, seconds=1e-6),))},
        "which is no collective of its plan",
    ),
}


@pytest.mark.parametrize("name", WRONG_RANKS)
def test_a_record_without_all_that_its_ranks_did_is_refused(name: str) -> None:
    change, said = WRONG_RANKS[name]
    workload = a_workload(num_blocks=2)
    records = [_of_both(simulate(plan, workload, TWO, truth())) for plan in bootstrap_plans(workload, num_ranks=2)[:2]]
    pairs = [told(Pair(workload, record, "both.json"), machine=TWO.name) for record in records]
    assert updated(None, pairs, TWO).num_runs == 2
    wrong = replace(pairs[1], measured=pairs[1].measured.model_copy(update=change(pairs[1].measured)))
    with pytest.raises(CalibrationError, match=f"both.json .*{said}"):
        updated(None, [pairs[0], wrong], TWO)
