"""What a task costs alone: rooflines, links, Adam and calibration, against figures worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import CalibrationError, HardwareError, WorkloadError
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.hardware import Device, DeviceKind, Disk, Hardware, Link, LinkPoint
from protwin.shared.schema.schedule import LANE_OF, Lane, Task, TaskId, TaskKind
from protwin.shared.schema.workload import DType, Operation, OperationClass, Phase
from protwin.sim.costs.copies import copy_time_s
from protwin.sim.costs.task_costs import CostModel, host_adam_bytes_per_s
from protwin.sim.engine.simulator import simulate
from protwin.sim.operations.efficiency import DISPATCHES_PER_LAUNCH, KERNEL_FIXED_S, efficiency_frac
from protwin.sim.operations.roofline import matrix_flop_per_s, roofline_s
from tests.sim.hand_made import MACHINE, STEPPED_BYTES, adam, copy, machine, plan, workload
from tests.strategies.machines import hardware, links
from tests.strategies.workloads import operations


def device(kind: DeviceKind = DeviceKind.CUDA, launch_overhead_s: float = 0.0, efficiency: float = 1.0) -> Device:
    return Device(
        name="round figures",
        kind=kind,
        memory_bytes=10**9,
        memory_bandwidth_bytes_per_s=100.0,
        peak_flop_per_s={DType.FLOAT32: 1000.0, DType.BFLOAT16: 4000.0},
        vector_flop_per_s=500.0,
        launch_overhead_s=launch_overhead_s,
        efficiency=dict.fromkeys(OperationClass, efficiency),
    )


def operation(
    flops: int,
    bytes_moved: int,
    *,
    dtype: DType = DType.FLOAT32,
    operation_class: OperationClass = OperationClass.MATMUL,
    count: int = 1,
) -> Operation:
    return Operation(
        name="aten.mm",
        operation_class=operation_class,
        dtype=dtype,
        flops=flops,
        bytes_moved=bytes_moved,
        count=count,
    )


def seconds(*of: Operation, on: Device | None = None) -> float:
    return roofline_s(Phase(operations=of), on if on is not None else device())


# -- rooflines -------------------------------------------------------------------------------------------------------


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    assert seconds(operation(3000, 100)) == pytest.approx(3.0)  # 3000 / 1000 flop/s against 100 / 100 B/s
    assert seconds(operation(3000, 700)) == pytest.approx(7.0)
    assert seconds(operation(3000, 100, dtype=DType.BFLOAT16)) == pytest.approx(1.0)  # memory: 3000 / 4000 is less
    assert seconds(operation(3000, 100, count=4)) == pytest.approx(12.0)
    assert seconds(operation(3000, 100), operation(3000, 700)) == pytest.approx(10.0)
    assert seconds() == 0


def test_only_matrix_products_use_the_matrix_units() -> None:
    for operation_class in OperationClass:
        is_matrix = operation_class in (OperationClass.MATMUL, OperationClass.ATTENTION)
        expected = 2.0 if is_matrix else 4.0  # 1 000 flop/s, or the 500 of the vector units
        assert seconds(operation(2000, 0, operation_class=operation_class)) == pytest.approx(expected)


def test_efficiency_divides_both_sides_of_the_roof() -> None:
    half = device(efficiency=0.5)
    assert seconds(operation(3000, 100), on=half) == pytest.approx(6.0)
    assert seconds(operation(3000, 700), on=half) == pytest.approx(14.0)


@pytest.mark.parametrize("kind", DeviceKind)
def test_every_class_has_an_efficiency_where_the_device_states_none(kind: DeviceKind) -> None:
    bare = device(kind).model_copy(update={"efficiency": {}})
    for operation_class in OperationClass:
        assert 0.3 <= efficiency_frac(bare, operation_class) <= 0.95
    stated = device(kind, efficiency=0.123)
    assert efficiency_frac(stated, OperationClass.MATMUL) == 0.123


def test_the_host_dispatches_beside_kernels_on_cuda_and_before_them_on_a_cpu() -> None:
    large, small = operation(0, 1000), operation(0, 10, count=20)  # 10 s, and 20 times 0.1 s
    # CUDA: 21 dispatches of 4 x 0.1 s are 8.4 s, hidden behind 12 s of kernels; of 4 x 1 s they hide the kernels.
    kernels_s = 12.0 + 21 * KERNEL_FIXED_S
    assert seconds(large, small, on=device(launch_overhead_s=0.1)) == pytest.approx(kernels_s)
    assert seconds(large, small, on=device(launch_overhead_s=1.0)) == pytest.approx(21 * DISPATCHES_PER_LAUNCH)
    assert seconds(large, small, on=device(DeviceKind.CPU, launch_overhead_s=0.3)) == pytest.approx(12.0 + 6.3)


def test_a_kernel_takes_no_longer_than_an_operation_that_does_nothing() -> None:
    assert seconds(operation(0, 10), on=device(launch_overhead_s=1e-7)) == pytest.approx(0.1 + 1e-7, abs=1e-12)


def test_an_element_type_without_matrix_units_computes_in_a_wider_one() -> None:
    only_float32 = device().model_copy(update={"peak_flop_per_s": {DType.FLOAT32: 1000.0}})
    for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2):
        assert matrix_flop_per_s(only_float32, operation(1, 1, dtype=dtype)) == 1000.0
    assert matrix_flop_per_s(device(), operation(1, 1, dtype=DType.FLOAT8_E4M3FN)) == 4000.0  # bfloat16 is nearer
    only_bfloat16 = device().model_copy(update={"peak_flop_per_s": {DType.BFLOAT16: 4000.0}})
    # Not the narrower type's matrix units: float32 products would lose digits there.
    assert matrix_flop_per_s(only_bfloat16, operation(1, 1, dtype=DType.FLOAT32)) == 500.0
    with pytest.raises(HardwareError, match=r"matrices of float64 but round figures states .* for bfloat16, float32"):
        matrix_flop_per_s(device(), operation(1, 1, dtype=DType.FLOAT64))
    with pytest.raises(HardwareError, match="int64"):
        seconds(operation(1, 1, dtype=DType.INT64))
    assert seconds(operation(0, 100, dtype=DType.INT64)) == pytest.approx(1.0)  # without arithmetic there is no doubt


@given(hardware(), st.lists(operations(), max_size=3), operations())
def test_more_work_never_takes_less_time(hardware: Hardware, some: list[Operation], more: Operation) -> None:
    before, after = Phase(operations=tuple(some)), Phase(operations=(*some, more))
    assert roofline_s(after, hardware.device) >= roofline_s(before, hardware.device) >= 0


# -- links -----------------------------------------------------------------------------------------------------------

TABLE = Link(
    name="measured",
    latency_s=0.5,
    bandwidth_bytes_per_s=1e9,  # far from what the table says: within its range the table counts
    table=(LinkPoint(size_bytes=100, seconds=1.0), LinkPoint(size_bytes=10_000, seconds=4.0)),
)


def test_latency_and_bandwidth() -> None:
    link = Link(name="x", latency_s=0.5, bandwidth_bytes_per_s=200.0)
    assert copy_time_s(1000, link) == pytest.approx(5.5)
    assert copy_time_s(0, link) == 0.5
    assert CostModel(machine()).copy_s(1000, link) == copy_time_s(1000, link)


def test_a_measured_table_is_met_and_interpolated_in_logarithms() -> None:
    assert copy_time_s(100, TABLE) == pytest.approx(1.0)
    assert copy_time_s(10_000, TABLE) == pytest.approx(4.0)
    assert copy_time_s(1000, TABLE) == pytest.approx(2.0)  # halfway between in decades: the geometric mean
    assert copy_time_s(40_000, TABLE) == pytest.approx(16.0)  # the last point's bandwidth
    assert copy_time_s(0, TABLE) == pytest.approx(0.5)
    assert copy_time_s(50, TABLE) == pytest.approx(0.75)  # halfway between latency and the first point


@given(links(), st.lists(st.integers(0, 2**26), min_size=2, max_size=12))
def test_larger_copies_never_take_less_time(link: Link, sizes: list[int]) -> None:
    times_s = [copy_time_s(size, link) for size in sorted(sizes)]
    for smaller_s, larger_s in pairwise(times_s):
        assert larger_s >= smaller_s * (1 - 1e-12)
    assert times_s[0] >= 0


def test_a_table_that_dips_is_read_as_its_running_maximum() -> None:
    noisy = TABLE.model_copy(
        update={
            "table": (
                LinkPoint(size_bytes=100, seconds=1.0),
                LinkPoint(size_bytes=200, seconds=0.8),
                LinkPoint(size_bytes=400, seconds=3.0),
            )
        }
    )
    assert noisy.table[1].seconds < noisy.table[0].seconds  # taken as it is, 200 bytes would beat 100
    assert copy_time_s(200, noisy) == copy_time_s(100, noisy) == 1.0
    assert copy_time_s(400, noisy) == pytest.approx(3.0)


# -- Adam ------------------------------------------------------------------------------------------------------------


def test_cpu_adam_runs_at_the_measured_rate_of_the_host() -> None:
    costs = CostModel(machine(cpu_adam_s=2.5))
    assert costs.task_s(adam(TaskKind.CPU_ADAM, 64, STEPPED_BYTES)) == pytest.approx(2.5)


def test_cpu_adam_without_a_measured_rate_takes_a_share_of_the_memory_bandwidth() -> None:
    host = machine().host.model_copy(
        update={"adam_bytes_per_s": None, "memory_bandwidth_bytes_per_s": 200e9, "num_cores": 64}
    )
    assert 0.3 * 200e9 < host_adam_bytes_per_s(host) < 200e9
    few_cores = host.model_copy(update={"num_cores": 2})
    assert host_adam_bytes_per_s(few_cores) < host_adam_bytes_per_s(host)  # two cores cannot draw 200 GB/s


def test_device_adam_runs_from_the_memory_that_holds_its_state() -> None:
    step = adam(TaskKind.DEVICE_ADAM, 64, STEPPED_BYTES)
    assert CostModel(machine()).task_s(step) == pytest.approx(1.0)  # 1 792 bytes per second on the device
    on_cpu = machine(kind=DeviceKind.CPU, cpu_adam_s=2.5)
    assert CostModel(on_cpu).task_s(step) == pytest.approx(2.5)


@pytest.mark.parametrize("kind", [TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM])
def test_nothing_to_step_costs_the_calibrated_overhead_alone(kind: TaskKind) -> None:
    launching = machine().model_copy(update={"device": machine().device.model_copy(update={"launch_overhead_s": 5.0})})
    assert CostModel(launching).task_s(adam(kind, 0, 0)) == 0
    calibration = Calibration(
        hardware_name=MACHINE, machine=MACHINE, factors={kind: Factor(value=3.0)}, overhead_s={kind: 0.25}
    )
    assert CostModel(launching, calibration).task_s(adam(kind, 0, 0)) == 0.25


# -- calibration and measured seconds --------------------------------------------------------------------------------

MEASURED = Phase(operations=(operation(3000, 0),), measured_s=7.0)


def compute(kind: TaskKind, phase: Phase) -> Task:
    return Task(TaskId(0), kind, phase=phase)


@pytest.mark.parametrize("kind", [TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD])
def test_measured_seconds_count_on_request_alone(kind: TaskKind) -> None:
    costs, measured = CostModel(machine()), CostModel(machine(), use_measured=True)
    assert costs.task_s(compute(kind, MEASURED)) == pytest.approx(3.0)
    assert measured.task_s(compute(kind, MEASURED)) == 7.0
    assert measured.task_s(compute(kind, Phase(operations=MEASURED.operations))) == pytest.approx(3.0)
    assert measured.phase_s(MEASURED, kind) == 7.0


def test_seconds_measured_on_another_machine_do_not_count() -> None:
    model = workload()
    block = model.profiles[0].model_copy(update={"forward": MEASURED})  # 7 s measured, 3 s by its operations
    model = model.model_copy(update={"profiles": (block,)})
    elsewhere = model.model_copy(update={"measured_on": "another machine"})
    persistent = plan(model, n_persist=2, n_buffer=0)
    # Prologue, two blocks and epilogue; what has no operations takes no time elsewhere.
    assert simulate(persistent, model, machine()).forward_s == pytest.approx(1 + 7 + 7 + 1)
    assert simulate(persistent, elsewhere, machine()).forward_s == pytest.approx(3 + 3)


def test_blocks_that_carry_only_seconds_of_another_machine_are_refused() -> None:
    model = workload().model_copy(update={"measured_on": "another machine"})
    with pytest.raises(
        WorkloadError, match=r"no operations and carry seconds measured on another machine, .* slow mac"
    ):
        simulate(plan(model), model, machine())


DISK = Disk(name="slow disk", capacity_bytes=10**6, read_bytes_per_s=256.0, write_bytes_per_s=128.0, latency_s=0.5)


def test_a_disk_takes_its_latency_and_the_rate_of_its_direction() -> None:
    costs = CostModel(machine(disk=DISK))
    assert costs.task_s(copy(TaskKind.DISK_READ, 512)) == 0.5 + 2
    assert costs.task_s(copy(TaskKind.DISK_WRITE, 512)) == 0.5 + 4


def test_a_teachers_forward_and_a_loss_are_forwards_unless_they_were_fitted() -> None:
    of_forward = Calibration(
        hardware_name="a machine",
        machine="a machine",
        factors={TaskKind.FORWARD: Factor(value=2.0)},
        overhead_s={TaskKind.FORWARD: 0.5},
    )
    for kind in (TaskKind.TEACHER_FORWARD, TaskKind.LOSS):
        assert (of_forward.factor(kind), of_forward.overhead(kind)) == (2.0, 0.5)
        fitted = of_forward.model_copy(update={"factors": {**of_forward.factors, kind: Factor(value=3.0)}})
        assert (fitted.factor(kind), fitted.overhead(kind)) == (3.0, 0.0)
    assert (of_forward.factor(TaskKind.BACKWARD), of_forward.overhead(TaskKind.BACKWARD)) == (1.0, 0.0)


_LIKES = {
    TaskKind.TEACHER_FORWARD: TaskKind.FORWARD,
    TaskKind.LOSS: TaskKind.FORWARD,
    TaskKind.RECOMPUTE: TaskKind.FORWARD,
    TaskKind.ACTIVATION_FETCH: TaskKind.GATHER,
    TaskKind.ACTIVATION_OFFLOAD: TaskKind.GRADIENT_OFFLOAD,
    TaskKind.GRADIENT_ACCUMULATE: TaskKind.CPU_ADAM,
    TaskKind.GRADIENT_NORM: TaskKind.CPU_ADAM,
    TaskKind.PARAMETER_PROJECTION: TaskKind.GRADIENT_PROJECTION,
    TaskKind.HOST_PARAMETER_PROJECTION: TaskKind.HOST_GRADIENT_PROJECTION,
}


@pytest.mark.parametrize("kind", TaskKind)
def test_calibration_multiplies_and_adds_by_kind(kind: TaskKind) -> None:
    tasks = {
        TaskKind.GATHER: copy(kind, 512),
        TaskKind.GRADIENT_OFFLOAD: copy(kind, 512),
        TaskKind.ACTIVATION_OFFLOAD: copy(kind, 512),
        TaskKind.ACTIVATION_FETCH: copy(kind, 512),
        TaskKind.GRADIENT_ACCUMULATE: adam(kind, 0, STEPPED_BYTES),
        TaskKind.GRADIENT_NORM: adam(kind, 0, STEPPED_BYTES),
        TaskKind.CPU_ADAM: adam(kind, 64, STEPPED_BYTES),
        TaskKind.DEVICE_ADAM: adam(kind, 64, STEPPED_BYTES),
        TaskKind.DISK_READ: copy(kind, 512),
        TaskKind.DISK_WRITE: copy(kind, 512),
        **{
            projection: Task(TaskId(0), projection, flops=4_096, stepped_bytes=STEPPED_BYTES, num_tensors=1)
            for projection in TaskKind
            if projection.endswith("_projection")
        },
        **{
            collective: Task(TaskId(0), collective, moved_bytes=512, num_ranks=2)
            for collective in TaskKind
            if LANE_OF[collective] is Lane.COLLECTIVE
        },
    }
    ranks = known_machine("rtx-3090-x4")
    task = tasks.get(kind, compute(kind, MEASURED))
    calibration = Calibration(
        hardware_name=MACHINE, machine=MACHINE, factors={kind: Factor(value=1.5)}, overhead_s={kind: 0.25}
    )
    # Where it was not fitted itself, a kind has the factor of its like.
    stand_in = _LIKES.get(kind, kind)
    for use_measured in (False, True):
        alone = CostModel(machine(disk=DISK), use_measured=use_measured, together=ranks).task_s(task)
        assert alone > 0
        calibrated = CostModel(machine(disk=DISK), calibration, use_measured=use_measured, together=ranks).task_s(task)
        assert calibrated == pytest.approx(1.5 * alone + 0.25)
        others = Calibration(
            hardware_name=MACHINE,
            machine=MACHINE,
            factors={other: Factor(value=9.0) for other in TaskKind if other not in (kind, stand_in)},
        )
        assert CostModel(machine(disk=DISK), others, use_measured=use_measured, together=ranks).task_s(task) == alone


def test_a_norm_reads_what_stays_on_the_device_too() -> None:
    """At the rate of the device's memory, on top of what it reads on the host."""
    costs = CostModel(machine(), use_measured=True)
    on_host = Task(TaskId(0), TaskKind.GRADIENT_NORM, stepped_bytes=STEPPED_BYTES)
    more_s = [costs.task_s(replace(on_host, moved_bytes=size)) - costs.task_s(on_host) for size in (1_000, 3_000)]
    assert more_s[1] == pytest.approx(3 * more_s[0])
    assert more_s[0] * costs.hardware.device.memory_bandwidth_bytes_per_s >= 1_000


def test_bytes_that_have_just_come_cost_their_first_reader() -> None:
    """On top of factor and overhead; kinds that were not fitted go by their like."""
    calibration = Calibration(
        hardware_name=MACHINE,
        machine=MACHINE,
        factors={TaskKind.FORWARD: Factor(value=2.0)},
        arrival_s_per_byte={TaskKind.FORWARD: 0.25},
    )
    costs = CostModel(machine(), calibration, use_measured=True)
    for kind in (TaskKind.FORWARD, TaskKind.TEACHER_FORWARD, TaskKind.RECOMPUTE):
        assert costs.task_s(replace(compute(kind, MEASURED), arrived_bytes=12)) == 2 * 7 + 3
        assert costs.task_s(compute(kind, MEASURED)) == 2 * 7
    arrived = replace(compute(TaskKind.BACKWARD, MEASURED), arrived_bytes=12)
    assert costs.task_s(arrived) == CostModel(machine(), use_measured=True).task_s(arrived) == 7


def test_both_directions_have_their_own_link() -> None:
    costs = CostModel(machine(gather_s=2.0, offload_s=5.0))
    assert costs.task_s(copy(TaskKind.GATHER, 256)) == pytest.approx(2.0)
    assert costs.task_s(copy(TaskKind.GRADIENT_OFFLOAD, 256)) == pytest.approx(5.0)


def test_equal_phases_of_different_blocks_are_costed_once_and_different_ones_apart() -> None:
    costs = CostModel(machine())
    phases = [Phase(operations=(operation(1000 * (n + 1), 0),)) for n in range(50)]
    for _ in range(2):
        assert [costs.phase_s(p, TaskKind.FORWARD) for p in phases] == pytest.approx([n + 1 for n in range(50)])
    # A phase that is gone must not lend its seconds to another one at the same place in memory.
    for n in range(1, 200):
        assert costs.phase_s(Phase(operations=(operation(1000 * n, 0),)), TaskKind.FORWARD) == pytest.approx(n)


def test_a_calibration_of_another_machine_is_refused() -> None:
    with pytest.raises(CalibrationError, match="made on another"):
        CostModel(machine(), Calibration(hardware_name="another", machine="another"))


def test_all_durations_are_finite() -> None:
    assert math.isfinite(CostModel(machine()).task_s(copy(TaskKind.GATHER, 2**60)))
