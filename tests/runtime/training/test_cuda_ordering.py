"""The CUDA device's own code on a stand-in for CUDA that defers: what events order, and what comes of one less."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from protwin.runtime import CudaDevice, Training, carry_out
from protwin.runtime.devices import stream_clock
from protwin.runtime.hooks.swapping import SwappedBlock
from protwin.runtime.lanes.lane_work import LaneWork
from protwin.shared.basics.errors import HardwareError, ScheduleError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Memory
from tests.proof_size import some_quick
from tests.runtime.deferred_cuda import DeferredCuda, StandInStream, backward, cuda_device
from tests.runtime.models import Case, adamw, differences, hand_written, llama, point_batches, snapshot, token_batches

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP
STREAMS = ("", "compute", "H2D", "D2H")
CHUNK_BYTES = 6_000


def without_dropout() -> torch.nn.Module:
    """Random numbers are drawn when the device comes to it, which the stand-in does not follow."""
    model = hand_written(num_layers=3)
    for layer in model.stack:
        layer.dropout.p = 0.0
    return model


POINTS = Case(without_dropout, point_batches(3), has_loss=False)
TOKENS = Case(partial(llama, num_layers=2), token_batches(2, batch=1, length=6))


def plan_of(case: Case, modes: tuple[ActivationMode, ...] = (SWAP, CHECKPOINT, KEEP), **changes: Any) -> Plan:
    """Nothing persistent but what must be, few buffers, gathers as early as they may come."""
    chunk_bytes = changes.pop("chunk_bytes", CHUNK_BYTES)
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=chunk_bytes)
    n_persist = changes.setdefault("n_persist", 0)
    fewest = layout.min_buffers(n_persist + changes.get("n_host_stepped", 0))
    modes = modes[: case.workload.num_blocks]
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=chunk_bytes,
        n_buffer=fewest + 1 if fewest else 0,
        prefetch_depth=changes.pop("prefetch_depth", 2),
        activation_modes=modes,
        n_swap=modes.count(SWAP),
        n_checkpoint=modes.count(CHECKPOINT),
        **changes,
    )


def stand_in(starved: str = "", seed: int = 0) -> DeferredCuda:
    """Starved lanes are named by the order in which streams are made: the clock's, then H2D's, then D2H's."""
    return DeferredCuda(starved={"H2D": "2", "D2H": "3"}.get(starved, starved), seed=seed)


def train(case: Case, plan: Plan, cuda: DeferredCuda, look: Callable[[Training], None] = lambda _: None) -> list[str]:
    """Names of what differs from plain training's: weights of the end, or losses."""
    plain = case.plain_with(plan.micro_batches, None)
    model = case.build()
    losses = []
    with cuda.installed():
        device = cuda_device()
        with carry_out(model, plan, case.workload, optimizer=adamw, device=device) as training:
            for batches in case.steps(plan.micro_batches):
                for batch in batches:
                    loss = case.loss(model, batch)
                    backward(loss, cuda)
                    losses.append(loss.detach())
                training.step()
            look(training)
        found = [loss.item() for loss in losses]
        cuda.synchronize()
        assert device.pinned.size_bytes == 0
        assert cuda.pinned == {}
    assert cuda.num_deferred > 100
    wrong = [name for name, value in snapshot(model).items() if not torch.equal(value, plain.weights[-1][name])]
    return wrong + [f"loss {i}" for i, pair in enumerate(zip(found, plain.losses, strict=True)) if pair[0] != pair[1]]


# -- as it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starved", STREAMS)
def test_whichever_stream_lags_the_bits_are_the_plain_loops(starved: str) -> None:
    def look(training: Training) -> None:
        assert training.num_cpu_adam_steps > 0
        assert training.bytes_device_to_host > 0

    assert train(POINTS, plan_of(POINTS), stand_in(starved), look) == []


def test_micro_batches_and_persistent_chunks_too() -> None:
    plan = plan_of(POINTS, micro_batches=2, n_persist=3, prefetch_depth=1)
    assert train(POINTS, plan, stand_in("D2H", seed=1)) == []


@some_quick("starved", STREAMS, quick=2)
def test_chunks_that_the_host_steps_and_the_device_keeps_too(starved: str) -> None:
    plan = plan_of(POINTS, micro_batches=2, n_persist=1, n_host_stepped=4)
    assert train(POINTS, plan, stand_in(starved, seed=4)) == []


def test_a_transformer_too() -> None:
    plan = plan_of(TOKENS, (SWAP, CHECKPOINT), chunk_bytes=9_000)
    assert train(TOKENS, plan, stand_in("compute", seed=2)) == []


# -- with one wait less ----------------------------------------------------------------------------------------------


def forgetful(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    """The streams of ``thread`` do not wait for events any more."""
    right = CudaDevice.wait_event

    def wrong(device: CudaDevice, event: Any) -> None:
        name = threading.current_thread().name
        if not (name.startswith("protwin-") and name.lower().endswith(thread)) and not (
            thread == "compute" and not name.startswith("protwin-")
        ):
            right(device, event)

    monkeypatch.setattr(CudaDevice, "wait_event", wrong)


@pytest.mark.parametrize(("thread", "starved"), [("compute", "H2D"), ("h2d", "compute"), ("d2h", "compute")])
def test_a_stream_that_does_not_wait_computes_something_else(
    thread: str, starved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful(monkeypatch, thread)
    assert fails(plan_of(POINTS), starved)


def test_cpu_adam_that_does_not_wait_for_gradients_to_arrive_steps_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "synchronize_event", lambda *_: None)
    assert fails(plan_of(POINTS), "D2H")


def test_gradients_that_go_when_their_copy_is_queued_are_gone_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LaneWork._offload

    def wrong(tasks: LaneWork, chunk: Any, iteration: int, task: Any) -> None:
        right(tasks, chunk, iteration, task)
        tasks._held.clear()

    monkeypatch.setattr(LaneWork, "_offload", wrong)
    assert fails(plan_of(POINTS), "D2H")


def test_activations_that_go_when_their_copy_is_queued_are_gone_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SwappedBlock.offload

    def wrong(block: SwappedBlock) -> int:
        moved = right(block)
        block.let_go()
        return moved

    monkeypatch.setattr(SwappedBlock, "offload", wrong)
    assert fails(plan_of(POINTS, (SWAP,) * 3), "D2H")


def test_room_from_the_copying_streams_pool_is_given_away_under_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``record_stream`` is otherwise for: memory of one stream, freed while another still uses it."""
    room, fetch = SwappedBlock.make_room, SwappedBlock.fetch

    def fetch_into_own(block: SwappedBlock) -> int:
        room(block)
        return fetch(block)

    monkeypatch.setattr(SwappedBlock, "make_room", lambda _: None)
    monkeypatch.setattr(SwappedBlock, "fetch", fetch_into_own)
    assert fails(plan_of(POINTS, (SWAP,) * 3), "compute")


def fails(plan: Plan, starved: str) -> bool:
    """Whether training by the wrong variant ends in other bits, or in an error, for one of some orders."""
    for seed in range(3):
        try:
            if train(POINTS, plan, stand_in(starved, seed)) != []:
                return True
        except (RuntimeError, ValueError, IndexError, ArithmeticError, pytest.fail.Exception):
            return True
        except Exception as error:
            if "not finite" in str(error) or "has failed" in str(error):
                return True
            raise
    return False


# -- memory, errors, the end -----------------------------------------------------------------------------------------


def test_memory_does_not_depend_on_timing_and_keeps_within_what_the_schedule_guarantees() -> None:
    peaks: list[int] = []

    def look(training: Training) -> None:
        record = training.record()
        curve = record.curve(Memory.DEVICE)
        assert curve is not None
        assert curve.peak_at
        assert max(curve.levels_bytes) == curve.peak_bytes
        # Those who train here keep every loss, on the device.
        assert 0 <= training.peak_device_bytes - curve.peak_bytes <= 4 * len(case.batches)
        peaks.append(curve.peak_bytes)
        assert 0.9 * record.guaranteed_peak_device_bytes < curve.peak_bytes <= record.guaranteed_peak_device_bytes

    case = Case(without_dropout, point_batches(5), has_loss=False)
    for starved in ("compute", "D2H"):
        assert train(case, plan_of(case), stand_in(starved, seed=3), look) == []
    assert peaks[0] == peaks[1]


def test_an_error_within_backward_surfaces_and_leaves_the_weights_of_the_last_step() -> None:
    cuda, case = stand_in("D2H"), POINTS
    model = case.build()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def train_and_fail() -> None:
        with carry_out(model, plan_of(case), case.workload, optimizer=adamw, device=cuda_device()) as training:
            for number, batch in enumerate(case.batches):
                loss = case.loss(model, batch)
                if number == 1:
                    loss.register_hook(fail)
                backward(loss, cuda)
                training.step()

    with cuda.installed():
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            train_and_fail()
        cuda.synchronize()
        assert cuda.pinned == {}
    expected = case.plain.weights[1]
    assert [name for name, value in snapshot(model).items() if not torch.equal(value, expected[name])] == []


def test_an_operation_without_memory_is_told_what_the_plan_needs() -> None:
    model, cuda = POINTS.build(), stand_in()

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def train_and_fail() -> None:
        with carry_out(model, plan_of(POINTS), POINTS.workload, optimizer=adamw, device=cuda_device()):
            model.stack[1].norm.register_forward_pre_hook(run_out)
            model(POINTS.batches[0]["points"])

    with cuda.installed(), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        train_and_fail()
    assert "The plan was at forward 1. It accounts for at most" in raised.value.__notes__[0]


def test_pinned_memory_is_as_large_as_the_schedule_says() -> None:
    cuda = stand_in()

    def look(training: Training) -> None:
        expected = training.schedule.static_bytes(Memory.PINNED_HOST)
        assert training.device.pinned.size_bytes == sum(cuda.pinned.values()) == expected  # type: ignore[attr-defined]

    assert train(POINTS, plan_of(POINTS), cuda, look) == []


def test_memory_that_cannot_be_pinned_is_told_and_the_model_is_as_before() -> None:
    cuda, model = stand_in(), POINTS.build()
    with cuda.installed():
        device = cuda_device()
        torch.cuda.cudart().cudaHostRegister = lambda *_: 2
        with pytest.raises(HardwareError, match=r"could not be pinned \(CUDA error 2\)"):
            carry_out(model, plan_of(POINTS), POINTS.workload, device=device)
        cuda.synchronize()
        assert device.pinned.size_bytes == 0
    assert differences(model, POINTS.plain.weights[0]) == []


def test_a_forward_on_another_stream_is_refused() -> None:
    cuda = stand_in()
    model = POINTS.build()
    with cuda.installed(), carry_out(model, plan_of(POINTS), POINTS.workload, device=cuda_device()):
        other: StandInStream = cuda.make_stream()
        with cuda.on(other), pytest.raises(ScheduleError, match="another CUDA stream"):
            model(POINTS.batches[0]["points"])


def test_a_budget_holds_while_a_training_runs_and_is_lifted_afterwards() -> None:
    cuda = stand_in()
    with cuda.installed():
        device = cuda_device(budget_bytes=2**39)
        for _ in range(2):
            with carry_out(POINTS.build(), plan_of(POINTS), POINTS.workload, device=device):
                assert cuda.fraction == 0.5
                with pytest.raises(HardwareError, match="two trainings"):
                    carry_out(POINTS.build(), plan_of(POINTS), POINTS.workload, device=device)
                assert cuda.fraction == 0.5
            assert cuda.fraction == 1.0


def test_stamps_keep_their_order_from_one_anchor_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """An anchor for each, where training makes one every few seconds."""
    monkeypatch.setattr(stream_clock, "_ANCHOR_S", 0.0)
    with stand_in().installed():
        device = cuda_device()
        start_s = time.perf_counter()
        stamps = [device.stamp() for _ in range(5)]
        assert len({id(stamp.anchor) for stamp in stamps}) == 5
        device.synchronize()
        seconds = [device.seconds(stamp) for stamp in stamps]
        assert seconds == sorted(seconds)
        assert start_s < seconds[0] < seconds[-1] < time.perf_counter()
        assert [device.settled(stamp) for stamp in stamps] == seconds
        assert device.settled(None) is None
