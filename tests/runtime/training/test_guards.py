"""What would go past a training: other optimizers, writes to weights that are elsewhere, losses of something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import protwin.runtime.training.assembly as assembly_module
from protwin.runtime import Training, carry_out
from protwin.runtime.chunks.gradient_stand_ins import GradientStandIns
from protwin.runtime.training.guards import OffloadedWeights
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, adamw, cases, differences, uncached
from tests.runtime.watchdog import ends_in_time


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


@pytest.fixture
def model(case: Case) -> nn.Module:
    return case.build()


def start(case: Case, model: nn.Module, **changes: Any) -> Training:
    return carry_out(model, plan_for(case.workload), case.workload, **({"optimizer": case.make_optimizer} | changes))


def train(case: Case, model: nn.Module, training: Training, first: int = 0) -> None:
    for batch in case.batches[first:]:
        case.loss(model, batch).backward()
        training.step()


def check_equal(case: Case, model: nn.Module) -> None:
    assert differences(model, case.plain.weights[-1]) == []


# -- other optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("is_after_step", [False, True])
def test_another_optimizer_is_noticed_before_it_steps(
    case: Case, model: nn.Module, make: type[torch.optim.Optimizer], is_after_step: bool
) -> None:
    """Once, or in every step in the place of ours: the training goes on as if nobody had tried."""
    message = rf"another optimizer \({make.__name__}\) was about to step model\.embed_tokens\.weight and \d+ more"
    with ends_in_time(), start(case, model) as training:
        other = make(model.parameters(), lr=0.1)
        for batch in case.batches:
            case.loss(model, batch).backward()
            if is_after_step:
                training.step()
            with pytest.raises(ScheduleError, match=message):
                other.step()
            if not is_after_step:
                training.step()
    check_equal(case, model)


def test_unnoticed_it_would_have_stepped_what_is_on_the_device_twice(
    case: Case, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant, without the stand-ins of gradients, which would notice it too."""
    monkeypatch.setattr(assembly_module, "refusing_other_optimizers", lambda *_: nullcontext())
    monkeypatch.setattr(GradientStandIns, "show", lambda *_, **__: None)
    with ends_in_time(), start(case, model) as training:
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in case.batches:
            case.loss(model, batch).backward()
            other.step()
            training.step()
    assert differences(model, case.plain.weights[-1]) != []


def test_an_optimizer_of_a_part_of_the_model_is_noticed_on_any_thread(case: Case, model: nn.Module) -> None:
    found: list[BaseException] = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except ScheduleError as error:
            found.append(error)

    with ends_in_time(), start(case, model) as training:
        other = torch.optim.SGD([model.lm_head.weight, nn.Parameter(torch.ones(3))], lr=0.1)
        case.loss(model, case.batches[0]).backward()
        thread = threading.Thread(target=step, args=(other,))
        thread.start()
        thread.join()
        training.step()
        train(case, model, training, first=1)
    assert [str(error).split(" was about to step ")[1].split(",")[0] for error in found] == ["lm_head.weight"]
    check_equal(case, model)


def test_optimizers_of_other_models_step(case: Case, model: nn.Module) -> None:
    """A discriminator beside a generator, and a second training of ours."""
    friend, plain = uncached(case.build()), nn.Linear(3, 1)
    before = plain.weight.detach().clone()
    with ends_in_time(), start(case, model) as training, start(case, friend) as other:
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for batch in case.batches:
            for trained, its in ((model, training), (friend, other)):
                case.loss(trained, batch).backward()
                its.step()
            plain(torch.ones(3)).backward()
            optimizer.step()
    check_equal(case, model)
    check_equal(case, friend)
    assert not torch.equal(plain.weight, before)


def test_the_watch_ends_with_the_last_training(case: Case, model: nn.Module) -> None:
    friend = case.build()
    hooks = torch_optimizer._global_optimizer_pre_hooks
    assert len(hooks) == 0
    first, second = start(case, model), start(case, friend)
    assert len(hooks) == 1
    first.close()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, friend)]
    optimizers[0].step()
    with pytest.raises(ScheduleError, match="another optimizer"):
        optimizers[1].step()
    second.close()
    assert len(hooks) == 0
    for optimizer in optimizers:
        optimizer.step()


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, as those do that look ahead or average."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.inner = adamw(groups)
        super().__init__(self.inner.param_groups, dict(self.inner.defaults))
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_steps_by_another_is_ours(case: Case, model: nn.Module) -> None:
    with ends_in_time(), start(case, model, optimizer=Wrapping) as training:
        train(case, model, training)
    check_equal(case, model)


# -- writes ----------------------------------------------------------------------------------------------------------


def limited(layer: nn.Module) -> Any:
    """Keep a weight of a layer small, in place, as some regularisers do; at a moment when it is on the device."""

    def limit(*_: Any) -> None:
        with torch.no_grad():
            layer.mlp.up_proj.weight.clamp_(-0.01, 0.01)

    return layer.register_forward_pre_hook(limit)


def trained_with_limit(case: Case, model: nn.Module, block: int) -> None:
    with ends_in_time(), start(case, model) as training:
        # After the hooks of the training, so that the block is there.
        handle = limited(model.model.layers[block])
        try:
            train(case, model, training)
        finally:
            handle.remove()


def plain_with_limit(case: Case, block: int) -> nn.Module:
    plain = uncached(case.build())
    handle = limited(plain.model.layers[block])
    optimizer = case.make_optimizer(case.groups(plain))
    for batch in case.batches:
        case.loss(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return plain


def test_a_write_to_an_offloaded_weight_is_noticed_before_it_is_lost(case: Case, model: nn.Module) -> None:
    with pytest.raises(ScheduleError, match=r"parameter model\.layers\.3\.mlp\.up_proj\.weight was written to"):
        trained_with_limit(case, model, block=3)
    assert model.model.layers[3].mlp.up_proj.weight.abs().max() > 0.02, "the write never arrived"


def test_unnoticed_it_would_have_been_lost(case: Case, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant."""
    monkeypatch.setattr(OffloadedWeights, "check", lambda _: None)
    trained_with_limit(case, model, block=3)
    assert differences(model, plain_with_limit(case, 3).state_dict()) != []


def test_a_write_to_a_persistent_weight_is_the_users_own_affair(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"chunk_bytes": 2**20, "n_persist": 3, "n_buffer": 0})
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        handle = limited(model.model.layers[3])
        train(case, model, training)
        handle.remove()
    assert differences(model, plain_with_limit(case, 3).state_dict()) == []


# -- losses ----------------------------------------------------------------------------------------------------------


def test_a_loss_that_does_not_depend_on_the_model(case: Case, model: nn.Module) -> None:
    """Another one's backward is not ours, and nothing is lost: the right one may follow."""
    with ends_in_time(), start(case, model) as training:
        for batch in case.batches:
            loss = case.loss(model, batch)
            other = nn.Linear(2, 1)
            other(torch.ones(2)).backward()
            with pytest.raises(ScheduleError, match=r"before backward has ended.*depends on the model's output"):
                training.step()
            with pytest.raises(RuntimeError, match="does not require grad"):
                loss.detach().backward()
            loss.backward()
            training.step()
    check_equal(case, model)


def test_a_loss_of_an_inner_output_is_refused_and_nothing_is_stepped(case: Case, model: nn.Module) -> None:
    """The last blocks have no part in it, so their backward would not run."""
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(
            ScheduleError,
            match=r"backward reached block model\.layers\.1 before block model\.layers\.3, which the schedule",
        ),
        start(case, model) as training,
    ):
        output = model(**case.batches[0], output_hidden_states=True)
        output.hidden_states[2].sum().backward()
        training.step()
    assert differences(model, case.plain.weights[0]) == []


# -- gradients between micro-batches ---------------------------------------------------------------------------------


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(2)


def _halve_all(model: nn.Module) -> None:
    torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], 2)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _drop(model: nn.Module) -> None:
    model.zero_grad()


BETWEEN: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "halved": (_halve, "gradients were to be read or changed"),
    "halved together": (_halve_all, "gradients were to be read or changed"),
    "clipped": (_clip, "after 1 of 2 micro-batches"),
    "dropped": (_drop, "gradients were changed between"),
}


def _plainly(case: Case, change: Callable[[nn.Module], None] | None) -> nn.Module:
    model = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(model))
    for step in case.steps(2):
        for number, batch in enumerate(step):
            case.loss(model, batch).backward()
            if change is not None and number == 0:
                change(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("kept_frac", [0.0, 0.5])
def test_a_change_of_gradients_between_micro_batches_is_not_lost_in_silence(
    case: Case, name: str, kept_frac: float
) -> None:
    """A loop that passes by parameters without a gradient: those of offloaded chunks have left by then.

    The wrong variant shows nothing in their place: where every chunk is offloaded, nobody notices, and weights are
    those of a loop that changes nothing.
    """
    change, said = BETWEEN[name]
    model = case.build()
    layout = layout_of(case.workload, 9_000)
    n_persist = int(kept_frac * len(layout.chunks))
    knobs = {"n_persist": n_persist, "n_host_stepped": 0, "n_buffer": layout.min_buffers(n_persist) + 1}
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=9_000, micro_batches=2, **knobs)
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer):
        first, second = case.steps(2)[0]

        def go_on() -> None:
            change(model)
            case.loss(model, second).backward()

        case.loss(model, first).backward()
        with pytest.raises(ScheduleError, match=said):
            go_on()
    assert differences(_plainly(case, change), _plainly(case, None).state_dict()), "the change matters"


def test_whoever_leaves_gradients_alone_between_micro_batches_finds_them_shown(case: Case) -> None:
    """Facts may be asked for, a look at values is refused, and the step is that of the plain loop all the same."""
    model = case.build()
    layout = layout_of(case.workload, 9_000)
    plan = Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=0,
        micro_batches=2,
        n_buffer=layout.min_buffers(0) + 1,
    )
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        for first, second in case.steps(2):
            case.loss(model, first).backward()
            gradients = iter([p.grad for p in model.parameters() if p.grad is not None and p.grad.shape == p.shape])
            with pytest.raises(ScheduleError, match="taken them over"):
                torch.sum(next(gradients))
            case.loss(model, second).backward()
            training.step()
    assert not differences(model, _plainly(case, None).state_dict())
