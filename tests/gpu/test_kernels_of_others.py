"""Kernels that others wrote for GPUs compose with a plan: Liger's layers and losses, bitsandbytes' packed bases."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.shared.schema.workload import Workload
from tests.gpu.subject import (
    CHECKPOINT,
    DEVICE,
    KEEP,
    SWAP,
    carried_out,
    differing,
    offloaded_names,
    on_device,
    plan_of,
    train_plainly,
)
from tests.runtime.models import Case, llama, token_batches

pytestmark = pytest.mark.gpu

PLANS: dict[str, dict[str, Any]] = {
    "kept, offloaded": {"modes": [KEEP]},
    "all modes, half persistent": {"modes": [SWAP, CHECKPOINT, KEEP], "persistent": 0.5},
    "all modes, two micro-batches": {"modes": [SWAP, CHECKPOINT, KEEP], "persistent": 0.3, "micro_batches": 2},
}


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 3}
"""Kernels of both libraries want multiples of 64."""


class CaseOnDevice(Case):
    """A case whose kernels run on the GPU alone, so that it is traced there."""

    @cached_property
    def workload(self) -> Workload:
        """The model, traced on the device."""
        return trace(self.build().to(DEVICE), on_device(self.batches[0]), repeats=1)


def check(case: Case, plan_name: str) -> None:
    plan = plan_of(case, **PLANS[plan_name])
    plain = train_plainly(case, on_host=offloaded_names(case, plan), micro_batches=plan.micro_batches)
    run, training = carried_out(case, plan)
    assert run.losses == plain.losses
    assert differing(run.weights[0], plain.weights[-1]) == []
    assert min(training.bytes_host_to_device, training.bytes_device_to_host) > 0


def liger_llama(*, fuses_the_head: bool, dtype: torch.dtype) -> nn.Module:
    patches = pytest.importorskip("liger_kernel.transformers")
    how = {"cross_entropy": False, "fused_linear_cross_entropy": fuses_the_head}
    # Classes of transformers are replaced for good, so that every model is made of the same.
    patches.apply_liger_kernel_to_llama(**how)
    model = llama(**WIDE).to(dtype)
    patches.apply_liger_kernel_to_llama(model=model, **how)
    return model


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuses_the_head", [False, True])
def test_ligers_kernels_train_by_a_plan_to_the_bits_of_the_plain_loop(
    fuses_the_head: bool, dtype: torch.dtype, plan_name: str
) -> None:
    build = partial(liger_llama, fuses_the_head=fuses_the_head, dtype=dtype)
    check(CaseOnDevice(build, token_batches(4)), plan_name)


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("how", [{"kind": "nf4"}, {"kind": "nf4", "double": True, "dtype": torch.bfloat16}])
def test_a_packed_base_that_is_offloaded_trains_adapters_to_the_bits_of_the_resident_one(
    how: dict[str, Any], plan_name: str
) -> None:
    check_packed(plan_name, **how)


def check_packed(plan_name: str, **how: Any) -> None:
    for library in ("bitsandbytes", "peft"):
        pytest.importorskip(library)
    from tests.runtime.quantized.models import qlora

    shape = {key: value for key, value in WIDE.items() if key != "num_layers"}
    check(CaseOnDevice(partial(qlora, shape=shape, **how), token_batches(4, batch=4, length=16)), plan_name)
