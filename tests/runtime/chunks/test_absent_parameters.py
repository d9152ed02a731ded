"""Weights that are read, exchanged or held while their chunks come and go."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.chunks.chunk import ChunkState
from protwin.runtime.training.training import Training
from protwin.shared.basics.errors import ScheduleError
from tests.proof_size import some_quick
from tests.runtime.models import Case, cases, differences
from tests.runtime.optimizing import half_offloaded
from tests.runtime.watchdog import ends_in_time


def case_of() -> Case:
    return cases()["llama"]


def start(model: nn.Module) -> Training:
    case = case_of()
    return carry_out(model, half_offloaded(case.workload), case.workload, optimizer=case.make_optimizer)


def step(model: nn.Module, training: Training, number: int = 0) -> None:
    case = case_of()
    case.loss(model, case.batches[number]).backward()
    training.step()


def name_of(model: nn.Module, wanted: nn.Parameter) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)


def away(model: nn.Module) -> nn.Parameter:
    """A parameter of an offloaded chunk."""
    found = [p for p in model.parameters() if type(p) is not nn.Parameter]
    assert found
    return found[0]


READS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: sum(p.norm() for p in model.parameters()),
    "isnan": lambda model: torch.isnan(away(model)),
    "write": lambda model: away(model).detach().zero_(),
    "write in place": lambda model: torch.no_grad()(lambda: away(model).mul_(2))(),
    "data": lambda model: away(model).data.sum(),
    "transposed": lambda model: away(model).T.sum(),
    "text": lambda model: repr(away(model)),
    "copy": copy.deepcopy,
    "numpy": lambda model: away(model).detach().numpy(),
    "list of tensors": lambda model: torch._foreach_norm(list(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model),
    "a loss of weights": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
}


@some_quick("read", READS, quick=6)
def test_a_read_of_what_is_not_there_is_an_error_and_harms_nothing(read: str) -> None:
    case = case_of()
    model = case.build()
    with start(model) as training:
        step(model, training, 0)
        with pytest.raises(ScheduleError, match=r"parameter .* was read .* after close\(\)|copied .* after close\(\)"):
            READS[read](model)
        for number in range(1, len(case.batches)):
            step(model, training, number)
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())
    assert differences(model, case.plain.weights[-1]) == []


def test_what_has_come_ahead_is_no_one_elses_to_read_whatever_its_copy_has_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every offloaded weight refuses before the forward that it comes for: while copies run, and when they are done."""
    case, model = case_of(), case_of().build()
    now, may_copy = CpuDevice.copy, Event()

    def late(self: CpuDevice, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        may_copy.wait(10)
        now(self, destination, source, to_device=to_device)

    monkeypatch.setattr(CpuDevice, "copy", late)
    with ends_in_time(), start(model) as training:
        offloaded = [chunk for chunk in training._placed.chunks if not chunk.is_persistent]
        for state in (ChunkState.COMING, ChunkState.PRESENT):
            while not any(chunk.state is state for chunk in offloaded):
                time.sleep(0.001)
            for parameter in (parameter for chunk in offloaded for parameter in chunk.parameters):
                with pytest.raises(ScheduleError, match=r"was read \(sum\) while its chunk is not on the device"):
                    parameter.sum()
            may_copy.set()
        for number in range(len(case.batches)):
            step(model, training, number)
    assert differences(model, case.plain.weights[-1]) == []


def test_facts_may_be_asked_for() -> None:
    model = case_of().build()
    with start(model) as training:
        step(model, training)
        found = away(model)
        assert (found.shape, found.dtype, found.device, found.requires_grad, found.grad) == (
            torch.Size(
                next(spec.shape for spec in case_of().workload.parameters if name_of(model, found) == spec.name)
            ),
            torch.float32,
            torch.device("cpu"),
            True,
            None,
        )
        assert isinstance(found, nn.Parameter)
        assert found.numel() == found.size(0) * (found.size(1) if found.dim() > 1 else 1)
        assert {found} == {found}
        assert not found.is_complex()


def test_a_subclass_of_parameters_is_itself_again() -> None:
    class Named(nn.Parameter):
        pass

    case = case_of()
    model = case.build()
    layer = model.model.layers[-1].mlp.down_proj  # type: ignore[index, union-attr]
    layer.weight = Named(layer.weight.detach())
    with start(model) as training:
        step(model, training)
        assert any(isinstance(p, Named) and type(p) is not Named for p in model.parameters())
    assert type(layer.weight) is Named


def test_an_array_that_holds_a_weights_memory_does_not_stop_close() -> None:
    case = case_of()
    model = case.build()
    with start(model) as training:
        step(model, training, 0)
        persistent = [p for chunk in training._placed.chunks if chunk.is_persistent for p in chunk.parameters]
        held = [p.detach().numpy() for p in persistent]
        assert held
        for number in range(1, len(case.batches)):
            step(model, training, number)
    assert differences(model, case.plain.weights[-1]) == []
    for parameter, array in zip(persistent, held, strict=True):
        parameter.data.fill_(7)
        assert not (array == 7).any()


def exchange_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(56, 32))


def exchange_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 56, bias=False)


def add_module(model: Any) -> None:
    model.model.layers[1].mlp.extra = nn.Linear(32, 32)


def remove_module(model: Any) -> None:
    del model.model.layers[1].mlp.up_proj


@pytest.mark.parametrize("change", [exchange_weight, exchange_module, add_module, remove_module])
def test_an_exchanged_part_is_noticed_before_it_is_trained_in_vain(change: Callable[[Any], None]) -> None:
    model = case_of().build()
    with start(model) as training:
        step(model, training)
        change(model)
        with pytest.raises(ScheduleError, match=r"model\.layers\.1\.mlp\.(up_proj|extra).* was exchanged, added or"):
            step(model, training)
