"""Three ranks and more give the same bits whatever a plan sends together: sums go by the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from protwin.runtime.ranks import ordered_sums
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.runtime.ranks.beside_ddp import all_cases, in_default_group
from tests.runtime.ranks.measuring import weights_hash
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import MODES, plan_for
from tests.runtime.ranks.wrong_ranks import within

NAME = "gated"
NUM_BATCHES = 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDS = 2
RING = "in the order of a ring"


def tensors_of(rank: int, random: Random) -> list[torch.Tensor]:
    """Others on every rank, of the same sizes: none, few and many scalars."""
    sizes = [random.choice((0, 1, 2, random.randrange(100), random.randrange(2_000))) for _ in range(4)]
    dtypes = [random.choice(DTYPES) for _ in sizes]
    torch.manual_seed(random.randrange(2**30) + rank)
    return [torch.randn(size, dtype=torch.float64).exp().to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


@in_default_group
def sums(rank: int, seed: int, variant: str | None) -> bool:
    """Whether all sums are those of a loop over ranks, however small the buckets are."""
    group, random = dist.group.WORLD, Random(seed)
    assert group is not None
    num_ranks, is_right = dist.get_world_size(), True
    for _ in range(ROUNDS):
        state, every = random.getstate(), []
        for other in range(num_ranks):
            random.setstate(state)
            every.append(tensors_of(other, random))
        expected = [ranks[0].clone() for ranks in zip(*every, strict=True)]
        for others in every[1:]:
            expected = [total + other for total, other in zip(expected, others, strict=True)]
        bucket, gathered = random.choice((4_000, 2**20)), random.choice((0, 2_000))
        own = every[rank]
        with (
            within(variant),
            mock.patch.object(ordered_sums, "BUCKET_BYTES", bucket),
            mock.patch.object(ordered_sums, "_GATHERED_BYTES", gathered),
        ):
            for tensor, total in zip(own, expected, strict=True):
                count = tensor.numel() // num_ranks
                if count:
                    part = torch.empty(count, dtype=tensor.dtype)
                    ordered_sums.scatter(part, tensor[: num_ranks * count], group)
                    is_right &= torch.equal(part, total[rank * count : (rank + 1) * count])
            ordered_sums.add_up(own, group)
        is_right &= all(map(torch.equal, own, expected))
    return is_right


def test_two_ranks_have_no_order(two_ranks: Ranks) -> None:
    for variant in (None, RING):
        assert two_ranks.run(sums, 5, variant) == [True, True]


def test_sums_are_those_of_a_loop_over_ranks(three_ranks: Ranks) -> None:
    assert all(three_ranks.run(sums, 5, None))
    assert not any(three_ranks.run(sums, 5, RING))


def plans_of(num_ranks: int) -> list[Plan]:
    """Of every mode, with one micro-batch: with several, gradients that leave round more often than those that stay."""
    plans = []
    for number, parallel in enumerate((*MODES, ParallelMode.SHARDED)):
        plan = plan_for(all_cases(NUM_BATCHES)[NAME].workload, parallel, 10 + number, num_ranks)
        plans.append(plan.model_copy(update={"micro_batches": 1, "max_gradient_norm": None}))
    return plans


@in_default_group
def wrong_hash(rank: int, name: str, plan: Plan, num_batches: int) -> str:
    with within(RING):
        return str(weights_hash.__wrapped__(rank, name, plan, num_batches))  # type: ignore[attr-defined]


def different_ends(ranks: Ranks, run: Callable[..., str]) -> int:
    """How many different ends plans of all modes have."""
    plans = plans_of(ranks.num_ranks)
    assert len({plan.chunk_bytes for plan in plans}) > 1
    return len({value for plan in plans for value in ranks.run(run, NAME, plan, NUM_BATCHES)})


@pytest.mark.slow
def test_modes_and_layouts_have_the_same_bits(three_ranks: Ranks) -> None:
    assert different_ends(three_ranks, weights_hash) == 1
    assert different_ends(three_ranks, wrong_hash) > 1


@pytest.mark.slow
def test_shards_that_end_anywhere_have_the_same_bits(five_ranks: Ranks) -> None:
    """Shards of whole elements, in the place of whole cache lines, fail here: fused AdamW steps a rest otherwise."""
    assert different_ends(five_ranks, weights_hash) == 1
    assert all(five_ranks.run(sums, 5, None))
