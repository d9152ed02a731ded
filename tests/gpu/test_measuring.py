"""A CUDA machine is probed, a model on it timed, and a Record made, with figures that can be true."""

from __future__ import annotations

import pytest
import torch

from protwin.runtime import CudaDevice, carry_out, probe_hardware, trace
from protwin.runtime.devices.stream_clock import Stamp
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import Lane
from protwin.shared.schema.workload import DType
from tests.gpu.subject import CHECKPOINT, DEVICE, KEEP, SWAP, make_device, on_device, plan_of, train
from tests.runtime.models import Case, cases, llama, token_batches

pytestmark = pytest.mark.gpu


def test_the_machine_is_measured() -> None:
    hardware = probe_hardware(seconds=5.0)
    device = hardware.device
    assert device.kind is DeviceKind.CUDA
    assert device.memory_bytes == torch.cuda.get_device_properties(DEVICE).total_memory
    # Orders of magnitude between which every GPU of these years lies, and any slip of units does not.
    assert 1e12 < device.peak_flop_per_s[DType.FLOAT32] < 1e15
    assert device.peak_flop_per_s[DType.FLOAT32] < 1.1 * device.peak_flop_per_s[DType.BFLOAT16] < 1e16
    assert 5e10 < device.memory_bandwidth_bytes_per_s < 2e13
    assert 1e-7 < device.launch_overhead_s < 1e-4
    for link in (hardware.host_to_device, hardware.device_to_host):
        assert 1e9 < link.bandwidth_bytes_per_s < device.memory_bandwidth_bytes_per_s
        seconds = [point.seconds for point in link.table]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0


def test_sections_are_timed_by_the_device() -> None:
    model = llama(num_layers=3, hidden_size=512, intermediate_size=2048, max_position_embeddings=256).to(DEVICE)
    small = on_device(token_batches(1, batch=2, length=256)[0])
    # On a fast device the small batch takes what launching its kernels takes.
    large = on_device(token_batches(1, batch=512, length=256)[0])
    few, many = trace(model, small, repeats=5), trace(model, large, repeats=5)
    for workload in (few, many):
        assert workload.measured_on
        profile = workload.profile_of(1)
        assert all(phase.measured_s is not None for phase in (profile.forward, profile.backward, profile.recompute))
    assert (many.profile_of(1).backward.measured_s or 0) > 2 * (few.profile_of(1).backward.measured_s or 0)


def test_stamps_keep_the_order_of_streams_and_the_hosts_time() -> None:
    device = CudaDevice()
    stamps = [device.stamp() for _ in range(3)]
    torch.cuda._sleep(100_000_000)
    stamps.append(device.stamp())
    assert isinstance(stamps[0], Stamp)
    device.synchronize()
    seconds = [device.seconds(stamp) for stamp in stamps]
    assert seconds == sorted(seconds)
    assert seconds[-1] - seconds[0] > 1e-3
    assert all(isinstance(device.settled(stamp), float) for stamp in stamps)


def test_a_record_names_every_task_and_its_lane() -> None:
    case: Case = cases()["llama"]
    plan = plan_of(case, [SWAP, CHECKPOINT, KEEP])
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device()) as training:
        for _ in range(4):
            train(case, plan, training, model)
        record = training.record()
    assert record.origin is Origin.MEASURED
    assert record.emulated == ()
    assert len(record.tasks) == len(training.schedule.tasks)
    assert all(task.duration_s >= 0 for task in record.tasks)
    assert record.lane(Lane.H2D).busy_s > 0
    assert record.lane(Lane.CPU_OPTIM).busy_s > 0
    assert record.iteration_s > record.lane(Lane.COMPUTE).busy_s * 0.5
