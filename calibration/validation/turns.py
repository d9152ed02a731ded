"""Plans that take turns on one machine: a burst of iterations of one, then of another, round after round.

A shared machine is now faster and now slower.  What is asked for is the error of the model, not the drift of the
machine, so all plans meet the same minutes.  Where memory allows, every plan's training stays between its turns, on a
copy of the model; where it does not, each turn begins a training anew, whose first iterations do not count.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self

import psutil

from ...runtime.training.training import Training
from ...shared.optimizers.state import state_tensors
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ..fitting.budgeted import BudgetedSubject
from ..fitting.subject import Subject
from .drawing import guaranteed_bytes

WARM_UP: Final = 3
_AROUND: Final = 2
"""Iterations of a burst that do not count: the first finds idle lanes, and the last but closes the one before."""
_SHARE: Final = 0.5
"""Of the host's memory that is free, for trainings that stay."""
_HOST_COPIES: Final = 2
"""Parameters and gradients on the host, beside the optimizer's state."""


class Turns:
    """The trainings of all plans, by name; a context manager, which ends them."""

    def __init__(self, subject: Subject, *, steps: int = 3) -> None:
        """``steps``: iterations of a burst that count."""
        self._subject = subject
        self._steps = steps
        self._undo = ExitStack()
        self._staying: dict[str, Training] = {}
        self._plans: dict[str, Plan] = {}
        self.bursts: dict[str, list[Record]] = {}
        """What every plan has measured, burst by burst."""
        self.spent_s: dict[str, float] = {}
        """What the latest turn of each took, with the iterations that do not count."""
        self.begin_s: dict[str, float] = {}
        """What beginning each took, warm-up included; 0 where every turn begins anew."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all plans, as they came."""
        return tuple(self._plans)

    def add(self, plans: Mapping[str, Plan]) -> bool:
        """Let more plans take part; gives whether their trainings stay between turns.  The same on all ranks."""
        stays = all(self._subject.of_all(self._have_room(plans)))
        for name, plan in plans.items():
            begun_s = time.perf_counter()
            self._plans[name] = plan
            self.bursts[name] = []
            if stays:
                self._staying[name] = self._begin(plan, self._undo)
                self.begin_s[name] = time.perf_counter() - begun_s
            else:
                self.begin_s[name] = 0.0
        return stays

    def play(self, order: random.Random, on_burst: Callable[[], None] | None = None) -> None:
        """One round: every plan has one turn, in random order."""
        names = list(self._plans)
        order.shuffle(names)
        for name in names:
            self.turn(name)
            if on_burst is not None:
                on_burst()

    def turn(self, name: str) -> None:
        """A burst of one plan."""
        begun_s = time.perf_counter()
        if name in self._staying:
            self.bursts[name].append(self._burst(self._staying[name]))
        else:
            with ExitStack() as undo:
                self.bursts[name].append(self._burst(self._begin(self._plans[name], undo)))
        self.spent_s[name] = time.perf_counter() - begun_s

    def _begin(self, plan: Plan, undo: ExitStack) -> Training:
        """A training past its warm-up, which ``undo`` ends."""
        subject, folder = self._subject, None
        if plan.n_disk_state:
            folder = Path(undo.enter_context(TemporaryDirectory(dir=subject.disk_folder)))
        if isinstance(subject, BudgetedSubject) and undo is self._undo:
            # It trains the model itself, and several are to be trained at once.
            subject = replace(subject, model=copy.deepcopy(subject.model))
        training = undo.enter_context(subject.begin(plan, disk_folder=folder))
        for _ in range(WARM_UP):
            subject.run_step(training)
        training.synchronize()
        return training

    def _burst(self, training: Training) -> Record:
        first = training.num_iterations
        for _ in range(self._steps + _AROUND):
            self._subject.run_step(training)
        training.synchronize()
        return training.record(
            hardware_name=self._subject.hardware.name, since=first, until=first + self._steps + _AROUND
        )

    def _have_room(self, plans: Mapping[str, Plan]) -> bool:
        """Whether trainings of all of ``plans`` fit beside each other, by what they may need at most."""
        if self._subject.make_device().torch_device.type != "cpu":
            # One training at a time keeps a budget of CUDA's allocator, and leaves the others no pieces.
            return False
        workload = self._subject.workload
        need_bytes = sum(
            guaranteed_bytes(plan, workload) + host_bytes(workload, plan.optimizer) for plan in plans.values()
        )
        free_bytes = int(psutil.virtual_memory().available)
        return need_bytes <= _SHARE * free_bytes / self._subject.num_ranks


def host_bytes(workload: Workload, optimizer: Optimizer) -> int:
    """What a training may hold of the host's memory: a copy of the model, all gradients, all optimizer state."""
    held = sum(_HOST_COPIES * parameter.size_bytes for parameter in workload.parameters)
    stepped = [(parameter.dtype, parameter.shape) for parameter in workload.parameters if parameter.trainable]
    return held + sum(tensor.size_bytes for one in stepped for tensor in state_tensors(one, optimizer))
