"""Whether the figures of a workload are of this world: sums of larger ones overflow what numpy computes with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.units import format_bytes
from ..schema.workload import Phase, Workload

_MOST_BYTES: Final = 2**56
"""64 PiB in one iteration of one device, some thousand times what the largest models have."""
_MOST_FLOPS: Final = 2**100
_PASSES: Final = 2**10
"""Operations read and write the same data many times over."""


def check_magnitude(workload: Workload) -> None:
    """Raise WorkloadError if parameters and activations together, or the arithmetic, exceed what any machine does."""
    total_bytes = workload.resident_bytes + sum(parameter.size_bytes for parameter in workload.parameters)
    total_bytes += sum(workload.profile_of(block).output_bytes for block in range(workload.num_blocks))
    total_bytes += sum(shared.size_bytes for shared in workload.shared_inputs)
    flops = 0
    for phase in _phases(workload):
        moved_bytes = sum(operation.bytes_moved * operation.count for operation in phase.operations)
        levels_bytes = abs(phase.net_bytes) + phase.stated_gradient_bytes + max(0, phase.peak_bytes)
        total_bytes += levels_bytes + moved_bytes // _PASSES
        flops += phase.flops
    if total_bytes > _MOST_BYTES or flops > _MOST_FLOPS:
        raise WorkloadError(
            f"{workload.model_name} has {format_bytes(min(total_bytes, 2**90))} of data and {min(flops, 2**110):.3g} "
            f"FLOP in one iteration, more than any machine; at most {format_bytes(_MOST_BYTES)} and "
            f"{_MOST_FLOPS:.3g} are searched. The workload is damaged or its batch too large: trace the model again."
        )


def _phases(workload: Workload) -> Iterator[Phase]:
    """Every phase of every block, as often as it runs."""
    yield from (
        workload.prologue_forward,
        workload.epilogue_forward,
        workload.epilogue_backward,
        workload.prologue_backward,
    )
    for block in range(workload.num_blocks):
        yield from workload.profile_of(block).phases
