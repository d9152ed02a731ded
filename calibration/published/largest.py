"""The largest models that others trained: R4 over the depth of a Llama of fixed width, all beside the catalogue's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...shared.answers.advice import PublishedLargest
from ...shared.basics.progress import OnProgress, no_progress
from ...shared.catalogue.machines import machine
from ...shared.schema.hardware import Hardware
from ...shared.schema.workload import Workload
from ...sim.questions.largest import (
    LargestRequest,
    least_host_memory_bytes,
    nearest_model,
    trained,
    with_host_memory,
)
from .runs import LARGEST_ON_24_GB, LARGEST_ON_80_GB, Prediction, Quantity

_TRACED_BLOCKS: Final = 5
_LEAST_BYTES: Final = 12
"""What every parameter takes on device and host together at least: master and moments in float32."""
_WIDTH: Final = 8192
_GIB: Final = 2**30
_HOSTS: Final = {
    LARGEST_ON_24_GB: ("rtx-3090", (256 * _GIB, 512 * _GIB, 1024 * _GIB)),
    LARGEST_ON_80_GB: ("a100-80gb", (512 * _GIB, 1024 * _GIB, 2048 * _GIB)),
}
"""The device, and host memories from small to large: what one socket takes with modules of 32, 64 and 128 GiB in eight
channels, and twice that in a DGX A100, whose data sheet has 1 TB and 2 TB."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The largest model that a system was published to train on one device."""

    system: str
    source: str
    hardware_name: str
    """The catalogue's nearest machine."""
    num_parameters: int
    host_memory_bytes: int | None
    """None where it is not known."""


CLAIMS: Final = (
    Claim(
        system="ProTrain",
        source="arXiv 2406.08334, mixed precision, Adam",
        hardware_name="rtx-3090",
        num_parameters=34 * 10**9,
        host_memory_bytes=None,
    ),
    Claim(
        system="ProTrain",
        source="arXiv 2406.08334, mixed precision, Adam",
        hardware_name="a100-80gb",
        num_parameters=75 * 10**9,
        host_memory_bytes=None,
    ),
    Claim(
        system="SlideFormer",
        source="arXiv 2603.16428, abstract: models of 123 B and more on one RTX 4090",
        hardware_name="rtx-4090",
        num_parameters=123 * 10**9,
        host_memory_bytes=None,
    ),
    Claim(
        system="MegaTrain",
        source="arXiv 2604.05091, abstract: up to 120 B on one H200 with 1.5 TB of host memory",
        hardware_name="h200-141gb",
        num_parameters=120 * 10**9,
        host_memory_bytes=1_500_000_000_000,
    ),
)
"""What the machines besides their device were is not known; the catalogue's stand for them."""


def largest_predictions() -> list[Prediction]:
    """Parameters of the deepest model that fits, by host memory."""
    from .workloads import dense_workload, llama  # traces, with torch

    step = LargestRequest(batch_size=1, sequence_length=1024)
    shape = llama(_WIDTH, _TRACED_BLOCKS, _WIDTH // 128, 8 * _WIDTH // 3)
    workload = dense_workload(
        shape, "llama-of-any-depth", batch_size=step.batch_size, sequence_length=step.sequence_length
    )
    found = []
    for case, (name, memories) in _HOSTS.items():
        largest = [_deepest(step, workload, with_host_memory(machine(name), memory_bytes)) for memory_bytes in memories]
        hosts = ", ".join(f"{memory_bytes // _GIB} GiB" for memory_bytes in memories)
        how = (
            f"hosts of {hosts}, which limit it; a Llama {_WIDTH} wide, 1 sequence of 1 024 tokens, every block "
            f"checkpointed; bfloat16 with float32 masters and moments, 16 bytes a parameter"
        )
        found.append(Prediction.of(case=case, row="R4", quantity=Quantity.LARGEST, readings=largest, how=how))
    return found


def _deepest(step: LargestRequest, workload: Workload, hardware: Hardware) -> int:
    """Parameters of the deepest model that fits; bisected, since memory grows with every block."""
    from .workloads import with_depth

    fits, fails = _TRACED_BLOCKS, _TRACED_BLOCKS + _least_too_many(workload, hardware)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if step.fits(with_depth(workload, middle), hardware) else (fits, middle)
    return with_depth(workload, fits).num_parameters


def _least_too_many(workload: Workload, hardware: Hardware) -> int:
    """Blocks that fit under no plan: their optimizer state alone exceeds both memories."""
    scalars = sum(parameter.num_elements for parameter in workload.parameters if parameter.block == 0)
    return (hardware.device.memory_bytes + hardware.host.memory_bytes) // (_LEAST_BYTES * scalars) + 1


def published_largest(request: LargestRequest, on_progress: OnProgress = no_progress) -> tuple[PublishedLargest, ...]:
    """Every claim beside the model of the catalogue that is nearest in size, on a host that is enough for it.

    ``request``: the step.  Raises what ``search`` raises.
    """
    found = []
    for done, claim in enumerate(CLAIMS):
        on_progress(done, len(CLAIMS))
        hardware = machine(claim.hardware_name)
        workload = nearest_model(request, claim.num_parameters, hardware.device)
        least_bytes = least_host_memory_bytes(request, workload, hardware)
        answer = None
        if least_bytes is not None:
            memory_bytes = max(least_bytes, claim.host_memory_bytes or 0)
            answer = trained(request, workload, with_host_memory(hardware, memory_bytes))
        found.append(
            PublishedLargest(
                system=claim.system,
                source=claim.source,
                hardware_name=claim.hardware_name,
                host_memory_bytes=claim.host_memory_bytes,
                num_parameters=claim.num_parameters,
                model=workload.model_name,
                least_host_memory_bytes=least_bytes,
                found=answer,
            )
        )
    return tuple(found)
