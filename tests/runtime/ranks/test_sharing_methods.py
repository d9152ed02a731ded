"""Ranks that share sequences train by any method, in float16 and with tied heads as one rank does, tiles or not."""

from __future__ import annotations

from itertools import product

from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from tests.proof_size import some_quick
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.sharing_methods import (
    CASES,
    LOSS_TILES,
    MAX_NORM,
    MLP_TILES,
    RANKS,
    Outcome,
    outcome,
    traced,
)

CHUNK_BYTES = 20_000
ROUNDINGS = 10
"""By which a gradient may differ: sums over 48 tokens in another order, of three products one behind the other, and
softmax, each half a unit.  Steps of SGD move a weight by ``moved`` in all, so that it differs by as many units of that,
and by one of its own where it is rounded anew."""
PARALLELS = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
UNIT = {"float16": 2.0**-10}
"""Of an element type, relative; float32's where none is named."""


def plan_of(name: str, parallel: ParallelMode, *, is_tiled: bool) -> Plan:
    workload = traced(name, is_tiled=is_tiled)
    layout = layout_of(workload, CHUNK_BYTES)
    num_chunks = len(layout.chunks)
    n_persist = num_chunks if parallel is ParallelMode.DDP else num_chunks // 3
    # What is projected has to be whole somewhere: its chunks lie in parts on devices, not on hosts.
    n_shard = num_chunks - n_persist if name == "osft" and parallel is ParallelMode.SHARDED else 0
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT if name == "osft" else TrainingMethod.FULL,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_shard=n_shard,
        n_buffer=layout.min_buffers(n_persist),
        n_checkpoint=1,
        parallel=parallel,
        num_ranks=RANKS,
        sequence_ranks=RANKS,
        max_gradient_norm=MAX_NORM,
        mlp_tiles=MLP_TILES if is_tiled else 1,
        loss_tiles=LOSS_TILES if is_tiled else 1,
        optimizer=Optimizer.SGD,
    )


def bar(found: Outcome, name: str) -> float:
    """The most by which a weight may differ."""
    unit = UNIT.get(name, 2.0**-23)
    return ROUNDINGS * unit * found.moved + unit


@some_quick(
    ("name", "parallel", "is_tiled"),
    product(CASES, PARALLELS, [False, True]),
    quick=[("osft", ParallelMode.SHARDED, False)],
)
def test_training_is_that_of_one_rank(name: str, parallel: ParallelMode, is_tiled: bool, two_ranks: Ranks) -> None:
    """Tracing tiles takes most of the time: every run tries them in ``test_sequences``."""
    plan = plan_of(name, parallel, is_tiled=is_tiled)
    found = two_ranks.run(outcome, name, plan, traced(name, is_tiled=is_tiled))
    for of_rank in found:
        assert of_rank.moved > 0.1, "training shows"
        assert of_rank.loss_error <= ROUNDINGS * UNIT.get(name, 2.0**-23)
        assert of_rank.weight_error <= bar(of_rank, name)
        assert of_rank.skipped == ([True, True, False] if name == "float16" else [False] * 3)


@some_quick("name", CASES, quick=["float16"])
def test_a_mean_of_means_is_noticed(name: str, two_ranks: Ranks) -> None:
    plan = plan_of(name, ParallelMode.REPLICATED, is_tiled=False)
    for found in two_ranks.run(outcome, name, plan, traced(name, is_tiled=False), "means of means"):
        assert found.weight_error > 3 * bar(found, name)
