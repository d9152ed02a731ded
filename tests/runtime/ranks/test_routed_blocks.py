"""No routing takes more memory than is guaranteed on several ranks, whether all weights learn or adapters alone."""

from __future__ import annotations

import pytest

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.verify import verify_schedule
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import Ranks
from tests.runtime.routing.test_adapted import SKEWS, peak_bytes, workload_of
from tests.runtime.routing.test_worst_memory import guaranteed_bytes

NUM_RANKS = 2


@in_default_group
def peak_of_rank(rank: int, name: str, plan: Plan, workload: Workload, has_adapters: bool, skew: float) -> int:
    """On batches of this rank's own."""
    return peak_bytes(name, plan, workload, has_adapters, skew, 100 * rank)


def of_ranks(workload: Workload, parallel: ParallelMode) -> Plan:
    """Nothing checkpointed, so that the peak is in the blocks; whole on every device, or in parts on hosts."""
    layout = layout_of(workload, 20_000)
    n_persist = len(layout.chunks) if parallel is ParallelMode.DDP else 0
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=20_000,
        n_persist=n_persist,
        n_buffer=0 if parallel is ParallelMode.DDP else layout.min_buffers(0),
        prefetch_depth=1,
        parallel=parallel,
        num_ranks=NUM_RANKS,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "has_adapters",
    [pytest.param(False, id="all weights"), pytest.param(True, id="adapters")],
)
def test_no_routing_takes_more_than_is_guaranteed_on_several_ranks(has_adapters: bool, two_ranks: Ranks) -> None:
    workload = workload_of("masks", has_adapters)
    num_above_seen = 0
    for parallel in (ParallelMode.DDP, ParallelMode.SHARDED):
        plan = of_ranks(workload, parallel)
        verify_schedule(compile_schedule(plan, workload), plan, workload)
        measured = [two_ranks.run(peak_of_rank, "masks", plan, workload, has_adapters, skew) for skew in SKEWS]
        highest = max(max(of_skew) for of_skew in measured)
        assert highest <= guaranteed_bytes(plan, workload), plan
        num_above_seen += highest > guaranteed_bytes(plan, workload.as_seen)
    assert num_above_seen > 0, "the wrong variant: what the traced batch took is no guarantee"
