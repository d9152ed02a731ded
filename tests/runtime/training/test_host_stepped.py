"""Chunks that the device keeps and the host steps: the plain loop's bits, what is moved, and what may be read when.

Random plans of ``test_equality`` mix them with all other residencies; here are the corners.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.runtime.chunks.chunk import ChunkState, DeviceChunk
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.layout.residencies import ChunkResidency
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Memory
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.equality import miscounted, trained
from tests.runtime.models import SEED, Case, cases

CHUNK_BYTES = 9_000
NAMES = (
    "gpt2 with dropout, tied",
    "llama in bfloat16",
    "llama, frozen prologue and blocks",
    "hand-written, frozen tail",
)


def layout_of(case: Case) -> Layout:
    workload = case.workload
    return build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)


def plan_for(case: Case, *, n_persist: int, n_host_stepped: int, **knobs: Any) -> Plan:
    """With one buffer more than are needed."""
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_host_stepped=n_host_stepped,
        n_buffer=layout_of(case).min_buffers(n_persist + n_host_stepped) + 1,
        **knobs,
    )


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"micro_batches": 2, "max_gradient_norm": 0.5, "n_checkpoint": 2}], ids=str)
@some_quick("name", NAMES, quick=2)
def test_all_chunks_stepped_on_the_host_train_as_the_plain_loop(name: str, knobs: dict[str, Any]) -> None:
    case = cases()[name]
    chunks = layout_of(case).chunks
    plan = plan_for(case, n_persist=0, n_host_stepped=len(chunks), **knobs)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []
    # New values come once per step, however many micro-batches; some of the next step's have come already.
    steps, num_trainable = len(case.steps(plan.micro_batches)), sum(chunk.is_trainable for chunk in chunks)
    assert steps * num_trainable <= outcome.num_gathers <= (steps + 1) * num_trainable


def test_new_values_that_do_not_come_back_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the first values stay."""
    case = cases()["llama in bfloat16"]
    gather, brought = DeviceChunk.gather, set()

    def gather_once(self: DeviceChunk) -> None:
        if self in brought:
            self.make_room()
            self._enter(ChunkState.PRESENT)
        else:
            gather(self)
        brought.add(self)

    monkeypatch.setattr(DeviceChunk, "gather", gather_once)
    outcome = trained(case, plan_for(case, n_persist=0, n_host_stepped=len(layout_of(case).chunks)))
    assert outcome.losses[0] == case.plain.losses[0]
    assert outcome.losses[1:] != case.plain.losses[1:]


def peak_of(case: Case, plan: Plan) -> int:
    model, device = case.build(), CpuDevice(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        torch.manual_seed(SEED)
        for batch in case.batches[:2]:
            case.loss(model, batch).backward()
            training.step()
        return training.peak_device_bytes


def test_state_and_gradients_leave_the_device() -> None:
    """Within the guarantee, which is the budget; lower by the optimizer's state at the least."""
    case = cases()["llama in bfloat16"]
    num_chunks = len(layout_of(case).chunks)
    plans = [plan_for(case, n_persist=n, n_host_stepped=num_chunks - n, n_checkpoint=4) for n in (num_chunks, 0)]
    static = [compile_schedule(plan, case.workload).static_bytes(Memory.DEVICE) for plan in plans]
    persistent, host_stepped = (peak_of(case, plan) for plan in plans)
    assert persistent - host_stepped >= 0.9 * (static[0] - static[1]) > 0


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_an_evaluation_copies_every_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["llama"]
    model, num_chunks = case.build(), len(layout_of(case).chunks)
    plan = plan_for(case, n_persist=1, n_host_stepped=num_chunks - 1)
    copies: list[int] = []
    gather = DeviceChunk.gather

    def counted(self: DeviceChunk) -> None:
        copies.append(self.chunk.id)
        gather(self)

    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        step(case, model, training)
        with training.evaluation(), torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(DeviceChunk, "gather", counted)
            first, second = (case.loss(model, case.batches[1]) for _ in range(2))
        expected = case.loss(model, case.batches[1]).item()
        training.skip_step()
    assert first.item() == second.item() == expected == case.plain.losses[1]
    assert sorted(copies) == list(range(1, num_chunks))


def step(case: Case, model: nn.Module, training: Training) -> None:
    torch.manual_seed(SEED)
    case.loss(model, case.batches[0]).backward()
    training.step()


# -- one chunk -------------------------------------------------------------------------------------------------------


def test_old_values_cannot_be_read_and_memory_stays() -> None:
    case = cases()["llama"]
    model, device, layout = case.build(), CpuDevice(), layout_of(case)
    (chunk, *_) = (c for c in layout.chunks if c.is_trainable)
    specs = [case.workload.parameters[placed.index] for placed in chunk.parameters]
    parameters = [model.get_parameter(spec.name) for spec in specs]
    before = [parameter.detach().clone() for parameter in parameters]
    made = DeviceChunk(chunk, specs, parameters, device, residency=ChunkResidency.HOST_STEPPED)
    places = [parameter.untyped_storage().data_ptr() for parameter in parameters]
    level_bytes = device.ledger.named_bytes
    assert level_bytes == chunk.size_bytes
    with pytest.raises(ScheduleError, match="while its chunk is not on the device"):
        parameters[0].sum()
    made.gather()
    made.show()
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
    made.release()
    assert made.state is ChunkState.AWAY
    for master in made.masters:
        master.add_(1)
    with pytest.raises(ScheduleError, match="while its chunk is not on the device"):
        parameters[0].sum()
    made.gather()
    made.show()
    assert all(torch.equal(one, other + 1) for one, other in zip(parameters, before, strict=True))
    assert [parameter.untyped_storage().data_ptr() for parameter in parameters] == places
    assert device.ledger.named_bytes == level_bytes
    made.move_out()
    assert device.ledger.named_bytes == 0
    assert all(torch.equal(one, other + 1) for one, other in zip(parameters, before, strict=True))
