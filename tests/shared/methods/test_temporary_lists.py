"""AdamW over lists of tensors: what it makes in a step, and how long that takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.runtime.devices.ledger import MemoryLedger
from protwin.shared import load_workload
from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.keeping import Keeping
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.engine.simulator import simulate
from tests.proof_size import examples
from tests.shared.methods.test_buckets import compiled, method_of
from tests.shared.small_models import chain, plan
from tests.strategies.plans import PlannedWorkload, planned_workloads


def test_torch_makes_one_list_as_large_as_the_weights() -> None:
    """Measured: beside weights, gradients and moments, the square roots of all second moments."""
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((300, 70), (5000,), (11, 900))]
    scalars = sum(parameter.numel() for parameter in parameters)
    peaks = {}
    for foreach in (True, False):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            ledger = MemoryLedger()
            states = [value for state in optimizer.state.values() for value in state.values()]
            ledger.ignore([*parameters, *(p.grad for p in parameters if p.grad is not None), *states])
            with ledger.metering():
                optimizer.step()
        peaks[foreach] = ledger.watched_peak_bytes
    assert peaks[True] == pytest.approx(4 * scalars, rel=0.02)
    assert peaks[False] == 2 * 4 * max(parameter.numel() for parameter in parameters), "a loop has two of one"


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "bytes_per_scalar"),
    [(Optimizer.ADAMW, 4), (Optimizer.ADAM, 4), (Optimizer.SGD, 0), (Optimizer.ADAMW_8BIT, 0)],
)
def test_a_step_adds_lists_of_float32_numbers_and_drops_no_gradient(
    lists: int, optimizer: Optimizer, bytes_per_scalar: int
) -> None:
    model = chain(3)
    asked = plan(model, n_persist=3).model_copy(update={"optimizer": optimizer})
    scalars = sum(p.num_elements for p in model.parameters if p.trainable)
    with_lists, whole = (compiled(asked, model, method_of(Keeping(temporary_lists=number))) for number in (lists, 0))
    (step,) = (task for task in with_lists.tasks if task.kind is TaskKind.DEVICE_ADAM)
    (before,) = (task for task in whole.tasks if task.kind is TaskKind.DEVICE_ADAM)
    own = 0 if before.phase is None else before.phase.peak_bytes
    made = 0 if step.phase is None else step.phase.peak_bytes
    assert made - own == pytest.approx(lists * bytes_per_scalar * scalars, abs=1)


@settings(max_examples=examples(200, 15), deadline=None)
@given(planned=planned_workloads(), lists=st.integers(1, 2))
def test_whoever_reads_the_plan_a_second_time_finds_the_same(planned: PlannedWorkload, lists: int) -> None:
    method = method_of(Keeping(temporary_lists=lists))
    schedule = compile_schedule(planned.plan, planned.workload, policies=method.policies)
    verify_schedule(schedule, planned.plan, planned.workload, rules=method.rules)
    plain = compile_schedule(planned.plan, planned.workload)
    assert guaranteed_device_peak(schedule).size_bytes >= guaranteed_device_peak(plain).size_bytes


def test_it_moves_what_a_loop_moves_without_its_calls() -> None:
    """80 bytes of each float32 scalar where a fused step moves 28; gpt2 has few tensors, and fewer calls than bytes."""
    model, hardware = load_workload("gpt2", batch_size=1, sequence_length=64, dtype="float32"), machine("a100-80gb-x8")
    num_chunks = len(layout_of(model, 64 << 20).chunks)
    asked = plan(model, n_persist=num_chunks, chunk_bytes=64 << 20, n_buffer=0)
    over_lists, fused = (
        simulate(asked, model, hardware, runtime=RuntimeProfile(temporary_lists=number)) for number in (1, 0)
    )
    assert over_lists.emulated == ("AdamW over lists of tensors",)
    scalars = sum(p.num_elements for p in model.parameters)
    more_per_s = (80 - 28) * scalars / (over_lists.optimizer_s - fused.optimizer_s)
    assert 0.7 < more_per_s / hardware.device.memory_bandwidth_bytes_per_s < 1
    assert over_lists.guaranteed_peak_device_bytes == pytest.approx(20 * scalars, rel=0.01)
    looped = simulate(asked, model, hardware, runtime=RuntimeProfile(loops_over_tensors=True))
    assert over_lists.optimizer_s < looped.optimizer_s


def test_a_cpu_goes_over_a_list_tensor_by_tensor() -> None:
    """It has no kernels for lists: of tensors so small that calls decide, a step takes what a loop's takes."""
    model = chain(8)
    asked = plan(model, n_persist=8)
    of_gpu = machine("rtx-4090").model_copy(update={"name": model.measured_on})
    of_cpu = of_gpu.model_copy(update={"device": of_gpu.device.model_copy(update={"kind": DeviceKind.CPU})})
    profiles = (RuntimeProfile(temporary_lists=1), RuntimeProfile(loops_over_tensors=True), RuntimeProfile())
    seconds = {
        hardware.device.kind: [simulate(asked, model, hardware, runtime=one).optimizer_s for one in profiles]
        for hardware in (of_gpu, of_cpu)
    }
    over_lists, looped, fused = seconds[DeviceKind.CPU]
    assert over_lists == looped > fused
    over_lists, looped, _ = seconds[DeviceKind.CUDA]
    assert over_lists < looped


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (RuntimeProfile(temporary_lists=3), r"temporary_lists must be 0 to 2 \(got 3\)"),
        (RuntimeProfile(temporary_lists=-1), r"must be 0 to 2 \(got -1\)"),
        (RuntimeProfile(loops_over_tensors=True, temporary_lists=1), "ours steps by a loop over tensors"),
        (RuntimeProfile(Runtime.COMPOSER, temporary_lists=1), "composer steps by a loop over tensors. Leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(profile: RuntimeProfile, words: str) -> None:
    model = chain(2)
    with pytest.raises(PlanError, match=words):
        profile.check(plan(model, n_persist=2))
    for optimizer in (Optimizer.SGD, Optimizer.ADAMW_8BIT, Optimizer.ADAFACTOR):
        asked = plan(model, n_persist=2).model_copy(update={"optimizer": optimizer})
        with pytest.raises(PlanError, match=f"but the plan steps by {optimizer}"):
            RuntimeProfile(temporary_lists=1).check(asked)
    assert RuntimeProfile(temporary_lists=2).method(FULL_TRAINING).policies.keeping.temporary_lists == 2
