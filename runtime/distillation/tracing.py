"""From a teacher, a student and a batch to the Workload of their distillation.

One forward of the pairs (``pairs.py``) runs under the memory ledger, with the listener that a trace of full training
has, so that what is traced is what will run; real tensors are then timed without the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import ProtwinError, WorkloadError
from ...shared.observed.assembly import TracedModel, TracedShape
from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.phases.distillation import KeyToLearn
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import BlockId, DType, Parameter, Workload
from ...shared.workloads.pair_assembly import assemble_pairs
from ..devices.device import device_description
from ..devices.ledger import MemoryLedger
from ..fakes.known_values import with_values_if_wanted
from ..fakes.models import fake_batch, fake_model, keep_alike
from ..fakes.running import running_fakes
from ..fakes.values_wanted import wanted_values_named
from ..hooks.block_runs import OutputSizes
from ..model.batches import Batch, batch_shapes, batch_tensors, call_model, count_samples_and_tokens
from ..model.compiled import compiled_part
from ..model.identity import model_hash, software_versions
from ..model.kept_tensors import attributes_as_found, kept_tensors
from ..model.memory_overlaps import overlap_of
from ..model.ownership import check_untaken
from ..model.parameters import SeenUses, TracedUses, compute_dtype, describe_parameters
from ..model.snapshot import left_as_found
from ..model.strides import unkept_strides
from ..quantized.checks import refuse_quantized
from ..routing.forced_choices import ForcedChoices
from ..routing.tried import with_other_values
from ..routing.value_dependence import ValueWatch
from ..tracing.observing import GivenParameters, SectionObserver, has_settled, kept_beside
from ..tracing.stopwatch import WARM_UP_ITERATIONS, medians_of, stopwatch_on
from .mixed_types import RefusingMixedTypes
from .outputs import Beside
from .pairs import PairLoss, Pairs, name_of_loss

_LOSS_BYTES: Final = 4
"""Of one pair's loss."""
_ALIVE: Final = 2
"""Tensors of losses that a loop has: the latest, and the one that is being filled."""


def trace_distillation(
    teacher: nn.Module,
    student: nn.Module,
    batch: Batch,
    loss: PairLoss,
    *,
    keys_to_learn: Sequence[KeyToLearn] = (KeyToLearn.ENTIRE_BLOCK,),
    blocks: str | Sequence[str] | None = None,
    repeats: int = 5,
    device_kind: DeviceKind = DeviceKind.CUDA,
) -> Workload:
    """Trace one iteration in which every block of ``student`` learns from the teacher's block of the same place.

    What of the student's blocks is learnt are their parameters with ``requires_grad``; ``keys_to_learn`` is what these
    are called.  ``loss`` gives a scalar from (student's output, teacher's output) of a block.  Everything else is as in
    ``trace``: models on the meta device are traced with fake tensors, real ones are run, timed and left as they were.
    Raises WorkloadError if the models cannot be traced, or do not belong together.
    """
    count_samples_and_tokens(batch)
    pairs = Pairs(teacher, student, loss, blocks=blocks)
    check_pairs(pairs)
    is_fake = any(parameter.is_meta for parameter in pairs.parameters())
    with pairs.learning():
        if is_fake:
            seen = _observe_fake(pairs, batch, blocks, device_kind)
            seconds = None
        else:
            with left_as_found(pairs):
                seen = _observe(pairs, batch, passes=2)
                seconds = _time(pairs, batch, repeats) if repeats > 0 else None
        described = _described(pairs, seen, traced_with="fake" if is_fake else "real")
        assembled = partial(assemble_pairs, described, loss=name_of_loss(loss), keys_to_learn=keys_to_learn)

        def again(values: Batch, forced: ForcedChoices | None) -> tuple[Workload, ValueWatch]:
            with left_as_found(pairs):
                run = _observe(pairs, values, passes=1, forced=forced)
            return assembled(_shape(pairs, values, run)), run.values

        found = assembled(
            _shape(pairs, batch, seen),
            seconds=seconds,
            measured_on=device_description(next(teacher.parameters()).device) if seconds is not None else None,
        )
        return found if is_fake else with_other_values(found, seen.values, batch, again)


def check_pairs(pairs: Pairs) -> None:
    """Raise WorkloadError unless both models can be traced, and PlanError if a plan is being carried out on one."""
    for model in (pairs.teacher, pairs.student):
        check_untaken(model)
        refuse_quantized(model, "a distillation runs both models unpacked", "Load it unpacked.")
        if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
            raise WorkloadError(
                f"{type(model).__name__} checkpoints activations itself. Call model.gradient_checkpointing_disable(): "
                f"a student's backward follows its forward at once, so that nothing is saved for long."
            )
    unknown = {str(p.dtype) for p in pairs.parameters()} - {f"torch.{dtype}" for dtype in DType}
    if unknown:
        raise WorkloadError(f"parameters of dtype {', '.join(sorted(unknown))} are not supported.")
    wrong = compiled_part(pairs) or overlap_of(pairs) or unkept_strides(pairs)
    if wrong is not None:
        raise WorkloadError(wrong)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What metered iterations have shown."""

    sections: dict[PhaseKey, Observation]
    kept_bytes: dict[int | None, int]
    """``SeenIterations.kept_bytes``"""
    late_bytes: dict[int, int]
    """``Beside.late_bytes``"""
    uses: dict[str, SeenUses]
    block_names: tuple[str, ...]
    """Of the observed blocks."""
    stands_for: tuple[int, ...]
    """For every block of the pairs, the observed one that does the same."""
    values: ValueWatch
    """Which blocks' memory may depend on values."""


def _observe(
    pairs: Pairs,
    batch: Batch,
    *,
    passes: int,
    held: Sequence[torch.Tensor] = (),
    stands_for: Sequence[int] | None = None,
    forced: ForcedChoices | None = None,
) -> _Seen:
    """Metered iterations, the last of which counts; as many as ``observe_sections`` runs of a model."""
    blocks = pairs.blocks
    ledger = MemoryLedger(device_type=next(pairs.parameters()).device.type)
    lasting = [*pairs.parameters(), *pairs.buffers(), *batch_tensors(batch).values()]
    ledger.adopt(lasting)
    ledger.adopt(kept_tensors(pairs.modules()))
    observer = SectionObserver(ledger, pairs)
    ledger.place = observer.place
    if forced is not None:
        forced.place = observer.place
    beside = Beside(ledger, observer.place)
    outputs = OutputSizes(pairs, pairs.blocks)
    pairs.listener = observer
    try:
        for number in count(1):
            observer.restart()
            beside.restart()
            before_bytes = ledger.watched_bytes
            with forced or nullcontext(), ledger.metering(), GivenParameters(observer):
                _run(pairs, batch)
            for parameter in pairs.parameters():
                parameter.grad = None
            if number >= passes and has_settled(ledger, pairs, before_bytes, number):
                break
        kept_bytes = kept_beside(ledger, [*lasting, *pairs.buffers(), *held], blocks)
    finally:
        pairs.listener = None
        observer.remove()
        outputs.remove()
    for index, size_bytes in enumerate(outputs.sizes):
        kind = TaskKind.FORWARD if index % 2 else TaskKind.TEACHER_FORWARD
        observer.sections[kind, BlockId(index)].output_bytes = size_bytes
    return _Seen(
        beside.counted_with_students(observer.sections),
        kept_bytes,
        beside.late_bytes,
        observer.uses,
        tuple(block.name for block in blocks),
        tuple(range(len(blocks)) if stands_for is None else stands_for),
        observer.values,
    )


def _run(pairs: Pairs, batch: Batch) -> None:
    """One forward of the pairs.  Raises WorkloadError if a model refuses what it is given."""
    try:
        call_model(pairs, batch)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, (ProtwinError, torch.OutOfMemoryError)):
            raise
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in batch_shapes(batch).items())
        raise WorkloadError(
            f"{_name_of(pairs.student)} beside {_name_of(pairs.teacher)} cannot run on the batch ({shapes}): "
            f"{type(error).__name__}: {' '.join(str(error).split())}. A student's blocks take what the teacher's do, "
            f"in the same element type or under autocast."
        ) from error


def _observe_fake(pairs: Pairs, batch: Batch, blocks: str | Sequence[str] | None, device_kind: DeviceKind) -> _Seen:
    """The same of fake twins of both models."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    teacher, student = (fake_model(model, mode) for model in (pairs.teacher, pairs.student))
    twin = Pairs(teacher, student, pairs.loss, blocks=blocks)
    stands_for = None
    kept = keep_alike([(teacher, twin.teacher_blocks), (student, twin.student_blocks)])
    if kept is not None:
        stands_for = [2 * place + one for place in kept[0] for one in (0, 1)]
        twin = Pairs(teacher, student, pairs.loss, blocks=kept[1])

    def observe(with_values: bool) -> _Seen:
        given = fake_batch(batch, mode, with_values=with_values)
        with (
            running_fakes(mode, with_values=with_values, is_cuda=device_kind is DeviceKind.CUDA),
            RefusingMixedTypes(),
            left_as_found(twin),
            attributes_as_found(twin) as held,
            twin.learning(),
        ):
            return _observe(twin, given, passes=1, held=held, stands_for=stands_for)

    with wanted_values_named(twin, batch):
        return with_values_if_wanted(batch, observe)


def _time(pairs: Pairs, batch: Batch, repeats: int) -> dict[PhaseKey, float]:
    """Median seconds of every section, with nobody watching memory."""
    runs = []
    for _ in range(WARM_UP_ITERATIONS + repeats):
        pairs.listener = stopwatch = stopwatch_on(next(pairs.parameters()).device)
        try:
            call_model(pairs, batch)
        finally:
            pairs.listener = None
            for parameter in pairs.parameters():
                parameter.grad = None
        runs.append(stopwatch.seconds())
    return medians_of(runs)


def _described(pairs: Pairs, seen: _Seen, *, traced_with: str) -> TracedModel:
    blocks = pairs.blocks
    uses = TracedUses(seen.uses, seen.block_names, seen.stands_for)
    parameters = _needed(describe_parameters(pairs, blocks, uses), seen, [block.name for block in blocks])
    return TracedModel(
        model_name=f"{_name_of(pairs.student)} beside {_name_of(pairs.teacher)}",
        model_hash=model_hash(pairs),
        compute_dtype=compute_dtype(parameters),
        parameters=parameters,
        block_names=tuple(block.name for block in blocks),
        stands_for=seen.stands_for,
        traced_with=traced_with,
        software=software_versions(),
    )


def _name_of(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


def _needed(parameters: Sequence[Parameter], seen: _Seen, blocks: Sequence[str]) -> tuple[Parameter, ...]:
    """Those of blocks, and what the teacher uses outside of them: norms, heads and the student's ends never run."""

    def is_needed(parameter: Parameter) -> bool:
        names = (parameter.name, *parameter.aliases)
        in_block = any(name.startswith(f"{block}.") for block in blocks for name in names)
        return in_block or any(
            name in seen.uses and (seen.uses[name].forward or seen.uses[name].backward) for name in names
        )

    return tuple(parameter for parameter in parameters if is_needed(parameter))


def _shape(pairs: Pairs, batch: Batch, seen: _Seen) -> TracedShape:
    num_samples, num_tokens = count_samples_and_tokens(batch)
    lasting = {id(tensor): tensor for tensor in (*pairs.buffers(), *batch_tensors(batch).values())}
    lasting_bytes = sum(tensor.numel() * tensor.element_size() for tensor in lasting.values())
    # What the teacher collects over its blocks counts as if it were there all the time, beside the outputs of pairs.
    of_blocks = (seen.kept_bytes.get(block, 0) + seen.late_bytes.get(block, 0) for block in seen.stands_for)
    kept_bytes = seen.kept_bytes.get(None, 0) + sum(of_blocks)
    return TracedShape(
        batch_shapes=batch_shapes(batch),
        num_samples=num_samples,
        num_tokens=num_tokens,
        resident_bytes=lasting_bytes + kept_bytes + _ALIVE * _LOSS_BYTES * pairs.num_pairs,
        observed={ActivationMode.KEEP: seen.sections},
    )
