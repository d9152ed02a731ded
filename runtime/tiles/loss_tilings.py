"""Traces of one model with its loss in several numbers of tiles, as one workload."""

from __future__ import annotations

from collections.abc import Mapping

from ...shared.phases.tiling import LossTiling
from ...shared.schema.workload import Workload


def with_loss_tilings(workload: Workload, traced: Mapping[int, Workload]) -> Workload:
    """``workload`` that knows what its epilogue does in each number of tiles, as ``traced`` by that number.

    Blocks, prologue and who uses which parameter are those of ``workload``: tiles read no weight that a whole loss
    leaves alone.
    """
    if not traced:
        return workload
    tilings = tuple(
        LossTiling(loss_tiles=tiles, epilogue_forward=found.epilogue_forward, epilogue_backward=found.epilogue_backward)
        for tiles, found in sorted(traced.items())
    )
    return Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | {"loss_tilings": tilings})
