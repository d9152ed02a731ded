"""Devices of ranks: one for each, of one kind, and what is told where that is not so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from protwin.runtime import CudaDevice, carry_out
from protwin.runtime.ranks.own_device import device_of_rank
from protwin.runtime.training import assembly, consensus
from protwin.runtime.training.consensus import check_ranks_on
from protwin.shared import ParallelMode, PlanError, RanksError
from tests.runtime.deferred_cuda import DeferredCuda, cuda_device
from tests.runtime.models import differences, snapshot
from tests.runtime.ranks.beside_ddp import STEADY, all_cases, in_default_group, prepare
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import NUM_BATCHES, plan_for
from tests.runtime.watchdog import lanes_alive


def begin(rank: int, uuids: Sequence[str], names: Sequence[str], wire: dist.ProcessGroup | None = None) -> None:
    """Carry a plan out on a stand-in with these facts; afterwards the model is what it was."""
    case = all_cases(NUM_BATCHES)[STEADY]
    plan = plan_for(case.workload, ParallelMode.REPLICATED, 0)
    model = prepare(case.build(), rank)
    before = snapshot(model)
    cuda = DeferredCuda(uuid=uuids[rank], wire=wire)
    with cuda.installed(), mock.patch.object(torch.cuda, "get_device_name", return_value=names[rank]):
        try:
            carry_out(model, plan, case.workload, device=cuda_device(), rank_timeout_s=20).close()
        finally:
            cuda.synchronize()
            assert lanes_alive() == []
            assert differences(model, before) == []


def test_two_ranks_on_one_gpu_are_refused_by_all_alike(two_ranks: Ranks) -> None:
    first, second = two_ranks.errors(begin, ("GPU-1", "GPU-1"), ("H200", "H200"))
    assert first.startswith("RanksError: ranks 0, 1 would train on one GPU (H200, UUID GPU-1), but each needs its own.")
    assert 'Pass device="cuda"' in first
    assert second == first


def test_unlike_gpus_are_refused_by_both_names(two_ranks: Ranks) -> None:
    first, second = two_ranks.errors(begin, ("GPU-1", "GPU-2"), ("H200", "A100"))
    assert first.startswith("PlanError: ranks differ in the device: H200 on rank 0; A100 on rank 1.")
    assert second == first


@in_default_group
def begin_as(rank: int, variant: str, uuids: Sequence[str], names: Sequence[str]) -> None:
    """``begin`` with one of ``WRONG``, where a training that is not refused can begin."""
    wire = dist.new_group(backend="gloo")
    with WRONG[variant]():
        begin(rank, uuids, names, wire)


def test_two_gpus_of_one_kind_are_taken(two_ranks: Ranks) -> None:
    two_ranks.run(begin_as, "right", ("GPU-1", "GPU-2"), ("H200", "H200"))


def begin_named(rank: int, named: Any, *, has_cuda: bool) -> None:
    """Where there is one device, or none."""
    case = all_cases(NUM_BATCHES)[STEADY]
    plan = plan_for(case.workload, ParallelMode.REPLICATED, 0)
    model = prepare(case.build(), rank)
    with DeferredCuda().installed() if has_cuda else nullcontext():
        carry_out(model, plan, case.workload, device=named, rank_timeout_s=20).close()


begin_beside_one = partial(begin_named, has_cuda=True)
begin_beside_none = partial(begin_named, has_cuda=False)


@pytest.mark.parametrize(
    ("beginning", "named", "told"),
    [
        (begin_beside_one, "cuda", "RanksError: rank 1: there is no device for LOCAL_RANK 1: its process sees 1 CUDA "),
        (begin_beside_none, "cuda", "HardwareError: this installation of torch has no CUDA device."),
        (begin_beside_none, "tpu", "PlanError: device is 'tpu'; it must be"),
    ],
)
def test_a_rank_without_a_device_is_told_to_all(two_ranks: Ranks, beginning: Any, named: str, told: str) -> None:
    first, second = two_ranks.errors(beginning, named)
    assert told in first
    assert second == first


def test_a_number_beyond_the_devices_names_both() -> None:
    with mock.patch.object(torch.cuda, "device_count", return_value=2), pytest.raises(RanksError) as raised:
        device_of_rank("cuda", 3)
    assert str(raised.value).startswith("there is no device for LOCAL_RANK 3: its process sees 2 CUDA devices. Start")


def test_a_build_without_nccl_is_refused_by_name() -> None:
    plan = plan_for(all_cases(NUM_BATCHES)[STEADY].workload, ParallelMode.DDP, 0)
    with mock.patch.object(torch.distributed, "is_nccl_available", return_value=False):
        with pytest.raises(PlanError, match="for 2 ranks on CUDA devices, but this build of PyTorch has no NCCL"):
            check_ranks_on(plan, torch.device("cuda", 0))
        check_ranks_on(plan, torch.device("cpu"))
        check_ranks_on(plan.model_copy(update={"num_ranks": 1}), torch.device("cuda", 0))
    with mock.patch.object(torch.distributed, "is_nccl_available", return_value=True):
        check_ranks_on(plan, torch.device("cuda", 0))


# -- wrong variants --------------------------------------------------------------------------------------------------


def _facts_without_the_device(*args: Any, **settings: Any) -> dict[str, str]:
    facts = consensus.facts_of_plan(*args, **settings)
    del facts["the device"]
    return facts


def _taking_turns(kind: str, local_rank: int) -> CudaDevice:
    assert kind == "cuda"
    return CudaDevice(local_rank % torch.cuda.device_count())


WRONG: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "right": nullcontext,
    "GPUs are not told apart": partial(mock.patch.object, assembly, "check_own_device", lambda *_: None),
    "GPUs are told apart by their numbers": partial(
        mock.patch.object, CudaDevice, "identity", property(lambda self: f"{self.kind}, {self.torch_device}")
    ),
    "kinds are not compared": partial(mock.patch.object, assembly, "facts_of_plan", _facts_without_the_device),
}


@pytest.mark.parametrize(
    ("variant", "uuids", "names", "told"),
    [
        ("GPUs are not told apart", ("GPU-1", "GPU-1"), ("H200", "H200"), ""),
        ("GPUs are told apart by their numbers", ("GPU-1", "GPU-2"), ("H200", "H200"), "would train on one GPU"),
        ("kinds are not compared", ("GPU-1", "GPU-2"), ("H200", "A100"), ""),
    ],
)
def test_a_wrong_variant_takes_and_refuses_others(
    variant: str, uuids: Sequence[str], names: Sequence[str], told: str, two_ranks: Ranks
) -> None:
    """What the right one refuses is taken, and what it takes is refused."""
    for outcome in two_ranks.outcomes(begin_as, variant, uuids, names):
        assert (outcome.error is not None) == bool(told), outcome.trace
        assert told in str(outcome.error)


def begin_taking_turns(rank: int) -> None:
    with mock.patch("protwin.runtime.training.carry_out.device_of_rank", _taking_turns):
        begin_beside_one(rank, "cuda")


def test_ranks_that_take_turns_on_devices_are_noticed(two_ranks: Ranks) -> None:
    """They go past the message that names the rank which has none."""
    for told in two_ranks.errors(begin_taking_turns):
        assert "there is no device for LOCAL_RANK" not in told
