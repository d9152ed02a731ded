"""Subspaces that stay as they are: what orthogonal subspace fine-tuning (OSFT) trains is kept orthogonal to them.

[Note: Subspaces]
A weight W (n x m) is replaced by the factors of its singular value decomposition: frozen ones for the largest k
singular values, U_high (n x k), S_high (k), V_high (k x m), and trained ones for the others, U_low (n x r), S_low (r),
V_low (r x m), with k + r = min(n, m).  All six are parameters like any others.  Two pairs of them are subspaces: the
columns of U_low are kept orthogonal to those of U_high, the rows of V_low to those of V_high.  Gradients are projected
when they are complete, before their norm is taken and before the optimizer; parameters behind the optimizer, since
Adam's element-wise scaling leaves the subspace:

    dU -= U_high (U_high^T dU)        dV -= (dV V_high^T) V_high

and the same of U_low and V_low.  Where k is 0 nothing is frozen, and there is no subspace.
Source: orthogonal subspace fine-tuning, https://arxiv.org/abs/2504.07097.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from pydantic import NonNegativeInt

from ..basics.documents import FrozenModel


class SubspaceAxis(StrEnum):
    """Which vectors of two matrices are orthogonal to each other."""

    COLUMNS = "columns"
    """Frozen (n, k), trained (n, r): the left factors."""
    ROWS = "rows"
    """Frozen (k, m), trained (r, m): the right factors."""


class Subspace(FrozenModel):
    """A trained matrix that is kept orthogonal to a frozen one; see [Note: Subspaces]."""

    frozen: NonNegativeInt
    """Index into ``Workload.parameters``."""
    trained: NonNegativeInt
    """Index into ``Workload.parameters``."""
    axis: SubspaceAxis


class _Tensor(Protocol):
    """What a subspace asks of a parameter."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def block(self) -> int | None: ...
    @property
    def uses(self) -> object: ...


def why_no_subspaces(subspaces: Sequence[Subspace], parameters: Sequence[_Tensor]) -> str | None:
    """Why ``subspaces`` cannot be those of ``parameters``; None if they can."""
    trained: set[int] = set()
    for subspace in subspaces:
        if (number := max(subspace.frozen, subspace.trained)) >= len(parameters):
            return f"a subspace names parameter {number} of {len(parameters)}"
        if subspace.trained in trained:
            return f"{parameters[subspace.trained].name} is trained in two subspaces"
        trained.add(subspace.trained)
        if (
            reason := _why_no_pair(parameters[subspace.frozen], parameters[subspace.trained], subspace.axis)
        ) is not None:
            return reason
    return None


def _why_no_pair(frozen: _Tensor, trained: _Tensor, axis: SubspaceAxis) -> str | None:
    """Why ``trained`` cannot be kept orthogonal to ``frozen``; None if it can."""
    if frozen.trainable or not trained.trainable:
        return f"{frozen.name} is frozen and {trained.name} is trained in a subspace, but their trainability is another"
    for tensor in (frozen, trained):
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            return f"{tensor.name} of shape {list(tensor.shape)} is in a subspace, and is no matrix"
    along = 0 if axis is SubspaceAxis.COLUMNS else 1
    if frozen.shape[along] != trained.shape[along]:
        return (
            f"{axis} of {frozen.name} {list(frozen.shape)} and of {trained.name} {list(trained.shape)} have other "
            f"lengths, so that none are orthogonal"
        )
    if (frozen.block, frozen.uses) != (trained.block, trained.uses):
        return f"{frozen.name} and {trained.name} make a subspace, but other sections use them"
    return None
