"""Inputs of recomputed blocks that hooks of FSDP hold, and their gradients: how much of them lies on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.keeping import Keeping
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.method import Method
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Content, Lane, Schedule, TaskKind
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.commands.options import RuntimeChoice
from tests.proof_size import examples
from tests.shared.small_models import OUTPUT_BYTES, SAVED_BYTES, parameter, phase, plan, workload
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads


def method_of(keeping: Keeping) -> Method:
    rules = replace(FULL_TRAINING.rules, keeping=keeping)
    return Method(policies=replace(FULL_TRAINING.policies, keeping=keeping), rules=rules)


HOLDING = method_of(Keeping(holds_inputs=True))


def compiled(plan: Plan, workload: Workload, method: Method) -> Schedule:
    """Compiled by the policies, and proven by the rules, which are written apart."""
    schedule = compile_schedule(plan, workload, policies=method.policies)
    verify_schedule(schedule, plan, workload, rules=method.rules)
    return schedule


def held_by_time(schedule: Schedule) -> list[int]:
    """Bytes that are held behind each backward of blocks, from the last block on."""
    lane = [schedule.tasks[task] for task in schedule.lanes[Lane.COMPUTE]]
    held = {buffer.id: buffer.size_bytes for buffer in schedule.buffers if buffer.content is Content.HELD_INPUT}
    alive, found = 0, []
    for task in lane:
        alive += sum(held.get(buffer, 0) for buffer in task.allocates)
        alive -= sum(held.get(buffer, 0) for buffer in task.frees)
        if task.kind is TaskKind.BACKWARD:
            found.append(alive)
    return found


def adapted(num_blocks: int, *, held: frozenset[int]) -> Workload:
    """A frozen parameter and an adapter in every block, trained ones alone in those that are not to be ``held``."""
    of_blocks = [
        [parameter(f"layers.{b}.weight", 1_000, b, trainable=b not in held), parameter(f"layers.{b}.adapter", 10, b)]
        for b in range(num_blocks)
    ]
    return workload([one for of in of_blocks for one in of], num_blocks)


def test_behind_every_backward_one_input_more_is_there_and_one_gradient() -> None:
    """The first block's are the prologue's output and what its backward is given, which are there as ever."""
    model = adapted(4, held=frozenset(range(4)))
    held = held_by_time(compiled(plan(model, n_checkpoint=4, chunk_bytes=8_192), model, HOLDING))
    assert held == [0, *(OUTPUT_BYTES * count for count in (1, 3, 5, 6)), 0]


def test_blocks_that_are_trained_or_kept_hold_nothing() -> None:
    """Of blocks 1 and 2: the gradient of 2's input comes behind the backward of 2, which made it, as 2's input does."""
    model = adapted(4, held=frozenset({1, 2}))
    held = held_by_time(compiled(plan(model, n_checkpoint=4, chunk_bytes=8_192), model, HOLDING))
    assert held == [0, *(OUTPUT_BYTES * count for count in (0, 1, 3, 4)), 0]
    assert not any(held_by_time(compiled(plan(model, chunk_bytes=8_192), model, HOLDING)))
    whole = adapted(4, held=frozenset())
    assert not any(held_by_time(compiled(plan(whole, n_checkpoint=4, chunk_bytes=8_192), whole, HOLDING)))


def test_every_input_is_as_large_as_what_the_block_before_gives_and_goes_with_its_micro_batch() -> None:
    """Blocks give 1, 2, 4 and 8 times as much: inputs of 1, 2 and 4 are held, and a gradient as large as each."""
    model = adapted(4, held=frozenset(range(4)))
    profiles = tuple(
        one.model_copy(
            update={
                "output_bytes": OUTPUT_BYTES << number,
                "checkpoint_forward": phase(OUTPUT_BYTES << number),
                "checkpoint_backward": phase(40 - SAVED_BYTES + 500 - (OUTPUT_BYTES << number)),
            }
        )
        for number, one in enumerate(model.profiles)
    )
    model = model.model_copy(update={"profiles": profiles})
    of_two = plan(model, n_checkpoint=4, chunk_bytes=8_192, micro_batches=2)
    held = held_by_time(compiled(of_two, model, HOLDING))
    assert held == 2 * [0, *(OUTPUT_BYTES * times for times in (4, 4 + 2 + 4, 10 + 1 + 2, 13 + 1)), 0]


@settings(max_examples=examples(200, 15))
@given(planned_workloads() | parallel_workloads())
def test_every_schedule_is_proven(case: PlannedWorkload) -> None:
    """Rules count what is held by themselves; a schedule without is refused, where there is something to hold."""
    found = compile_schedule(case.plan, case.workload, case.layout, policies=HOLDING.policies)
    verify_schedule(found, case.plan, case.workload, case.layout, rules=HOLDING.rules)
    own = compile_schedule(case.plan, case.workload, case.layout)
    if not any(buffer.content is Content.HELD_INPUT for buffer in found.buffers):
        assert found == own
        return
    assert guaranteed_device_peak(found).size_bytes >= guaranteed_device_peak(own).size_bytes
    for schedule, rules in ((own, HOLDING.rules), (found, FULL_TRAINING.rules)):
        with pytest.raises(ScheduleError):
            verify_schedule(schedule, case.plan, case.workload, case.layout, rules=rules)


class _Block(nn.Module):
    """A frozen map and a trained one; it remembers the leaves that it is called with."""

    def __init__(self, leaves: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.leaves = leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_leaf and torch.is_grad_enabled():
            self.leaves.append(weakref.ref(x))
        return torch.tanh(self.base(x) + self.adapter(x))


class _Model(nn.Module):
    """Blocks that are recomputed by reentrant checkpointing around them, as transformers has it."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, _Block) or (isinstance(module, nn.Linear) and module.weight.requires_grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_sharded", [True, False])
def test_fully_sharded_data_parallel_holds_them(is_sharded: bool, tmp_path: Path) -> None:
    """Itself, with one rank on the CPU: at the end of backward the inputs of all blocks, and a gradient of each."""
    leaves: list[weakref.ref[torch.Tensor]] = []
    model: nn.Module = _Model(_Block(leaves) for _ in range(5))
    alive: list[tuple[int, int]] = []

    def count(_: torch.Tensor) -> None:
        there = [leaf for leaf in (of() for of in leaves) if leaf is not None]
        alive.append((len(there), sum(leaf.grad is not None for leaf in there)))

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if is_sharded:
            apart = partial(lambda_auto_wrap_policy, lambda_fn=_is_unit)
            model = FSDP(model, auto_wrap_policy=apart, use_orig_params=False, device_id=torch.device("cpu"))
        start = torch.ones(2, 8, requires_grad=True)
        start.register_hook(count)
        model(1 * start).sum().backward()
    finally:
        dist.destroy_process_group()
    assert alive == [(5, 5) if is_sharded else (0, 0)]


def test_it_is_asked_for_where_it_is_known() -> None:
    asked = RuntimeProfile(Runtime.FSDP, recomputes_whole=True, holds_inputs=True)
    assert asked.other == "copies of fsdp around collectives, blocks recomputed whole, inputs of blocks that hooks hold"
    model = adapted(2, held=frozenset({0, 1}))
    method = asked.method(FULL_TRAINING)
    assert (
        max(held_by_time(compiled(plan(model, n_checkpoint=2, chunk_bytes=8_192), model, method))) == 2 * OUTPUT_BYTES
    )
    assert RuntimeChoice(runtime=Runtime.FSDP, reentrant=True, holds_inputs=True).profile() == asked
    for wrong in (replace(asked, recomputes_whole=False), replace(asked, runtime=Runtime.FSDP2)):
        with pytest.raises(PlanError, match="as hooks of FSDP hold them"):
            wrong.check(plan(model))


def test_hooks_of_flat_parameters_alone_hold_them() -> None:
    """Composer trains by the first FSDP too."""
    model = adapted(2, held=frozenset({0, 1}))
    sharded = plan(model).model_copy(
        update={"parallel": ParallelMode.SHARDED, "num_ranks": 2, "n_shard": 2, "max_gradient_norm": 1.0}
    )
    passed = set()
    for runtime in Runtime:
        asked = RuntimeProfile(runtime, recomputes_whole=True, holds_inputs=True)
        try:
            asked.check(sharded)
        except PlanError as error:
            if "as hooks of FSDP hold them" not in str(error):
                raise
        else:
            passed.add(runtime)
    assert passed == {Runtime.FSDP, Runtime.FSDP_BACKWARD_POST, Runtime.COMPOSER}
