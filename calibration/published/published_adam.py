"""R5: CPU Adam from cores and memory bandwidth."""

from __future__ import annotations

from typing import Final

from ...shared.catalogue.parts import host_part
from ...shared.schema.hardware import Host
from ...sim.costs.efficiency import CORE_BYTES_PER_S
from ...sim.costs.task_costs import host_adam_bytes_per_s
from .published_prediction import Prediction
from .runs import ADAM_32_THREADS, ADAM_128_THREADS, ADAM_4210R, Quantity

FUSED_BYTES: Final = 28
"""Of one scalar: parameter, gradient and two moments are read, all but the gradient written, in float32."""
LOOPED_BYTES: Final = 80
"""Of one scalar where every step of the update is an operation of its own: decay 8, first moment 12, second moment 8
and 12, square root 8, bias correction 8, epsilon 8, update 16 (torch.optim.AdamW without fused)."""
THREADS_PER_CORE: Final = 2

_LLAMA_2_7B: Final = 6_738_415_616
_XEON_4210R: Final = Host(
    name="Xeon 4210R",
    num_cores=10,
    memory_bytes=2**38,
    memory_bandwidth_bytes_per_s=92e9,
    source="Intel ARK: 10 cores, six channels of DDR4-2400 (115.2 GB/s); 80 % of the peak",
)


def adam_predictions() -> list[Prediction]:
    """Fused and on all cores; the range reaches to a loop of separate operations on one core."""
    wide = host_part("epyc-64")
    narrow = wide.model_copy(update={"num_cores": 32 // THREADS_PER_CORE})
    cases = (
        (ADAM_128_THREADS, _LLAMA_2_7B, wide, "64 cores with eight channels of DDR4"),
        (ADAM_32_THREADS, _LLAMA_2_7B, narrow, "16 cores with eight channels of DDR4"),
        (ADAM_4210R, 1_350_000_000, _XEON_4210R, "10 cores with six channels of DDR4"),
    )
    return [
        Prediction(
            row="R5",
            case=case,
            quantity=Quantity.ADAM,
            low=num_scalars * FUSED_BYTES / host.memory_bandwidth_bytes_per_s,
            likely=num_scalars * FUSED_BYTES / host_adam_bytes_per_s(host),
            high=num_scalars * LOOPED_BYTES / CORE_BYTES_PER_S,
            how=f"{what}; from all of the bandwidth, fused, to one core that runs each step on its own",
        )
        for case, num_scalars, host, what in cases
    ]
