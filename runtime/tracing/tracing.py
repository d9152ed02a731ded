"""From a model and a batch to a Workload: what every section does, in either activation mode, and how long it takes.

The model's own iteration runs under the memory ledger with the hooks that the runtime uses, once with every block in
mode KEEP and once with every block in mode CHECKPOINT, so that what is traced is what will run.  Real tensors are then
timed without the ledger; fake tensors (a model on the meta device) have no times, and the simulator uses a roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ...shared.basics.errors import ScheduleError
from ...shared.families.variants import (
    checked_sequence_ranks,
    checked_tiles,
    with_loss_tilings,
    with_sharings,
    with_tilings,
)
from ...shared.observed.assembly import TracedModel, assemble
from ...shared.observed.lowered import AS_TRACED, Lowering, lowered
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.phases.packing import Packing
from ...shared.phases.tiling import LossHead, checked_loss_head
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import ActivationMode
from ...shared.schema.workload import Compiled, Float8, Float8Gather, KernelPackage, Workload
from ..data.packed_batches import packing_of_batch, samples_apart
from ..devices.device import device_description
from ..fakes.known_values import looks_at_values
from ..hooks.row_reads import agreed
from ..model.batches import Batch, BatchRefusedError, Loss, count_samples_and_tokens
from ..model.blocks import NamedBlock, find_blocks
from ..model.ownership import check_untaken
from ..model.snapshot import left_as_found
from ..packaged.substitution import asked_packages, check_taken, kernels_of_packages
from ..quantized.states import products_of, with_states
from ..routing.forced_choices import ForcedChoices
from ..routing.tried import with_other_values
from ..routing.value_dependence import ValueWatch
from ..sequences.sharing import check_shared, one_of_ranks
from ..tiles.fused_loss import check_loss_head, loss_as
from ..tiles.loss_installing import final_of_loss, loss_tile_counts, tiled_loss
from ..tiles.mlp_modules import Mlps, find_mlps, in_tiles, modules_of, names_of
from .block_order import blocks_as_run
from .facts import TRACED_MODES, Seen, traced_model, traced_shape, uses_of, values_of
from .fake_subject import FakeSubject
from .observing import observe_sections
from .progress import OnProgress, Progress, parts_of
from .stopwatch import WARM_UP_ITERATIONS, time_sections
from .traceable import check_traceable


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
    keeps_outputs: bool = False,
    compiled: Compiled | str | None = None,
    float8: Float8 | str | None = None,
    float8_gather: Float8Gather | str | None = None,
    kernels: Sequence[KernelPackage | str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Trace one training iteration of ``model`` on ``batch``.

    A model with real weights is run and timed (``repeats`` iterations in each activation mode; 0 for none).  Its
    gradients, buffers, settings and the random states are then bit for bit what they were; parameters and Python
    attributes that its own forward writes are not put back.  A model on the meta device is traced with fake
    tensors: no memory, no times.  ``loss`` gives the scalar loss from (output, batch) where the model does not;
    ``blocks`` names the blocks where they are not found, a module that runs several times as often; ``device_kind``
    is what a model on the meta device is to train on, where that decides which kernels run and what autocast casts
    (``fakes/``); ``mlp_tiles``: numbers of tiles of tokens that MLPs of blocks may run in, each traced once more;
    ``mlp_modules``: patterns of their paths (``"*.mlp"``) where they are not found (``find_mlps``); ``loss_tiles``:
    numbers of tiles that head and loss may run in, each traced once more; ``loss_head``: ``"eager"``, or
    ``"fused"``, where the gradient of whole logits takes their place; ``sequence_ranks``: numbers of ranks that may
    share each sequence, each traced once more, tiles too, as one of these ranks runs, with what others would send
    it made up.  ``packing``, of a model on the meta device: the samples of each row, which its attention kernel is
    told; without it they are read off the batch.  ``keeps_outputs``: whether the loop holds what the model gives until
    the next micro-batch's is there, as ``outputs = model(**batch)`` does: its logits lie on the device meanwhile.  The
    rest is of a model on the meta device, for predictions alone:
    what others' programs compile, ``compiled`` (``"blocks"``, ``"model"``), multiply in, ``float8`` (``"tensorwise"``,
    ``"rowwise"``, ``"delayed"``), and gather so by FSDP2, ``float8_gather`` (``"precomputed"``, ``"dynamic"``); and
    ``kernels``, packages that the machine that trains has, whose kernels the model calls
    (``"flash-linear-attention"``, ``"mamba-ssm"``, ``"causal-conv1d"``).  Raises WorkloadError if the model cannot be
    traced, or the batch mixes packed samples, PlanError if its loss cannot be computed by tiles, or ranks cannot share
    its sequences.
    """
    check_traceable(model, batch, loss)
    _, num_tokens = count_samples_and_tokens(batch, model)
    check_untaken(model)
    mlp_counts, loss_counts = checked_tiles(mlp_tiles, num_tokens), loss_tile_counts(loss_tiles, loss)
    shared_counts = checked_sequence_ranks(sequence_ranks)
    made = checked_loss_head(loss_head, shared_counts)
    check_loss_head(model, made, loss)
    check_shared(model, batch, loss, shared_counts)
    is_run = not any(parameter.is_meta for parameter in model.parameters())
    packages = asked_packages(kernels, is_run=is_run, device_kind=device_kind)
    lowering = Lowering.asked(compiled, float8, float8_gather, is_run=is_run, is_shared=bool(shared_counts))
    reports = parts_of(on_progress, (1 + len(mlp_counts) + len(loss_counts)) * (1 + len(shared_counts)))
    packing_of_batch(model, batch)

    def traced(names: str | Sequence[str] | None) -> Workload:
        named, report = find_blocks(model, names), iter(reports)
        mlps = find_mlps(named, mlp_modules) if mlp_counts else ()

        def traced_among(num_ranks: int) -> Workload:
            asked = _Asked(
                model, batch, loss, repeats, name, device_kind, packing, num_ranks, made, lowering, keeps_outputs
            )
            found = asked.traced(names, next(report))
            if mlp_counts:
                counts = checked_tiles(mlp_counts, num_tokens // num_ranks)
                in_tiles = {n: asked.traced(names, next(report), mlps, mlp_tiles=n) for n in counts}
                found = with_tilings(found, in_tiles, names_of(named, mlps))
            return with_loss_tilings(found, {n: asked.traced(names, next(report), loss_tiles=n) for n in loss_counts})

        with kernels_of_packages(model, packages, is_run=is_run) as called:
            alone = traced_among(1)
            found = with_sharings(alone, {number: traced_among(number) for number in shared_counts})
        check_taken(packages, called, type(model).__name__)
        update = {
            "packed_products": products_of(model),
            "kernels_left_out": tuple(sorted(called.left_out)),
            "kernels_taken": tuple(sorted(called.taken)),
        }
        return found.model_copy(update=update)

    try:
        return traced(blocks)
    except ScheduleError as refused:
        named = find_blocks(model, blocks)
        try:
            order = blocks_as_run(model, batch, loss, named)
        except BatchRefusedError as of_the_model:
            # Blocks ran in another order before the model came to refuse the batch; asking for values refuses none.
            raise (refused if looks_at_values(of_the_model) else of_the_model) from None
        except RuntimeError:
            raise refused from None  # it cannot be copied, with tensors that the iteration left
        # Blocks that are named run as they are named, or more often.
        if order is None or (blocks is not None and len(order) <= len(named)):
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
    keeps_outputs: bool = False

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
            subject.keeps_outputs = self.keeps_outputs
            subject.sequence_ranks = self.sequence_ranks
            with subject.in_tiles(mlps, mlp_tiles):
                subject.packing = self.packing or packing_of_batch(model, batch)
                with samples_apart(model, batch, subject.packing):
                    shape = lowered(subject.at(batch, loss, on_progress), self.lowering)
            return assemble(traced_as(subject.uses, traced_with="fake", row_lookups=subject.row_lookups), shape)
        loop = _Loop(model, loss, named, self.keeps_outputs)
        with (
            in_tiles(modules_of(named, mlps), mlp_tiles),
            tiled_loss(model, loss_tiles, final_of_loss(model, named, loss_tiles)),
            loss_as(model, loss_head),
            one_of_ranks(model, self.sequence_ranks),
        ):
            packing = packing_of_batch(model, batch)
            with samples_apart(model, batch, packing):
                seen, seconds = loop.observe_and_time(batch, self.repeats, on_progress)
            described = traced_as(
                uses_of(seen, named, range(len(named))),
                traced_with="real",
                row_lookups=agreed({iterations.row_lookups for iterations in seen.values()}),
            )
            found = assemble(
                described,
                replace(
                    traced_shape(model, batch, seen, range(len(named))),
                    packing=packing,
                    sequence_ranks=self.sequence_ranks,
                    loss_head=loss_head,
                    keeps_outputs=self.keeps_outputs,
                ),
                seconds=seconds,
                measured_on=device_description(next(model.parameters()).device) if self.repeats > 0 else None,
            )
            return loop.with_other_values(found, described, seen, batch)


@dataclass(frozen=True, slots=True)
class _Loop:
    """The plain loop that is watched, whatever its batch."""

    model: nn.Module
    loss: Loss | None
    blocks: Sequence[NamedBlock]
    keeps_outputs: bool

    def observe(
        self,
        batch: Batch,
        on_iteration: Callable[[], None],
        *,
        passes: int,
        forced: ForcedChoices | None = None,
    ) -> Seen:
        """Its iterations on ``batch``, in every mode."""
        return {
            mode: observe_sections(
                self.model,
                batch,
                self.loss,
                self.blocks,
                mode,
                on_iteration,
                passes=passes,
                forced=forced,
                keeps_outputs=self.keeps_outputs,
            )
            for mode in TRACED_MODES
        }

    def observe_and_time(
        self, batch: Batch, repeats: int, on_progress: Callable[[int, int], None] | None
    ) -> tuple[Seen, dict[ActivationMode, dict[PhaseKey, float]]]:
        """The same, and medians of seconds over so many iterations more in every mode; of 0 none."""
        progress = Progress(len(TRACED_MODES) * (2 + (repeats + WARM_UP_ITERATIONS if repeats else 0)), on_progress)
        with left_as_found(self.model):
            seen = self.observe(batch, progress.advance, passes=2)
            seconds: dict[ActivationMode, dict[PhaseKey, float]] = {}
            if repeats > 0:
                seconds = time_sections(
                    self.model, batch, self.loss, self.blocks, TRACED_MODES, repeats, progress.advance
                )
        return seen, seconds

    def with_other_values(self, found: Workload, described: TracedModel, seen: Seen, batch: Batch) -> Workload:
        """``found`` with the worst memory of blocks whose memory depends on values."""

        def again(values: Batch, forced: ForcedChoices | None) -> tuple[Workload, ValueWatch]:
            with left_as_found(self.model):
                run = self.observe(values, lambda: None, passes=1, forced=forced)
            shape = traced_shape(self.model, values, run, range(len(self.blocks)))
            return assemble(described, shape), values_of(run)

        return with_other_values(found, values_of(seen), batch, again)
