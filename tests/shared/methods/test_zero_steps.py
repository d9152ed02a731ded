"""A step of ZeRO: copies of gradients in float64, flat and in float32, and state that comes with the optimizer.

The oracle is PyTorch itself: what DeepSpeed's ``step`` does with gradients, line by line, under a ledger of storages.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from torch._utils import _flatten_dense_tensors

from protwin.runtime.devices.ledger import MemoryLedger
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.other_policies import Zero3Updates
from protwin.shared.methods.runtime_profile import OUR_RUNTIME, Runtime, RuntimeProfile
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Memory, TaskKind
from protwin.shared.schema.workload import Phase, Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.memory.static_tensors import static_tensors
from tests.shared.small_models import parameter, plan, workload

ZERO3 = RuntimeProfile(Runtime.DEEPSPEED_ZERO3, bucket_scalars=0)


def drawn(seed: int, *, dtype: str = "bfloat16") -> Workload:
    """Blocks of one parameter each."""
    chance = random.Random(seed)
    sizes = [chance.randrange(40, 3000) for _ in range(chance.randrange(2, 7))]
    return workload([parameter(f"layers.{n}.weight", size, n, dtype=dtype) for n, size in enumerate(sizes)], len(sizes))


def resident(model: Workload) -> Plan:
    return plan(model, n_persist=len(layout_of(model, 4_096).chunks), n_buffer=0)


def step_of(asked: Plan, model: Workload, profile: RuntimeProfile) -> Phase | None:
    method = profile.method(FULL_TRAINING)
    schedule = compile_schedule(asked, model, policies=method.policies)
    verify_schedule(schedule, asked, model, rules=method.rules)
    (step,) = (task for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM)
    return step.phase


def peak_of_torch(sizes: list[int], most: int) -> int:
    """What the gradients' norms, flat copies and float32 copies take at most, by sub-groups of ``most`` scalars."""
    flat_buffer = torch.ones(sum(sizes), dtype=torch.bfloat16)
    ledger = MemoryLedger()
    ledger.ignore([flat_buffer])
    with ledger.metering():
        for gradient in flat_buffer.split(sizes):
            gradient.double().norm(2)
        for first in range(0, sum(sizes), most):
            averaged = [flat_buffer[first : first + most][:1], flat_buffer[first : first + most][1:]]
            wide = _flatten_dense_tensors(averaged).to(torch.float32)
            wide.mul_(0.5)
            del wide
    return ledger.watched_peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_what_torch_takes_for_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = random.Random(seed).choice((700, 2500, 10**9))
    monkeypatch.setattr(Zero3Updates, "num_widened", most)
    model = drawn(seed)
    sizes = [p.num_elements for p in model.parameters]
    phase = step_of(resident(model), model, ZERO3)
    assert phase is not None
    own = step_of(resident(model), model, OUR_RUNTIME)
    assert own is not None
    torch_bytes = peak_of_torch(sizes, most)
    assert torch_bytes <= phase.peak_bytes + 64  # a norm is a scalar
    assert phase.peak_bytes <= torch_bytes + own.peak_bytes  # pieces that ours widens beside
    levels = list(accumulate(phase.changes))
    assert max(levels) == phase.peak_bytes
    assert levels[-1] == 0


def test_a_norm_decides_where_one_parameter_is_most_of_a_model() -> None:
    sizes = [1_900, 40, 40]
    model = workload([parameter(f"layers.{n}.weight", size, n, dtype="bfloat16") for n, size in enumerate(sizes)], 3)
    phase = step_of(resident(model), model, ZERO3)
    assert phase is not None
    assert phase.changes[:2] == (8 * 1_900, -8 * 1_900)
    assert phase.peak_bytes >= 8 * 1_900 > 6 * sum(sizes)
    assert peak_of_torch(sizes, 10**9) == pytest.approx(8 * 1_900, abs=64)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT])
@pytest.mark.parametrize("most", [700, 10**9])
def test_state_is_there_before_the_first_iteration_with_the_same_bytes(optimizer: Optimizer, most: int) -> None:
    model = drawn(3)
    asked = resident(model).model_copy(update={"optimizer": optimizer})
    method = ZERO3.method(FULL_TRAINING)
    layout = layout_of(model, asked.chunk_bytes)
    schedule = compile_schedule(asked, model, policies=method.policies)
    together = static_tensors(schedule, model.parameters, layout, num_together=most)
    assert not together.first_step
    staying = [one.size_bytes for one in together.set_up if one.stays]
    assert sum(staying) == schedule.static_bytes(Memory.DEVICE)
    by_tensor = static_tensors(schedule, model.parameters, layout)
    assert sum(staying) == sum(one.size_bytes for one in by_tensor.set_up if one.stays) + sum(by_tensor.first_step)
    scalars = sum(p.num_elements for p in model.parameters)
    gone = [one.size_bytes for one in together.set_up if not one.stays]
    has_moments = optimizer in (Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAMW_8BIT)
    copies = [2 * min(most, scalars - first) for first in range(0, scalars, most)]
    assert gone == [*copies, 4 * min(most, scalars)] if has_moments else copies


def test_forwards_find_no_holes_that_state_fills_later() -> None:
    """In the set-up the masters come behind copies of 16 bits, moments behind masters, gradients behind all."""
    model = drawn(4)
    asked = resident(model)
    method = ZERO3.method(FULL_TRAINING)
    schedule = compile_schedule(asked, model, policies=method.policies)
    together = static_tensors(schedule, model.parameters, layout_of(model, asked.chunk_bytes), num_together=10**9)
    scalars = sum(p.num_elements for p in model.parameters)
    sizes = [one.size_bytes for one in together.set_up]
    gradients = [2 * p.num_elements for p in model.parameters]
    assert sizes[-len(gradients) :] == gradients
    first = sizes.index(2 * scalars)
    assert sizes[first : first + 4] == [2 * scalars, 4 * scalars, 4 * scalars, 4 * scalars]
