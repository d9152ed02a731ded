"""Inputs of recomputed blocks that travel: the plain loop's bits, and what travels is what was handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.hooks.offloaded_inputs import HandedOn, OffloadedInput, as_given
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.travelling_inputs import input_bytes
from protwin.shared.schema.plan import ActivationMode, Plan, mode_counts
from protwin.shared.schema.schedule import Content
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settled_lanes
from tests.runtime.equality import miscounted, trained
from tests.runtime.models import Case, cases

KEEP, CHECKPOINT, SWAP, OFFLOAD_INPUT, SELECTIVE = ActivationMode


def plan_of(workload: Workload, modes: tuple[ActivationMode, ...], *, micro_batches: int = 1) -> Plan:
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=9_000)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=9_000,
        n_persist=0,
        n_buffer=layout.min_buffers(0) + 1,
        activation_modes=modes,
        micro_batches=micro_batches,
        **mode_counts(modes),
    )


@pytest.mark.parametrize("modes", [(OFFLOAD_INPUT,), (SWAP, OFFLOAD_INPUT, KEEP), (CHECKPOINT, OFFLOAD_INPUT)])
@some_quick("name", ["gpt2 with dropout, tied", "llama", "hand-written, batch statistics"], quick=1)
def test_every_mixture_equals_the_plain_loop_within_the_guarantee(name: str, modes: tuple[ActivationMode, ...]) -> None:
    """Two micro-batches, everything offloaded; the budget is the guaranteed peak, to the byte."""
    case = cases()[name]
    every = tuple(modes[block % len(modes)] for block in range(case.workload.num_blocks))
    plan = plan_of(case.workload, every, micro_batches=2)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(2, None).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []
    assert sum(size for size, mode in zip(input_bytes(case.workload), every, strict=True) if mode is OFFLOAD_INPUT) > 0


# -- a model with large inputs ---------------------------------------------------------------------------------------

WIDTH, ROWS = 16, 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) in and out; (rows, 1)."""
        out: torch.Tensor = hidden + torch.tanh(self.weight(hidden)) * mask
        return out


@dataclass
class Result:
    loss: torch.Tensor


class Stack(nn.Module):
    """Layers that share a mask; ``scales``: whether the model changes what it hands from one to the next."""

    def __init__(self, num_layers: int, *, scales: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.scales = scales

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, WIDTH)."""
        hidden, mask = self.entry(rows), (rows.sum(1, keepdim=True) > 0).to(rows.dtype)
        for layer in self.layers:
            hidden = layer(hidden, mask)
            if self.scales:
                hidden = hidden * 0.5
        return Result(hidden.square().mean())


def stack_case(num_layers: int, *, scales: bool = False) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Stack(num_layers, scales=scales)

    torch.manual_seed(1)
    return Case(build, [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(2)])


def peak_bytes(num_layers: int, mode: ActivationMode) -> int:
    """Measured, with the weights of all layers on the host, so that activations alone may grow."""
    case = stack_case(num_layers)
    outcome = trained(case, plan_of(case.workload, (mode,) * num_layers))
    assert outcome.different == []
    assert outcome.peak_bytes <= outcome.guaranteed_bytes
    return outcome.peak_bytes


def test_the_measured_peak_does_not_grow_with_the_number_of_blocks() -> None:
    """The wrong variant keeps inputs on the device: every block more holds one more."""
    handed_bytes = ROWS * WIDTH * 4
    assert peak_bytes(12, CHECKPOINT) - peak_bytes(6, CHECKPOINT) >= 6 * handed_bytes
    assert peak_bytes(12, OFFLOAD_INPUT) - peak_bytes(6, OFFLOAD_INPUT) < handed_bytes


def test_an_input_that_was_the_block_before_s_output_in_the_trace_alone_is_refused() -> None:
    case = stack_case(3)
    model = case.build()
    assert isinstance(model, Stack)
    model.scales = True
    plan = plan_of(case.workload, (OFFLOAD_INPUT,) * 3)
    carrying_out = carry_out(model, plan, case.workload, optimizer=case.make_optimizer)
    message = r"layers\.1 is not given what the block before it returns"
    with carrying_out, pytest.raises(ScheduleError, match=message):
        case.loss(model, case.batches[0])


# -- inputs that others hold -----------------------------------------------------------------------------------------


class Wired(nn.Module):
    """Six blocks, and how the model goes on with what they return."""

    def __init__(self, wiring: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        if wiring == "activations at the end":
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.wiring = wiring

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, WIDTH)."""
        hidden, scale, passed, more = self.entry(rows), torch.ones(()), [], torch.zeros(())
        if self.wiring == "stages":
            for stage in (self.layers[:2], self.layers[2:]):
                hidden = self.run(stage, hidden, scale)
            return Result(self.head(hidden).square().mean())
        for number, layer in enumerate(self.layers):
            if self.wiring == "skips" and number >= 3:
                hidden = layer(hidden, passed.pop() if number > 3 else scale)
            elif self.wiring == "residuals outside":
                hidden = hidden + layer(hidden, scale)
            elif self.wiring == "activations at the end":
                hidden = layer(hidden)
            else:
                hidden = layer(hidden * 0.5 if self.wiring == "scaled" else hidden, scale)
            if (self.wiring in ("skips", "held") and number < 2) or self.wiring == "all at the end":
                passed.append(hidden)
            if self.wiring == "losses between":
                more = more + self.head(hidden).square().mean()
        if self.wiring == "all at the end":
            hidden = torch.stack(passed).mean(0)
        if self.wiring == "held":
            reach_peak()
        return Result(self.head(hidden).square().mean() + more)

    def run(self, stage: Iterable[nn.Module], hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Several layers, whose caller holds what it gives to the first of them until the last one has run."""
        for layer in stage:
            hidden = layer(hidden, scale)
        reach_peak()
        return hidden


def reach_peak() -> None:
    """The most that the model holds comes here."""
    torch.zeros(64 * WIDTH, ROWS).sum()


WIRINGS = {
    "none": [1, 2, 3, 4, 5],
    "skips": [3, 4, 5],
    "held": [3, 4, 5],
    "stages": [1, 3, 4, 5],
    "scaled": [],
    "residuals outside": [],
    "activations at the end": [],
    "losses between": [],
    "all at the end": [],
}
"""The blocks whose input is the output of the block before, and held by nobody else in any mode."""


@some_quick("wiring", list(WIRINGS), quick=["none", "skips", "held", "stages", "activations at the end"])
def test_inputs_that_others_hold_stay_and_the_guarantee_holds(wiring: str) -> None:
    """A trace tells, so that no plan counts on their memory; the budget is the guaranteed peak, to the byte."""
    case = Case(lambda: Wired(wiring), [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(2)])
    travelling = input_bytes(case.workload)
    assert [block for block, size_bytes in enumerate(travelling) if size_bytes] == WIRINGS[wiring]
    for modes in ((OFFLOAD_INPUT,) * 6, (SWAP, OFFLOAD_INPUT, KEEP) * 2, (KEEP, KEEP, OFFLOAD_INPUT) * 2):
        plan = plan_of(case.workload, modes)
        outcome = trained(case, plan)
        assert outcome.losses == case.plain.losses
        assert outcome.different == []
        assert miscounted(case, plan, outcome) == []


def plain_step(loss: torch.Tensor, held: list[torch.Tensor]) -> None:
    loss.backward()


def by_hand(loss: torch.Tensor, held: list[torch.Tensor]) -> None:
    (loss / 2).backward()


def by_hand_with_names(loss: torch.Tensor, held: list[torch.Tensor]) -> None:
    """The loss, its part, that of the step before, and their sum."""
    scaled = loss / 2
    held[:] = [held[0] + loss.detach() if held else loss.detach(), scaled]
    (scaled * 1024.0).backward()


@pytest.mark.parametrize("step", [plain_step, by_hand, by_hand_with_names])
@pytest.mark.parametrize("mode", [OFFLOAD_INPUT, KEEP])
def test_the_guarantee_holds_for_loops_that_scale_their_losses(
    step: Callable[[torch.Tensor, list[torch.Tensor]], None], mode: ActivationMode
) -> None:
    """Of a model whose plain loop takes what is guaranteed, to the byte."""
    case = Case(lambda: Wired("none"), [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(4)])
    plan = plan_of(case.workload, (mode,) * 6, micro_batches=2)
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    model, held = case.build(), []
    device = CpuDevice(limit_bytes)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for batches in case.steps(2):
            for batch in batches:
                loss = case.loss(model, batch)
                step(loss, held)
            training.step()
        assert limit_bytes - 32 <= training.peak_device_bytes <= limit_bytes


class LargeAtTheEnd(Stack):
    """Three layers; the epilogue's forward holds the most of all."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3)

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, WIDTH)."""
        found = super().forward(rows)
        torch.zeros(64 * WIDTH, ROWS).sum()
        return found


@pytest.mark.parametrize("depth", [1, 3])
def test_an_input_that_comes_back_while_its_caller_holds_it_is_there_once(depth: int) -> None:
    """The last block's, which goes with the block's return: a moment after the epilogue's forward has begun.

    Lanes that have done all they can by then are the timing in which it matters, in iterations that nobody watches.
    """
    batches = [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(METERED_ITERATIONS + 2)]
    case = Case(LargeAtTheEnd, batches)
    modes = (KEEP, KEEP, OFFLOAD_INPUT)
    plan = plan_of(case.workload, modes).model_copy(update={"prefetch_depth": depth})
    device = CpuDevice(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes)
    model, losses = case.build(), []
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        with settled_lanes(training):
            for batch in batches:
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
                training.step()
        assert device.ledger.named.get(Content.SWAPPED, 0) == 0
    assert losses == case.plain.losses


# -- what travels ----------------------------------------------------------------------------------------------------


def packed_by(block: nn.Module, given: Any, output: Any, following: Any) -> tuple[OffloadedInput, Any]:
    """What the block behind ``block`` keeps of ``following``, if ``block`` made ``output`` of ``given``."""
    handed_on = HandedOn(block, block)
    handed_on.enter(given)
    handed_on.leave(output)
    trip = OffloadedInput("next", 1, 2**20, CpuDevice())
    return trip, trip.packed(following, handed_on.storages)


def test_what_several_blocks_are_given_and_parameters_stay() -> None:
    block = Layer()
    mask, passed, made = torch.ones(4, 1), torch.ones(4, WIDTH), torch.rand(4, WIDTH).t()
    following = ((made[1:], passed), {"mask": mask, "more": [made, block.weight.weight]})
    output = (made, passed, block.weight.weight)
    trip, packed = packed_by(block, (passed, mask), output, following)
    assert [leaving.untyped_storage()._cdata for leaving in trip.leave()] == [made.untyped_storage()._cdata]
    expected = made.clone()
    assert trip.offload() == made.untyped_storage().nbytes()
    made.zero_()
    trip.fetch()
    trip.arrive()
    (sliced, second), keywords = as_given(packed)
    assert second is passed
    assert keywords["mask"] is mask
    assert keywords["more"][1] is block.weight.weight
    assert torch.equal(keywords["more"][0], expected)
    assert keywords["more"][0].stride() == made.stride()
    assert sliced.untyped_storage()._cdata == keywords["more"][0].untyped_storage()._cdata


def test_an_input_that_was_changed_in_place_is_refused_as_by_autograd() -> None:
    made = torch.rand(4, WIDTH)
    trip, packed = packed_by(Layer(), (), made, (made,))
    made.add_(1)
    assert trip.leave() == []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        as_given(packed)


def test_a_traced_workload_knows_what_moves() -> None:
    """Blocks but the first move what the one before hands on: the hidden state, and no mask."""
    model = Stack(3)
    workload = trace(model, {"rows": torch.randn(ROWS, WIDTH)}, repeats=0)
    assert input_bytes(workload) == [0, ROWS * WIDTH * 4, ROWS * WIDTH * 4]
