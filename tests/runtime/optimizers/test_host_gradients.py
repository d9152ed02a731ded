"""Gradients that the host adds up in float32: the bits of a plain loop with float32 sums, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import carry_out
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.shared.basics.errors import FileError, PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content
from tests.proof_size import some_quick
from tests.runtime.equality import offloaded_chunks
from tests.runtime.models import SEED, Case, differences, uncached
from tests.runtime.optimizers.test_named import case_of, trained
from tests.strategies.plans import plans

FLOAT32 = HostGradients.FLOAT32
OPTIMIZERS = (Optimizer.ADAMW, Optimizer.ADAMW_BF16, Optimizer.ADAFACTOR, Optimizer.ADAMW_8BIT)


class Summed:
    """Plain training in which the gradients of some parameters are added up in float32, with one master for each."""

    def __init__(self, case: Case, leaving: set[str], *, has_masters: bool) -> None:
        self.case = case
        self.model = uncached(case.build())
        named = dict(self.model.named_parameters())
        self.sums = {named[name]: nn.Parameter(named[name].detach().float()) for name in leaving}
        self.masters = {p: p.detach().float() for p in named.values()} if has_masters else {}
        self.optimizer = case.make_optimizer([{"params": [self.masters.get(p, p) for p in self.model.parameters()]}])

    def train(self, plan: Plan) -> list[float]:
        losses = []
        torch.manual_seed(SEED)
        for batches in self.case.steps(plan.micro_batches):
            for batch in batches:
                loss = self.case.loss(self.model, batch)
                loss.backward()
                losses.append(loss.item())
                for parameter, total in self.sums.items():
                    if parameter.grad is not None:
                        wide = parameter.grad.float()
                        total.grad = wide if total.grad is None else total.grad + wide
                        parameter.grad = None
            if plan.max_gradient_norm is not None:
                limited = [self.sums.get(p, p) for p in self.model.parameters()]
                nn.utils.clip_grad_norm_(limited, plan.max_gradient_norm)
            self.step()
        return losses

    def step(self) -> None:
        for parameter in self.model.parameters():
            gradient = self.sums.get(parameter, parameter).grad
            stepped = self.masters.get(parameter, parameter)
            stepped.grad = None if gradient is None else gradient.to(stepped.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter in self.masters:
                    parameter.copy_(self.masters[parameter])
                for held in (parameter, self.sums.get(parameter), self.masters.get(parameter)):
                    if held is not None:
                        held.grad = None


def leaving_of(case: Case, plan: Plan) -> set[str]:
    parameters = case.workload.parameters
    return {parameters[placed.index].name for c in offloaded_chunks(case.workload, plan) for placed in c.parameters}


@some_quick("optimizer", OPTIMIZERS, quick=2)
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_every_plan_equals_the_plain_loop_with_float32_sums(optimizer: Optimizer, data: st.DataObject) -> None:
    case = case_of(optimizer, torch.bfloat16)
    drawn = data.draw(plans(case.workload, optimizers=st.just(optimizer), host_gradients=st.just(FLOAT32)))[0]
    plan = drawn.model_copy(update={"micro_batches": data.draw(st.sampled_from((1, 3)))})
    plain = Summed(case, leaving_of(case, plan), has_masters=case.has_masters)
    expected = plain.train(plan)
    model, losses, _, _ = trained(case, plan)
    assert losses == expected
    assert differences(model, dict(plain.model.state_dict())) == []


def all_offloaded(case: Case, **knobs: Any) -> Plan:
    return Plan(workload_id=case.workload.identity, chunk_bytes=60_000, n_persist=0, n_buffer=20, **knobs)


def test_sums_of_the_parameters_type_are_other_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant rounds every sum to bfloat16; and the knob changes weights at all."""
    case = case_of(Optimizer.ADAMW, torch.bfloat16)
    plan = all_offloaded(case, micro_batches=3, host_gradients=FLOAT32)
    plain = Summed(case, leaving_of(case, plan), has_masters=True)
    plain.train(plan)
    accumulate = DeviceChunk.accumulate

    def rounded(self: DeviceChunk, staged: list[bool], arrived: list[bool]) -> list[bool]:
        present = accumulate(self, staged, arrived)
        for total in self.staged:
            total.copy_(total.bfloat16())
        return present

    narrow = trained(case, all_offloaded(case, micro_batches=3))[0]
    assert differences(narrow, dict(plain.model.state_dict())) != []
    monkeypatch.setattr(DeviceChunk, "accumulate", rounded)
    wrong = trained(case, plan)[0]
    assert differences(wrong, dict(plain.model.state_dict())) != []
    assert differences(wrong, dict(narrow.state_dict())) == []


@pytest.mark.parametrize("knobs", [{}, {"micro_batches": 3}, {"max_gradient_norm": 1.0}], ids=str)
def test_memory_and_copies_by_hand(knobs: dict[str, Any]) -> None:
    """Two bytes of a scalar arrive, four are added up; one gradient that nothing is done to has two alone."""
    case = case_of(Optimizer.ADAMW, torch.bfloat16)
    plan = all_offloaded(case, host_gradients=FLOAT32, **knobs)
    schedule = compile_schedule(plan, case.workload)
    layout = build_layout(case.workload.parameters, num_blocks=2, chunk_bytes=60_000)
    padded = sum(-(-p.num_elements * 4 // 256) * 256 for p in case.workload.parameters)
    arriving = sum(chunk.size_bytes for chunk in layout.chunks)

    def size_of(content: Content) -> int:
        return sum(b.size_bytes for b in schedule.buffers if b.content is content and b.is_static)

    assert (size_of(Content.GRADIENTS), size_of(Content.ARRIVING_GRADIENTS)) == (
        (padded, arriving) if knobs else (arriving, 0)
    )
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        for batches in case.steps(plan.micro_batches)[:1]:
            for batch in batches:
                case.loss(model, batch).backward()
            training.step()
    # Copies may end after the step has begun, and have ended when training has.
    scalars = sum(p.num_elements for p in case.workload.parameters)
    assert training.bytes_device_to_host == 2 * scalars * plan.micro_batches


def test_it_is_refused_where_it_says_nothing() -> None:
    case = case_of(Optimizer.ADAMW, torch.float32)
    with pytest.raises(PlanError, match="host gradients of float32 say nothing here: all 21 trained parameters are"):
        compile_schedule(all_offloaded(case, host_gradients=FLOAT32), case.workload)


def test_a_checkpoint_knows_its_sums(tmp_path: Any) -> None:
    case = case_of(Optimizer.ADAMW, torch.bfloat16)
    plan = all_offloaded(case, micro_batches=3, host_gradients=FLOAT32)
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        training.save(tmp_path / "saved")
        assert training.resume(tmp_path / "saved").step == 0
    other = plan.model_copy(update={"host_gradients": HostGradients.PARAMETERS})
    with (
        carry_out(case.build(), other, case.workload, optimizer=case.make_optimizer) as training,
        pytest.raises(FileError, match="with host_gradients float32; this plan has host_gradients parameters"),
    ):
        training.resume(tmp_path / "saved")
