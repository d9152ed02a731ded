"""Records of ranks that are not alike: a prediction, and a measurement of four ranks that is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import Lane, Schedule
from protwin.sim.engine.rank_groups import RankGroup, simulate_groups
from protwin.sim.engine.simulator import simulate
from tests.shared.laid_out import decoder_workload

SLOW = 2


@dataclass(frozen=True)
class SeveralRanks:
    schedule: Schedule
    alike: Record
    """The prediction of one rank that stands for all four."""
    unlike: Record
    """That of three ranks and a slow one, in two groups."""
    measured: Record
    """Four ranks, of which number ``SLOW`` is slow."""


@lru_cache
def several_ranks(num_blocks: int = 4) -> SeveralRanks:
    workload = decoder_workload(num_blocks).model_copy(update={"measured_on": "a100-80gb-x8"})
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**23,
        n_persist=1,
        n_buffer=4,
        prefetch_depth=1,
        parallel=ParallelMode.SHARDED,
        num_ranks=4,
    )
    hardware = machine("a100-80gb-x8")
    slow = RankGroup(1, hardware, {Lane.COMPUTE: 1.5}, name="throttled")
    groups = [RankGroup(3, hardware, name="even"), slow]
    unlike = simulate_groups(plan, workload, groups).record
    even, throttled = unlike.ranks
    ranks = [
        (throttled if rank == SLOW else even).model_copy(
            update={"rank": rank, "num_alike": 1, "name": f"host {rank // 2}", "machine": "eight devices"}
        )
        for rank in range(4)
    ]
    measured = unlike.model_copy(
        update={"origin": Origin.MEASURED, "machine": "eight devices", "rank": SLOW, "ranks": tuple(ranks)}
    )
    alike = simulate(plan, workload, hardware)
    return SeveralRanks(compile_schedule(plan, workload), alike, unlike, Record.model_validate(measured.model_dump()))
