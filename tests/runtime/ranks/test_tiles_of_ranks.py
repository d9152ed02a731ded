"""Tiles on several ranks: the whole's gradients, reduced once, and the same bits wherever tensors lie."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from protwin.runtime import trace
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.tiling import BUILDERS, NUM_RANKS, NUM_STEPS, Trained, batches_of, plain, trained

MODES = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
TILES = 3
TOLERANCE = 1e-6
"""Of weights, relative to their norm; steps of SGD change them by a tenth of it and more."""


@lru_cache
def workload_of(name: str) -> Workload:
    return trace(BUILDERS[name](), batches_of(0, 1)[0][0], repeats=0, mlp_tiles=[TILES], loss_tiles=[TILES])


def plan_of(
    name: str, parallel: ParallelMode, *, micro_batches: int, max_norm: float | None, is_recomputed: bool = False
) -> Plan:
    workload = workload_of(name)
    layout = layout_of(workload, 9_000)
    n_persist = len(layout.chunks) if parallel is ParallelMode.DDP else 0 if is_recomputed else 3
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=9_000,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + 1,
        n_checkpoint=workload.num_blocks if is_recomputed else 0,
        n_shard=2 if parallel is ParallelMode.SHARDED else 0,
        parallel=parallel,
        num_ranks=NUM_RANKS,
        micro_batches=micro_batches,
        max_gradient_norm=max_norm,
        mlp_tiles=TILES,
        loss_tiles=TILES,
        optimizer=Optimizer.SGD,
    )


def distance(found: Trained, wanted: Trained) -> float:
    """The largest relative one of losses and weights."""
    (losses, weights), (expected, others) = found, wanted
    of_losses = [abs(one / other - 1) for one, other in zip(losses, expected, strict=True)]
    of_weights = [float((weights[key] - value).norm() / value.norm().clamp(min=1e-6)) for key, value in others.items()]
    return max(*of_losses, *of_weights)


@pytest.mark.parametrize(
    ("name", "micro_batches", "max_norm"),
    [
        pytest.param("mixtral", 2, 0.5, marks=pytest.mark.slow),
        ("llama", 1, None),
        pytest.param("llama", 2, 0.5, marks=pytest.mark.slow),
    ],
)
def test_tiles_train_as_the_whole_on_two_ranks(
    name: str, micro_batches: int, max_norm: float | None, two_ranks: Ranks
) -> None:
    wanted = plain(name, micro_batches, max_norm)
    before = BUILDERS[name]().state_dict()["lm_head.weight"]
    seen: list[dict[str, torch.Tensor]] = []
    for parallel in MODES:
        for is_recomputed in (True, False) if name == "llama" and parallel is not ParallelMode.DDP else (True,):
            plan = plan_of(name, parallel, micro_batches=micro_batches, max_norm=max_norm, is_recomputed=is_recomputed)
            found = two_ranks.run(trained, name, plan, workload_of(name), "")
            for (of_rank, events, fits), expected in zip(found, wanted, strict=True):
                assert distance(of_rank, expected) <= TOLERANCE, plan
                assert set(events.values()) <= {0, NUM_STEPS * micro_batches}, "one event for each backward"
                assert fits
                seen.append(of_rank[1])
    # What is accumulated, and a norm of parts, ranks add up in an order that depends on the plan, without tiles too.
    if micro_batches == 1 and max_norm is None:
        assert all(torch.equal(one[key], value) for one in seen for key, value in seen[0].items()), "the same bits"
    assert float((seen[0]["lm_head.weight"] - before).norm()) > 0.05 * float(before.norm()), "steps show"


@pytest.mark.parametrize("wrong", ["mlp", "loss"])
def test_gradients_divided_by_tiles_are_seen_on_two_ranks(wrong: str, two_ranks: Ranks) -> None:
    plan = plan_of("llama", ParallelMode.SHARDED, micro_batches=1, max_norm=None)
    found = two_ranks.run(trained, "llama", plan, workload_of("llama"), wrong)
    wanted = plain("llama", 1, None)
    assert min(distance(one, other) for (one, _, _), other in zip(found, wanted, strict=True)) > 1e-3
