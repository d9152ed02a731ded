"""What a user can get wrong ends in one clear message, before data is harmed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, CudaDevice, Training, carry_out, trace
from protwin.runtime.taken_over import TakenOver
from protwin.shared.errors import HardwareError, PlanError, ProtwinError, ScheduleError
from protwin.shared.plan import Plan
from tests.runtime.models import Case, adamw, cases, copy_of, differences, gpt2, hand_written, llama, token_batches
from tests.runtime.test_life_cycle import check_ordinary, ordinary_facts, plan_for
from tests.runtime.watchdog import ends_in_time


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


@pytest.fixture
def model(case: Case) -> nn.Module:
    return case.build()


@pytest.fixture
def training(case: Case, model: nn.Module) -> Iterator[Training]:
    """One step done, the model in the middle of training."""
    with ends_in_time():
        started = carry_out(model, plan_for(case.workload), case.workload, optimizer=case.make_optimizer)
        case.loss(model, case.batches[0]).backward()
        started.step()
        yield started
        started.close()


def check_goes_on(case: Case, model: nn.Module, training: Training) -> None:
    """The mistake has harmed nothing: the remaining steps are those of the plain loop."""
    for batch in case.batches[1:]:
        case.loss(model, batch).backward()
        training.step()
    training.close()
    assert differences(model, case.plain.weights[-1]) == []


# -- what does not belong together -----------------------------------------------------------------------------------


def refused(model: nn.Module, plan: Plan, case: Case, error: type[ProtwinError], message: str, **settings: Any) -> None:
    facts = ordinary_facts(model)
    with ends_in_time(), pytest.raises(error, match=message):
        carry_out(model, plan, case.workload, **settings)
    check_ordinary(model, facts)


def test_the_plan_of_another_workload(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"workload_id": "0123456789abcdef"})
    refused(model, plan, case, PlanError, "0123456789abcdef")


def test_the_workload_of_another_model(case: Case) -> None:
    refused(gpt2(), plan_for(case.workload), case, PlanError, "traced from another model.*Trace this model again")
    refused(llama(num_layers=5), plan_for(case.workload), case, PlanError, "traced from another model")
    refused(llama().double(), plan_for(case.workload), case, PlanError, "traced from another model")


def test_requires_grad_that_changed_since_the_trace(case: Case, model: nn.Module) -> None:
    model.model.layers[0].requires_grad_(False)
    refused(model, plan_for(case.workload), case, PlanError, "requires_grad differ")


def test_knobs_that_the_workload_cannot_follow(case: Case, model: nn.Module) -> None:
    good = plan_for(case.workload)
    for change, message in (
        ({"n_persist": 1_000}, "n_persist is 1000"),
        ({"n_buffer": 0}, "n_buffer"),
        ({"n_checkpoint": 5}, "n_checkpoint is 5"),
    ):
        refused(model, good.model_copy(update=change), case, PlanError, message)


@pytest.mark.parametrize("meter_every", [0, -1])
def test_metering_never(case: Case, model: nn.Module, meter_every: int) -> None:
    refused(model, plan_for(case.workload), case, PlanError, f"meter_every is {meter_every}", meter_every=meter_every)


def groups_without_one(model: nn.Module) -> Any:
    return [{"params": list(model.parameters())[1:]}]


def groups_with_one_twice(model: nn.Module) -> Any:
    return [{"params": list(model.parameters())}, {"params": [next(model.parameters())]}]


def groups_of_a_copy(model: nn.Module) -> Any:
    return [{"params": list(copy_of(model).parameters())}]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (groups_without_one, "1 trainable parameters are in no parameter group, model.embed_tokens.weight"),
        (groups_with_one_twice, "model.embed_tokens.weight is in two parameter groups"),
        (groups_of_a_copy, "no parameter of the model"),
        (lambda model: list(model.parameters()), "no table with 'params'"),
        (lambda model: [{"parameters": list(model.parameters())}], "no table with 'params'"),
        (lambda model: [{"params": ["model.embed_tokens.weight"]}], "no parameter of the model"),
    ],
)
def test_parameter_groups(case: Case, model: nn.Module, groups: Callable[[nn.Module], Any], message: str) -> None:
    refused(model, plan_for(case.workload), case, PlanError, message, parameter_groups=groups(model))


def test_an_optimizer_that_is_made_already(case: Case, model: nn.Module) -> None:
    made: Any = adamw([{"params": list(model.parameters())}])
    refused(model, plan_for(case.workload), case, PlanError, "functools.partial", optimizer=made)


def test_two_trainings_of_one_model(case: Case, model: nn.Module, training: Training) -> None:
    with pytest.raises(PlanError, match=r"being carried out on this model already. Close that training first"):
        carry_out(model, plan_for(case.workload), case.workload)
    check_goes_on(case, model, training)


@pytest.mark.parametrize("budget_bytes", [0, -1, float("nan"), float("inf")])
def test_budgets_of_a_device(budget_bytes: Any) -> None:
    with pytest.raises(HardwareError, match=r"budget_bytes is .* must be positive"):
        CpuDevice(budget_bytes)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("link", ["host_to_device", "device_to_host"])
def test_rates_of_a_link(link: str, rate: float) -> None:
    with pytest.raises(HardwareError, match=f"{link}_bytes_per_s is .* must be positive and finite"):
        CpuDevice(**{f"{link}_bytes_per_s": rate})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none() -> None:
    with pytest.raises(HardwareError, match=r"no CUDA device. Use CpuDevice"):
        CudaDevice()


def test_a_model_without_memory(case: Case) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(PlanError, match="the model is on 'meta'"):
        carry_out(model, plan_for(case.workload), case.workload)


# -- the loop --------------------------------------------------------------------------------------------------------


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
    loss.backward(retain_graph=True)
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
    with pytest.raises(ScheduleError, match=r"forward without gradients.*Evaluate after close\(\)"), switch():
        model(**case.batches[1])
    check_goes_on(case, model, training)


def test_a_part_of_the_model_alone(case: Case, model: nn.Module, training: Training) -> None:
    hidden = torch.ones(1, 3, 32)
    with pytest.raises(ScheduleError, match=r"block model\.layers\.0 runs outside a forward of the whole model"):
        model.model(input_ids=case.batches[1]["input_ids"])
    with pytest.raises(ScheduleError, match=r"block model\.layers\.2 runs outside a forward"):
        model.model.layers[2](hidden)
    check_goes_on(case, model, training)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: model.zero_grad(),
        lambda model: model.lm_head.weight.grad.mul_(2),
    ],
)
def test_gradients_that_are_changed_before_the_step(
    case: Case, model: nn.Module, training: Training, change: Callable[[nn.Module], Any]
) -> None:
    case.loss(model, case.batches[1]).backward()
    with torch.no_grad():
        change(model)
    with pytest.raises(ScheduleError, match="gradients were changed between backward"):
        training.step()
    with pytest.raises(ScheduleError, match="has failed"):
        training.step()


def test_gradients_may_be_clipped_where_nothing_is_offloaded(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"chunk_bytes": 2**20, "n_persist": 3, "n_buffer": 0})
    plain = case.build()
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
    plain = case.build()
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


def test_a_record_of_too_few_iterations(training: Training) -> None:
    with pytest.raises(ProtwinError, match="1 iterations were recorded; a Record needs at least 5"):
        training.record()


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.lm_head.weight, "data", torch.zeros(64, 32)), "lm_head.weight has other memory"),
        (lambda model: model.model.layers[3].requires_grad_(False), r"requires_grad of parameter model\.layers\.3"),
        (
            lambda model: setattr(model.model.layers[2], "gradient_checkpointing", True),
            "checkpoints activations itself",
        ),
    ],
)
def test_a_model_that_is_changed_while_it_trains(
    case: Case, model: nn.Module, training: Training, change: Callable[[nn.Module], Any], message: str
) -> None:
    change(model)
    with pytest.raises(ScheduleError, match=message):
        model(**case.batches[1])


def test_states_are_neither_read_nor_written(case: Case, model: nn.Module, training: Training, tmp_path: Any) -> None:
    for attempt in (
        model.state_dict,
        model.model.layers[1].state_dict,
        lambda: model.load_state_dict(case.plain.weights[0]),
        lambda: model.save_pretrained(tmp_path),
        lambda: torch.save(model.state_dict(), tmp_path / "weights"),
    ):
        with pytest.raises(ScheduleError, match=r"Call close\(\) first"):
            attempt()
    with pytest.raises(ScheduleError, match="copied or pickled"):
        copy.deepcopy(model)
    check_goes_on(case, model, training)


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.model.layers[3].half(),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.share_memory(),
    ],
)
def test_models_are_not_converted_while_they_train(
    case: Case, model: nn.Module, training: Training, convert: Callable[[nn.Module], Any]
) -> None:
    with pytest.raises(ScheduleError, match=r"Call close\(\) before model.to\(\)"):
        convert(model)
    check_goes_on(case, model, training)
    convert(model)


def swap(layers: Any) -> None:
    first, second = layers[1], layers[2]
    layers[1], layers[2] = second, first


def test_blocks_swapped_after_the_trace_are_just_other_blocks(case: Case, model: nn.Module) -> None:
    """The names of parameters follow, so nothing is mistaken for anything else."""
    plain = case.build()
    swap(model.model.layers)
    swap(plain.model.layers)
    optimizer = case.make_optimizer(case.groups(plain))
    with (
        ends_in_time(),
        carry_out(model, plan_for(case.workload), case.workload, optimizer=case.make_optimizer) as training,
    ):
        for batch in case.batches:
            losses = [case.loss(trained, batch) for trained in (model, plain)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            training.step()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, plain.state_dict()) == []


def test_blocks_swapped_while_they_train_are_noticed(
    case: Case, model: nn.Module, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(model.model.layers)
    with pytest.raises(ScheduleError, match=r"model\.layers\..* was exchanged"):
        model(**case.batches[1])
    # And by their order, were the exchange not seen.
    monkeypatch.setattr(TakenOver, "check", lambda self: None)
    with pytest.raises(ScheduleError, match=r"runs block model\.layers\.2 where the schedule expects model\.layers\.1"):
        model(**case.batches[1])
    swap(model.model.layers)


@pytest.mark.parametrize("skipped", [0, 2, 3])
def test_a_block_that_is_skipped_is_noticed(
    case: Case, model: nn.Module, training: Training, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LayerDrop does; the last block is missed when the forward ends, or by what is announced without it."""
    monkeypatch.setattr(TakenOver, "check", lambda self: None)
    kept = list(model.model.layers)
    model.model.layers = nn.ModuleList([layer for index, layer in enumerate(kept) if index != skipped])
    message = rf"model\.layers\.{skipped}|the schedule expects"
    with pytest.raises(ScheduleError, match=message):
        model(**case.batches[1])
    model.model.layers = nn.ModuleList(kept)


class UsesABlocksWeightOutside(nn.Module):
    """A penalty on the weight of a block, computed before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hand_written()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        penalty = self.inner.stack[3].down.weight.square().sum()
        return self.inner(points).sum() + penalty


def test_a_weight_that_is_used_outside_its_block() -> None:
    """Persistent it would do; offloaded its gradient would come too late, and the training stops before that."""
    model, points = UsesABlocksWeightOutside(), torch.ones(2, 5)
    workload = trace(model, points, repeats=0)
    layout_bytes = 2**20
    plan = Plan(workload_id=workload.identity, chunk_bytes=layout_bytes, n_persist=3, n_buffer=0)
    with ends_in_time(), carry_out(model, plan, workload) as training:
        model(points).backward()
        training.step()


def test_models_of_one_kind_train_side_by_side(case: Case) -> None:
    first, second = case.build(), case.build()
    plan = plan_for(case.workload)
    with (
        ends_in_time(),
        carry_out(first, plan, case.workload, optimizer=case.make_optimizer) as one,
        carry_out(second, plan, case.workload, optimizer=case.make_optimizer) as other,
    ):
        for batch in case.batches:
            for model, training in ((first, one), (second, other)):
                case.loss(model, batch).backward()
                training.step()
    assert differences(first, case.plain.weights[-1]) == []
    assert differences(second, case.plain.weights[-1]) == []


def test_a_batch_of_another_shape_trains_like_the_plain_loop(case: Case, model: nn.Module) -> None:
    """The schedule holds; memory is watched anew for each shape."""
    plain = case.build()
    optimizer = case.make_optimizer(case.groups(plain))
    batches = [*token_batches(2), *token_batches(2, batch=1, length=7), *token_batches(1, batch=3, length=5)]
    with (
        ends_in_time(),
        carry_out(model, plan_for(case.workload), case.workload, optimizer=case.make_optimizer) as training,
    ):
        for batch in batches:
            losses = [case.loss(trained, batch) for trained in (model, plain)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            training.step()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, plain.state_dict()) == []
