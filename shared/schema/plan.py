"""The plan: the handful of knobs that a person or the search chooses."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Final, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ..basics.documents import Document
from ..basics.errors import PlanError
from ..phases.activation_modes import ActivationMode as ActivationMode
from ..phases.activation_modes import mode_counts as mode_counts
from ..phases.activation_modes import place_activation_modes as place_activation_modes
from ..phases.sequence_sharing import why_not_shared
from ..phases.tiling import MOST_TILES
from .optimizer import HostGradients, Optimizer

MOST_MICRO_BATCHES: Final = 4096
"""Every task of an iteration is compiled, simulated and recorded: an iteration of more has millions."""
MOST_RANKS: Final = 10**6


class TrainingMethod(StrEnum):
    """What a schedule trains, by what means."""

    FULL = "full"
    """Forward of the whole model, then backward of the whole model: every parameter that the workload trains."""
    BYPASS = "bypass"
    """Bypass distillation: every block of a student by a loss of its own, beside its teacher (``Distillation``)."""
    OSFT = "osft"
    """Orthogonal subspace fine-tuning: what is trained is kept orthogonal to what is frozen (``Subspace``)."""


class ProjectionPlace(StrEnum):
    """Where gradients of chunks that the host steps are projected."""

    HOST = "host"
    """On the host, once they are complete there."""
    DEVICE = "device"
    """On the device, before they leave."""


class ParallelMode(StrEnum):
    """What several equal ranks, each with a device of its own, do together in one step."""

    SINGLE = "single"
    """One rank alone."""
    DDP = "ddp"
    """Data parallel: every rank has all chunks on its device; gradients are added up."""
    REPLICATED = "replicated"
    """Data parallel with offloaded chunks, all of which every rank has on its host."""
    SHARDED = "sharded"
    """Data parallel with chunks of which every rank has one equal part: of offloaded ones on its host, of ``n_shard``
    chunks on its device."""


def why_not_parallel(optimizer: Optimizer, parallel: ParallelMode) -> str | None:
    """Why ranks in mode ``parallel`` cannot have ``optimizer``; None if they can."""
    if optimizer is Optimizer.ADAFACTOR and parallel is ParallelMode.SHARDED:
        return (
            "optimizer: adafactor needs whole matrices, but ranks in mode sharded have parts of them; name another "
            "optimizer, ddp or replicated"
        )
    return None


def why_not_shard_ranks(shard_ranks: int | None, num_ranks: int, parallel: ParallelMode) -> str | None:
    """Why ranks cannot form shard groups of ``shard_ranks``; None if they can, or form none."""
    if shard_ranks is None:
        return None
    if parallel is not ParallelMode.SHARDED:
        return f"shard_ranks: {shard_ranks} with parallel {parallel}; only ranks in mode sharded have groups of shards"
    if shard_ranks == 1:
        return "shard_ranks: 1 leaves nobody to share a chunk with; name ddp or replicated"
    if num_ranks % shard_ranks:
        divisors = [number for number in range(2, min(num_ranks, MOST_RANKS) + 1) if num_ranks % number == 0]
        return (
            f"shard_ranks: {shard_ranks} does not divide num_ranks {num_ranks} into equal groups. Choose from "
            f"{', '.join(map(str, divisors))}"
        )
    return None


def mode_words(parallel: ParallelMode, shard_ranks: int | None) -> str:
    """``sharded``, or ``sharded in groups of 8``."""
    return str(parallel) if shard_ranks is None else f"{parallel} in groups of {shard_ranks:,}"


def num_shards(parallel: ParallelMode, num_ranks: int, shard_ranks: int | None) -> int:
    """Equal parts of a gathered chunk (``Plan.num_shards``)."""
    return (shard_ranks or num_ranks) if parallel is ParallelMode.SHARDED else 1


def num_replicas(num_ranks: int, shard_ranks: int | None) -> int:
    """Shard groups (``Plan.num_replicas``)."""
    return 1 if shard_ranks is None else num_ranks // shard_ranks


def widens_on_host(host_gradients: HostGradients, micro_batches: int, *, limits_norm: bool) -> bool:
    """Whether gradients arrive on the host beside float32 sums, which each of them is widened into.

    One gradient that nothing is added to and no limit scales is widened by the step itself: to the same bits, without a
    second buffer.
    """
    return host_gradients is HostGradients.FLOAT32 and (micro_batches > 1 or limits_norm)


def why_no_disk(plan: Plan) -> str | None:
    """Why the knobs of ``plan`` that speak of the disk contradict each other or its mode; None if they do not."""
    if plan.n_disk > plan.n_disk_state:
        return (
            f"n_disk: {plan.n_disk} with n_disk_state {plan.n_disk_state}; chunks whose parameters lie on the disk "
            f"have their optimizer state there too. Raise n_disk_state to {plan.n_disk}, or lower n_disk"
        )
    if (plan.n_staging > 0) != (plan.n_disk_state > 0):
        remedy = "what passes between disk and device needs 1 at least" if plan.n_disk_state else "set it to 0"
        return f"n_staging: {plan.n_staging} with n_disk_state {plan.n_disk_state}; {remedy}"
    if plan.n_disk_state and plan.parallel is not ParallelMode.SINGLE:
        return (
            f"n_disk_state: {plan.n_disk_state} with parallel {plan.parallel}; one rank alone knows chunks on a disk. "
            f"Set it to 0, or parallel to single"
        )
    return None


def why_not_bypass(plan: Plan) -> str | None:
    """Why the knobs of ``plan`` contradict bypass distillation; None if they do not, or if it is of another method."""
    if plan.method is not TrainingMethod.BYPASS:
        return None
    for name in ("n_swap", "n_checkpoint", "n_offload_input"):
        if getattr(plan, name):
            return (
                f"{name}: {getattr(plan, name)} with method {plan.method}; a student block's backward follows its "
                f"forward at once, so that nothing saved has to go. Set it to 0"
            )
    if plan.mlp_tiles > 1:
        return f"mlp_tiles: {plan.mlp_tiles} with method {plan.method}, whose blocks run whole. Set it to 1"
    if plan.loss_tiles > 1:
        return f"loss_tiles: {plan.loss_tiles} with method {plan.method}, whose losses are of blocks. Leave it out"
    if plan.sequence_ranks > 1:
        return f"sequence_ranks: {plan.sequence_ranks} with method {plan.method}, whose blocks run whole. Set it to 1"
    if plan.looks_up_rows:
        return f"looks_up_rows with method {plan.method}; embeddings of a teacher are gathered whole. Leave it out"
    if plan.max_gradient_norm is not None and plan.parallel is ParallelMode.SHARDED:
        return (
            f"max_gradient_norm: {plan.max_gradient_norm:g} with method {plan.method} and parallel {plan.parallel}; "
            f"norms of blocks whose gradients are in parts are not known yet. Leave it out, or name ddp or replicated"
        )
    return None


def why_not_selective(plan: Plan) -> str | None:
    """Why the knobs of ``plan`` that speak of mode SELECTIVE contradict others; None if they do not."""
    if plan.n_selective + plan.n_offload_input > plan.n_checkpoint:
        more = f" and n_offload_input {plan.n_offload_input}" if plan.n_offload_input else ""
        return (
            f"n_selective: {plan.n_selective} with n_checkpoint {plan.n_checkpoint}{more}; blocks that keep results "
            f"are recomputed, with their input on the device. Raise n_checkpoint to "
            f"{plan.n_selective + plan.n_offload_input}, or lower n_selective"
        )
    if plan.product_stride > 1 and not plan.n_selective:
        return (
            f"product_stride: {plan.product_stride} with n_selective 0; no block chooses products. Leave it out, or "
            f"raise n_selective"
        )
    if plan.n_selective and plan.mlp_tiles > 1:
        return (
            f"n_selective: {plan.n_selective} with mlp_tiles {plan.mlp_tiles}; blocks in tiles keep no results of "
            f"their products. Set n_selective to 0, or mlp_tiles to 1"
        )
    return None


def why_not_osft(plan: Plan) -> str | None:
    """Why the knobs of ``plan`` contradict orthogonal subspace fine-tuning, or speak of it in another method."""
    place = plan.projects_gradients_on
    if plan.method is not TrainingMethod.OSFT:
        if place is not ProjectionPlace.HOST:
            return f"projects_gradients_on: {place} with method {plan.method}, which projects nothing. Leave it out"
        return None
    if place is ProjectionPlace.DEVICE:
        return why_not_held(plan.host_gradients, plan.micro_batches)
    return None


def why_not_held(host_gradients: HostGradients, micro_batches: int) -> str | None:
    """Why the device cannot add up the gradients that it projects before they leave; None if it can.

    Gradients of several micro-batches are added up where backwards leave them, in their own element type.
    """
    if micro_batches > 1 and host_gradients is not HostGradients.PARAMETERS:
        return (
            f"projects_gradients_on: {ProjectionPlace.DEVICE} with micro_batches {micro_batches} and host_gradients: "
            f"{host_gradients}; what is projected on the device is added up there, in the parameters' own type. Name "
            f"host, or leave host_gradients out"
        )
    return None


class Plan(Document):
    """How one workload is trained on one device, or on several equal ranks: each trains on a batch of its own.

    Small enough to write by hand.  ``workload_id`` binds it to the workload that it was made for.
    """

    KIND: ClassVar[str] = "plan"
    SCHEMA_VERSION: ClassVar[int] = 2
    """2: names its optimizer, and ``n_persist`` counts chunks from the prologue on; 0 keeps none on the device."""
    TABLES: ClassVar[str] = "tables.record:plan_table"

    workload_id: str
    """Identity of the workload (``Workload.identity``)."""
    method: TrainingMethod = TrainingMethod.FULL
    """What is trained, by what means.  A file has the field where it is not ``full``."""
    chunk_bytes: PositiveInt
    """Upper bound of a chunk's size; a larger parameter has a chunk of its own."""
    n_persist: NonNegativeInt
    """The first ``n_persist`` chunks stay on the device for good, counted from the prologue's on; 0: none does."""
    n_host_stepped: NonNegativeInt = 0
    """The next ``n_host_stepped`` chunks stay on the device too, but the host steps them: gradients leave, CPU Adam
    steps there, new values come back before the next iteration uses them."""
    n_shard: NonNegativeInt = 0
    """The next ``n_shard`` chunks are sharded over the devices of all ranks, which only SHARDED knows: every device has
    one equal part of their parameters, gradients and optimizer state for good."""
    n_disk_state: NonNegativeInt = 0
    """The last ``n_disk_state`` of the offloaded chunks have their optimizer state on the host's disk: CPU Adam steps
    the last chunks first, and they are the last that the next forward needs."""
    n_disk: NonNegativeInt = 0
    """The last ``n_disk`` of these have their parameters there too."""
    n_staging: NonNegativeInt = 0
    """Host places that chunks on the disk share: so many for parameters on their way to the device, and so many for
    chunks that are being stepped."""
    looks_up_rows: bool = False
    """Whether the prologue looks the rows of its embeddings up on the host, where their chunks are offloaded, in place
    of gathering whole tables: rows come to the device, and gradients of rows leave it.  A file has the field where it
    is true."""
    n_buffer: NonNegativeInt
    """Device places for the chunks that are gathered: sharded over devices, or offloaded."""
    prefetch_depth: PositiveInt = 1
    """How many sections ahead of the running one chunks may be gathered, and how many behind it gradients may lag.
    Blocks are sections, and so are the parts before the first and after the last."""
    n_swap: NonNegativeInt = 0
    """Blocks in mode SWAP, the first ones (``place_activation_modes``)."""
    n_checkpoint: NonNegativeInt = 0
    """Blocks that are recomputed, in mode CHECKPOINT, OFFLOAD_INPUT or SELECTIVE, interleaved among the others
    (``place_activation_modes``)."""
    n_offload_input: NonNegativeInt = 0
    """Of these, the blocks in mode OFFLOAD_INPUT, the first ones from the second block on
    (``place_activation_modes``).  A file has the field where it is not 0."""
    n_selective: NonNegativeInt = 0
    """Of the others of these, the blocks in mode SELECTIVE, the last ones.  A file has the field where it is not 0."""
    product_stride: PositiveInt = 1
    """Of the matrix products of a block in mode SELECTIVE, the first of every so many is kept; 1: all.  A file has the
    field where it is not 1."""
    activation_modes: tuple[ActivationMode, ...] | None = Field(default=None)
    """One mode per block, instead of ``n_swap``, ``n_checkpoint``, ``n_offload_input``, ``n_selective`` and their
    placement rule."""
    mlp_tiles: PositiveInt = 1
    """Tiles of tokens that the MLPs of blocks run in, forward and backward (``Workload.tilings``); 1: whole.  A file
    has the field where it is not 1."""
    micro_batches: PositiveInt = 1
    """Forwards and backwards per step, each on a batch of the workload's shape; their gradients add up."""
    loss_tiles: int = Field(default=1, gt=0, le=MOST_TILES)
    """Tiles of tokens in which head and loss run, so that logits never exist whole.  A file has the field where it is
    not 1."""
    max_gradient_norm: PositiveFloat | None = None
    """Limit of the norm of all gradients together; None for no limit.  CPU Adam then waits for the last gradient.  In
    bypass distillation it limits the norm of each student block's gradients by itself, and CPU Adam waits for those."""
    optimizer: Optimizer = Optimizer.ADAMW
    """What steps the weights: its state has places, its steps take time, and the runtime makes it."""
    host_gradients: HostGradients = HostGradients.PARAMETERS
    """In which element type the host adds up gradients; those that stay on the device are of the parameters' type."""
    projects_gradients_on: ProjectionPlace = ProjectionPlace.HOST
    """Where gradients of chunks that the host steps are projected, in orthogonal subspace fine-tuning; those of
    several micro-batches are added up there too.  A file has the field where it is not ``host``."""
    parallel: ParallelMode = ParallelMode.SINGLE
    """What the ranks do together."""
    num_ranks: PositiveInt = 1
    """Ranks, each with a device; a step trains on the micro-batches of all of them."""
    shard_ranks: PositiveInt | None = None
    """Neighbouring ranks that have one chunk in parts between them (a shard group), which only SHARDED knows; all such
    groups have replicas of the same parts.  None: all ranks are one group.  A file has the field where it is set."""
    sequence_ranks: PositiveInt = 1
    """Neighbouring ranks that share each sequence (``Workload.sequence_sharings``): a step trains on the micro-batches
    of num_ranks / sequence_ranks groups.  1: every rank has sequences of its own.  A file has the field where it is not
    1."""
    made_for: str | None = Field(default=None, max_length=4000)
    """What decides the workload's identity, in words, for messages where it does not fit; no part of the plan's.  A
    file has the field where a search wrote it."""
    note: str | None = Field(default=None, max_length=1000)
    """What a reader should know of the plan, such as that nothing is proven about it; no part of its identity.  A file
    without a note has no such field."""

    @field_validator("micro_batches")
    @classmethod
    def _has_few_micro_batches(cls, micro_batches: int) -> int:
        if micro_batches > MOST_MICRO_BATCHES:
            raise ValueError(
                f"a schedule holds every task of every micro-batch, so that {MOST_MICRO_BATCHES} are the most. Train "
                f"on fewer and larger ones"
            )
        return micro_batches

    @field_validator("num_ranks")
    @classmethod
    def _has_few_ranks(cls, num_ranks: int) -> int:
        if num_ranks > MOST_RANKS:
            raise ValueError(f"no machine that is known has more than {MOST_RANKS:,} devices")
        return num_ranks

    @model_validator(mode="after")
    def _ranks_agree(self) -> Self:
        if (self.parallel is ParallelMode.SINGLE) != (self.num_ranks == 1):
            remedy = "name ddp, replicated or sharded" if self.num_ranks > 1 else "it needs 2 at least"
            raise ValueError(f"parallel: {self.parallel} with num_ranks {self.num_ranks}; {remedy}")
        if self.n_host_stepped and self.parallel is ParallelMode.SHARDED:
            raise ValueError(
                f"n_host_stepped: {self.n_host_stepped} with parallel {self.parallel}; chunks that the host steps and "
                f"the device keeps need whole chunks on the hosts, so that single and replicated know them. Set it to 0"
            )
        if self.looks_up_rows and self.parallel is not ParallelMode.SINGLE:
            raise ValueError(
                f"looks_up_rows with parallel {self.parallel}; gradients of rows are added up on one host, so that a "
                f"rank alone knows them. Leave it out"
            )
        if self.n_shard and self.parallel is not ParallelMode.SHARDED:
            raise ValueError(
                f"n_shard: {self.n_shard} with parallel {self.parallel}; only ranks in mode sharded have chunks that "
                f"lie on their devices in parts"
            )
        if (reason := why_not_shared(self.sequence_ranks, self.num_ranks)) is not None:
            raise ValueError(reason)
        if (reason := why_not_parallel(self.optimizer, self.parallel)) is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _shard_groups_are_equal(self) -> Self:
        if (reason := why_not_shard_ranks(self.shard_ranks, self.num_ranks, self.parallel)) is not None:
            raise ValueError(reason)
        if self.shard_ranks == self.num_ranks:
            # One group of all ranks is the usual plan, whose identity it has.
            object.__setattr__(self, "shard_ranks", None)
        return self

    @model_validator(mode="after")
    def _disk_knobs_agree(self) -> Self:
        if (reason := why_no_disk(self)) is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _method_knows_knobs(self) -> Self:
        for why_not in (why_not_bypass, why_not_osft):
            if (reason := why_not(self)) is not None:
                raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        if self.activation_modes is not None:
            for name, number in mode_counts(self.activation_modes).items():
                if getattr(self, name) != number:
                    named = _COUNTED_BY[name]
                    raise ValueError(f"{name} differs from the number of {named} entries in activation_modes")
        elif self.n_offload_input > self.n_checkpoint:
            raise ValueError(
                f"n_offload_input: {self.n_offload_input} with n_checkpoint {self.n_checkpoint}; only blocks that are "
                f"recomputed have their input offloaded. Raise n_checkpoint to {self.n_offload_input}, or lower "
                f"n_offload_input"
            )
        if (reason := why_not_selective(self)) is not None:
            raise ValueError(reason)
        return self

    @cached_property
    def identity(self) -> str:
        """Hash of all knobs and of the workload that they are for; ``Schedule.plan_id``."""
        is_bare = self.note is None and self.made_for is None
        knobs = self if is_bare else self.model_copy(update={"note": None, "made_for": None})
        return hashlib.sha256(f"{self.workload_id}\n{knobs.to_json()}".encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        """Whatever they were made for, in words: their workloads have identities."""
        if not isinstance(other, Plan):
            return NotImplemented
        bare, others = (
            one if one.made_for is None else one.model_copy(update={"made_for": None}) for one in (self, other)
        )
        return super(Plan, bare).__eq__(others)

    def __hash__(self) -> int:
        return hash(self.identity)

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        for told in ("note", "made_for"):
            if getattr(self, told) is None:
                fields.pop(told, None)
        if self.method is TrainingMethod.FULL:
            fields.pop("method", None)
        if not self.looks_up_rows:
            fields.pop("looks_up_rows", None)
        if self.mlp_tiles == 1:
            fields.pop("mlp_tiles", None)
        if self.shard_ranks is None:
            fields.pop("shard_ranks", None)
        if self.sequence_ranks == 1:
            fields.pop("sequence_ranks", None)
        if self.projects_gradients_on is ProjectionPlace.HOST:
            fields.pop("projects_gradients_on", None)
        if self.loss_tiles == 1:
            fields.pop("loss_tiles", None)
        if not self.n_offload_input:
            fields.pop("n_offload_input", None)
        if not self.n_selective:
            fields.pop("n_selective", None)
        if self.product_stride == 1:
            fields.pop("product_stride", None)
        return fields

    @property
    def num_kept(self) -> int:
        """The first chunks, whose parameters stay on the device whole, whoever steps them."""
        return self.n_persist + self.n_host_stepped

    @property
    def num_shards(self) -> int:
        """Equal parts that gathered chunks are cut into: one for each rank of a shard group, or the whole chunk."""
        return num_shards(self.parallel, self.num_ranks, self.shard_ranks)

    @property
    def num_replicas(self) -> int:
        """Shard groups, which have the same parts and reduce the gradients of these; 1 where ranks form no groups."""
        return num_replicas(self.num_ranks, self.shard_ranks)

    @property
    def num_batches(self) -> int:
        """Batches of the workload's shape in one step, of all ranks."""
        return self.micro_batches * self.num_groups

    @property
    def num_groups(self) -> int:
        """Groups of ranks with batches of their own: each shares its sequences, where ranks do."""
        return self.num_ranks // self.sequence_ranks

    @property
    def widens_on_host(self) -> bool:
        """Whether gradients arrive on the host beside float32 sums (``widens_on_host``)."""
        return widens_on_host(self.host_gradients, self.micro_batches, limits_norm=self.max_gradient_norm is not None)

    def modes(self, num_blocks: int) -> tuple[ActivationMode, ...]:
        """The mode of every block.  Raises PlanError if the plan names another number of blocks."""
        if self.activation_modes is not None:
            if len(self.activation_modes) != num_blocks:
                raise PlanError(
                    f"activation_modes names {len(self.activation_modes)} blocks but the workload has {num_blocks}."
                )
            return self.activation_modes
        return place_activation_modes(
            num_blocks,
            n_checkpoint=self.n_checkpoint,
            n_swap=self.n_swap,
            n_offload_input=self.n_offload_input,
            n_selective=self.n_selective,
        )


_COUNTED_BY: Final = {
    "n_swap": "SWAP",
    "n_checkpoint": "CHECKPOINT",
    "n_offload_input": "OFFLOAD_INPUT",
    "n_selective": "SELECTIVE",
}
