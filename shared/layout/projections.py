"""What projections of gradients and parameters do ([Note: Subspaces] in ``shared/phases/subspaces.py``).

[Note: Projections]
Subspaces are projected one after the other, each in float32, or in a wider type that either matrix is stored in.
First come the coefficients, k x r: of columns the frozen matrix transposed times the trained one; then the frozen
matrix times the coefficients is subtracted in place.  With vectors of length n that is 4 n k r FLOPs.  Of rows the same
holds, transposed.

A matrix that is stored in a narrower type is widened whole before, and a trained one rounded back behind.  A parameter
with a float32 master (``shared/optimizers/state.py``) needs no widening: the master is projected, and rounded into the
parameter.  So a projection makes, and frees, the coefficients, the frozen matrix if it is narrower, and the trained one
if it is narrower and has no master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..optimizers.state import master_bytes, summed_dtype
from ..schema.optimizer import Optimizer
from ..schema.workload import DType, Parameter, Subspace, SubspaceAxis
from .layout import Chunk

_PASSES = 3
"""Over the trained matrix: it is read for the coefficients, read and written when they are subtracted."""


@dataclass(frozen=True, slots=True)
class ProjectionWork:
    """What the projections of one chunk do, one after the other."""

    flops: int = 0
    touched_bytes: int = 0
    """Memory traffic: operands of both products, and what is widened and rounded."""
    num_projected: int = 0
    """Scalars of the trained matrices."""
    num_tensors: int = 0
    """Trained matrices."""
    peak_bytes: int = 0
    """The most that one of them makes on the way."""


def gradient_projections(chunk: Chunk, parameters: Sequence[Parameter], *, widens: bool = False) -> ProjectionWork:
    """Projections of the gradients of ``chunk``; ``widens``: these are added up in float32 at least."""
    return _together(
        [
            projection(subspace, parameters, _summed(parameters[subspace.trained].dtype, widens=widens))
            for subspace in chunk.subspaces
        ]
    )


def parameter_projections(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> ProjectionWork:
    """Projections of the parameters of ``chunk``, or of their masters."""
    return _together(
        [
            projection(
                subspace,
                parameters,
                parameters[subspace.trained].dtype,
                has_master=master_bytes(parameters[subspace.trained].dtype, optimizer) > 0,
            )
            for subspace in chunk.subspaces
        ]
    )


def _summed(dtype: DType, *, widens: bool) -> DType:
    return summed_dtype(dtype) if widens else dtype


def _together(works: Sequence[ProjectionWork]) -> ProjectionWork:
    return ProjectionWork(
        flops=sum(work.flops for work in works),
        touched_bytes=sum(work.touched_bytes for work in works),
        num_projected=sum(work.num_projected for work in works),
        num_tensors=sum(work.num_tensors for work in works),
        peak_bytes=max((work.peak_bytes for work in works), default=0),
    )


def projection(
    subspace: Subspace, parameters: Sequence[Parameter], stored: DType, *, has_master: bool = False
) -> ProjectionWork:
    """One projection of what is stored as ``stored``; see [Note: Projections]."""
    frozen, trained = parameters[subspace.frozen], parameters[subspace.trained]
    along, across = (0, 1) if subspace.axis is SubspaceAxis.COLUMNS else (1, 0)
    length, num_frozen, num_trained = frozen.shape[along], frozen.shape[across], trained.shape[across]
    item_bytes = max(summed_dtype(frozen.dtype).item_bytes, summed_dtype(stored).item_bytes)
    frozen_bytes, trained_bytes = frozen.num_elements * item_bytes, trained.num_elements * item_bytes
    coefficient_bytes = num_frozen * num_trained * item_bytes
    touched = 2 * frozen_bytes + _PASSES * trained_bytes + 2 * coefficient_bytes
    peak = coefficient_bytes
    if frozen.dtype.item_bytes < item_bytes:
        touched += frozen.size_bytes + frozen_bytes
        peak += frozen_bytes
    if stored.item_bytes < item_bytes:
        narrow_bytes = trained.num_elements * stored.item_bytes
        touched += narrow_bytes + trained_bytes
        if not has_master:
            touched += narrow_bytes + trained_bytes
            peak += trained_bytes
    return ProjectionWork(
        flops=4 * length * num_frozen * num_trained,
        touched_bytes=touched,
        num_projected=trained.num_elements,
        num_tensors=1,
        peak_bytes=peak,
    )
