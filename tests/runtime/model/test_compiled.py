"""Compiled parts of a model are refused before anything runs, and named; everything else that is compiled stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.runtime.model.compiled import compiled_part
from protwin.runtime.recording import metering
from protwin.shared.basics.errors import PlanError, ScheduleError, WorkloadError
from tests.runtime.models import SEED, Case, adamw, cases, differences
from tests.runtime.resuming import kept, offloaded


@pytest.fixture(autouse=True)
def _forgetting() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_of() -> Case:
    return cases()["llama"]


def block(model: nn.Module) -> nn.Module:
    model.model.layers[1].compile(backend="eager")
    return model


def part_of_a_block(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.compile(backend="eager")
    return model


def whole(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def wrapped_block(model: nn.Module) -> nn.Module:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def forward(model: nn.Module) -> nn.Module:
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend="eager")
    return model


def activation(model: nn.Module) -> nn.Module:
    """A function that a module keeps."""
    model.model.layers[1].mlp.squash = torch.compile(torch.tanh, backend="eager")
    return model


class Compiled(nn.Identity):
    """A method that is compiled for all modules of its class."""

    @torch.compile(backend="eager")
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return hidden


def method(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.act_fn = Compiled()
    return model


@contextmanager
def without_warnings() -> Iterator[None]:
    """TorchScript is deprecated in newer torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def scripted(model: nn.Module) -> nn.Module:
    with without_warnings():
        model.model.layers[1].mlp.act_fn = torch.jit.script(nn.SiLU())
    return model


def traced_once(model: nn.Module) -> nn.Module:
    with without_warnings():
        model.lm_head = torch.jit.trace(model.lm_head, torch.ones(2, model.config.hidden_size))
    return model


COMPILED: dict[Callable[[nn.Module], nn.Module], str] = {
    block: r"^model.layers.1 is compiled \(compile\(\) of the module\)",
    part_of_a_block: r"^model.layers.1.mlp is compiled \(compile\(\) of the module\)",
    whole: r"^LlamaForCausalLM is compiled \(compile\(\) of the module\)",
    wrapped: r"^OptimizedModule is compiled \(torch.compile of the module\)",
    wrapped_block: r"^model.layers.1 is compiled \(torch.compile of the module\)",
    forward: r"^model.layers.1 is compiled \(torch.compile of its forward\)",
    activation: r"^model.layers.1.mlp is compiled \(torch.compile of its squash\)",
    method: r"^model.layers.1.mlp.act_fn is compiled \(torch.compile of its forward\)",
    scripted: r"^model.layers.1.mlp.act_fn is TorchScript",
    traced_once: r"^lm_head is TorchScript",
}


@pytest.mark.parametrize("change", COMPILED)
def test_compiled_parts_are_refused_by_name(change: Callable[[nn.Module], nn.Module]) -> None:
    case = case_of()
    model = change(case.build())
    with pytest.raises(WorkloadError, match=COMPILED[change]):
        trace(model, case.batches[0], repeats=0)
    with pytest.raises(PlanError, match=COMPILED[change]):
        carry_out(model, kept(case.workload), case.workload)


def test_what_is_marked_to_stay_eager_is_no_compiled_part() -> None:
    model = case_of().build()
    layer = model.model.layers[1]
    layer.forward = torch.compiler.disable(layer.forward)
    assert compiled_part(model) is None


def test_unrefused_a_compiled_block_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant.  What watches the first iterations keeps PyTorch from compiling, later ones too."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    case = case_of()
    model = case.build()
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend=backend)
    monkeypatch.setattr("protwin.runtime.model.ownership.compiled_part", lambda _: None)
    with carry_out(model, kept(case.workload), case.workload, optimizer=adamw) as training:
        for batch in case.batches[: metering.METERED_ITERATIONS + 1]:
            case.loss(model, batch).backward()
            training.step()
    assert compiled == []


@pytest.mark.parametrize("make_plan", [kept, offloaded])
def test_compiling_under_a_plan_is_refused_and_harms_nothing(make_plan: Callable[..., Any]) -> None:
    case = case_of()
    model = case.build()
    with carry_out(model, make_plan(case.workload), case.workload, optimizer=case.make_optimizer) as training:
        around = torch.compile(model, backend="eager")
        for batch in case.batches:
            with pytest.raises(ScheduleError, match="Compile it after close"):
                model.model.layers[1].compile()
            with pytest.raises(ScheduleError, match="Call the model itself"):
                around(**batch)
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []
    block(model)
    assert compiled_part(model) is not None


def test_a_loss_outside_of_the_model_may_be_compiled() -> None:
    case = cases()["hand-written, unused parameters"]
    model = case.build()
    loss = torch.compile(nn.functional.cross_entropy, backend="eager")
    with carry_out(model, kept(case.workload), case.workload, optimizer=case.make_optimizer) as training:
        torch.manual_seed(SEED)
        for batch in case.batches:
            loss(model(batch["points"]), batch["classes"]).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []
