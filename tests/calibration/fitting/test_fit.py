"""Fitting finds the factors that a machine was given.

The machine is the simulator under a calibration that the test chose, so that the truth is known; that the simulator
resembles real machines is another question, which ``make bench-fidelity`` answers.
"""

from __future__ import annotations

import pytest

from protwin.calibration.estimation.linear import Prior
from protwin.calibration.estimation.tasks import Coefficient
from protwin.calibration.fitting.fit import Pair, fit, fit_calibration
from protwin.calibration.fitting.measurement_plans import bootstrap_plans, spanning_plans
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.shared.basics.errors import CalibrationError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.calibration import Calibration, Contention, Factor, MeanSeconds
from protwin.shared.schema.hardware import Device, DeviceKind, Hardware, Host, Link
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.schema.workload import Block, BlockProfile, DType, Parameter, Phase, Workload
from protwin.shared.verify.verify import verify_schedule
from protwin.sim import simulate

MACHINE = Hardware(
    name="a machine",
    device=Device(
        name="cpu",
        kind=DeviceKind.CPU,
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_s=1e10,
        peak_flop_per_s={DType.FLOAT32: 1e11},
        vector_flop_per_s=1e10,
        launch_overhead_s=1e-6,
    ),
    host=Host(name="host", num_cores=2, memory_bytes=2**35, memory_bandwidth_bytes_per_s=1e10),
    host_to_device=Link(name="in", latency_s=1e-5, bandwidth_bytes_per_s=1e9),
    device_to_host=Link(name="out", latency_s=1e-5, bandwidth_bytes_per_s=1e9),
)
TRUTH = {
    TaskKind.FORWARD: 1.3,
    TaskKind.RECOMPUTE: 1.1,
    TaskKind.BACKWARD: 0.8,
    TaskKind.GATHER: 2.0,
    TaskKind.GRADIENT_OFFLOAD: 1.5,
    TaskKind.CPU_ADAM: 0.6,
    TaskKind.DEVICE_ADAM: 0.9,
}
SLOW = (
    Contention(lanes=(Lane.COMPUTE, Lane.H2D), slowdowns=(1.4, 1.6)),
    Contention(lanes=(Lane.COMPUTE, Lane.D2H), slowdowns=(1.3, 1.7)),
    Contention(lanes=(Lane.COMPUTE, Lane.CPU_OPTIM), slowdowns=(1.5, 1.9)),
)


def a_workload(num_blocks: int = 8) -> Workload:
    """Blocks of 1 MB that take 10 ms forward and 20 ms backward."""
    parameters = [Parameter(name="embedding", shape=(1000, 10), dtype=DType.FLOAT32)]
    for block in range(num_blocks):
        parameters += [
            Parameter(name=f"{block}.{k}", shape=(500, 250), dtype=DType.FLOAT32, block=block) for k in range(2)
        ]

    def phase(net_bytes: int, seconds: float) -> Phase:
        return Phase(net_bytes=net_bytes, curve=((1.0, max(net_bytes, 100_000)),), measured_s=seconds)

    gradients = 2 * 500 * 250 * 4
    profile = BlockProfile(
        output_bytes=1000,
        forward=phase(51_000, 0.010),
        backward=phase(gradients - 51_000, 0.020),
        checkpoint_forward=phase(1000, 0.010),
        recompute=phase(50_000, 0.009),
        checkpoint_backward=phase(gradients - 51_000, 0.020),
    )
    return Workload(
        model_name="eight blocks",
        model_hash="0",
        batch_shapes={"x": (1, 8)},
        num_samples=1,
        num_tokens=8,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"block {i}", profile=0) for i in range(num_blocks)),
        profiles=(profile,),
        prologue_forward=phase(1000, 0.0005),
        epilogue_forward=phase(3000, 0.004),
        epilogue_backward=phase(-3000, 0.006),
        prologue_backward=phase(-1000, 0.0007),
        traced_with="real",
        measured_on=MACHINE.name,
    )


def runs_of(workload: Workload, truth: Calibration) -> list[Pair]:
    """The bootstrap plans, as a machine that behaves like ``truth`` would record them."""
    records = [simulate(plan, workload, MACHINE, truth) for plan in bootstrap_plans(workload)]
    return [Pair(workload, record.model_copy(update={"origin": Origin.MEASURED})) for record in records]


def fitted(pairs: list[Pair], contention: tuple[Contention, ...]) -> Calibration:
    """What the pairs tell, given how lanes slow each other."""
    return fit_calibration(pairs, MACHINE, contention=contention, machine="here", software={})


def true_calibration() -> Calibration:
    """The machine's secret."""
    factors = {kind: Factor(value=value) for kind, value in TRUTH.items()}
    return Calibration(hardware_name=MACHINE.name, machine="here", factors=factors, contention=SLOW)


def largest_error(found: Calibration) -> float:
    """Of all factors, relative to the truth."""
    return max(abs(found.factor(kind) / value - 1) for kind, value in TRUTH.items())


def test_the_factors_come_back() -> None:
    """Within 2 % for every kind, though measured tasks are slowed by other lanes."""
    assert largest_error(fitted(runs_of(a_workload(), true_calibration()), SLOW)) < 0.02


def test_a_fit_that_ignores_contention_is_wrong() -> None:
    """The wrong variant: it takes slowdown by other lanes for the task's own cost."""
    alone = tuple(entry.model_copy(update={"slowdowns": (1.0, 1.0)}) for entry in SLOW)
    assert largest_error(fitted(runs_of(a_workload(), true_calibration()), alone)) > 0.05


def test_predictions_under_the_fit_are_the_machine() -> None:
    """Iteration times of plans that nothing was fitted to, within 1 %."""
    workload = a_workload()
    found = fitted(runs_of(workload, true_calibration()), SLOW)
    plans = spanning_plans(workload)
    assert len(plans) >= 12
    for plan in plans.values():
        truth_s = simulate(plan, workload, MACHINE, true_calibration()).iteration_s
        assert simulate(plan, workload, MACHINE, found).iteration_s == pytest.approx(truth_s, rel=0.01)


@pytest.mark.slow
def test_what_arrived_bytes_cost_comes_back() -> None:
    """A chunk costs its first reader a fifth of a forward: of what every task takes alike it is told apart.

    It is what reading it two or three times at the memory's bandwidth takes.
    """
    workload = a_workload()
    slower = MACHINE.device.model_copy(update={"memory_bandwidth_bytes_per_s": 1e9})
    box = MACHINE.model_copy(update={"device": slower})
    arrival = {TaskKind.FORWARD: 2e-9, TaskKind.BACKWARD: 3e-9, TaskKind.RECOMPUTE: 2e-9}
    truth = true_calibration().model_copy(update={"arrival_s_per_byte": arrival})
    pairs = runs_of(workload, truth)
    found = fit(pairs, box, contention=SLOW, machine="here", software={})
    for kind, seconds in arrival.items():
        assert found.calibration.arrival(kind) == pytest.approx(seconds, rel=0.1), kind
        std = found.calibration.arrival_std_s_per_byte[kind]
        assert std == found.estimates[kind].std(Coefficient.ARRIVAL_S_PER_BYTE) > 0
    assert found.calibration.arrival(TaskKind.DEVICE_ADAM) == 0
    # The wrong variant knows that they cost nothing, and takes offloaded plans for faster than they are.
    nothing = {kind: {Coefficient.ARRIVAL_S_PER_BYTE: Prior(0.0, 1e-20)} for kind in arrival}
    blind = fit(pairs, box, contention=SLOW, machine="here", software={}, priors=nothing)  # type: ignore[arg-type]
    errors = {
        name: [
            abs(simulate(plan, workload, box, one.calibration).iteration_s / truth_s - 1)
            for plan in spanning_plans(workload).values()
            for truth_s in [simulate(plan, workload, MACHINE, truth).iteration_s]
        ]
        for name, one in (("found", found), ("blind", blind))
    }
    assert max(errors["found"]) < 0.01
    assert max(errors["blind"]) > 3 * max(errors["found"])


def test_a_kind_that_no_run_had_keeps_what_was_known() -> None:
    """As an earlier calibration knows it; kinds that runs had go by both."""
    known = {Coefficient.SLOPE: Prior(3.0, 0.3), Coefficient.OVERHEAD_S: Prior(1e-3, 1e-4)}
    priors = {TaskKind.ALL_REDUCE: known, TaskKind.FORWARD: {Coefficient.SLOPE: Prior(9.0, 1e-9)}}
    pairs = runs_of(a_workload(), true_calibration())[:1]
    found = fit(pairs, MACHINE, machine="here", software={}, priors=priors).calibration  # type: ignore[arg-type]
    kept = found.factors[TaskKind.ALL_REDUCE]
    assert (kept.value, kept.relative_std, kept.num_pairs) == pytest.approx((3.0, 0.1, 0))
    assert found.overhead(TaskKind.ALL_REDUCE) == 1e-3
    assert found.factor(TaskKind.FORWARD) == pytest.approx(9.0)


def test_every_kind_that_a_plan_can_have_is_fitted() -> None:
    """Of one rank: plans that checkpoint, swap, add up, limit norms and step what stays."""
    workload = a_workload()

    def kinds(plan: Plan) -> set[TaskKind]:
        return {task.kind for task in compile_schedule(plan, workload).tasks}

    found = {kind for plan in draw_plans(workload, Draw(), number=30) for kind in kinds(plan)}
    fitted_to = [kinds(plan) for plan in bootstrap_plans(workload)]
    assert found == set().union(*fitted_to)
    # The wrong variant: these three alone never swap, add up or take a norm.
    assert found > set().union(*fitted_to[:3])


def test_a_kind_without_runs_has_the_factor_of_its_like() -> None:
    """What the same lane does in the same way; other lanes' kinds keep 1."""
    known = {TaskKind.GATHER: Factor(value=2.0), TaskKind.CPU_ADAM: Factor(value=3.0)}
    found = Calibration(hardware_name="x", machine="x", factors=known, overhead_s={TaskKind.GATHER: 0.5})
    assert found.factor(TaskKind.ACTIVATION_FETCH) == 2.0
    assert found.overhead(TaskKind.ACTIVATION_FETCH) == 0.5
    assert found.factor(TaskKind.GRADIENT_NORM) == found.factor(TaskKind.GRADIENT_ACCUMULATE) == 3.0
    assert found.factor(TaskKind.ACTIVATION_OFFLOAD) == found.factor(TaskKind.FORWARD) == 1.0
    own = found.model_copy(update={"factors": known | {TaskKind.ACTIVATION_FETCH: Factor(value=4.0)}})
    assert own.factor(TaskKind.ACTIVATION_FETCH) == 4.0


def test_no_plan_is_fitted_to_and_judged_by() -> None:
    """The plans that judge a calibration are none of those that it was fitted to, and all can be carried out."""
    workload = a_workload()
    judging, fitting = spanning_plans(workload).values(), bootstrap_plans(workload)
    assert not set(judging) & set(fitting)
    for plan in (*judging, *fitting):
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
        verify_schedule(compile_schedule(plan, workload, layout), plan, workload, layout)


def test_a_prediction_is_no_measurement() -> None:
    """Fitting to simulated records would confirm whatever the simulator says."""
    workload = a_workload()
    record = simulate(bootstrap_plans(workload)[0], workload, MACHINE)
    with pytest.raises(CalibrationError, match="predicted record"):
        fitted([Pair(workload, record)], ())


def test_nothing_to_fit_to() -> None:
    """No pairs, no calibration."""
    with pytest.raises(CalibrationError, match="no measured records"):
        fitted([], ())


def test_another_machines_figures_are_refused() -> None:
    """Tasks a thousand times faster than described: the description is of another machine."""
    factors = {kind: Factor(value=1e-3) for kind in TaskKind}
    fast = Calibration(hardware_name=MACHINE.name, machine="here", factors=factors)
    with pytest.raises(CalibrationError, match="another machine"):
        fitted(runs_of(a_workload(), fast), ())


def test_what_swapping_costs_comes_back() -> None:
    """Of a machine on which tasks of blocks that swap take longer, and others do not; the wrong variant knows no such.

    Predictions of plans that nothing was fitted to are the machine within 1 %.
    """
    workload = a_workload()
    profiles = [profile.model_copy(update={"swappable_bytes": 40_000}) for profile in workload.profiles]
    workload = Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | {"profiles": profiles})
    swapping = {TaskKind.FORWARD: MeanSeconds(seconds=0.004), TaskKind.BACKWARD: MeanSeconds(seconds=0.002)}
    truth = true_calibration().model_copy(update={"swapping": swapping})
    found = fitted(runs_of(workload, truth), SLOW)
    for kind, cost in swapping.items():
        assert found.swap_s(kind) == pytest.approx(cost.seconds, rel=0.05)
    unaware = found.model_copy(update={"swapping": {}})
    plans = [plan for plan in draw_plans(workload, Draw(seed=3), number=8) if plan.n_swap or plan.activation_modes]
    errors = []
    for plan in plans:
        truth_s = simulate(plan, workload, MACHINE, truth).iteration_s
        assert simulate(plan, workload, MACHINE, found).iteration_s == pytest.approx(truth_s, rel=0.01)
        errors.append(simulate(plan, workload, MACHINE, unaware).iteration_s / truth_s - 1)
    assert min(errors) < -0.03
