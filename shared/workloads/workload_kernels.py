"""Whether a workload was traced with the kernels of the device that it is asked about."""

from __future__ import annotations

from typing import Final

from ..basics.errors import WorkloadError
from ..schema.hardware import DeviceKind, Hardware
from ..schema.workload import Workload

_FUSED_ATTENTION: Final = "_scaled_dot_product_flash_attention"


def has_fused_dropout(workload: Workload) -> bool:
    """Whether attention with dropout was traced as CUDA runs it, without a machine at hand.

    The CPU has no fused kernel with dropout, and saves the probabilities (``runtime/tracing/fake_kernels.py``).
    """
    return workload.traced_with == "fake" and any(
        operation.name == _FUSED_ATTENTION for profile in workload.profiles for operation in profile.forward.operations
    )


def check_kernels(workload: Workload, hardware: Hardware) -> None:
    """Raise WorkloadError if ``workload`` was traced with kernels that ``hardware`` does not have."""
    if hardware.device.kind is DeviceKind.CPU and has_fused_dropout(workload):
        raise WorkloadError(
            f"{workload.model_name} has dropout in attention, which its workload holds as GPUs run it: fused, with "
            f"nothing of the probabilities saved. On a CPU such as that of {hardware.name} torch has no such kernel. "
            f"Name the model instead of its workload, or trace it there (protwin trace --real, protwin calibrate)."
        )
