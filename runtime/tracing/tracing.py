"""From a model and a batch to a Workload: what every section does, in either activation mode, and how long it takes.

The model's own iteration runs under the memory ledger with the hooks that the runtime uses, once with every block in
mode KEEP and once with every block in mode CHECKPOINT, so that what is traced is what will run.  Real tensors are then
timed without the ledger; fake tensors (a model on the meta device) have no times, and the simulator uses a roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import ScheduleError, WorkloadError
from ...shared.families.variants import (
    checked_sequence_ranks,
    checked_tiles,
    with_loss_tilings,
    with_sharings,
    with_tilings,
)
from ...shared.observed.assembly import TracedModel, TracedShape, assemble
from ...shared.observed.lowered import AS_TRACED, Lowering, lowered
from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.observed.packed import attending_within_samples
from ...shared.phases.packing import Packing
from ...shared.phases.tiling import LossHead, checked_loss_head
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import OuterSection, TaskKind
from ...shared.schema.workload import BlockId, Compiled, Float8, Workload
from ..data.packed_batches import is_told_ends, packing_of_batch, samples_apart
from ..devices.device import device_description
from ..hooks.row_reads import agreed
from ..model.batches import Batch, BatchRefusedError, Loss, batch_shapes, batch_tensors, count_samples_and_tokens
from ..model.blocks import NamedBlock, find_blocks
from ..model.identity import model_hash, software_versions
from ..model.kept_tensors import attributes_as_found
from ..model.ownership import check_untaken
from ..model.parameters import SeenUses, TracedUses, compute_dtype, describe_parameters
from ..model.snapshot import left_as_found
from ..osft.subspaces import described_subspaces
from ..quantized.states import described, products_of, with_states
from ..routing.forced_choices import ForcedChoices
from ..routing.tried import with_other_values
from ..routing.value_dependence import ValueWatch, joined
from ..sequences.sharing import check_shared, one_of_ranks
from ..tiles.fused_loss import check_loss_head, loss_as
from ..tiles.loss_installing import final_of_loss, loss_tile_counts, tiled_loss
from ..tiles.mlp_modules import Mlps, find_mlps, in_tiles, modules_of, names_of
from .block_inputs import shared_inputs, staying_inputs
from .block_order import blocks_as_run
from .cuda_autocast import autocast_as_on_cuda
from .fake import fake_batch, fake_model, keep_representatives, plain_batches
from .fake_kernels import FakeGroupedProducts, kernels_of_cuda
from .known_values import values_known, with_values_if_wanted
from .observing import SeenIterations, most_kept_bytes, observe_sections
from .progress import OnProgress, Progress, parts_of
from .stopwatch import WARM_UP_ITERATIONS, time_sections
from .traceable import check_traceable

TRACED_MODES: Final = (ActivationMode.KEEP, ActivationMode.CHECKPOINT)
"""SWAP computes what KEEP does; how much of it can travel is counted along with it."""
_Seen = dict[ActivationMode, SeenIterations]


@with_states
def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    blocks: str | Sequence[str] | None = None,
    repeats: int = 5,
    name: str | None = None,
    device_kind: DeviceKind = DeviceKind.CUDA,
    mlp_tiles: int | Sequence[int] = (),
    mlp_modules: str | Sequence[str] | None = None,
    loss_tiles: int | Sequence[int] = (),
    loss_head: LossHead | str = LossHead.EAGER,
    sequence_ranks: int | Sequence[int] = (),
    packing: Packing | None = None,
    compiled: Compiled | str | None = None,
    float8: Float8 | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Trace one training iteration of ``model`` on ``batch``.

    A model with real weights is run and timed (``repeats`` iterations in each activation mode; 0 for none).  Its
    gradients, buffers, settings and the random states are then bit for bit what they were; parameters and Python
    attributes that its own forward writes are not put back.  A model on the meta device is traced with fake tensors: no
    memory, no times.  ``loss`` gives the scalar loss from (output, batch) where the model does not; ``blocks`` names
    the blocks where they are not found; ``device_kind`` is what a model on the meta device is to train on, where that
    decides which kernels run (``fake_kernels.py``) and what autocast casts (``cuda_autocast.py``).  ``mlp_tiles``:
    numbers of tiles of tokens that MLPs of blocks may run in, each traced once more; ``mlp_modules``: patterns of their
    paths (``"*.mlp"``) where they are not found (``find_mlps``); ``loss_tiles``: numbers of tiles that head and loss
    may run in, each traced once more; ``loss_head``: ``"eager"``, or ``"fused"``, where the gradient of whole logits
    takes their place; ``sequence_ranks``: numbers of ranks that may share each sequence, each traced once more, tiles
    too, as one of these ranks runs, with what others would send it made up.  ``packing``, of a model on the meta
    device: the samples of each row, which its attention kernel is told; without it they are read off the batch.
    ``compiled`` (``"blocks"``, ``"model"``) and ``float8`` (``"tensorwise"``, ``"rowwise"``, ``"delayed"``), of a model
    on the meta device: what others' programs compile and multiply so, for predictions alone.  Raises WorkloadError if
    the model cannot be traced, or the batch mixes packed samples, PlanError if its loss cannot be computed by tiles, or
    ranks cannot share its sequences.
    """
    check_traceable(model, batch, loss)
    _, num_tokens = count_samples_and_tokens(batch)
    check_untaken(model)
    mlp_counts, loss_counts = checked_tiles(mlp_tiles, num_tokens), loss_tile_counts(loss_tiles, loss)
    shared_counts = checked_sequence_ranks(sequence_ranks)
    made = checked_loss_head(loss_head, shared_counts)
    check_loss_head(model, made, loss)
    check_shared(model, batch, loss, shared_counts)
    is_run = not any(parameter.is_meta for parameter in model.parameters())
    lowering = Lowering.asked(compiled, float8, is_run=is_run, is_shared=bool(shared_counts))
    reports = parts_of(on_progress, (1 + len(mlp_counts) + len(loss_counts)) * (1 + len(shared_counts)))
    packing_of_batch(model, batch)

    def traced(names: str | Sequence[str] | None) -> Workload:
        named, report = find_blocks(model, names), iter(reports)
        mlps = find_mlps(named, mlp_modules) if mlp_counts else ()

        def traced_among(num_ranks: int) -> Workload:
            asked = _Asked(model, batch, loss, repeats, name, device_kind, packing, num_ranks, made, lowering)
            found = asked.traced(names, next(report))
            if mlp_counts:
                counts = checked_tiles(mlp_counts, num_tokens // num_ranks)
                in_tiles = {n: asked.traced(names, next(report), mlps, mlp_tiles=n) for n in counts}
                found = with_tilings(found, in_tiles, names_of(named, mlps))
            return with_loss_tilings(found, {n: asked.traced(names, next(report), loss_tiles=n) for n in loss_counts})

        alone = traced_among(1).model_copy(update={"packed_products": products_of(model)})
        return with_sharings(alone, {number: traced_among(number) for number in shared_counts})

    try:
        return traced(blocks)
    except ScheduleError as refused:
        if blocks is not None:
            raise
        try:
            order = blocks_as_run(model, batch, loss, find_blocks(model))
        except (RuntimeError, BatchRefusedError):
            raise refused from None  # it cannot be copied, with tensors that the iteration left, or asks for values
        if order is None:
            raise
    return traced(order)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What ``trace`` was asked for."""

    model: nn.Module
    batch: Batch
    loss: Loss | None
    repeats: int
    name: str | None
    device_kind: DeviceKind
    packing: Packing | None
    sequence_ranks: int = 1
    loss_head: LossHead = LossHead.EAGER
    lowering: Lowering = AS_TRACED

    def traced(
        self,
        names: str | Sequence[str] | None,
        on_progress: OnProgress | None,
        mlps: Mlps = (),
        *,
        mlp_tiles: int = 1,
        loss_tiles: int = 1,
    ) -> Workload:
        """The workload of the model, or of one whose MLPs, or whose head and loss, run in so many tiles.

        ``names``: of its blocks.
        """
        model, batch, loss = self.model, self.batch, self.loss
        named = find_blocks(model, names)
        loss_head = self.loss_head if loss_tiles == 1 else LossHead.EAGER
        traced_as = partial(traced_model, model, named, name=self.name)
        if any(parameter.is_meta for parameter in model.parameters()):
            subject = FakeSubject(model, names, device_kind=self.device_kind, loss_tiles=loss_tiles)
            subject.loss_head = loss_head
            subject.sequence_ranks = self.sequence_ranks
            with subject.in_tiles(mlps, mlp_tiles):
                subject.packing = self.packing or packing_of_batch(model, batch)
                with samples_apart(model, batch, subject.packing):
                    shape = lowered(subject.at(batch, loss, on_progress), self.lowering)
            return assemble(traced_as(subject.uses, traced_with="fake", row_lookups=subject.row_lookups), shape)
        with (
            in_tiles(modules_of(named, mlps), mlp_tiles),
            tiled_loss(model, loss_tiles, final_of_loss(model, named, loss_tiles)),
            loss_as(model, loss_head),
            one_of_ranks(model, self.sequence_ranks),
        ):
            packing = packing_of_batch(model, batch)
            with samples_apart(model, batch, packing):
                seen, seconds = _observe_real(model, batch, loss, named, self.repeats, on_progress)
            described = traced_as(
                _uses_of(seen, named, range(len(named))),
                traced_with="real",
                row_lookups=agreed({iterations.row_lookups for iterations in seen.values()}),
            )
            found = assemble(
                described,
                replace(
                    _traced_shape(model, batch, seen, range(len(named))),
                    packing=packing,
                    sequence_ranks=self.sequence_ranks,
                    loss_head=loss_head,
                ),
                seconds=seconds,
                measured_on=device_description(next(model.parameters()).device) if self.repeats > 0 else None,
            )
            return _with_other_values(found, described, seen, model, batch, loss, named)


def traced_model(
    model: nn.Module,
    blocks: Sequence[NamedBlock],
    uses: TracedUses,
    *,
    name: str | None,
    traced_with: str,
    row_lookups: tuple[str, ...] = (),
) -> TracedModel:
    """What is said of a model at every shape."""
    parameters = described(model, describe_parameters(model, blocks, uses))
    parameters, subspaces = described_subspaces(model, parameters)
    return TracedModel(
        model_name=name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        model_hash=model_hash(model),
        compute_dtype=compute_dtype(parameters),
        parameters=parameters,
        subspaces=subspaces,
        block_names=tuple(block.name for block in blocks),
        stands_for=tuple(uses.stands_for),
        traced_with=traced_with,
        software=software_versions(),
        row_lookups=row_lookups,
    )


class FakeSubject:
    """A model on the meta device as a trace runs it: fake tensors, and few blocks in place of many equal ones."""

    def __init__(
        self,
        model: nn.Module,
        names: str | Sequence[str] | None = None,
        *,
        device_kind: DeviceKind = DeviceKind.CUDA,
        loss_tiles: int = 1,
    ) -> None:
        self._model = model
        self._loss_tiles = loss_tiles
        self._device_kind = device_kind
        self._mode = FakeTensorMode()
        self._twin = fake_model(model, self._mode)
        blocks = find_blocks(self._twin, names)
        kept = keep_representatives(self._twin, blocks)
        stands_for, remaining = kept if kept is not None else (list(range(len(blocks))), None)
        self._blocks = blocks if remaining is None else find_blocks(self._twin, remaining)
        self._final = final_of_loss(self._twin, self._blocks, loss_tiles)
        self.stands_for = stands_for
        """For every block of the model, the one that is observed for it."""
        self.packing: Packing | None = None
        """How samples lie in the rows of the next batches."""
        self.sequence_ranks = 1
        """Ranks that share each sequence of the next batches, of which it is one."""
        self.loss_head = LossHead.EAGER
        """How the loss is made of hidden states."""
        self._seen: dict[str, SeenUses] = {}
        self._lookups: set[tuple[str, ...]] = set()

    @property
    def row_lookups(self) -> tuple[str, ...]:
        """``TracedModel.row_lookups``, if all that was traced so far agrees."""
        return agreed(self._lookups)

    @contextmanager
    def in_tiles(self, mlps: Mlps, mlp_tiles: int) -> Iterator[None]:
        """Within the block, MLPs of the model (``find_mlps``) run in so many tiles.

        Raises WorkloadError if of two blocks, one of which is observed for both, not the same parts are MLPs.
        """
        observed = dict(zip(self.stands_for, mlps, strict=True)) if mlps else {}
        if any(observed[of] != paths for of, paths in zip(self.stands_for, mlps, strict=False)):
            raise WorkloadError("mlp_modules: equal blocks have other MLPs each. Name the same parts of all of them.")
        modules = modules_of(self._blocks, self._paths_in_blocks(observed) if mlps else ())
        with in_tiles(modules, mlp_tiles):
            yield

    def _paths_in_blocks(self, observed: Mapping[int, tuple[str, ...]]) -> Mlps:
        """Of every block that runs.  One that stands for none but its neighbours' sake has those of a block like it."""
        found = []
        for place, block in enumerate(self._blocks):
            own = {path for path, _ in block.module.named_modules()}
            found.append(observed.get(place) or next(paths for paths in observed.values() if own.issuperset(paths)))
        return tuple(found)

    @property
    def uses(self) -> TracedUses:
        """Who used each parameter, in all that was traced so far."""
        return TracedUses(self._seen, [block.name for block in self._blocks], self.stands_for)

    def at(
        self, batch: Batch, loss: Loss | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> TracedShape:
        """What one iteration on a batch of this shape does.

        A model that looks at what the batch holds is run again with the values of its integers; attention that is told
        where samples end needs them anyway.
        """
        if is_told_ends(self._model, batch):
            return self._at(batch, loss, on_progress, with_values=True)
        return with_values_if_wanted(batch, lambda with_values: self._at(batch, loss, on_progress, with_values))

    def _at(
        self, batch: Batch, loss: Loss | None, on_progress: Callable[[int, int], None] | None, with_values: bool
    ) -> TracedShape:
        progress = Progress(len(TRACED_MODES), on_progress)
        given = fake_batch(batch, self._mode, with_values=with_values)
        is_cuda = self._device_kind is DeviceKind.CUDA
        with (
            values_known(self._mode) if with_values else self._mode,
            FakeGroupedProducts(),
            kernels_of_cuda() if is_cuda else nullcontext(),
            autocast_as_on_cuda() if is_cuda else nullcontext(),
            plain_batches(self.packing),
            left_as_found(self._twin),
            attributes_as_found(self._twin) as held,
            tiled_loss(self._twin, self._loss_tiles, self._final),
            loss_as(self._twin, self.loss_head),
            one_of_ranks(self._twin, self.sequence_ranks),
        ):
            observe = partial(observe_sections, self._twin, given, loss, self._blocks, passes=1, held=held)
            seen = {mode: observe(mode, progress.advance) for mode in TRACED_MODES}
        _join_uses(self._seen, seen)
        self._lookups.update(iterations.row_lookups for iterations in seen.values())
        shape = replace(
            _traced_shape(self._model, batch, seen, self.stands_for),
            sequence_ranks=self.sequence_ranks,
            loss_head=self.loss_head,
        )
        return _packed(shape, self.packing, self._model)


def _observe_real(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    repeats: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[_Seen, dict[ActivationMode, dict[PhaseKey, float]]]:
    progress = Progress(len(TRACED_MODES) * (2 + (repeats + WARM_UP_ITERATIONS if repeats else 0)), on_progress)
    with left_as_found(model):
        seen = _observe_modes(model, batch, loss, blocks, progress.advance, passes=2)
        seconds: dict[ActivationMode, dict[PhaseKey, float]] = {}
        if repeats > 0:
            seconds = time_sections(model, batch, loss, blocks, TRACED_MODES, repeats, progress.advance)
    return seen, seconds


def _observe_modes(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    on_iteration: Callable[[], None],
    *,
    passes: int,
    forced: ForcedChoices | None = None,
) -> _Seen:
    return {
        mode: observe_sections(model, batch, loss, blocks, mode, on_iteration, passes=passes, forced=forced)
        for mode in TRACED_MODES
    }


def _with_other_values(
    found: Workload,
    described: TracedModel,
    seen: _Seen,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
) -> Workload:
    """``found`` with the worst memory of blocks whose memory depends on values."""

    def again(values: Batch, forced: ForcedChoices | None) -> tuple[Workload, ValueWatch]:
        with left_as_found(model):
            run = _observe_modes(model, values, loss, blocks, lambda: None, passes=1, forced=forced)
        return assemble(described, _traced_shape(model, values, run, range(len(blocks)))), _values_of(run)

    return with_other_values(found, _values_of(seen), batch, again)


def _values_of(seen: _Seen) -> ValueWatch:
    """Which blocks' memory may depend on values, in either mode."""
    return joined(iterations.values for iterations in seen.values())


def _traced_shape(model: nn.Module, batch: Batch, seen: _Seen, stands_for: Sequence[int]) -> TracedShape:
    num_samples, num_tokens = count_samples_and_tokens(batch)
    kept, again = seen[ActivationMode.KEEP], seen[ActivationMode.CHECKPOINT]
    shared = shared_inputs(kept.given, again.given, stands_for)
    return TracedShape(
        batch_shapes=batch_shapes(batch),
        num_samples=num_samples,
        num_tokens=num_tokens,
        resident_bytes=_resident_bytes(model, batch) + most_kept_bytes(seen.values(), stands_for),
        observed=_casts_until_backward(seen),
        shared_inputs=shared,
        staying_inputs=staying_inputs((kept.given, again.given), again.output_bytes, shared, stands_for),
    )


def _packed(shape: TracedShape, packing: Packing | None, model: nn.Module) -> TracedShape:
    """``shape`` with the lengths that attention is told, where it is; masked rows were traced as they run."""
    if packing is None or packing.is_masked:
        return replace(shape, packing=packing)
    observed = attending_within_samples(shape.observed, packing, type(model).__name__)
    return replace(shape, packing=packing, observed=observed)


def _join_uses(joined: dict[str, SeenUses], seen: _Seen) -> None:
    """Add the uses that were seen in every mode."""
    for iterations in seen.values():
        for name, uses in iterations.uses.items():
            joined.setdefault(name, SeenUses()).join(uses)


def _uses_of(seen: _Seen, blocks: Sequence[NamedBlock], stands_for: Sequence[int]) -> TracedUses:
    joined: dict[str, SeenUses] = {}
    _join_uses(joined, seen)
    return TracedUses(joined, [block.name for block in blocks], stands_for)


def _resident_bytes(model: nn.Module, batch: Batch) -> int:
    tensors = [*model.buffers(), *batch_tensors(batch).values()]
    seen = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(seen.values())


def _casts_until_backward(seen: _Seen) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
    """Observations in which what checkpointed blocks leave until the model's forward ends goes with their backwards.

    Autocast keeps the casts of weights until then.  Blocks in another mode have them saved for their backward, so that
    the epilogue, of which there is one for all mixtures, frees none.  Were they freed nowhere, every micro-batch would
    add them to the account once more.  What the first block reads goes in the epilogue where blocks keep what they
    save, and with that block's backward where they are checkpointed: so the first one, which stands for no other, has
    what is left.  They come in the order in which autocast let go of them, which is none.
    """
    kept, again = (seen[mode] for mode in (ActivationMode.KEEP, ActivationMode.CHECKPOINT))
    sections = dict(again.sections)
    epilogue: PhaseKey = (TaskKind.FORWARD, OuterSection.EPILOGUE)
    more = {b: size - kept.outlived_bytes.get(b, 0) for b, size in again.outlived_bytes.items()}
    left_bytes = kept.sections[epilogue].net_bytes - sections[epilogue].net_bytes
    for block, size_bytes in sorted(more.items(), reverse=True):
        key: PhaseKey = (TaskKind.BACKWARD, BlockId(block))
        gone_bytes = max(0, min(size_bytes, left_bytes))
        sections[key] = replace(sections[key], end_bytes=sections[key].end_bytes - gone_bytes)
        left_bytes -= gone_bytes
    return {ActivationMode.KEEP: kept.sections, ActivationMode.CHECKPOINT: sections}
