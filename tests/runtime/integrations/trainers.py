"""Trainers with and without a plan, on the same data, and what both must have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from protwin.runtime import CpuDevice
from protwin.runtime.integrations.trainer_class import planned_trainer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import VOCABULARY, differences
from tests.runtime.watchdog import ends_in_time, lanes_alive

BATCH_SIZE = 2
MICRO_BATCHES = 2
LIMIT = 0.5
NUM_ROWS = 26
"""13 batches: the last step of an epoch has one micro-batch instead of two."""
_OF_CLOCKS = ("runtime", "per_second", "preparation_time")


def rows(number: int = NUM_ROWS, *, lengths: Sequence[int] = (12,), seed: int = 1) -> list[dict[str, Any]]:
    """Sequences to be continued, with some labels that are not learnt, so that micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        tokens = torch.randint(0, VOCABULARY, (lengths[index % len(lengths)],), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


class Logs(TrainerCallback):  # type: ignore[misc]
    """Keeps what the Trainer logs, but for what clocks say."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
        self.logs.append({key: value for key, value in logs.items() if not key.endswith(_OF_CLOCKS)})


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the next token, of all places alike."""
    found = prediction.predictions
    found = found[0] if isinstance(found, tuple) else found
    return {"accuracy": float((found.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


@dataclass
class Case:
    """A training with the Trainer."""

    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    """Of the Trainer's own arguments."""
    trainer_class: type = Trainer
    resume: bool | str | None = None

    def made(self, model: nn.Module, **wishes: Any) -> Any:
        """The Trainer of ``model``, which trains by a plan if there are wishes."""
        kind = planned_trainer(self.trainer_class, tell=lambda _: None, **wishes) if wishes else self.trainer_class
        settings: dict[str, Any] = {
            "per_device_train_batch_size": BATCH_SIZE,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": LIMIT,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        data = {"train_dataset": rows(), "eval_dataset": rows(5, seed=2), "compute_metrics": accuracy}
        others = {name: value for name, value in self.others.items() if name != "callbacks"}
        return kind(
            model=model,
            args=TrainingArguments(str(self.folder), **(settings | self.arguments)),
            **(data | others),
            callbacks=[Logs(), *self.others.get("callbacks", [])],
        )

    def trained(self, model: nn.Module, **wishes: Any) -> Any:
        """The Trainer after ``train()``."""
        trainer = self.made(model, **wishes)
        with ends_in_time():
            trainer.train(resume_from_checkpoint=self.resume)
        return trainer


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return next(one.logs for one in trainer.callback_handler.callbacks if isinstance(one, Logs))


def wishes_for(workload: Workload, **knobs: Any) -> dict[str, Any]:
    """A plan with something of everything, for the Trainer's step, and a device."""
    step = {"micro_batches": MICRO_BATCHES, "max_gradient_norm": LIMIT}
    plan = plan_for(workload).model_copy(update=step | knobs)
    assert isinstance(plan, Plan)
    return {"plan": plan, "workload": workload, "device": CpuDevice()}


def check_same(plain: Any, planned: Any) -> None:
    """Bit for bit the same was logged and learnt, and chunks have moved."""
    assert logs_of(planned) == logs_of(plain)
    assert differences(planned.model, plain.model.state_dict()) == []
    check_offloaded(planned)


def check_offloaded(planned: Any) -> None:
    counts = planned.protwin.counts
    assert counts.num_iterations == planned.state.global_step - planned._initial_global_step
    assert counts.num_gathers > 3 * counts.num_iterations
    assert counts.num_cpu_adam_steps > 0
    assert counts.bytes_host_to_device > counts.bytes_device_to_host > 0
    assert planned.protwin.training is None
    assert lanes_alive() == []
