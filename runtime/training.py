"""Carrying out a plan: the schedule, interpreted on a real model.

The model's own forward and backward are the compute tasks; the section walker advances the program to them.  All other
tasks are queued to their lanes one iteration ahead and start when what they wait for has ended, exactly as in the
simulator.  Every wait of the compute thread happens in ``begin``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn

from ..shared.compile import compile_schedule
from ..shared.errors import PlanError, ProtwinError, ScheduleError
from ..shared.layout import build_layout
from ..shared.plan import Plan
from ..shared.record import Holding, Record
from ..shared.schedule import Content, Lane, Memory, Part, Section, Task, TaskId, TaskKind
from ..shared.verify import verify_schedule
from ..shared.workload import Workload
from .blocks import find_blocks
from .chunks import DeviceChunk
from .devices import CpuDevice, CudaDevice, TrainingDevice
from .identity import model_hash
from .lanes import Cancelled, Mark, WorkerLane
from .optimizer import ChunkOptimizer, MakeOptimizer, group_options
from .recording import IterationLog, MeteredMemory, Recorder
from .snapshot import without_cache
from .tensors import tensors_in
from .walk import SectionWalker

_METERED_ITERATIONS: Final = 3
"""Iterations that the ledger watches for every new shape of the model's inputs."""
_KEPT_LOGS: Final = 200


def default_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Fused AdamW with torch's default options."""
    return torch.optim.AdamW(groups, fused=True)


def carry_out(
    model: nn.Module,
    plan: Plan,
    workload: Workload,
    *,
    optimizer: MakeOptimizer = default_optimizer,
    parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    device: TrainingDevice | None = None,
    meter_every: int | None = None,
) -> Training:
    """Take over ``model`` and train it as ``plan`` says.

    ``optimizer`` makes a torch optimizer from parameter groups, such as
    ``functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)``; it is called once per chunk.  ``parameter_groups``
    are torch's, over the model's own parameters.  ``device`` is where the model's parameters are, by default.  On the
    CPU the ledger watches the first iterations of every input shape, and every ``meter_every``-th one.

    Use the result as a context manager, or call ``close``: the model then has ordinary parameters again.
    Raises PlanError if plan, workload and model do not belong together, the device's out-of-memory error if the
    persistent chunks alone exceed it.
    """
    return Training(
        model,
        plan,
        workload,
        optimizer=optimizer,
        parameter_groups=parameter_groups,
        device=device or _device_of(model),
        meter_every=meter_every,
    )


def _device_of(model: nn.Module) -> TrainingDevice:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise PlanError(f"the model's parameters are on {len(devices)} devices. Move it to one, or pass device=.")
    device = devices.pop()
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device.index or 0)
    raise PlanError(f"the model is on {device.type!r}. Pass device=CpuDevice() or device=CudaDevice().")


class Training:
    """A model in the hands of a schedule."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        workload: Workload,
        *,
        optimizer: MakeOptimizer,
        parameter_groups: Sequence[Mapping[str, Any]] | None,
        device: TrainingDevice,
        meter_every: int | None,
    ) -> None:
        if model_hash(model) != workload.model_hash:
            raise PlanError(
                f"the workload was traced from another model ({workload.model_name}): module classes, parameter names, "
                f"shapes, dtypes or requires_grad differ. Trace this model again."
            )
        if getattr(model, "_protwin_training", None) is not None:
            raise PlanError("a plan is being carried out on this model already. Close that training first.")
        if meter_every is not None and meter_every < 1:
            raise PlanError(f"meter_every is {meter_every}; it must be positive.")
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
        self.schedule = compile_schedule(plan, workload, layout)
        verify_schedule(self.schedule, plan, workload, layout)
        self.plan = plan
        self.workload = workload
        self.device = device
        self.model = model
        self._tasks = self.schedule.tasks
        self._compute = self.schedule.lanes[Lane.COMPUTE]
        self._section_index = {(self._tasks[t].kind, self._tasks[t].section): i for i, t in enumerate(self._compute)}
        self._iteration = 0
        self._place = 0
        self._running: TaskId | None = None
        self._is_closed = False
        self._failure: BaseException | None = None
        self._marks: dict[tuple[int, TaskId], Mark] = {}
        self._logs: dict[int, IterationLog] = {}
        self._outgoing: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._present: dict[tuple[int, int], list[bool]] = {}
        self._left: set[int] = set()
        """Chunks whose gradients have left in this iteration."""
        self._triggered = self._offloads_by_backward()
        self._claims: dict[TaskId, int] = {}
        self._metered_shapes: dict[Any, int] = {}
        self._meter_every = meter_every
        self.bytes_host_to_device = 0
        self.bytes_device_to_host = 0
        self.num_cpu_adam_steps = 0
        self.num_gathers = 0
        self.peak_device_bytes = 0
        """Highest level seen by the ledger so far; on CUDA, by the allocator."""
        self.recorder = Recorder(self.schedule, plan, workload, device)

        parameters = dict(model.named_parameters(remove_duplicate=False))
        options = group_options(model, parameter_groups)
        persistent = layout.persistent(plan.n_persist)
        self._cache_switch = without_cache(model)
        self._cache_switch.__enter__()
        if device.ledger is not None:
            device.ledger.adopt(model.buffers())
        self._chunks: list[DeviceChunk] = []
        self._host_optimizers: dict[int, ChunkOptimizer] = {}
        self._device_optimizers: list[tuple[ChunkOptimizer, list[nn.Parameter]]] = []
        self._handles: list[Any] = []
        with torch.no_grad():
            for chunk in layout.chunks:
                specs = [workload.parameters[placed.index] for placed in chunk.parameters]
                members = [parameters[spec.name] for spec in specs]
                made = DeviceChunk(chunk, specs, members, device, is_persistent=chunk.id in persistent)
                self._chunks.append(made)
                self._make_optimizers(made, options, optimizer)
                if not made.is_persistent:
                    self._guard_gradients(made)
        self._lanes = {lane: WorkerLane(lane, device) for lane in Lane if lane is not Lane.COMPUTE}
        self._walker = SectionWalker(model, self._find_blocks(), plan.modes(workload.num_blocks), self)
        self._handles.append(model.register_forward_pre_hook(self._enter_model, prepend=True, with_kwargs=True))
        model._protwin_training = self  # type: ignore[assignment]
        self._submit(0)
        self._submit(1)

    # -- setting up --------------------------------------------------------------------------------------------------

    def _find_blocks(self) -> Any:
        return find_blocks(self.model, [block.name for block in self.workload.blocks])

    def _make_optimizers(
        self, chunk: DeviceChunk, options: Mapping[int, Mapping[str, Any]], make_optimizer: MakeOptimizer
    ) -> None:
        if not chunk.trainable:
            return
        if not chunk.is_persistent:
            self._host_optimizers[chunk.chunk.id] = ChunkOptimizer(
                chunk.masters, chunk.trainable, options, make_optimizer, targets=chunk.targets
            )
            return
        wide = [p for p in chunk.trainable if p.element_size() >= 4]
        if wide:
            self._device_optimizers.append((ChunkOptimizer(wide, wide, options, make_optimizer), wide))
        for parameter in (p for p in chunk.trainable if p.element_size() < 4):
            # One optimizer per narrow parameter, so that only one gradient at a time is widened.
            master = parameter.detach().float()
            if self.device.ledger is not None:
                self.device.ledger.adopt([master])
            stepper = ChunkOptimizer([master], [parameter], options, make_optimizer, targets=[parameter.detach()])
            self._device_optimizers.append((stepper, [parameter]))

    def _guard_gradients(self, chunk: DeviceChunk) -> None:
        """Stop before a gradient that arrives after its chunk's gradients have left could be lost."""

        def arrived(parameter: torch.Tensor) -> None:
            if chunk.chunk.id in self._left:
                raise ScheduleError(
                    f"a parameter of chunk {chunk.chunk.id} got a gradient after backward had left its block: it is "
                    f"used outside the block too. Name the blocks so that shared parameters lie outside (blocks=...)."
                )

        for parameter in chunk.trainable:
            self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    def _offloads_by_backward(self) -> dict[TaskId, list[Task]]:
        found: dict[TaskId, list[Task]] = {}
        for task in self._tasks:
            if task.kind is TaskKind.GRADIENT_OFFLOAD:
                found.setdefault(max(task.after), []).append(task)
        return found

    # -- the lanes ---------------------------------------------------------------------------------------------------

    def _mark(self, iteration: int, task: TaskId) -> Mark:
        key = (iteration, task)
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = Mark()
        return mark

    def _waits(self, task: Task, iteration: int) -> list[Mark]:
        marks = [self._mark(iteration, earlier) for earlier in task.after]
        if iteration > 0:
            marks += [self._mark(iteration - 1, earlier) for earlier in task.after_previous]
        return marks

    def _submit(self, iteration: int) -> None:
        """Queue every task of an iteration that is not the compute thread's."""
        log = self._logs[iteration] = IterationLog(iteration)
        for task in self._tasks:
            if task.lane is not Lane.COMPUTE:
                work = self._work(task, iteration)
                waits = self._waits(task, iteration)
                log.spans[task.id] = self._lanes[task.lane].submit(work, waits, self._mark(iteration, task.id))

    def _work(self, task: Task, iteration: int) -> Callable[[], None]:
        assert task.chunk is not None
        chunk = self._chunks[task.chunk]
        if task.kind is TaskKind.GATHER:
            return partial(self._gather, chunk)
        if task.kind is TaskKind.GRADIENT_OFFLOAD:
            return partial(self._offload, chunk, iteration)
        assert task.kind is TaskKind.CPU_ADAM
        return partial(self._cpu_adam, chunk, iteration)

    def _gather(self, chunk: DeviceChunk) -> None:
        with torch.profiler.record_function(f"protwin::gather chunk {chunk.chunk.id}"):
            chunk.gather()
        self.bytes_host_to_device += chunk.chunk.size_bytes
        self.num_gathers += 1

    def _offload(self, chunk: DeviceChunk, iteration: int) -> None:
        key = (iteration, chunk.chunk.id)
        with torch.profiler.record_function(f"protwin::gradient_offload chunk {chunk.chunk.id}"):
            present = chunk.stage_gradients(self._outgoing.pop(key))
        self._present[key] = present
        self.bytes_device_to_host += chunk.moved_gradient_bytes(present)

    def _cpu_adam(self, chunk: DeviceChunk, iteration: int) -> None:
        present = self._present.pop((iteration, chunk.chunk.id))
        gradients = [staged if there else None for staged, there in zip(chunk.staged, present, strict=True)]
        with torch.profiler.record_function(f"protwin::cpu_adam chunk {chunk.chunk.id}"):
            self._host_optimizers[chunk.chunk.id].step(gradients)
        self.num_cpu_adam_steps += 1

    # -- the compute thread ------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs before the walker's hook: decide whether this iteration is watched."""
        if not torch.is_grad_enabled():
            raise ScheduleError(
                "forward without gradients while a plan is being carried out: offloaded chunks are not resident. "
                "Evaluate after close(), and carry the plan out again."
            )
        self._check_usable()
        if self._place != 0:
            raise ScheduleError(
                "forward began before the last iteration was complete. Call loss.backward() and then step(), once "
                "each per forward."
            )
        ledger = self.device.ledger
        if ledger is None:
            torch.cuda.reset_peak_memory_stats(self.device.torch_device)
            return
        inputs = list(tensors_in((args, kwargs)))
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        seen = self._metered_shapes.get(shapes, 0)
        is_due = self._meter_every is not None and self._iteration % self._meter_every == 0
        if seen < _METERED_ITERATIONS or is_due:
            self._metered_shapes[shapes] = seen + 1
            self._logs[self._iteration].is_metered = True
            ledger.claim(0)
            ledger.samples = []
            ledger.start_metering()
            ledger.adopt(inputs)
            ledger.reset_peak()

    def begin(self, kind: TaskKind, section: Section) -> None:
        """The walker's announcement: the running compute task ends and the next one begins."""
        self._finish_running()
        self._start(kind, section)

    def end_backward(self) -> None:
        """The walker's announcement that backward is over."""
        self._finish_running()

    def _start(self, kind: TaskKind, section: Section | None) -> None:
        expected = self._tasks[self._compute[self._place]]
        if (expected.kind, expected.section) != (kind, section):
            raise self._failed(
                ScheduleError(
                    f"the model begins {kind} {section if section is not None else ''} where the schedule expects "
                    f"{expected.name}."
                )
            )
        ledger = self.device.ledger
        try:
            for mark in self._waits(expected, self._iteration):
                self.device.wait_event(mark.wait())
            if ledger is not None:
                ledger.doing = f"running {expected.name}"
                if not ledger.is_metering:
                    ledger.claim(self._claims.get(expected.id, 0))
        except BaseException as error:
            raise self._failed(error) from None
        log = self._logs[self._iteration]
        span = log.spans[expected.id] = _ComputeSpan(self.device.stamp())
        if self._place == 0:
            log.started = span.start
        self._running = expected.id
        self._claim_start(expected)

    def _claim_start(self, task: Task) -> None:
        ledger = self.device.ledger
        if ledger is not None and ledger.is_metering:
            self._peak_before = max(getattr(self, "_peak_before", 0), ledger.peak_bytes)
            self._task_samples = len(ledger.samples or ())

    def _finish_running(self) -> None:
        """End the running compute task: free what it frees, let its gradients leave, tell who waits."""
        if self._running is None:
            return
        task = self._tasks[self._running]
        log = self._logs[self._iteration]
        log.spans[task.id].end = self.device.stamp()
        self._note_claim(task)
        for buffer_id in task.frees:
            buffer = self.schedule.buffers[buffer_id]
            if buffer.content is Content.PARAMETERS:
                assert buffer.chunk is not None
                self._chunks[buffer.chunk].release()
        for offload in self._triggered.get(task.id, ()):
            assert offload.chunk is not None
            self._outgoing[self._iteration, offload.chunk] = self._chunks[offload.chunk].detach_gradients()
            self._left.add(offload.chunk)
        self._mark(self._iteration, task.id).set(self.device.record_event())
        self._running = None
        self._place += 1

    def _note_claim(self, task: Task) -> None:
        """While watched: what the task held at most beyond named allocations is its claim from now on."""
        ledger = self.device.ledger
        if ledger is None or not ledger.is_metering or ledger.samples is None:
            return
        levels = [level for _, level in ledger.samples[self._task_samples :]]
        highest = max([*levels, ledger.level_bytes])
        self._claims[task.id] = max(0, highest - ledger.named_bytes)

    def step(self) -> None:
        """Step the persistent chunks and end the iteration; the others are stepped by CPU Adam meanwhile.

        Raises ScheduleError without a completed backward, and whatever a lane raised.
        """
        self._check_usable()
        if self._place != len(self._compute) - 1:
            done = "no forward" if self._place == 0 else f"backward has not ended ({self._place} tasks done)"
            raise ScheduleError(f"step() without a complete iteration: {done}. Call loss.backward() first.")
        self._start(TaskKind.DEVICE_ADAM, None)
        ledger = self.device.ledger
        try:
            with torch.profiler.record_function("protwin::device_adam"):
                for stepper, parameters in self._device_optimizers:
                    stepper.step([parameter.grad for parameter in parameters])
                    for parameter in parameters:
                        parameter.grad = None
            if ledger is not None:
                for stepper, _ in self._device_optimizers:
                    ledger.adopt(stepper.state_tensors())
            self._drop_late_gradients()
        except BaseException as error:
            raise self._failed(error) from None
        self._finish_running()
        self._end_iteration()

    def _drop_late_gradients(self) -> None:
        """Gradients of parameters that nothing steps must not survive into the next iteration."""
        for chunk in self._chunks:
            for parameter in chunk.parameters:
                parameter.grad = None

    def _end_iteration(self) -> None:
        log = self._logs.pop(self._iteration)
        ledger = self.device.ledger
        if ledger is not None and ledger.is_metering:
            samples = ledger.samples or []
            log.memory = MeteredMemory(samples, ledger.peak_bytes, self._task_at_peak(log, samples), ())
            self.peak_device_bytes = max(self.peak_device_bytes, ledger.peak_bytes)
            ledger.stop_metering()
            ledger.samples = None
        elif ledger is None:
            peak = torch.cuda.max_memory_allocated(self.device.torch_device)
            self.peak_device_bytes = max(self.peak_device_bytes, peak)
            log.memory = MeteredMemory([], peak, "", ())
        self.recorder.logs.append(log)
        del self.recorder.logs[:-_KEPT_LOGS]
        for task in self._tasks:
            self._marks.pop((self._iteration - 1, task.id), None)
        self._left.clear()
        self._iteration += 1
        self._place = 0
        self._submit(self._iteration + 1)

    def _task_at_peak(self, log: IterationLog, samples: Sequence[tuple[float, int]]) -> str:
        if not samples:
            return ""
        when = max(samples, key=lambda sample: sample[1])[0]
        running = [t for t in self._compute if t in log.spans and self.device.seconds(log.spans[t].start) <= when]
        return self._tasks[running[-1]].name if running else ""

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_iterations(self) -> int:
        """Completed iterations."""
        return self._iteration

    def record(self, *, hardware_name: str = "") -> Record:
        """The measured Record of the iterations so far.  Raises ProtwinError if there are too few of them."""
        return self.recorder.record(hardware_name=hardware_name)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of every group, from the next step on.  Raises PlanError unless finite and not negative."""
        if not 0 <= learning_rate < float("inf"):
            raise PlanError(f"learning rate {learning_rate} is not finite and at least 0.")
        self._drain()
        for stepper in (*self._host_optimizers.values(), *(s for s, _ in self._device_optimizers)):
            for group in stepper.optimizer.param_groups:
                group["lr"] = learning_rate

    # -- ending ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ScheduleError("this training is closed. Carry the plan out again.")
        if self._failure is not None:
            raise ScheduleError(f"this training has failed: {self._failure}. Close it.") from self._failure

    def _failed(self, error: BaseException) -> BaseException:
        self._failure = self._failure or error
        return error

    def _drain(self) -> None:
        """Wait until every task of the completed iterations has ended."""
        for (iteration, _), mark in list(self._marks.items()):
            if iteration < self._iteration:
                self.device.synchronize_event(mark.wait())

    def close(self) -> None:
        """Wait for the steps of completed iterations and give the model ordinary parameters again.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        error: BaseException | None = None
        try:
            if self._failure is None:
                self._drain()
        except BaseException as caught:
            error = caught
        finally:
            self._tear_down()
        if error is not None:
            raise error

    def _tear_down(self) -> None:
        ledger = self.device.ledger
        if ledger is not None:
            ledger.stop_metering()
            ledger.samples = None
        for mark in list(self._marks.values()):
            mark.fail(Cancelled("training has stopped"))
        for lane in self._lanes.values():
            lane.close()
        self._walker.remove()
        for handle in self._handles:
            handle.remove()
        self._outgoing.clear()
        if ledger is not None:
            # Moving out is no part of training; the model leaves the device.
            ledger.budget_bytes = None
        with torch.no_grad():
            for chunk in self._chunks:
                for parameter in chunk.parameters:
                    parameter.grad = None
                chunk.move_out()
        self._cache_switch.__exit__(None, None, None)
        self.model._protwin_training = None  # type: ignore[assignment]
        del self.model._protwin_training

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._failed(error)
        self.close()


class _ComputeSpan:
    """When a compute task ran, as stamps of the device."""

    __slots__ = ("end", "start")

    def __init__(self, start: Any) -> None:
        self.start = start
        self.end = start
