"""A training that is saved and resumed, under whatever plan, goes on as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from protwin.runtime import CpuDevice, LossScaling, Training
from protwin.runtime.checkpoints.checkpoints import read_checkpoint
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.optimizers import device_steps
from protwin.shared.basics.errors import FileError, ScheduleError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settle
from tests.runtime.families import families
from tests.runtime.models import SEED, STEPS, Case, cases, differences, hand_written, llama, token_batches
from tests.runtime.resuming import (
    check_resumption,
    disturb,
    kept,
    mixed,
    offloaded,
    other_weights,
    resumed,
    saved_after,
    sgd,
    start,
    train,
)
from tests.runtime.watchdog import ends_in_time
from tests.strategies.plans import plans

# -- exact -----------------------------------------------------------------------------------------------------------


NAMES = ["gpt2, groups", "llama in bfloat16", "llama, frozen prologue and blocks", "hand-written, batch statistics"]


@some_quick("name", NAMES, quick=2)
def test_any_model_resumes_under_another_plan(name: str, tmp_path: Path) -> None:
    """One step each under four plans, resumed three times."""
    case = cases()[name]
    losses: list[float] = []
    for step, plan in enumerate((kept, offloaded, mixed, kept)):
        model = other_weights(case.build())
        if step == 0:
            model = case.build()
        with start(case, model, plan(case.workload)) as training:
            disturb()
            if step == 0:
                torch.manual_seed(SEED)
            else:
                assert training.resume(tmp_path / "saved").step == step
            losses += train(case, model, training, step, step + 1)
            assert training.num_steps == step + 1
            if plan is offloaded:
                assert training.num_cpu_adam_steps > 1
                assert training.bytes_host_to_device > 0
            training.save(tmp_path / "saved")
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []


def plain_steps(drawn: tuple[Plan, Any]) -> Plan:
    """The drawn plan with what plain training does in a step: one batch, no limit of the norm."""
    return drawn[0].model_copy(update={"micro_batches": 1, "max_gradient_norm": None})


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_pairs_of_plans(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = cases()[data.draw(st.sampled_from(["gpt2, groups", "llama in bfloat16"]))]
    before, after = (data.draw(plans(case.workload).map(plain_steps)) for _ in range(2))
    folder = tmp_path_factory.mktemp("checkpoints") / "checkpoint"
    check_resumption(case, before, after, folder, steps=data.draw(st.integers(0, STEPS)))


@some_quick(("before", "after"), [(kept, offloaded), (offloaded, kept), (kept, kept)], quick=1)
def test_parameters_stepped_in_pieces_are_saved_whole(
    before: Callable[[Workload], Plan],
    after: Callable[[Workload], Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cases()["llama in bfloat16"]
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 1_000)
    losses = saved_after(case, before(case.workload), 2, tmp_path / "saved")
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 700)
    more, model = resumed(case, after(case.workload), tmp_path / "saved")
    assert losses + more == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []
    states = read_checkpoint(tmp_path / "saved").optimizer["parameters"]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: entry["state"]["exp_avg"].shape for name, entry in states.items()} == shapes
    assert {entry["master"].dtype for entry in states.values()} == {torch.float32}


def amsgrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True, foreach=False)


@some_quick("make_optimizer", [sgd, amsgrad], quick=1)
def test_state_of_any_optimizer(make_optimizer: Any, tmp_path: Path) -> None:
    case = Case(partial(llama, num_layers=2), token_batches(), make_optimizer=make_optimizer)
    check_resumption(case, offloaded(case.workload), kept(case.workload), tmp_path / "a")
    check_resumption(case, kept(case.workload), mixed(case.workload), tmp_path / "b")


def test_saving_at_every_step_changes_nothing(tmp_path: Path) -> None:
    case = cases()["gpt2 with dropout, tied"]
    model = case.build()
    losses = []
    with start(case, model, mixed(case.workload)) as training:
        torch.manual_seed(SEED)
        for step in range(STEPS):
            training.save(tmp_path / "saved")
            level, gathers = training.device.ledger.level_bytes, training.num_gathers
            training.save(tmp_path / "saved", data_position=[step, "shard"])
            # Nothing was brought to the device for it, beyond what is gathered ahead anyway.
            assert training.num_gathers - gathers <= len(training.schedule.tasks)
            assert training.device.ledger.level_bytes - level <= 2 * mixed(case.workload).chunk_bytes
            losses += train(case, model, training, step, step + 1)
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []


def test_resuming_in_the_middle_goes_back(tmp_path: Path) -> None:
    case = cases()["gpt2 with dropout, tied"]
    model = case.build()
    with start(case, model, mixed(case.workload)) as training:
        torch.manual_seed(SEED)
        training.save(tmp_path / "first", data_position=0)
        losses = train(case, model, training, 0, 3)
        assert training.resume(tmp_path / "first").step == 0
        assert training.num_steps == 0
        assert train(case, model, training, 0, STEPS) == case.plain.losses
        assert losses == case.plain.losses[:3]
    assert differences(model, case.plain.weights[-1]) == []


def all_gathered_ahead(training: Training) -> None:
    """Wait until no more chunk is gathered before the next forward."""
    settle(training)
    assert training.num_gathers > 0


def test_saving_takes_no_device_memory(tmp_path: Path) -> None:
    """Every operation of a save is watched: none may make a tensor of any size, where nothing is on the device."""
    case = cases()["llama"]
    model = case.build()
    with start(case, model, offloaded(case.workload)) as training:
        train(case, model, training, 0, 1)
        training.synchronize()
        all_gathered_ahead(training)
        ledger = training.device.ledger
        level_bytes, num_gathers = ledger.level_bytes, training.num_gathers
        ledger.reset_peak()
        with ledger.metering():
            training.save(tmp_path / "saved")
        assert training.num_gathers == num_gathers
        weights_bytes = sum(p.size_bytes for p in case.workload.parameters)
        # The state of torch's random generator is a tensor of 5 056 bytes.
        assert ledger.peak_bytes - level_bytes < 10_000 < weights_bytes // 10
        with ledger.metering():
            copies = {name: tensor.clone() for name, tensor in training._state.collect(1, None, None).weights.items()}
        assert len(copies) > 0
        assert ledger.peak_bytes - level_bytes > weights_bytes // 2, "copies of the weights would have been seen"


def halves(training: Training, model: nn.Module, batch: Any) -> list[float]:
    """One step of two micro-batches, scaled if the training scales losses."""
    losses = []
    for row in range(2):
        loss = model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss
        (loss if training.loss_scaler is None else training.scale(loss)).backward()
        losses.append(loss.item())
    training.step()
    return losses


@some_quick("is_scaled", [False, True], quick=[True])
def test_micro_batches_clipping_and_loss_scaling_go_on(is_scaled: bool, tmp_path: Path) -> None:
    dtype = torch.float16 if is_scaled else torch.float32
    batches = token_batches()
    first_row = {name: tensor[:1] for name, tensor in batches[0].items()}
    case = Case(lambda: llama(num_layers=2).to(dtype), [first_row])
    # Overflows at first, and grows again soon.
    scaling = LossScaling(initial_scale=2.0**40, backoff_factor=2.0**-20, growth_interval=1) if is_scaled else None

    def run(model: nn.Module, plan: Plan, first: int, last: int) -> tuple[list[float], float | None]:
        plan = plan.model_copy(update={"micro_batches": 2, "max_gradient_norm": 0.3})
        with start(case, model, plan, loss_scaling=scaling) as training:
            if first > 0:
                assert training.resume(tmp_path / "saved").step == first
            losses = [loss for batch in batches[first:last] for loss in halves(training, model, batch)]
            training.save(tmp_path / "saved")
            if is_scaled:
                with pytest.raises(FileError, match="loss_scaling"):
                    check_without_scaling(case, tmp_path / "saved", plan)
            return losses, training.loss_scaler.scale if training.loss_scaler is not None else None

    whole, part = case.build(), case.build()
    losses, scale = run(whole, mixed(case.workload), 0, 4)
    before, scale_between = run(part, offloaded(case.workload), 0, 2)
    part = other_weights(case.build())
    after, scale_after = run(part, kept(case.workload), 2, 4)
    assert before + after == losses
    assert scale_after == scale
    assert not is_scaled or scale != scale_between
    assert differences(part, whole.state_dict()) == []
    assert differences(whole, case.build().state_dict()) != []


def check_without_scaling(case: Case, folder: Path, plan: Plan) -> None:
    with start(case, case.build(), plan) as training:
        training.resume(folder)


@pytest.mark.parametrize("is_right", [True, False])
def test_chunks_gathered_ahead_are_gathered_again(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases()["llama"]
    saved_after(case, kept(case.workload), 2, tmp_path / "saved")
    if not is_right:

        @contextmanager
        def homes_alone(self: DeviceChunk) -> Any:
            yield self.values()

        monkeypatch.setattr(DeviceChunk, "rewriting", homes_alone)
    model = other_weights(case.build())
    with start(case, model, offloaded(case.workload)) as training:
        all_gathered_ahead(training)
        training.resume(tmp_path / "saved")
        losses = train(case, model, training, 2, STEPS)
    assert (losses == case.plain.losses[2:]) is is_right


def test_schedulers_go_on(tmp_path: Path) -> None:
    case = cases()["llama, groups"]

    def scheduler_of(training: Training) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=6)

    def run(model: nn.Module, plan: Plan, first: int, last: int, *, resume: bool) -> tuple[list[float], list[Any]]:
        with start(case, model, plan) as training:
            scheduler = scheduler_of(training)
            if resume:
                training.resume(tmp_path / "saved", scheduler=scheduler)
            losses = []
            for step in range(first, last):
                losses += train(case, model, training, step, step + 1)
                scheduler.step()
            training.save(tmp_path / "saved", scheduler=scheduler)
            return losses, [group["lr"] for group in training.optimizer.param_groups]

    whole_model, halves_model = case.build(), case.build()
    whole, rates = run(whole_model, mixed(case.workload), 0, STEPS, resume=False)
    first, _ = run(halves_model, kept(case.workload), 0, 2, resume=False)
    halves_model = other_weights(case.build())
    second, rates_again = run(halves_model, offloaded(case.workload), 2, STEPS, resume=True)
    assert first + second == whole != case.plain.losses
    assert rates_again == rates
    assert differences(halves_model, whole_model.state_dict()) == []


def test_all_random_generators_go_on(tmp_path: Path) -> None:
    case = cases()["llama"]
    with start(case, case.build(), kept(case.workload)) as training:
        disturb()
        training.save(tmp_path / "saved")
        drawn = random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        training.resume(tmp_path / "saved")
        assert (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == drawn


class Counting(nn.Module):
    """Keeps what state_dict does not: a buffer that is not persistent, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hand_written(num_layers=2)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += points.detach().mean()
        return self.inner(points) * (1 + self.seen.sum() + self.calls)


def test_what_no_state_dict_holds_goes_on_too(tmp_path: Path) -> None:
    points = cases()["hand-written, unused parameters"].batches
    case = Case(Counting, points, has_loss=False)
    workload = case.workload
    models = [Counting(), Counting(), Counting()]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    with start(case, models[0], kept(workload)) as training:
        torch.manual_seed(SEED)
        whole = train(case, models[0], training, 0, STEPS)
    with start(case, models[1], kept(workload)) as training:
        torch.manual_seed(SEED)
        first = train(case, models[1], training, 0, 2)
        training.save(tmp_path / "saved")
    with start(case, models[2], offloaded(workload)) as training:
        training.resume(tmp_path / "saved")
        second = train(case, models[2], training, 2, STEPS)
    assert first + second == whole
    assert models[2].calls == models[0].calls == STEPS
    assert torch.equal(models[2].seen, models[0].seen)


# -- what others make of it ------------------------------------------------------------------------------------------


@some_quick("name", ["llama", "gpt2 with dropout, tied", "llama, tied", "llama in bfloat16"], quick=2)
def test_transformers_loads_a_checkpoint(name: str, tmp_path: Path) -> None:
    case = cases()[name]
    saved_after(case, mixed(case.workload), 3, tmp_path / "saved")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert type(loaded) is type(case.build())
    assert {key: list(found) for key, found in report.items() if found} == {}
    assert differences(loaded, case.plain.weights[3]) == []
    assert loaded.config.use_cache == case.build().config.use_cache
    if "gpt2" in name:
        assert isinstance(loaded, GPT2LMHeadModel)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


@some_quick("name", ["mixtral", "t5"], quick=1)
def test_transformers_loads_other_families(name: str, tmp_path: Path) -> None:
    """Experts that transformers joins when it loads, weights that two trees share."""
    family = families()[name]
    case = Case(family.build, [family.batch])
    model = case.build()
    with start(case, model, mixed(case.workload)) as training:
        train(case, model, training, 0, 1)
        training.save(tmp_path / "saved")
    loaded, report = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert {key: list(found) for key, found in report.items() if found} == {}
    assert differences(loaded, model.state_dict()) == []


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    case = cases()["llama, tied"]
    saved_after(case, mixed(case.workload), 1, tmp_path / "saved")
    weights = read_checkpoint(tmp_path / "saved").weights
    model = case.build()
    assert weights.keys() == {name for name, _ in model.named_parameters()}
    assert weights.keys() < model.state_dict().keys()


# -- when -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model "llama" after two steps."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    case = cases()["llama"]
    saved_after(case, mixed(case.workload), 2, folder)
    return folder


def test_a_training_is_saved_and_resumed_between_iterations_alone(saved: Path, tmp_path: Path) -> None:
    case = cases()["llama"]
    model = case.build()
    with ends_in_time(), start(case, model, mixed(case.workload)) as training:
        loss = case.loss(model, case.batches[0])
        for call in (training.save, training.resume):
            with pytest.raises(ScheduleError, match="between step"):
                call(saved)
        loss.backward()
        with pytest.raises(ScheduleError, match="between step"):
            training.save(tmp_path / "saved")
        training.step()
        training.save(tmp_path / "saved")
    with pytest.raises(ScheduleError, match="closed"):
        training.save(tmp_path / "saved")


def test_a_resumption_that_fails_half_way_ends_training(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["llama"]
    model = case.build()
    with ends_in_time(), start(case, model, mixed(case.workload), device=CpuDevice()) as training:

        def fail(*_: Any) -> None:
            raise RuntimeError("half way")

        monkeypatch.setattr(training._state, "_place_buffers", fail)
        with pytest.raises(RuntimeError, match="half way"):
            training.resume(saved)
        with pytest.raises(ScheduleError, match="half way"):
            case.loss(model, case.batches[0])
