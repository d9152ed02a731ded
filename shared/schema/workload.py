"""The workload: what one model does in one training iteration, at one shape, on any machine.

Bytes are device bytes as a ledger of live storages counts them.  A *phase* is a stretch of the compute lane that the
schedule knows as one task; its memory is given relative to the level at its start, so that phases can be laid end to
end in any mixture of activation modes.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from functools import cached_property
from math import inf, prod
from typing import Annotated, ClassVar, Final, NewType, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel, Name
from ..basics.errors import PlanError
from .plan import ActivationMode, Plan
from .shared_inputs import SharedInput

BlockId = NewType("BlockId", int)


class OuterSection(StrEnum):
    """The parts of the model outside its blocks."""

    PROLOGUE = "prologue"
    EPILOGUE = "epilogue"


Section = BlockId | OuterSection
"""What a compute task runs: a block by its index, or the part before the first or after the last."""

MAX_BYTES: Final = 2**60
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
SignedBytes = Annotated[int, Field(ge=-MAX_BYTES, le=MAX_BYTES)]

SMALLEST_SWAPPED_BYTES: Final = 512
"""Storages below this stay on the device in mode SWAP."""


class DType(StrEnum):
    """Element types of parameters and compute, by their torch names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """The type that people call so: ``bf16``, ``fp32``, ``half``, ``torch.float16``, in any case."""
        if not isinstance(value, str):
            return None
        name = value.strip().casefold().removeprefix("torch.")
        return cls._value2member_map_.get(_USUAL_NAMES.get(name, name))  # type: ignore[return-value]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_USUAL_NAMES: Final = {
    "bf16": "bfloat16",
    "double": "float64",
    "f16": "float16",
    "f32": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
    "single": "float32",
}

_ITEM_BYTES: Final[dict[DType, int]] = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class DTypeOrigin(StrEnum):
    """Who chose the element type of the weights."""

    ASKED = "asked"
    """The user, by ``--dtype``."""
    PUBLISHED = "published"
    """Whoever published the model."""
    DEVICE = "device"
    """The device: another one than published, which its matrix units compute in."""


class OperationClass(StrEnum):
    """Operations whose cost follows the same law."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORMALIZATION = "normalization"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    EMBEDDING = "embedding"


class Operation(FrozenModel):
    """Operations of one kind and size within a phase."""

    name: str
    """The ATen operator."""
    operation_class: OperationClass
    dtype: DType
    flops: NonNegativeInt
    """Floating-point operations of one call (a multiply-add is two)."""
    bytes_moved: Bytes
    """Bytes read plus bytes written by one call, each tensor once."""
    count: PositiveInt = 1
    shape: tuple[NonNegativeInt, ...] = ()
    """Of a matrix product (batch, m, n, k): batch products of m x k by k x n; of attention (batch * heads, queries,
    keys, width of a head); () where it is not known or does not matter."""


class Phase(FrozenModel):
    """One stretch of the compute lane: its operations, its memory, and its seconds where they were measured."""

    operations: tuple[Operation, ...] = ()
    net_bytes: SignedBytes = 0
    """Device bytes alive at its end minus at its start, its parameters' gradients included."""
    gradient_bytes: Bytes | None = None
    """Of these, gradients of parameters that had none before; 0: none, as of a block under ``torch.no_grad()``; None:
    the phase does not say, and a block's backward is taken to leave gradients of all its trainable parameters.  Where
    they have some already, a backward adds to them and leaves so much less behind."""
    curve: tuple[tuple[Annotated[float, Field(gt=0, le=1)], SignedBytes], ...] = ()
    """Highest level, relative to the start, within consecutive stretches: (end of stretch as a fraction of the
    phase's time, bytes).  Ascending, the last fraction is 1; empty for an empty phase."""
    adding_curve: tuple[tuple[Annotated[float, Field(gt=0, le=1)], SignedBytes], ...] = ()
    """``curve`` where all of ``gradient_bytes`` are added to gradients that are there already: each goes as soon as it
    is final.  Empty where there are none, or where they are not known."""
    looked_up_bytes: Bytes = 0
    """Rows of embeddings that it looks up on the host and copies to the device; beside ``measured_s``."""
    measured_s: NonNegativeFloat | None = None
    """Median seconds on ``Workload.measured_on``, alone on the machine."""

    @property
    def adding(self) -> Phase:
        """The phase as it is in a later micro-batch, if all its gradients are added to those of the first.

        Without ``adding_curve``, its levels are those of the first: an upper bound.
        """
        return self._adding if self.stated_gradient_bytes else self

    @property
    def stated_gradient_bytes(self) -> int:
        """``gradient_bytes``, of a phase outside the blocks above all; 0 where the phase does not say."""
        return self.gradient_bytes or 0

    @cached_property
    def _adding(self) -> Phase:
        # Made anew: a copy would take along what is cached here.
        return Phase(
            operations=self.operations,
            net_bytes=self.net_bytes - self.stated_gradient_bytes,
            gradient_bytes=0,
            curve=self.adding_curve or self.curve,
            looked_up_bytes=self.looked_up_bytes,
            measured_s=self.measured_s,
        )

    def with_more_gradients(self, size_bytes: int) -> Phase:
        """The phase if so many more of the bytes that it leaves are final gradients.

        One that does not say how many are leaves all that there may be.
        """
        if self.gradient_bytes is None:
            return self
        # Made anew: a copy would take along what is cached here.
        fields = {name: getattr(self, name) for name in Phase.model_fields}
        return Phase(**{**fields, "gradient_bytes": self.gradient_bytes + size_bytes})

    def with_shared(self, *, held_bytes: int = 0, freed_bytes: int = 0) -> Phase:
        """The phase where it does not let go of ``held_bytes`` of shared inputs, or does of ``freed_bytes``.

        The first are there all the time; the last go at its end.  See [Note: Shared inputs] in ``shared_inputs.py``.
        """
        if not held_bytes and not freed_bytes:
            return self
        key = (held_bytes, freed_bytes)
        if key not in self._with_shared:
            self._with_shared[key] = Phase(
                operations=self.operations,
                net_bytes=self.net_bytes + held_bytes - freed_bytes,
                gradient_bytes=self.gradient_bytes,
                curve=tuple((end, level + held_bytes) for end, level in self.curve),
                adding_curve=tuple((end, level + held_bytes) for end, level in self.adding_curve),
                looked_up_bytes=self.looked_up_bytes,
                measured_s=self.measured_s,
            )
        return self._with_shared[key]

    @cached_property
    def _with_shared(self) -> dict[tuple[int, int], Phase]:
        """Each made once: costs know phases by their identity."""
        return {}

    @cached_property
    def peak_bytes(self) -> int:
        """Highest level within the phase above the level at its start, both of its ends included; at least 0."""
        return max(0, self.net_bytes, *(level for _, level in self.curve))

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the whole phase."""
        return sum(op.flops * op.count for op in self.operations)

    @model_validator(mode="after")
    def _curve_ascends(self) -> Self:
        for name in ("curve", "adding_curve"):
            ends = [end for end, _ in getattr(self, name)]
            if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
                raise ValueError(f"{name} fractions must ascend strictly and end at 1")
        return self


class BlockProfile(FrozenModel):
    """What a block does in either activation mode; equal blocks share one profile."""

    output_bytes: Bytes
    """Bytes of the block's output that outlive its forward as the next block's input."""
    forward: Phase
    """Forward in mode KEEP."""
    backward: Phase
    """Backward in mode KEEP."""
    checkpoint_forward: Phase
    """Forward in mode CHECKPOINT: nothing but the output outlives it."""
    recompute: Phase
    """The forward again, within backward, up to the last tensor that backward needs."""
    checkpoint_backward: Phase
    """Backward proper after the recomputation."""
    swappable_bytes: Bytes = 0
    """Of what ``forward`` saves, the bytes that mode SWAP moves: made by the block itself, no part of its output, and
    not tiny."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases, of both modes."""
        return (self.forward, self.backward, self.checkpoint_forward, self.recompute, self.checkpoint_backward)

    def forward_in(self, mode: ActivationMode) -> Phase:
        """The forward phase of a block in ``mode``."""
        return self.checkpoint_forward if mode is ActivationMode.CHECKPOINT else self.forward

    def backward_in(self, mode: ActivationMode) -> Phase:
        """The backward phase of a block in ``mode``, without recomputation."""
        return self.checkpoint_backward if mode is ActivationMode.CHECKPOINT else self.backward


class Uses(FrozenModel):
    """The sections that use a parameter, in the order of forward.

    A section begins where the model announces it and ends where the next one does: what the model does between two
    blocks belongs to the first of them.
    """

    forward: tuple[NonNegativeInt | OuterSection, ...] = Field(min_length=1)
    """Those whose forward reads it; of a parameter that nobody was seen to read, the one beside which it stands."""
    backward: tuple[NonNegativeInt | OuterSection, ...]
    """Those whose backward reads it, recomputation included.  The lookup of an embedding needs no weights there."""
    gradient: NonNegativeInt | OuterSection
    """The one whose backward is the last that adds to its gradient, or that reads it: from its end on it may be
    stepped."""

    @model_validator(mode="after")
    def _is_stepped_last(self) -> Self:
        first = min((in_forward_order(section) for section in self.backward), default=inf)
        if in_forward_order(self.gradient) > first:
            raise ValueError(f"its gradient is final in {self.gradient}, but a backward after that one reads it")
        return self


def in_forward_order(section: int | OuterSection) -> float:
    """A key that sorts sections in the order of forward."""
    if isinstance(section, OuterSection):
        return -1 if section is OuterSection.PROLOGUE else inf
    return section


class Parameter(FrozenModel):
    """One parameter tensor; tied names are listed once."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    dtype: DType
    trainable: bool = True
    block: NonNegativeInt | None = None
    """Index of the block that alone uses it; None for all others."""
    uses: Uses | None = None
    """Who uses a parameter without a block; None if nobody knows: then both parts outside the blocks are taken to read
    it, in forward and backward, and the first of them to add to its gradient."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor."""

    @cached_property
    def num_elements(self) -> int:
        """Number of scalars."""
        return prod(self.shape)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return self.num_elements * self.dtype.item_bytes


class Block(FrozenModel):
    """One transformer layer, in execution order."""

    name: str
    """Dotted module path."""
    profile: NonNegativeInt
    """Index into ``Workload.profiles``."""


class LookedUpTable(FrozenModel):
    """An embedding of which the prologue's forward reads nothing but rows."""

    parameter: NonNegativeInt
    """Index into ``Workload.parameters``."""
    num_rows: PositiveInt
    """Rows that one forward looks up, those that occur several times counted as often."""


class RowLookups(FrozenModel):
    """What the prologue does where it looks the rows of all its embeddings up on the host (``Plan.looks_up_rows``)."""

    tables: tuple[LookedUpTable, ...] = Field(min_length=1)
    prologue_forward: Phase
    prologue_backward: Phase
    """It leaves gradients of rows, each lookup's in a tensor of its own, in place of gradients of tables."""


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
    row_lookups: RowLookups | None = None
    """Embeddings whose rows the prologue may look up on the host; None where there are none, or nobody knows."""
    resident_bytes: Bytes = 0
    """Device bytes alive all the time besides parameters, gradients and optimizer state: module buffers, the batch, and
    whatever else lives on from one iteration to the next."""
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

    def _check_uses(self, name: str, block: int | None, uses: Uses) -> None:
        if block is not None:
            raise ValueError(f"parameter {name} has block {block}, which alone uses it, and names other uses")
        for section in (*uses.forward, *uses.backward, uses.gradient):
            if isinstance(section, int) and section >= len(self.blocks):
                raise ValueError(f"parameter {name} is used by block {section} of {len(self.blocks)}")

    @cached_property
    def identity(self) -> str:
        """Hash of what a plan depends on: model, batch shapes, parameters and who uses them; not of any timing."""
        facts = [
            self.model_hash,
            sorted((name, list(shape)) for name, shape in self.batch_shapes.items()),
            [
                [p.name, list(p.shape), p.dtype, p.trainable, p.block, p.uses and p.uses.model_dump(mode="json")]
                for p in self.parameters
            ],
            [block.name for block in self.blocks],
        ]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def profile_of(self, block: int) -> BlockProfile:
        """The profile of block ``block``."""
        return self.profiles[self.blocks[block].profile]

    @cached_property
    def num_parameters(self) -> int:
        """Scalars in all parameters, tied ones once."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @cached_property
    def is_measured(self) -> bool:
        """Whether every block phase carries measured seconds."""
        return all(phase.measured_s is not None for profile in self.profiles for phase in profile.phases)


def check_plan(plan: Plan, workload: Workload) -> None:
    """Raise PlanError if ``plan`` was made for another workload."""
    if plan.workload_id != workload.identity:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in workload.batch_shapes.items())
        raise PlanError(
            f"the plan belongs to workload {plan.workload_id}, not to {workload.identity} "
            f"({workload.model_name}, {shapes}, {workload.compute_dtype}). Search a plan for this one, or name the "
            f"element type that the plan was made for (--dtype)."
        )
