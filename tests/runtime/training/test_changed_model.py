"""A model that is changed, copied or shared while it trains: noticed where it would do harm, as ever where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import Training, carry_out, trace
from protwin.runtime.model.ownership import TakenOver
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.misuse import check_goes_on
from tests.runtime.models import SEED, Case, adamw, differences, hand_written, token_batches, uncached
from tests.runtime.watchdog import ends_in_time


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


def test_models_may_be_moved_to_where_they_are(case: Case, model: nn.Module, training: Training) -> None:
    """As launchers and trainers do, whether or not there is anything to move."""
    for moved in (model.to("cpu"), model.to("cpu", torch.float32), model.float(), model.cpu()):
        assert moved is model
    assert model.model.layers[3].to("cpu") is model.model.layers[3]
    check_goes_on(case, model, training)


def swap(layers: Any) -> None:
    first, second = layers[1], layers[2]
    layers[1], layers[2] = second, first


def test_blocks_swapped_after_the_trace_are_just_other_blocks(case: Case, model: nn.Module) -> None:
    """The names of parameters follow, so nothing is mistaken for anything else."""
    plain = uncached(case.build())
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
    message = rf"model\.layers\.{skipped}|the schedule expects|its chunk is not on the device"
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
    """It comes for the penalty and for its block, and leaves when both have added to its gradient."""
    model, plain, points = UsesABlocksWeightOutside(), UsesABlocksWeightOutside(), torch.ones(2, 5)
    plain.load_state_dict(model.state_dict())
    workload = trace(model, points, repeats=0)
    (used,) = (p.uses for p in workload.parameters if p.name == "inner.stack.3.down.weight")
    assert used is not None
    assert (used.forward, used.gradient) == (("prologue", 3), "prologue")
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=2)
    torch.manual_seed(SEED)
    with ends_in_time(), carry_out(model, plan, workload, optimizer=adamw) as training:
        model(points).backward()
        training.step()
    optimizer = adamw([{"params": list(plain.parameters())}])
    torch.manual_seed(SEED)
    plain(points).backward()
    optimizer.step()
    assert differences(model, plain.state_dict()) == []


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
    plain = uncached(case.build())
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
