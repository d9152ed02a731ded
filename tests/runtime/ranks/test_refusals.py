"""Bad input of several ranks: the same message on all of them, before anything moves, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protwin.runtime import CpuDevice, LossScaling, carry_out, trace, training_of
from protwin.runtime.ranks.wrappers import check_unwrapped
from protwin.runtime.training import consensus
from protwin.shared import ParallelMode, Plan, PlanError, Workload
from protwin.shared.basics.errors import WorkloadError
from tests.proof_size import some_quick
from tests.runtime.models import HandWritten, hand_written, point_batches
from tests.runtime.ranks.processes import Ranks
from tests.runtime.watchdog import lanes_alive

CHUNK_BYTES = 9_000


@pytest.fixture(scope="module")
def workload() -> Workload:
    batch = point_batches(1)[0]
    return trace(hand_written(), batch["points"], loss=partial(loss_of, classes=batch["classes"]), repeats=0)


def loss_of(output: torch.Tensor, _: Any, *, classes: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, classes)


def plan_of(workload: Workload, **changes: Any) -> Plan:
    knobs: dict[str, Any] = {"n_persist": 2, "n_buffer": 3, "parallel": ParallelMode.REPLICATED, "num_ranks": 2}
    return Plan(workload_id=workload.identity, chunk_bytes=CHUNK_BYTES, **(knobs | changes))


def adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **({"lr": 1e-2} | options))


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2)


def two_groups(model: nn.Module, *, decay: float = 0.1, least_dim: int = 2) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.dim() >= least_dim]
    return [
        {"params": wide, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < least_dim]},
    ]


def begin(rank: int, workload: Workload, plan: Plan, of_rank_1: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Both ranks begin, with weights of their own, rank 1 with what is other there; the model is ordinary afterwards.

    Gives its weights.
    """
    torch.manual_seed(rank)
    own = dict(of_rank_1) if rank == 1 else {}
    model = own.pop("model", HandWritten)()
    before = copy.deepcopy(model.state_dict())
    groups: Callable[[nn.Module], Any] = own.pop("groups", two_groups)
    kernels = own.pop("kernels", "AVX2")
    versions: Mapping[str, str] = own.pop("versions", {"torch": "2.9"})
    torch.set_num_threads(own.pop("threads", 1))
    settings = {"optimizer": adamw, "parameter_groups": groups(model), "rank_timeout_s": 20}
    settings["device"] = CpuDevice(own.pop("budget", None))
    knobs = own.pop("knobs", {})
    try:
        with (
            patch.object(consensus, "software_versions", lambda: versions),
            patch.object(torch.backends.cpu, "get_cpu_capability", lambda: kernels),
        ):
            given = own.pop("plan", plan.model_copy(update=knobs))
            carry_out(model, given, own.pop("workload", workload), **(settings | own)).close()
        return model.state_dict()
    finally:
        torch.set_num_threads(1)
        assert not dist.is_initialized(), "a group was left"
        assert lanes_alive() == []
        assert training_of(model) is None
        state = model.state_dict()
        assert all(state[name].shape == before[name].shape for name in before), "the model is not ordinary"
        if rank == 0:
            assert all(torch.equal(state[name], before[name]) for name in before), "rank 0's weights have changed"


def narrower() -> nn.Module:
    return hand_written(width=16)


def wrapped_alone() -> nn.Module:
    return nn.DataParallel(hand_written())


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "knob": ({"knobs": {"n_buffer": 4}}, "ranks differ in the plan's n_buffer: 3 on rank 0; 4 on rank 1."),
    "software": ({"versions": {"torch": "2.8"}}, "ranks differ in the version of torch: 2.9 on rank 0; 2.8 on rank 1."),
    "device": (
        {"kernels": "AVX512"},
        "ranks differ in the device: a CPU with kernels for AVX2 on rank 0; a CPU with kernels for AVX512 on rank 1.",
    ),
    "model": ({"model": narrower}, "rank 1: the workload was traced from another model"),
    "budget": ({"budget": "9KiB"}, "the plan's device memory may reach "),
    "no plan at all": ({"plan": "plan.json"}, "rank 1: plan is a str; it must be a Plan. Plan.load(path) reads a file"),
    "impossible plan": (
        {"knobs": {"num_ranks": 0}},
        "rank 1: the plan given to carry_out() is damaged or inconsistent: num_ranks",
    ),
    "setting": ({"check_gradients": False}, "ranks differ in check_gradients: True on rank 0; False on rank 1."),
    "scaling": (
        {"knobs": {"max_gradient_norm": 1.0}, "loss_scaling": LossScaling()},
        "ranks differ in the plan's max_gradient_norm: None on rank 0; 1.0 on rank 1.",
    ),
    "optimizer": ({"optimizer": sgd}, "ranks differ in the optimizer: AdamW on rank 0; SGD on rank 1."),
    "default": (
        {"optimizer": partial(adamw, eps=1e-6)},
        "ranks differ in eps of parameter group 0: 1e-08 on rank 0; 1e-06 on rank 1.",
    ),
    "rate": (
        {"optimizer": partial(adamw, lr=torch.tensor(0.5))},
        "ranks differ in lr of parameter group 0: 0.01 on rank 0; 0.5 on rank 1.",
    ),
    "option": (
        {"groups": partial(two_groups, decay=0.2)},
        "ranks differ in weight_decay of parameter group 0: 0.1 on rank 0; 0.2 on rank 1.",
    ),
    "groups": ({"groups": partial(two_groups, least_dim=1)}, "ranks differ in the parameters of parameter group 0: "),
    "impossible": ({"knobs": {"n_buffer": -1}}, "rank 1: the plan given to carry_out()"),
    "no plan": ({"workload": 3}, "rank 1: workload is a int; it must be a Workload."),
    "wrapped": ({"model": wrapped_alone}, "rank 1: the model is wrapped already: torch's Da"),
    "weights": ({"weights": "nowhere"}, "rank 1: weights = nowhere is given, but every parameter"),
    "meaningless": ({"meter_every": 0}, "rank 1: meter_every is 0; it must be positive."),
}


@some_quick("name", CASES, quick=2)
def test_what_differs_between_ranks_is_refused_alike_by_all(two_ranks: Ranks, workload: Workload, name: str) -> None:
    own, told = CASES[name]
    first, second = two_ranks.errors(begin, workload, plan_of(workload), own)
    assert first == second
    assert first.startswith(f"PlanError: {told}")


def test_unlike_devices_are_named(two_ranks: Ranks, workload: Workload) -> None:
    first, _ = two_ranks.errors(begin, workload, plan_of(workload), {"budget": "9KiB"})
    assert "but of the devices there is no limit on rank 0; 9 KiB on rank 1. Search a plan for 9 KiB" in first


def begin_with(rank: int, workload: Workload, plans: Sequence[Plan | None]) -> Plan:
    """Each rank has a plan of its own, or none."""
    with carry_out(hand_written(), plans[rank], workload, optimizer=adamw, rank_timeout_s=20) as training:
        return training.plan


def test_ranks_without_a_plan_take_that_of_rank_0(three_ranks: Ranks, workload: Workload) -> None:
    plan = plan_of(workload, num_ranks=3)
    assert three_ranks.run(begin_with, workload, [plan, None, plan]) == [plan] * 3
    for plans, told in (
        ([None, plan, plan], "rank 0: plan is None, which takes the plan of rank 0, but this is rank 0. Pass a plan"),
        ([plan, None, plan.model_copy(update={"n_buffer": 4})], "ranks differ in the plan's n_buffer: 3 on ranks 0, 1"),
        ([plan_of(workload, num_ranks=2), None, None], "the plan is for 2 ranks, but 3 processes were started"),
    ):
        errors = three_ranks.errors(begin_with, workload, plans)
        assert len(set(errors)) == 1
        assert errors[0].startswith(f"PlanError: {told}")
    with pytest.raises(PlanError, match="plan is None, which takes the plan of rank 0, but this is rank 0"):
        carry_out(hand_written(), None, workload)


def test_ranks_that_are_alike_begin(two_ranks: Ranks, workload: Workload) -> None:
    """And so do those that differ in what changes no step: a note, when memory is metered, the size of the device."""
    first, second = two_ranks.run(begin, workload, plan_of(workload), {})
    assert all(torch.equal(first[name], second[name]) for name in first), "ranks begin with weights of their own"
    own = {"knobs": {"note": "of rank 1"}, "meter_every": 5, "budget": "1GiB"}
    two_ranks.run(begin, workload, plan_of(workload), own)


def test_threads_have_to_be_as_many_where_every_rank_takes_the_norm(two_ranks: Ranks, workload: Workload) -> None:
    two_ranks.run(begin, workload, plan_of(workload), {"threads": 2})
    first, second = two_ranks.errors(begin, workload, plan_of(workload, max_gradient_norm=1.0), {"threads": 2})
    assert first == second
    assert first.startswith("PlanError: ranks differ in the threads of an operation")


def test_another_workload_is_told_by_its_name(two_ranks: Ranks, workload: Workload) -> None:
    other = workload.model_copy(update={"model_name": "Other"})
    own = {"workload": other, "knobs": {"workload_id": other.identity}}
    first, second = two_ranks.errors(begin, workload, plan_of(workload), own)
    assert first == second
    assert first.startswith(f"PlanError: ranks differ in the workload: {workload.model_name} ({workload.identity}) on")


def begin_for(rank: int, workload: Workload, plan: Plan) -> None:
    carry_out(hand_written(), plan, workload, optimizer=adamw, rank_timeout_s=20)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_ranks": 8}, "the plan is for 8 ranks, but 2 processes were started (WORLD_SIZE = 2)."),
        ({"num_ranks": 1, "parallel": ParallelMode.SINGLE}, "the plan is for one rank, but 2 processes were started"),
    ],
)
def test_another_number_of_ranks_is_refused_alike_by_all(
    two_ranks: Ranks, workload: Workload, changes: dict[str, Any], told: str
) -> None:
    first, second = two_ranks.errors(begin_for, workload, plan_of(workload, **changes))
    assert first == second
    assert first.startswith(f"PlanError: {told}")


def wrapped(rank: int, workload: Workload, plan: Plan) -> list[str]:
    """What carry_out says of a model that torch trains on several ranks already, whole or in part."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        sharded = hand_written()
        fully_shard(sharded.stack[1])
        whole = DistributedDataParallel(hand_written())
        found = []
        for model in (whole, sharded):
            with pytest.raises(PlanError) as caught:
                carry_out(model, plan, workload, optimizer=adamw, rank_timeout_s=20)
            found.append(str(caught.value))
        assert dist.is_initialized(), "the user's group is gone"
        return found
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_wrapped_already_is_refused_alike_by_all(two_ranks: Ranks, workload: Workload) -> None:
    first, second = two_ranks.run(wrapped, workload, plan_of(workload))
    assert first == second
    assert first[0].startswith("the model is wrapped already: torch's DistributedDataParallel")
    assert "wrapped.module" in first[0]
    assert first[1].startswith("stack.1 is wrapped already: torch's FSDPModule")


def test_a_class_of_the_same_name_is_no_wrapper() -> None:
    class DistributedDataParallel(nn.Linear):
        pass

    check_unwrapped(DistributedDataParallel(2, 2))
    with pytest.raises(PlanError, match="the model is wrapped already: torch's DataParallel"):
        check_unwrapped(nn.DataParallel(nn.Linear(2, 2)))


def test_a_wrapped_model_is_refused_when_it_is_traced() -> None:
    """Under the wrapper's names its workload would be of no model that can be trained."""
    batch = point_batches(1)[0]["points"]
    for model in (nn.DataParallel(hand_written()), nn.Sequential(nn.DataParallel(hand_written()))):
        with pytest.raises(WorkloadError, match=r"is wrapped already: torch's DataParallel .* \(wrapped.module\)"):
            trace(model, batch, loss=lambda output, _: output.square().mean(), repeats=0)
    assert trace(hand_written(), batch, loss=lambda output, _: output.square().mean(), repeats=0).num_blocks == 4
