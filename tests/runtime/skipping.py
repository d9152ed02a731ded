"""Steps that are given up in the middle, by a plan and in the plain loop: an error at some point, the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from protwin.runtime import CpuDevice, Training, carry_out
from protwin.runtime.model.blocks import find_blocks
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import SEED, Batch, Case, Masters, snapshot, uncached


class Fault(Exception):
    """What goes wrong, told from every other error."""


@dataclass(frozen=True)
class Point:
    """Where something goes wrong in a step."""

    phase: str
    """``forward``, ``recompute``, ``backward`` (of a block), ``before backward`` or ``after backward``."""
    block: int = 0
    micro_batch: int = 0


class Injector:
    """Raises Fault when the model, or the loop, reaches the point that it is armed with."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.point: Point | None = None
        self._num_calls = 0
        self._handles = []
        for index, block in enumerate(find_blocks(model, names)):
            inner = next(m for m in block.module.modules() if type(m).__name__ in ("Linear", "Conv1D"))
            self._handles.append(inner.register_forward_hook(self._passing(index)))

    def _passing(self, block: int) -> Callable[..., None]:
        def passed(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if self.point is None or self.point.block != block:
                return
            self._num_calls += 1
            if self.point.phase == "forward" or (self.point.phase == "recompute" and self._num_calls == 2):
                raise Fault
            if self.point.phase in ("backward", "recompute") and output.requires_grad:
                output.register_hook(self._fail)

        return passed

    @staticmethod
    def _fail(gradient: torch.Tensor) -> None:
        raise Fault

    @contextmanager
    def armed(self, point: Point | None) -> Iterator[None]:
        """Within the block, the model fails at ``point``."""
        self.point, self._num_calls = point, 0
        try:
            yield
        finally:
            self.point = None

    def at(self, phase: str) -> None:
        """The loop is at a point between forward and backward."""
        if self.point is not None and self.point.phase == phase:
            raise Fault

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass
class Trained:
    """What a loop gave."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    num_skipped: int
    random: torch.Tensor


def _run_step(
    case: Case, model: nn.Module, injector: Injector, batches: Sequence[Batch], fault: Point | None
) -> list[float]:
    losses = []
    for number, batch in enumerate(batches):
        with injector.armed(fault if fault is not None and fault.micro_batch == number else None):
            loss = case.loss(model, batch)
            losses.append(loss.item())
            injector.at("before backward")
            loss.backward()
            injector.at("after backward")
    return losses


def plainly(
    case: Case, steps: Sequence[Sequence[Batch]], max_norm: float | None, faults: Mapping[int, Point]
) -> Trained:
    """The loop that everybody writes; ``faults`` are by the number of the step."""
    model = uncached(case.build())
    injector = Injector(model, [block.name for block in case.workload.blocks])
    masters = Masters(model)
    optimizer = case.make_optimizer(masters.groups(case.groups(model)))
    losses, num_skipped = [], 0
    torch.manual_seed(SEED)
    for number, batches in enumerate(steps):
        try:
            losses += _run_step(case, model, injector, batches, faults.get(number))
        except Fault:
            model.zero_grad()
            num_skipped += 1
            continue
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        masters.give_weights()
    return Trained(losses, snapshot(model), num_skipped, torch.get_rng_state())


def by_plan(
    case: Case,
    plan: Plan,
    steps: Sequence[Sequence[Batch]],
    faults: Mapping[int, Point],
    *,
    on_skip: Callable[[Training], None] = lambda _: None,
    before_step: Callable[[Training], None] = lambda _: None,
    device: CpuDevice | None = None,
    **settings: Any,
) -> Trained:
    """The same under a plan.  ``on_skip`` sees the training after every step that was given up."""
    model = case.build()
    injector = Injector(model, [block.name for block in case.workload.blocks])
    losses, num_skipped = [], 0
    with carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=device or CpuDevice(),
        **settings,
    ) as training:
        torch.manual_seed(SEED)
        for number, batches in enumerate(steps):
            before_step(training)
            has_failed = False
            try:
                losses += _run_step(case, model, injector, batches, faults.get(number))
            except Fault:
                training.skip_step()
                has_failed = True
                num_skipped += 1
            if has_failed:
                on_skip(training)
                continue
            training.step()
        random = torch.get_rng_state()
    return Trained(losses, snapshot(model), num_skipped, random)


def run_step(case: Case, model: nn.Module, training: Training, batches: Sequence[Batch]) -> None:
    for batch in batches:
        case.loss(model, batch).backward()
    training.step()


def start(case: Case, model: nn.Module, plan: Plan | None = None, **settings: Any) -> Training:
    return carry_out(
        model, plan or plan_for(case.workload), case.workload, **({"optimizer": case.make_optimizer} | settings)
    )
