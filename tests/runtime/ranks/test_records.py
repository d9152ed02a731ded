"""The record of ranks that train: one for all, with what each waited for the slowest, on one clock."""

from __future__ import annotations

import json
import time
from unittest import mock

import pytest
import torch

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.recording import recorder
from protwin.shared.basics.errors import ProtwinError, ScheduleError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane
from tests.proof_size import some_quick
from tests.runtime.models import SEED
from tests.runtime.ranks.beside_ddp import all_cases, batches_of
from tests.runtime.ranks.processes import Ranks

NAME, NUM_BATCHES, STEPS = "llama, tied", 12, 8
LATE_S = (0.1, 0.5, 2.0)
MODES = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)


def plan_of(mode: ParallelMode) -> Plan:
    workload = all_cases(NUM_BATCHES)[NAME].workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=9_000)
    persistent = len(layout.chunks) if mode is ParallelMode.DDP else 1
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=9_000,
        n_persist=persistent,
        n_buffer=layout.min_buffers(persistent),
        prefetch_depth=1,
        parallel=mode,
        num_ranks=2,
    )


def recorded(rank: int, plan: Plan, late: int, ahead_s: float, late_s: float) -> tuple[str, list[str]]:
    """Rank ``late`` pauses before every forward; the clock of rank 1 is ``ahead_s`` ahead, as another machine's is."""
    case, now = all_cases(NUM_BATCHES)[NAME], time.perf_counter
    own_s = rank * ahead_s
    name = f"machine {rank}" if ahead_s else "one machine"
    with (
        mock.patch.object(time, "perf_counter", side_effect=lambda: now() + own_s),
        mock.patch.object(recorder, "clock_name", return_value=name),
    ):
        torch.manual_seed(SEED)
        model = case.build()
        training = carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice())
        refusals = []
        with training, pytest.raises(ProtwinError) as early:
            training.record()
        refusals.append(str(early.value))
        model = case.build()
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice()) as training:
            for batches in batches_of(case, rank, 2, 1, STEPS):
                if rank == late:
                    time.sleep(late_s)
                case.loss(model, batches[0]).backward()
                training.step()
            found = training.record(hardware_name="two ranks")
        with pytest.raises(ScheduleError) as closed:
            training.record()
        refusals.append(str(closed.value))
    return found.to_json(), refusals


@some_quick(("mode", "ahead_s"), zip(MODES, (0.0, 1e5, 0.0), strict=True), quick=[(ParallelMode.REPLICATED, 1e5)])
def test_what_ranks_wait_for_the_slowest(mode: ParallelMode, ahead_s: float, two_ranks: Ranks) -> None:
    plan, late = plan_of(mode), MODES.index(mode) % 2
    for late_s in LATE_S:
        (one, refusals), (other, same_refusals) = two_ranks.run(recorded, plan, late, ahead_s, late_s)
        assert one == other, "every rank has the same record"
        assert refusals == same_refusals
        assert refusals[0].startswith("0 iterations were recorded")
        assert "Call record() before close()" in refusals[1]
        record = Record.from_mapping(json.loads(one), origin="here")
        check(record)
        untold = not_told(record, late, late_s, is_one_clock=not ahead_s)
        if not untold:
            return
    raise AssertionError(untold)


def check(record: Record) -> None:
    """What holds however long anything took."""
    assert [found.rank for found in record.ranks] == [0, 1]
    for found in record.ranks:
        own = record.of_rank(found.rank)
        waits_s = sum(wait.seconds for wait in own.waits or ())
        assert own.lane(Lane.COMPUTE).busy_s + waits_s == pytest.approx(own.iteration_s), "computing and waiting"
        for_ranks_s = sum(wait.seconds for wait in own.waits or () if wait.for_ranks)
        assert for_ranks_s <= found.waited_s * (1 + 1e-9)
        assert own.lane(Lane.COLLECTIVE).busy_s + found.waited_s <= own.iteration_s
        assert own.peak_device_bytes > 0


def not_told(record: Record, late: int, late_s: float, *, is_one_clock: bool) -> list[str]:
    """What the record does not say of rank ``late``'s pauses.

    A busy machine adds tenths of a second of its own, however long the pauses are: longer ones tell then.
    """
    slow, quick = record.ranks[late], record.ranks[1 - late]
    waits = record.of_rank(quick.rank).waits or ()
    said = {
        "who is slow": record.rank == late,
        # Every step the quick rank ends the whole of the pause waiting; clocks of two machines tell that less exactly.
        "that the quick rank waits": late_s / 2 < quick.waited_s < quick.iteration_s,
        "that it waits longer": slow.waited_s < quick.waited_s,
        "for whom": sum(wait.seconds for wait in waits if wait.for_ranks) > late_s / 2,
    }
    # On the common clock a collective begins and ends on both at once.
    for at, to in zip(slow.tasks, quick.tasks, strict=True):
        if at.lane is Lane.COLLECTIVE:
            begin_s, end_s = to.start_s + quick.begins_s, to.end_s + quick.begins_s
            said[f"when {at.task} begins"] = abs(begin_s - at.start_s) <= (1e-6 if is_one_clock else late_s / 3)
            said[f"when {at.task} ends"] = abs(end_s - at.end_s) <= late_s / 3
    return [what for what, is_told in said.items() if not is_told]
