"""Out of memory at any task of a schedule, in any iteration: what is raised, and what is left.

A lane's task raises where its work would begin; a compute task raises when it begins, or, if wanted, when its first
operation allocates something, since the budget is then what is there.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, Training, carry_out
from protwin.runtime.lanes.lane_work import LaneWork
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Task, TaskId, TaskKind
from tests.runtime.eager_lanes import settle
from tests.runtime.life_cycle import check_ordinary, ordinary_facts
from tests.runtime.models import SEED, Case
from tests.runtime.watchdog import ends_in_time

MESSAGE = "out of memory, as was wished"


@dataclass(frozen=True)
class Ending:
    """How a training ended that ran out of memory."""

    task: str
    faults: tuple[str, ...]
    """What was not as it must be."""
    has_raised: bool = True
    """Whether there was anything to run out of."""
    is_one_step: bool = True
    """Whether all weights are those of one and the same step."""


class _Steps:
    """How often every chunk was stepped, as the lanes and the device report it."""

    def __init__(self) -> None:
        self.of_chunk: Counter[int] = Counter()

    @contextmanager
    def counted(self, fail_at: tuple[int, TaskId] | None) -> Iterator[None]:
        """Within the block, lanes count, and fail at one task."""
        original = LaneWork.of

        def work(of_lanes: LaneWork, task: Task, iteration: int) -> Callable[[], None]:
            inner = original(of_lanes, task, iteration)

            def run() -> None:
                if fail_at == (iteration, task.id):
                    raise CpuOutOfMemoryError(MESSAGE)
                inner()
                if task.kind is TaskKind.CPU_ADAM:
                    assert task.chunk is not None
                    self.of_chunk[task.chunk] += 1

            return run

        LaneWork.of = work  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            LaneWork.of = original  # type: ignore[method-assign]


@contextmanager
def _failing_compute(training: Training, iteration: int, task_id: TaskId, *, at_allocation: bool) -> Iterator[None]:
    metering, ledger = training._metering, training.device.ledger
    assert ledger is not None
    begin_task = metering.begin_task

    def begin(task: Task) -> None:
        begin_task(task)
        is_meant = (training._compute.iteration, task.id) == (iteration, task_id)
        if is_meant and not at_allocation:
            raise CpuOutOfMemoryError(MESSAGE)
        if is_meant:
            # Or what a lane gives back meanwhile would make room.
            settle(training)
        ledger.budget_bytes = ledger.level_bytes if is_meant else None

    metering.begin_task = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        metering.begin_task = begin_task  # type: ignore[method-assign]
        ledger.budget_bytes = None


def run_out(
    case: Case,
    plan: Plan,
    task_id: TaskId,
    iteration: int,
    *,
    at_allocation: bool = False,
    keep_last_step: bool = False,
) -> Ending:
    """Train until memory runs out at a task of an iteration, close, and look at what is left.

    With ``keep_last_step`` no chunk may be ahead of the last completed iteration.  ``at_allocation`` is for compute
    tasks of iterations that are watched; one that allocates nothing has nothing to run out of.
    """
    model = case.build()
    facts = ordinary_facts(model)
    steps = _Steps()
    device = CpuDevice()
    error: BaseException | None = None
    faults = []
    with ends_in_time(), steps.counted((iteration, task_id)):
        training = carry_out(
            model,
            plan,
            case.workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            device=device,
            keep_last_step=keep_last_step,
        )
        task = training.schedule.tasks[task_id]
        owners = _owners(training)
        try:
            compute_at = iteration if task.lane is Lane.COMPUTE else -1
            with training, _failing_compute(training, compute_at, task_id, at_allocation=at_allocation):
                _train(case, plan, model, training)
        except torch.OutOfMemoryError as found:
            error = found
        num_iterations = training.num_iterations
    if error is None:
        if not at_allocation:
            faults.append("nothing was raised")
        return Ending(task.name, tuple(faults), has_raised=False)
    message = "".join(traceback.format_exception(error))
    wanted = "out of memory on the CPU device" if at_allocation else MESSAGE
    if wanted not in message:
        faults.append(f"raised {error!r}")
    try:
        check_ordinary(model, facts)
    except AssertionError as found:
        faults.append(f"no ordinary model is left: {found}")
    if device.ledger.named_bytes:
        faults.append(f"{device.ledger.named_bytes} bytes are left in the ledger")
    del error
    counts = {name: steps.of_chunk[chunk] if chunk is not None else num_iterations for name, chunk in owners.items()}
    if keep_last_step:
        counts = {name: min(count, num_iterations) for name, count in counts.items()}
    faults += _strange_weights(case, plan, model, counts)
    faults += _must_train(case, model)
    trained = {count for name, count in counts.items() if model.get_parameter(name).requires_grad}
    return Ending(task.name, tuple(faults), is_one_step=len(trained) == 1)


def _train(case: Case, plan: Plan, model: nn.Module, training: Training) -> None:
    torch.manual_seed(SEED)
    for batches in case.steps(plan.micro_batches):
        for batch in batches:
            case.loss(model, batch).backward()
        training.step()


def _owners(training: Training) -> dict[str, int | None]:
    """The offloaded chunk of every parameter; None for those that the device steps."""
    found: dict[str, int | None] = {}
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    for chunk in training._placed.chunks:
        for parameter in chunk.parameters:
            found[names[parameter]] = None if chunk.is_persistent else chunk.chunk.id
    return found


def _strange_weights(case: Case, plan: Plan, model: nn.Module, counts: dict[str, int]) -> list[str]:
    """Parameters that are not, bit for bit, those of as many plain steps as they were stepped."""
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm).weights
    return [
        f"{name} is not that of step {counts[name]}"
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, plain[counts[name]][name])
    ]


def _must_train(case: Case, model: nn.Module) -> list[str]:
    """An ordinary model trains plainly."""
    optimizer = case.make_optimizer(case.groups(model))
    case.loss(model, case.batches[0]).backward()
    optimizer.step()
    return [] if any(p.grad is not None for p in model.parameters()) else ["the model does not train afterwards"]
