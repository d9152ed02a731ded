"""The model that a command is asked about, as its options describe it, in any shape of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...shared.basics.errors import ProtwinError, WorkloadError
from ...shared.catalogue.models import known_model
from ...shared.cli.loss_options import loss_tiles_of
from ...shared.cli.options import DTypeName, KeepsOutputs, MethodName, ModelName, PackedLengths, cache_folder, warn
from ...shared.cli.training_choice import KnownTraining, LoraChoice, TrainingChoice
from ...shared.schema.hardware import Device, Hardware
from ...shared.schema.plan import TrainingMethod
from ...shared.schema.training_options import QuantizationOptions, TrainingOptions
from ...shared.schema.workload import Compiled, Float8, Float8Gather, Workload
from ...shared.students.student import Student
from ...shared.workloads.check import check_method
from ...shared.workloads.source import (
    WorkloadRequest,
    is_saved_workload,
    resolve_workload,
    saved_sizes,
    untraced_workload,
)
from ..questions.in_tiles import AskedTiles, Tiles
from ..searching.request import GlobalBatch
from ..space.step_spec import check_shares
from .space_options import ProductKnobs

if TYPE_CHECKING:
    from ..questions.what_if_methods import MethodChange


def student_of(model: str, path: Path | None, method: TrainingMethod | None) -> Student | None:
    """What learns from ``model``: of the file ``path``, None where there is none.

    Raises ProtwinError if the file is none of a student's, if it goes with no method of that name, or if a method needs
    one: a saved workload of method bypass is that of a student already.
    """
    if path is None:
        if method is TrainingMethod.BYPASS and not is_saved_workload(model):
            raise WorkloadError(
                f"--method {method} trains a student of {model}, and nobody says which. Name its file with --student."
            )
        return None
    if method is TrainingMethod.FULL:
        raise WorkloadError(f"--method {method} trains the model itself. Leave --student out, or --method.")
    return Student.load(path)


class _NeedsTraceError(ProtwinError):
    """Nobody knows without a trace."""


@dataclass(frozen=True, kw_only=True)
class PredictedKnown(KnownTraining):
    """With what others' programs run, which is predicted alone."""

    compiled: Annotated[
        Compiled | None,
        typer.Option(
            "--compile",
            help="Predict the plan where torch.compile has compiled every block, the blocks and the loss (torchtitan's "
            "choice), or the whole model.  Protwin's runtime carries out no such plan.",
        ),
    ] = None
    float8: Annotated[
        Float8 | None,
        typer.Option(
            "--float8",
            help="Predict the plan where linear maps of blocks multiply in float8, scaled by tensors or rows (torchao, "
            "with --compile), or by the steps before (Transformer Engine).  Protwin's runtime carries out no such "
            "plan.",
        ),
    ] = None
    float8_gather: Annotated[
        Float8Gather | None,
        typer.Option(
            "--float8-gather",
            help="With --float8 tensorwise and --as fsdp2: weights are gathered in float8, with scales that the step "
            "finds of all at once (precomputed) or every gather of its own (dynamic).",
        ),
    ] = None
    release: Annotated[
        str | None,
        typer.Option(
            "--bitsandbytes",
            metavar="VERSION",
            help="Predict the plan with the products of this release of bitsandbytes (0.41.1): 4-bit maps keep their "
            "input until backward before 0.43.2, 8-bit maps always.  Protwin's runtime carries out no such plan.",
        ),
    ] = None
    packed_from: Annotated[
        str | None,
        typer.Option(
            "--packed-from",
            metavar="NAME",
            help="With --bitsandbytes: the element type that 4-bit weights had when they were packed, which they are "
            "unpacked to, and cast from, where maps compute in another one.",
        ),
    ] = None
    keeps_outputs: KeepsOutputs = False

    @property
    def quantized(self) -> QuantizationOptions | None:
        """How weights are packed, and whose products they have."""
        return self.packed.options(self.release, self.packed_from)

    def options(self, method: TrainingMethod | None) -> TrainingOptions:
        """How the model is trained, compiled and in float8."""
        computed = {"compiled": self.compiled, "float8": self.float8, "float8_gather": self.float8_gather}
        return super().options(method).model_copy(update=computed)

    def tiles(
        self,
        asked: ProductKnobs,
        *,
        at_any_length: bool = False,
        is_needed: bool = False,
    ) -> AskedTiles:
        """``AskedTiles.named``, where what is compiled, or in float8, runs whole unless tiles are named.

        ``is_needed``: tiles are worth a trace.  Raises what ``loss_tiles_of`` raises.
        """
        whole = [1] if self.compiled is not None or self.float8 is not None else None
        loss = loss_tiles_of(self.loss, asked.loss_tiles)
        found = AskedTiles.named(asked.mlp_tiles or whole, loss, at_any_length=at_any_length)
        return found.needed if is_needed else found


@dataclass(frozen=True, kw_only=True)
class PredictedTraining(PredictedKnown, TrainingChoice):
    """Of any model, traced where it has to be."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model as options name it; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    model: ModelName
    method: MethodName = None
    student: Annotated[
        Path | None,
        typer.Option("--student", metavar="FILE", help="What learns from the model, block by block (student.toml)."),
    ] = None
    packed_lengths: PackedLengths = None
    dtype: DTypeName = None

    @property
    def files(self) -> dict[str, str | Path | None]:
        """Files that it is read from, by what a message calls them."""
        return {"--model": self.model, "--student": self.student}

    def choice(
        self,
        training: PredictedTraining,
        machine: Hardware,
        *,
        batch_size: int | None,
        sequence_length: int | None,
        tiles: AskedTiles,
        sequence_ranks: Sequence[int] | None,
        has_cache: bool,
    ) -> ModelChoice:
        """The model as it is trained on a machine, with a batch."""
        return ModelChoice(
            name=self.model,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=self.dtype,
            training=training,
            device=machine.device,
            has_cache=has_cache,
            method=self.method,
            student_path=self.student,
            packed_lengths=self.packed_lengths,
            tiles=tiles,
            sequence_ranks=tuple(sequence_ranks or ()),
        )


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model, how it is trained, and the batch that it is asked about with."""

    name: str
    """Of the catalogue, or a file's."""
    batch_size: int | None
    """Samples per micro-batch."""
    sequence_length: int | None
    """Tokens per sample."""
    dtype: str | None
    training: PredictedTraining
    """How it is trained, as options say it."""
    device: Device
    """Decides the element type and the kernels."""
    has_cache: bool
    """Whether traced workloads are kept."""
    method: TrainingMethod | None = None
    """None: what the model and the student say."""
    student_path: Path | None = None
    """The file of what learns from the model; None: nothing does."""
    tiles: AskedTiles = field(default_factory=AskedTiles)
    """Numbers of tiles that the workload is to know."""
    sequence_ranks: Tiles = ()
    """Numbers of ranks that share each sequence, which it is to know too."""
    packed_lengths: str | None = None
    """Samples in each row, end to end; None: each row is one."""

    @property
    def has_shapes(self) -> bool:
        """Whether it can be asked about with other batches: a saved workload has one."""
        return not is_saved_workload(self.name)

    @property
    def is_known(self) -> bool:
        """Whether it is of the catalogue, so that nothing has to be traced."""
        if known_model(self.name) is None or self.student is None:
            is_shared = max(self.sequence_ranks, default=1) > 1
            return known_model(self.name) is not None and (not is_shared or self._is_untraced)
        return self._is_untraced

    @property
    def _is_untraced(self) -> bool:
        return self.untraced(1, self.sequence_length) is not None

    @cached_property
    def student(self) -> Student | None:
        """What learns from it.  Raises ProtwinError as ``student_of`` does."""
        return student_of(self.name, self.student_path, self.method)

    @property
    def options(self) -> TrainingOptions:
        """How it is trained.  Raises ProtwinError if its options make no sense together."""
        # A saved workload was traced as it was to be trained.
        method = (
            None
            if is_saved_workload(self.name) and self.training.subspaces.unfreeze_rank_ratio is None
            else self.method
        )
        return self.training.options(method)

    def workload(self) -> Workload:
        """What it does with the batch.  Raises what ``resolve_workload`` raises; WorkloadError of another method."""
        found = self._in_tiles(self.tiles)
        # Where the ratio leaves nothing to freeze, factors are trained as any other weights.
        return check_method(
            found, self.name, self.method if self.training.subspaces.unfreeze_rank_ratio is None else None
        )

    def _in_tiles(self, tiles: AskedTiles) -> Workload:
        is_one = self.batch_size is None and self.sequence_length is not None and self.has_shapes
        num_samples = 1 if is_one else self.batch_size

        def resolved(mlp_tiles: Tiles, loss_tiles: Tiles) -> Workload:
            asked = self._request(num_samples, self.sequence_length, mlp_tiles, loss_tiles)
            return resolve_workload(asked, cache=cache_folder() if self.has_cache else None, warn=warn)

        if not self.has_shapes or self.student is not None:
            return resolved(tiles.mlp or (), tiles.loss or ())
        return tiles.workload(
            num_samples,
            self.sequence_length,
            resolved,
            lambda mlp, loss: self._untraced(num_samples or 1, self.sequence_length, mlp, loss),
        )

    @property
    def with_needed_tiles(self) -> ModelChoice:
        """The same where nothing fits unless something runs in tiles."""
        return replace(self, tiles=self.tiles.needed)

    def at(self, batch_size: int | None, sequence_length: int | None) -> Workload:
        """What it does with another batch."""
        return replace(self, batch_size=batch_size, sequence_length=sequence_length).workload()

    def at_batch_size(self, batch_size: int) -> Workload:
        """What it does with more or fewer samples of the same length."""
        return self.at(batch_size, self.sequence_length)

    def at_sequence_length(self, sequence_length: int) -> Workload:
        """What it does with longer or shorter samples, one unless their number is given."""
        return self.at(self.batch_size or 1, sequence_length)

    def untraced_at_batch_size(self, batch_size: int) -> Workload | None:
        """The same where no trace is needed to know, with such tiles alone as need none; None where one is."""
        return self.untraced(batch_size, self.sequence_length)

    def untraced(self, batch_size: int, sequence_length: int | None) -> Workload | None:
        """What it does with another batch, where no trace is needed to know; None where one is."""

        def known(mlp_tiles: Tiles, loss_tiles: Tiles) -> Workload:
            found = self._untraced(batch_size, sequence_length, mlp_tiles, loss_tiles)
            if found is None:
                raise _NeedsTraceError("a trace is needed")
            return found

        if self.student is not None:
            return self._untraced(batch_size, sequence_length, (), ())
        try:
            return self.tiles.workload(
                batch_size,
                sequence_length,
                known,
                lambda mlp, loss: self._untraced(batch_size, sequence_length, mlp, loss),
            )
        except _NeedsTraceError:
            return None

    def _untraced(
        self, batch_size: int, sequence_length: int | None, mlp_tiles: Tiles, loss_tiles: Tiles
    ) -> Workload | None:
        return untraced_workload(self._request(batch_size, sequence_length, mlp_tiles, loss_tiles))

    def _request(
        self, batch_size: int | None, sequence_length: int | None, mlp_tiles: Tiles, loss_tiles: Tiles
    ) -> WorkloadRequest:
        return WorkloadRequest(
            self.name,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=self.dtype,
            options=self.options,
            device=self.device,
            student=self.student,
            packed_lengths=self.packed_lengths,
            mlp_tiles=mlp_tiles,
            loss_tiles=loss_tiles,
            sequence_ranks=self.sequence_ranks,
        )

    def global_batch(self, num_samples: int, num_ranks: int) -> GlobalBatch:
        """A batch of a step, with the one size that a saved workload has.

        Raises PlanError if the ranks cannot share it.
        """
        check_shares(num_samples, num_ranks)
        sizes = saved_sizes(self.name, num_samples, num_ranks)
        return GlobalBatch(num_samples=num_samples, workload_at=self.at_batch_size, micro_batch_sizes=sizes)

    def changed(self, change: MethodChange) -> ModelChoice:
        """The model with another method, where the change says so, and as it is asked for else."""
        training = self.training
        if "lora" in change.given:
            training = replace(training, lora=replace(training.lora, lora_rank=change.lora_rank))
        if training.lora.lora_rank is None:
            training = replace(training, lora=LoraChoice())
        return replace(
            self,
            batch_size=change.batch_size if "batch-size" in change.given else self.batch_size,
            sequence_length=change.sequence_length if "sequence-length" in change.given else self.sequence_length,
            training=training,
        )
