"""What a loop can get wrong ends in one clear message, before data is harmed."""

from __future__ import annotations

import copy
import os
import pickle
import select
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, Training, carry_out
from protwin.shared.basics.errors import PlanError, ProtwinError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.life_cycle import plan_for
from tests.runtime.misuse import check_goes_on
from tests.runtime.models import Case, adamw, differences, uncached
from tests.runtime.watchdog import ends_in_time


def test_forward_twice(case: Case, model: nn.Module, training: Training) -> None:
    loss = case.loss(model, case.batches[1])
    with pytest.raises(ScheduleError, match=r"before the last one was complete.*backward\(\) after every forward"):
        model(**case.batches[1])
    loss.backward()
    training.step()
    case.loss(model, case.batches[2]).backward()
    with pytest.raises(ScheduleError, match="the iteration is at device_adam"):
        model(**case.batches[2])
    training.step()
    assert training.num_iterations == 3


def test_step_without_forward_or_backward(case: Case, model: nn.Module, training: Training) -> None:
    with pytest.raises(ScheduleError, match=r"step\(\) without a forward"):
        training.step()
    loss = case.loss(model, case.batches[1])
    with pytest.raises(
        ScheduleError, match=r"step\(\) before backward has ended: the iteration is at forward epilogue"
    ):
        training.step()
    loss.backward()
    training.step()
    with pytest.raises(ScheduleError, match=r"step\(\) without a forward"):
        training.step()
    assert training.num_iterations == 2


def micro_batched(case: Case, model: nn.Module, **knobs: Any) -> Training:
    plan = plan_for(case.workload).model_copy(update={"micro_batches": 2, **knobs})
    return carry_out(model, plan, case.workload, optimizer=case.make_optimizer)


def test_step_between_micro_batches(case: Case, model: nn.Module) -> None:
    """Nothing is lost: the step that follows in the right place is the plain loop's."""
    with ends_in_time(), micro_batched(case, model) as training:
        for batches in case.steps(2):
            case.loss(model, batches[0]).backward()
            with pytest.raises(ScheduleError, match=r"step\(\) after 1 of 2 micro-batches"):
                training.step()
            case.loss(model, batches[1]).backward()
            with pytest.raises(ScheduleError, match="forward began before the last one was complete"):
                model(**batches[1])
            training.step()
    assert differences(model, case.plain_with(2, None).weights[-1]) == []


def test_gradients_that_are_changed_between_micro_batches(case: Case, model: nn.Module) -> None:
    with ends_in_time(), micro_batched(case, model) as training:
        case.loss(model, case.batches[0]).backward()
        model.zero_grad()
        with pytest.raises(ScheduleError, match="gradients were changed"):
            case.loss(model, case.batches[1])
        assert training.num_iterations == 0


def test_the_limit_of_the_norm_holds(case: Case, model: nn.Module) -> None:
    """A tight limit and a loose one, over several micro-batches, both as in the plain loop; the tight one binds."""
    for max_norm in (0.05, 1e9):
        plain = case.plain_with(2, max_norm)
        assert all((norm > max_norm) == (max_norm < 1) for norm in plain.norms)
        model = case.build()
        with ends_in_time(), micro_batched(case, model, max_gradient_norm=max_norm) as training:
            for batches in case.steps(2):
                for batch in batches:
                    case.loss(model, batch).backward()
                training.step()
        assert differences(model, plain.weights[-1]) == []
    assert case.plain_with(2, 0.05).weights[-1].keys() == case.plain_with(2, 1e9).weights[-1].keys()
    assert differences(model, case.plain_with(2, 0.05).weights[-1]) != []


def test_a_norm_that_is_not_finite_is_told_with_its_block_and_nothing_is_stepped(case: Case, model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(ProtwinError, match=r"model\.layers\.1.*is not finite"),
        micro_batched(case, model, micro_batches=1, max_gradient_norm=1.0) as training,
    ):
        weight = model.model.layers[1].mlp.down_proj.weight
        handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        case.loss(model, case.batches[0]).backward()
        handle.remove()
        training.step()
        training.synchronize()
    assert differences(model, before) == []


def test_backward_twice(case: Case, model: nn.Module, training: Training) -> None:
    loss = case.loss(model, case.batches[1])
    with pytest.raises(ScheduleError, match=r"retain_graph=True.* add them up and call backward\(\) once"):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ScheduleError, match="backward runs for the second time"):
        loss.backward()
    training.step()
    del loss
    for batch in case.batches[2:]:
        case.loss(model, batch).backward()
        training.step()
    training.close()
    assert differences(model, case.plain.weights[-1]) == []


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(case: Case, model: nn.Module, training: Training, switch: Any) -> None:
    with pytest.raises(ScheduleError, match=r"forward without gradients.*training\.evaluation\(\)"), switch():
        model(**case.batches[1])
    check_goes_on(case, model, training)


def test_a_key_value_cache_that_the_call_asks_for(case: Case, model: nn.Module, training: Training) -> None:
    with pytest.raises(ScheduleError, match=r"called with use_cache.*Leave use_cache out of training"):
        model(**case.batches[1], use_cache=True)
    with training.evaluation():
        assert model(**case.batches[1], use_cache=True).past_key_values is not None
    check_goes_on(case, model, training)


def test_gradients_of_named_weights(case: Case, model: nn.Module, training: Training) -> None:
    """Of offloaded weights they cannot be taken; loss.backward() is still possible."""
    loss = case.loss(model, case.batches[1])
    away = [p for p in model.parameters() if type(p) is not nn.Parameter]
    for attempt in (lambda: torch.autograd.grad(loss, away), lambda: loss.backward(inputs=away)):
        with pytest.raises(ScheduleError, match=r"named as what gradients are taken of.*Call loss\.backward\(\) alone"):
            attempt()
    loss.backward()
    training.step()
    for batch in case.batches[2:]:
        case.loss(model, batch).backward()
        training.step()
    training.close()
    assert differences(model, case.plain.weights[-1]) == []


def test_gradients_that_are_put_in_place_by_hand_are_not_left_out_of_the_norm(case: Case, model: nn.Module) -> None:
    """Nothing is offloaded, but the norm is limited: it was that of no gradients, and the step took these unclipped."""
    plan = plan_for(case.workload).model_copy(
        update={"chunk_bytes": 2**20, "n_persist": 3, "n_buffer": 0, "max_gradient_norm": 0.05}
    )
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=adamw) as training:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(case.loss(model, case.batches[0]), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with pytest.raises(ScheduleError, match=r"gradients were changed between backward\(\) and step\(\)"):
            training.step()


def test_memory_that_the_loop_takes_beside_the_plan_is_told_as_such(case: Case, model: nn.Module) -> None:
    """Not as a plan for another budget, which would lack as much."""
    plan = plan_for(case.workload)
    device = CpuDevice(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes)
    longer = {name: torch.cat([rows, rows], 1) for name, rows in case.batches[1].items()}
    told = (
        r"The plan takes at most \S+ \S+ of what was traced, so that the loop runs or holds more.*trace the model with"
    )
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        case.loss(model, case.batches[0]).backward()
        training.step()
        with pytest.raises(CpuOutOfMemoryError, match=told):
            case.loss(model, longer).backward()
        training.skip_step()
        many = {name: rows.repeat(200, 1) for name, rows in case.batches[1].items()}
        told = r"running forward alone\. Evaluate on smaller batches"
        with pytest.raises(CpuOutOfMemoryError, match=told), training.evaluation():
            model(**many)
        check_goes_on(case, model, training)


def test_gradients_of_zeros(case: Case, model: nn.Module, training: Training) -> None:
    """A plain loop that keeps them steps weights that a batch does not use."""
    for of in (model, model.model.layers[0], training.optimizer):  # type: ignore[index, union-attr]
        of.zero_grad()  # type: ignore[operator]
        with pytest.raises(ScheduleError, match=r"zero_grad\(set_to_none=False\) would keep gradients of zeros"):
            of.zero_grad(set_to_none=False)  # type: ignore[operator]
    check_goes_on(case, model, training)
    assert "zero_grad" not in vars(model)


def test_two_trainings_that_take_turns_within_steps_on_one_device(
    case: Case, model: nn.Module, training: Training
) -> None:
    """Nobody could tell their memory apart; step by step they take turns."""
    other = case.build()
    plan = plan_for(case.workload)
    with carry_out(other, plan, case.workload, optimizer=case.make_optimizer, device=training.device) as beside:
        loss = case.loss(other, case.batches[0])
        with pytest.raises(ScheduleError, match=r"two models .* on one CpuDevice at once.* a CpuDevice of its own"):
            case.loss(model, case.batches[1])
        loss.backward()
        beside.step()
        del loss
        check_goes_on(case, model, training)
        for batch in case.batches[1:]:
            case.loss(other, batch).backward()
            beside.step()
    assert differences(other, case.plain.weights[-1]) == []


def test_a_part_of_the_model_alone(case: Case, model: nn.Module, training: Training) -> None:
    hidden = torch.ones(1, 3, 32)
    with pytest.raises(ScheduleError, match=r"block model\.layers\.0 runs outside a forward of the whole model"):
        model.model(input_ids=case.batches[1]["input_ids"])
    with pytest.raises(ScheduleError, match=r"block model\.layers\.2 runs outside a forward"):
        model.model.layers[2](hidden)
    check_goes_on(case, model, training)


def test_gradients_that_are_dropped_before_the_step(case: Case, model: nn.Module, training: Training) -> None:
    case.loss(model, case.batches[1]).backward()
    model.zero_grad()
    with pytest.raises(ScheduleError, match="gradients were changed between backward"):
        training.step()
    with pytest.raises(ScheduleError, match="has failed"):
        training.step()


def test_gradients_may_be_clipped_where_nothing_is_offloaded(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"chunk_bytes": 2**20, "n_persist": 3, "n_buffer": 0})
    plain = uncached(case.build())
    optimizer = adamw([{"params": list(plain.parameters())}])
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=adamw) as training:
        for batch in case.batches:
            for trained in (model, plain):
                case.loss(trained, batch).backward()
                nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
            training.step()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, plain.state_dict()) == []


def test_learning_rates(case: Case, model: nn.Module, training: Training) -> None:
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="learning rate"):
            training.set_learning_rate(rate)
    loss = case.loss(model, case.batches[1])
    with pytest.raises(ScheduleError, match="learning rate can change between"):
        training.set_learning_rate(0.1)
    loss.backward()
    training.step()
    training.set_learning_rate(0.0)


def test_a_learning_rate_holds_from_the_next_step_on(case: Case, model: nn.Module) -> None:
    plain = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(plain))
    with (
        ends_in_time(),
        carry_out(model, plan_for(case.workload), case.workload, optimizer=case.make_optimizer) as training,
    ):
        for number, batch in enumerate(case.batches):
            training.set_learning_rate(0.01 / (number + 1))
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            for trained in (model, plain):
                case.loss(trained, batch).backward()
            training.step()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, plain.state_dict()) == []


def test_a_closed_training(case: Case, model: nn.Module, training: Training) -> None:
    training.close()
    for attempt in (training.step, lambda: training.set_learning_rate(0.1)):
        with pytest.raises(ScheduleError, match=r"closed. Carry the plan out again"):
            attempt()
    model(**case.batches[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_is_told_that_no_lane_is_there_and_ends(
    case: Case, model: nn.Module, training: Training
) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        told = b"nothing"
        try:
            model(**case.batches[0])
        except ScheduleError as error:
            told = str(error).encode()
        finally:
            training.close()
            os.write(writer, told)
            os._exit(0)
    os.close(writer)
    assert select.select([reader], [], [], 30.0)[0], "the forked process waits for what never comes"
    assert b"this process was forked while a plan was being carried out" in os.read(reader, 10_000)
    os.waitpid(child, 0)
    check_goes_on(case, model, training)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_training_is_not_copied(
    case: Case, model: nn.Module, training: Training, copied: Callable[[Training], object]
) -> None:
    with pytest.raises(ScheduleError, match=r"a Training was to be copied or pickled"):
        copied(training)
    check_goes_on(case, model, training)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.model.layers.pop(-1), r"that one has a parameter model\.layers\.\d+\.\S+, which this one"),
        (
            lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2))),
            "lacks the parameter more",
        ),
        (lambda model: model.model.norm.weight.requires_grad_(False), r"requires_grad of model\.norm\.weight was True"),
        (lambda model: model.to(torch.float64), r"element type of \S+ was float32, and is float64 here"),
        (lambda model: model.register_buffer("mask", torch.ones(2)), "module classes, buffers or strides differ"),
    ],
)
def test_another_model_than_the_traced_one_is_told_by_what_differs(
    case: Case, change: Callable[[nn.Module], object], words: str
) -> None:
    model = case.build()
    change(model)
    with pytest.raises(PlanError, match=words):
        carry_out(model, plan_for(case.workload), case.workload)


@pytest.mark.parametrize("named", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_is_named_as_torch_names_it(case: Case, named: torch.device | str) -> None:
    with carry_out(case.build(), plan_for(case.workload), case.workload, device=named) as training:
        assert training.device.torch_device.type == "cpu"


@pytest.mark.parametrize("named", ["tpu", "cuda:", "mps", torch.device("meta"), 0])
def test_what_is_no_device_is_told_with_those_there_are(case: Case, named: Any) -> None:
    with pytest.raises(PlanError, match=r'device is .*; it must be "cpu", "cuda", "cuda:1", CpuDevice'):
        carry_out(case.build(), plan_for(case.workload), case.workload, device=named)


def test_a_record_of_too_few_iterations(training: Training) -> None:
    with pytest.raises(
        ProtwinError,
        match=r"1 iterations were recorded; .* Train 5 at least",
    ):
        training.record()
