"""Chunks on the host's disk: the plain loop's bits, what is moved, checkpoints, and disks that fail.

Random plans of ``test_equality`` mix them with all other residencies; here are the corners.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protwin.runtime import Training, carry_out, named_optimizer
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.chunks.chunk_store import is_slow
from protwin.runtime.devices.chunk_file import NAME, ChunkFile, measured_disk_rates
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.optimizers.state_place import StatePlace
from protwin.runtime.optimizers.step_options import ParameterGroup, StepOptions
from protwin.shared.basics.errors import FileError, PlanError
from protwin.shared.layout.layout import Layout, build_layout
from protwin.shared.optimizers.state import state_bytes
from protwin.shared.schema.hardware import Disk
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Memory
from protwin.shared.schema.workload import DType
from tests.proof_size import some_quick
from tests.runtime.equality import FAST_FOLDER, miscounted, trained
from tests.runtime.models import SEED, Case, cases, differences

CHUNK_BYTES = 9_000
LLAMA = "llama in bfloat16"
NAMES = (LLAMA, "gpt2 with dropout, tied", "llama, frozen prologue and blocks")


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """In memory where the system has such folders: a disk takes milliseconds for each write of a few kilobytes."""
    with TemporaryDirectory(dir=FAST_FOLDER) as folder:
        yield Path(folder)


def layout_of(case: Case) -> Layout:
    workload = case.workload
    return build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)


def on_disk(case: Case, *, n_disk: int | None = None, n_staging: int = 2, **knobs: Any) -> Plan:
    """Every chunk's state on the disk, and, unless told otherwise, all parameters."""
    num_chunks = len(layout_of(case).chunks)
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0,
        n_disk_state=num_chunks,
        n_disk=num_chunks if n_disk is None else n_disk,
        n_staging=n_staging,
        n_buffer=layout_of(case).min_buffers(0) + 1,
        **knobs,
    )


def begun(case: Case, plan: Plan, folder: Path, **options: Any) -> Training:
    model = case.build()
    groups = case.groups(model)
    options = {"optimizer": case.make_optimizer, "parameter_groups": groups, **options}
    return carry_out(model, plan, case.workload, disk_folder=folder, **options)


def train(training: Training, case: Case, steps: slice = slice(None)) -> list[float]:
    losses = []
    for (batch,) in case.steps(1)[steps]:
        loss = case.loss(training.model, batch)
        loss.backward()
        losses.append(loss.item())
        training.step()
    return losses


# -- the plain loop's bits -------------------------------------------------------------------------------------------


@some_quick("knobs", [{}, {"micro_batches": 2, "max_gradient_norm": 0.5, "n_checkpoint": 2}], quick=1, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_everything_on_the_disk_trains_as_the_plain_loop(name: str, knobs: dict[str, Any]) -> None:
    case = cases()[name]
    plan = on_disk(case, n_staging=1, **knobs)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


@some_quick("optimizer", [o for o in Optimizer if o is not Optimizer.PAGED_ADAMW_8BIT], quick=3)
def test_every_optimizer_steps_the_disk_as_it_steps_the_host(optimizer: Optimizer, disk_folder: Path) -> None:
    """Beside the same plan without a disk; ``test_named`` compares that with the plain loop."""
    if optimizer.is_of_bitsandbytes:
        pytest.importorskip("bitsandbytes")
    case = cases()[LLAMA]
    plan = on_disk(case, optimizer=optimizer)
    on_host = plan.model_copy(update={"n_disk_state": 0, "n_disk": 0, "n_staging": 0})
    make = named_optimizer(optimizer, lr=1e-2)
    found = []
    for one in (plan, on_host):
        with begun(case, one, disk_folder, optimizer=make, parameter_groups=None) as training:
            torch.manual_seed(SEED)
            losses = train(training, case)
        found.append((losses, {name: p.detach().clone() for name, p in training.model.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert differences(training.model, found[0][1]) == []


class _Made(TorchDispatchMode):
    """Notes the bytes of every storage that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and func in _MAKES:
            self.largest_bytes = max(self.largest_bytes, found.untyped_storage().nbytes())
        return found


_MAKES = (torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default, torch.ops.aten.clone.default)
SIZES = (96, 64)
OF_ONE_PLACE = sorted(set(Optimizer) - {Optimizer.PAGED_ADAMW_8BIT, Optimizer.ADAFACTOR})
"""Adafactor keeps rows and columns alone; its update is as large as the weight and no state."""


def stepped_in_place(optimizer: Optimizer) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """Three steps of two weights with state in a place that is just large enough, one of them from the second on.

    Gives the largest storage that was made, and the weights with and without a place.
    """
    torch.manual_seed(SEED)
    values = [torch.randn(SIZES), torch.randn(SIZES[0])]
    gradients = [[torch.randn_like(value) for value in values] for _ in range(3)]
    size_bytes = state_bytes([(DType.FLOAT32, tuple(value.shape)) for value in values], optimizer)
    place = StatePlace(torch.full((size_bytes + 64,), 0xFF, dtype=torch.uint8), _NoRecord())
    found, made = [], _Made()
    for of_place in (place, None):
        weights = [value.clone() for value in values]
        parameters = [torch.nn.Parameter(value) for value in values]
        options = StepOptions([ParameterGroup(tuple(parameters), {})], {id(p): "weight" for p in parameters})
        make = named_optimizer(optimizer, lr=1e-2)
        stepper = ChunkOptimizer(weights, parameters, options, make, place=of_place)
        with made if of_place is not None else nullcontext():
            for number, (first, second) in enumerate(gradients):
                # torch's fused SGD refuses weights whose momentum begins later than that of others.
                stepper.step([first, second if number or optimizer is Optimizer.SGD else None])
        found.append(weights)
    return made.largest_bytes, found[0], found[1]


class _NoRecord:
    def read_to_step(self) -> None: ...

    def write_stepped(self) -> None: ...

    def mapped_state(self) -> Any: ...


@pytest.mark.parametrize("optimizer", OF_ONE_PLACE)
def test_the_first_step_makes_no_moments_beside_the_place(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimizer.is_of_bitsandbytes:
        pytest.importorskip("bitsandbytes")
    kept, in_place, plain = stepped_in_place(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(in_place, plain, strict=True))
    moment_bytes = SIZES[0] * SIZES[1] * (1 if optimizer is Optimizer.ADAMW_8BIT else 4)
    if not optimizer.is_of_bitsandbytes:  # whose kernels make tensors of that size on the way
        assert kept < moment_bytes
        # The wrong variant: made in ordinary memory, and copied to the place.
        monkeypatch.setattr(StatePlace, "take", lambda *_: None)
        assert stepped_in_place(optimizer)[0] >= moment_bytes


def test_what_an_optimizer_makes_on_the_way_leaves_nothing_in_the_place() -> None:
    class Wasteful(torch.optim.SGD):
        """Makes tensors shaped as weights that are no state, and steps as SGD with momentum does."""

        def step(self, closure: Any = None) -> None:
            for weight in self.param_groups[0]["params"]:
                torch.zeros_like(weight)
            super().step()
            for weight in self.param_groups[0]["params"]:
                torch.empty_like(weight)

    weights = [torch.randn(SIZES), torch.randn(SIZES)]
    plain = [weight.clone() for weight in weights]
    gradients = [torch.randn(SIZES) for _ in weights]
    place = StatePlace(torch.zeros(2 * 4 * SIZES[0] * SIZES[1], dtype=torch.uint8), _NoRecord())
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    options = StepOptions([ParameterGroup(tuple(parameters), {})], {id(p): "weight" for p in parameters})
    stepper = ChunkOptimizer(
        weights, parameters, options, partial(Wasteful, lr=0.1, momentum=0.9, fused=True), place=place
    )
    same = torch.optim.SGD(plain, lr=0.1, momentum=0.9, fused=True)
    for _ in range(3):
        stepper.step(gradients)
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient
        same.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, plain, strict=True))
    for number, weight in enumerate(weights):
        assert place.has((number, "momentum_buffer"), stepper.optimizer.state[weight]["momentum_buffer"])


def test_what_is_written_but_not_read_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: a file that keeps its first content."""
    case = cases()[LLAMA]
    write, written = ChunkFile.write, set()

    def write_once(self: ChunkFile, *parts: tuple[torch.Tensor, int]) -> None:
        write(self, *(part for part in parts if part[1] not in written))
        written.update(offset_bytes for _, offset_bytes in parts)

    monkeypatch.setattr(ChunkFile, "write", write_once)
    outcome = trained(case, on_disk(case))
    assert outcome.losses[0] == case.plain.losses[0]
    assert outcome.losses[1:] != case.plain.losses[1:]


def test_bytes_are_read_and_written_as_the_schedule_says(disk_folder: Path) -> None:
    case = cases()[LLAMA]
    with begun(case, on_disk(case), disk_folder) as training:
        train(training, case)
        training.synchronize()
        schedule = training.schedule
        moved = {
            lane: sum(schedule.tasks[task].moved_bytes for task in program) for lane, program in schedule.lanes.items()
        }
        written = sum(task.moved_bytes for task in schedule.tasks if task.kind.value == "disk_write")
        steps = len(case.batches)
        assert training.bytes_written_to_disk == steps * written == steps * schedule.static_bytes(Memory.DISK)
        read = next(bytes_ for lane, bytes_ in moved.items() if lane.value == "disk") - written
        # Some of the next step's have been read already.
        assert steps * read <= training.bytes_read_from_disk <= (steps + 1) * read
        assert (disk_folder / NAME).stat().st_size >= schedule.static_bytes(Memory.DISK)
    assert os.listdir(disk_folder) == []


# -- between steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_from_disk", [True, False])
def test_a_checkpoint_goes_on_under_a_plan_with_another_place(is_from_disk: bool, disk_folder: Path) -> None:
    case = cases()[LLAMA]
    disk = on_disk(case, n_disk=5)
    host = disk.model_copy(update={"n_disk_state": 0, "n_disk": 0, "n_staging": 0, "n_persist": 3})
    first, second = (disk, host) if is_from_disk else (host, disk)
    folder = disk_folder / "disk"
    folder.mkdir()
    with begun(case, first, folder) as training:
        torch.manual_seed(SEED)
        losses = train(training, case, slice(0, 2))
        training.save(disk_folder / "checkpoint")
        losses += train(training, case, slice(2, 3))
    assert losses == case.plain.losses[:3]
    with begun(case, second, folder) as resumed:
        train(resumed, case, slice(0, 1))
        assert resumed.resume(disk_folder / "checkpoint").step == 2
        assert train(resumed, case, slice(2, None)) == case.plain.losses[2:]
        state = resumed.optimizer.state_dict()
        assert len(state["state"]) == sum(p.trainable for p in case.workload.parameters)
        resumed.optimizer.load_state_dict(state)
        weights = resumed.state_dict()
    assert differences(resumed.model, case.plain.weights[-1]) == []
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


def test_evaluation_and_giving_a_step_up_change_nothing(disk_folder: Path) -> None:
    case = cases()[LLAMA]
    with begun(case, on_disk(case, max_gradient_norm=1e9), disk_folder) as training:
        torch.manual_seed(SEED)
        losses = train(training, case, slice(0, 2))
        with training.evaluation():
            evaluated = case.loss(training.model, case.batches[2]).item()
        case.loss(training.model, case.batches[0])
        training.skip_step()
        losses += train(training, case, slice(2, None))
    assert losses == case.plain_with(1, 1e9).losses
    assert evaluated == losses[2]


# -- the folder ------------------------------------------------------------------------------------------------------


def test_the_file_of_a_killed_training_is_written_over(disk_folder: Path) -> None:
    case = cases()[LLAMA]
    (disk_folder / NAME).write_bytes(b"\xff" * 5_000_000)
    with begun(case, on_disk(case), disk_folder) as training:
        torch.manual_seed(SEED)
        assert (disk_folder / NAME).stat().st_size < 5_000_000
        assert train(training, case) == case.plain.losses
    assert os.listdir(disk_folder) == []


def refusal(case: Case, folder: Any, **options: Any) -> str:
    model = case.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises((FileError, PlanError)) as found:
        carry_out(model, on_disk(case), case.workload, disk_folder=folder, **options)
    assert differences(model, before) == []
    return str(found.value)


def test_a_folder_that_cannot_be_used_is_refused_with_the_model_as_it_was(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases()[LLAMA]
    assert "no folder is named" in refusal(case, None)
    assert "does not exist" in refusal(case, disk_folder / "absent")
    (disk_folder / "file").touch()
    assert "is no folder" in refusal(case, disk_folder / "file")
    assert "n_disk_state = 14 chunks on the disk" in refusal(case, disk_folder, keep_last_step=True)
    holder = os.open(disk_folder / NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert "is used by another training" in refusal(case, disk_folder)
    os.close(holder)

    def fails(number: int) -> Any:
        def fail(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        assert "No space left on device" in refusal(case, disk_folder)
    assert not (disk_folder / NAME).exists()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails(errno.EROFS))
        assert "Read-only file system" in refusal(case, disk_folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fails(errno.EIO))
        assert "cannot be written (Input/output error)" in refusal(case, disk_folder)
    assert sorted(os.listdir(disk_folder)) == ["file"]


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
def test_a_disk_that_fails_ends_training_with_one_message_and_the_checkpoint_whole(
    call: str, disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases()[LLAMA]
    folder, checkpoint = disk_folder / "disk", disk_folder / "checkpoint"
    folder.mkdir()

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def until_it_fails() -> None:
        with begun(case, on_disk(case), folder) as training:
            torch.manual_seed(SEED)
            train(training, case, slice(0, 2))
            training.save(checkpoint)
            monkeypatch.setattr(os, call, fail)
            train(training, case, slice(2, 4))
            training.synchronize()

    with pytest.raises(FileError, match=r"disk of .* cannot be (read|written) \(Input/output error\)"):
        until_it_fails()
    monkeypatch.undo()
    assert os.listdir(folder) == []
    with begun(case, on_disk(case), folder) as resumed:
        resumed.resume(checkpoint)
        assert train(resumed, case, slice(2, None)) == case.plain.losses[2:]


def test_a_disk_slower_than_stated_is_told_of(disk_folder: Path) -> None:
    """Of a model with 14 chunks of kilobytes, too."""
    case = cases()[LLAMA]
    stated = Disk(name="dream", capacity_bytes=10**12, read_bytes_per_s=1e15, write_bytes_per_s=1e15)
    with pytest.warns(
        UserWarning, match=r"(reads|writes) .*B/s in calls of .*B, but dream is stated to reach .*B/s"
    ) as told:
        begun(case, on_disk(case), disk_folder, stated_disk=stated).close()
    assert len(told) == 2
    slow = stated.model_copy(update={"read_bytes_per_s": 1.0, "write_bytes_per_s": 1.0})
    begun(case, on_disk(case), disk_folder, stated_disk=slow).close()


def test_a_disk_is_slow_if_most_of_enough_calls_are() -> None:
    rate, chunk, latency_s = 1e6, 1000, 1e-3  # stated to take 2 ms for each
    in_time, late = (chunk, 3.9e-3), (chunk, 4.1e-3)
    assert is_slow([late] * 8, rate, latency_s)
    assert not is_slow([in_time] * 8, rate, latency_s)
    assert not is_slow([late] * 7, rate, latency_s)
    assert is_slow([(2**26, 135.0)], rate, latency_s)
    # One that was held up: by the sum it would be slow.  And by the median, of calls that do not count.
    assert not is_slow([*[in_time] * 9, (chunk, 1.0)], rate, latency_s)
    assert not is_slow([(2**26, 68.0), *[late] * 9], rate, latency_s)
    # The latency is part of what is stated.
    assert is_slow([in_time] * 8, rate, 0.0)


def test_a_folder_is_measured(tmp_path: Path) -> None:
    read, write = measured_disk_rates(tmp_path, 2**20)
    assert read > 0
    assert write > 0
    assert os.listdir(tmp_path) == []


def test_gathers_copy_what_was_read(disk_folder: Path) -> None:
    """No chunk keeps its parameters on the host beside the disk."""
    case = cases()[LLAMA]
    with begun(case, on_disk(case), disk_folder) as training:
        chunks: list[DeviceChunk] = training._placed.chunks
        assert all(chunk.is_on_disk and chunk._home is None for chunk in chunks)
        places = {id(chunk._staging) for chunk in chunks if chunk.trainable}
        assert len(places) == 2


def test_host_memory_is_what_the_plan_accounts_for(disk_folder: Path) -> None:
    """Buffers that training holds on the host, counted by their storages; beside the state's places a few bytes."""
    case = cases()[LLAMA]
    for plan in (on_disk(case), on_disk(case, n_disk=6, micro_batches=2, n_staging=3)):
        with begun(case, plan, disk_folder) as training:
            store, schedule = training._placed._store, training.schedule
            assert store is not None
            of_chunks = [
                t for c in training._placed.chunks for t in (c._home, c._staging, c._arrivals) if t is not None
            ]
            storages = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in (*store._places.values(), *of_chunks)
            }
            accounted = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
            assert 0 <= sum(storages.values()) - accounted <= 0.005 * accounted
