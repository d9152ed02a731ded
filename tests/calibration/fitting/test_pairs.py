"""Distillations are measured and fitted to as full training is: kinds of tasks of their own, plans by chance."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings

from protwin.calibration.fitting.calibrate import calibrate_configuration
from protwin.calibration.fitting.fit import Pair, fit_calibration
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.fitting.pair_subject import PairSubject
from protwin.calibration.fitting.trained_as import TrainedAs
from protwin.calibration.validation import validate as validating
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.calibration.validation.validate import Trial, validate
from protwin.runtime.devices.cpu_device import CpuDevice
from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import TrainingMethod
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import Phase, Workload
from protwin.shared.students.student import BlockOverrides, Student
from protwin.shared.verify.verify import verify_schedule
from protwin.sim import simulate
from protwin.sim.costs.task_costs import CostModel
from tests.calibration.fitting.test_fit import MACHINE
from tests.proof_size import examples
from tests.shared.bypass_models import pairs
from tests.strategies.pairs import bypass_workloads

TRUTH = {
    TaskKind.TEACHER_FORWARD: 1.5,
    TaskKind.FORWARD: 1.2,
    TaskKind.LOSS: 3.0,
    TaskKind.BACKWARD: 0.8,
    TaskKind.GATHER: 2.0,
    TaskKind.GRADIENT_OFFLOAD: 1.5,
    TaskKind.CPU_ADAM: 0.6,
    TaskKind.DEVICE_ADAM: 0.9,
}


def timed(phase: Phase, seconds: float) -> Phase:
    return phase.model_copy(update={"measured_s": seconds})


def timed_pairs(num_pairs: int) -> Workload:
    """Measured seconds on ``MACHINE``: 10 ms for a teacher's block, 12, 2 and 20 ms for a student's three phases."""
    found = pairs(num_pairs)
    teacher, student = found.profiles
    assert found.distillation is not None
    losses = found.distillation.losses
    forward = timed(teacher.forward, 0.010)
    return found.model_copy(
        update={
            "profiles": (
                teacher.model_copy(update={"forward": forward, "checkpoint_forward": forward}),
                student.model_copy(
                    update={"forward": timed(student.forward, 0.012), "backward": timed(student.backward, 0.020)}
                ),
            ),
            "distillation": found.distillation.model_copy(update={"losses": (losses[0], timed(losses[1], 0.002))}),
            "prologue_forward": timed(found.prologue_forward, 0.001),
            "measured_on": MACHINE.name,
        }
    )


def test_a_loss_that_takes_three_times_as_long_is_found_out() -> None:
    """Records of a machine whose kinds have factors of their own give these; records of full training could not."""
    workload = timed_pairs(6)
    truth = Calibration(
        hardware_name=MACHINE.name, machine="", factors={kind: Factor(value=value) for kind, value in TRUTH.items()}
    )
    fitting = bootstrap_plans(workload)
    assert {plan.method for plan in fitting} == {TrainingMethod.BYPASS}
    records = [simulate(plan, workload, MACHINE, truth) for plan in fitting]
    measured = [record.model_copy(update={"origin": Origin.MEASURED}) for record in records]
    found = fit_calibration([Pair(workload, one) for one in measured], MACHINE, machine="", software={})
    for kind, value in TRUTH.items():
        # Copies of some ten microseconds tell what they take, and not how much of it grows with their bytes.
        if kind not in (TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD):
            assert found.factor(kind) == pytest.approx(value, rel=0.02), kind
    for one in measured:
        schedule = compile_schedule(one.plan, workload)
        taken = [CostModel.of(workload, MACHINE, known).durations_s(schedule) for known in (truth, found)]
        for kind in TRUTH:
            true_s, found_s = (sum(of[task.id] for task in schedule.tasks if task.kind is kind) for of in taken)
            assert found_s == pytest.approx(true_s, rel=0.02), kind
    # What no distillation was fitted to takes the forward's factor, which is wrong here.
    without = found.model_copy(update={"factors": {TaskKind.FORWARD: found.factors[TaskKind.FORWARD]}})
    assert without.factor(TaskKind.LOSS) == pytest.approx(TRUTH[TaskKind.FORWARD], rel=0.02)
    for plan in draw_plans(workload, Draw(seed=3), number=5, without=fitting):
        expected, near, far = (simulate(plan, workload, MACHINE, one).iteration_s for one in (truth, found, without))
        assert near == pytest.approx(expected, rel=0.02)
        assert abs(far / expected - 1) > 0.02


@given(bypass_workloads(max_pairs=3))
@settings(max_examples=examples(100, 15), deadline=None)
def test_plans_to_measure_are_plans_of_the_method(workload: Workload) -> None:
    for plan in (*bootstrap_plans(workload), *spanning_plans(workload).values()):
        verify_schedule(compile_schedule(plan, workload), plan, workload)


@pytest.fixture(scope="module")
def subject() -> PairSubject:
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **ends, intermediate_size=48))
    student = Student(all=BlockOverrides(intermediate_size=24))
    return PairSubject.of(
        teacher.eval(),
        student,
        {"input_ids": torch.randint(0, 64, (2, 12))},
        name="small",
        hardware=MACHINE.model_copy(update={"name": CpuDevice().description}),
        make_optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )


def test_the_plain_loop_does_what_a_plan_does(subject: PairSubject) -> None:
    """What plans are timed against is the same training: the same weights after three steps."""
    plain_step, plain = subject.plain_pair()
    plan = bootstrap_plans(subject.workload)[2]
    with subject.begin(plan) as training:
        for _ in range(3):
            subject.run_step(training)
            plain_step()
    learnt = dict(training.model.named_parameters())
    assert subject.student is not None
    before = dict(subject.student.named_parameters())
    num_changed = 0
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, learnt[f"student.{name}"]), name
        num_changed += not torch.equal(parameter, before[name])
    assert num_changed > 10


@pytest.mark.slow
def test_validation_of_a_small_pair(subject: PairSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a validation, with few plans and nothing asked of times."""
    monkeypatch.setattr(validating, "_LARGEST_FRAC", 100.0)
    found, records = validate(subject, Trial(num_plans=3, seed=1, most_rounds=3, steps=2, slowdown_seconds=0.2))
    assert [plan.name for plan in found.plans][-2:] == ["search's pick", "search's pick without a budget"]
    assert len(found.plans) == 3 + 2
    assert len(records) == len(bootstrap_plans(subject.workload)) + len(found.plans)
    assert {plan.plan.micro_batches for plan in found.plans} != {1}
    # Which buffers are there at once depends on times, of which nothing is asked: a few kilobytes of a small model.
    assert found.worst_peak_error_frac < 0.1
    assert found.num_over_guarantee == 0
    assert found.plain_iteration_s is not None
    assert found.plain_ratio is not None
    assert found.plain_ratio > 0


def test_a_student_is_measured_on_one_rank_alone() -> None:
    learning = TrainedAs(student=Student())
    with pytest.raises(PlanError, match="Leave out --ranks, or --student"):
        calibrate_configuration({}, "x", MACHINE, batch_size=1, sequence_length=8, num_ranks=2, trained_as=learning)


@pytest.mark.parametrize(
    "besides",
    [{"device_budget_bytes": 2**20}, {"optimizer": Optimizer.SGD}, {"options": TrainingOptions(frozen=("a",))}],
)
def test_a_student_is_measured_as_it_is_distilled(besides: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="Leave out --student, or --device-budget"):
        TrainedAs(student=Student(), **besides).check(1)
    TrainedAs(**besides).check(1)
