"""A step that is given up in the middle leaves nothing, and training goes on as the plain loop that gave it up."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, LossScaling, NonFiniteGradientError, Training, carry_out
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.lanes.compute_lane import ComputeLane
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.optimizers.step_undo import _Kept
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Content, Task, TaskKind
from tests.interrupting import interruption
from tests.proof_size import some_quick
from tests.runtime.eager_lanes import settle
from tests.runtime.equality import offloaded_chunks, random_plans
from tests.runtime.families import family_cases
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, cases, differences
from tests.runtime.skipping import Point, Trained, by_plan, plainly, run_step, start
from tests.runtime.training.test_memory import guaranteed_bytes
from tests.runtime.training.test_running_out import KINDS_ALONE, small_case
from tests.runtime.training.test_running_out import everything as everything_small
from tests.runtime.watchdog import ends_in_time

PHASES = ("forward", "recompute", "backward", "before backward", "after backward")
STEPS = 6
"""Three watched ones and more, since steps that are given up are not counted."""


@lru_cache
def case_of(name: str) -> Case:
    return cases(STEPS)[name]


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


def faults_of(case: Case, plan: Plan, seed: int) -> dict[int, Point]:
    """In the first step and three others, in any phase, block and micro-batch."""
    chance = random.Random(seed)
    return {
        step: Point(
            chance.choice(PHASES), chance.randrange(case.workload.num_blocks), chance.randrange(plan.micro_batches)
        )
        for step in (0, 2, 3, 5)
    }


def check(case: Case, plan: Plan, seed: int) -> None:
    faults = faults_of(case, plan, seed)
    steps = case.steps(plan.micro_batches)
    with ends_in_time():
        found = by_plan(case, plan, steps, faults, keep_last_step=True)
    compare(found, plainly(case, steps, plan.max_gradient_norm, faults), num_skipped=len(faults))


def compare(found: Trained, plain: Trained, *, num_skipped: int) -> None:
    assert (found.num_skipped, plain.num_skipped) == (num_skipped, num_skipped)
    assert found.losses == plain.losses
    assert [name for name, value in plain.weights.items() if not torch.equal(value, found.weights[name])] == []
    assert torch.equal(found.random, plain.random)


# -- equal to the plain loop -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2 with dropout, tied", "hand-written, batch statistics", "llama in bfloat16"])
def test_random_plans_go_on_like_the_plain_loop(name: str) -> None:
    case = case_of(name)
    chosen = [plan for plan in random_plans(case.workload, 12, seed=len(name)) if offloaded_chunks(case.workload, plan)]
    for number, plan in enumerate(chosen[:2]):
        check(case, plan, number)


def everything(case: Case, **knobs: object) -> Plan:
    """Persistent and offloaded chunks, all modes, two micro-batches, a limited norm."""
    modes = (ActivationMode.SWAP, ActivationMode.CHECKPOINT, ActivationMode.KEEP, ActivationMode.CHECKPOINT)
    chosen = {"n_swap": 1, "n_checkpoint": 2, "activation_modes": modes, "micro_batches": 2, "max_gradient_norm": 1.0}
    return plan_for(case.workload).model_copy(update=chosen | knobs)


def test_a_plan_of_everything_goes_on_like_the_plain_loop() -> None:
    case = case_of("hand-written, unused parameters")
    for seed in range(2):
        check(case, everything(case), seed)


def test_with_a_limited_norm_nothing_is_kept_and_backward_may_be_given_up() -> None:
    """CPU Adam begins when the last gradient of the whole model has arrived."""
    case = case_of("llama")
    plan = everything(case)
    steps = case.steps(plan.micro_batches)
    faults = {0: Point("backward", 0, 1), 2: Point("recompute", 1, 0), 3: Point("before backward", 0, 1)}
    with ends_in_time():
        found = by_plan(case, plan, steps, faults)
    compare(found, plainly(case, steps, 1.0, faults), num_skipped=3)


def test_other_optimizers_get_their_first_state_back() -> None:
    """Momentum is made in the first step: one that is taken back leaves none."""
    case = case_of("llama")
    case = Case(case.build, case.batches, make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    check(case, plan_for(case.workload), 1)


# -- what is left ----------------------------------------------------------------------------------------------------


def levels(training: Training) -> dict[str, object]:
    """What the device holds when the lanes have done all that they can before the next forward."""
    ledger = training.device.ledger
    assert ledger is not None
    settle(training)
    # The batches are the test's own, which holds them all.
    alive = {content: size for content, size in ledger.alive.items() if size and content is not Content.RESIDENT}
    return {"named": ledger.named_bytes, "claim": ledger.claim_bytes, "alive": alive}


def test_memory_is_that_of_the_beginning_of_an_iteration() -> None:
    """In iterations that are watched, and in those that are not."""
    case = case_of("llama")
    steps = [*case.steps(2), *case.steps(2)][:10]
    before: list[dict[str, object]] = []
    after: list[dict[str, object]] = []
    points = [Point(phase, block % 4, block % 2) for block, phase in enumerate(PHASES, start=1)]
    faults = dict(zip((1, 2, 7, 8, 9), points, strict=True))
    with ends_in_time():
        by_plan(
            case,
            everything(case),
            steps,
            faults,
            before_step=lambda training: before.append(levels(training)),
            on_skip=lambda training: (gc.collect(), after.append(levels(training)))[1],
            keep_last_step=True,
        )
    assert [level["named"] for level in before[1:3]] != [0, 0]
    assert after == [before[number] for number in faults]


def test_budgets_hold_afterwards(case: Case) -> None:
    """What a plan is guaranteed to need is enough, however often steps are given up."""
    plan = plan_for(case.workload)
    steps = [*case.steps(1), *case.steps(1)]
    faults = {number: Point("backward", 1) for number in (0, 1, 2, 5, 6)}
    device = CpuDevice(guaranteed_bytes(case, plan))
    found = by_plan(case, plan, steps, faults, device=device, keep_last_step=True)
    compare(found, plainly(case, steps, None, faults), num_skipped=5)
    assert device.ledger.named_bytes == 0


def test_what_a_failed_backward_had_ready_goes_with_it() -> None:
    """torch keeps it for the thread's next backward, and with it what all of forward saved: more than is guaranteed."""
    case = family_cases()["bert"]
    plan = plan_for(case.workload, n_persist=0).model_copy(update={"n_checkpoint": 0})
    device, model = CpuDevice(guaranteed_bytes(case, plan)), case.build()
    with (
        ends_in_time(),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training,
    ):
        for number, batch in enumerate(case.batches):
            loss = case.loss(model, batch)
            with ExitStack() as undo:
                if number % 2:
                    undo.callback(model.classifier.bias.register_hook(lambda _: 1 / 0).remove)  # type: ignore[union-attr]
                    undo.enter_context(suppress(ZeroDivisionError))
                loss.backward()
            del loss
            if number % 2:
                training.skip_step()
            else:
                training.step()
    assert training.num_steps == len(case.batches) / 2


def test_a_record_leaves_the_pause_out(case: Case) -> None:
    steps = [*case.steps(1)] * 3
    found: list[Training] = []
    by_plan(case, plan_for(case.workload), steps, {6: Point("forward", 2)}, on_skip=found.append)
    assert [log.index for log in found[0]._recorder.logs if log.follows_pause] == [6]
    assert found[0].num_steps == len(steps) - 1


# -- errors of the runtime itself ------------------------------------------------------------------------------------


@contextmanager
def failing_once(training: Training, task: Task, iteration: int) -> Iterator[None]:
    """Within the block, memory runs out at a task of an iteration, the first time."""
    metering, begin_task = training._metering, training._metering.begin_task
    has_failed: list[bool] = []

    def begin(begun: Task) -> None:
        begin_task(begun)
        fail(begun, training._compute.iteration)

    def fail(begun: Task, at: int) -> None:
        if (begun.id, at) == (task.id, iteration) and not has_failed:
            has_failed.append(True)
            raise CpuOutOfMemoryError("out of memory, as was wished")

    original = training._lanes.work.of

    def work(begun: Task, at: int) -> Callable[[], None]:
        inner = original(begun, at)

        def run() -> None:
            fail(begun, at)
            inner()

        return run

    metering.begin_task = begin  # type: ignore[method-assign]
    training._lanes.work.of = work  # type: ignore[method-assign]
    try:
        yield
    finally:
        del metering.begin_task, training._lanes.work.of
    assert has_failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS_ALONE if kind is not TaskKind.DEVICE_ADAM])
def test_a_lack_of_memory_at_any_task_is_survived(kind: TaskKind) -> None:
    """On its lane, or on the compute thread; the last task of every kind."""
    case = small_case()
    plan = everything_small(case)
    model = case.build()
    steps = case.steps(plan.micro_batches)
    with (
        ends_in_time(),
        carry_out(
            model,
            plan,
            case.workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            keep_last_step=True,
        ) as training,
    ):
        task = next(task for task in reversed(training.schedule.tasks) if task.kind is kind)
        with failing_once(training, task, 2):
            run_step(case, model, training, steps[0])
            run_step(case, model, training, steps[1])
            with pytest.raises(CpuOutOfMemoryError):  # noqa: PT012
                for batch in steps[2]:
                    case.loss(model, batch).backward()
                settle(training)
                training._lanes.check()
            training.skip_step()
        run_step(case, model, training, steps[2])
        assert training.num_iterations == 3
    assert differences(model, case.plain_with(plan.micro_batches, plan.max_gradient_norm).weights[-1]) == []


def test_ctrl_c_in_a_slow_copy_is_survived(case: Case) -> None:
    """As at every other point, the thread that waits is interrupted; the copy is cut short."""
    model = case.build()
    device = CpuDevice()
    with ends_in_time(), start(case, model, device=device) as training:
        run_step(case, model, training, case.batches[:1])
        training.synchronize()
        device._rates[True] = 10.0
        with interruption() as interrupt:
            interrupt(0.5)
            with pytest.raises(KeyboardInterrupt):
                case.loss(model, case.batches[1])
        device._rates[True] = None
        training.skip_step()
        for batch in case.batches[1:]:
            run_step(case, model, training, [batch])
    assert differences(model, case.plain.weights[-1]) == []


def test_gradients_that_are_not_finite_are_skipped(case: Case) -> None:
    """As torch.amp.GradScaler skips them; with a limited norm nothing has been stepped when they are found."""
    model, plan = case.build(), everything(case, micro_batches=1)
    plain = case.plain_with(1, 1.0)
    with (
        ends_in_time(),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)) as t,
    ):
        for batch in case.batches:
            (case.loss(model, batch) * float("nan")).backward()
            with pytest.raises(NonFiniteGradientError, match="is not finite"):
                t.step()
            t.skip_step()
            run_step(case, model, t, [batch])
        assert t.num_steps == len(case.batches)
    assert differences(model, plain.weights[-1]) == []


def test_losses_that_were_scaled_do_not_count(case: Case) -> None:
    model, plan = case.build(), everything(case)
    with ends_in_time(), start(case, model, plan, loss_scaling=LossScaling(initial_scale=2.0)) as training:
        for batches in case.steps(2):
            training.scale(case.loss(model, batches[0])).backward()
            training.skip_step()
            for batch in batches:
                training.scale(case.loss(model, batch)).backward()
            training.step()
        assert training.loss_scaler is not None
        assert training.loss_scaler.num_good_steps == len(case.batches)
    assert differences(model, case.plain_with(2, 1.0).weights[-1]) == []


def test_checkpoints_and_evaluations_between_steps_that_are_given_up(case: Case, tmp_path: Path) -> None:
    """Under another plan afterwards; the step that counts is the loop's."""
    model, other = case.build(), case.build()
    with ends_in_time(), start(case, model, keep_last_step=True) as training:
        for batch in case.batches[:2]:
            case.loss(model, batch).backward()
            training.skip_step()
            with training.evaluation():
                model(**batch)
            run_step(case, model, training, [batch])
        case.loss(model, case.batches[2]).backward()
        training.skip_step()
        training.save(tmp_path / "checkpoint")
        state = training.state_dict()
    assert [name for name, value in case.plain.weights[2].items() if not torch.equal(value, state[name])] == []
    with ends_in_time(), start(case, other, plan_for(case.workload, n_persist=5)) as training:
        case.loss(other, case.batches[3])
        training.skip_step()
        assert training.resume(tmp_path / "checkpoint").step == 2
        for batch in case.batches[2:]:
            run_step(case, other, training, [batch])
        assert training.num_steps == len(case.batches)
    assert differences(other, case.plain.weights[-1]) == []


# -- wrong variants --------------------------------------------------------------------------------------------------


def weights_after_skipping(case: Case) -> list[str]:
    """Names of weights that differ from the plain loop's, after steps that were given up behind their backward."""
    faults = {1: Point("after backward")}
    steps = case.steps(1)
    found = by_plan(case, plan_for(case.workload), steps, faults, on_skip=lambda _: None, keep_last_step=True)
    expected = plainly(case, steps, None, faults).weights
    return [name for name, value in expected.items() if not torch.equal(value, found.weights[name])]


@some_quick(
    "variant",
    [
        (PlacedModel, "take_back_steps", lambda self, *, num_completed: None),
        (_Kept, "give_back", lambda self, optimizer: give_weights_alone(self, optimizer)),
        (ChunkOptimizer, "take_step_back", lambda self: None),
    ],
    quick=1,
    ids=["steps stay", "the optimizer's state stays", "the number of the step stays"],
)
def test_what_is_not_taken_back_shows(variant: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_after_skipping(case) == []
    monkeypatch.setattr(*variant)
    monkeypatch.setattr(ComputeLane, "skip_step", settled(ComputeLane.skip_step))
    assert weights_after_skipping(case) != []


def settled(skip_step: Callable[[ComputeLane], None]) -> Callable[[ComputeLane], None]:
    """After all of CPU Adam that can run has run."""

    def skip(compute: ComputeLane) -> None:
        for task in compute._schedule.tasks:
            if task.kind is TaskKind.CPU_ADAM:
                compute._lanes.mark(compute.iteration, task.id).wait_for_end()
        skip_step(compute)

    return skip


def give_weights_alone(kept: _Kept, optimizer: ChunkOptimizer) -> None:
    for copy, tensor in zip(kept._weights, optimizer.stepped_tensors, strict=True):
        tensor.copy_(copy)
