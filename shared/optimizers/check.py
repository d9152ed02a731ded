"""Which optimizer may step what: refused by name, whatever library is there."""

from __future__ import annotations

from collections.abc import Sequence

from ..basics.errors import PlanError
from ..schema.optimizer import HostGradients, Optimizer
from ..schema.workload import DType, Parameter
from .state import summed_dtype


def check_optimizer(optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
    """Raise PlanError if ``optimizer`` cannot step these parameters."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    if optimizer is Optimizer.ADAMW_BF16 and trained and all(p.dtype is not DType.BFLOAT16 for p in trained):
        dtypes = " and ".join(sorted({parameter.dtype for parameter in trained}))
        raise PlanError(
            f"the optimizer {optimizer} keeps bfloat16 moments of bfloat16 weights, but all {len(trained)} trained "
            f"parameters are {dtypes}. Choose adamw, or train in bfloat16 (--dtype bfloat16)."
        )
    for parameter in trained:
        if optimizer is Optimizer.ADAFACTOR and not parameter.num_elements:
            raise PlanError(
                f"the optimizer {optimizer} divides by the size of a parameter, and {parameter.name} is empty. Freeze "
                f"it, or choose adamw."
            )
    if optimizer.is_of_bitsandbytes:
        for parameter in trained:
            if parameter.dtype is DType.FLOAT64:
                raise PlanError(
                    f"the optimizer {optimizer} steps float32 at most, but parameter {parameter.name} is float64. "
                    f"Choose adamw, or train in float32."
                )


def check_host_gradients(host_gradients: HostGradients, parameters: Sequence[Parameter]) -> None:
    """Raise PlanError if ``host_gradients`` says nothing about these parameters."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    if host_gradients is HostGradients.PARAMETERS or any(summed_dtype(p.dtype) is not p.dtype for p in trained):
        return
    dtypes = " and ".join(sorted({parameter.dtype for parameter in trained})) or "of no type"
    raise PlanError(
        f"host gradients of {host_gradients} say nothing here: all {len(trained)} trained parameters are {dtypes}, and "
        f"the host adds their gradients up in that type already. Leave --host-gradients out, or train in bfloat16 "
        f"(--dtype bfloat16)."
    )
