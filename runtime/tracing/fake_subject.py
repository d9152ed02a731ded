"""A model without weights, as a trace runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import WorkloadError
from ...shared.observed.assembly import TracedShape
from ...shared.observed.packed import attending_within_samples
from ...shared.phases.packing import Packing
from ...shared.phases.tiling import LossHead
from ...shared.schema.hardware import DeviceKind
from ..data.packed_batches import is_told_ends
from ..fakes.known_values import with_values_if_wanted
from ..fakes.models import fake_batch, fake_model, keep_representatives
from ..fakes.running import running_fakes
from ..fakes.values_wanted import wanted_values_named
from ..hooks.row_reads import agreed
from ..model.batches import Batch, Loss
from ..model.blocks import find_blocks
from ..model.kept_tensors import attributes_as_found
from ..model.parameters import SeenUses, TracedUses
from ..model.snapshot import left_as_found
from ..sequences.sharing import one_of_ranks
from ..tiles.fused_loss import loss_as
from ..tiles.loss_installing import final_of_loss, tiled_loss
from ..tiles.mlp_modules import Mlps, in_tiles, modules_of
from ..tiles.passes import passes_spared
from .facts import TRACED_MODES, join_uses, traced_shape
from .observing import observe_sections
from .progress import Progress


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
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
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
        self.keeps_outputs = False
        """Whether the loop holds what the model gives."""
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
        where samples end needs them anyway.  Raises WorkloadError if it looks at others.
        """
        with wanted_values_named(self._twin, batch):
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
            running_fakes(self._mode, with_values=with_values, packing=self.packing, is_cuda=is_cuda),
            left_as_found(self._twin),
            attributes_as_found(self._twin) as held,
            tiled_loss(self._twin, self._loss_tiles, self._final),
            loss_as(self._twin, self.loss_head),
            one_of_ranks(self._twin, self.sequence_ranks),
            nullcontext() if with_values else passes_spared(),
        ):
            observe = partial(observe_sections, self._twin, given, loss, self._blocks, passes=1, held=held)
            keeps = self.keeps_outputs
            seen = {mode: observe(mode, progress.advance, keeps_outputs=keeps) for mode in TRACED_MODES}
        join_uses(self._seen, seen)
        self._lookups.update(iterations.row_lookups for iterations in seen.values())
        shape = replace(
            traced_shape(self._model, batch, seen, self.stands_for),
            sequence_ranks=self.sequence_ranks,
            loss_head=self.loss_head,
            keeps_outputs=self.keeps_outputs,
        )
        return _packed(shape, self.packing, self._model)


def _packed(shape: TracedShape, packing: Packing | None, model: nn.Module) -> TracedShape:
    """``shape`` with the lengths that attention is told, where it is; masked rows were traced as they run."""
    if packing is None or packing.is_masked:
        return replace(shape, packing=packing)
    observed = attending_within_samples(shape.observed, packing, type(model).__name__)
    return replace(shape, packing=packing, observed=observed)
