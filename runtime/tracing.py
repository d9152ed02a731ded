"""From a model and a batch to a Workload: what every section does, in either activation mode, and how long it takes.

The model's own iteration runs under the memory ledger with the hooks that the runtime uses, once with every block in
mode KEEP and once with every block in mode CHECKPOINT, so that what is traced is what will run.  Real tensors are then
timed without the ledger; fake tensors (a model on the meta device) have no times, and the simulator uses a roofline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..shared.errors import WorkloadError
from ..shared.plan import ActivationMode
from ..shared.schedule import Part, Section, TaskKind
from ..shared.workload import Block, BlockProfile, DType, Parameter, Phase, Workload
from .batches import Batch, Loss, batch_shapes, batch_tensors, count_samples_and_tokens, loss_of
from .blocks import NamedBlock, find_blocks
from .fake import fake_batch, fake_model, keep_representatives
from .identity import machine_name, model_hash, software_versions
from .ledger import MemoryLedger
from .operations import OperationTally, describe_operation
from .snapshot import left_as_found
from .tensors import tensors_in
from .walk import SectionWalker

PhaseKey = tuple[TaskKind, Section]
_CURVE_STRETCHES: Final = 24
_FLOPS_PER_BYTE: Final = 10.0
"""Weighs an operation's arithmetic against its traffic when its share of a phase's time is estimated: the order of the
machine balance of CPUs and GPUs alike outside tensor cores.  It only places levels within a phase."""
_OPERATION_OVERHEAD: Final = 20_000.0
"""Bytes that an operation of no size counts for, for the same purpose."""
_WARM_UP: Final = 2


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    blocks: str | Sequence[str] | None = None,
    repeats: int = 5,
    name: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Trace one training iteration of ``model`` on ``batch``.

    A model with real weights is run and timed (``repeats`` iterations in each activation mode; 0 for none), and is
    left bit for bit as it was.  A model on the meta device is traced with fake tensors: no memory, no times.
    ``loss`` gives the scalar loss from (output, batch) where the model does not; ``blocks`` names the blocks where
    they are not found.  Raises WorkloadError if the model cannot be traced.
    """
    _check_model(model)
    num_samples, num_tokens = count_samples_and_tokens(batch)
    named = find_blocks(model, blocks)
    if any(parameter.is_meta for parameter in model.parameters()):
        profiled = _profile_fake(model, batch, loss, blocks, on_progress)
    else:
        profiled = _profile_real(model, batch, loss, named, repeats, on_progress)
    assembly, stands_for = profiled
    profiles, profile_of_traced = assembly.profiles()
    profile_of = [profile_of_traced[traced] for traced in stands_for]
    parameters = _parameters(model, named)
    keep = ActivationMode.KEEP
    return Workload(
        model_name=name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        model_hash=model_hash(model),
        batch_shapes=batch_shapes(batch),
        num_samples=num_samples,
        num_tokens=num_tokens,
        compute_dtype=_compute_dtype(parameters),
        parameters=parameters,
        blocks=tuple(Block(name=b.name, profile=p) for b, p in zip(named, profile_of, strict=True)),
        profiles=profiles,
        prologue_forward=assembly.phase(keep, TaskKind.FORWARD, Part.PROLOGUE),
        epilogue_forward=assembly.phase(keep, TaskKind.FORWARD, Part.EPILOGUE),
        epilogue_backward=assembly.phase(keep, TaskKind.BACKWARD, Part.EPILOGUE),
        prologue_backward=assembly.phase(keep, TaskKind.BACKWARD, Part.PROLOGUE),
        resident_bytes=_resident_bytes(model, batch),
        traced_with="real" if assembly.is_real else "fake",
        measured_on=machine_name() if assembly.is_timed else None,
        software=software_versions(),
    )


def _profile_real(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    repeats: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[_Assembly, list[int]]:
    progress = _Progress(len(ActivationMode) * (2 + (repeats + _WARM_UP if repeats else 0)), on_progress)
    with left_as_found(model):
        observed = {mode: _observe(model, batch, loss, blocks, mode, progress, passes=2) for mode in ActivationMode}
        seconds: dict[ActivationMode, dict[PhaseKey, float]] = {mode: {} for mode in ActivationMode}
        if repeats > 0:
            seconds = {mode: _time(model, batch, loss, blocks, mode, repeats, progress) for mode in ActivationMode}
    return _Assembly(blocks, observed, seconds, is_real=True), list(range(len(blocks)))


def _profile_fake(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    names: str | Sequence[str] | None,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[_Assembly, list[int]]:
    """Observe representatives of equal blocks; all blocks if two representatives from within the row differ."""
    for is_shortened in (True, False):
        mode = FakeTensorMode()
        twin, twin_batch = fake_model(model, mode), fake_batch(batch, mode)
        blocks = find_blocks(twin, names)
        stands_for: list[int] | None = list(range(len(blocks)))
        if is_shortened:
            stands_for = keep_representatives(twin, blocks)
            if stands_for is None:
                continue
            blocks = find_blocks(twin, blocks[0].name.rpartition(".")[0])
        progress = _Progress(len(ActivationMode), on_progress)
        with mode, left_as_found(twin):
            observed = {m: _observe(twin, twin_batch, loss, blocks, m, progress, passes=1) for m in ActivationMode}
        assembly = _Assembly(blocks, observed, {m: {} for m in ActivationMode}, is_real=False)
        assert stands_for is not None
        if not is_shortened or assembly.agree(1, 2):
            break
    return assembly, stands_for


def _check_model(model: nn.Module) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise WorkloadError(f"{type(model).__name__} has no trainable parameter. Set requires_grad on some.")
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise WorkloadError(
            "the model checkpoints activations itself. Call model.gradient_checkpointing_disable(): the plan decides "
            "which blocks are checkpointed (n_checkpoint)."
        )
    unknown = {str(p.dtype) for p in model.parameters()} - {f"torch.{dtype}" for dtype in DType}
    if unknown:
        raise WorkloadError(f"parameters of dtype {', '.join(sorted(unknown))} are not supported.")


class _Progress:
    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._done, self._report = total, 0, report

    def advance(self) -> None:
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)


# -- what a section does ---------------------------------------------------------------------------------------------


@dataclass
class _Observation:
    """One section of one metered iteration."""

    start_bytes: int
    end_bytes: int = 0
    weights: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    tally: OperationTally = field(default_factory=OperationTally)
    output_bytes: int = 0


class _Observer:
    """Splits a metered iteration into sections."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.sections: dict[PhaseKey, _Observation] = {}
        self._current: _Observation | None = None
        ledger.on_operation = self._operation

    def begin(self, kind: TaskKind, section: Section) -> None:
        self._end()
        self._current = self.sections[kind, section] = _Observation(self._ledger.watched_bytes)

    def end_backward(self) -> None:
        self._end()

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self.sections.clear()
        self._current = None

    def _end(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.end_bytes = self._ledger.watched_bytes

    def _operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        current = self._current
        if current is None:
            return
        operation = describe_operation(operator, args, kwargs, result)
        if operation is not None:
            current.tally.add(operation)
            weight = operation.flops / _FLOPS_PER_BYTE + operation.bytes_moved + _OPERATION_OVERHEAD
            current.weights.append(weight)
            current.levels.append(self._ledger.watched_bytes - current.start_bytes)


def _observe(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    mode: ActivationMode,
    progress: _Progress,
    *,
    passes: int,
) -> dict[PhaseKey, _Observation]:
    """Metered iterations with every block in ``mode``; the last one counts.

    Real tensors take two, since the first may fill caches that the model keeps.
    """
    ledger = MemoryLedger()
    ledger.adopt([*model.parameters(), *model.buffers(), *batch_tensors(batch).values()])
    observer = _Observer(ledger)
    walker = SectionWalker(model, blocks, [mode] * len(blocks), observer)
    outputs = _OutputSizes(blocks)
    try:
        for _ in range(passes):
            observer.restart()
            with ledger.metering():
                value = loss_of(model, batch, loss)
                value.backward()  # type: ignore[no-untyped-call]
                del value
            for parameter in model.parameters():
                parameter.grad = None
            progress.advance()
    finally:
        walker.remove()
        outputs.remove()
    for index, size_bytes in enumerate(outputs.sizes):
        key = (TaskKind.FORWARD, index)
        if key not in observer.sections:
            raise WorkloadError(f"block {blocks[index].name} did not run in the model's forward. Name other blocks.")
        observer.sections[key].output_bytes = size_bytes  # type: ignore[index]
    return observer.sections


class _OutputSizes:
    """Bytes of the tensors that each block hands on, storages it was given itself left out."""

    def __init__(self, blocks: Sequence[NamedBlock]) -> None:
        self.sizes = [0] * len(blocks)
        self._handles = [
            block.module.register_forward_hook(self._measure(index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]

    def _measure(self, index: int) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(output)}
            self.sizes[index] = sum(size for key, size in made.items() if key not in given)

        return measure

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


# -- how long it takes -----------------------------------------------------------------------------------------------


class _Stopwatch:
    """Seconds of every section of one iteration."""

    def __init__(self) -> None:
        self.seconds: dict[PhaseKey, float] = {}
        self._current: PhaseKey | None = None
        self._since = 0.0

    def begin(self, kind: TaskKind, section: Section) -> None:
        now = time.perf_counter()
        if self._current is not None:
            self.seconds[self._current] = now - self._since
        self._current, self._since = (kind, section), time.perf_counter()

    def end_backward(self) -> None:
        if self._current is not None:
            self.seconds[self._current] = time.perf_counter() - self._since
        self._current = None


def _time(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    mode: ActivationMode,
    repeats: int,
    progress: _Progress,
) -> dict[PhaseKey, float]:
    """Median seconds of every section over ``repeats`` iterations, the first ones thrown away."""
    runs: list[dict[PhaseKey, float]] = []
    stopwatch = _Stopwatch()
    walker = SectionWalker(model, blocks, [mode] * len(blocks), stopwatch)
    try:
        for _ in range(_WARM_UP + repeats):
            stopwatch.seconds = {}
            loss_of(model, batch, loss).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                parameter.grad = None
            runs.append(stopwatch.seconds)
            progress.advance()
    finally:
        walker.remove()
    counted = runs[_WARM_UP:]
    return {key: statistics.median(run[key] for run in counted) for key in counted[0]}


# -- the workload's parts --------------------------------------------------------------------------------------------


class _Assembly:
    """Observations and times as phases and profiles."""

    def __init__(
        self,
        blocks: Sequence[NamedBlock],
        observed: dict[ActivationMode, dict[PhaseKey, _Observation]],
        seconds: dict[ActivationMode, dict[PhaseKey, float]],
        *,
        is_real: bool,
    ) -> None:
        self.is_real = is_real
        self.is_timed = any(seconds.values())
        self._blocks = blocks
        self._observed = observed
        self._seconds = seconds

    def phase(self, mode: ActivationMode, kind: TaskKind, section: Section) -> Phase:
        """One section's phase."""
        observation = self._observed[mode][kind, section]
        return Phase(
            operations=observation.tally.operations(),
            net_bytes=observation.end_bytes - observation.start_bytes,
            curve=_curve(observation),
            measured_s=self._seconds[mode].get((kind, section)),
        )

    def profiles(self) -> tuple[tuple[BlockProfile, ...], list[int]]:
        """Distinct profiles and the profile of each block; equal blocks share the median of their times."""
        members: dict[BlockProfile, list[BlockProfile]] = {}
        keys: list[BlockProfile] = []
        for index in range(len(self._blocks)):
            profile = self._profile(index)
            key = _map_phases(profile, lambda phase: phase.model_copy(update={"measured_s": None}))
            members.setdefault(key, []).append(profile)
            keys.append(key)
        order = list(members)
        return tuple(_merge(members[key]) for key in order), [order.index(key) for key in keys]

    def agree(self, first: int, second: int) -> bool:
        """Whether two blocks do the same."""
        _, profile_of = self.profiles()
        return profile_of[first] == profile_of[second]

    def _profile(self, index: int) -> BlockProfile:
        keep, again = ActivationMode.KEEP, ActivationMode.CHECKPOINT
        section: Section = index  # type: ignore[assignment]
        return BlockProfile(
            output_bytes=self._observed[keep][TaskKind.FORWARD, section].output_bytes,
            forward=self.phase(keep, TaskKind.FORWARD, section),
            backward=self.phase(keep, TaskKind.BACKWARD, section),
            checkpoint_forward=self.phase(again, TaskKind.FORWARD, section),
            recompute=self.phase(again, TaskKind.RECOMPUTE, section),
            checkpoint_backward=self.phase(again, TaskKind.BACKWARD, section),
        )


_PHASES: Final = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


def _map_phases(profile: BlockProfile, change: Callable[[Phase], Phase]) -> BlockProfile:
    return profile.model_copy(update={name: change(getattr(profile, name)) for name in _PHASES})


def _merge(profiles: Sequence[BlockProfile]) -> BlockProfile:
    """One profile for equal blocks, with the median of each phase's times."""
    updates = {}
    for name in _PHASES:
        phases = [getattr(profile, name) for profile in profiles]
        times = [phase.measured_s for phase in phases if phase.measured_s is not None]
        updates[name] = phases[0].model_copy(update={"measured_s": statistics.median(times) if times else None})
    return profiles[0].model_copy(update=updates)


def _curve(observation: _Observation) -> tuple[tuple[float, int], ...]:
    """The section's levels as at most ``_CURVE_STRETCHES`` stretches, each with its highest level."""
    if not observation.levels:
        net = observation.end_bytes - observation.start_bytes
        return ((1.0, max(0, net)),) if net > 0 else ()
    total = sum(observation.weights)
    stretches: list[tuple[float, int]] = []
    done = 0.0
    for weight, level in zip(observation.weights, observation.levels, strict=True):
        done += weight
        end = min(_CURVE_STRETCHES, int(_CURVE_STRETCHES * (done - weight / 2) / total) + 1) / _CURVE_STRETCHES
        if stretches and (stretches[-1][0] >= end or stretches[-1][1] == level):
            stretches[-1] = (max(stretches[-1][0], end), max(stretches[-1][1], level))
        else:
            stretches.append((end, level))
    stretches[-1] = (1.0, stretches[-1][1])
    return tuple(stretches)


def _parameters(model: nn.Module, blocks: Sequence[NamedBlock]) -> tuple[Parameter, ...]:
    """All parameters in execution order: those registered before the blocks, the blocks', the others."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    prefixes = tuple(f"{block.name}." for block in blocks)
    outside = {key for key in tensors if any(not name.startswith(prefixes) for name in names[key])}
    found: list[tuple[tuple[int, int], Parameter]] = []
    order = list(tensors)
    first_block = min((i for i, key in enumerate(order) if key not in outside), default=0)
    for place, key in enumerate(order):
        # A parameter that two blocks share, or a block and the rest, belongs to neither: it must stay resident.
        is_owned = key not in outside and len(owners.get(key, ())) == 1
        block_index = next(iter(owners[key])) if is_owned else None
        rank = block_index + 1 if block_index is not None else (0 if place < first_block else len(blocks) + 1)
        tensor = tensors[key]
        found.append(
            (
                (rank, place),
                Parameter(
                    name=names[key][0],
                    shape=tuple(tensor.shape),
                    dtype=DType(str(tensor.dtype).removeprefix("torch.")),
                    trainable=tensor.requires_grad,
                    block=block_index,
                    aliases=tuple(names[key][1:]),
                ),
            )
        )
    return tuple(parameter for _, parameter in sorted(found, key=lambda item: item[0]))


def _compute_dtype(parameters: Sequence[Parameter]) -> DType:
    """The dtype of most scalars."""
    sizes: dict[DType, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype])


def _resident_bytes(model: nn.Module, batch: Batch) -> int:
    tensors = [*model.buffers(), *batch_tensors(batch).values()]
    seen = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(seen.values())

