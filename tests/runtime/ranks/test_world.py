"""Real processes meet, are told apart, part, and meet again; who does not come, or not as planned, is told of."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from protwin.runtime.ranks.world import join_world
from protwin.shared import PlanError, RanksError
from tests.runtime.ranks.processes import Ranks, environment


def met(rank: int, *, expect_default: bool) -> tuple[int, int, int, float, float, bytes]:
    """Joins, adds up the ranks' numbers in both groups, leaves."""
    assert dist.is_initialized() is expect_default
    world = join_world(3, timeout_s=30)
    try:
        world.open_lane(torch.device("cpu"))
        assert world.between_steps_group is world.control_group
        sums = []
        for group, factor in ((world.lane_group, 1), (world.control_group, 10)):
            number = torch.tensor([float(factor * (rank + 1))])
            dist.all_reduce(number, group=group)
            sums.append(number.item())
        if rank == 1:
            world.store.set("said", "by rank 1")
        said = world.store.get("said")
    finally:
        world.leave()
    assert dist.is_initialized() is expect_default
    return world.rank, world.num_ranks, world.local_rank, *sums, said


def meet_often(rank: int) -> list[tuple[int, int, int, float, float, bytes]]:
    return [met(rank, expect_default=False) for _ in range(3)]


def test_ranks_meet_by_the_environment_and_can_meet_again(three_ranks: Ranks) -> None:
    for rank, found in enumerate(three_ranks.run(meet_often)):
        assert found == [(rank, 3, rank, 6.0, 60.0, b"by rank 1")] * 3


def meet_within_own_group(rank: int) -> list[tuple[int, int, int, float, float, bytes]]:
    number = os.environ["MASTER_PORT"]
    with environment(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None):
        store = dist.PrefixStore("own", dist.TCPStore("127.0.0.1", int(number), is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        try:
            found = [met(rank, expect_default=True) for _ in range(2)]
            # The group is as it was: it still works.
            dist.barrier()
            return found
        finally:
            dist.destroy_process_group()


def test_a_group_of_the_users_is_used_and_left_alone(three_ranks: Ranks) -> None:
    for rank, found in enumerate(three_ranks.run(meet_within_own_group)):
        assert found == [(rank, 3, rank, 6.0, 60.0, b"by rank 1")] * 2


def meet_side_by_side(rank: int) -> list[float]:
    """Two worlds at once, as for two models; each is left first once, and the other one goes on."""
    found = []
    for first in (0, 1):
        worlds = [join_world(3, timeout_s=20) for _ in range(2)]
        for world in worlds:
            world.open_lane(torch.device("cpu"))
        for world in worlds:  # a rank that leaves while others still connect breaks their connections
            dist.barrier(group=world.lane_group)
        worlds.pop(first).leave()
        number = torch.tensor([float(rank + 1)])
        dist.all_reduce(number, group=worlds[0].lane_group)
        found.append(number.item())
        worlds[0].leave()
        assert not dist.is_initialized()
    return found


def test_two_models_may_be_trained_side_by_side(three_ranks: Ranks) -> None:
    assert three_ranks.run(meet_side_by_side) == [[6.0, 6.0]] * 3


def join(rank: int, num_ranks: int, changes: dict[str, tuple[str | None, ...]]) -> None:
    with environment(**{name: values[rank] for name, values in changes.items()}):
        join_world(num_ranks, timeout_s=20).leave()


@pytest.mark.parametrize("planned", [2, 8])
def test_a_plan_for_another_number_of_ranks_is_refused_by_all_alike(three_ranks: Ranks, planned: int) -> None:
    first, *others = three_ranks.errors(join, planned, {})
    assert first.startswith(
        f"PlanError: the plan is for {planned} ranks, but 3 processes were started (WORLD_SIZE = 3)"
    )
    assert others == [first] * 2


def test_two_ranks_with_one_local_rank_are_refused_by_all_alike(three_ranks: Ranks) -> None:
    first, *others = three_ranks.errors(join, 3, {"LOCAL_RANK": ("0", "1", "1")})
    assert first.startswith("RanksError: LOCAL_RANK is 1 on ranks 1, 2 of host ")
    assert others == [first] * 2
    # And all was given back.
    three_ranks.run(join, 3, {})


def join_own(rank: int, planned: tuple[int, ...]) -> None:
    join_world(planned[rank], timeout_s=20)


def join_own_within_a_group(rank: int, planned: tuple[int, ...]) -> None:
    world = join_world(3, timeout_s=20)
    try:
        join_own(rank, planned)
    finally:
        world.leave()


def test_a_plan_of_one_rank_is_refused_among_several(three_ranks: Ranks) -> None:
    sources = ((join_own, "WORLD_SIZE = 3"), (join_own_within_a_group, "torch.distributed's default group"))
    for joining, source in sources:
        first, *others = three_ranks.errors(joining, (1, 1, 1))
        assert first.startswith(f"PlanError: the plan is for one rank, but 3 processes were started together ({source}")
        assert others == [first] * 2


def test_plans_for_different_numbers_of_ranks_are_refused_by_all_alike(three_ranks: Ranks) -> None:
    first, *others = three_ranks.errors(join_own, (3, 1, 3))
    assert first.startswith(
        "PlanError: ranks were given plans for different numbers of ranks: 3 on ranks 0, 2; 1 on rank 1."
    )
    assert others == [first] * 2


def test_a_plan_of_one_rank_joins_nobody() -> None:
    assert join_world(1, timeout_s=1) is None
    with environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="host", MASTER_PORT="1"):
        assert join_world(1, timeout_s=1) is None
    assert not dist.is_initialized()


def test_a_launch_of_which_nothing_is_left_does_not_keep_a_refusal_waiting() -> None:
    """Variables that another launch has left behind: nobody is there to agree with."""
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with environment(**left), pytest.raises(PlanError, match=r"for one rank, but 4 processes .*\(WORLD_SIZE = 4\)"):
        join_world(1, timeout_s=0.1)
    with pytest.raises(PlanError, match=r"for 2 ranks, but 1 process was started \(no RANK"):
        join_world(2, timeout_s=0.1)
    assert not dist.is_initialized()


def join_in_vain(rank: int, coming: tuple[int, ...]) -> float:
    begin = time.monotonic()
    if rank in coming:
        with pytest.raises(RanksError, match="the ranks did not all meet within 1 s"):
            join_world(3, timeout_s=1)
        assert not dist.is_initialized()
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_ends_the_joining_of_all_and_so_does_one_that_comes_late(three_ranks: Ranks) -> None:
    on_time = three_ranks.run(join_in_vain, (0, 1))
    assert min(on_time[:2]) > 0.9
    three_ranks.run(join_in_vain, (2,))
    # Each has tried equally often, so that they meet again.
    three_ranks.run(join, 3, {})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_a_time(timeout_s: float) -> None:
    with pytest.raises(RanksError, match="rank_timeout_s is"):
        join_world(2, timeout_s=timeout_s)
