"""What ``protwin.train`` takes besides a model, data and a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypedDict

import torch

from ...runtime.commands.learning_rates import Schedule
from ...runtime.devices.device import TrainingDevice
from ...runtime.model.batches import Loss
from ...runtime.recording.replanning import LEAST_STEPS
from ...shared.basics.arguments import as_number
from ...shared.basics.errors import ProtwinError
from ...shared.basics.suggestions import did_you_mean
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import DType, Workload

REPLAN_AFTER: Final = 20
"""Steps that are measured before another plan is looked for, unless that is said."""
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
Tell = Callable[[str], None]


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of ``train``; ``Wanted`` says what each is, and what it is by default."""

    steps: int | None
    epochs: int | None
    micro_batches: int
    max_gradient_norm: float | None
    optimizer: Optimizer | str
    learning_rate: float
    optimizer_options: Mapping[str, Any]
    parameter_groups: Sequence[Mapping[str, Any]] | None
    schedule: str
    warmup_steps: int
    scheduler: MakeScheduler | None
    loss: Loss | None
    autocast: DType | str | None
    blocks: str | Sequence[str] | None
    tokenizer: Any
    batch_size: int | None
    sequence_length: int | None
    seed: int
    evaluation: Any
    evaluate_every: int | None
    checkpoint: str | Path | None
    checkpoint_every: int | None
    resume: bool
    save: str | Path | None
    report: str | Path | None
    machine: Hardware | str | Path | None
    host_budget: int | str | None
    calibration: Calibration | str | Path | None
    plan: Plan | str | Path | None
    workload: Workload | str | Path | None
    knobs: Mapping[str, Any]
    device: TrainingDevice | torch.device | str | None
    replan_after: int | None
    probe_s: float
    name: str | None
    tell: Tell | None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is trained, how far, and what is kept.  Raises ProtwinError if the fields contradict each other."""

    steps: int | None = None
    """Steps of the optimizer; None: ``epochs``."""
    epochs: int | None = None
    """Times to go through the data; None without ``steps``: once."""
    micro_batches: int = 1
    """Batches of a step and rank; gradients are those of their mean."""
    max_gradient_norm: float | None = None
    """Limit of the norm of all gradients; None for none."""
    optimizer: Optimizer | str = Optimizer.ADAMW
    """By name (``"adamw"``, ``"sgd"``, ``"adamw-8bit"`` and others)."""
    learning_rate: float = 1e-4
    """The highest rate of the schedule."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Besides the rate: ``{"weight_decay": 0.1}``."""
    parameter_groups: Sequence[Mapping[str, Any]] | None = None
    """Of torch, over the model's parameters; None: one group of all that are trained."""
    schedule: str = Schedule.CONSTANT
    """How the rate goes on after the warm-up: ``"constant"``, ``"linear"`` or ``"cosine"``."""
    warmup_steps: int = 0
    """Steps in which the rate rises from 0, in a line."""
    scheduler: MakeScheduler | None = None
    """Makes a scheduler of torch from the optimizer, in the place of ``schedule``; stepped after every step."""
    loss: Loss | None = None
    """The scalar loss of an output and a batch; None: the output has its own."""
    autocast: DType | str | None = None
    """The element type that forward computes in (``"bfloat16"``); None: that of the parameters."""
    blocks: str | Sequence[str] | None = None
    """The blocks of the model, where they are not found."""
    tokenizer: Any = None
    """A tokenizer of transformers, or its folder: the data are text."""
    batch_size: int | None = None
    """Samples of a batch, where the data are no batches."""
    sequence_length: int | None = None
    """Tokens of a packed sequence, where the data are text."""
    seed: int = 0
    """Of the order of rows and samples.  Nothing else is seeded: a loop seeds torch itself, for dropout."""
    evaluation: Any = None
    """Data, as those to train on, whose loss is told."""
    evaluate_every: int | None = None
    """Steps between two evaluations; None: at the end alone."""
    checkpoint: str | Path | None = None
    """The folder that is saved to after the last step, and resumed from."""
    checkpoint_every: int | None = None
    """Steps between two saves."""
    resume: bool = False
    """Go on from the checkpoint, if there is one."""
    save: str | Path | None = None
    """A new folder for the finished model."""
    report: str | Path | None = None
    """An HTML page of the prediction beside what was measured."""
    machine: Hardware | str | Path | None = None
    """What is searched for; None: this machine, which is measured."""
    host_budget: int | str | None = None
    """Host memory that training may fill."""
    calibration: Calibration | str | Path | None = None
    """What is known of the machine before."""
    plan: Plan | str | Path | None = None
    """What is carried out; None: it is searched."""
    workload: Workload | str | Path | None = None
    """The model, traced; None: it is traced."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the plan that are fixed: ``{"n_persist": 4}``."""
    device: TrainingDevice | torch.device | str | None = None
    """``"cpu"``, ``"cuda"``, ``"cuda:1"``, one of torch or of protwin; None: where the model is."""
    replan_after: int | None = REPLAN_AFTER
    """Steps after which a better plan is searched with what they have measured; None for never.  Not done where the
    plan is given, training is shorter, or there are several ranks."""
    probe_s: float = 1.0
    """Seconds to measure the machine."""
    name: str | None = None
    """What the model is called in tables."""
    tell: Tell | None = print
    """Hears what is done, line by line; None: nobody."""

    def __post_init__(self) -> None:
        """Look at what would otherwise be found too late."""
        if self.steps is not None and self.epochs is not None:
            raise ProtwinError("steps and epochs both say how far to train. Give one of them.")
        for name in ("steps", "epochs", "micro_batches", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ProtwinError(f"{name} is {value}; it must be a whole number of 1 or more.")
        if self.schedule not in list(Schedule):
            raise ProtwinError(f"schedule is {self.schedule!r}. Choose from {', '.join(Schedule)}.")
        if self.scheduler is not None and (self.schedule != Schedule.CONSTANT or self.warmup_steps):
            raise ProtwinError("scheduler and schedule or warmup_steps both set the learning rate. Give one of them.")
        if not 0 <= as_number("learning_rate", self.learning_rate) < float("inf"):
            raise ProtwinError(f"learning_rate is {self.learning_rate}; it must be finite and at least 0.")
        if self.checkpoint is None and (self.resume or self.checkpoint_every is not None):
            option = "resume" if self.resume else "checkpoint_every"
            raise ProtwinError(f"{option} needs checkpoint, the folder. Name it.")
        if self.evaluation is None and self.evaluate_every is not None:
            raise ProtwinError("evaluate_every needs evaluation, the data. Give them.")
        if self.replan_after is not None and self.replan_after < LEAST_STEPS:
            raise ProtwinError(
                f"replan_after is {self.replan_after}; {LEAST_STEPS} steps are the least that say something. Raise it, "
                f"or pass None."
            )
        if Optimizer._missing_(str(self.optimizer)) is None and self.optimizer not in list(Optimizer):
            raise ProtwinError(f"optimizer is {self.optimizer!r}. Choose from {', '.join(Optimizer)}.")

    @property
    def named_optimizer(self) -> Optimizer:
        """The optimizer."""
        return Optimizer(self.optimizer)


def wanted(options: TrainOptions) -> Wanted:
    """The options with what they are by default.  Raises ProtwinError if one is unknown."""
    names = [one.name for one in fields(Wanted)]
    unknown = [name for name in options if name not in names]
    if unknown:
        choice = did_you_mean(unknown[0], names, all_names=True)
        raise ProtwinError(f"train() takes no {unknown[0]}. {choice}")
    return Wanted(**options)
