"""Phases: stretches of the compute lane that the schedule knows as one task each."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..basics.documents import FrozenModel
from .operations import Bytes, Operation, SignedBytes

Curve = tuple[tuple[Annotated[float, Field(gt=0, le=1)], SignedBytes], ...]
"""Highest levels within consecutive stretches: (end of stretch as a fraction of the phase's time, bytes)."""


class Phase(FrozenModel):
    """One stretch of the compute lane: its operations, its memory, and its seconds where they were measured."""

    operations: tuple[Operation, ...] = ()
    net_bytes: SignedBytes = 0
    """Device bytes alive at its end minus at its start, its parameters' gradients included."""
    gradient_bytes: Bytes | None = None
    """Of these, gradients of parameters that had none before; 0: none, as of a block under ``torch.no_grad()``; None:
    the phase does not say, and a block's backward is taken to leave gradients of all its trainable parameters.  Where
    they have some already, a backward adds to them and leaves so much less behind."""
    curve: Curve = ()
    """Highest level, relative to the start, within consecutive stretches: (end of stretch as a fraction of the
    phase's time, bytes).  Ascending, the last fraction is 1; empty for an empty phase."""
    adding_curve: Curve = ()
    """``curve`` where all of ``gradient_bytes`` are added to gradients that are there already: each goes as soon as it
    is final.  Empty where there are none, or where they are not known."""
    changes: tuple[SignedBytes, ...] = ()
    """Within the phase, in order: the bytes of each tensor that an operation makes, and, negative, the bytes that went
    between two operations.  They give the levels of ``curve``, and lower ones.  Empty where tensors are not known."""
    staying_tensors: tuple[NonNegativeInt, ...] = ()
    """Of the tensors made in ``changes``, counted from 0, those that are known to stay: gradients that are final, and
    results that a derivative reads.  Ascending."""
    adding_changes: tuple[SignedBytes, ...] = ()
    """``changes`` where gradients are added to others, as ``adding_curve``."""
    exchanges: tuple[Bytes, ...] = ()
    """For each all-to-all among the ranks that share a sequence, in order: the bytes that this rank gives into it, its
    own part included.  Beside ``measured_s``.  A file has the field where there are any."""
    looked_up_bytes: Bytes = 0
    """Rows of embeddings that it looks up on the host and copies to the device; beside ``measured_s``."""
    num_graphs: NonNegativeInt | None = None
    """Compiled graphs that begin with it, 0 within one; None: its operations are dispatched one by one.  A file has
    the field where it is compiled."""
    measured_s: NonNegativeFloat | None = None
    """Median seconds on ``Workload.measured_on``, alone on the machine."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        for name in ("changes", "staying_tensors", "adding_changes", "exchanges"):
            if not getattr(self, name):
                fields.pop(name, None)
        if self.num_graphs is None:
            fields.pop("num_graphs", None)
        return fields

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
            changes=self.adding_changes if self.adding_curve else self.changes,
            staying_tensors=() if self.adding_curve else self.staying_tensors,
            exchanges=self.exchanges,
            looked_up_bytes=self.looked_up_bytes,
            num_graphs=self.num_graphs,
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
            changes, more_bytes = _holding(self.changes, held_bytes)
            self._with_shared[key] = Phase(
                operations=self.operations,
                net_bytes=self.net_bytes + held_bytes - freed_bytes,
                gradient_bytes=self.gradient_bytes,
                curve=tuple((end, level + held_bytes) for end, level in self.curve),
                adding_curve=tuple((end, level + held_bytes) for end, level in self.adding_curve),
                changes=changes,
                staying_tensors=tuple(n + bool(more_bytes) for n in self.staying_tensors),
                adding_changes=_holding(self.adding_changes, held_bytes)[0],
                exchanges=self.exchanges,
                looked_up_bytes=self.looked_up_bytes,
                num_graphs=self.num_graphs,
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


def _holding(changes: tuple[int, ...], held_bytes: int) -> tuple[tuple[int, ...], int]:
    """``changes`` that do not let go of so many bytes, and how many of these no fall has: they come first, as a rise.

    The fall that has just these bytes, or the first ones.
    """
    if not changes or not held_bytes:
        return changes, 0
    if -held_bytes in changes:
        place = changes.index(-held_bytes)
        return changes[:place] + changes[place + 1 :], 0
    found: list[int] = []
    for change in changes:
        kept = min(held_bytes, max(0, -change))
        held_bytes -= kept
        if change + kept:
            found.append(change + kept)
    return ((held_bytes, *found) if held_bytes else tuple(found)), held_bytes


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
