"""What share of a machine's data-sheet figures each class of operations reaches, where the machine does not say.

A device's own ``efficiency`` replaces these.  They are properties of how such operations are built, not fits to one
machine or model; where several machines differ, the lower end of the usual range is taken.
"""

from __future__ import annotations

from typing import Final

from ..shared.hardware import Device, DeviceKind
from ..shared.workload import OperationClass

_CUDA: Final[dict[OperationClass, float]] = {
    # Large 16-bit products reach 70 to 85 % of the tensor cores' dense peak: the last wave of tiles leaves
    # multiprocessors idle, and power limits lower the clock under which the data sheet counts.
    OperationClass.MATMUL: 0.75,
    # FlashAttention-2 (arXiv 2307.08691, section 4.1): 50 to 73 % of the A100's peak forward, up to 63 % backward;
    # the softmax between the two products runs outside the matrix units.
    OperationClass.ATTENTION: 0.55,
    # Streams reach 85 to 92 % of the DRAM's peak (BabelStream, doi 10.1504/IJCSE.2018.095847); refreshes and turning
    # the bus round take the rest.  Normalizations and reductions wait for partial sums between their passes.
    OperationClass.ELEMENTWISE: 0.85,
    OperationClass.NORMALIZATION: 0.7,
    OperationClass.REDUCTION: 0.7,
    # Rows are fetched by index, and the backward adds into them with atomics.
    OperationClass.EMBEDDING: 0.5,
}
_CPU: Final[dict[OperationClass, float]] = {
    # A blocked product keeps its fused multiply-add units fed except while it packs panels.
    OperationClass.MATMUL: 0.8,
    OperationClass.ATTENTION: 0.5,
    # A store to a line outside the cache reads the line first, a third stream that bytes_moved does not count.
    OperationClass.ELEMENTWISE: 0.7,
    OperationClass.NORMALIZATION: 0.6,
    OperationClass.REDUCTION: 0.6,
    OperationClass.EMBEDDING: 0.5,
}
CPU_ADAM_FRAC: Final = 0.7
"""Share of the host's memory bandwidth that fused CPU Adam reaches: a stream that reads before it writes, so nearly
all of its traffic is counted, less what hosts of several sockets lose between them."""
CORE_BYTES_PER_S: Final = 10e9
"""What one core draws from memory: about twelve outstanding lines of 64 bytes, some 75 ns each (Little's law)."""


def efficiency_frac(device: Device, operation_class: OperationClass) -> float:
    """Share of the roofline that operations of a class reach on ``device``, in (0, 1]."""
    stated = device.efficiency.get(operation_class)
    if stated is not None:
        return stated
    return (_CUDA if device.kind is DeviceKind.CUDA else _CPU)[operation_class]
