"""What stages of pipelines pay: for what they send and receive, for collectives of ranks that are no neighbours."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.catalogue.rank_share import machine_of_rank, rent_of_ranks, rent_of_stage
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.hardware import Collective
from protwin.shared.schema.schedule import RankAxis, Task, TaskId, TaskKind
from protwin.shared.workloads.stages import stage_workload
from protwin.sim.costs.fabrics import CALL_OVERHEAD_S, flat_fabric, machine_collective, passing_s
from protwin.sim.costs.rank_lines import RankLine
from protwin.sim.costs.task_costs import CostModel
from tests.sim.searching.test_bypass import pairs

MIB = 2**20


@pytest.mark.parametrize("name", ["rtx-4090-x8", "h100-80gb-x8"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_what_is_passed_on_takes_a_message_over_the_slowest_link(name: str, num_ranks: int) -> None:
    box = load_hardware(name)
    fabric = flat_fabric(box, num_ranks)
    expected_s = CALL_OVERHEAD_S + fabric.latency_s + 64 * MIB / fabric.bandwidth_bytes_per_s
    assert passing_s(64 * MIB, box, num_ranks) == pytest.approx(expected_s)
    # Two ranks that gather twice as much send each other a message of this size.
    gathered_s = machine_collective(Collective.ALL_GATHER, 128 * MIB, box, 2).seconds
    assert passing_s(64 * MIB, box, 2) == pytest.approx(gathered_s, rel=0.05)


def test_sends_and_receives_are_priced_and_calibrated() -> None:
    box = load_hardware("rtx-4090-x8")
    stage = stage_workload(pairs(4), 1, 2, 3)
    found = CostModel.of(stage, box, num_ranks=2)
    assert (found.num_stages, found.hardware) == (3, machine_of_rank(box, 6))
    factors = {TaskKind.SEND: Factor(value=2.0)}
    calibration = Calibration(hardware_name=box.name, machine="a machine", factors=factors)
    send, receive = (Task(TaskId(0), kind, moved_bytes=MIB, num_ranks=2) for kind in (TaskKind.SEND, TaskKind.RECEIVE))
    own_s = passing_s(MIB, box, 6)
    assert found.task_s(send) == found.task_s(receive) == own_s
    calibrated = CostModel.of(stage, box, calibration, num_ranks=2)
    assert (calibrated.task_s(send), calibrated.task_s(receive)) == (2 * own_s, own_s)


def test_replicas_of_a_stage_lie_at_distances_of_a_pipeline() -> None:
    assert RankLine.of(RankAxis.WORLD, 4, None, 2) == RankLine(4, 2, 8)
    assert RankLine.of(RankAxis.SHARD, 4, 2, 2) == RankLine(2, 2, 8)
    assert RankLine.of(RankAxis.REPLICA, 4, 2, 2) == RankLine(2, 4, 8)
    assert RankLine.of(RankAxis.WORLD, 4, None) == RankLine(4)
    box = load_hardware("h100-80gb-x8")
    stage = stage_workload(pairs(4), 0, 2, 2)
    reduce = Task(TaskId(0), TaskKind.ALL_REDUCE, moved_bytes=64 * MIB, num_ranks=4)
    expected_s = machine_collective(Collective.ALL_REDUCE, 64 * MIB, box, RankLine(4, 2, 8)).seconds
    assert CostModel.of(stage, box, num_ranks=4).task_s(reduce) == expected_s


def test_stages_divide_the_rent() -> None:
    box = load_hardware("h100-80gb-x8").model_copy(update={"price_usd_per_hour": 24.0})
    whole = rent_of_ranks(box, 8)
    assert whole == 24.0
    part = rent_of_stage(box, 2, 4)
    assert part is not None
    assert 4 * part == whole
    assert rent_of_stage(box.model_copy(update={"price_usd_per_hour": None}), 2, 4) is None
