"""Ranks on stand-ins for CUDA devices, one in each process, and what goes wrong with one wait or one reference less."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from protwin.runtime import CudaDevice, carry_out
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.lanes.rank_work import RankWork
from protwin.runtime.ranks import ordered_sums
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import TaskId
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.deferred_cuda import DeferredCuda, backward, cuda_device
from tests.runtime.models import SEED, differences
from tests.runtime.ranks.beside_ddp import STEPS, all_cases, batches_of, in_default_group, prepare, reference

LANES: Final = {"compute": "compute", "H2D": "2", "D2H": "3", "collective": "4"}
"""Streams by the order in which they are made: the clock's, then the lanes'."""


@dataclass(frozen=True)
class Deferred:
    """What a training on a stand-in gave."""

    different: list[str]
    """Names of what is not as DDP has it: weights of the end, losses."""
    num_collectives: int
    """Of the device's tensors."""
    peak_bytes: int
    guaranteed_bytes: int


def _by_the_library(tensor: torch.Tensor) -> bool:
    """In the place of ``is_ordered_here``; a mock would hold on to what it is called with."""
    return False


@in_default_group
def train_deferred(
    rank: int, name: str, plan: Plan, num_batches: int, starved: str, seed: int, variant: str = "", checks: bool = True
) -> Deferred:
    """Train beside the reference, with the stream of lane ``starved`` as late as events allow.

    ``checks``: gradients are looked at, for which lanes wait for the device more often.
    """
    case = all_cases(num_batches)[name]
    expected = reference(name, rank, plan, num_batches)
    # Traced before anything defers.
    workload = case.workload
    wire = dist.new_group(backend="gloo")
    model = prepare(case.build(), rank)
    cuda = DeferredCuda(starved=LANES.get(starved, ""), seed=seed, wire=wire, uuid=f"GPU {rank}")
    losses: list[torch.Tensor] = []
    # As of NCCL, the order of a sum is the library's; of two ranks there is but one.
    as_nccl = mock.patch.object(ordered_sums, "is_ordered_here", _by_the_library)
    with cuda.installed(), as_nccl, WRONG[variant]():
        device = cuda_device()
        with carry_out(
            model,
            plan,
            workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            device=device,
            rank_timeout_s=30,
            check_gradients=checks,
        ) as training:
            torch.manual_seed(SEED + rank)
            for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches, STEPS):
                for batch in batches:
                    loss = case.loss(model, batch)
                    backward(loss, cuda)
                    losses.append(loss.detach())
                training.step()
            guaranteed_bytes = guaranteed_device_peak(training.schedule).size_bytes
            peak_bytes = training.peak_device_bytes - sum(loss.nbytes for loss in losses)
        found = [loss.item() for loss in losses]
        cuda.synchronize()
        assert device.pinned.size_bytes == 0
    wrong = [f"loss {i}" for i, pair in enumerate(zip(found, expected.losses, strict=True)) if pair[0] != pair[1]]
    return Deferred(wrong + differences(model, expected.weights), cuda.num_collectives, peak_bytes, guaranteed_bytes)


# -- wrong variants --------------------------------------------------------------------------------------------------


@contextmanager
def _not_waiting(lane: str) -> Iterator[None]:
    """The stream of ``lane`` waits for no other."""
    right = CudaDevice.wait_event

    def wrong(device: CudaDevice, event: Any) -> None:
        name = threading.current_thread().name
        own = name.removeprefix("protwin-") if name.startswith("protwin-") else "compute"
        if own != lane:
            right(device, event)

    with mock.patch.object(CudaDevice, "wait_event", wrong):
        yield


@contextmanager
def _let_go_when_queued() -> Iterator[None]:
    """What a collective reads goes when it is queued."""
    right = RankWork._scatter

    def wrong(self: RankWork, *args: Any) -> None:
        right(self, *args)
        self._held.clear()

    with mock.patch.object(RankWork, "_scatter", wrong):
        yield


@contextmanager
def _room_of_the_lanes_own() -> Iterator[None]:
    """Memory for what is added up is taken on the collective's stream, and freed while others still read it."""
    right = RankWork._scatter

    def wrong(self: RankWork, chunk: ShardedChunk, key: tuple[int, int, int], task: TaskId) -> None:
        self._rooms[key] = self._room(chunk, is_first=key[1] == 0)
        right(self, chunk, key, task)

    with mock.patch.object(RankWork, "_scatter", wrong), mock.patch.object(RankWork, "make_room"):
        yield


@contextmanager
def _zeros_of_the_lanes_own() -> Iterator[None]:
    """Zeros in the place of a gradient are made on the collective's stream, and freed while others still read them."""
    with mock.patch.object(CudaDevice, "in_compute_order", return_value=nullcontext()):
        yield


WRONG: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "": nullcontext,
    "collective does not wait": partial(_not_waiting, "collective"),
    "compute does not wait": partial(_not_waiting, "compute"),
    "offload does not wait": partial(_not_waiting, "d2h"),
    "let go when queued": _let_go_when_queued,
    "room of the lane's own": _room_of_the_lanes_own,
    "zeros of the lane's own": _zeros_of_the_lanes_own,
}

VARIANTS: Final = (
    ("collective does not wait", ParallelMode.DDP, 0, "compute"),
    ("collective does not wait", ParallelMode.SHARDED, 2, "compute"),
    ("collective does not wait", ParallelMode.SHARDED, 0, "H2D"),
    ("compute does not wait", ParallelMode.DDP, 1, "collective"),
    ("compute does not wait", ParallelMode.SHARDED, 2, "collective"),
    ("offload does not wait", ParallelMode.REPLICATED, 0, "collective"),
    ("offload does not wait", ParallelMode.SHARDED, 2, "collective"),
    ("let go when queued", ParallelMode.SHARDED, 3, "collective"),
    ("room of the lane's own", ParallelMode.SHARDED, 0, "D2H"),
    ("zeros of the lane's own", ParallelMode.DDP, 0, "compute"),
    ("zeros of the lane's own", ParallelMode.REPLICATED, 0, "D2H"),
)
"""Variant, mode and seed of a plan that shows it, and the lane that lags."""
