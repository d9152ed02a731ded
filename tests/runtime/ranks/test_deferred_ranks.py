"""Ranks on CUDA devices, by a stand-in that does the work of every stream as late as events allow."""

from __future__ import annotations

from itertools import product

import pytest

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.order.memory_events import memory_events
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.ranks.beside_ddp import STEADY, all_cases
from tests.runtime.ranks.deferred_ranks import LANES, VARIANTS, train_deferred
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import MODES, NUM_BATCHES, plan_for

ONE_OF_EACH = [next(one for one in VARIANTS if one[0] == name) for name in dict.fromkeys(one[0] for one in VARIANTS)]
"""Of the wrong variants."""


@some_quick(("starved", "parallel"), product(LANES, MODES), quick=2)
def test_whichever_stream_lags_two_ranks_give_the_bits_of_ddp(
    starved: str, parallel: ParallelMode, two_ranks: Ranks
) -> None:
    seed = list(LANES).index(starved) + MODES.index(parallel)
    plan = plan_for(all_cases(NUM_BATCHES)[STEADY].workload, parallel, seed)
    for found in two_ranks.run(train_deferred, STEADY, plan, NUM_BATCHES, starved, seed):
        assert found.different == [], plan
        assert found.num_collectives > 0
        assert found.peak_bytes <= found.guaranteed_bytes


@some_quick(("parallel", "micro_batches"), product(MODES[1:], (1, 2)), quick=[(ParallelMode.SHARDED, 1)])
def test_what_only_the_next_iteration_waits_for_goes_then(
    parallel: ParallelMode, micro_batches: int, two_ranks: Ranks
) -> None:
    """Nothing is stepped on the device, so that no compute task of the iteration waits for the last gradients."""
    workload = all_cases(NUM_BATCHES)[STEADY].workload
    chunk_bytes = 9_000
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_buffer=layout_of(workload, chunk_bytes).min_buffers(0),
        micro_batches=micro_batches,
        parallel=parallel,
        num_ranks=2,
    )
    gone = [
        copy for copies in memory_events(compile_schedule(plan, workload)).gone_at_begin.values() for copy in copies
    ]
    assert any(copy.iterations_later for copy in gone), "the question is no question"
    for found in two_ranks.run(train_deferred, STEADY, plan, NUM_BATCHES, "collective", micro_batches):
        assert found.different == [], plan
        assert found.peak_bytes <= found.guaranteed_bytes


@some_quick(("variant", "parallel", "seed", "starved"), VARIANTS, quick=ONE_OF_EACH[::2])
def test_with_one_wait_or_one_reference_less_something_else_comes_out(
    variant: str, parallel: ParallelMode, seed: int, starved: str, two_ranks: Ranks
) -> None:
    """In one of some orders of work."""
    plan = plan_for(all_cases(NUM_BATCHES)[STEADY].workload, parallel, seed)
    for order in range(5):
        given = (STEADY, plan, NUM_BATCHES, starved, order, variant, False)
        found = two_ranks.outcomes(train_deferred, *given, patience_s=60)
        if any(outcome.error is not None or outcome.value.different for outcome in found):
            return
    pytest.fail("every order gave the right bits")
