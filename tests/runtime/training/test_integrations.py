"""Accelerate's loop and the Trainer of transformers, on a model that a plan is carried out on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from protwin.runtime import CpuDevice, Training, carry_out, trace
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import adamw, differences, llama, token_batches
from tests.runtime.watchdog import ends_in_time

STEPS = 3
LIMIT = 0.5
BUDGET_BYTES = 3 * 2**20
MICRO_BATCHES = 2
BATCHES = token_batches(STEPS * MICRO_BATCHES)


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def workload() -> Workload:
    return trace(llama(), BATCHES[0], repeats=0)


def carried_out(model: nn.Module, workload: Workload, **knobs: Any) -> Training:
    plan = plan_for(workload).model_copy(update={"micro_batches": MICRO_BATCHES, **knobs})
    assert isinstance(plan, Plan)
    return carry_out(model, plan, workload, optimizer=adamw, device=CpuDevice(BUDGET_BYTES))


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


# -- Accelerate ------------------------------------------------------------------------------------------------------


def accelerated(model: nn.Module, optimizer: Any, clip_to: float | None) -> tuple[list[float], list[float]]:
    """The loop of Accelerate's documentation; gives losses and norms."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, halving(optimizer))
    losses, norms = [], []
    for batch in BATCHES:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip_to is not None:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip_to).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_accelerates_loop_is_the_plain_one(workload: Workload, limit: float | None) -> None:
    plain, model = llama(), llama()
    expected = accelerated(plain, adamw([{"params": list(plain.parameters())}]), limit)
    with ends_in_time(), carried_out(model, workload, max_gradient_norm=limit) as training:
        found = accelerated(model, training.optimizer, limit)
        assert training.num_iterations == STEPS
        assert training.num_cpu_adam_steps > 0
    assert found == expected
    assert differences(model, plain.state_dict()) == []


# -- the Trainer of transformers -------------------------------------------------------------------------------------

ROWS = [{key: value[place] for key, value in batch.items()} for batch in BATCHES for place in range(2)]


class Losses(TrainerCallback):
    """Keeps what the Trainer logs of every step."""

    def __init__(self) -> None:
        self.logs: list[tuple[float, float]] = []

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.logs.append((logs["loss"], logs["grad_norm"]))


def trainer_of(model: nn.Module, optimizer: Any, folder: Path, callback: Losses, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "max_grad_norm": LIMIT,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=ROWS,
        optimizers=(optimizer, halving(optimizer)),
        callbacks=[callback],
    )


def test_the_trainer_trains_as_on_the_plain_model(workload: Workload, tmp_path: Path) -> None:
    plain, model = llama(), llama()
    expected, found = Losses(), Losses()
    trainer_of(plain, adamw([{"params": list(plain.parameters())}]), tmp_path, expected).train()
    with ends_in_time(), carried_out(model, workload, max_gradient_norm=LIMIT) as training:
        trainer_of(model, training.optimizer, tmp_path, found).train()
        assert training.num_iterations == STEPS
        assert training.num_cpu_adam_steps > 0
    assert found.logs == expected.logs
    assert len(found.logs) == STEPS
    assert max(norm for _, norm in found.logs) > LIMIT, "something was clipped"
    assert differences(model, plain.state_dict()) == []


@pytest.mark.parametrize(
    ("knobs", "arguments", "message"),
    [
        ({}, {}, "max_gradient_norm of the plan"),
        ({"max_gradient_norm": LIMIT}, {"max_grad_norm": 2.0}, "to a norm of 2 under a plan that clips them to 0.5"),
        ({"micro_batches": 3, "max_gradient_norm": LIMIT}, {}, "a norm of gradients .* after 2 of 3 micro-batches"),
        (
            {"max_gradient_norm": LIMIT},
            {"gradient_accumulation_steps": 3},
            r"forward began before the last one was complete.*micro-batches \(2\)",
        ),
    ],
)
def test_arguments_that_contradict_the_plan(
    workload: Workload, tmp_path: Path, knobs: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    model = llama()
    with ends_in_time(), carried_out(model, workload, **knobs) as training:
        trainer = trainer_of(model, training.optimizer, tmp_path, Losses(), **arguments)
        with pytest.raises(ScheduleError, match=message):
            trainer.train()
        assert training.num_iterations == 0
