"""Parts of gradients that go with the step: when they are there, and how much that saves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.keeping import Keeping
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Memory, Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.memory.reserved import Segments, bytes_of_other_streams
from tests.proof_size import examples
from tests.shared.methods.test_buckets import compiled, method_of
from tests.shared.small_models import chain, plan
from tests.strategies.plans import PlannedWorkload, parallel_workloads

GOING = method_of(Keeping(parts_go=True))
BY_FSDP = (Runtime.FSDP, Runtime.FSDP_BACKWARD_POST, Runtime.COMPOSER, Runtime.FSDP2)


def bytes_for_good(schedule: Schedule) -> int:
    """Of parts of gradients on the device."""
    return sum(
        buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.is_static and buffer.memory is Memory.DEVICE and buffer.content is Content.REDUCED_GRADIENTS
    )


def sharded(model: Workload, micro_batches: int = 1) -> Plan:
    """A plan of two ranks that have all four chunks in parts."""
    return plan(model, n_buffer=2, micro_batches=micro_batches).model_copy(
        update={"parallel": ParallelMode.SHARDED, "num_ranks": 2, "n_shard": 4, "n_persist": 0}
    )


@settings(max_examples=examples(300, 25), deadline=None)
@given(parallel_workloads())
def test_every_schedule_is_proven(case: PlannedWorkload) -> None:
    """By rules that know of it, and by no others; it never takes more, nor less by more than the parts."""
    found = compile_schedule(case.plan, case.workload, case.layout, policies=GOING.policies)
    verify_schedule(found, case.plan, case.workload, case.layout, rules=GOING.rules)
    own = compile_schedule(case.plan, case.workload, case.layout)
    assert bytes_for_good(found) == 0
    parts_bytes = bytes_for_good(own)
    peaks = [guaranteed_device_peak(schedule).size_bytes for schedule in (own, found)]
    assert peaks[0] - parts_bytes <= peaks[1] <= peaks[0]
    if parts_bytes:
        for schedule, rules in ((own, GOING.rules), (found, FULL_TRAINING.rules)):
            with pytest.raises(ScheduleError):
                verify_schedule(schedule, case.plan, case.workload, case.layout, rules=rules)
    else:
        assert found == own


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_they_come_with_the_first_backward_and_go_with_the_step(micro_batches: int) -> None:
    model = chain(4)
    asked = sharded(model, micro_batches=micro_batches)
    schedule = compiled(asked, model, GOING)
    made = {buffer: task for task in schedule.tasks for buffer in task.allocates}
    freed = {buffer: task for task in schedule.tasks for buffer in task.frees}
    parts = [buffer.id for buffer in schedule.buffers if buffer.content is Content.REDUCED_GRADIENTS]
    stay = [buffer for buffer in parts if freed[buffer].kind is TaskKind.DEVICE_ADAM]
    assert [(made[b].kind, made[b].micro_batch) for b in stay] == [(TaskKind.REDUCE_SCATTER, 0)] * 4
    assert len(parts) == 4 * micro_batches, "later ones are added to them"
    assert {freed[b].kind for b in parts if b not in stay} <= {TaskKind.REDUCE_SCATTER}


def test_a_schedule_that_has_none_is_refused() -> None:
    model = chain(4)
    asked = sharded(model)
    schedule = compiled(asked, model, GOING)
    buffers = tuple(
        replace(buffer, content=Content.FLAT_GRADIENTS) if buffer.content is Content.REDUCED_GRADIENTS else buffer
        for buffer in schedule.buffers
    )
    with pytest.raises(ScheduleError, match=r"reduced_gradients chunk 3.*too little"):
        verify_schedule(replace(schedule, buffers=buffers), asked, model, rules=GOING.rules)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_stream_that_reduces_has_all_of_them_and_one_on_its_way(micro_batches: int) -> None:
    """Four parts of 1,000 numbers over two ranks; from the second micro-batch on, one that is added to them."""
    model = chain(4)
    asked = sharded(model, micro_batches=micro_batches)
    schedule = compiled(asked, model, GOING)
    part = max(buffer.size_bytes for buffer in schedule.buffers if buffer.content is Content.REDUCED_GRADIENTS)
    assert part >= 4 * 1_000 // 2
    expected = (4 if micro_batches == 1 else 5) * part
    assert bytes_of_other_streams(Segments(parts_apart=True, gathering_bytes=7), schedule) == 7 + expected
    assert bytes_of_other_streams(Segments(gathering_bytes=7), schedule) == 7


def test_fsdp_has_them_unless_gradients_are_zeroed_in_place() -> None:
    for runtime in Runtime:
        method = RuntimeProfile(runtime).method(FULL_TRAINING)
        assert method.policies.keeping.parts_go is (runtime in BY_FSDP)
        assert method.rules.keeping == method.policies.keeping
    zeroed = RuntimeProfile(Runtime.FSDP2, keeps_gradients=True).method(FULL_TRAINING)
    assert not zeroed.policies.keeping.parts_go


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["fsdp", "fsdp2"])
def test_it_lets_go_of_them(by: str, tmp_path: Path) -> None:
    """Itself, with one rank on the CPU: ahead of every forward no parameter has a gradient, and behind backward all."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        if by == "fsdp":
            model = FSDP(model, auto_wrap_policy=partial(_is_map), device_id=torch.device("cpu"))
        else:
            mesh = init_device_mesh("cpu", (1,))
            for layer in list(model.children()):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
            model(torch.ones(2, 8)).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def _is_map(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, nn.Linear)
