"""The workload: what one model does in one training iteration, at one shape, on any machine.

Bytes are device bytes as a ledger of live storages counts them.  A *phase* is a stretch of the compute lane that the
schedule knows as one task; its memory is given relative to the level at its start, so that phases can be laid end to
end in any mixture of activation modes.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from operator import is_
from typing import Any, ClassVar, Final, NewType, Self

from pydantic import (
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..basics.documents import Document, FrozenModel, Name
from ..basics.errors import PlanError
from ..basics.made_for import words_of
from ..phases.block_profile import BlockProfile as BlockProfile
from ..phases.block_profile import Tiling as Tiling
from ..phases.distillation import Distillation, StagePlace
from ..phases.operations import MAX_BYTES as MAX_BYTES
from ..phases.operations import Bytes as Bytes
from ..phases.operations import Compiled as Compiled
from ..phases.operations import DType as DType
from ..phases.operations import DTypeOrigin as DTypeOrigin
from ..phases.operations import Float8 as Float8
from ..phases.operations import Float8Gather as Float8Gather
from ..phases.operations import KernelPackage as KernelPackage
from ..phases.operations import Operation as Operation
from ..phases.operations import OperationClass as OperationClass
from ..phases.operations import SignedBytes as SignedBytes
from ..phases.packing import Packing as Packing
from ..phases.parameters import OuterSection as OuterSection
from ..phases.parameters import Parameter as Parameter
from ..phases.parameters import Uses as Uses
from ..phases.parameters import in_forward_order as in_forward_order
from ..phases.phase import LookedUpTable as LookedUpTable
from ..phases.phase import Phase as Phase
from ..phases.phase import RowLookups as RowLookups
from ..phases.quadratic import QuadraticMemory as QuadraticMemory
from ..phases.quantization import PackedProducts
from ..phases.sequence_sharing import SequenceSharing as SequenceSharing
from ..phases.sequence_sharing import why_no_sequence_ranks, why_no_sharings
from ..phases.shared_inputs import SharedInput as SharedInput
from ..phases.subspaces import Subspace as Subspace
from ..phases.subspaces import SubspaceAxis as SubspaceAxis
from ..phases.subspaces import why_no_subspaces
from ..phases.tiling import LossHead as LossHead
from ..phases.tiling import LossTiling as LossTiling
from ..phases.tiling import why_no_loss_tiles, why_no_mlp_tiles, why_no_tilings
from .plan import TrainingMethod

BlockId = NewType("BlockId", int)


Section = BlockId | OuterSection
"""What a compute task runs: a block by its index, or the part before the first or after the last."""

COMPOSED: Final = "composed"
"""``Workload.model_hash`` of a distillation that is composed of workloads of full training: no modules were seen."""
SMALLEST_SWAPPED_BYTES: Final = 512
"""Storages below this stay on the device in mode SWAP."""

_FILED_IF_ANY: Final = (
    *("tilings", "subspaces", "sequence_sharings", "loss_tilings", "staying_inputs", "keeps_outputs"),
    *("kernels_left_out", "kernels_taken"),
)
_FILED_IF_SET: Final = (
    "distillation",
    "packing",
    "quadratic",
    "compiled",
    "float8",
    "float8_gather",
    "packed_products",
    "rotary_tokens",
)


class Block(FrozenModel):
    """One run of a transformer layer, in execution order."""

    name: str
    """Dotted module path."""
    profile: NonNegativeInt
    """Index into ``Workload.profiles``."""


class Workload(Document):
    """One model, one batch shape: everything that a machine-independent prediction needs."""

    KIND: ClassVar[str] = "workload"
    SCHEMA_VERSION: ClassVar[int] = 2
    """2: parameters outside the blocks name the sections that use them."""
    TABLES: ClassVar[str] = "tables.workloads:workload_tables"

    model_name: Name
    model_hash: str
    """Hash of the model's structure: module classes, parameter names, shapes, dtypes, trainability, buffers."""
    batch_shapes: dict[str, tuple[NonNegativeInt, ...]]
    """Shape of every tensor of the batch, by name."""
    num_samples: PositiveInt
    """Samples per iteration (size of the batch's first dim)."""
    num_tokens: PositiveInt
    """Tokens (or positions) per iteration."""
    compute_dtype: DType
    published_dtype: DType | None = None
    """Element type that the weights were published in; None where nobody says."""
    dtype_origin: DTypeOrigin | None = None
    """Who chose the element type of the parameters; None where nobody says."""
    rotary_tokens: PositiveInt | None = None
    """Tokens of the longest sample that its rotary positions were made for; None without, or where nobody says."""
    parameters: tuple[Parameter, ...]
    """In execution order."""
    blocks: tuple[Block, ...]
    profiles: tuple[BlockProfile, ...]
    prologue_forward: Phase
    epilogue_forward: Phase
    epilogue_backward: Phase
    prologue_backward: Phase
    shared_inputs: tuple[SharedInput, ...] = ()
    """Tensors whose life depends on the activation modes of several blocks.  Phases count them as if no block held them
    for its backward."""
    staying_inputs: tuple[NonNegativeInt, ...] = ()
    """Blocks whose input stays on the device in mode OFFLOAD_INPUT: it is no output of the block before, or others hold
    it too.  A file has the field where there are any."""
    distillation: Distillation | None = None
    """What a workload of bypass distillation has beside; None for full training.  A file has the field where it is
    set."""
    subspaces: tuple[Subspace, ...] = ()
    """Trained matrices that are kept orthogonal to frozen ones (OSFT).  A file has the field where there are any."""
    tilings: tuple[Tiling, ...] = ()
    """What blocks do where their MLPs run in tiles (``Plan.mlp_tiles``).  A file has the field where there are any."""
    loss_tilings: tuple[LossTiling, ...] = ()
    """What head and loss do by tiles of tokens, for every number that is traced.  A file has the field if it is set."""
    sequence_sharings: tuple[SequenceSharing, ...] = ()
    """What one rank does where several share each sequence (``Plan.sequence_ranks``), for every number of ranks that
    was traced.  A file has the field where there are any."""
    packing: Packing | None = None
    """How samples lie in the batch's rows; None where each row is one, or nobody says.  A file has the field where it
    is set."""
    quadratic: QuadraticMemory | None = None
    """Tensors of attention that grow with the square of the sequence; None where there are none, or nobody knows.  A
    file has the field where it is set."""
    loss_head: LossHead = LossHead.EAGER
    """How the loss is made of hidden states where a plan has it whole.  A file has the field where it is not eager."""
    keeps_outputs: bool = False
    """Whether the loop holds what the model gives until the next micro-batch's is there, as in ``outputs =
    model(**batch)``; it is part of ``resident_bytes``.  A file has the field where it is set."""
    compiled: Compiled | None = None
    """What of it torch.compile has compiled: no plan of it is carried out.  A file has the field where it is set."""
    float8: Float8 | None = None
    """How linear maps of blocks multiply in float8, likewise."""
    float8_gather: Float8Gather | None = None
    """Who scales their weights where FSDP2 gathers these in float8 (``Parameter.gathered_dtype``), likewise."""
    packed_products: PackedProducts | None = None
    """Whose products with packed weights they are where they are not those of protwin's runtime, likewise."""
    kernels_left_out: tuple[Name, ...] = ()
    """Packages whose kernels the model calls where they are installed, and whose reference in PyTorch was traced.  A
    file has the field where there are any."""
    kernels_taken: tuple[KernelPackage, ...] = ()
    """Packages whose kernels were traced as they run where these are installed, likewise."""
    row_lookups: RowLookups | None = None
    """Embeddings whose rows the prologue may look up on the host; None where there are none, or nobody knows."""
    resident_bytes: Bytes = 0
    """Device bytes alive all the time besides parameters, gradients and optimizer state: module buffers, the batch, the
    losses that a loop holds, scaled ones too, and whatever else lives on from one iteration to the next."""
    traced_with: str
    """``"real"`` or ``"fake"`` tensors."""
    measured_on: str | None = None
    """The machine that the ``measured_s`` come from; None where there are none."""
    software: dict[str, str] = {}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.blocks:
            raise ValueError("a workload needs at least one block")
        for block in self.blocks:
            if block.profile >= len(self.profiles):
                raise ValueError(f"block {block.name} names profile {block.profile} of {len(self.profiles)}")
        for shared in self.shared_inputs:
            named = max(shared.blocks, default=0)
            if named >= len(self.blocks):
                raise ValueError(f"a shared input names block {named} of {len(self.blocks)}")
        if (named := max(self.staying_inputs, default=0)) >= len(self.blocks):
            raise ValueError(f"staying_inputs names block {named} of {len(self.blocks)}")
        for table in self.row_lookups.tables if self.row_lookups is not None else ():
            if table.parameter >= len(self.parameters):
                raise ValueError(f"a lookup names parameter {table.parameter} of {len(self.parameters)}")
            if len(self.parameters[table.parameter].shape) != 2:
                raise ValueError(f"{self.parameters[table.parameter].name} is looked up, and is no table of rows")
        names: set[str] = set()
        for parameter in self.parameters:
            if parameter.block is not None and parameter.block >= len(self.blocks):
                raise ValueError(f"parameter {parameter.name} names block {parameter.block} of {len(self.blocks)}")
            if parameter.uses is not None:
                self._check_uses(parameter.name, parameter.block, parameter.uses)
            for name in (parameter.name, *parameter.aliases):
                if name in names:
                    raise ValueError(f"parameter name {name} occurs twice")
                names.add(name)
        return self

    @model_validator(mode="after")
    def _is_made_of_pairs(self) -> Self:
        if self.distillation is not None and (reason := why_no_pairs(self)) is not None:
            raise ValueError(f"distillation: {reason}")
        return self

    @model_validator(mode="after")
    def _keeps_subspaces(self) -> Self:
        if (reason := why_no_subspaces(self.subspaces, self.parameters)) is not None:
            raise ValueError(f"subspaces: {reason}")
        looked_up = {table.parameter for table in self.row_lookups.tables} if self.row_lookups is not None else set()
        if found := looked_up & {number for of in self.subspaces for number in (of.frozen, of.trained)}:
            raise ValueError(f"subspaces: rows of {self.parameters[min(found)].name} are looked up")
        if self.subspaces and self.distillation is not None:
            raise ValueError("subspaces: bypass distillation trains whole weights")
        return self

    @model_validator(mode="after")
    def _knows_tilings(self) -> Self:
        reason = why_no_tilings(self.tilings, len(self.blocks))
        if self.tilings and self.distillation is not None:
            reason = "blocks of bypass distillation run whole"
        if reason is not None:
            raise ValueError(f"tilings: {reason}")
        return self

    @model_validator(mode="after")
    def _knows_each_tiling_once(self) -> Self:
        if (counts := [tiling.loss_tiles for tiling in self.loss_tilings]) != sorted(set(counts)):
            raise ValueError(f"loss_tilings: {counts} tiles; each number stands once, and they ascend")
        if self.loss_head is LossHead.CHUNKED:
            raise ValueError("loss_head: chunked is Plan.loss_tiles; a workload's is eager, narrow or fused")
        if self.loss_head is not LossHead.EAGER and self.distillation is not None:
            raise ValueError("loss_head: bypass distillation has no loss after the last block")
        if counts and self.distillation is not None:
            raise ValueError("loss_tilings: bypass distillation has no loss after the last block")
        return self

    @model_validator(mode="after")
    def _knows_sharings(self) -> Self:
        reason = why_no_sharings(self.sequence_sharings, len(self.blocks))
        if self.sequence_sharings and self.distillation is not None:
            reason = "blocks of bypass distillation run whole"
        if reason is not None:
            raise ValueError(f"sequence_sharings: {reason}")
        if not self.sequence_sharings and any(phase.exchanges for of in self.profiles for phase in of.phases):
            raise ValueError("exchanges: phases of whole sequences exchange nothing; name sequence_sharings")
        return self

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.loss_head is LossHead.EAGER:
            fields.pop("loss_head", None)
        for name in _FILED_IF_ANY:
            if not getattr(self, name):
                fields.pop(name, None)
        for name in _FILED_IF_SET:
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields

    def _check_uses(self, name: str, block: int | None, uses: Uses) -> None:
        if block is not None:
            raise ValueError(f"parameter {name} has block {block}, which alone uses it, and names other uses")
        for section in (*uses.forward, *uses.backward, uses.gradient):
            if isinstance(section, int) and section >= len(self.blocks):
                raise ValueError(f"parameter {name} is used by block {section} of {len(self.blocks)}")

    @cached_property
    def identity(self) -> str:
        """Hash of what a plan depends on: model, batch shapes, parameters and who uses them, loss; not of timings."""
        return self._identity_of(self.model_hash)

    @property
    def words(self) -> str:
        """What ``identity`` depends on, as ``Plan.made_for`` has it."""
        sizes = [(p.trainable, str(p.dtype), p.num_elements) for p in self.parameters]
        return words_of(self.model_name, self.model_hash, self.batch_shapes, self.compute_dtype, sizes, self.loss_head)

    @cached_property
    def composed_identity(self) -> str | None:
        """What ``identity`` is where this distillation is composed of workloads of full training; None for others.

        A plan depends on parameters, blocks and the batch, in which both agree; a trace knows of the modules besides.
        """
        return None if self.distillation is None else self._identity_of(COMPOSED)

    def _identity_of(self, model_hash: str) -> str:
        facts: list[Any] = [
            model_hash,
            sorted((name, list(shape)) for name, shape in self.batch_shapes.items()),
            [
                [p.name, list(p.shape), p.dtype, p.trainable, p.block, p.uses and p.uses.model_dump(mode="json")]
                for p in self.parameters
            ],
            [block.name for block in self.blocks],
        ]
        if self.distillation is not None:
            facts.append([self.distillation.keys_to_learn, self.distillation.loss])
        if self.subspaces:
            facts.append(["subspaces", [[of.frozen, of.trained, of.axis] for of in self.subspaces]])
        if self.loss_head is not LossHead.EAGER:
            facts.append(["loss_head", self.loss_head])
        if self.stage is not None:
            facts.append(["stage", self.stage.first_pair, self.stage.of_pairs])
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def method(self) -> TrainingMethod:
        """How it is trained."""
        if self.subspaces:
            return TrainingMethod.OSFT
        return TrainingMethod.FULL if self.distillation is None else TrainingMethod.BYPASS

    @property
    def stage(self) -> StagePlace | None:
        """Its place among the stages of a pipeline; None of a workload that is whole."""
        return None if self.distillation is None else self.distillation.stage

    @property
    def num_stages(self) -> int:
        """Stages that carry the whole out together, each on ranks of its own; 1 of a workload that is whole."""
        return 1 if self.stage is None else self.stage.num_stages

    def profile_of(self, block: int) -> BlockProfile:
        """The profile of block ``block``."""
        return self.profiles[self.blocks[block].profile]

    @cached_property
    def as_seen(self) -> Workload:
        """The workload with the memory that the traced batch took; itself where memory depends on no values.

        Predictions of memory come from this one, and guarantees from the workload itself.
        """
        if all(profile.seen is None for profile in self.profiles):
            return self
        update: dict[str, Any] = {"profiles": tuple(profile.as_seen for profile in self.profiles)}
        update["tilings"] = tuple(tiling.as_seen for tiling in self.tilings)
        update["sequence_sharings"] = tuple(sharing.as_seen for sharing in self.sequence_sharings)
        if self.distillation is not None:
            pairs = zip(self.profiles, self.distillation.losses, strict=True)
            losses = [
                loss if p.seen is None or p.seen.loss is None else p.seen.loss.of_phase(loss) for p, loss in pairs
            ]
            update["distillation"] = self.distillation.model_copy(update={"losses": tuple(losses)})
        return self.changed(update)

    def tiling(self, mlp_tiles: int) -> Tiling:
        """What blocks do in so many tiles.  Raises PlanError if nobody knows."""
        if (reason := why_no_mlp_tiles(mlp_tiles, self.tilings, self.model_name)) is not None or mlp_tiles == 1:
            raise PlanError(f"{reason or 'mlp_tiles: 1 is no tiling'}.")
        return next(tiling for tiling in self.tilings if tiling.mlp_tiles == mlp_tiles)

    def loss_tiling(self, loss_tiles: int) -> LossTiling:
        """What the part after the last block does in so many tiles.  Raises PlanError if nobody knows."""
        if (reason := why_no_loss_tiles(loss_tiles, self.loss_tilings, self.model_name)) or loss_tiles == 1:
            raise PlanError(f"{reason or 'loss_tiles: 1 is no tiling'}.")
        return next(tiling for tiling in self.loss_tilings if tiling.loss_tiles == loss_tiles)

    def tiled(self, mlp_tiles: int, loss_tiles: int = 1) -> Workload:
        """The same workload, of the same identity, whose MLPs run in so many tiles, and its loss in so many others.

        1: as they run already; itself where all do.  Raises PlanError as ``tiling`` and ``loss_tiling``.
        """
        if mlp_tiles == loss_tiles == 1:
            return self
        if (mlp_tiles, loss_tiles) not in self._tiled:
            update: dict[str, Any] = {}
            if mlp_tiles > 1 and not self._runs_in(chosen := self.tiling(mlp_tiles)):
                blocks = zip(self.blocks, chosen.profile_of, strict=True)
                update = {"profiles": chosen.profiles, "tilings": (chosen,)}
                update["blocks"] = tuple(block.model_copy(update={"profile": profile}) for block, profile in blocks)
            if loss_tiles > 1 and self.epilogue_forward is not (loss := self.loss_tiling(loss_tiles)).epilogue_forward:
                update["epilogue_forward"], update["epilogue_backward"] = loss.epilogue_forward, loss.epilogue_backward
                update["loss_tilings"] = (loss,)
            self._tiled[mlp_tiles, loss_tiles] = self.changed(update) if update else self
        return self._tiled[mlp_tiles, loss_tiles]

    def changed(self, update: dict[str, Any]) -> Workload:
        """With other fields.  Made anew: a copy would take along what is cached here."""
        return Workload(**{name: getattr(self, name) for name in Workload.model_fields} | update)

    def _runs_in(self, tiling: Tiling) -> bool:
        """Whether all blocks are those of ``tiling``."""
        return len(self.profiles) == len(tiling.profiles) and all(map(is_, self.profiles, tiling.profiles))

    def shared_among(self, sequence_ranks: int) -> Workload:
        """The workload as one of so many ranks that share each sequence has it, of the same identity; 1: itself.

        ``num_tokens``, ``num_samples`` and ``batch_shapes`` stay those of whole sequences, as all of these ranks
        together have them.  ``tiled`` comes behind it: tiles are of a rank's own tokens.  Raises PlanError if nobody
        knows so many ranks.
        """
        if sequence_ranks == 1:
            return self
        if sequence_ranks not in self._shared_among:
            if reason := why_no_sequence_ranks(sequence_ranks, self.sequence_sharings, self.model_name):
                raise PlanError(f"{reason}.")
            chosen = next(sharing for sharing in self.sequence_sharings if sharing.sequence_ranks == sequence_ranks)
            blocks = zip(self.blocks, chosen.profile_of, strict=True)
            same = SequenceSharing.model_fields.keys() & Workload.model_fields.keys()
            update: dict[str, Any] = {name: getattr(chosen, name) for name in same}
            update["blocks"] = tuple(block.model_copy(update={"profile": profile}) for block, profile in blocks)
            update |= {"sequence_sharings": (chosen,), "row_lookups": None}
            self._shared_among[sequence_ranks] = self.changed(update)
        return self._shared_among[sequence_ranks]

    @cached_property
    def derived(self) -> dict[Any, Workload]:
        """Others of its identity that were made of it (``shared/layout/tiling.py``)."""
        return {}

    @cached_property
    def _shared_among(self) -> dict[int, Workload]:
        return {}

    @cached_property
    def _tiled(self) -> dict[tuple[int, int], Workload]:
        return {}

    @cached_property
    def num_parameters(self) -> int:
        """Scalars in all parameters, tied ones once."""
        return sum(parameter.scalars for parameter in self.parameters)

    @cached_property
    def is_measured(self) -> bool:
        """Whether every block phase carries measured seconds."""
        return all(phase.measured_s is not None for profile in self.profiles for phase in profile.phases)


def why_no_pairs(workload: Workload) -> str | None:
    """Why ``workload`` cannot be of bypass distillation as ``Distillation`` describes it; None if it can."""
    distillation, blocks = workload.distillation, workload.blocks
    if distillation is None:
        return "the workload names none"
    if len(blocks) % 2:
        return f"{len(blocks)} blocks are no pairs of a teacher's and a student's"
    if (stage := distillation.stage) is not None:
        num_behind = stage.of_pairs - stage.first_pair - len(blocks) // 2
        if num_behind < 0 or len(blocks) // 2 + stage.num_stages - 1 > stage.of_pairs:
            return f"{len(blocks) // 2} pairs from pair {stage.first_pair} on, of {stage.of_pairs} in all, are too many"
        if (num_behind > 0) != (stage.sends_bytes > 0):
            return f"{num_behind} pairs follow the stage, which sends {stage.sends_bytes} B; all but the last one send"
    if len(distillation.losses) != len(workload.profiles):
        return f"{len(distillation.losses)} losses for {len(workload.profiles)} profiles of blocks"
    for number, block in enumerate(blocks):
        if not block.name.startswith(model := ("teacher.", "student.")[number % 2]):
            return f"block {number} is called {block.name}, which does not begin with {model}"
    if shared := {block.profile for block in blocks[::2]} & {block.profile for block in blocks[1::2]}:
        return f"profile {min(shared)} is of a teacher's and of a student's block"
    for parameter in workload.parameters:
        if parameter.trainable and (parameter.block is None or parameter.block % 2 == 0):
            return f"{parameter.name} is trained, and belongs to no block of the student"
    for parameter in workload.parameters:
        if parameter.block is None and (
            parameter.uses is None or OuterSection.EPILOGUE in (*parameter.uses.forward, *parameter.uses.backward)
        ):
            return f"{parameter.name} belongs to no block, and nobody says which of the sections up to the last use it"
    if workload.shared_inputs or workload.row_lookups is not None:
        return "what passes by all blocks stands in passing_bytes; shared inputs and looked-up rows are not known"
    for block in blocks[::2]:
        profile = workload.profiles[block.profile]
        behind = (profile.backward, profile.recompute, profile.checkpoint_backward, distillation.losses[block.profile])
        if profile.forward != profile.checkpoint_forward or any(phase != Phase() for phase in behind):
            return f"{block.name} does more than one forward, of which nothing but the output stays"
    outside = (workload.epilogue_forward, workload.epilogue_backward, workload.prologue_backward)
    if any(phase != Phase() for phase in outside):
        return "prologue's backward and epilogue do nothing; their phases are empty"
    return None
