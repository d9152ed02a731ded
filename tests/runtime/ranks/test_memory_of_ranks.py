"""What ranks hold is what the schedule accounts for, on their devices and on their hosts; the norm of parts is torch's.

Three ranks have shards that end within parameters, with padding behind the last one.
"""

from __future__ import annotations

from itertools import product

import pytest

from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR
from tests.runtime.ranks.beside_ddp import all_cases, train
from tests.runtime.ranks.measuring import held_while_scattering, norms, one_step, peak_error
from tests.runtime.ranks.processes import Pool, Ranks

NUM_RANKS = 3
NUM_BATCHES = 12
SHARED = {"on hosts": (0, 0), "on devices": (0, 1), "on both": (0.3, 0.3)}
"""The parts of the chunks that stay whole, and that are sharded over the devices."""


def sharded_plan(name: str, where: str, *, micro_batches: int = 1, max_norm: float | None = None) -> Plan:
    workload = all_cases(NUM_BATCHES)[name].workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=9_000)
    n_persist, n_shard = (int(part * len(layout.chunks)) for part in SHARED[where])
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=9_000,
        n_persist=n_persist,
        n_shard=n_shard,
        n_buffer=layout.min_buffers(n_persist) + 1,
        prefetch_depth=1,
        n_checkpoint=1,
        n_swap=1,
        micro_batches=micro_batches,
        max_gradient_norm=max_norm,
        parallel=ParallelMode.SHARDED,
        num_ranks=NUM_RANKS,
    )


@some_quick("where", SHARED, quick=1)
def test_the_peak_and_the_host_are_the_schedules_own(where: str, three_ranks: Ranks) -> None:
    plan = sharded_plan("llama, 64 wide", where, micro_batches=2, max_norm=0.5)
    for error, host_bytes, said_bytes in three_ranks.run(peak_error, "llama, 64 wide", plan, NUM_BATCHES):
        assert error == pytest.approx(0, abs=BAR)
        assert host_bytes <= said_bytes
        assert host_bytes >= 0.95 * said_bytes


@some_quick(("name", "num_ranks"), product(["llama, 64 wide", "llama, 64 wide, adapted"], (2, 3)), quick=2)
def test_every_count_of_steps_is_in_the_guarantee(name: str, num_ranks: int, pool: Pool) -> None:
    """Blocks of one chunk without padding, all in parts on the devices: each rank steps many stretches of it.

    The wrong variant counts the steps of a rank's part once: each of these plans ran out of what it was guaranteed.
    """
    workload = all_cases(NUM_BATCHES)[name].workload
    chunks = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2**20).chunks
    knobs = {"chunk_bytes": 2**20, "n_shard": len(chunks), "n_checkpoint": 0, "n_swap": 0, "num_ranks": num_ranks}
    plan = sharded_plan(name, "on devices").model_copy(update=knobs)
    for found in pool.of(num_ranks).run(train, name, plan, NUM_BATCHES):
        assert found.peak_bytes <= found.guaranteed_bytes


def test_gradients_stay_while_ranks_exchange_them(three_ranks: Ranks) -> None:
    """A reduction that compute overlaps holds them beside what is laid flat, until it ends, as its schedule says."""
    plan = sharded_plan("llama, 64 wide", "on both", micro_batches=2)
    for found in three_ranks.run(held_while_scattering, "llama, 64 wide", plan, NUM_BATCHES):
        assert found
        for task, held, said in found:
            assert held == said, task
            assert all(said.values()), task


@some_quick(("name", "where"), product(["gated", "hand-written, partly narrow"], SHARED), quick=2)
def test_one_step_is_that_of_the_mean(name: str, where: str, three_ranks: Ranks) -> None:
    """Of plain SGD with the mean of all ranks' gradients in float64: each scalar within the rounding of sum and step.

    The wrong variants of ``wrong_ranks`` are far outside.
    """
    for worst in three_ranks.run(one_step, name, sharded_plan(name, where), NUM_BATCHES):
        assert worst <= 1


@some_quick("where", SHARED, quick=1)
def test_the_norm_of_parts_is_torchs(where: str, three_ranks: Ranks) -> None:
    """Both add up the squares of N scalars: torch in float32, within a relative N eps of the true sum."""
    for ours, theirs, num_scalars in three_ranks.run(
        norms, "gated", sharded_plan("gated", where, max_norm=0.5), NUM_BATCHES
    ):
        assert ours == pytest.approx(theirs, rel=num_scalars * 2**-24)
